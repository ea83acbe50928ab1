"""What is recorded comes back bit for bit, and takes no more room than it must."""

from __future__ import annotations

import math
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.recordings import POLICY, completion, conversation, opened, recorded, reread

from apprentice.core.errors import InvalidRequest
from apprentice.core.records import BranchReason, ChatRequest, Completion, FinishReason, Origin, SamplingParams, Trajectory
from apprentice.core.server import ledger_tokens
from apprentice.core.server.ledger import Ledger


def exactly(recorded: Completion) -> tuple[object, ...]:
    """All that must come back, with floats as their bits: NaN and -0.0 count."""
    bits = [struct.pack(f"<{len(v)}d", *v) for v in (recorded.logprobs, recorded.sampling_logprobs)]
    rest = recorded.model_dump(exclude={"logprobs", "sampling_logprobs", "request", "message"})
    spelled = ledger_tokens.dump_json([recorded.request.model_dump(), recorded.message])
    return rest, bits, spelled


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
