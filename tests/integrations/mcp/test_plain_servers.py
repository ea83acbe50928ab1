"""Chains whose later arguments only an earlier result tells, and scenarios for small servers that nobody tuned anything for."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import pytest
from pydantic import JsonValue
from support import mcp_servers

from apprentice.core.records import Scenario
from apprentice.integrations.mcp.checks import final_answer, grade
from apprentice.integrations.mcp.environment import SessionPool
from apprentice.integrations.mcp.explore import explore
from apprentice.integrations.mcp.scenarios import argument_values, notes_of, split
from apprentice.integrations.mcp.spec import McpServer
from apprentice.integrations.mcp.stock import TABLE_FAMILIES
from apprentice.integrations.mcp.synthesize import synthesize
from apprentice.integrations.mcp.values import leaves_of


@pytest.mark.parametrize("name", ["tasks", "keys", "notes"])
async def test_small_servers_that_nobody_tuned_anything_for_give_single_calls_and_chains(name: str) -> None:
    script = mcp_servers.HOSTILE.parent / "plain_servers" / f"{name}.py"
    spec = McpServer(name=name, command=(sys.executable, str(script), "{workdir}"))  # pyright: ignore
    async with SessionPool([spec]) as pool:
        found = await synthesize(pool, await explore(pool), count=18, held_out=6, seed=3)
        kinds = Counter(str(scenario.metadata["kind"]) for scenario in found)
        assert len(found) >= 16
        assert kinds["single"] >= 4
        assert kinds["chain2"] >= 4
        used = {call.tool for scenario in found for call in notes_of(scenario).calls}
        assert len(used) == 3
        chains = [scenario for scenario in found if scenario.metadata["form"] == "looked up"]
        assert chains
        for scenario in chains[:3]:
            assert re.search(r"\bthe (?:first|last|new) one\b", str(scenario.input))
            async with pool.environment() as env:
                notes = notes_of(scenario)
                replies = [await env.call(call.tool, json.dumps(call.arguments)) for call in notes.calls]
                assert (await grade(scenario, env, replies, final_answer(notes))).success
    train, test = split(found, 6, 3)
    assert len(train) >= 8
    assert len(test) >= 3


@pytest.mark.parametrize("name", ["sqlite", "filesystem", "memory"])
async def test_without_a_fixture_some_chains_take_an_argument_from_what_their_own_calls_list(name: str) -> None:
    spec = McpServer(name=name, command=tuple(mcp_servers.argv(name)), env=mcp_servers.env(name))  # pyright: ignore
    async with SessionPool([spec]) as pool:
        found = await synthesize(pool, await explore(pool), count=30, held_out=8, seed=3)
    chains = [scenario for scenario in found if scenario.metadata["form"] == "looked up"]
    assert chains
    for scenario in chains:
        _, listed, last = notes_of(scenario).calls
        (value,) = [str(value) for _, value in leaves_of(last.arguments)]
        assert value.rsplit("/", 1)[-1] in listed.result
        assert str(scenario.input).count(value) < 2


def test_what_sql_names_and_the_root_folder_are_values_and_equal_calls_are_in_one_part() -> None:
    def scenario(number: int, tool: str, **arguments: str) -> Scenario:
        calls: list[JsonValue] = [{"tool": tool, "arguments": {**arguments}}]
        return Scenario(id=f"s{number}", input=f"request {number}", metadata={"calls": calls, "frame": f"f{number}", "wording": number})

    sql = scenario(0, "q", query="SELECT hours FROM courses WHERE title = 'Two Words' LIMIT 3")
    assert {"hours", "courses", "title", "two words", "3"} <= argument_values(sql)
    assert argument_values(scenario(1, "ls", path="{workdir}")) == argument_values(scenario(2, "ls", path=".")) == {"."}
    found = [scenario(n, "ls", path=".") for n in range(4)] + [scenario(n, "read", path=f"{n}.txt") for n in range(4, 20)]
    train, test = split(found + [scenario(n, "keys") for n in range(20, 24)], 8, 1)
    assert train
    assert test
    for tool in ("ls", "keys"):
        assert not (
            {tool} & {c.tool for s in train for c in notes_of(s).calls} and {tool} & {c.tool for s in test for c in notes_of(s).calls}
        )


def test_no_two_families_of_tables_have_a_name_in_common() -> None:
    names = [name for family in TABLE_FAMILIES for name in family]
    assert len(names) == len(set(names))
