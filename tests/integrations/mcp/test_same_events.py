"""One task, run by our loop, by a hand-written loop with `captured(...)` and by one through the proxy: the same tool events."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from support import mcp_servers
from support.client_server import ClientServer, client_server
from support.tiny_models import tiny_tokenizer

from apprentice.core.client.model import TrainableModel
from apprentice.core.records import Trajectory
from apprentice.integrations.mcp.agent import McpAgent
from apprentice.integrations.mcp.capture import captured
from apprentice.integrations.mcp.environment import SessionPool
from apprentice.integrations.mcp.spec import McpServer, parse_server

TOKENIZER = tiny_tokenizer()
PROXY = """
import asyncio, os, sys
from apprentice.integrations.mcp.proxy import run_proxy
from apprentice.integrations.mcp.spec import parse_server
asyncio.run(run_proxy(parse_server(sys.argv[1]), environment=dict(os.environ)))
"""


def said(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPTS = {
    "plain": [said("echo", value="hi"), said("fail") + said("count"), said("count"), "All done."],
    "calculator": [said("calculate", expression="6 * 7"), said("calculate", expression="1 / 0"), "It is 42."],
    "sqlite": [said("list_tables"), said("read_query", query="SELECT * FROM cities"), "There are none."],
}


class Scripted:
    """A model that says the lines of a script, one a turn."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, *_: object) -> Sequence[int]:
        return [*TOKENIZER.encode(self.lines.pop(0), add_special_tokens=False), TOKENIZER.eos_token_id]


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, scripted: Scripted) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), scripted) as running:
        yield running


def command(name: str, workdir: Path) -> list[str]:
    workdir.mkdir()
    return mcp_servers.hostile(name) if name == "plain" else mcp_servers.command(name, workdir)[0]


async def hand_written(model: TrainableModel, transport: AbstractAsyncContextManager[Any]) -> None:
    """The loop that anyone would write over the OpenAI client and the SDK; it knows nothing of trajectories."""
    openai = model.openai_client()
    messages: list[Any] = [{"role": "user", "content": "Do it."}]
    async with Client(transport) as client:
        tools: list[Any] = [
            {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}
            for tool in (await client.list_tools()).tools
        ]
        while True:
            reply = await openai.chat.completions.create(model=model.inference_name, messages=messages, tools=tools, max_tokens=256)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                assert call.type == "function"
                result = await client.call_tool(call.function.name, json.loads(call.function.arguments))
                text = "".join(getattr(block, "text", "") for block in result.content)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def facts(trajectory: Trajectory) -> list[tuple[str, Any, str, str]]:
    return [(event.name, event.arguments, event.outcome, event.result) for event in trajectory.tool_events]


def order(trajectory: Trajectory) -> list[str]:
    """Model calls and tool events by their time."""
    calls = [(completion.created_at, "model") for completion in trajectory.completions]
    return [what for _, what in sorted([*calls, *((event.created_at, event.name) for event in trajectory.tool_events)])]


@pytest.mark.parametrize("name", SCRIPTS)
async def test_three_ways_to_run_a_task_leave_the_same_tool_events(
    server: ClientServer, scripted: Scripted, tmp_path: Path, name: str
) -> None:
    model = await server.model(f"by-{name}")

    scripted.lines = list(SCRIPTS[name])
    spec = McpServer(name=name, command=tuple(command(name, tmp_path / "ours")))  # type: ignore[call-arg]
    async with SessionPool([spec]) as pool, pool.environment() as env, model.trajectory() as ours:
        await McpAgent(model.openai_client(), model.inference_name).run("Do it.", env)

    scripted.lines = list(SCRIPTS[name])
    argv = command(name, tmp_path / "captured")
    async with model.trajectory() as by_capture:
        await hand_written(model, captured(stdio_client(StdioServerParameters(command=argv[0], args=argv[1:])), server=name))

    scripted.lines = list(SCRIPTS[name])
    argv = command(name, tmp_path / "proxied")
    async with model.trajectory() as by_proxy:
        env_of_host = {"PATH": os.environ["PATH"], "APPRENTICE_URL": server.url, "APPRENTICE_TRAJECTORY": by_proxy.id}
        assert parse_server(shlex.join(argv)).command == tuple(argv)
        await hand_written(
            model, stdio_client(StdioServerParameters(command=sys.executable, args=["-c", PROXY, shlex.join(argv)], env=env_of_host))
        )

    first = facts(server.stored(ours.id))
    assert len(first) == sum(line.count("<tool_call>") for line in SCRIPTS[name])
    assert facts(server.stored(by_capture.id)) == first
    assert facts(server.stored(by_proxy.id)) == first
    assert order(server.stored(by_capture.id)) == order(server.stored(by_proxy.id)) == order(server.stored(ours.id))


@pytest.mark.parametrize("name", ["plain", "sqlite"])
async def test_a_tool_that_does_not_exist_is_a_failure_in_all_three_ways(
    server: ClientServer, scripted: Scripted, tmp_path: Path, name: str
) -> None:
    model = await server.model(f"wrong-{name}")
    script = [said("nope", value=1) + said("nope"), "That was nothing."]

    scripted.lines = [*script]
    spec = McpServer(name=name, command=tuple(command(name, tmp_path / "ours")))  # type: ignore[call-arg]
    async with SessionPool([spec]) as pool, pool.environment() as env, model.trajectory() as ours:
        await McpAgent(model.openai_client(), model.inference_name).run("Do it.", env)

    scripted.lines = [*script]
    argv = command(name, tmp_path / "captured")
    async with model.trajectory() as by_capture:
        await hand_written(model, captured(stdio_client(StdioServerParameters(command=argv[0], args=argv[1:])), server=name))

    scripted.lines = [*script]
    argv = command(name, tmp_path / "proxied")
    async with model.trajectory() as by_proxy:
        env_of_host = {"PATH": os.environ["PATH"], "APPRENTICE_URL": server.url, "APPRENTICE_TRAJECTORY": by_proxy.id}
        await hand_written(
            model, stdio_client(StdioServerParameters(command=sys.executable, args=["-c", PROXY, shlex.join(argv)], env=env_of_host))
        )

    for trajectory in (ours, by_capture, by_proxy):
        events = facts(server.stored(trajectory.id))
        assert [(event[0], event[1]) for event in events] == [("nope", {"value": 1}), ("nope", {})]
        assert all(event[2] in ("tool_error", "reported_failure") for event in events), events
