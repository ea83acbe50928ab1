"""What tools and parameters are taken for, and the requests that are made from them: pure, on tools that no server has."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_lists import LISTS, TEXT, exploration_of, tool

from apprentice.integrations.mcp.compose import HERE, Candidate, Composer, side_of_wording
from apprentice.integrations.mcp.frames import FRAMES
from apprentice.integrations.mcp.kinds import shape_of, words_of
from apprentice.integrations.mcp.phrases import names_tool, wordings
from apprentice.integrations.mcp.references import OPEN
from apprentice.integrations.mcp.values import leaves_of


def candidates(name: str, seed: int, inferred: float = 0.0) -> list[Candidate]:
    composer = Composer(exploration_of(LISTS[name]), seed=seed, share=0.3, inferred=inferred)
    uses: Counter[tuple[str, ...]] = Counter()
    found: list[Candidate] = []
    for number in range(12):
        candidate = composer.candidate("test" if number % 3 == 2 else "train", 1 + number % 3, uses, lambda _: True)
        if candidate is not None:
            uses[candidate.functions] += 1
            found.append(candidate)
    return found


@pytest.mark.parametrize(
    ("schema", "name", "kind"),
    [
        ({"type": "string", "format": "email"}, "to", "email"),
        ({"type": "string", "format": "date-time"}, "x", "datetime"),
        ({"type": "string", "description": "An IANA zone"}, "place", "timezone"),
        ({"type": "string", "description": "as HH:MM"}, "begin", "time"),
        ({"type": "string"}, "due_date", "date"),
        ({"type": "string", "enum": ["a", "b"]}, "time", "enum"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "count", "integer"),
        ({"type": ["string", "null"]}, "tableName", "table"),
        ({"type": "string"}, "file_path", "path"),
        ({"type": "string"}, "outputDirectory", "folder"),
        ({"type": "string"}, "userQuery", "search"),
        ({"type": "string"}, "comment", "sentence"),
        ({"type": "string"}, "frobnication", "text"),
    ],
)
def test_a_parameter_is_taken_for_what_its_format_name_or_description_says(schema: dict[str, object], name: str, kind: str) -> None:
    (leaf,) = shape_of("f", tool("do_it", "", None, **{name: schema})).leaves
    assert leaf.kind == kind


@pytest.mark.parametrize(
    ("name", "hints", "reads"),
    [
        ("get_thing", {}, True),
        ("read_note", {}, True),
        ("search-and-replace", {}, False),
        ("get_or_create_user", {}, False),
        ("remove_thing", {}, False),
        ("thing", {}, False),
        ("get_thing", {"readOnlyHint": False}, False),
        ("wipe", {"readOnlyHint": True}, True),
        ("listAll", {"destructiveHint": True}, False),
    ],
)
def test_whether_a_tool_reads_is_told_by_its_hint_and_else_by_its_verb(name: str, hints: dict[str, object], reads: bool) -> None:
    assert shape_of(name, tool(name, "", hints)).reads is reads


def test_sql_is_told_apart_by_what_it_may_do() -> None:
    kinds = {shape.function: shape.leaves[0].kind for shape in exploration_of(LISTS["database"]).shapes if shape.leaves}
    assert kinds == {"run_select": "sql_read", "modify": "sql_write", "new_table": "sql_create", "describe_table": "table"}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(LISTS)), seed=st.integers(0, 10_000))
def test_every_value_stands_in_the_request_and_no_tool_is_named(name: str, seed: int) -> None:
    found = candidates(name, seed)
    assert found
    for candidate in found:
        for call in candidate.calls:
            assert not names_tool(candidate.text, call.shape), candidate.text
            if call.statement is not None:
                assert all(
                    value in candidate.text
                    for key, value in call.statement.slots.items()
                    if key != "text" or "count" not in call.statement.frame.name
                )
                continue
            for _, value in leaves_of(call.arguments):
                if call.reference is not None and value == OPEN:
                    assert call.reference.said in candidate.text
                    continue
                assert str(value) in candidate.text or (value == "." and HERE in candidate.text), (candidate.text, value)
        assert "{" not in candidate.text


@settings(max_examples=15, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(LISTS)), seed=st.integers(0, 10_000))
def test_candidates_of_the_two_parts_share_no_value_and_no_wording(name: str, seed: int) -> None:
    composer = Composer(exploration_of(LISTS[name]), seed=seed, share=0.3, inferred=0.0)
    values: dict[str, set[str]] = {"train": set(), "test": set()}
    sides: dict[str, set[str]] = {"train": set(), "test": set()}
    for number in range(30):
        side = "test" if number % 2 else "train"
        candidate = composer.candidate(side, 1 + number % 2, Counter(), lambda _: True)
        if candidate is not None:
            sides[side].add(side_of_wording(candidate.wording))
            values[side] |= {
                str(value) for call in candidate.calls for _, value in leaves_of(call.arguments) if value not in (".", 1, 2, 3)
            }
    assert sides["train"] <= {"train"}
    assert sides["test"] <= {"test"}
    assert not values["train"] & values["test"]


def test_later_calls_of_a_chain_use_what_earlier_ones_made() -> None:
    for candidate in candidates("notes", 3):
        for earlier, later in zip(candidate.calls, candidate.calls[1:], strict=False):
            before = {str(value) for _, value in leaves_of(earlier.arguments)}
            after = " ".join(str(value) for _, value in leaves_of(later.arguments))
            assert after == "." or any(value in after for value in before) or len(candidate.calls) == 3


def test_a_city_that_everybody_knows_may_stand_for_its_zone() -> None:
    found = [c for seed in range(6) for c in candidates("clock", seed, inferred=1.0)]
    cities = [c for c in found if c.form == "inferred"]
    assert cities
    for candidate in cities:
        assert "/" not in candidate.text
        for _, value in leaves_of(candidate.calls[0].arguments):
            assert str(value).split("/")[-1].replace("_", " ") in candidate.text


def test_every_frame_has_wordings_for_both_parts_and_fills_all_its_slots() -> None:
    for frame in FRAMES:
        assert len(frame.asks) % 3 == 0, frame.name
        assert len(frame.does) % 3 == 0, frame.name
        for text in (*frame.asks, *frame.does):
            slots = set(re.findall(r"\{([^{}]+)\}", text)) - {"object", "objects", "one"}
            assert slots == set(frame.slots), text


def test_a_call_that_no_frame_knows_is_worded_by_the_names_of_its_parameters() -> None:
    shape = shape_of("get_quux", tool("get_quux", "", None, flavour=TEXT, level={"type": "integer"}))
    texts = [w.text for w in wordings(shape, [(shape.leaves[0], "mint"), (shape.leaves[1], 7)])]
    assert 'What is the quux with the flavour "mint" and the level 7?' in texts
    assert all(words_of("get_quux")[1] in text for text in texts)
