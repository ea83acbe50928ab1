"""A complete small server for tests: real ledger, real codec, scripted engine, real HTTP on loopback; no torch and no weights.

    with small_server(tmp_path, reply="Hello") as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=…)

Only what needs a trainer is small here: a train job on this registry ends as `no_update`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from support.tiny_models import tiny_tokenizer

from apprentice.core.engines.memory import ScriptedEngine
from apprentice.core.engines.protocol import BASE, Engine, PolicyVersion, TokenChunk
from apprentice.core.errors import Conflict, UnknownCheckpoint, UnknownModel
from apprentice.core.records import SamplingParams, TrainResult, TrainStatus, new_id
from apprentice.core.server.app import create_app, serve
from apprentice.core.server.auth import Auth
from apprentice.core.server.chat import ChatCodec
from apprentice.core.server.ledger import Ledger
from apprentice.core.server.limits import Limits
from apprentice.core.server.registry_protocol import Served
from apprentice.core.server.splice import Splicer
from apprentice.core.wire import CheckpointInfo, GrpoJob, ModelInfo, RegisterModel, SftJob, TrainEvent, TrainJob

BASE_NAME = "tiny"
POLICY = "mail/agent"
CONTEXT = 2048

Reply = str | Callable[[Sequence[int], SamplingParams, PolicyVersion], Sequence[int]]


class SmallJobs:
    """Jobs that end at once without training, written to the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def submit(self, request: GrpoJob | SftJob, idempotency_key: str | None) -> TrainJob:
        now = time.time()
        new = TrainJob(
            id=new_id("job"), policy=request.policy, kind=request.kind, state="queued", phase="queued", created_at=now, updated_at=now
        )
        job = self._ledger.create_job(new, request.model_dump_json().encode(), idempotency_key)
        if job.id == new.id:
            self._ledger.append_event(job.id, "phase", {"phase": "loading"})
            result = TrainResult(job_id=job.id, policy=job.policy, status=TrainStatus.no_update, reason="tests", previous_step=0, step=0)
            job = self._ledger.update_job(job.id, state="no_update", phase="done", result=result)
            self._ledger.append_event(job.id, "end", {"state": "no_update"})
        return job

    def job(self, job_id: str) -> TrainJob:
        return self._ledger.job(job_id)

    def jobs(self) -> Sequence[TrainJob]:
        return self._ledger.jobs()[::-1]

    async def events(self, job_id: str, after: int) -> AsyncIterator[TrainEvent]:
        for event in self._ledger.events(job_id, after):
            yield event


class SmallCheckpoints:
    """The ledger's mirror of checkpoints, without files."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def list(self, policy: str | None) -> Sequence[CheckpointInfo]:
        return self._ledger.checkpoints(policy)

    def get(self, policy: str, step: int) -> CheckpointInfo:
        for info in self._ledger.checkpoints(policy):
            if info.step == step:
                return info
        raise UnknownCheckpoint(f"{policy} has no checkpoint {step}")

    def pin(self, policy: str, step: int, pinned: bool) -> CheckpointInfo:
        self.get(policy, step)
        self._ledger.mark_checkpoint(policy, step, pinned=pinned)
        return self.get(policy, step)

    def delete(self, policy: str, step: int) -> None:
        if self.get(policy, step).pinned:
            raise Conflict(f"checkpoint {step} of {policy} is pinned")
        self._ledger.mark_checkpoint(policy, step, deleted=True)


@dataclass
class SmallRegistry:
    """One base model, served by `engine`; registered policies serve the versions that `versions` lists."""

    engine: Engine
    ledger: Ledger
    tokenizer: Any
    codec: ChatCodec = field(init=False)
    versions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.codec = ChatCodec(self.tokenizer)
        self.splicer = Splicer(self.codec, self.ledger)
        self.jobs = SmallJobs(self.ledger)
        self.checkpoints = SmallCheckpoints(self.ledger)

    async def resolve(self, model: str) -> Served:
        if model == BASE_NAME:
            return self._served(BASE, BASE_NAME)
        alias, _, step = model.partition("@")
        if alias not in self.versions or (step and not (step.isdigit() and int(step) <= self.versions[alias])):
            raise UnknownModel(f"there is no model {model!r} here; there are {[BASE_NAME, *self.versions]}", param="model")
        return self._served(PolicyVersion(alias, int(step) if step else self.versions[alias]), alias)

    def _served(self, policy: PolicyVersion, alias: str) -> Served:
        return Served(
            policy=policy,
            alias=alias,
            codec=self.codec,
            splicer=self.splicer,
            engine=self.engine,
            context_length=CONTEXT,
            stop_token_ids=tuple(self.codec.stop_token_ids),
        )

    async def register(self, body: RegisterModel) -> ModelInfo:
        if body.base_model != BASE_NAME:
            raise UnknownModel(f"this registry has only the base model {BASE_NAME}", param="base_model")
        self.ledger.put_policy(body)
        policy = f"{body.project}/{body.name}"
        if policy not in self.versions:
            await self.publish(policy, 0)
        return self._info(policy)

    async def publish(self, policy: str, version: int) -> None:
        """Serve another version from now on."""
        await self.engine.load(PolicyVersion(policy, version), self.ledger.path.parent)
        self.versions[policy] = version

    def models(self) -> Sequence[ModelInfo]:
        return [self._info(policy) for policy in self.versions]

    def base_models(self) -> Sequence[str]:
        return [BASE_NAME]

    def engines(self) -> Sequence[Engine]:
        return [self.engine]

    def _info(self, policy: str) -> ModelInfo:
        project, _, name = policy.partition("/")
        return ModelInfo(
            policy=policy,
            base_model=BASE_NAME,
            step=self.versions[policy],
            adapter=RegisterModel(project=project, name=name, base_model=BASE_NAME).adapter,
            context_length=CONTEXT,
            trainable_parameters=0,
            tool_format=self.codec.tool_format,
            sharing=True,
            engine=self.engine.info().name,
        )


@dataclass
class SmallServer:
    """A running server. Its event loop lives in a thread of its own."""

    url: str
    ledger: Ledger
    registry: SmallRegistry
    engine: ScriptedEngine
    tokenizer: Any
    app: FastAPI
    loop: asyncio.AbstractEventLoop

    stop: Callable[[], None]
    http: httpx.Client
    """A client with keep-alive connections to this server."""

    def on_loop(self, work: Any) -> Any:
        """The result of a coroutine run in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


