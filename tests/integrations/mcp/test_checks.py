"""Grading by effect: what counts as a success, what does not, and what each part is worth."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_lists import tool

from apprentice.core.errors import ConfigError
from apprentice.core.records import JsonObject, Scenario
from apprentice.integrations.mcp.checks import CheckWeights, Grade, demonstration, grade
from apprentice.integrations.mcp.effect import same_state, share_of
from apprentice.integrations.mcp.execute import changed_entries, digest_of_rest
from apprentice.integrations.mcp.reply import ToolReply
from apprentice.integrations.mcp.tools import ToolSet

TIME = json.dumps({"source": "14:30", "target": {"zone": "Asia/Tokyo", "datetime": "2026-12-02T04:30:00+09:00"}})
ARGUMENTS: JsonObject = {"from_zone": "America/New_York", "to_zone": "Asia/Tokyo", "time": "14:30"}


class World:
    """An environment of which only the state and the tools' names count."""

    toolset = ToolSet.build([tool(name) for name in ("make_thing", "delete_thing", "send", "send_again", "get_thing")])

    def __init__(self, files: dict[str, str] | None = None) -> None:
        self.files = files or {}

    async def state(self) -> JsonObject:
        return {"s": {"files": {**self.files}}}


def reading(**changes: Any) -> Scenario:
    call = {"tool": "convert", "arguments": ARGUMENTS, "result": TIME, "volatile": ["$.target.datetime date"]}
    metadata: dict[str, Any] = {"calls": [call], "facts": ["04:30"], **changes}
    return Scenario(id="t", input="When it is 14:30 in New York, what time is it in Tokyo?", metadata=metadata)


def writing(files: dict[str, str], *, calls: list[JsonObject] | None = None) -> Scenario:
    before: JsonObject = {"s": {"files": {"old.txt": "x"}}}
    after: JsonObject = {"s": {"files": {"old.txt": "x", **files}}}
    changed = changed_entries(before, after, [])
    made: list[JsonObject] = [
        {"tool": "write", "arguments": {"path": name, "text": text}, "result": "ok", "changes": True} for name, text in files.items()
    ]
    state: JsonObject = {"changed": changed, "rest": digest_of_rest(after, list(changed)), "ignored": []}
    metadata: dict[str, Any] = {"calls": calls or made, "facts": [], "state": state}
    return Scenario(id="w", input="Write it.", metadata=metadata)


def reply(tool: str, arguments: Any, text: str = "ok", outcome: Any = "ok") -> ToolReply:
    return ToolReply("s", tool, arguments, outcome, text, function=tool)


async def judged(scenario: Scenario, events: list[ToolReply], answer: str = "", files: dict[str, str] | None = None) -> Grade:
    return await grade(scenario, World(files), events, answer)


async def test_the_right_call_with_the_fact_told_is_worth_everything() -> None:
    found = await judged(reading(), [reply("convert", {**ARGUMENTS, "from_zone": "america/new_york"}, TIME)], "It is 4:30 am there.")
    assert found.success
    assert found.reward == pytest.approx(1.0)
    weights = CheckWeights()
    assert weights.format + weights.tool + weights.arguments + weights.executed + weights.result + weights.facts == pytest.approx(1.0)


async def test_the_same_result_on_another_day_is_the_same_result() -> None:
    tomorrow = TIME.replace("2026-12-02", "2027-03-05")
    assert (await judged(reading(), [reply("convert", ARGUMENTS, tomorrow)], "04:30")).success


async def test_without_the_call_no_answer_passes_however_many_candidates_it_lists() -> None:
    everything = " ".join(f"{hour:02d}:{minute:02d}" for hour in range(24) for minute in range(60))
    assert not (await judged(reading(), [], everything)).success
    other = reply("convert", {**ARGUMENTS, "to_zone": "Asia/Seoul"}, TIME.replace("Tokyo", "Seoul"))
    found = await judged(reading(), [other], everything)
    assert not found.success
    assert found.parts["facts"] == 0
    assert 0.2 < found.reward < 0.4


async def test_the_right_call_without_the_fact_is_no_success() -> None:
    found = await judged(reading(), [reply("convert", ARGUMENTS, TIME)], "It is half past three.")
    assert not found.success
    assert found.reward == pytest.approx(0.75)


