"""A user's own MCP code, captured in one line: what lands in a real ledger, and that nothing else changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, ClientSession, MCPError, StdioServerParameters, stdio_client
from support import mcp_servers
from support.client_server import ClientServer, client_server

from apprentice.core.errors import ConfigError
from apprentice.core.records import ToolEvent, Trajectory
from apprentice.integrations.mcp.capture import captured


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), reply="yes") as running:
        yield running


@pytest.fixture
def server(shared: ClientServer) -> ClientServer:
    return shared.fresh()


def params(name: str, *arguments: str, **more: Any) -> StdioServerParameters:
    command, *args = mcp_servers.hostile(name, *arguments)
    return StdioServerParameters(command=command, args=args, **more)


def facts(trajectory: Trajectory) -> list[tuple[str, Any, str, str]]:
    return [(event.name, event.arguments, event.outcome, event.result) for event in trajectory.tool_events]


async def test_every_tool_call_is_in_the_ambient_trajectory_with_outcome_and_timing(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory() as t, Client(captured(stdio_client(params("plain"))), mode="legacy") as client:
        assert (await client.call_tool("echo", {"value": "hi"})).content[0].text == 'echo {"value": "hi"}'  # type: ignore[union-attr]
        assert (await client.call_tool("fail", {})).is_error
        with pytest.raises(MCPError, match="Unknown tool: refuse"):
            await client.call_tool("refuse", {"x": 1})
        assert (await client.call_tool("count")).structured_content == {"count": 1}
    events = server.stored(t.id).tool_events
    assert facts(server.stored(t.id)) == [
        ("echo", {"value": "hi"}, "ok", 'echo {"value": "hi"}'),
        ("fail", {}, "tool_error", "no such city"),
        ("refuse", {"x": 1}, "protocol_error", "Unknown tool: refuse (error -32602)"),
        ("count", {}, "ok", "1"),
    ]
    assert all(0 < event.seconds < 60 for event in events)
    assert [event.created_at for event in events] == sorted(event.created_at for event in events)


async def test_one_session_serves_many_trajectories_at_once_and_calls_outside_are_not_recorded(server: ClientServer) -> None:
    """The session's tasks were started outside of all of them: only the caller's own context tells them apart."""
    model = await server.model()
    async with Client(captured(params("plain")), mode="legacy") as client:
        await client.call_tool("echo", {"value": "outside"})

        async def rollout(value: str) -> str:
            async with model.trajectory() as t:
                for turn in range(3):
                    await client.call_tool("echo", {"value": value, "turn": turn})
            return t.id

        ids = await asyncio.gather(*(rollout(f"r{number}") for number in range(4)))
    for number, trajectory_id in enumerate(ids):
        stored = server.stored(trajectory_id)
        assert stored.status == "finished"
        assert [event.arguments for event in stored.tool_events] == [{"value": f"r{number}", "turn": turn} for turn in range(3)]


async def test_a_given_trajectory_goes_before_the_ambient_one(server: ClientServer) -> None:
    model = await server.model()
    given = model.trajectory()
    await given.open()
    async with model.trajectory() as ambient, Client(captured(params("plain"), given), mode="legacy") as client:
        await client.call_tool("count")
    await given.close()
    assert [event.name for event in server.stored(given.id).tool_events] == ["count"]
    assert server.stored(ambient.id).tool_events == ()


async def test_a_client_session_over_the_streams_is_captured_too(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory() as t, captured(stdio_client(params("plain"))) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        await session.call_tool("echo", {"value": "low level"})
    assert facts(server.stored(t.id)) == [("echo", {"value": "low level"}, "ok", 'echo {"value": "low level"}')]


async def test_tool_events_stand_between_the_model_calls_around_them(server: ClientServer) -> None:
    model = await server.model()
    openai = model.openai_client()

    async def ask() -> None:
        await openai.chat.completions.create(model=model.inference_name, messages=[{"role": "user", "content": "hi"}], max_tokens=4)

    async with model.trajectory() as t, Client(captured(params("plain")), mode="legacy") as client:
        await ask()
        await client.call_tool("count")
        await ask()
        await client.call_tool("count")
    stored = server.stored(t.id)
    order = sorted([*((c.created_at, "model") for c in stored.completions), *((e.created_at, e.result) for e in stored.tool_events)])
    assert [what for _, what in order] == ["model", "1", "model", "2"]


async def test_a_call_given_up_is_a_timeout_and_a_dead_server_is_lost(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory() as t:
        async with Client(captured(params("never_answers", "calls")), mode="legacy") as client:
            with pytest.raises(MCPError, match="timed out"):
                await client.call_tool("ask", {"n": 1}, read_timeout_seconds=0.05)
        async with Client(captured(params("exits_mid_call")), mode="legacy") as client:
            with pytest.raises(MCPError):
                await client.call_tool("exit", {"n": 2})
    assert [(event.name, event.arguments, event.outcome) for event in server.stored(t.id).tool_events] == [
        ("ask", {"n": 1}, "timeout"),
        ("exit", {"n": 2}, "server_lost"),
    ]


async def test_recording_that_fails_is_one_warning_and_the_session_goes_on(server: ClientServer, caplog: pytest.LogCaptureFixture) -> None:
    model = await server.model()
    ended = model.trajectory()
    await ended.open()
    await ended.close()
    with caplog.at_level(logging.WARNING, logger="apprentice"):
        async with Client(captured(params("plain"), ended), mode="legacy") as client:
            results = [(await client.call_tool("count")).structured_content for _ in range(3)]
    assert results == [{"count": 1}, {"count": 2}, {"count": 3}]
    warnings = [record.getMessage() for record in caplog.records if record.name == "apprentice"]
    assert len(warnings) == 1
    assert f"trajectory {ended.id}" in warnings[0]
    assert "takes no more tool events" in warnings[0]


async def test_a_slow_ledger_delays_no_call_and_loses_none(server: ClientServer) -> None:
    model = await server.model()
    scope = model.trajectory()
    released = asyncio.Event()
    sent: list[ToolEvent] = []

    async def held(event: ToolEvent) -> None:
        await released.wait()
        sent.append(event)

    scope.recording._send = held  # type: ignore[method-assign]  # the ledger, held back
    async with Client(captured(params("plain"), scope), mode="legacy") as client:
        for _ in range(5):
            await client.call_tool("count")
        assert sent == []
        released.set()
    assert [event.result for event in sent] == ["1", "2", "3", "4", "5"]


async def test_arguments_are_recorded_as_they_were_when_sent(server: ClientServer) -> None:
    model = await server.model()
    arguments: dict[str, Any] = {"value": [1]}
    async with model.trajectory() as t, Client(captured(params("plain")), mode="legacy") as client:
        await client.call_tool("echo", arguments)
        arguments["value"].append(2)
    assert server.stored(t.id).tool_events[0].arguments == {"value": [1]}


async def test_a_real_server_of_the_newer_protocol_is_captured(server: ClientServer, tmp_path: Path) -> None:
    argv, env = mcp_servers.command("time", tmp_path)
    model = await server.model()
    call = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    async with model.trajectory() as t, Client(captured(StdioServerParameters(command=argv[0], args=argv[1:], env=env))) as client:
        assert client.protocol_version == "2026-07-28"
        shown = await client.call_tool("convert_time", call)
        with pytest.raises(MCPError):
            await client.call_tool("nope", {})
    first, second = server.stored(t.id).tool_events
    assert (first.name, first.arguments, first.outcome) == ("convert_time", call, "ok")
    assert first.result == shown.content[0].text  # type: ignore[union-attr]
    assert "21:00" in first.result
    assert "serverInfo" not in first.result
    assert (second.name, second.outcome) == ("nope", "protocol_error")


def test_what_is_no_transport_is_refused_with_one_sentence() -> None:
    with pytest.raises(ConfigError, match="takes a transport, a URL or StdioServerParameters, got dict"):
        captured({"command": "x"})  # type: ignore[arg-type]
