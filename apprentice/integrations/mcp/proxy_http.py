"""The host's end of the proxy over HTTP: streamable HTTP on loopback, each session relayed to a server of its own.

Hosts of the newer, stateless protocol are told to use the handshake: a recorded session needs a session.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio
import uvicorn
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...core.errors import ConfigError, ToolServerError

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus
    from starlette.types import Message, Receive, Scope, Send

PATH = "/mcp"
IDLE_SECONDS = 30 * 60.0
ANSWER_SECONDS = 2.0
"""How long an ended session may take to send its last answers."""
INVALID_REQUEST = -32600
Session = Callable[[Any, Any], Awaitable[None]]
"""Serves one host over its two streams (the SDK's stream protocols)."""

logger = logging.getLogger("apprentice")


async def serve_http(session: Session, port: int, ready: Callable[[str], None]) -> None:
    """Until cancelled. `ready` is called with the URL. Raises ConfigError if the port is taken."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"the proxy cannot listen at 127.0.0.1:{port}: {error.strerror}", param="port") from error
    with listening:
        listening.listen(128)
        async with anyio.create_task_group() as group:
            server = _Server(uvicorn.Config(_App(session, group), log_level="critical", lifespan="off", timeout_graceful_shutdown=1))

            async def listen() -> None:
                with anyio.CancelScope(shield=True):  # it ends when told to, or the loop would keep watching a closed socket
                    await server.serve(sockets=[listening])

            group.start_soon(listen)
            ready(f"http://127.0.0.1:{listening.getsockname()[1]}{PATH}")
            try:
                await anyio.sleep_forever()
            finally:
                server.should_exit = True


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are `run_proxy`'s: uvicorn would raise them again before sessions are closed."""
        yield


class _App:
    """The ASGI application: finds or begins the session of a request."""

    def __init__(self, session: Session, group: TaskGroup) -> None:
        self._session = session
        self._group = group
        self._transports: dict[str, StreamableHTTPServerTransport] = {}
        self._posts: dict[StreamableHTTPServerTransport, set[anyio.Event]] = {}
        """POSTs that have no whole answer yet, by session; each event comes with its end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        version = request.headers.get(MCP_PROTOCOL_VERSION_HEADER)
        named = request.headers.get(MCP_SESSION_ID_HEADER)
        if request.url.path.rstrip("/") != PATH:
            await _error(404, INVALID_REQUEST, f"MCP is served at {PATH}")(scope, receive, send)
        elif version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version}
            await _error(400, UNSUPPORTED_PROTOCOL_VERSION, "this proxy speaks the handshake versions", data)(scope, receive, send)
        elif named is None:
            await self._begin(scope, receive, send)
        elif named in self._transports:
            await self._handle(self._transports[named], scope, receive, send)
        else:
            await _error(404, INVALID_REQUEST, "Session not found")(scope, receive, send)

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        local = ["127.0.0.1:*", "localhost:*", "127.0.0.1", "localhost"]
        origins = [f"http://{host}" for host in local]
        transport = StreamableHTTPServerTransport(
            uuid4().hex,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=True, allowed_hosts=local, allowed_origins=origins),
            idle_timeout=IDLE_SECONDS,
        )
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._group.start(self._serve, transport)
        try:
            await self._handle(transport, scope, receive, watched)
        finally:
            if status >= 400:  # no `initialize`: nothing has begun
                await self._end(transport)

    async def _handle(self, transport: StreamableHTTPServerTransport, scope: Scope, receive: Receive, send: Send) -> None:
        done = anyio.Event()
        posts = self._posts.setdefault(transport, set()) if scope["method"] == "POST" else set[anyio.Event]()
        posts.add(done)
        try:
            await transport.handle_request(scope, receive, send)
        finally:
            posts.discard(done)
            done.set()

    async def _serve(self, transport: StreamableHTTPServerTransport, *, task_status: TaskStatus[None]) -> None:
        identity = transport.mcp_session_id or ""
        self._transports[identity] = transport
        try:
            async with transport.connect() as (read, write):
                task_status.started()
                with transport.idle_scope or anyio.CancelScope():
                    try:
                        await self._session(read, write)
                    finally:
                        await self._last_answers(transport)
        except ToolServerError as error:
            logger.warning("%s", error)
        finally:
            await self._end(transport)

    async def _last_answers(self, transport: StreamableHTTPServerTransport) -> None:
        """Leaving the transport would drop what it has not sent, such as why there is no session any more."""
        with anyio.move_on_after(ANSWER_SECONDS):
            for done in tuple(self._posts.get(transport, ())):
                await done.wait()

    async def _end(self, transport: StreamableHTTPServerTransport) -> None:
        self._transports.pop(transport.mcp_session_id or "", None)
        self._posts.pop(transport, None)
        if not transport.is_terminated:
            with anyio.CancelScope(shield=True):
                await transport.terminate()


def _error(status: int, code: int, message: str, data: dict[str, Any] | None = None) -> Response:
    error = {"code": code, "message": message, **({"data": data} if data else {})}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=status)
