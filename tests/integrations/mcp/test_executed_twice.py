"""Candidates run twice, and what differs between the runs is noticed: a server that does something else at every start."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mcp_servers

from apprentice.core.records import JsonObject
from apprentice.integrations.mcp.checks import grade
from apprentice.integrations.mcp.compose import Candidate, PlannedCall
from apprentice.integrations.mcp.environment import SessionPool
from apprentice.integrations.mcp.execute import Executed, execute
from apprentice.integrations.mcp.kinds import shape_of
from apprentice.integrations.mcp.spec import McpServer
from apprentice.integrations.mcp.synthesize import scenario_of

NOTE: tuple[str, JsonObject] = ("write_note", {"text": "hello"})


def pool_of(folder: Path) -> SessionPool:
    command = mcp_servers.hostile("differs_each_time", str(folder / "starts.txt"))
    return SessionPool([McpServer(name="s", command=tuple(command))])


async def executed(pool: SessionPool, *calls: tuple[str, JsonObject]) -> Executed:
    async with pool.environment() as env:
        tools = env.toolset
        fresh = await env.state()
    planned: list[PlannedCall] = []
    for name, arguments in calls:
        tool = tools.resolve(name)
        assert tool is not None
        planned.append(PlannedCall(shape_of(name, tool), arguments))
    (found,) = await execute(pool, [Candidate("Do it.", tuple(planned), "free", "free", 0)], fresh)
    return found


@pytest.mark.parametrize("before", [[], [NOTE]], ids=["only reading", "after a change"])
async def test_a_candidate_whose_two_runs_differ_is_not_kept(before: list[tuple[str, JsonObject]], tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        found = await executed(pool, *before, ("get_lines", {}))
    assert found.why == "the two runs differ"


async def test_a_number_that_differs_between_the_runs_moves(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        found = await executed(pool, ("get_number", {}))
    assert (found.why, len(found.volatile[0])) == ("", 1)
    assert scenario_of(found).metadata["facts"] == []


async def test_what_moves_in_the_state_is_not_asked_of_a_rollout_and_the_rest_is(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        found = await executed(pool, NOTE)
        assert found.why == ""
        assert found.state is not None
        assert found.state["changed"] == {"s/files/note.txt": "hello"}
        assert found.state["ignored"] == ["s/files/diary.txt"]
        for text, right in (("hello", True), ("bye", False)):
            async with pool.environment() as env:
                reply = await env.call("write_note", {"text": text})
                assert (await grade(scenario_of(found), env, [reply], "Done.")).success is right