async def test_each_step_on_the_way_is_worth_a_little_more() -> None:
    steps = [
        [],
        [reply("convert", "not json", "The arguments must be a JSON object", "tool_error")],
        [reply("list", {}, "[]")],
        [reply("convert", {"time": "1"}, "missing", "tool_error")],
        [reply("convert", {**ARGUMENTS, "time": "15:30"}, "no", "tool_error")],
        [reply("convert", {**ARGUMENTS, "time": "15:30"}, TIME.replace("04:30", "05:30"))],
        [reply("convert", ARGUMENTS, TIME)],
    ]
    rewards = [(await judged(reading(), events)).reward for events in steps]
    assert rewards[0] == 0
    assert rewards == sorted(rewards)
    assert len(set(rewards[2:])) == len(rewards[2:])


async def test_calls_beyond_the_reference_cost_a_little_and_do_no_other_harm() -> None:
    events = [reply("list", {}, "[]"), reply("convert", ARGUMENTS, TIME), reply("list", {}, "[]")]
    found = await judged(reading(), events, "04:30")
    assert found.success
    assert found.reward == pytest.approx(1 - 2 * 0.02)
    many = await judged(reading(), [*[reply("list", {}, "[]")] * 50, reply("convert", ARGUMENTS, TIME)], "04:30")
    assert many.reward == pytest.approx(0.9)


async def test_a_fact_that_moves_is_compared_with_what_the_rollout_saw() -> None:
    now = json.dumps({"zone": "Asia/Tokyo", "datetime": "2026-12-01T22:30:57+09:00"})
    scenario = Scenario(
        id="n",
        input="What time is it in Tokyo?",
        metadata={
            "calls": [{"tool": "now", "arguments": {"zone": "Asia/Tokyo"}, "result": now, "volatile": ["$.datetime"]}],
            "facts": [],
            "live_facts": [{"call": 0, "path": ["datetime"], "form": "time"}],
        },
    )
    seen = [reply("now", {"zone": "Asia/Tokyo"}, now.replace("22:30", "07:11"))]
    assert (await judged(scenario, seen, "It is 07:11.")).success
    assert not (await judged(scenario, seen, "It is 22:30.")).success
    assert not (await judged(scenario, [reply("now", {"zone": "Asia/Seoul"}, now.replace("Tokyo", "Seoul"))], "22:30")).success


async def test_the_state_counts_not_the_way_to_it() -> None:
    scenario = writing({"a.txt": "hello"})
    right = {"old.txt": "x", "a.txt": "hello\n"}
    other_way = [reply("write", {"path": "b.txt", "text": "hello"}), reply("move", {"from": "b.txt", "to": "a.txt"})]
    assert (await judged(scenario, other_way, files=right)).success
    assert (await judged(scenario, [reply("write", {"path": "./a.txt", "text": "hello"})], files=right)).success


@pytest.mark.parametrize(
    "left", [{"old.txt": "x"}, {"old.txt": "x", "a.txt": "bye"}, {"old.txt": "x", "a.txt": "hello", "b.txt": ""}, {"a.txt": "hello"}]
)
async def test_a_state_with_less_more_or_other_things_is_not_the_state(left: dict[str, str]) -> None:
    found = await judged(writing({"a.txt": "hello"}), [reply("write", {"path": "a.txt", "text": "hello"})], "Done.", files=left)
    assert not found.success
    assert found.parts["result"] == 0


async def test_where_no_state_can_be_seen_every_change_must_have_been_made_as_asked() -> None:
    call: JsonObject = {"tool": "send", "arguments": {"to": "a@b.c", "n": 2}, "result": "sent", "changes": True}
    scenario = Scenario(id="c", input="Send.", metadata={"calls": [call]})
    assert (await judged(scenario, [reply("send", {"to": "a@b.c", "n": "2"}, "sent")])).success
    assert not (await judged(scenario, [reply("send", {"to": "a@b.c", "n": 3}, "sent")])).success
    assert not (await judged(scenario, [reply("send", {"to": "a@b.c", "n": 2}, "no", "reported_failure")])).success


SEND: JsonObject = {"tool": "send", "arguments": {"to": "a@b.c"}, "result": "sent", "changes": True}
GET: JsonObject = {"tool": "get_thing", "arguments": {"name": "x"}, "result": "x is a lamp"}


@pytest.mark.parametrize(
    ("tools", "right"),
    [
        (["send"], True),
        (["get_thing", "send", "get_thing"], True),
        (["send", "send"], False),
        (["send", "delete_thing"], False),
        (["send_again", "send"], False),
        (["get_thing"], False),
    ],
)
async def test_where_no_state_can_be_seen_no_other_changes_are_made_and_none_twice(tools: list[str], right: bool) -> None:
    scenario = Scenario(id="c", input="Send.", metadata={"calls": [SEND]})
    assert (await judged(scenario, [reply(name, {"to": "a@b.c"}) for name in tools])).success is right
    failed = reply("delete_thing", {"to": "a@b.c"}, "not found", "tool_error")
    assert (await judged(scenario, [failed, *(reply(name, {"to": "a@b.c"}) for name in tools)])).success is right


