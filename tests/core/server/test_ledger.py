"""The ledger as a whole: opened, read beside its writer, closed; what it does not know or cannot hold it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recordings import POLICY, completion, opened, recorded, reread

from apprentice.core.errors import (
    InvalidRequest,
    LedgerError,
    NotFound,
    UnknownCheckpoint,
    UnknownJob,
    UnknownModel,
    UnknownTrajectory,
)
from apprentice.core.records import ToolEvent, Trajectory, TrajectoryStatus
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import RewardUpdate, TrainJob


def test_a_reader_sees_what_is_committed_while_the_server_writes_and_cannot_write(ledger: Ledger) -> None:
    with reread(ledger) as reader:
        made = recorded(ledger, 2)
        assert reader.completions(made[0].trajectory_id or "") == tuple(made)
        with pytest.raises(LedgerError, match="reading only"):
            reader.open_trajectory(Trajectory(policy=POLICY))


def test_everything_is_there_after_closing_and_opening_again(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "deep" / "runs.db") as ledger:
        made = recorded(ledger, 3)
    with Ledger.open(tmp_path / "deep" / "runs.db") as ledger:
        trajectory = made[0].trajectory_id or ""
        last = completion(trajectory, (*made[-1].prompt_ids, *made[-1].token_ids, 5), parent=made[-1].id)
        ledger.append_completions([last])
        assert ledger.completions(trajectory) == (*made, last)


def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "runs.db")
    ledger.close()
    ledger.close()
    for call in (lambda: ledger.open_trajectory(Trajectory(policy=POLICY)), ledger.policies):
        with pytest.raises(LedgerError, match="closed"):
            call()


def test_what_was_submitted_before_closing_is_written(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "runs.db")
    trajectory = opened(ledger)
    futures = [ledger.submit_completions([completion(trajectory, (n,))]) for n in range(20)]
    ledger.close()
    assert all(future.done() for future in futures)
    with Ledger.open(tmp_path / "runs.db", read_only=True) as reader:
        assert len(reader.completions(trajectory)) == 20


def test_unknown_ids_are_said_to_be_unknown(ledger: Ledger) -> None:
    for call, error in (
        (lambda: ledger.trajectory("x"), UnknownTrajectory),
        (lambda: ledger.completions("x"), UnknownTrajectory),
        (lambda: ledger.completion("x"), NotFound),
        (lambda: ledger.policy("a/b"), UnknownModel),
        (lambda: ledger.job("x"), UnknownJob),
        (lambda: ledger.events("x"), UnknownJob),
        (lambda: ledger.append_event("x", "end"), UnknownJob),
        (lambda: ledger.mark_checkpoint("a/b", 1, pinned=True), UnknownCheckpoint),
    ):
        with pytest.raises(error):
            call()


def test_counts_tell_what_is_recorded(ledger: Ledger) -> None:
    trajectory = recorded(ledger, 2)[0].trajectory_id or ""
    ledger.append_tool_event(ToolEvent(trajectory_id=trajectory, name="move"))
    ledger.finish_trajectory(trajectory)
    opened(ledger)
    counts = ledger.counts()
    assert (counts.completions, counts.tool_events, counts.unattributed_calls) == (2, 1, 0)
    assert counts.trajectories == {TrajectoryStatus.open: 1, TrajectoryStatus.finished: 1, TrajectoryStatus.failed: 0}


def test_names_and_numbers_that_sqlite_cannot_hold_are_bad_requests(ledger: Ledger) -> None:
    made = TrainJob(id="job-1", policy=POLICY, kind="grpo", state="queued", phase="queued", created_at=0.0, updated_at=0.0)
    ledger.create_job(made, b"{}")
    for call in (
        lambda: ledger.trajectory("\ud800"),
        lambda: ledger.update_trajectory("\ud800", RewardUpdate(reward=1)),
        lambda: ledger.events("job-1", after=2**64),
        lambda: ledger.mark_checkpoint(POLICY, 2**64, pinned=True),
        lambda: ledger.append_completions([completion(None, policy_version=2**64)]),
    ):
        with pytest.raises(InvalidRequest, match="expected"):
            call()
    assert ledger.counts().completions == 0
