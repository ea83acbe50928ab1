"""What moves between two runs, which facts a result holds, and how they are found in an answer."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_lists import LISTS, TEXT, exploration_of, tool

from apprentice.integrations.mcp.facts import facts_of, live_text, told
from apprentice.integrations.mcp.kinds import shape_of
from apprentice.integrations.mcp.masks import entries_of, masked, volatile_between
from apprentice.integrations.mcp.values import canonical, parsed, plain

NOW = datetime(2026, 12, 1, 13, 30, 58, tzinfo=UTC)


def test_a_clock_moves_even_if_both_runs_saw_the_same_second() -> None:
    text = json.dumps({"zone": "Asia/Tokyo", "now": "2026-12-01T22:30:57+09:00", "weekday": "Tuesday"})
    moves = volatile_between(text, text, NOW)
    assert moves == ["$.now", "$.weekday"]
    later = text.replace("22:30:57", "23:59:01").replace("Tuesday", "Wednesday")
    assert masked(text, moves) == masked(later, moves)
    assert masked(text, moves) != masked(later.replace("Tokyo", "Seoul"), moves)


def test_of_a_time_that_was_asked_about_only_the_date_moves() -> None:
    text = json.dumps({"from": "2026-12-01T14:30:00-05:00", "to": "2026-12-02T04:30:00+09:00"})
    moves = volatile_between(text, text, NOW, ["14:30"])
    assert moves == ["$.from date", "$.to date"]
    assert masked(text, moves) == masked(text.replace("12-02", "12-09").replace("12-01", "12-08"), moves)
    assert masked(text, moves) != masked(text.replace("04:30", "05:30"), moves)


def test_ids_and_durations_are_found_by_comparing() -> None:
    one, two = {"id": "a81f", "took": 0.12, "name": "x"}, {"id": "77cc", "took": 0.34, "name": "x"}
    moves = volatile_between(json.dumps(one), json.dumps(two), NOW)
    assert moves == ["$.id", "$.took"]
    first, second = "Saved x as job 8f3a in 12 ms\nFine", "Saved x as job 99b1 in 7 ms\nFine"
    moves = volatile_between(first, second, NOW)
    assert moves is not None
    assert masked(first, moves) == masked(second, moves)
    assert masked(first, moves) != masked(second.replace("Saved x", "Saved y"), moves)


@pytest.mark.parametrize(("one", "two"), [('{"a": 1}', '{"b": 1}'), ("[1]", "[1, 2]"), ("x\ny", "x")])
def test_results_that_differ_in_more_than_values_are_not_the_same(one: str, two: str) -> None:
    assert volatile_between(one, two, NOW) is None


def test_results_are_understood_as_json_python_or_labelled_lines() -> None:
    assert parsed("[{'a': None, 'b': 'it''s'}]") == [{"a": None, "b": "its"}]
    assert parsed("size: 12\nkind: file") == {"size": "12", "kind": "file"}
    assert parsed("just words") == "just words"
    assert parsed("[" * 100_000) == "[" * 100_000


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
def test_one_spelling_is_its_own_spelling(value: object) -> None:
    assert plain(plain(value)) == plain(value)  # pyright: ignore


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"n": 3}, {"n": "3"}),
        ({"n": 3.0}, {"n": 3}),
        ({"timezone": "asia/tokyo"}, {"timezone": "Asia/Tokyo"}),
        ({"path": "./a//b.txt"}, {"path": "{workdir}/a/b.txt"}),
        ({"path": "{workdir}"}, {"path": "."}),
        ({"q": "SELECT a,b FROM t;"}, {"q": "select  a , b\nfrom T"}),
        ({"time": "9:05"}, {"time": "09:05"}),
        ({"a": 1, "b": None}, {"a": 1}),
        ({"text": " x "}, {"text": "x"}),
        ({"sum": "32 - 22"}, {"sum": "32-22"}),
        ({"sum": "2 * ( 3 + 4.5 )"}, {"sum": "2*(3+4.5)"}),
    ],
)
def test_two_ways_to_write_the_same_are_equal(one: dict[str, object], two: dict[str, object]) -> None:
    assert canonical(one) == canonical(two)  # pyright: ignore


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"q": "SELECT 'A'"}, {"q": "SELECT 'a'"}),
        ({"zip": "0123"}, {"zip": "123"}),
        ({"name": "Asia"}, {"name": "asia"}),
        ({"path": "a.txt"}, {"path": "b/a.txt"}),
        ({"flag": True}, {"flag": 1}),
        ({"sum": "3 22"}, {"sum": "322"}),
        ({"sum": "32 - 22"}, {"sum": "22 - 32"}),
        ({"title": "a - b"}, {"title": "a-b"}),
    ],
)
def test_what_is_not_the_same_stays_different(one: dict[str, object], two: dict[str, object]) -> None:
    assert canonical(one) != canonical(two)  # pyright: ignore


def test_the_fact_of_a_conversion_is_the_time_that_was_not_given() -> None:
    shape = exploration_of(LISTS["clock"]).shapes[1]
    result = json.dumps(
        {"source": {"datetime": "2026-12-01T14:30:00-05:00"}, "target": {"datetime": "2026-12-02T04:30:00+09:00", "is_dst": False}}
    )
    arguments = {"from_timezone": "America/New_York", "to_timezone": "Asia/Tokyo", "time": "14:30"}
    moves = volatile_between(result, result, NOW, ["14:30"]) or []
    (fact,) = facts_of(shape, 0, arguments, result, [], moves)
    assert (fact.text, fact.path, fact.live) == ("04:30", ("target", "datetime"), False)


def test_a_fact_that_moves_is_read_from_the_result_of_the_moment() -> None:
    shape = exploration_of(LISTS["clock"]).shapes[0]
    result = json.dumps({"timezone": "Asia/Tokyo", "datetime": "2026-12-01T22:30:57+09:00"})
    (fact,) = facts_of(shape, 0, {"tz": "Asia/Tokyo"}, result, [], ["$.datetime"])
    assert fact.live
    assert live_text(fact.dump(), result.replace("22:30", "07:11")) == "07:11"


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        ("[{'name': 'ships'}, {'name': 'cars'}]", ["ships", "cars"]),
        ("[FILE] a.txt   3 B\n[DIR] notes", ["a.txt", "notes"]),
        ("[{'COUNT(*)': 12}]", ["12"]),
        ("The sum of 3 and 4 is 7.", ["7"]),
        ("size: 41\ncreated: Tue Dec 01 2026", ["41"]),
        ("Echo: a rather long sentence", []),
        (json.dumps([{"name": f"n{i}"} for i in range(9)]), []),
        ("x" * 500, []),
    ],
)
def test_facts_are_few_short_and_not_given(result: str, facts: list[str]) -> None:
    shape = shape_of("get_things", tool("get_things", "", None, a=TEXT, b=TEXT, c={**TEXT, "optional": True}))
    arguments = {"a": "3", "b": "4", "c": "a rather long sentence"}
    assert [fact.text for fact in facts_of(shape, 0, arguments, result, [], [])] == facts


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        ("[FILE] a.txt          3 B\n[FILE] b.txt    1.20 KB\n\nTotal: 2 files, 0 directories\nCombined size: 1.20 KB", ["3 B", "1.20 KB"]),
        ("[DIR] notes\n[FILE] a.txt          3 B\n\nTotal: 1 files, 1 directories\nCombined size: 3 B", ["3 B"]),
        ("[DIR] notes\n\nTotal: 0 files, 1 directories\nCombined size: 0 B", ["notes"]),
    ],
)
def test_who_asks_for_sizes_is_told_sizes(result: str, facts: list[str]) -> None:
    shape = shape_of("list_directory_with_sizes", tool("list_directory_with_sizes", "", None, path=TEXT))
    assert [fact.text for fact in facts_of(shape, 0, {"path": "x"}, result, [], [])] == facts
    named = shape_of("list_directory", tool("list_directory", "", None, path=TEXT))
    assert not {fact.text for fact in facts_of(named, 0, {"path": "x"}, result, [], [])} & {"3 B", "1.20 KB"}


@pytest.mark.parametrize(
    "result",
    [
        "Total: 0 files, 0 directories\nCombined size: 0 B",
        "No matches found",
        "Nothing was found.",
        json.dumps({"message": "No such rows yet"}),
        json.dumps({"result": "0 items"}),
    ],
)
def test_how_a_server_says_that_there_is_nothing_is_no_fact(result: str) -> None:
    shape = shape_of("list_directory_with_sizes", tool("list_directory_with_sizes", "", None, path=TEXT))
    assert facts_of(shape, 0, {"path": "x"}, result, [], []) == []


@pytest.mark.parametrize(
    ("fact", "answer"),
    [
        ("23:30", "It is 11:30 PM in Tokyo."),
        ("23:30", "That is 23:30."),
        ("09:05", "9:05 in the morning"),
        ("09:00", "at 9 a.m."),
        ("1234", "There are 1,234 of them."),
        ("68.0", "The answer is 68."),
        ("68", "68.0"),
        ("Don't panic", 'It says "don’t panic".'),
        ("a.txt", "The file is `a.txt`."),
        ("3 B", "a.txt has 3 bytes"),
        ("1.20 KB", "It takes 1.20KB."),
        ("-5", "It is -5."),
        ("-5", "It is −5 degrees."),
        ("5", "The years 3-5"),
        ("5", "n:5"),
        ("5", "- 5 cities"),
        ("10:30", "At 10:30:15."),
    ],
)
def test_an_answer_may_say_a_fact_in_its_own_way(fact: str, answer: str) -> None:
    assert told(fact, answer)


@pytest.mark.parametrize(
    ("fact", "answer"),
    [
        ("23:30", "13:30"),
        ("23:30", "11:30 AM"),
        ("12", "112"),
        ("12", "12.5"),
        ("cat", "concatenate"),
        ("5", ""),
        ("5", "-5"),
        ("5", "It is −5."),
        ("5", "(-5)"),
        ("10", "at 10:30"),
        ("30", "at 10:30"),
        ("5.5", "-5.5"),
    ],
)
def test_something_else_is_not_the_fact(fact: str, answer: str) -> None:
    assert not told(fact, answer)


def test_the_order_of_json_lines_and_keys_is_no_part_of_a_state() -> None:
    one = {"s": {"files": {"m.jsonl": '{"a": 1, "b": 2}\n{"c": 3}'}}}
    two = {"s": {"files": {"m.jsonl": '{"c": 3}\n{"b": 2, "a": 1}\n'}}}
    assert entries_of(one) == entries_of(two)  # pyright: ignore
    assert entries_of(one) != entries_of({"s": {"files": {"m.jsonl": '{"c": 3}'}}})
