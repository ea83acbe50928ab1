"""The small server with what tests of the client need: train jobs that "train", and faults of the network on demand.

with client_server(tmp_path) as server:
    server.faults.add("POST", "/api/train-jobs", "lose_answer")
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.small_registry import BASE_NAME, Reply, SmallJobs, SmallServer, small_server

from apprentice.core.client.backends import RemoteBackend
from apprentice.core.client.model import TrainableModel
from apprentice.core.client.transport import RetryPolicy
from apprentice.core.records import TrainResult, TrainStatus, new_id
from apprentice.core.wire import CheckpointInfo, GrpoJob, SftJob, TrainEvent, TrainJob

QUICK = RetryPolicy(first_seconds=0.01, longest_seconds=0.02)

Fault = Literal["refuse_503", "refuse_429", "lose_request", "lose_answer", "hold"]


class TrainingJobs(SmallJobs):
    """Jobs that move the policy by one step and change nothing else. `requests` are the distinct ones, in order."""

    def __init__(self, server: SmallServer) -> None:
        super().__init__(server.ledger)
        self._server = server
        self.requests: list[GrpoJob | SftJob] = []
        self.submissions = 0
        self.fail_with: str | None = None
        self.held = False
        self._released = asyncio.Event()

    async def submit(self, request: GrpoJob | SftJob, idempotency_key: str | None) -> TrainJob:
        self.submissions += 1
        now = time.time()
        new = TrainJob(
            id=new_id("job"), policy=request.policy, kind=request.kind, state="queued", phase="queued", created_at=now, updated_at=now
        )
        job = self._ledger.create_job(new, request.model_dump_json().encode(), idempotency_key)
        if job.id != new.id:
            return job
        self.requests.append(request)
        self._ledger.append_event(job.id, "phase", {"phase": "loading"})
        if self.held:
            return self._ledger.update_job(job.id, state="running", phase="loading")
        return await self.complete(job)

    async def complete(self, job: TrainJob) -> TrainJob:
        """Give the job its end."""
        versions = self._server.registry.versions
        before = versions[job.policy]
        failed = self.fail_with is not None
        step = before if failed else before + 1
        result = TrainResult(
            job_id=job.id,
            policy=job.policy,
            status=TrainStatus.failed if failed else TrainStatus.trained,
            reason=self.fail_with,
            previous_step=before,
            step=step,
            metrics={"loss": 1.0 / step, "tokens/trained": 100.0} if not failed else {},
        )
        if not failed:
            await self._server.registry.publish(job.policy, step)
            self._ledger.put_checkpoint(CheckpointInfo(policy=job.policy, step=step, path=f"/checkpoints/{step}", created_at=time.time()))
        ended = self._ledger.update_job(job.id, state="failed" if failed else "trained", phase="done", result=result)
        self._ledger.append_event(job.id, "end", {"state": ended.state})
        self._released.set()
        return ended

    async def events(self, job_id: str, after: int) -> AsyncIterator[TrainEvent]:
        while True:
            for event in self._ledger.events(job_id, after):
                after = event.seq
                yield event
                if event.kind == "end":
                    return
            await self._released.wait()


@dataclass
class Faults:
    """ASGI middleware: the next requests that match are harmed. Every request is noted in `seen` as `METHOD path`."""

    app: ASGIApp
    planned: list[tuple[str, re.Pattern[str], Fault]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    gather_first: int = 0
    """Hold requests until so many are open at once; then let all pass."""
    gathered: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, method: str, path: str, fault: Fault, times: int = 1) -> None:
        self.planned.extend((method, re.compile(path), fault) for _ in range(times))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.seen.append(f"{scope['method']} {scope['path']}")
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            if self.open_now >= self.gather_first:
                self.gathered.set()
            await self.gathered.wait()
            await self._answer(scope, receive, send)
        finally:
            self.open_now -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        for index, (method, path, fault) in enumerate(self.planned):
            if method == scope["method"] and path.fullmatch(scope["path"]):
                del self.planned[index]
                await self._harm(fault, scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _harm(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        if fault == "hold":  # neither handled nor answered while the client is there
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if fault in ("refuse_503", "refuse_429"):
            code = "server_unavailable" if fault == "refuse_503" else "queue_full"
            body = f'{{"error": {{"message": "too busy", "type": "server_error", "code": "{code}", "param": null}}}}'.encode()
            await send({"type": "http.response.start", "status": int(fault[-3:]), "headers": [(b"retry-after", b"0")]})
            await send({"type": "http.response.body", "body": body})
            return
        if fault == "lose_answer":

            async def nowhere(message: Message) -> None:
                pass

            await self.app(scope, receive, nowhere)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"{"})  # shorter than announced: the server cuts the connection


@dataclass
class ClientServer:
    """A running server and a way to make models on it."""

    server: SmallServer
    jobs: TrainingJobs
    faults: Faults

    @property
    def url(self) -> str:
        return self.server.url

    count: int = 0

    def fresh(self) -> ClientServer:
        """The same server for another test: another default policy, no jobs, no faults."""
        self.count += 1
        self.jobs = self.server.registry.jobs = TrainingJobs(self.server)
        self.faults.planned.clear()
        self.faults.seen.clear()
        self.faults.most_open = 0
        return self

    @property
    def name(self) -> str:
        return f"agent-{self.count}"

    async def model(self, name: str | None = None) -> TrainableModel:
        """A registered model of the project `mail`, with quick retries."""
        model = TrainableModel("mail", name or self.name, BASE_NAME)
        await model.register(RemoteBackend(self.url, retry=QUICK))
        return model

    def stored(self, trajectory_id: str) -> Any:
        """The trajectory as the ledger has it."""
        return self.server.ledger.trajectory(trajectory_id)


@contextmanager
def client_server(folder: Path, reply: Reply = "yes") -> Iterator[ClientServer]:
    """A real server on a free loopback port; the policy `mail/agent` is registered."""
    with small_server(folder, reply) as server:
        jobs = TrainingJobs(server)
        server.registry.jobs = jobs
        assert server.app.middleware_stack is not None
        faults = Faults(server.app.middleware_stack)
        server.app.middleware_stack = faults
        yield ClientServer(server, jobs, faults)