async def test_a_change_that_is_asked_for_twice_is_made_twice() -> None:
    scenario = Scenario(id="c", input="Send it, and send it again.", metadata={"calls": [SEND, SEND]})
    assert not (await judged(scenario, [reply("send", {"to": "a@b.c"})])).success
    assert (await judged(scenario, [reply("send", {"to": "a@b.c"})] * 2)).success
    other = {**SEND, "arguments": {"to": "b@b.c"}}
    scenario = Scenario(id="c", input="Send it twice, and to b.", metadata={"calls": [SEND, SEND, other]})
    assert not (await judged(scenario, [reply("send", {"to": to}) for to in ("a@b.c", "b@b.c", "b@b.c")])).success


async def test_who_only_was_to_read_may_change_nothing() -> None:
    scenario = Scenario(id="r", input="What is x?", metadata={"calls": [GET], "facts": ["lamp"]})
    right = reply("get_thing", {"name": "x"}, "x is a lamp")
    assert (await judged(scenario, [right], "A lamp.")).success
    assert not (await judged(scenario, [right, reply("delete_thing", {"name": "x"})], "A lamp.")).success


@pytest.mark.parametrize("left", [{}, {"things.jsonl": ""}, {"things.db": '{"tables": {}}'}])
async def test_what_is_made_and_deleted_again_must_have_been_made(left: dict[str, str]) -> None:
    calls: list[JsonObject] = [
        {"tool": name, "arguments": {"name": "lamp", "by": "hi"}, "result": "ok", "changes": True}
        for name in ("make_thing", "delete_thing")
    ]
    scenario = writing(left, calls=calls)
    after = {"old.txt": "x", **left}
    both = [reply(name, {"name": "lamp", "by": "hi"}) for name in ("make_thing", "delete_thing")]
    assert (await judged(scenario, both, files=after)).success
    assert not (await judged(scenario, [reply("delete_thing", {"name": "chair"})], files=after)).success
    assert not (await judged(scenario, [*both[:1], reply("delete_thing", {"name": "lamp"}, "no", "tool_error")], files=after)).success
    assert not (await judged(scenario, [], files=after)).success


async def test_an_empty_thing_that_the_request_names_is_a_trace_of_its_making() -> None:
    scenario = writing({"a.txt": ""})
    assert (await judged(scenario, [reply("touch", {"file": "a.txt"})], files={"old.txt": "x", "a.txt": ""})).success


async def test_another_reading_tool_with_the_same_values_and_all_the_facts_will_do() -> None:
    listing = Scenario(
        id="l",
        input="What is in notes?",
        metadata={
            "calls": [{"tool": "list", "arguments": {"path": "notes"}, "result": "[FILE] a.txt\n[FILE] b.txt"}],
            "facts": ["a.txt", "b.txt"],
        },
    )
    sized = reply("list_with_sizes", {"folder": "notes"}, "[FILE] a.txt  3 B\n[FILE] b.txt  4 B")
    assert (await judged(listing, [sized], "a.txt and b.txt")).success
    elsewhere = reply("list_with_sizes", {"folder": "."}, "[FILE] a.txt  3 B\n[FILE] b.txt  4 B")
    assert not (await judged(listing, [elsewhere], "a.txt and b.txt")).success


async def test_a_count_that_is_right_by_chance_is_not_right() -> None:
    count: JsonObject = {"tool": "count", "arguments": {"table": "ships"}, "result": "3"}
    scenario = Scenario(id="n", input="How many?", metadata={"calls": [count], "facts": ["3"]})
    assert not (await judged(scenario, [reply("count", {"table": "cars"}, "3")], "3")).success
    assert (await judged(scenario, [reply("count", {"table": "ships"}, "3")], "3")).success


