"""The ledger gives back exactly what was recorded, once, and says so when it cannot record."""

from __future__ import annotations

import math
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.recordings import POLICY, completion, conversation, recorded

from apprentice.core.config import AdapterConfig
from apprentice.core.errors import (
    Conflict,
    IdempotencyConflict,
    InvalidRequest,
    LedgerError,
    ModelMismatch,
    NotFound,
    TrajectoryStateError,
    UnknownCheckpoint,
    UnknownJob,
    UnknownModel,
    UnknownTrajectory,
)
from apprentice.core.records import (
    BranchReason,
    ChatRequest,
    Completion,
    FinishReason,
    Origin,
    SamplingParams,
    ToolEvent,
    TrainResult,
    TrainStatus,
    Trajectory,
    TrajectoryStatus,
)
from apprentice.core.server import ledger_tokens
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import CheckpointInfo, FailTrajectory, FinishTrajectory, RegisterModel, RewardUpdate, TrainJob


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "runs.db") as opened:
        yield opened


def opened(ledger: Ledger, **fields: Any) -> str:
    return ledger.open_trajectory(Trajectory(policy=POLICY, **fields)).id


def reread(ledger: Ledger) -> Ledger:
    """A reader of the same file that has nothing in memory."""
    return Ledger.open(ledger.path, read_only=True)


def exactly(recorded: Completion) -> tuple[object, ...]:
    """All that must come back, with floats as their bits: NaN and -0.0 count."""
    bits = [struct.pack(f"<{len(v)}d", *v) for v in (recorded.logprobs, recorded.sampling_logprobs)]
    rest = recorded.model_dump(exclude={"logprobs", "sampling_logprobs", "request", "message"})
    spelled = ledger_tokens.dump_json([recorded.request.model_dump(), recorded.message])
    return rest, bits, spelled


# what is recorded comes back


def test_a_conversation_comes_back_exactly_from_the_file(ledger: Ledger) -> None:
    made = recorded(ledger, turns=5)
    with reread(ledger) as reader:
        assert reader.completions(made[0].trajectory_id or "") == tuple(made)
        assert [reader.completion(one.id) for one in made] == made


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
_messages = st.lists(st.dictionaries(st.text(max_size=5), _json, max_size=3), max_size=4)
_floats = st.floats(width=32) | st.floats() | st.just(0.0)


