"""A server that is lost between two calls: what the rollout sees, and that a later one has a session that works."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal

import pytest
from support import mcp_servers
from support.hostile_servers.forgets_sessions import forgets_sessions

from apprentice.core.errors import ConfigError, ToolServerError
from apprentice.integrations.mcp.environment import McpEnvironment, SessionPool
from apprentice.integrations.mcp.spec import parse_server


async def outcomes(env: McpEnvironment, *functions: str) -> list[str]:
    return [(await env.call(function, {"message": "hi"})).outcome for function in functions]


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("mode", ["streamableHttp", "sse"])
async def test_a_url_that_was_started_anew_serves_later_rollouts_and_not_the_one_it_was_lost_in(mode: str, warm: int) -> None:
    port = mcp_servers.free_port()
    with mcp_servers.everything_at(mode, port) as (url, process):
        async with SessionPool([parse_server(url, name="e")], warm=warm) as pool, pool.environment() as env:
            assert await outcomes(env, "echo") == ["ok"]
            for ready in pool._ready["e"]:  # pyright: ignore[reportPrivateUsage]
                await ready  # a session with the server that is about to go
            process.kill()
            process.wait()
            with mcp_servers.everything_at(mode, port):
                assert await outcomes(env, "echo", "echo") == ["server_lost", "server_lost"]
                async with pool.environment() as later:
                    assert await outcomes(later, "echo", "echo") == ["ok", "ok"]


@pytest.mark.parametrize("mode", ["streamableHttp", "sse"])
async def test_a_shared_url_has_a_new_session_with_the_next_call_even_in_the_rollout_that_lost_it(mode: str) -> None:
    port = mcp_servers.free_port()
    with mcp_servers.everything_at(mode, port) as (url, process):
        async with SessionPool([parse_server(url, name="e", isolation="shared")]) as pool, pool.environment() as env:
            assert await outcomes(env, "echo") == ["ok"]
            process.kill()
            process.wait()
            assert await outcomes(env, "echo", "echo") == ["server_lost", "server_lost"]  # nothing answers
            with pytest.raises(ToolServerError, match="nothing answers"):
                async with pool.environment():
                    pass
            with mcp_servers.everything_at(mode, port) as (_, second):
                assert await outcomes(env, "echo", "echo") == ["ok", "ok"]
                second.kill()
                second.wait()
                with mcp_servers.everything_at(mode, port):
                    async with pool.environment() as later:  # which sees at once that the old session is of no use
                        assert await outcomes(later, "echo") == ["ok"]


async def test_a_shared_process_that_ended_is_started_anew_with_the_next_call() -> None:
    server = parse_server(shlex.join(mcp_servers.hostile("plain")), isolation="shared")
    async with SessionPool([server]) as pool, pool.environment() as env:
        pid = env.sessions["plain"].pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        replies = [await env.call("count", {}) for _ in range(3)]
    assert [reply.outcome for reply in replies[1:]] == ["ok", "ok"]
    assert [reply.text for reply in replies[1:]] in (["1", "2"], ["2", "3"])  # the end may have been seen before the first call


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "Session not found"), (404, "Not Found"), (400, "Bad Request: No valid session ID provided"), (410, "this session expired")],
)
async def test_a_refused_session_is_opened_anew_once_for_all_that_share_it(status: int, words: str) -> None:
    with forgets_sessions(status, words) as server:
        async with SessionPool([parse_server(server.url, name="s", isolation="shared")]) as pool, pool.environment() as env:
            assert await outcomes(env, "echo") == ["ok"]
            server.forget()
            lost = await env.call("echo", {})
            assert lost.outcome == "server_lost"
            assert "no longer knows the session" in lost.text
            replies = await asyncio.gather(*(env.call("echo", {}) for _ in range(5)))
        assert {(reply.outcome, reply.text) for reply in replies} == {("ok", "in session-1")}
        assert server.sessions == ["session-0", "session-1"]


async def test_a_refusal_that_is_not_about_the_session_loses_nothing() -> None:
    with forgets_sessions() as server:
        async with SessionPool([parse_server(server.url, name="s", isolation="shared")]) as pool, pool.environment() as env:
            assert await outcomes(env, "refuse", "echo") == ["protocol_error", "ok"]
        assert len(server.sessions) == 1


async def test_a_connection_that_is_dropped_in_a_call_loses_that_call() -> None:
    with forgets_sessions() as server:
        async with SessionPool([parse_server(server.url, name="s", isolation="shared")]) as pool, pool.environment() as env:
            assert await outcomes(env, "echo", "drop", "echo", "echo") == ["ok", "server_lost", "ok", "ok"]
        assert len(server.sessions) == 2


async def test_a_session_kept_ready_that_could_not_be_opened_then_is_opened_now() -> None:
    port = mcp_servers.free_port()
    async with SessionPool([parse_server(f"http://127.0.0.1:{port}/mcp", name="e")], warm=1) as pool:
        (ready,) = pool._ready["e"]  # pyright: ignore[reportPrivateUsage]
        await asyncio.wait([ready])
        with mcp_servers.everything_at("streamableHttp", port):
            async with pool.environment() as env:
                assert await outcomes(env, "echo") == ["ok"]


async def test_a_pool_that_is_closed_opens_nothing_for_a_rollout_that_goes_on() -> None:
    with forgets_sessions() as server:
        async with SessionPool([parse_server(server.url, name="s", isolation="shared")]) as pool, pool.environment() as env:
            pass
        assert await outcomes(env, "echo") == ["server_lost"]
        with pytest.raises(ConfigError, match="inside `async with`"):
            async with pool.environment():
                pass
        assert len(server.sessions) == 1