QUERIES = [
    (
        "SELECT COUNT(*) FROM ships",
        [
            ("select COUNT( * )\nfrom ships;", 8, True),
            ("SELECT COUNT(name) AS n FROM ships", 8, True),
            ("SELECT COUNT(*) total FROM ships s", 8, True),
            ("SELECT COUNT(*), MIN(name) FROM ships", 8, False),
            ("SELECT COUNT(*) FROM cars", 8, False),
            ("SELECT COUNT(*) FROM ships WHERE price > 1", 8, False),
            ("SELECT COUNT(DISTINCT name) FROM ships", 8, False),
            ("SELECT 8 AS 'COUNT(*)' FROM ships LIMIT 1", 8, False),
            ("SELECT price FROM ships LIMIT 1", 8, False),
            ("SELECT COUNT(*) AS n FROM ships", 9, False),
        ],
    ),
    (
        "SELECT price FROM ships WHERE name = 'Ann' AND age > 3",
        [
            ("select s.price from ships as s where s.age > 3 and s.name == 'Ann'", 8, True),
            ("SELECT price AS p FROM ships WHERE LOWER(name) = 'ann' AND age > 3 LIMIT 1", 8, True),
            ('SELECT price FROM ships WHERE name = "Ann" AND age > 3', 8, True),
            ("SELECT name, price FROM ships WHERE name LIKE 'Ann' AND age > 3", 8, True),
            ("SELECT * FROM ships WHERE name = 'Ann' AND age > 3", 8, True),
            ("SELECT age FROM ships WHERE name = 'Ann' AND age > 3", 8, False),
            ("SELECT price FROM ships WHERE name = 'Bob' AND age > 3", 8, False),
            ("SELECT price FROM ships WHERE name = 'Ann' OR age > 3", 8, False),
            ("SELECT price FROM ships WHERE name = 'Ann' AND age < 3", 8, False),
            ("SELECT price FROM ships WHERE name = 'Ann' AND price > 3", 8, False),
            ("SELECT 8 AS price FROM ships WHERE name = 'Ann' AND age > 3", 8, False),
            ("SELECT price FROM ships", 8, False),
            ("SELECT price, 8 FROM ships WHERE name = 'Ann' AND age > 3", 8, False),
        ],
    ),
]


@pytest.mark.parametrize(("asked", "query", "value", "right"), [(asked, *case) for asked, cases in QUERIES for case in cases])
async def test_a_query_may_be_put_in_other_words_but_ask_nothing_else(asked: str, query: str, value: int, right: bool) -> None:
    call: JsonObject = {"tool": "query", "arguments": {"query": asked}, "result": "[{'x': 8}]"}
    scenario = Scenario(id="q", input="How many ships?", metadata={"calls": [call], "facts": ["8"]})
    for row in ({"x": value}, {"some": "Ann", "y": value}):
        assert (await judged(scenario, [reply("query", {"query": query}, str([row]))], "8")).success is right
    assert not (await judged(scenario, [reply("query", {"query": query}, "[{'x': 7}]")], "8")).success
    assert not (await judged(scenario, [reply("query", {"query": query}, str([{"x": 8}] * 2))], "8")).success


async def test_the_rows_of_a_query_may_come_in_any_order_and_with_more_columns() -> None:
    asked = "SELECT name, price FROM ships"
    call: JsonObject = {"tool": "query", "arguments": {"query": asked}, "result": "[{'name': 'a', 'price': 1}, {'name': 'b', 'price': 1}]"}
    scenario = Scenario(id="q", input="Which ships?", metadata={"calls": [call], "facts": ["a", "b"]})
    for rows, right in (
        ([{"id": 1, "name": "b", "price": 1}, {"id": 2, "name": "a", "price": 1}], True),
        ([{"id": 1, "name": "b", "price": 1}, {"id": 2, "name": "b", "price": 1}], False),
        ([{"id": 1, "name": "a", "price": 1}, {"id": 2, "name": "b", "price": 2}], False),
    ):
        found = await judged(scenario, [reply("query", {"query": "SELECT * FROM ships"}, str(rows))], "a and b")
        assert found.success is right


async def test_of_equal_rows_there_are_as_many_as_were_wanted() -> None:
    call: JsonObject = {"tool": "query", "arguments": {"query": "SELECT name FROM ships"}, "result": "[{'name': 'a'}, {'name': 'a'}]"}
    scenario = Scenario(id="q", input="Which ships?", metadata={"calls": [call], "facts": ["a"]})
    for names, right in (("aa", True), ("ab", False)):
        rows = str([{"id": 1, "n": name} for name in names])
        assert (await judged(scenario, [reply("query", {"query": "SELECT * FROM ships"}, rows)], "a")).success is right


async def test_what_a_change_says_is_not_what_was_to_be_read() -> None:
    written: JsonObject = {"tool": "write", "arguments": {"path": "a.txt"}, "result": "ok", "changes": True}
    scenario = writing({"a.txt": "x"}, calls=[written, GET])
    scenario = scenario.model_copy(update={"metadata": {**scenario.metadata, "facts": ["lamp"]}})
    for name, right in (("list_things", True), ("make_thing", False)):
        events = [reply("write", {"path": "a.txt"}), reply(name, {}, "x is a lamp")]
        assert (await judged(scenario, events, "A lamp.", {"old.txt": "x", "a.txt": "x"})).success is right