@st.composite
def trees(draw: st.DrawFn) -> list[Completion]:
    """Completions whose prompts continue, cut, or ignore earlier ones, with true, false and absent parents."""
    made: list[Completion] = []
    for _ in range(draw(st.integers(1, 7))):
        tokens = st.lists(st.integers(0, draw(st.sampled_from([3, 300, 70_000, 2**32 - 1]))), max_size=6)
        source = draw(st.sampled_from(made)) if made and draw(st.booleans()) else None
        whole = source.prompt_ids + source.token_ids if source else ()
        kept = whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole
        history = (*source.request.messages, source.message) if source else ()
        seen = history[: draw(st.integers(0, len(history)))] if draw(st.booleans()) else history
        drawn = tuple(draw(tokens))
        numbers = st.lists(_floats, min_size=len(drawn), max_size=len(drawn))
        logprobs = tuple(draw(numbers))
        lineage = dict(source.origin.lineage) if source else {}
        if source and draw(st.booleans()):
            lineage[len(source.request.messages)] = source.id
        lineage |= draw(st.dictionaries(st.integers(0, 5), st.text(st.characters(codec="utf-8"), max_size=4), max_size=2))
        made.append(
            Completion(
                trajectory_id="tree",
                policy=POLICY,
                policy_version=draw(st.none() | st.integers(0, 9)),
                prompt_ids=(*kept, *draw(tokens)),
                token_ids=drawn,
                logprobs=logprobs,
                sampling_logprobs=logprobs if draw(st.booleans()) else tuple(draw(numbers)),
                sampling=SamplingParams(temperature=draw(st.floats(0, 2)), seed=draw(st.none() | st.integers())),
                request=ChatRequest(
                    messages=(*seen, *draw(_messages)),
                    tools=tuple(draw(_messages)),
                    tool_choice=draw(_json),
                    response_format=draw(st.none() | st.dictionaries(st.text(max_size=4), _json, max_size=2)),
                ),
                message=draw(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), _json)),
                finish_reason=draw(st.sampled_from(FinishReason)),
                branch=draw(st.sampled_from(BranchReason)),
                parent=draw(st.sampled_from([source.id if source else None, None, "cmp-unknown", *[m.id for m in made]])),
                origin=Origin(node=draw(st.none() | st.just("plan")), lineage=lineage),
                reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
            )
        )
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(made=trees(), together=st.booleans())
def test_any_tree_of_completions_round_trips_bit_for_bit(
    made: list[Completion], together: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Ledger.open(tmp_path_factory.mktemp("tree") / "runs.db") as ledger:
        ledger.open_trajectory(Trajectory(id="tree", policy=POLICY))
        for batch in [made] if together else [[one] for one in made]:
            ledger.append_completions(batch)
        ledger.append_completions(made)
        with reread(ledger) as reader:
            assert [exactly(one) for one in reader.completions("tree")] == [exactly(one) for one in made]
            assert exactly(reader.completion(made[-1].id)) == exactly(made[-1])
            assert [exactly(one) for batch in reader.scan(batch=2) for one in batch] == [exactly(one) for one in made]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    raw = ledger_tokens.ids_to_raw(ids)
    assert list(ledger_tokens.raw_to_ids(ledger_tokens.unpack_ids(ledger_tokens.pack_ids(raw)))) == ids


@given(st.lists(_floats))
def test_log_probabilities_survive_packing_bit_for_bit(values: list[float]) -> None:
    raw = ledger_tokens.floats_to_raw(values)
    assert ledger_tokens.unpack_floats(ledger_tokens.pack_floats(raw)) == raw


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_the_common_prefix_is_that_of_a_plain_loop(left: list[int], right: list[int]) -> None:
    expected = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert ledger_tokens.common_prefix(ledger_tokens.ids_to_raw(left), ledger_tokens.ids_to_raw(right)) == expected


def test_float32_log_probabilities_take_half_the_bytes_of_float64() -> None:
    narrow = [struct.unpack("f", struct.pack("f", -math.pi * n))[0] for n in range(200)]
    wide = [-math.pi * n for n in range(200)]
    sizes = [len(ledger_tokens.pack_floats(ledger_tokens.floats_to_raw(values))) for values in (narrow, wide)]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("unpack", [ledger_tokens.unpack_ids, ledger_tokens.unpack_text])
@pytest.mark.parametrize("damaged", [b"", b"\x83\x00\x00", b"\x47abc", b"\x01abc"])
def test_foreign_bytes_are_refused_by_the_unpackers(unpack: Any, damaged: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        unpack(damaged)


def test_a_token_id_beyond_32_bits_is_refused_and_nothing_is_kept(ledger: Ledger) -> None:
    trajectory = opened(ledger)
    with pytest.raises(InvalidRequest, match="4294967296"):
        ledger.append_completions([completion(trajectory), completion(trajectory, prompt=(2**32,))])
    assert ledger.completions(trajectory) == ()


def bytes_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size"))
    connection.close()
    return (pages - free) * size


@pytest.mark.parametrize("variant", ["named parent", "no parent", "lineage", "rewritten history"])
def test_a_rollout_twice_as_long_takes_about_twice_the_bytes(tmp_path: Path, variant: str) -> None:
    sizes: list[int] = []
    for turns in (40, 80):
        path = tmp_path / f"{turns}.db"
        with Ledger.open(path) as ledger:
            trajectory = opened(ledger)
            made = conversation(trajectory, turns)
            for n, one in enumerate(made):
                changes: dict[str, Any] = {}
                if variant == "no parent":
                    changes["parent"] = None
                if variant == "lineage":
                    changes["origin"] = Origin(lineage={2 + 2 * k: made[k].id for k in range(n)})
                if variant == "rewritten history":
                    clock = {"role": "system", "content": f"It is {n} o'clock."}
                    changes["request"] = one.request.model_copy(update={"messages": (clock, *one.request.messages[1:])})
                ledger.append_completions([one.model_copy(update=changes)])
        sizes.append(bytes_of(path))
    assert sizes[1] < 2.2 * sizes[0]


def test_a_chain_of_two_thousand_calls_is_read_without_recursion(ledger: Ledger) -> None:
    trajectory = opened(ledger)
    made: list[Completion] = []
    for n in range(2000):
        prompt = (*made[-1].prompt_ids, *made[-1].token_ids) if made else (1,)
        made.append(completion(trajectory, prompt, (n,), parent=made[-1].id if made else None))
    ledger.append_completions(made)
    with reread(ledger) as reader:
        assert reader.completion(made[-1].id) == made[-1]


def test_equal_prompts_messages_and_tools_are_stored_once_for_all_rollouts(ledger: Ledger) -> None:
    for _ in range(5):
        trajectory = opened(ledger)
        for one in conversation(trajectory, 1, message={"role": "assistant", "content": "same"}):
            ledger.append_completions([one])
    connection = sqlite3.connect(ledger.path)
    assert connection.execute("SELECT COUNT(*) FROM blobs").fetchone()[0] == 5  # prompt ids, system, user, reply, tools
    connection.close()


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


# trajectories and rewards


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


# policies, jobs, checkpoints


def test_a_policy_is_registered_once_and_never_differently(ledger: Ledger) -> None:
    body = RegisterModel(project="mail", name="agent-001", base_model="Qwen/Qwen3-8B")
    assert ledger.put_policy(body)
    assert not ledger.put_policy(body)
    with pytest.raises(ModelMismatch, match="adapter"):
        ledger.put_policy(body.model_copy(update={"adapter": AdapterConfig(rank=4)}))
    assert ledger.policies() == (body,)
    assert ledger.policy(POLICY) == body


def job(**fields: Any) -> TrainJob:
    now = time.time()
    defaults: dict[str, Any] = {"id": "job-1", "policy": POLICY, "kind": "grpo", "state": "queued", "phase": "queued"}
    return TrainJob(**{**defaults, "created_at": now, "updated_at": now, **fields})


def test_an_idempotency_key_gives_the_same_job_for_the_same_body_only(ledger: Ledger) -> None:
    first = ledger.create_job(job(), b'{"a": 1}', "key")
    assert ledger.create_job(job(id="job-2"), b'{"a": 1}', "key") == first
    with pytest.raises(IdempotencyConflict, match="key"):
        ledger.create_job(job(id="job-3"), b'{"a": 2}', "key")
    with pytest.raises(Conflict, match="job-1"):
        ledger.create_job(job(), b"{}", None)
    assert ledger.jobs() == (first,)
    assert ledger.job_request("job-1") == b'{"a": 1}'


def test_a_job_moves_until_it_has_ended_and_never_after(ledger: Ledger) -> None:
    made = ledger.create_job(job(created_at=1.0, updated_at=1.0), b"{}")
    running = ledger.update_job("job-1", state="running", phase="loading")
    assert (running.state, running.phase, running.updated_at > made.updated_at) == ("running", "loading", True)
    result = TrainResult(job_id="job-1", policy=POLICY, status=TrainStatus.trained, previous_step=0, step=1, metrics={"kl": math.nan})
    ended = ledger.update_job("job-1", state="trained", phase="done", result=result)
    assert ledger.update_job("job-1", state="trained", phase="done", result=result) is not None
    with pytest.raises(Conflict, match="ended as trained"):
        ledger.update_job("job-1", state="failed")
    assert ledger.jobs("running") == ()
    with reread(ledger) as reader:
        assert reader.job("job-1").model_dump_json() == ended.model_dump_json()


def test_events_of_a_job_are_numbered_without_gaps_from_many_threads(ledger: Ledger) -> None:
    ledger.create_job(job(), b"{}")
    threads = [threading.Thread(target=ledger.append_event, args=("job-1", "progress", {"n": n})) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = ledger.events("job-1")
    assert [event.seq for event in events] == list(range(1, 21))
    assert {event.data["n"] for event in events} == set(range(20))
    assert ledger.events("job-1", after=18) == events[18:]


def test_checkpoints_mirror_the_folders(ledger: Ledger) -> None:
    made = [CheckpointInfo(policy=POLICY, step=n, path=f"/c/{n}", created_at=float(n), metrics={"r": n / 2}) for n in (1, 2, 3)]
    for one in (*made, made[0]):
        ledger.put_checkpoint(one)
    ledger.mark_checkpoint(POLICY, 2, pinned=True)
    ledger.mark_checkpoint(POLICY, 3, deleted=True)
    expected = (made[0], made[1].model_copy(update={"pinned": True, "latest": True}))
    assert ledger.checkpoints(POLICY) == expected
    assert ledger.checkpoints() == expected
    ledger.put_checkpoint(made[2])
    assert [one.latest for one in ledger.checkpoints()] == [False, False, True]


def test_names_and_numbers_that_sqlite_cannot_hold_are_bad_requests(ledger: Ledger) -> None:
    ledger.create_job(job(), b"{}")
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


def test_the_job_of_a_key_is_found(ledger: Ledger) -> None:
    ledger.create_job(job(), b"{}", "key")
    assert (ledger.job_of_key("key"), ledger.job_of_key("other")) == ("job-1", None)


# opening and closing


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
