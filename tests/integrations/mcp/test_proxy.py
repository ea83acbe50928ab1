"""The proxy as an MCP host sees it (the server itself, message for message) and as the ledger does (every tool call)."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from support import mcp_servers
from support.client_server import ClientServer, client_server
from support.small_registry import eventually

from apprentice.core.errors import ConfigError
from apprentice.core.records import Trajectory
from apprentice.integrations.mcp.capture import captured
from apprentice.integrations.mcp.proxy import run_proxy
from apprentice.integrations.mcp.spec import McpServer, parse_server

SCRIPT = """
import asyncio, os, sys
from apprentice.core.errors import ApprenticeError
from apprentice.integrations.mcp.proxy import run_proxy
from apprentice.integrations.mcp.spec import parse_server
try:
    asyncio.run(run_proxy(parse_server(sys.argv[1]), environment=dict(os.environ)))
except ApprenticeError as error:
    sys.exit(str(error))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), reply="yes") as running:
        yield running


@pytest.fixture
def server(shared: ClientServer) -> ClientServer:
    return shared.fresh()


def proxy_params(argv: list[str], **env: str) -> StdioServerParameters:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return StdioServerParameters(command=sys.executable, args=["-c", SCRIPT, shlex.join(argv)], env={**inherited, **env})


def direct_params(argv: list[str], **env: str) -> StdioServerParameters:
    return StdioServerParameters(command=argv[0], args=argv[1:], env=env)


