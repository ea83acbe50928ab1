"""Hands JSON-RPC messages on between an MCP host and a server, both ways and as they are.

Nothing is interpreted that need not be: ids, capabilities, progress, cancellations, requests of the server to the host and errors
pass through, whatever the protocol's version. It must not know how either end is connected, nor what becomes of recorded calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import anyio

from ...core.client.recording import ToolRecording
from .capture import Calls

if TYPE_CHECKING:
    from mcp.shared.message import ClientMessageMetadata, SessionMessage
    from mcp_types import JSONRPCMessage, JSONRPCRequest

CLOSED = -32000
INVALID_PARAMS = -32602
FIRST_WORD_SECONDS = 5.0
"""How long a host may take to say what it is then told about a server that does not start."""
_VERSION = "io.modelcontextprotocol/protocolVersion"
_GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)

Choose = Callable[["SessionMessage"], ToolRecording | None]


class Relay:
    """One host's connection. `choose` says where a tool call of the host is recorded; `admits`, which tools there are."""

    def __init__(self, read: Any, write: Any, choose: Choose, admits: Callable[[str], bool]) -> None:  # Any: the SDK's stream protocols
        self._read, self._write = read, write
        self._choose, self._admits = choose, admits
        self._open: dict[str | int, str] = {}
        """Requests of the host that have no answer yet, with their methods."""
        self._progress: dict[str | int, str | int] = {}
        self._version: str | None = None
        self._headers: dict[str, Any] = {}

    async def run(self, read: Any, write: Any, calls: Calls) -> bool:
        """Until either side ends; True if it was the server. `read` and `write` are the server's."""
        ended: list[Any] = []
        async with anyio.create_task_group() as group:

            async def pump(source: Any, hand_on: Any) -> None:
                try:
                    async for item in source:
                        if not isinstance(item, Exception):  # a line that is no JSON-RPC
                            await hand_on(item)
                except _GONE:
                    pass
                ended.append(source)
                group.cancel_scope.cancel()

            async def to_server(item: SessionMessage) -> None:
                await self._to_server(item, write, calls)

            group.start_soon(pump, self._read, to_server)
            group.start_soon(pump, read, self._to_host)
        return bool(ended) and ended[0] is read

    async def fail(self, why: str) -> None:
        """Tell the host why there is no answer: to what it asked, or to the first thing that it asks."""
        if not self._open:
            with anyio.move_on_after(FIRST_WORD_SECONDS):
                try:
                    while not self._open:
                        self._note(await self._read.receive())
                except _GONE:
                    return
        await self.end(why)

    async def end(self, why: str) -> None:
        """Answer what is still open."""
        for identity in list(self._open):
            await self._refuse(identity, CLOSED, why)

    async def _to_server(self, item: SessionMessage, write: Any, calls: Calls) -> None:
        from mcp.shared.message import SessionMessage
        from mcp_types import JSONRPCRequest

        self._note(item)
        message = item.message
        if isinstance(message, JSONRPCRequest) and message.method == "tools/call":
            tool = str((message.params or {}).get("name"))
            if not self._admits(tool):
                await self._refuse(message.id, INVALID_PARAMS, f"Unknown tool: {tool}")
                return
        calls.trajectory = self._choose(item)
        await write.send(SessionMessage(message, self._http_headers(message)))

    async def _to_host(self, item: SessionMessage) -> None:
        from mcp.shared.message import ServerMessageMetadata, SessionMessage
        from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCResponse

        message = item.message
        related: str | int | None = None
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            method = self._open.pop(message.id, None) if message.id is not None else None
            self._progress = {token: request for token, request in self._progress.items() if request in self._open}
            if isinstance(message, JSONRPCResponse):
                self._learn(method, message.result)
        elif isinstance(message, JSONRPCNotification):
            token = (message.params or {}).get("progressToken")
            related = self._progress.get(token) if isinstance(token, str | int) else None
        else:  # a request of the server is about whatever the host asked last
            related = next(reversed(self._open), None)
        await self._write.send(SessionMessage(message, ServerMessageMetadata(related_request_id=related)))

    def _note(self, item: SessionMessage | Exception) -> None:
        from mcp_types import JSONRPCRequest

        if isinstance(item, Exception) or not isinstance(item.message, JSONRPCRequest):
            return
        self._open[item.message.id] = item.message.method
        token = _meta(item.message.params).get("progressToken")
        if isinstance(token, str | int):
            self._progress[token] = item.message.id

    def _learn(self, method: str | None, result: dict[str, Any]) -> None:
        """What later requests need: the version agreed on, and which arguments a server wants as headers."""
        if method == "initialize":
            self._version = str(result.get("protocolVersion"))
        if method == "tools/list" and isinstance(result.get("tools"), list):
            from mcp.shared.inbound import x_mcp_header_map

            result["tools"] = [tool for tool in result["tools"] if self._admits(str(tool.get("name")))]
            for tool in result["tools"]:
                self._headers[str(tool.get("name"))] = x_mcp_header_map(tool.get("inputSchema"))

    def _http_headers(self, message: JSONRPCMessage) -> ClientMessageMetadata | None:
        """The headers that HTTP servers want beside a message; other transports look at none."""
        from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
        from mcp.shared.message import ClientMessageMetadata
        from mcp_types import JSONRPCRequest

        params: dict[str, Any] = getattr(message, "params", None) or {}
        version = _meta(params).get(_VERSION)
        if isinstance(message, JSONRPCRequest) and isinstance(version, str):
            return ClientMessageMetadata(headers={MCP_PROTOCOL_VERSION_HEADER: version, **self._routing(message, params)})
        if self._version is not None and getattr(message, "method", None) != "initialize":
            return ClientMessageMetadata(headers={MCP_PROTOCOL_VERSION_HEADER: self._version})
        return None

    def _routing(self, message: JSONRPCRequest, params: dict[str, Any]) -> dict[str, str]:
        from mcp.shared.inbound import MCP_METHOD_HEADER, MCP_NAME_HEADER, NAME_BEARING_METHODS, encode_header_value, mcp_param_headers

        headers = {MCP_METHOD_HEADER: message.method}
        key = NAME_BEARING_METHODS.get(message.method)
        name = params.get(key) if key else None
        if isinstance(name, str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        if message.method == "tools/call":
            headers |= mcp_param_headers(self._headers.get(str(name)) or {}, params.get("arguments") or {})
        return headers

    async def _refuse(self, identity: str | int, code: int, why: str) -> None:
        from mcp.shared.message import SessionMessage
        from mcp_types import ErrorData, JSONRPCError

        self._open.pop(identity, None)
        with suppress(*_GONE):
            await self._write.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=identity, error=ErrorData(code=code, message=why))))


def _meta(params: Mapping[str, Any] | None) -> dict[str, Any]:  # Any: JSON
    meta: object = (params or {}).get("_meta")
    return cast("dict[str, Any]", meta) if isinstance(meta, dict) else {}
