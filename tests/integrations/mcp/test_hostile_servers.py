"""Servers that do what servers must not, each through a session: the outcome, the sentence, and that nothing is left.

Each server is a script in tests/support/hostile_servers, honest in all but one thing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import mcp_servers
from support.hostile_servers.http_faults import http_faults
from support.small_registry import eventually

from apprentice.core.errors import ToolServerError
from apprentice.integrations.mcp.session import McpSession
from apprentice.integrations.mcp.spec import McpServer
from apprentice.integrations.mcp.tools import ToolSet


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No child of ours, no process that a server noted, no private folder survives a test."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    notes = tmp_path / "notes"
    noted = [int(line) for line in notes.read_text().split()] if notes.exists() else []
    assert eventually(lambda: not [child for child in me.children(recursive=True) if child not in before])
    assert [pid for pid in noted if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE] == []


def hostile(name: str, *arguments: str, **fields: Any) -> McpServer:
    return McpServer(name=name, command=tuple(mcp_servers.hostile(name, *arguments)), **fields)  # type: ignore[call-arg]


async def refused(server: McpServer) -> str:
    """The one sentence with which a session cannot be opened."""
    with pytest.raises(ToolServerError) as raised:
        async with McpSession(server):
            pass
    sentence = str(raised.value)
    assert "\n" not in sentence
    return sentence


def names(session: McpSession) -> list[str]:
    return [tool.name for tool in session.tools]


# ---- servers that cannot be used ---------------------------------------------------------------------------------------


async def test_a_server_that_never_answers_is_given_up_at_the_deadline() -> None:
    sentence = await refused(hostile("never_answers", connect_seconds=1.0))
    assert "'never_answers'" in sentence
    assert "did not answer the MCP handshake within 1 s" in sentence


async def test_a_server_that_answers_garbage_is_told_from_one_that_answers_nothing() -> None:
    sentence = await refused(hostile("answers_garbage", connect_seconds=1.0))
    assert "'answers_garbage'" in sentence
    assert "not json" in sentence


async def test_a_server_that_dies_at_its_start_shows_its_last_lines_and_what_to_do() -> None:
    sentence = await refused(hostile("dies_at_start"))
    assert "ended with exit code 1 before it spoke MCP" in sentence
    assert "No module named 'mcp_of_another_age'" in sentence


async def test_a_server_that_lacks_a_variable_names_it_and_works_with_it() -> None:
    sentence = await refused(hostile("needs_variable"))
    assert "ended with exit code 1" in sentence
    assert "--env WEATHER_API_KEY=" in sentence
    async with McpSession(hostile("needs_variable", env={"WEATHER_API_KEY": "sunny-with-clouds"})) as session:
        assert (await session.call("echo", {})).ok


async def test_a_command_that_does_not_exist_is_named() -> None:
    server = McpServer(command=("/nowhere/mcp-server",))  # type: ignore[call-arg]
    assert "there is no command '/nowhere/mcp-server'" in await refused(server)


async def test_a_server_that_dies_of_the_newer_protocols_probe_is_asked_the_old_way() -> None:
    async with McpSession(hostile("exits_on_unknown")) as session:
        assert session.protocol == "2025-06-18"
        assert (await session.call("echo", {"a": 1})).text == 'echo {"a": 1}'


# ---- servers that are put right ----------------------------------------------------------------------------------------


async def test_banners_on_standard_output_are_survived_and_reported() -> None:
    async with McpSession(hostile("prints_banners")) as session:
        assert (await session.call("echo", {"a": 1})).text == 'echo {"a": 1}'
        assert any("Welcome to BannerServer" in repair for repair in session.repairs)


async def test_schemas_without_a_type_are_repaired_and_every_tool_can_be_called() -> None:
    async with McpSession(hostile("missing_type")) as session:
        assert names(session) == ["untyped", "empty", "absent", "null"]
        for name in names(session):
            assert (await session.call(name, {"x": 1})).ok
        assert len(session.repairs) >= 4
        functions = ToolSet.build(session.tools).functions
        assert all(entry["function"]["parameters"]["type"] == "object" for entry in functions)  # type: ignore[index, call-overload]


async def test_missing_capabilities_are_taken_for_none() -> None:
    async with McpSession(hostile("missing_capabilities")) as session:
        assert (await session.call("echo", {})).ok
        assert any("capabilities" in repair for repair in session.repairs)
        assert await session.list_resources() == []


async def test_output_schemas_that_results_do_not_keep_stop_no_call() -> None:
    async with McpSession(hostile("bad_output_schema")) as session:
        replies = {name: await session.call(name, {}) for name in names(session)}
    assert {name: (reply.outcome, reply.text) for name, reply in replies.items()} == {
        "rows": ("ok", "[1, 2]"),
        "promised": ("ok", "no structure here"),
        "wrong": ("ok", "x"),
    }


async def test_results_of_no_known_form_are_texts_or_protocol_errors_never_exceptions() -> None:
    async with McpSession(hostile("bad_results")) as session:
        replies = {name: await session.call(name, {}) for name in names(session)}
        assert session.alive
    assert {reply.outcome for reply in replies.values()} <= {"ok", "protocol_error"}
    assert replies["string"].text == "just text"
    assert "and text" in replies["unknown"].text


async def test_a_tool_list_without_an_end_is_cut() -> None:
    for arguments in ((), ("new",)):
        async with McpSession(hostile("endless_pages", *arguments)) as session:
            assert 1 <= len(session.tools) <= 100
            assert any("have no end" in repair for repair in session.repairs)
            assert (await session.call("tool_1", {})).ok


async def test_names_that_no_function_may_have_and_names_twice_lead_to_tools() -> None:
    async with McpSession(hostile("duplicate_names")) as session:
        tools = ToolSet.build(session.tools)
        assert len(set(tools.names)) == len(tools.names)
        assert any("'go' is listed twice" in repair for repair in session.repairs)
        for name in tools.names:
            tool = tools.resolve(name)
            assert tool is not None
            assert (await session.call(tool.name, {})).text == f"{tool.name} {{}}"


async def test_a_changed_tool_list_is_reported_and_the_first_one_stays() -> None:
    async with McpSession(hostile("changes_tools")) as session:
        assert names(session) == ["first"]
        assert (await session.call("first", {})).ok
        gone = await session.call("first", {})
        assert (gone.outcome, gone.text) == ("tool_error", "Unknown tool: first")
        assert names(session) == ["first"]
        assert any("changed its tool list" in repair for repair in session.repairs)


@pytest.mark.parametrize(("script", "hidden"), [("no_tools", 0), ("only_hidden_tools", 2)])
async def test_a_server_without_tools_for_a_model_opens_with_none(script: str, hidden: int) -> None:
    async with McpSession(hostile(script)) as session:
        assert session.tools == ()
        assert len(session.hidden) == hidden


# ---- calls that go wrong -----------------------------------------------------------------------------------------------


async def test_a_call_without_an_answer_is_a_timeout_and_the_session_lives() -> None:
    async with McpSession(hostile("never_answers", "calls")) as session:
        reply = await session.call("ask", {"n": 1}, seconds=0.1)
        assert (reply.outcome, reply.arguments) == ("timeout", {"n": 1})
        assert "did not answer within 0.1 s" in reply.text
        assert session.alive


async def test_a_call_answered_with_garbage_is_a_timeout_and_the_garbage_is_reported() -> None:
    async with McpSession(hostile("answers_garbage", "calls")) as session:
        reply = await session.call("ask", {}, seconds=0.2)
        assert reply.outcome in ("timeout", "protocol_error")
        assert any("not json" in repair for repair in session.repairs)
        assert session.alive


async def test_a_server_that_exits_in_a_call_is_lost_and_later_calls_say_so() -> None:
    async with McpSession(hostile("exits_mid_call")) as session:
        assert (await session.call("echo", {})).ok
        reply = await session.call("exit", {})
        assert reply.outcome == "server_lost"
        assert "\n" not in reply.text
        assert (await session.call("echo", {})).outcome == "server_lost"
        assert not session.alive
        assert "the disk is on fire" in session.stderr_tail()


async def test_a_flood_is_cut_for_the_model_and_whole_for_the_record() -> None:
    async with McpSession(hostile("floods")) as session:
        reply = await session.call("flood", {})
        assert reply.ok
        assert len(reply.full_text) == 32_000_000
        assert len(reply.text) <= 4_000
        assert "31,996," in reply.text
        assert session.alive


async def test_failures_called_successes_are_told_apart() -> None:
    async with McpSession(hostile("lies_about_errors")) as session:
        outcomes = {name: (await session.call(name, {})).outcome for name in names(session)}
    assert outcomes == {"failed_query": "reported_failure", "failed_json": "reported_failure", "fine": "tool_error", "honest": "ok"}


async def test_a_question_to_the_user_is_declined_and_noted() -> None:
    async with McpSession(hostile("elicits")) as session:
        reply = await session.call("ask", {})
    assert json.loads(reply.text) == {"action": "decline"}
    assert any("Who are you?" in note for note in reply.notes)


async def test_a_protocol_error_and_an_unknown_tool_are_replies() -> None:
    async with McpSession(hostile("plain")) as session:
        reply = await session.call("refuse", {})
        assert (reply.outcome, reply.text) == ("protocol_error", "Unknown tool: refuse (error -32602)")


async def test_what_is_written_beside_the_folder_is_gone_with_the_session() -> None:
    async with McpSession(hostile("writes_outside")) as session:
        assert session.workdir is not None
        outside = session.workdir.parent / "escaped.txt"
        reply = await session.call("write", {})
        assert reply.ok
        assert outside.exists()
    assert not outside.exists()


# ---- what is left ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("detached",), ("hidden",)])
async def test_children_that_would_outlive_a_server_do_not(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    server = hostile("spawns_children", *arguments, env={"NOTES": str(tmp_path / "notes")})
    async with McpSession(server) as session:
        child = int((await session.call("spawn", {})).text)
        assert psutil.pid_exists(child)


async def test_a_server_that_only_sigkill_ends_is_ended() -> None:
    async with McpSession(hostile("ignores_stdin_end")) as session:
        pid = session.pid
        assert (await session.call("echo", {})).ok
    assert pid is not None
    assert not psutil.pid_exists(pid)


# ---- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults() -> Iterator[str]:
    with http_faults() as url:
        yield url


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("401", "refused access with HTTP status 401: it wants a bearer token (--bearer-env, or bearer_env in a file)"),
        ("403", "refused access with HTTP status 403"),
        ("404", "answered with HTTP status 404 instead of MCP"),
        ("500", "answered with HTTP status 500 instead of MCP"),
        ("html", "speaks no MCP that can be understood: Unexpected content type: text/html"),
        ("json", "speaks no MCP that can be understood: its answer is no message of the protocol"),
        ("empty", "speaks no MCP that can be understood: its answer is empty"),
        ("204", "speaks no MCP that can be understood: its answer is empty"),
        ("hang", "did not answer the MCP handshake within 1 s"),
    ],
)
async def test_an_http_server_that_is_no_mcp_server_is_one_sentence(faults: str, path: str, sentence: str) -> None:
    said = await refused(McpServer(url=f"{faults}/{path}", connect_seconds=1.0))  # type: ignore[call-arg]
    assert sentence in said
    assert "pydantic" not in said
    assert "scope" not in said


async def test_a_server_that_hangs_up_without_an_answer_is_asked_about_https() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        assert "it closed the connection without an answer; does it want https?" in await refused(McpServer(url=url))  # type: ignore[call-arg]


async def test_a_rejected_token_is_said_to_be_one_and_never_shown(faults: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_TOKEN", "very-secret-token")
    sentence = await refused(McpServer(url=f"{faults}/401", bearer_env="HOSTILE_TOKEN", connect_seconds=5.0))  # type: ignore[call-arg]
    assert "the token or header it was given is not accepted" in sentence
    assert "very-secret-token" not in sentence


async def test_an_address_where_nothing_answers_is_one_sentence() -> None:
    assert "nothing answers at http://127.0.0.1:9" in await refused(McpServer(url="http://127.0.0.1:9/mcp"))  # type: ignore[call-arg]