@asynccontextmanager
async def http_proxy(spec: McpServer, **environment: str) -> AsyncIterator[str]:
    """The URL of a proxy that runs in this test's event loop."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_proxy(spec, port=0, environment={**os.environ, **environment}, ready=ready.set_result))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def facts(trajectory: Trajectory) -> list[tuple[str, Any, str, str]]:
    return [(event.name, event.arguments, event.outcome, event.result) for event in trajectory.tool_events]


async def same_task(client: Client) -> list[Any]:
    """Calls of every outcome; what the host got."""
    seen: list[Any] = []
    for name, arguments in (("echo", {"value": "hi"}), ("fail", {}), ("count", {}), ("refuse", {"x": 1}), ("count", {})):
        try:
            result = await client.call_tool(name, arguments)
            seen.append(result.model_dump(by_alias=True, exclude_unset=True))
        except MCPError as error:
            seen.append((error.code, error.message, error.data))
    return seen


async def test_a_hand_written_loop_leaves_the_same_events_captured_and_through_the_proxy(server: ClientServer) -> None:
    argv = mcp_servers.hostile("plain")
    model = await server.model()
    async with Client(stdio_client(direct_params(argv)), mode="legacy") as client:
        bare = await same_task(client)
    async with model.trajectory() as by_capture, Client(captured(stdio_client(direct_params(argv))), mode="legacy") as client:
        seen_captured = await same_task(client)
    async with model.trajectory() as by_proxy:
        params = proxy_params(argv, APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=by_proxy.id)
        async with Client(stdio_client(params), mode="legacy") as client:
            seen_through = await same_task(client)
    assert seen_captured == bare
    assert seen_through == bare
    assert len(server.stored(by_capture.id).tool_events) == 5
    assert facts(server.stored(by_proxy.id)) == facts(server.stored(by_capture.id))


async def test_over_stdio_a_session_without_a_trajectory_gets_one_of_its_own(server: ClientServer) -> None:
    model = await server.model()
    params = proxy_params(mcp_servers.hostile("plain"), APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy)
    async with Client(stdio_client(params), mode="legacy") as client:
        await client.call_tool("count")
        await client.call_tool("count")
    (found,) = await model.api.trajectories(policy=model.policy)
    stored = server.stored(found.id)
    assert [event.result for event in stored.tool_events] == ["1", "2"]
    assert stored.metadata == {"mcp_server": "plain", "source": "mcp proxy"}
    assert stored.status == "finished"


async def test_progress_list_changes_and_questions_to_the_host_pass_through(server: ClientServer) -> None:
    model = await server.model()
    steps: list[tuple[float, float | None]] = []
    notified: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        steps.append((done, total))

    async def notify(message: Any) -> None:
        notified.append(type(message).__name__)

    async def elicit(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"age": 36})

    plain = proxy_params(mcp_servers.hostile("plain"), APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy)
    async with Client(stdio_client(plain), mode="legacy", message_handler=notify) as client:
        before = len((await client.list_tools()).tools)
        await client.call_tool("progress", {}, progress_callback=progress)
        await client.call_tool("grow", {})
        assert len((await client.list_tools()).tools) == before + 1
    assert steps == [(1, 2), (2, 2)]
    assert "ToolListChangedNotification" in notified
    asking = proxy_params(mcp_servers.hostile("elicits"), APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy)
    async with Client(stdio_client(asking), mode="legacy", elicitation_callback=elicit) as client:
        result = await client.call_tool("ask", {})
    assert json.loads(result.content[0].text) == {"action": "accept", "content": {"age": 36}}  # type: ignore[union-attr]


async def test_tools_resources_and_prompts_of_a_real_server_are_the_same_through_the_proxy(server: ClientServer, tmp_path: Path) -> None:
    argv, env = mcp_servers.command("everything", tmp_path)
    model = await server.model()

    async def everything(client: Client) -> list[Any]:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        resources = sorted(resource.uri for resource in (await client.list_resources()).resources)
        prompts = [prompt.name for prompt in (await client.list_prompts()).prompts]
        text = (await client.read_resource(resources[0])).contents[0].model_dump(by_alias=True, exclude={"meta"})
        return [tools, resources, prompts, text, client.instructions, client.server_capabilities]

    async with Client(stdio_client(direct_params(argv, **env))) as client:
        direct = await everything(client)
    async with Client(stdio_client(proxy_params(argv, **env, APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy))) as client:
        assert await everything(client) == direct
    assert len(direct[0]) >= 13
    assert direct[1]
    assert direct[2]


async def test_the_newer_protocol_passes_through_stdio(server: ClientServer, tmp_path: Path) -> None:
    argv, env = mcp_servers.command("time", tmp_path)
    model = await server.model()
    async with model.trajectory() as t:
        params = proxy_params(argv, **env, APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=t.id)
        async with Client(stdio_client(params)) as client:
            assert client.protocol_version == "2026-07-28"
            await client.call_tool("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"})
    (event,) = server.stored(t.id).tool_events
    assert (event.name, event.outcome) == ("convert_time", "ok")
    assert "21:00" in event.result


async def test_over_http_a_header_names_the_trajectory_and_each_session_has_a_server_of_its_own(server: ClientServer) -> None:
    model = await server.model()
    spec = McpServer(command=tuple(mcp_servers.hostile("plain")))  # type: ignore[call-arg]  # the rest follows
    async with (
        http_proxy(spec, APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy) as url,
        model.trajectory() as named,
        httpx2.AsyncClient(headers=named.headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as first,
        Client(url) as second,
    ):
        assert first.protocol_version < "2026"  # the probe was answered, and the handshake followed
        assert (await first.call_tool("count")).structured_content == {"count": 1}
        assert (await first.call_tool("count")).structured_content == {"count": 2}
        assert (await second.call_tool("count")).structured_content == {"count": 1}
    assert [event.result for event in server.stored(named.id).tool_events] == ["1", "2"]
    other = [found for found in await model.api.trajectories(policy=model.policy) if found.id != named.id]
    assert [[event.result for event in server.stored(found.id).tool_events] for found in other] == [["1"]]
    assert [found.status for found in other] == ["finished"]


async def test_over_http_progress_and_questions_reach_the_host(server: ClientServer) -> None:
    model = await server.model()
    steps: list[float] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        steps.append(done)

    async def elicit(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="decline")

    where = {"APPRENTICE_URL": server.url, "APPRENTICE_POLICY": model.policy}
    plain, asking = (parse_server(shlex.join(mcp_servers.hostile(name))) for name in ("plain", "elicits"))
    async with http_proxy(plain, **where) as url, Client(url, mode="legacy") as client:
        await client.call_tool("progress", {}, progress_callback=progress)
    assert steps == [1, 2]
    async with http_proxy(asking, **where) as url, Client(url, mode="legacy", elicitation_callback=elicit) as client:
        result = await client.call_tool("ask", {})
    assert json.loads(result.content[0].text) == {"action": "decline"}  # type: ignore[union-attr]


@asynccontextmanager
async def through(kind: str, upstream: str, **environment: str) -> AsyncIterator[Any]:
    """What a host connects to: the proxy of that URL, over stdio or HTTP."""
    if kind == "stdio":
        yield stdio_client(proxy_params([upstream], **environment))
    else:
        async with http_proxy(parse_server(upstream), **environment) as url:
            yield url


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_an_sse_server_is_proxied_and_its_end_told(server: ClientServer, kind: str, mode: str) -> None:
    model = await server.model()
    with mcp_servers.everything_at("sse", mcp_servers.free_port()) as (upstream, process):
        async with (
            model.trajectory() as t,
            through(kind, upstream, APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=t.id) as way,
            Client(way, mode=mode) as client,
        ):
            assert client.protocol_version == "2025-11-25"
            assert "echo" in [tool.name for tool in (await client.list_tools()).tools]
            assert (await client.call_tool("echo", {"message": "hi"})).content[0].text == "Echo: hi"  # type: ignore[union-attr]
            waiting = asyncio.create_task(client.call_tool("trigger-long-running-operation", {"duration": 60, "steps": 1}))
            while not server.stored(t.id).tool_events:  # noqa: ASYNC110  # the echo
                await asyncio.sleep(0.05)
            process.kill()
            with pytest.raises(MCPError, match="has ended"):
                await waiting
    assert [(event.name, event.outcome) for event in server.stored(t.id).tool_events] == [
        ("echo", "ok"),
        ("trigger-long-running-operation", "server_lost"),
    ]


@pytest.mark.parametrize(
    ("kind", "mode", "version"),
    [
        ("stdio", "auto", "2026-07-28"),
        ("stdio", "2026-07-28", "2026-07-28"),
        ("stdio", "legacy", "2025-11-25"),
        ("http", "auto", "2025-11-25"),
        ("http", "legacy", "2025-11-25"),
    ],
)
async def test_hosts_of_either_protocol_reach_a_modern_server(server: ClientServer, kind: str, mode: str, version: str) -> None:
    model = await server.model()
    with mcp_servers.modern_at(mcp_servers.free_port()) as upstream:
        async with (
            model.trajectory() as t,
            through(kind, upstream, APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=t.id) as way,
            Client(way, mode=mode) as client,
        ):
            assert client.protocol_version == version
            assert [tool.name for tool in (await client.list_tools()).tools] == ["echo"]
            assert (await client.call_tool("echo", {"message": "hi"})).content[0].text == "hi"  # type: ignore[union-attr]
    assert [(event.name, event.outcome) for event in server.stored(t.id).tool_events] == [("echo", "ok")]


async def test_over_http_a_host_that_will_have_no_handshake_is_told_the_versions(server: ClientServer) -> None:
    model = await server.model()
    plain = parse_server(shlex.join(mcp_servers.hostile("plain")))
    async with (
        http_proxy(plain, APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy) as url,
        Client(url, mode="2026-07-28") as client,
    ):
        with pytest.raises(MCPError, match="this proxy speaks the handshake versions") as refused:
            await client.list_tools()
    assert "2025-11-25" in refused.value.data["supported"]


async def test_a_real_http_server_is_proxied_by_its_url(server: ClientServer, tmp_path: Path) -> None:
    """Proxy in front of a proxy: streamable HTTP on both sides."""
    model = await server.model()
    plain = parse_server(shlex.join(mcp_servers.hostile("plain")))
    async with model.trajectory() as outer:
        where = {"APPRENTICE_URL": server.url, "APPRENTICE_POLICY": model.policy}
        async with http_proxy(plain, **where) as inner_url:
            spec = parse_server(inner_url)
            async with (
                http_proxy(spec, APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=outer.id) as url,
                Client(url, mode="legacy") as client,
            ):
                assert await same_task(client)
    assert len(server.stored(outer.id).tool_events) == 5


async def test_denied_tools_are_neither_listed_nor_called(server: ClientServer) -> None:
    model = await server.model()
    spec = parse_server(shlex.join(mcp_servers.hostile("plain")), deny=("slow", "f*"))
    async with http_proxy(spec, APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy) as url, Client(url, mode="legacy") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["echo", "count", "progress"]
        with pytest.raises(MCPError, match="Unknown tool: fail"):
            await client.call_tool("fail", {})


async def test_an_apprentice_server_that_is_away_does_not_stop_the_host(tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    params = proxy_params(mcp_servers.hostile("plain"), APPRENTICE_URL="http://127.0.0.1:9", APPRENTICE_TRAJECTORY="trj-1")
    params.args[1] = f"import apprentice.core.client.recording as recording\nrecording.DRAIN_SECONDS = 0.1\n{SCRIPT}"
    with log.open("w") as errlog:
        async with Client(stdio_client(params, errlog=errlog), mode="legacy") as client:
            assert (await client.call_tool("count")).structured_content == {"count": 1}
            assert (await client.call_tool("count")).structured_content == {"count": 2}
    lines = [line for line in log.read_text().splitlines() if "missing in the ledger" in line]
    assert len(lines) == 1
    assert "trj-1" in lines[0]


async def test_a_server_that_does_not_start_is_one_sentence_for_the_host(server: ClientServer) -> None:
    params = proxy_params(["/nowhere/server"], APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY="trj-1")
    with pytest.raises(ExceptionGroup) as raised:
        async with Client(stdio_client(params), mode="legacy"):
            pass
    (error,) = raised.value.exceptions
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert str(error) == "the MCP server 'nowhere' cannot be started: there is no '/nowhere/server'"


async def test_a_server_that_does_not_start_is_one_sentence_over_http_too(server: ClientServer) -> None:
    for spec, says in (("/nowhere/server", "cannot be started: there is no '/nowhere/server'"), ("http://127.0.0.1:9/sse", "failed")):
        async with http_proxy(parse_server(spec), APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY="trj-1") as url:
            with pytest.raises(ExceptionGroup) as raised:
                async with Client(url, mode="legacy"):
                    pass
        (error,) = raised.value.exceptions
        while isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        assert says in str(error)


async def test_a_server_that_dies_ends_the_proxy_and_the_calls_are_recorded(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory() as t:
        params = proxy_params(mcp_servers.hostile("exits_mid_call"), APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=t.id)
        async with Client(stdio_client(params), mode="legacy") as client:
            await client.call_tool("echo", {"n": 1})
            with pytest.raises(MCPError, match=r"has ended|Connection closed"):
                await client.call_tool("exit", {})
    assert [(event.name, event.outcome) for event in server.stored(t.id).tool_events] == [("echo", "ok"), ("exit", "server_lost")]


async def test_after_a_signal_everything_is_recorded_and_no_process_is_left(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    async with model.trajectory() as t:
        params = proxy_params(
            mcp_servers.hostile("spawns_children"), APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY=t.id, NOTES=str(tmp_path / "notes")
        )
        process = subprocess.Popen(  # noqa: ASYNC220  it is signalled and its pipes are read by hand
            [params.command, *params.args], env=params.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for message in (
            {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}}},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "spawn", "arguments": {}}},
        ):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        assert json.loads(await asyncio.to_thread(process.stdout.readline))["id"] == 1
        child = int(json.loads(await asyncio.to_thread(process.stdout.readline))["result"]["content"][0]["text"])
        tree = [child, *(found.pid for found in psutil.Process(process.pid).children(recursive=True))]
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0
    assert [event.result for event in server.stored(t.id).tool_events] == [str(child)]
    assert eventually(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in tree))
    process.stdin.close()
    process.stdout.close()


async def test_a_killed_proxy_leaves_no_server_behind(server: ClientServer, tmp_path: Path) -> None:
    params = proxy_params(
        mcp_servers.hostile("ignores_stdin_end"), APPRENTICE_URL=server.url, APPRENTICE_TRAJECTORY="trj-1", NOTES=str(tmp_path / "notes")
    )
    process = subprocess.Popen(  # noqa: ASYNC220  as above
        [params.command, *params.args], env=params.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}}}
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(await asyncio.to_thread(process.stdout.readline))["id"] == 1
    tree = psutil.Process(process.pid).children(recursive=True)
    assert any("ignores_stdin_end" in " ".join(child.cmdline()) for child in tree)
    process.kill()
    process.wait()
    assert eventually(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in tree))
    process.stdin.close()
    process.stdout.close()


async def test_a_url_is_captured_for_each_caller_by_itself(server: ClientServer) -> None:
    """Over streamable HTTP a message is posted in a task of the transport; the caller's trajectory goes with it all the same."""
    model = await server.model()
    plain = parse_server(shlex.join(mcp_servers.hostile("plain")))
    async with http_proxy(plain, APPRENTICE_URL=server.url, APPRENTICE_POLICY=model.policy) as url, Client(captured(url)) as client:

        async def rollout(value: str) -> str:
            async with model.trajectory() as t:
                await client.call_tool("echo", {"value": value})
            return t.id

        ids = await asyncio.gather(*(rollout(value) for value in "abc"))
    assert [[event.arguments for event in server.stored(identity).tool_events] for identity in ids] == [
        [{"value": value}] for value in "abc"
    ]


