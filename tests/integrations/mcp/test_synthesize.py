"""Scenarios for real servers: explored without harm, executed twice, split, executable afresh; and tasks invented by a model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import mcp_servers
from support.tool_lists import LISTS, exploration_of, tool

from apprentice.core.errors import ConfigError, InfrastructureError
from apprentice.core.records import JsonObject, Scenario
from apprentice.integrations.mcp.checks import demonstration, final_answer, grade
from apprentice.integrations.mcp.environment import McpEnvironment, SessionPool
from apprentice.integrations.mcp.explore import ExploreOptions, endangered, explore, harmless
from apprentice.integrations.mcp.inspect import advice
from apprentice.integrations.mcp.kinds import shape_of
from apprentice.integrations.mcp.reply import ToolReply
from apprentice.integrations.mcp.scenarios import (
    argument_values,
    meant_for_test,
    notes_of,
    read_scenarios,
    split,
    wording_of,
    write_scenarios,
)
from apprentice.integrations.mcp.spec import McpServer, parse_server
from apprentice.integrations.mcp.synthesize import alike, proposals, synthesize

SERVERS = ["time", "sqlite", "filesystem", "memory"]


def server(name: str, **options: object) -> McpServer:
    return McpServer(name=name, command=tuple(mcp_servers.argv(name)), env=mcp_servers.env(name), **options)  # pyright: ignore


async def made(spec: McpServer, count: int, held_out: int) -> tuple[list[Scenario], list[Scenario]]:
    async with SessionPool([spec]) as pool:
        found = await synthesize(pool, await explore(pool), count=count, held_out=held_out, seed=3)
    return split(found, held_out, 3)


async def follow(scenario: Scenario, env: McpEnvironment) -> tuple[list[ToolReply], str]:
    """The reference calls anew, and the answer that their results give."""
    notes = notes_of(scenario)
    replies = [await env.call(call.tool, json.dumps(call.arguments)) for call in notes.calls]
    calls = tuple(call.model_copy(update={"result": reply.text}) for call, reply in zip(notes.calls, replies, strict=True))
    return replies, final_answer(notes.model_copy(update={"calls": calls}))


@pytest.mark.parametrize("name", SERVERS)
async def test_scenarios_run_afresh_pass_their_check_and_share_nothing_between_the_parts(name: str, tmp_path: Path) -> None:
    train, test = await made(server(name), 18, 6)
    assert len(train) >= 8
    assert 4 <= len(test) <= 6
    write_scenarios(tmp_path / "s.jsonl", [*train, *test])
    assert read_scenarios(tmp_path / "s.jsonl") == [*train, *test]
    trained = {value for scenario in train for value in argument_values(scenario)}
    for scenario in test:
        assert argument_values(scenario) & trained == set(scenario.metadata.get("shared_values", []))  # pyright: ignore
        assert scenario.metadata.get("shared_values", ["."]) == ["."]
    assert not {wording_of(s) for s in train} & {wording_of(s) for s in test}
    assert all(meant_for_test(s) for s in test)
    async with SessionPool([server(name)]) as pool:
        for scenario in [*train[:3], *test[:3]]:
            async with pool.environment() as env:
                idle = await grade(scenario, env, [], "The answer is everything.")
                replies, answer = await follow(scenario, env)
                found = await grade(scenario, env, replies, answer)
                assert demonstration(scenario, "s", env.tools).messages[1]["content"] == scenario.input
            assert found.success, (scenario.input, found, replies)
            assert found.reward == pytest.approx(1.0)
            assert not idle.success
            assert "{workdir}" not in str(scenario.input)
            for call in notes_of(scenario).calls:
                assert call.tool not in re.split(r"\s", str(scenario.input))


async def test_the_time_server_gives_enough_short_requests_with_their_facts() -> None:
    train, test = await made(server("time"), 160, 52)
    assert len(train) >= 100
    assert len(test) >= 48
    for scenario in [*train, *test]:
        assert len(str(scenario.input)) < 130
        notes = notes_of(scenario)
        assert len(notes.facts) + len(notes.live_facts) == 1
        assert all(re.fullmatch(r"\d\d:\d\d", fact) for fact in notes.facts)
        for call in notes.calls:
            assert all(str(value) in str(scenario.input) for value in call.arguments.values())
    assert {s.metadata["tools"][0] for s in test} == {s.metadata["tools"][0] for s in train}  # pyright: ignore


async def test_a_fixture_is_what_scenarios_are_about(tmp_path: Path) -> None:
    for name in ("plan", "list", "budget", "diary", "menu", "guests"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} is number {len(name)}\n")
    train, test = await made(server("filesystem", fixture=str(tmp_path), allow=("read_text_file", "get_file_info", "search_files")), 18, 6)
    assert train
    assert test
    used = {str(value) for s in [*train, *test] for call in notes_of(s).calls for value in call.arguments.values()}
    assert {"plan.txt", "budget.txt"} & used
    assert any("the plan is number 4" in notes_of(s).facts or "is number" in str(notes_of(s).facts) for s in [*train, *test])


async def test_a_chain_may_look_up_what_only_a_list_tells(tmp_path: Path) -> None:
    for folder in ("north", "south", "east", "west", "harbor"):
        (tmp_path / folder).mkdir()
        for number in range(3):
            (tmp_path / folder / f"{folder}-{number}.txt").write_text(f"{folder} has {number + 10} boats\n")
    spec = server("filesystem", fixture=str(tmp_path), allow=("read_text_file", "list_directory"))
    async with SessionPool([spec]) as pool:
        found = await synthesize(pool, await explore(pool), count=24, held_out=6, seed=2)
        chains = [scenario for scenario in found if scenario.metadata["form"] == "looked up"]
        assert chains
        for scenario in chains:
            first, last = notes_of(scenario).calls
            assert str(last.arguments["path"]) not in str(scenario.input)
            assert str(last.arguments["path"]).rsplit("/", 1)[-1] in first.result
            async with pool.environment() as env:
                replies, answer = await follow(scenario, env)
                assert (await grade(scenario, env, replies, answer)).success


NOTES = mcp_servers.hostile("keeps_notes")
WRITE, LIST = tool("write_note", "", {"openWorldHint": False}), tool("list_notes", "", {})


@pytest.mark.parametrize(
    ("spec", "safe"),
    [
        ({"command": (*NOTES, "{workdir}/n.txt")}, True),
        ({"command": NOTES, "env": {"NOTES_FILE": "{workdir}/n.txt"}}, True),
        ({"command": NOTES, "cwd": "{workdir}"}, True),
        ({"command": (*NOTES, "{workdir}/n.txt"), "isolation": "shared"}, False),
        ({"command": (*NOTES, "{workdir}/n.txt"), "isolation": "session"}, False),
        ({"command": (*NOTES, ".")}, False),
        ({"command": NOTES}, False),
        ({"command": NOTES, "fixture": "."}, False),
        ({"url": "https://example.com/mcp"}, False),
    ],
)
def test_data_are_private_only_where_a_process_is_told_to_use_its_private_folder(spec: dict[str, object], safe: bool) -> None:
    made = McpServer(**{"name": "s", **spec})  # pyright: ignore
    assert (endangered(made, [LIST, WRITE]) == "") is safe
    assert endangered(made, [LIST]) == ""
    assert ("--real-data" in advice(made, (LIST, WRITE))) is not safe


async def test_servers_that_are_shared_or_reach_out_are_never_written_to(tmp_path: Path) -> None:
    kept = tmp_path / "notes.txt"
    for isolation in ("process", "shared"):
        spec = parse_server(shlex.join([*NOTES, str(kept)]), name="notes", isolation=isolation)
        async with SessionPool([spec]) as pool:
            with pytest.raises(ConfigError, match=r"^the server 'notes' has tools .* \(write_note\): .* --deny, or say --real-data"):
                await explore(pool)
        async with SessionPool([spec.model_copy(update={"deny": ("write_*",)})]) as pool:
            assert not (await explore(pool)).changing
        assert not kept.exists()
    async with SessionPool([spec]) as pool:
        assert (await explore(pool, ExploreOptions(real_data=True))).changing == {"write_note"}
        assert (await explore(pool, ExploreOptions(allow=("write_note",)))).changing == {"write_note"}
    async with SessionPool([parse_server(shlex.join([*NOTES, "{workdir}/notes.txt"]))]) as pool:
        assert (await explore(pool)).changing == {"write_note"}


@pytest.mark.parametrize("name", SERVERS)
async def test_exploring_changes_nothing(name: str) -> None:
    async with SessionPool([server(name, isolation="shared")]) as pool:
        async with pool.environment() as env:
            before = await env.state()
        found = await explore(pool, ExploreOptions(calls=30, real_data=True))
        async with pool.environment() as env:
            assert await env.state() == before
    assert len({(reply.function, json.dumps(reply.arguments)) for reply in found.calls}) == len(found.calls)
    assert all((shape := found.shape(reply.function)) is not None and shape.reads for reply in found.calls)


@pytest.mark.parametrize(
    ("name", "hints", "allowed"),
    [
        ("get_thing", {}, True),
        ("thing", {"readOnlyHint": True}, True),
        ("thing", {}, False),
        ("delete_thing", {"readOnlyHint": True}, False),
        ("get_thing", {"destructiveHint": True}, False),
        ("get_secret_token", {"readOnlyHint": True}, False),
        ("write_thing", {}, False),
    ],
)
def test_which_tools_may_be_called_to_look_around(name: str, hints: dict[str, object], allowed: bool) -> None:
    assert harmless(shape_of(name, tool(name, "", hints)), ExploreOptions()) is allowed  # pyright: ignore
    assert harmless(shape_of("do", tool("do", "", {})), ExploreOptions(allow=("d*",)))
    assert not harmless(shape_of("delete", tool("delete", "", {})), ExploreOptions(allow=("d*",)))


async def test_tasks_that_a_model_invents_are_kept_only_if_they_run_twice_the_same_way() -> None:
    good = {"request": "What is 2 to the power of 10?", "calls": [{"tool": "calculate", "arguments": {"expression": "2**10"}}]}
    written = [
        good,
        {"request": "Divide 1 by 0 for me.", "calls": [{"tool": "calculate", "arguments": {"expression": "1/0"}}]},
        {"request": "Please calculate 3+3.", "calls": [{"tool": "calculate", "arguments": {"expression": "3+3"}}]},
        {"request": "Order a pizza.", "calls": [{"tool": "order_pizza", "arguments": {}}]},
        {**good, "request": "What is 2 to the power of 10, please?"},
        {"request": "", "calls": []},
        "nonsense",
    ]
    asked: list[Sequence[JsonObject]] = []

    async def generator(messages: list[JsonObject]) -> str:
        asked.append(messages)
        return f"Here you are:\n```json\n{json.dumps(written)}\n```"

    async with SessionPool([server("calculator")]) as pool:
        found = await synthesize(pool, await explore(pool), count=8, seed=1, generator=generator)
    free = [scenario for scenario in found if scenario.metadata["kind"] == "free"]
    assert [scenario.input for scenario in free] == [good["request"]]
    assert notes_of(free[0]).facts == ("1024",)
    assert len(found) == 8
    assert "calculate" in str(asked[0][0]["content"])


async def test_a_model_that_does_not_answer_is_told_so() -> None:
    async def generator(messages: list[JsonObject]) -> str:
        raise InfrastructureError("the generator x did not answer: gone")

    async with SessionPool([server("calculator")]) as pool:
        with pytest.raises(InfrastructureError, match="did not answer"):
            await synthesize(pool, await explore(pool), count=4, generator=generator)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "no json",
        "[",
        "[1, null, {}]",
        '{"request": "x"}',
        "[" * 100_000,
        '[{"request": "x", "calls": [{"tool": "now_in", "arguments": 3}]}]',
    ],
)
def test_whatever_a_model_writes_is_only_a_proposal(reply: str) -> None:
    assert proposals(reply, exploration_of(LISTS["clock"])) == []


def test_requests_are_alike_if_most_of_their_pairs_of_words_are() -> None:
    assert alike("What time is it in Oslo?", "what time is it, in oslo") == 1.0
    assert alike("What time is it in Oslo?", "How late is it in Oslo?") < 0.6
    assert alike("Please show me the list now", "Please show me the list") > 0.6
