"""Calls are recorded once, all or none, together with those that wait; and their replies are found again."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from support.recordings import completion, opened, recorded, reread

from apprentice.core.errors import Conflict, InvalidRequest, TrajectoryStateError, UnknownTrajectory
from apprentice.core.records import ToolEvent
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import FailTrajectory, FinishTrajectory

# appending


def test_the_same_completion_twice_is_recorded_once(ledger: Ledger) -> None:
    one = completion(opened(ledger), logprobs=(math.nan, -1.0))
    ledger.append_completions([one])
    ledger.append_completions([one])
    assert ledger.counts().completions == 1


def test_the_same_completion_id_with_other_content_is_a_conflict(ledger: Ledger) -> None:
    one = completion(opened(ledger))
    ledger.append_completions([one])
    with pytest.raises(Conflict, match=one.id):
        ledger.append_completions([one.model_copy(update={"token_ids": (7, 9)})])
    assert ledger.completions(one.trajectory_id or "") == (one,)


def test_a_retried_append_after_the_finish_is_still_the_same_record(ledger: Ledger) -> None:
    one = completion(opened(ledger))
    ledger.append_completions([one])
    ledger.finish_trajectory(one.trajectory_id or "", FinishTrajectory())
    ledger.append_completions([one])
    assert ledger.counts().completions == 1


def test_a_call_into_an_unknown_trajectory_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownTrajectory, match="nowhere"):
        ledger.append_completions([completion("nowhere")])


@pytest.mark.parametrize("ending", ["finished", "failed"])
def test_a_trajectory_that_has_ended_takes_no_calls_and_no_tool_events(ledger: Ledger, ending: str) -> None:
    trajectory = opened(ledger)
    if ending == "finished":
        ledger.finish_trajectory(trajectory)
    else:
        ledger.fail_trajectory(trajectory, FailTrajectory(error="it broke"))
    with pytest.raises(TrajectoryStateError, match=ending):
        ledger.append_completions([completion(trajectory)])
    with pytest.raises(TrajectoryStateError, match=ending):
        ledger.append_tool_event(ToolEvent(trajectory_id=trajectory, name="move"))


def test_many_threads_share_transactions_and_each_hears_only_of_its_own_error(ledger: Ledger) -> None:
    trajectories = [opened(ledger) for _ in range(8)]
    errors: dict[int, Exception] = {}

    def work(number: int) -> None:
        for turn in range(10):
            good = completion(trajectories[number % 8], (number, turn))
            try:
                ledger.append_completions([good] if number % 4 else [good, completion(f"missing-{number}")])
            except UnknownTrajectory as error:
                errors[number] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: f"missing-{number}" in str(error) for number, error in errors.items()} == {0: True, 4: True, 8: True, 12: True}
    assert ledger.counts().completions == 12 * 10


def test_waiting_appends_are_committed_together(ledger: Ledger) -> None:
    trajectory = opened(ledger)
    begun: list[str] = []
    gate = threading.Event()
    ledger._writing().submit(lambda connection: (connection.set_trace_callback(begun.append), gate.wait(10))[0])
    futures = [ledger.submit_completions([completion(trajectory, (n,))]) for n in range(50)]
    gate.set()
    for future in futures:
        future.result(10)
    # One transaction for all 50, or none more: the writer may have taken them together with the gate itself.
    assert sum(statement.startswith("BEGIN") for statement in begun) <= 1
    assert len(ledger.completions(trajectory)) == 50


def test_a_call_without_a_trajectory_is_kept_and_counted_once_per_request(ledger: Ledger) -> None:
    ledger.append_completions([completion(None, call_id="call-a", choice=n) for n in range(3)])
    ledger.append_completions([completion(None, call_id="call-b")])
    assert ledger.counts().unattributed_calls == 2
    assert ledger.counts().completions == 4
    with reread(ledger) as reader:
        assert sum(len(batch) for batch in reader.scan()) == 4


# finding a reply


def test_a_reply_is_found_by_completion_id_by_tool_call_and_by_text(ledger: Ledger) -> None:
    made, other = recorded(ledger, 4), recorded(ledger, 4)
    trajectory = made[0].trajectory_id
    with reread(ledger) as reader:
        assert reader.find_reply(None, completion_id=made[2].id) == (made[2],)
        assert reader.find_reply(trajectory, tool_call_id=f"call-{trajectory}-1") == (made[1],)
        assert reader.find_reply(trajectory, text="turn 3") == (made[3],)
        assert reader.find_reply(trajectory, tool_call_id=f"call-{other[0].trajectory_id}-1") == ()
        assert reader.find_reply(None, text="turn 3") == ()
        assert reader.find_reply(trajectory, text="turn") == ()
        assert reader.find_reply(trajectory, text="") == ()


def test_equal_texts_are_found_newest_first(ledger: Ledger) -> None:
    trajectory = opened(ledger)
    made = [completion(trajectory, (n,)) for n in range(12)]
    ledger.append_completions(made)
    assert ledger.find_reply(trajectory, text="hi") == tuple(reversed(made))[:8]


@pytest.mark.parametrize("strange", ["\ud800", "\ud83d\ude00 as two halves", "nul \x00", "é\u2028"])
def test_strange_texts_and_ids_are_found_or_absent_but_never_an_error(ledger: Ledger, strange: str) -> None:
    trajectory = opened(ledger)
    one = completion(trajectory, message={"role": "assistant", "content": strange, "tool_calls": [{"id": strange}]})
    ledger.append_completions([one])
    assert ledger.find_reply(trajectory, text=strange) == (one,)
    found = ledger.find_reply(trajectory, tool_call_id=strange)
    assert found == (() if any("\ud800" <= c <= "\udfff" for c in strange) else (one,))
    assert ledger.find_reply(trajectory, completion_id=strange) == ()


def test_looking_for_two_things_at_once_is_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        ledger.find_reply("t", text="a", tool_call_id="b")


@pytest.mark.parametrize("key", ["id", "tool_call", "text"])
def test_finding_a_reply_uses_an_index(ledger: Ledger, key: str) -> None:
    statements: list[str] = []
    made = recorded(ledger, 1)[0]
    with reread(ledger) as reader:
        with reader._reader() as connection:
            connection.set_trace_callback(statements.append)
        by: dict[str, Any] = {"id": {"completion_id": made.id}, "tool_call": {"tool_call_id": "x"}, "text": {"text": "turn 0"}}[key]
        reader.find_reply(made.trajectory_id, **by)
        with reader._reader() as connection:
            connection.set_trace_callback(None)
            query = next(s for s in statements if s.startswith("SELECT c.seq"))
            plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
    assert "SCAN" not in plan
