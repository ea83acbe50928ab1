"""The client without `await`: in plain code, and where an event loop is already running (a notebook)."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.client_server import ClientServer, client_server
from support.small_registry import BASE_NAME

from apprentice import RemoteBackend, Scenario, TrainableModel, current_trajectory, gather
from apprentice.core.client import sync
from apprentice.core.errors import InvalidRequest
from apprentice.core.records import TrajectoryStatus


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("sync")) as running:
        yield running.fresh()


def script(server: ClientServer, name: str) -> list[float | None]:
    """A whole user's script: register, roll out, train, evaluate."""
    model = TrainableModel("mail", name, "tiny").sync
    model.register(RemoteBackend(server.url))
    client = httpx.Client(trust_env=False)

    def rollout(scenario: Scenario) -> Any:
        with model.trajectory(scenario) as t:
            assert current_trajectory() is t
            body = {"model": f"mail/{name}", "messages": [{"role": "user", "content": str(scenario.input)}]}
            client.post(f"{t.base_url}/chat/completions", json=body).raise_for_status()
            t.reward = float(len(threading.current_thread().name) > 0)
        return t

    groups = sync.gather(rollout, ["a", "b"], group_size=2, concurrency=4, progress=False)
    assert model.train(groups, progress=False).step == 1
    assert [checkpoint.step for checkpoint in model.checkpoints()] == [1]
    assert model.get_step() == 1
    assert model.evaluate(rollout, ["a"], progress=False).mean == 1.0
    for group in groups:
        for trajectory in group.trajectories:
            assert len(model.fetch(trajectory).completions) == 1
    return [t.reward for group in groups for t in group.trajectories]


def test_a_plain_script_needs_no_event_loop(server: ClientServer) -> None:
    assert script(server, "plain") == [1.0] * 4


async def test_the_same_script_runs_inside_a_running_loop_as_in_a_notebook(server: ClientServer) -> None:
    assert script(server, "notebook") == [1.0] * 4


def test_an_exception_in_a_sync_block_fails_the_trajectory(server: ClientServer) -> None:
    model = asyncio.run(server.model()).sync
    with pytest.raises(ValueError, match="no"), model.trajectory() as t:
        raise ValueError("no")
    stored = model.fetch(t)
    assert (stored.status, stored.error) == (TrajectoryStatus.failed, "ValueError: no")
    assert current_trajectory() is None


def test_a_sync_call_inside_the_facades_own_loop_is_refused_instead_of_hanging(server: ClientServer) -> None:
    model = asyncio.run(server.model()).sync

    async def mistake() -> None:
        model.get_step()

    with pytest.raises(InvalidRequest, match="use the async method"):
        sync.run(mistake())


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_every_async_method_has_a_sync_one_with_the_same_parameters() -> None:
    names = [name for name, method in inspect.getmembers(TrainableModel, inspect.iscoroutinefunction) if not name.startswith("_")]
    assert {"register", "train", "evaluate", "fork"} <= set(names)
    for name in {*names, "trajectory"} - {"attach", "run_job"}:  # they serve the command line and the training loop
        assert parameters(getattr(sync.SyncModel, name)) == parameters(getattr(TrainableModel, name)), name
    assert parameters(sync.gather) == parameters(gather)
    assert sync.SyncModel.train.__doc__ == TrainableModel.train.__doc__


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_a_forked_copy_of_the_process_works_and_ends_without_the_loop_of_its_parent(server: ClientServer, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS.format(url=server.url, name="forks", base=BASE_NAME))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["child", "0", "parent", "0", "0"])


FORKS = """
import os, sys
from apprentice import RemoteBackend, TrainableModel

model = TrainableModel("mail", "{name}", "{base}")
model.sync.register(RemoteBackend("{url}"))
child = os.fork()
if child == 0:
    print("child", model.sync.get_step(), flush=True)
    sys.exit()
_, status = os.waitpid(child, 0)
print("parent", model.sync.get_step(), status)
"""
