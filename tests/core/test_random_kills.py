"""A training run whose processes are killed at random moments loses no committed completion and doubles none.

`APPRENTICE_KILLS=30 pytest tests/core/test_random_kills.py` is the long version.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.journal_script import CALLS, GROUPS, SIZE
from support.server_process import KEY, TESTS, ServerProcess
from support.small_registry import eventually
from support.tiny_models import tiny_llama

from apprentice.core.records import TrajectoryStatus
from apprentice.core.server.ledger import Ledger
from apprentice.core.training.checkpoints import CheckpointStore
from apprentice.core.wire import GrpoJob

KILLS = int(os.environ.get("APPRENTICE_KILLS", "6"))
STEPS = KILLS + 4
LINES = 10
"""At most so many journal lines are written between a start and the next kill; a step writes 20."""
POLICY = "test/agent"


class Run:
    """The two processes of a training run, started anew where they are dead."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "run", folder / "home"
        self.folder.mkdir()
        self.base = tiny_llama(folder / "base")
        self.server: ServerProcess | None = None
        self.loop: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.server is None:
            self.server = ServerProcess(self.home).__enter__()
        if self.loop is None:
            url = str(self.server.client.base_url)
            command = [sys.executable, "-m", "support.journal_script", url, KEY, str(self.base), str(self.folder), str(STEPS)]
            log = (self.folder / "loop.log").open("ab")
            self.loop = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"})
            log.close()

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        return [json.loads(line) for line in lines[:-1]]

    def kill(self, whom: str) -> None:
        """SIGKILL. A loop whose server died ends by itself, with an error."""
        assert self.server is not None
        assert self.loop is not None
        if whom != "server":
            self.loop.kill()
        if whom != "loop":
            self.server.process.kill()
            self.server.process.wait()
            self.server.client.close()
            self.server = None
        code = self.loop.wait(60)
        assert code != 0, "the loop ended as if nothing had happened"
        self.loop = None

    def stop(self) -> None:
        if self.loop is not None:
            self.loop.kill()
            self.loop.wait()
        if self.server is not None:
            self.server.__exit__(None, None, None)

    def end(self) -> None:
        """Undisturbed to the end, and both processes stopped."""
        assert self.loop is not None
        assert self.loop.wait(240) == 0, (self.folder / "loop.log").read_text()[-3000:]
        self.stop()


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_random_kills_lose_and_double_nothing(run: Run) -> None:
    rng = random.Random(11)
    for _ in range(KILLS):
        run.start()
        known, more = len(run.journal()), rng.randint(1, LINES)
        eventually(lambda seen=known + more: len(run.journal()) >= seen or _crashed(run), 120)
        time.sleep(rng.uniform(0, 0.25))  # not a wait for anything: the kill is to fall anywhere, also within a train job
        run.kill(rng.choice(("loop", "server", "both")))
    run.start()
    run.end()
    with Ledger.open(run.home / "ledger.sqlite") as ledger:
        _completions_are_there_once(ledger, run.journal())
        _steps_advance_one_by_one(ledger, run)


def _crashed(run: Run) -> bool:
    assert run.loop is not None
    assert run.loop.poll() is None, (run.folder / "loop.log").read_text()[-3000:]
    return False


def _completions_are_there_once(ledger: Ledger, journal: list[dict[str, Any]]) -> None:
    received = [line for line in journal if "completion" in line]
    trajectories = {t.id: ledger.trajectory(t.id) for t in ledger.trajectories(POLICY, limit=100_000)}
    recorded = Counter(c.id for t in trajectories.values() for c in t.completions)
    assert max(recorded.values()) == 1
    assert Counter(line["completion"] for line in received) <= recorded, "a client was told of a completion that the ledger lacks"
    for trajectory in trajectories.values():
        told = [line["completion"] for line in received if line["trajectory"] == trajectory.id]
        assert [c.id for c in trajectory.completions][: len(told)] == told
        assert trajectory.status is not TrajectoryStatus.open
        if trajectory.status is TrajectoryStatus.finished:
            assert len(trajectory.completions) == len(told) == CALLS
        else:
            assert len(trajectory.completions) <= len(told) + 1, "a rollout makes one call at a time"


def _steps_advance_one_by_one(ledger: Ledger, run: Run) -> None:
    jobs = ledger.jobs()
    results = [job.result for job in jobs if job.result is not None]
    assert len(jobs) == len(results) == STEPS
    assert [(r.status.value, r.previous_step, r.step) for r in results] == [("trained", n, n + 1) for n in range(STEPS)]
    trained: list[str] = []
    for job, result in zip(jobs, results, strict=True):
        request = GrpoJob.model_validate_json(ledger.job_request(job.id))
        ids = [member.id for group in request.groups for member in group]
        assert len(ids) == GROUPS * SIZE
        assert result.fates == dict.fromkeys(ids, "trained")
        assert {ledger.trajectory(name, tokens=False).status for name in ids} == {TrajectoryStatus.finished}
        trained += ids
    assert len(set(trained)) == len(trained), "a trajectory was trained twice"
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    latest = CheckpointStore(run.home / "checkpoints").latest(POLICY)
    assert latest is not None
    assert (latest.step, latest.state.job_id) == (STEPS, jobs[-1].id)
