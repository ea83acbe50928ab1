"""Captures an MCP session that is not ours: `Client(captured(stdio_client(params)))`, and every tool call is in the trajectory.

The wrapper stands between the session and its transport and hands every message on as it is. A call is attributed when the
session writes it, which happens in the caller's own task, so that one session may serve many trajectories at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from ...core.client.recording import ToolRecording
from ...core.client.scope import TrajectoryScope, current_trajectory
from ...core.errors import ConfigError
from ...core.records import ToolEvent, ToolOutcome
from .reply import ToolReply
from .results import reply_of

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCMessage, JSONRPCRequest

logger = logging.getLogger("apprentice")


def captured(
    transport: Transport | StdioServerParameters | str, trajectory: TrajectoryScope | ToolRecording | None = None, server: str = "mcp"
) -> CapturedTransport:
    """`transport` (or what `Client` takes in its place: a URL or StdioServerParameters), with its tool calls recorded.

    They go into `trajectory`, else into the one that is ambient where a call is made; a call outside of any is not recorded.
    `server` names it in the outcome's texts. Nothing that the session sees changes.
    """
    return CapturedTransport(_as_transport(transport), trajectory, server)


def _as_transport(transport: Transport | StdioServerParameters | str) -> Transport:
    from mcp import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if isinstance(transport, str):
        return streamable_http_client(transport, max_sse_event_size=None)
    if isinstance(transport, StdioServerParameters):
        return stdio_client(transport)
    if not isinstance(transport, AbstractAsyncContextManager):
        raise ConfigError(
            f"captured() takes a transport, a URL or StdioServerParameters, got {type(transport).__name__}", param="transport"
        )
    return transport


class CapturedTransport(AbstractAsyncContextManager["tuple[Any, Any]"]):
    """A transport of the MCP SDK (single use, as they all are)."""

    def __init__(self, transport: Transport, trajectory: TrajectoryScope | ToolRecording | None, server: str) -> None:
        self._transport = transport
        self.calls = Calls(trajectory, server)

    async def __aenter__(self) -> tuple[Any, Any]:  # Any: the SDK's stream protocols, met by duck typing
        read, write = await self._transport.__aenter__()
        return ReadEnd(read, self.calls), WriteEnd(write, self.calls)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            self.calls.end()
            await self.calls.flush()
        finally:
            # Always: a transport that is not left leaves its process behind.
            suppressed = await self._transport.__aexit__(kind, error, trace)
        return suppressed


@dataclass(frozen=True, slots=True)
class _Call:
    recording: ToolRecording
    tool: str
    arguments: JsonValue
    started: float


class Calls:
    """The tool calls on one connection that have no answer yet. No method raises."""

    def __init__(self, trajectory: TrajectoryScope | ToolRecording | None, server: str) -> None:
        self.trajectory = trajectory
        self._server = server
        self._open: dict[str | int, _Call] = {}
        self._used: WeakSet[ToolRecording] = WeakSet()
        self._lists: dict[str | int, bool] = {}
        """Requests for the tool list that have no answer yet: whether each asks for the first page."""
        self._tools: set[str] = set()
        self._all_known = False
        self._warned = False

    def sent(self, item: SessionMessage) -> None:
        """A message is about to leave; called in the task that sends it."""
        try:
            self._sent(item.message)
        except Exception as error:  # noqa: BLE001  the user's session goes on, whatever becomes of its record
            self._warn(error)

    def received(self, item: SessionMessage | Exception) -> None:
        """A message came in and is about to be handed on."""
        try:
            if not isinstance(item, Exception):
                self._received(item.message)
        except Exception as error:  # noqa: BLE001  as above
            self._warn(error)

    def lost(self, item: SessionMessage) -> None:
        """The message could not be sent."""
        identity = getattr(item.message, "id", None)
        if identity in self._open:
            self._record(self._open.pop(identity), "server_lost", "The connection was closed before the call could be sent.")

    def end(self) -> None:
        """The connection is closed: what has no answer will get none."""
        while self._open:
            _, call = self._open.popitem()
            self._record(call, "server_lost", "The connection was closed before an answer came.")

    async def flush(self) -> None:
        """Wait (for a bounded time, and even if the task is being cancelled by its scope) until everything is recorded."""
        import anyio

        with anyio.CancelScope(shield=True):
            for recording in tuple(self._used):
                await recording.drain()

    def _sent(self, message: JSONRPCMessage) -> None:
        from mcp_types import JSONRPCNotification, JSONRPCRequest

        if isinstance(message, JSONRPCRequest) and message.method == "tools/call":
            self._begin(message)
        elif isinstance(message, JSONRPCRequest) and message.method == "tools/list":
            self._lists[message.id] = not (message.params or {}).get("cursor")
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            params = message.params or {}
            call = self._take(params.get("requestId"))
            if call is not None:
                self._record(call, "timeout", f"No answer was waited for any longer: {params.get('reason') or 'the call was cancelled'}.")

    def _begin(self, message: JSONRPCRequest) -> None:
        where = self.trajectory or current_trajectory()
        if where is None:
            return
        recording = where.recording if isinstance(where, TrajectoryScope) else where
        params = message.params or {}
        arguments: JsonValue = to_jsonable_python(params.get("arguments") or {})  # a copy: the caller may go on using its own
        self._open[message.id] = _Call(recording, str(params.get("name")), arguments, time.monotonic())

    def _received(self, message: JSONRPCMessage) -> None:
        from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCResponse

        if isinstance(message, JSONRPCNotification) and message.method == "notifications/tools/list_changed":
            self._all_known = False
        elif isinstance(message, JSONRPCResponse) and message.id in self._lists:
            self._listed(self._lists.pop(message.id), message.result)
        elif isinstance(message, JSONRPCResponse):
            call = self._take(message.id)
            if call is not None and message.result.get("resultType") != "input_required":  # the call goes on under another id
                self._record(call, "ok", message.result)
        elif isinstance(message, JSONRPCError):
            call = self._take(message.id)
            if call is not None:
                why = message.error.message or "the server refused the request"
                self._record(call, "protocol_error", f"{why} (error {message.error.code})")  # as `McpSession` says it

    def _listed(self, first: bool, page: dict[str, Any]) -> None:
        tools: list[dict[str, Any]] = page.get("tools") or []
        names = {str(tool.get("name")) for tool in tools}
        self._tools = names if first else self._tools | names
        self._all_known = not page.get("nextCursor")

    def _take(self, identity: object) -> _Call | None:
        """The open call of this id. Servers that turn a number into its digits are understood, as the SDK does."""
        if isinstance(identity, str) and identity not in self._open and identity.isdigit():
            identity = int(identity)
        return self._open.pop(identity, None) if isinstance(identity, str | int) else None

    def _record(self, call: _Call, outcome: ToolOutcome, answer: dict[str, Any] | str) -> None:
        ended, seconds = time.time(), time.monotonic() - call.started
        unknown = self._all_known and call.tool not in self._tools

        def make() -> ToolEvent:
            event = self._reply(call, outcome, answer, seconds, unknown).event(call.recording.trajectory_id)
            return event.model_copy(update={"created_at": ended})  # before the next model call, however long recording takes

        self._used.add(call.recording)
        call.recording.soon(make)

    def _reply(self, call: _Call, outcome: ToolOutcome, answer: dict[str, Any] | str, seconds: float, unknown: bool) -> ToolReply:
        if isinstance(answer, str):
            return ToolReply(self._server, call.tool, call.arguments, outcome, answer, seconds=seconds)
        reply = reply_of(to_jsonable_python(answer), server=self._server, tool=call.tool, arguments=call.arguments, seconds=seconds)
        if unknown and reply.ok:  # whatever the server says to it, there is no such tool
            return replace(reply, outcome="tool_error")
        return reply

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("a tool call of the MCP server %s was not recorded: %s: %s", self._server, type(error).__name__, error)


class ReadEnd:
    """What the session reads from."""

    def __init__(self, stream: Any, calls: Calls) -> None:  # Any: a stream of the SDK or of anyio
        self._stream = stream
        self._calls = calls

    def __getattr__(self, name: str) -> Any:  # Any: whatever else the stream offers (`last_context`, `close`, …)
        return getattr(self._stream, name)

    async def receive(self) -> Any:
        import anyio

        try:
            item = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._calls.end()
            raise
        self._calls.received(item)
        return item

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await anext(self._stream)
        except StopAsyncIteration:
            self._calls.end()
            raise
        self._calls.received(item)
        return item

    async def __aenter__(self) -> ReadEnd:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)


class WriteEnd:
    """What the session writes to."""

    def __init__(self, stream: Any, calls: Calls) -> None:  # Any: a stream of the SDK or of anyio
        self._stream = stream
        self._calls = calls

    def __getattr__(self, name: str) -> Any:  # Any: as above
        return getattr(self._stream, name)

    async def send(self, item: SessionMessage) -> None:
        self._calls.sent(item)
        try:
            await self._stream.send(item)
        except Exception:
            self._calls.lost(item)
            raise

    async def __aenter__(self) -> WriteEnd:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)
