"""`apprentice mcp proxy SERVER`: is that server to any MCP host, and records every tool call.

A host application is captured by putting the proxy in front of a server in its configuration file. Over stdio there is one session;
over HTTP (loopback only) each host's session has a server, and process, of its own.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...core.errors import ToolServerError
from .capture import captured
from .host_streams import host_streams
from .proxy_records import VARIABLES, Destination, SessionRecords
from .redaction import variable_secrets
from .relay import Relay

if TYPE_CHECKING:
    from mcp.client import Transport

    from .spec import McpServer, Resolved


async def run_proxy(
    server: McpServer, *, port: int | None = None, environment: Mapping[str, str], ready: Callable[[str], None] | None = None
) -> None:
    """Serve until the host goes, or until SIGTERM or SIGINT.

    `port`: HTTP on loopback (0: a free one), else stdio. `environment`: ours; APPRENTICE_URL, APPRENTICE_API_KEY,
    APPRENTICE_TRAJECTORY and APPRENTICE_POLICY say where calls are recorded, and everything else is the server's too.
    `ready` is called with the URL once HTTP is served. Raises ConfigError and ToolServerError.
    """
    destination = Destination.of(environment, headers=port is not None)

    async def session(read: Any, write: Any) -> None:  # Any: the SDK's stream protocols
        hide = server.redactor().also(variable_secrets(environment))  # what stands beside the proxy in a host's file is the server's
        records = SessionRecords(destination, server.name, hide)
        await serve_session(server, environment, records, read, write)

    async with _until_signal(), _closing(destination):
        if port is None:
            async with host_streams() as (read, write):
                await session(read, write)
        else:
            from .proxy_http import serve_http

            await serve_http(session, port, ready or _announce)


def _announce(url: str) -> None:
    print(f"Serving MCP at {url}", file=sys.stderr, flush=True)


@asynccontextmanager
async def _closing(destination: Destination) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await destination.api.transport.aclose()


@asynccontextmanager
async def _until_signal() -> AsyncGenerator[None]:
    """The block ends in good order at SIGTERM and SIGINT: a proxy that is simply killed would leave records unsent."""
    import anyio

    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, scope.cancel)
        except (NotImplementedError, RuntimeError, ValueError):
            pass  # Windows, or not the main thread: then signals are somebody else's
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def serve_session(server: McpServer, environment: Mapping[str, str], records: SessionRecords, read: Any, write: Any) -> None:
    """One host's session with a server of its own. Raises ToolServerError, after the host was told why."""
    relay = Relay(read, write, records.choose, server.admits)
    try:
        async with _upstream(server, environment) as transport:
            connection = captured(transport, server=server.name)
            async with connection as (up_read, up_write):
                server_ended = await relay.run(up_read, up_write, connection.calls)
        if server_ended:
            await relay.end(f"the MCP server {server.name!r} has ended")
    except (Exception, BaseExceptionGroup) as error:
        why = server.redact(_why(server, error))
        await relay.fail(why)
        raise ToolServerError(why) from error
    finally:
        await records.close()


@asynccontextmanager
async def _upstream(server: McpServer, environment: Mapping[str, str]) -> AsyncGenerator[Transport]:
    """The transport to the real server; its process tree and private folder are gone afterwards."""
    async with AsyncExitStack() as stack:
        if server.transport != "stdio":
            yield await _http_transport(server, server.resolve(None), stack)
            return
        from mcp import StdioServerParameters, stdio_client

        from .processes import Lease, Place

        lease = Lease()
        stack.push_async_callback(lease.release)
        place = Place(lease)
        stack.callback(place.remove)
        stack.callback(place.kill)
        if server.fixture:
            await asyncio.to_thread(_lay, server.fixture, place.workdir)
        resolved = server.resolve(place.workdir)
        inherited = {name: value for name, value in environment.items() if name not in VARIABLES}
        yield stdio_client(
            StdioServerParameters(
                command=resolved.command[0],
                args=list(resolved.command[1:]),
                env={**inherited, **resolved.env, **place.marks},
                cwd=resolved.cwd,  # else ours: what stands in the host's configuration is relative to that
                encoding_error_handler="replace",
            )
        )


def _lay(fixture: str, workdir: Path) -> None:
    shutil.copytree(Path(fixture).expanduser(), workdir, dirs_exist_ok=True)


async def _http_transport(server: McpServer, resolved: Resolved, stack: AsyncExitStack) -> Transport:
    import httpx2
    from mcp.client.sse import sse_client
    from mcp.client.streamable_http import streamable_http_client

    async def authorize(request: httpx2.Request) -> None:
        token = server.bearer()
        if token is not None:
            request.headers["authorization"] = f"Bearer {token}"

    assert resolved.url is not None
    if server.transport == "sse":
        token = server.bearer()
        headers = {**resolved.headers, **({"authorization": f"Bearer {token}"} if token else {})}
        return sse_client(resolved.url, headers=headers, sse_read_timeout=24 * 3600)
    client = httpx2.AsyncClient(
        headers=resolved.headers, timeout=httpx2.Timeout(server.connect_seconds, read=None), event_hooks={"request": [authorize]}
    )
    await stack.enter_async_context(client)
    return streamable_http_client(resolved.url, http_client=client, max_sse_event_size=None)


def _why(server: McpServer, error: BaseException) -> str:
    """One sentence from what may be nested groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, FileNotFoundError) and server.command:
        return f"the MCP server {server.name!r} cannot be started: there is no {error.filename or server.command[0]!r}"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"the connection to the MCP server {server.name!r} failed: {text}"