def scripted(reply: Reply, tokenizer: Any, tokens_per_chunk: int = 1) -> ScriptedEngine:
    """An engine that always says `reply`, or what the function says."""
    if isinstance(reply, str):
        ids = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        return ScriptedEngine(lambda *_: ids, tokenizer=tokenizer, context_length=CONTEXT, tokens_per_chunk=tokens_per_chunk)
    return ScriptedEngine(reply, tokenizer=tokenizer, context_length=CONTEXT, tokens_per_chunk=tokens_per_chunk)


@contextmanager
def small_server(
    folder: Path,
    reply: Reply = "Hello, world",
    *,
    key: str | None = None,
    limits: Limits | None = None,
    engine: ScriptedEngine | None = None,
) -> Iterator[SmallServer]:
    """A real server on a free loopback port, with the policy `mail/agent` registered; stopped and closed at the end."""
    tokenizer = tiny_tokenizer()
    engine = engine or scripted(reply, tokenizer)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        registry = SmallRegistry(engine, ledger, tokenizer)
        app = create_app(registry, ledger, auth=Auth.for_bind("127.0.0.1", key), limits=limits)
        with running(app, limits) as (port, loop, stop):
            url = f"http://127.0.0.1:{port}"
            http = httpx.Client(base_url=url, trust_env=False, timeout=30)
            server = SmallServer(url, ledger, registry, engine, tokenizer, app, loop, stop, http)
            server.on_loop(registry.register(RegisterModel(project="mail", name="agent", base_model=BASE_NAME)))
            with http:
                yield server


@contextmanager
def running(app: FastAPI, limits: Limits | None = None) -> Iterator[tuple[int, asyncio.AbstractEventLoop, Callable[[], None]]]:
    """Serve `app` in a thread; gives its port, its event loop and a function that stops it."""
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def main() -> None:
        def on_ready(port: int) -> None:
            state["port"], state["loop"] = port, asyncio.get_running_loop()
            ready.set()

        await serve(app, "127.0.0.1", 0, on_ready, limits)

    def in_thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as cause:  # noqa: BLE001 - raised again in the thread that waits
            state["failed"] = cause
        finally:
            ready.set()

    thread = threading.Thread(target=in_thread, name="small-server")
    thread.start()
    assert ready.wait(30), "the server did not come up"
    if "failed" in state:
        raise state["failed"]

    def stop() -> None:
        if thread.is_alive():
            app.state.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"

    try:
        yield state["port"], state["loop"], stop
    finally:
        stop()


class HoldingEngine(ScriptedEngine):
    """Draws `hold_after` tokens of each completion and stops there until `release` is set (from the server's event loop)."""

    def __init__(self, ids: Sequence[int], tokenizer: Any, hold_after: int) -> None:
        super().__init__(lambda *_: ids, tokenizer=tokenizer, context_length=CONTEXT)
        self.hold_after = hold_after
        self.holding = threading.Event()
        self.release = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion, stop_token_ids: Sequence[int] = ()
    ) -> AsyncIterator[TokenChunk]:
        drawn = 0
        async with aclosing(super().generate(prompt_ids, sampling, policy, stop_token_ids)) as chunks:
            async for chunk in chunks:
                if drawn == self.hold_after:
                    self.holding.set()
                    await self.release.wait()
                yield chunk
                drawn += len(chunk.token_ids)


def holding(text: str, hold_after: int) -> HoldingEngine:
    tokenizer = tiny_tokenizer()
    return HoldingEngine([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], tokenizer, hold_after)


def eventually(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true value of `check`, asked again and again; an AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not true within {seconds} s: {check}"
        time.sleep(0.005)
    return value
