"""The whole server in the test's own process and event loop: real ledger, weights, engine, trainer and application, no socket.

async with real_server(home) as server:
    await server.post("/api/models", {...})
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from apprentice.core.engines.embedded import EmbeddedEngine
from apprentice.core.engines.protocol import PolicyVersion
from apprentice.core.server import bases
from apprentice.core.server.app import create_app
from apprentice.core.server.auth import Auth
from apprentice.core.server.bases import BasePool, EngineOptions
from apprentice.core.server.job_steps import JobSteps
from apprentice.core.server.jobs import TrainJobs
from apprentice.core.server.ledger import Ledger
from apprentice.core.server.limits import Limits
from apprentice.core.server.policies import Policies, PolicyRuntime
from apprentice.core.server.registry import ServerRegistry
from apprentice.core.training.checkpoints import CheckpointStore

POLICY = "test/agent"


@dataclass
class RealServer:
    home: Path
    ledger: Ledger
    bases: BasePool
    policies: Policies
    jobs: TrainJobs
    client: httpx.AsyncClient

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        answer = await self.client.post(path, json=body, headers=headers)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    async def get(self, path: str) -> Any:
        answer = await self.client.get(path)
        assert answer.status_code < 300, answer.text
        return answer.json()

    async def train(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        """Submit a job and wait for its end; its result."""
        return await self.end_of((await self.post("/api/train-jobs", body, **headers))["id"])

    async def end_of(self, job_id: str) -> dict[str, Any]:
        async for _ in self.jobs.events(job_id, 0):
            pass
        return (await self.get(f"/api/train-jobs/{job_id}"))["result"]

    def runtime(self, policy: str = POLICY) -> PolicyRuntime:
        return self.policies.running()[policy]

    def weights(self, policy: str = POLICY) -> dict[str, bytes]:
        """The bits of the trainer's weights."""
        parameters = self.runtime(policy).base.host.adapter_parameters(policy)
        return {name: parameter.detach().numpy().tobytes() for name, parameter in parameters.items()}

    async def greedy(self, model: str = POLICY) -> tuple[int, list[float]]:
        """The version that answers a fixed question, and the log-probabilities of its answer."""
        ask = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "logprobs": True}
        reply = await self.post("/v1/chat/completions", ask)
        return reply["policy_version"], [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]


@asynccontextmanager
async def real_server(
    home: Path, engine_class: type[EmbeddedEngine] = EmbeddedEngine, limits: Limits | None = None
) -> AsyncIterator[RealServer]:
    """As `run_server` puts it together; taken apart in the same order."""
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.object(bases, "EmbeddedEngine", engine_class))
        ledger = stack.enter_context(Ledger.open(home / "ledger.sqlite"))
        pool = BasePool(ledger, EngineOptions(device="cpu"))
        stack.push_async_callback(pool.close)
        policies = Policies(ledger, CheckpointStore(home / "checkpoints"), pool)
        jobs = TrainJobs(ledger, JobSteps(ledger, policies))
        app = create_app(ServerRegistry(ledger, policies, pool, jobs), ledger, auth=Auth.for_bind("127.0.0.1", None), limits=limits)
        await jobs.start()
        stack.push_async_callback(jobs.close)
        transport = httpx.ASGITransport(app)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None))
        yield RealServer(home, ledger, pool, policies, jobs, client)


def registration(base: Path, name: str = "agent", **changes: Any) -> dict[str, Any]:
    return {"project": "test", "name": name, "base_model": str(base), "adapter": {"rank": 4}, "seed": 7, **changes}


async def record_rollouts(
    server: RealServer, groups: int = 2, size: int = 3, turns: int = 2, prefix: str = "", **sampling: Any
) -> list[list[dict[str, Any]]]:
    """Finished trajectories of several turns; the groups of a train job, with each member's number as its reward."""
    found: list[list[dict[str, Any]]] = []
    for group in range(groups):
        members: list[dict[str, Any]] = []
        for number in range(size):
            name = f"{prefix}g{group}-m{number}"
            await server.post("/api/trajectories", {"id": name, "policy": POLICY, "group_id": f"{prefix}g{group}"})
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {group}"}]
            for turn in range(turns):
                seed = 100 * group + 10 * number + turn
                body = {"model": POLICY, "messages": messages, "max_tokens": 8, "seed": seed, **sampling}
                reply = (await server.post(f"/t/{name}/v1/chat/completions", body))["choices"][0]["message"]
                messages += [{"role": "assistant", "content": reply["content"] or ""}, {"role": "user", "content": "and now?"}]
            await server.post(f"/api/trajectories/{name}/finish", {})
            members.append({"id": name, "reward": float(number)})
        found.append(members)
    return found


def recorded_home(base: Path, home: Path, **sampling: Any) -> list[list[dict[str, Any]]]:
    """Make a home with the policy `test/agent` and finished rollouts; the groups of a train job. For fixtures that are not async."""

    async def record() -> list[list[dict[str, Any]]]:
        async with real_server(home) as server:
            await server.post("/api/models", registration(base))
            return await record_rollouts(server, **sampling)

    return asyncio.run(record())


def job(groups: list[list[dict[str, Any]]], **config: Any) -> dict[str, Any]:
    return {"kind": "grpo", "policy": POLICY, "groups": groups, "config": {"learning_rate": 1e-2, **config}}


class LyingEngine(EmbeddedEngine):
    """Loads the folder in `instead`, while one is set, whatever it is told, and reports success."""

    instead: Path | None = None

    async def load(self, policy: PolicyVersion, adapter_path: Path) -> None:
        await super().load(policy, type(self).instead or adapter_path)


@contextmanager
def lying(folder: Path) -> Iterator[None]:
    """Within it, every `LyingEngine` loads `folder`."""
    LyingEngine.instead = folder
    try:
        yield
    finally:
        LyingEngine.instead = None
