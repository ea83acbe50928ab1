"""Scenario files: written and read, what is wrong named with its line; splits that share nothing; weights by solve rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apprentice.core.errors import ConfigError
from apprentice.core.records import JsonObject, Scenario
from apprentice.integrations.mcp.scenarios import (
    argument_values,
    notes_of,
    read_scenarios,
    split,
    wording_of,
    write_scenarios,
)


def scenario(number: int, tool: str = "get", frame: str | None = None, wording: int = 0, **arguments: object) -> Scenario:
    metadata: JsonObject = {"calls": [{"tool": tool, "arguments": {**arguments}, "result": "1"}]}  # pyright: ignore
    if frame:
        metadata |= {"frame": frame, "wording": wording}
    return Scenario(id=f"s-{number}", input=f"request {number}", metadata=metadata)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = [scenario(1, city="Málaga"), scenario(2, tool="put", path="a\u2028b", n=3)]
    write_scenarios(tmp_path / "s.jsonl", made)
    assert read_scenarios(tmp_path / "s.jsonl") == made
    assert len((tmp_path / "s.jsonl").read_text(encoding="utf-8").split("\n")) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["s.jsonl"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "line 2: a scenario is one JSON object a line"),
        ("[1]", "line 2"),
        ('{"id": "a b", "input": "x"}', "line 2: id is wrong"),
        ('{"id": "a", "input": "x", "extra": 1}', "line 2: extra is wrong"),
        ('{"id": "a", "input": "x"}', "line 2: scenario a: metadata.calls is wrong"),
        ('{"id": "a", "input": "x", "metadata": {"calls": [{"arguments": {}}]}}', "metadata.calls.0.tool is wrong"),
        ('{"id": "a", "input": 3, "metadata": {"calls": []}}', "line 2: `input` is the request"),
        ('{"id": "s-1", "input": "x", "metadata": {"calls": []}}', "line 2: the id 's-1' is also that of line 1"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(scenario(1).model_dump(mode="json")) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_scenarios(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_empty_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scenarios(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no scenario"):
        read_scenarios(tmp_path / "empty.jsonl")


VALUES = [f"value {index}" for index in range(30)]
SCENARIOS = st.lists(
    st.tuples(st.sampled_from(["one", "two", "three"]), st.sampled_from(VALUES), st.sampled_from(VALUES), st.integers(0, 5)),
    min_size=2,
    max_size=60,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(rows=SCENARIOS, held_out=st.integers(1, 20), seed=st.integers(0, 5))
def test_whatever_the_scenarios_the_parts_share_no_value_and_no_wording_unless_it_is_said(
    rows: list[tuple[str, str, str, int]], held_out: int, seed: int
) -> None:
    made = [scenario(i, tool, f"frame of {tool}", wording, a=a, b=b) for i, (tool, a, b, wording) in enumerate(rows)]
    train, test = split(made, held_out, seed)
    assert len(test) <= held_out
    assert not {s.id for s in train} & {s.id for s in test}
    trained = set().union(*(argument_values(s) for s in train)) if train else set()
    for one in test:
        assert argument_values(one) & trained == set(one.metadata.get("shared_values", []))
    assert not {wording_of(s) for s in train} & {wording_of(s) for s in test}
    assert all(s.metadata["split"] == "train" for s in train)
    assert all(s.metadata["split"] == "test" for s in test)


def test_a_split_of_values_that_can_be_kept_apart_shares_none_and_fills_the_held_out_part() -> None:
    made = [scenario(i, "get", "f", i % 3, zone=f"zone {i}", time=f"{i % 24:02d}:{i:02d}") for i in range(60)]
    train, test = split(made, 15)
    assert len(test) == 15
    assert len(train) >= 40
    assert not any("shared_values" in s.metadata for s in test)


def test_values_that_cannot_be_kept_apart_may_be_in_both_parts_and_the_file_says_so() -> None:
    made = [scenario(i, "sort", database="main", order=["up", "down"][i % 2], word=f"w{i}") for i in range(30)]
    train, test = split(made, 8)
    assert len(test) == 8
    assert len(train) >= 15
    assert {value for s in test for value in s.metadata["shared_values"]} <= {"main", "up", "down"}


def test_spellings_of_one_value_are_one_value() -> None:
    one, two = scenario(1, path="./notes//a.txt"), scenario(2, path="{workdir}/notes/a.txt")
    assert argument_values(one) == argument_values(two)
    assert argument_values(scenario(3, n=3)) == argument_values(scenario(4, n="3.0"))


def test_with_many_tools_one_in_eight_is_held_out_wholly() -> None:
    made = [scenario(i, f"tool{i % 9}", x=f"v{i}") for i in range(90)]
    train, test = split(made, 40)
    trained = {call.tool for s in train for call in notes_of(s).calls}
    tested = {call.tool for s in test for call in notes_of(s).calls}
    assert len(tested - trained) == 1
    few = [scenario(i, f"tool{i % 5}", x=f"v{i}") for i in range(90)]
    train, test = split(few, 30)
    assert {call.tool for s in test for call in notes_of(s).calls} <= {call.tool for s in train for call in notes_of(s).calls}