async def test_a_host_that_says_nothing_at_all_is_the_end_of_its_input(server: ClientServer) -> None:
    await server.model()
    environment = {**os.environ, "APPRENTICE_URL": server.url, "APPRENTICE_POLICY": f"mail/{server.name}"}
    command = [sys.executable, "-m", "apprentice", "mcp", "proxy", shlex.join(mcp_servers.hostile("plain"))]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        _, log = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, b"Traceback" in log) == (0, False), log.decode()


@pytest.mark.parametrize(
    ("environment", "port", "sentence"),
    [
        ({}, None, "set APPRENTICE_URL"),
        ({"APPRENTICE_URL": "http://x"}, None, "needs APPRENTICE_TRAJECTORY"),
        ({"APPRENTICE_URL": "ftp://x"}, 0, "must look like http://host:7474"),
        ({"APPRENTICE_URL": "http://x", "APPRENTICE_POLICY": "mail"}, 0, "a policy is named project/name"),
    ],
)
async def test_a_proxy_that_could_not_record_is_refused_at_once(environment: dict[str, str], port: int | None, sentence: str) -> None:
    with pytest.raises((ConfigError), match=sentence):
        await run_proxy(parse_server("true"), port=port, environment=environment)


@pytest.mark.parametrize("given", ["to the server", "beside the proxy"])
async def test_the_host_gets_what_the_server_says_and_the_record_has_no_secret(server: ClientServer, tmp_path: Path, given: str) -> None:
    model = await server.model()
    secret = {"NOTES_KEY": "sk-4711-very-secret"}
    command = shlex.join(mcp_servers.hostile("keeps_notes", str(tmp_path / "notes.txt")))
    spec = parse_server(command, env=secret) if given == "to the server" else parse_server(command)
    beside = {} if given == "to the server" else secret
    for named in (False, True):
        async with model.trajectory() as open_one:
            where = {"APPRENTICE_TRAJECTORY": open_one.id} if named else {"APPRENTICE_POLICY": model.policy}
            async with http_proxy(spec, APPRENTICE_URL=server.url, **where, **beside) as url, Client(url, mode="legacy") as client:
                result = await client.call_tool("write_note", {"content": f"my key is {secret['NOTES_KEY']}"})
                assert result.content[0].text == f"noted with {secret['NOTES_KEY']}"  # type: ignore[union-attr]
    events = [event for found in await model.api.trajectories(policy=model.policy) for event in server.stored(found.id).tool_events]
    assert [(event.arguments, event.result) for event in events] == [({"content": "my key is •••"}, "noted with •••")] * 2
