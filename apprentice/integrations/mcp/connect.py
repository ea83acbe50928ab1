"""How a session's server is reached: the transport for its kind, observed, and a client of the SDK on top of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from ...core.records import JsonObject
from .processes import Place
from .repairs import Repairs
from .spec import McpServer, Resolved
from .stdio import ServerProcess, environment, stdio_transport
from .transport import Observer, observed

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp.client.session import ClientRequestContext
    from mcp_types import ElicitRequestParams, ElicitResult

HTTP_SECONDS = 30.0
"""For connecting and sending; how long an answer may take is the session's matter."""
QUIET_SECONDS = 24 * 3600.0
"""How long an SSE stream may be silent."""


@dataclass(slots=True)
class Wire:
    """One connection in the making and at work: what went over it and what became of its ends."""

    server: McpServer
    resolved: Resolved
    place: Place | None
    observer: Observer
    repairs: Repairs
    child: ServerProcess = field(default_factory=ServerProcess)
    status: int | None = None
    """The last HTTP status that was an error."""
    forgotten: bool = False
    """The server said that it knows no such session (it was started anew, or the session expired)."""
    notes: list[str] = field(default_factory=list[str])
    """What happened during the session that a reader of its calls should know."""

    @property
    def env(self) -> dict[str, str]:
        private = {"TMPDIR": str(self.place.temporary)} if self.place else {}
        return environment({**private, **self.resolved.env, **(self.place.marks if self.place else {})})

    @property
    def cwd(self) -> Path | None:
        return Path(self.resolved.cwd).expanduser() if self.resolved.cwd else self.place.workdir if self.place else None

    @asynccontextmanager
    async def client(self, mode: str) -> AsyncGenerator[Client]:
        """A connected client. Enter and leave it in one task."""
        from mcp import Client
        from mcp_types import Implementation

        async with self._transport() as transport:
            client = Client(
                observed(transport, self.observer),
                mode=mode,
                read_timeout_seconds=max(self.server.connect_seconds, self.server.call_seconds),
                elicitation_callback=self._elicited,
                client_info=Implementation(name="apprentice", version="1"),
                cache=None,
            )
            async with client:
                yield client

    @asynccontextmanager
    async def _transport(self) -> AsyncGenerator[AbstractAsyncContextManager[TransportStreams]]:
        url = self.resolved.url
        if url is None:
            assert self.place is not None
            assert self.cwd is not None
            yield stdio_transport(
                self.resolved.command,
                env=self.env,
                cwd=self.cwd,
                log=self.place.log,
                child=self.child,
                repairs=self.repairs,
                started=self.place.started,
                kill=self.place.kill,
            )
        elif self.server.transport == "sse":
            from mcp.client.sse import sse_client

            yield sse_client(url, timeout=HTTP_SECONDS, sse_read_timeout=QUIET_SECONDS, httpx_client_factory=self._http)
        else:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            async with self._http(timeout=httpx2.Timeout(HTTP_SECONDS, read=None)) as http:
                yield streamable_http_client(url, http_client=http, max_sse_event_size=None)

    def _http(
        self, headers: dict[str, str] | None = None, timeout: httpx2.Timeout | None = None, auth: httpx2.Auth | None = None
    ) -> httpx2.AsyncClient:
        """The HTTP client with our headers; it reads the bearer token anew for each request and keeps the status of refusals."""
        import httpx2

        async def sign(request: httpx2.Request) -> None:
            token = self.server.bearer()
            if token is not None:
                request.headers["Authorization"] = f"Bearer {token}"

        async def seen(response: httpx2.Response) -> None:
            if response.status_code >= 400 and response.request.method != "DELETE":
                # A GET stream is optional and its refusal means nothing, except where it is the transport.
                if response.request.method == "POST" or self.server.transport == "sse":
                    self.status = response.status_code
                    self.forgotten = self.forgotten or await _forgotten(response)
            elif response.request.method == "POST":
                self.status = None

        return httpx2.AsyncClient(
            headers={**self.resolved.headers, **(headers or {})},
            timeout=timeout,
            auth=auth,
            event_hooks={"request": [sign], "response": [seen]},
        )

    async def _elicited(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        """Answer as nobody would have to: with the form's own defaults, else not at all. The same every time."""
        from mcp_types import ElicitRequestFormParams, ElicitResult

        content = defaults_of(params.requested_schema) if isinstance(params, ElicitRequestFormParams) else None
        answer = "declined" if content is None else "answered with the form's defaults"
        self.notes.append(f"the server asked the user {params.message[:200]!r}, which was {answer}")
        if content is None:
            return ElicitResult(action="decline")
        return ElicitResult(action="accept", content=content)


async def _forgotten(response: httpx2.Response) -> bool:
    """Whether a refusal is about the session that the request named: 404 by the protocol, 400 or 410 if the server says so in words."""
    if "mcp-session-id" not in response.request.headers or response.status_code not in (400, 404, 410):
        return False
    return response.status_code == 404 or b"session" in (await response.aread()).lower()


def defaults_of(schema: JsonObject) -> Any:  # Any: the SDK's union of scalars
    """A form's content from its defaults; None if a required field has none that a form can hold."""
    properties = schema.get("properties")
    fields: JsonObject = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    content: dict[str, JsonValue] = {}
    for name, schema_of_field in fields.items():
        default = schema_of_field.get("default") if isinstance(schema_of_field, dict) else None
        if isinstance(default, str | int | float) or (isinstance(default, list) and all(isinstance(item, str) for item in default)):
            content[name] = default
    if isinstance(required, list) and any(name not in content for name in required):
        return None
    return content
