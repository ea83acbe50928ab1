"""Trajectories in the ledger: opened, rewarded, ended once, listed."""

from __future__ import annotations

import math
import sqlite3

import pytest
from pydantic import ValidationError
from support.recordings import POLICY, opened, recorded

from apprentice.core.errors import Conflict, InvalidRequest, TrajectoryStateError, UnknownTrajectory
from apprentice.core.records import ToolEvent, Trajectory, TrajectoryStatus
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import FailTrajectory, FinishTrajectory, RewardUpdate


def test_opening_the_same_trajectory_twice_gives_the_recorded_one(ledger: Ledger) -> None:
    first = ledger.open_trajectory(Trajectory(id="t1", policy=POLICY, group_id="g", metadata={"a": [1, None]}))
    again = ledger.open_trajectory(Trajectory(id="t1", policy=POLICY, group_id="g", metadata={"a": [1, None]}, created_at=1.0))
    assert again == first
    for other in ({"policy": "mail/other"}, {"group_id": "h"}, {"metadata": {}}, {"scenario_id": "s"}):
        with pytest.raises(Conflict, match="t1"):
            ledger.open_trajectory(Trajectory.model_validate({**first.model_dump(), **other}))


def test_a_trajectory_is_opened_empty(ledger: Ledger) -> None:
    with pytest.raises(InvalidRequest, match="opened without"):
        ledger.open_trajectory(Trajectory(policy=POLICY, reward=1.0))


def test_the_last_reward_counts_and_all_are_kept(ledger: Ledger) -> None:
    one = recorded(ledger, 2)
    trajectory = one[0].trajectory_id or ""
    ledger.update_trajectory(trajectory, RewardUpdate(reward=0.25, metrics={"a": 1, "b": 1}, completion_rewards={one[0].id: 1}))
    ledger.finish_trajectory(trajectory, FinishTrajectory(reward=0.5, metrics={"b": 2}))
    last = ledger.update_trajectory(trajectory, RewardUpdate(completion_rewards={one[1].id: -1}, metadata={"judge": "me"}))
    assert (last.reward, last.metrics, last.metadata) == (0.5, {"a": 1, "b": 2}, {"judge": "me"})
    assert last.completion_rewards == {one[0].id: 1, one[1].id: -1}
    assert last.status is TrajectoryStatus.finished
    connection = sqlite3.connect(ledger.path)
    assert connection.execute("SELECT COUNT(*) FROM rewards").fetchone()[0] == 3
    connection.close()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        RewardUpdate(reward=reward)


def test_a_reward_for_an_unknown_trajectory_or_completion_is_refused_by_name(ledger: Ledger) -> None:
    with pytest.raises(UnknownTrajectory, match="nowhere"):
        ledger.update_trajectory("nowhere", RewardUpdate(reward=1))
    foreign = recorded(ledger, 1)[0]
    trajectory = opened(ledger)
    with pytest.raises(InvalidRequest, match=foreign.id) as refused:
        ledger.finish_trajectory(trajectory, FinishTrajectory(reward=1, completion_rewards={foreign.id: 1}))
    assert refused.value.param == "completion_rewards"
    assert (ledger.trajectory(trajectory).status, ledger.trajectory(trajectory).reward) == (TrajectoryStatus.open, None)


def test_finishing_twice_the_same_way_is_one_finish_and_another_way_is_refused(ledger: Ledger) -> None:
    trajectory = opened(ledger)
    first = ledger.finish_trajectory(trajectory, FinishTrajectory(reward=1))
    assert ledger.finish_trajectory(trajectory, FinishTrajectory(reward=1)) == first
    assert first.finished_at is not None
    assert first.finished_at >= first.created_at
    with pytest.raises(TrajectoryStateError, match="already finished"):
        ledger.finish_trajectory(trajectory, FinishTrajectory(reward=2))
    with pytest.raises(TrajectoryStateError, match="already finished"):
        ledger.fail_trajectory(trajectory, FailTrajectory(error="late"))


def test_a_failed_trajectory_keeps_its_error_and_has_no_reward_unless_told(ledger: Ledger) -> None:
    silent, scored = opened(ledger), opened(ledger)
    failed = ledger.fail_trajectory(silent, FailTrajectory(error="tool crashed"))
    assert (failed.status, failed.error, failed.reward) == (TrajectoryStatus.failed, "tool crashed", None)
    assert ledger.fail_trajectory(silent, FailTrajectory(error="tool crashed")) == failed
    assert ledger.fail_trajectory(scored, FailTrajectory(error="lost", reward=-1)).reward == -1


def test_tool_events_come_back_in_order_and_are_recorded_once(ledger: Ledger) -> None:
    trajectory = opened(ledger)
    events = [ToolEvent(trajectory_id=trajectory, name="move", arguments={"n": n}, result="ok " * 200) for n in range(3)]
    for event in (*events, events[1]):
        ledger.append_tool_event(event)
    assert ledger.trajectory(trajectory).tool_events == tuple(events)
    with pytest.raises(Conflict, match=events[0].id):
        ledger.append_tool_event(events[0].model_copy(update={"result": "other"}))


def test_trajectories_are_listed_newest_first_in_pages_and_by_filter(ledger: Ledger) -> None:
    ids = [opened(ledger, group_id=f"g{n % 2}") for n in range(7)]
    ledger.open_trajectory(Trajectory(policy="mail/other"))
    ledger.finish_trajectory(ids[2])
    page = ledger.trajectories(policy=POLICY, limit=3)
    rest = ledger.trajectories(policy=POLICY, after=page[-1].id)
    assert [one.id for one in (*page, *rest)] == ids[::-1]
    assert [one.id for one in ledger.trajectories(group_id="g1")] == [ids[5], ids[3], ids[1]]
    assert [one.id for one in ledger.trajectories(status=TrajectoryStatus.finished)] == [ids[2]]
    with pytest.raises(UnknownTrajectory):
        ledger.trajectories(after="nowhere")
    with pytest.raises(InvalidRequest, match="limit"):
        ledger.trajectories(limit=0)


def test_a_summary_leaves_out_the_contents(ledger: Ledger) -> None:
    made = recorded(ledger, 2)
    trajectory = made[0].trajectory_id or ""
    ledger.append_tool_event(ToolEvent(trajectory_id=trajectory, name="move"))
    assert ledger.trajectory(trajectory).completions == tuple(made)
    summary = ledger.trajectory(trajectory, tokens=False)
    assert (summary.completions, summary.tool_events) == ((), ())