async def test_more_arguments_that_change_nothing_in_the_result_are_no_harm() -> None:
    scenario = Scenario(id="r", input="What is x?", metadata={"calls": [GET], "facts": ["lamp"]})
    assert (await judged(scenario, [reply("get_thing", {"name": "x", "limit": 10}, "x is a lamp")], "A lamp.")).success
    assert not (await judged(scenario, [reply("get_thing", {"name": "y", "limit": 10}, "x is a lamp")], "A lamp.")).success
    assert not (await judged(scenario, [reply("get_thing", {"name": "x", "limit": 1}, "x is")], "A lamp.")).success
    assert not (await judged(scenario, [reply("get_thing", {"limit": 1}, "x is a lamp")], "A lamp.")).success
    several = {**GET, "arguments": {"names": ["x"]}}
    scenario = Scenario(id="r", input="What is x?", metadata={"calls": [several], "facts": ["lamp"]})
    assert not (await judged(scenario, [reply("get_thing", {"names": ["x", "y"]}, "x is a lamp")], "A lamp.")).success


@pytest.mark.parametrize(
    ("tool", "arguments", "result", "right"),
    [
        ("list_things", {}, "x is a lamp\ny is a chair", True),
        ("find_things", {"query": "x"}, "x: lamp", True),
        ("list_things", {"folder": ".", "deep": True}, "x is a lamp", True),
        ("list_things", {}, "a lamp", False),
        ("list_things", {}, "x is a chair", False),
        ("find_things", {"query": "lamp"}, "x: lamp", False),
        ("make_thing", {}, "x is a lamp", False),
    ],
)
async def test_who_reads_more_than_was_asked_about_has_read_it(tool: str, arguments: JsonObject, result: str, right: bool) -> None:
    scenario = Scenario(id="r", input="What is x?", metadata={"calls": [GET], "facts": ["lamp"]})
    assert (await judged(scenario, [reply(tool, arguments, result)], "A lamp.")).success is right


async def test_another_table_with_the_same_columns_is_another_table() -> None:
    call: JsonObject = {"tool": "describe", "arguments": {"table": "ships"}, "result": "[{'name': 'title'}, {'name': 'price'}]"}
    scenario = Scenario(id="d", input="Which columns?", metadata={"calls": [call], "facts": ["title", "price"]})
    assert not (await judged(scenario, [reply("describe", {"table": "cars"}, str(call["result"]))], "title, price")).success


async def test_metadata_that_are_no_reference_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"scenario t: metadata\.calls is wrong"):
        await judged(Scenario(id="t", input="x"), [])


def test_arguments_are_compared_leaf_by_leaf() -> None:
    assert share_of({"a": 1, "b": ["x", "y"]}, {"b": ["x", "y"], "a": "1"}) == 1.0
    assert share_of({"a": 1, "b": 2}, {"a": 1, "b": 3}) == pytest.approx(1 / 3)
    assert share_of({"a": 1}, {"a": 1, "b": 2}) == pytest.approx(1 / 2)
    assert share_of({"a": 1}, "text") == 0.0
    assert share_of({}, {}) == 1.0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.text(max_size=5)),
    st.dictionaries(st.sampled_from("abcd"), st.text(max_size=5)),
    st.dictionaries(st.sampled_from("abcd"), st.text(max_size=5)),
)
def test_a_state_is_the_reference_only_if_it_has_its_changes_and_nothing_else(
    before: dict[str, str], after: dict[str, str], other: dict[str, str]
) -> None:
    def state(files: dict[str, str]) -> JsonObject:
        return {"s": {"files": {**files}}}

    changed = changed_entries(state(before), state(after), [])
    reference: JsonObject = {"changed": changed, "rest": digest_of_rest(state(after), list(changed)), "ignored": []}
    assert same_state(reference, state(after))
    assert same_state(reference, state(other)) == (changed_entries(state(after), state(other), []) == {})


def test_a_demonstration_is_the_reference_run_with_a_short_answer() -> None:
    tools: list[JsonObject] = [{"type": "function", "function": {"name": "convert"}}]
    shown = demonstration(reading(), "Be brief.", tools)
    assert [message["role"] for message in shown.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = shown.messages[2]["tool_calls"][0]  # pyright: ignore
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS  # pyright: ignore
    assert shown.messages[3] == {"role": "tool", "tool_call_id": call["id"], "content": TIME}  # pyright: ignore
    assert shown.messages[-1]["content"] == "The answer is 04:30."
    assert shown.tools == tuple(tools)
    assert demonstration(writing({"a": "b"}), "", []).messages[-1]["content"] == "Done."
