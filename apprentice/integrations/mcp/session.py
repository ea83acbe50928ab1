"""One session with one server: started, connected, called, closed, and nothing of it left.

The SDK's client must be entered and left by one task, so a task of its own owns it; any other task may call. What a server does
never is an exception of a call: it is the reply's outcome. Only a server that cannot be used at all raises, on opening.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import JsonValue

from ...core.errors import ApprenticeError, ConfigError, ToolServerError
from ...core.records import JsonObject, ToolOutcome
from .diagnosis import Evidence, diagnose, ending, flat, tail_of
from .processes import Lease, Place
from .redaction import guarded_logs, our_call
from .repairs import Repairs
from .reply import ToolReply
from .results import cap_text, reply_of
from .spec import WORKDIR, McpServer
from .state import folder_state
from .tools import McpTool
from .transport import CHANGED, Frame, Observer, Recording
from .turns import Turns

if TYPE_CHECKING:
    from mcp import Client

    from .connect import Wire

MOST_PAGES = 100
LISTINGS = 3
"""How often a tool list that changes while it is read is read."""
SPARE_SECONDS = 2.0
"""Beyond a call's own limit: for a call that the SDK cannot time out, because the server does not even take it."""
OWNER_SECONDS = 0.5
PING_SECONDS = 5.0
TAIL_BYTES = 16_384
_UNKNOWN_TOOL = re.compile(
    r"\b(?:unknown|no such) tool\b|\btool\b.{0,140}\b(?:not found|unknown|not exist|no longer|disabled|unavailable)\b", re.IGNORECASE
)

_modes: dict[str, str] = {}
"""How each server of this process negotiates its protocol version, once that is known."""


class McpSession:
    """`async with McpSession(server) as session: reply = await session.call("add", {"a": 1})`. Single use.

    `{workdir}` in arguments stands for the private folder, and wherever its path stands in what the server says, `{workdir}` is
    what callers see: so that two sessions say the same.
    """

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: tuple[McpTool, ...] = ()
        self.hidden: tuple[McpTool, ...] = ()
        """Listed, but not for a model."""
        self.listed = 0
        """Tools that the server lists, before the allow and deny lists."""
        self.instructions = ""
        self.protocol = ""
        self._hide = server.redactor()
        self._turns = Turns()
        self._repairs = Repairs()
        self._wire: Wire | None = None
        self._recording = Recording(self._hide)
        self._client: Client | None = None
        self._place: Place | None = None
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self._cancel: Callable[[], None] | None = None
        self._tail = ""
        self._lost = ""
        self._gone: dict[str, bool] = {}
        """Tools that the server said it does not know, and whether it lists them no more."""

    # ---- what is known ------------------------------------------------------------------------------------------------

    @property
    def workdir(self) -> Path | None:
        """The private folder; None for URLs, and after closing."""
        return self._place.workdir if self._place else None

    @property
    def repairs(self) -> tuple[str, ...]:
        return tuple(map(self._clean_text, self._repairs.sentences))

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened in the session beside its calls, such as questions to the user."""
        return tuple(map(self._clean_text, self._wire.notes)) if self._wire else ()

    @property
    def frames(self) -> list[Frame]:
        return self._recording.frames

    @property
    def alive(self) -> bool:
        running = self._client is not None and not self._lost and self._owner is not None and not self._owner.done()
        return running and (self._wire is None or self._wire.child.returncode is None)

    @property
    def pid(self) -> int | None:
        """Of the server's process, if we started one."""
        return self._wire.child.pid if self._wire else None

    def stderr_tail(self) -> str:
        """The last lines of the server's log, without secrets."""
        if self._place is None:
            return self._tail
        try:
            with self._place.log.open("rb") as file:
                file.seek(max(0, self._place.log.stat().st_size - TAIL_BYTES))
                return self._hide.text(file.read().decode("utf-8", "replace"))
        except OSError:
            return ""

    async def files(self) -> JsonObject:
        """What lies in the private folder (see `folder_state`), without secrets; {} where there is none."""
        if self.workdir is None:
            return {}
        return cast("JsonObject", self._hide.value(await asyncio.to_thread(folder_state, self.workdir)))

    # ---- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start and connect, lay the fixture, make the setup calls. ToolServerError or ConfigError if that cannot be."""
        if self._owner is not None:
            raise ConfigError(f"a session with {self.server.name!r} is opened once; make another one")
        self._ready = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(self._ready), name=f"mcp-session-{self.server.name}")
        try:
            await asyncio.wait({self._ready, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                self._ready.result()
            else:
                raise ToolServerError(f"the session with {self.server.name!r} was closed while it was being opened")
            for call in self.server.setup:
                reply = await self.call(call.tool, call.arguments)
                if not reply.ok:
                    what = f"the setup call {call.tool!r} of the server {self.server.name!r} failed ({reply.outcome})"
                    raise ToolServerError(f"{what}: {' '.join(reply.text.split())[:400]}")
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the server and everything it started, and remove the private folder. Waits for that, also when cancelled."""
        owner = self._owner
        if owner is None or owner is asyncio.current_task():
            return
        self._closing.set()
        if self._client is None and self._cancel is not None:
            self._cancel()
        cancelled: asyncio.CancelledError | None = None
        while not owner.done():
            try:
                await asyncio.wait({owner})
            except asyncio.CancelledError as error:
                cancelled = error
                if owner.done():
                    break
                owner.cancel()
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen, so that asyncio does not complain
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _own(self, ready: asyncio.Future[None]) -> None:
        """The owner: from before the process starts until after everything is gone."""
        lease: Lease | None = None
        try:
            if self.server.command:
                lease = Lease()
                self._place = Place(lease)
            await self._connect(ready)
        except ApprenticeError as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self._client = None
            self._lost = self._lost or "the session is closed"
            await self._clean_up(lease)
            if not ready.done():
                ready.set_exception(ToolServerError(f"the session with {self.server.name!r} was closed while it was being opened"))

    async def _connect(self, ready: asyncio.Future[None]) -> None:
        """Connect in the mode that suits the server, and stay until closing."""
        key = _key(self.server)
        mode = _modes.get(key, "auto")
        failure = await self._live(mode, ready)
        if failure is None:
            return
        if mode == "auto" and not failure.timed_out and _may_be_the_probe(failure):
            # Some servers end at the newest protocol's first request: started anew, they are asked the old way.
            self._reset()
            second = await self._live("legacy", ready)
            if second is None:
                return
            failure = second if len(second.tail) >= len(failure.tail) else failure
        raise ToolServerError(diagnose(failure))

    async def _live(self, mode: str, ready: asyncio.Future[None]) -> Evidence | None:
        """One connection from start to end; Evidence if it never came to be."""
        import anyio

        from .connect import Wire

        await self._lay_fixture()
        resolved = self.server.resolve(self.workdir)
        self.server.bearer()
        observer = Observer(self._recording, self._repairs)
        wire = self._wire = Wire(self.server, resolved, self._place, observer, self._repairs)
        evidence = Evidence(self.server, self._hide, command=resolved.command, cwd=wire.cwd, path=wire.env.get("PATH"))
        try:
            with guarded_logs(self._hide), anyio.CancelScope(deadline=anyio.current_time() + self.server.connect_seconds) as scope:
                self._cancel = scope.cancel
                if self._closing.is_set():
                    return None
                async with wire.client(mode) as client:
                    await self._learn(client, wire)
                    scope.deadline = float("inf")
                    _modes[_key(self.server)] = "auto" if client.protocol_version >= "2026" else "legacy"
                    self._client = client
                    if not ready.done():
                        ready.set_result(None)
                    await self._closing.wait()
            if ready.done() or self._closing.is_set():
                return None
            evidence.timed_out = scope.cancelled_caught
        except asyncio.CancelledError:
            self._lost = "the session was cancelled"
            raise
        except Exception as error:  # noqa: BLE001  # the boundary: whatever a server or the SDK does becomes one typed error
            evidence.errors = flat(error)
        if ready.done():
            self._lost = self._hide.text(next((str(error) for error in evidence.errors if str(error)), "the connection was lost"))
            return None
        known = next((error for error in evidence.errors if isinstance(error, ApprenticeError)), None)
        if known is not None:
            raise known
        evidence.exit_code, evidence.status = wire.child.ended, wire.status
        evidence.tail, evidence.output = tail_of(self.stderr_tail()), self._repairs.first_line
        return evidence

    async def _lay_fixture(self) -> None:
        if self.server.fixture is None or self._place is None:
            return
        try:
            await asyncio.to_thread(_copy, self.server.fixture, self._place.workdir)
        except (OSError, shutil.Error) as cause:
            raise ConfigError(
                f"the fixture {self.server.fixture} of the server {self.server.name!r} cannot be copied: {cause}", param="fixture"
            ) from cause

    def _reset(self) -> None:
        """As before the first attempt."""
        if self._place is not None:
            self._place.kill()
            shutil.rmtree(self._place.workdir, ignore_errors=True)
            self._place.workdir.mkdir(parents=True, exist_ok=True)
            self._place.log.unlink(missing_ok=True)
        self._repairs = Repairs()

    async def _clean_up(self, lease: Lease | None) -> None:
        """To the end, whoever cancels us meanwhile."""
        self._tail = self.stderr_tail()
        place, self._place = self._place, None
        if lease is not None:
            clearing = asyncio.get_running_loop().run_in_executor(None, _clear, place, lease)
            while not clearing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(clearing)

    # ---- what the server offers ---------------------------------------------------------------------------------------

    async def _learn(self, client: Client, wire: Wire) -> None:
        self.protocol = client.protocol_version
        self.instructions = self._clean_text(client.instructions or "")
        unique: dict[str, McpTool] = {}
        for _ in range(LISTINGS):
            before = wire.observer.changes
            unique = await self._listing(client, wire)
            if wire.observer.changes == before:
                break  # else it changed while it was read: some servers add tools once they know their client
        wire.observer.settled = True
        self.listed = len(unique)
        admitted = [tool for tool in unique.values() if self.server.admits(tool.name)]
        self.tools = tuple(tool for tool in admitted if not tool.hidden)
        self.hidden = tuple(tool for tool in admitted if tool.hidden)

    async def _listing(self, client: Client, wire: Wire) -> dict[str, McpTool]:
        """What the server lists now, by name."""
        wire.observer.listed.clear()
        await self._pages(lambda cursor: client.list_tools(cursor=cursor), "the tool list")
        unique: dict[str, McpTool] = {}
        for entry in wire.observer.listed:
            tool = McpTool.from_listing(self.server.name, cast("JsonObject", self._clean(cast("JsonValue", entry))))
            first = unique.setdefault(tool.name, tool)
            if first is not tool:
                same = "twice" if first == tool else "twice, differently, and the first one was taken"
                self._repairs.add(f"the tool {tool.name!r} is listed {same}")
        return unique

    async def _no_longer_listed(self, name: str) -> bool:
        """Read the tool list again, once for each tool that the server listed and now says it does not know.

        The newest protocol tells of changes only those who keep a stream open for them, and some servers tell nobody.
        """
        client, wire = self._client, self._wire
        known = {tool.name: tool for tool in (*self.tools, *self.hidden)}
        if name in self._gone or name not in known or client is None or wire is None:
            return self._gone.get(name, False)
        try:
            async with asyncio.timeout(self.server.call_seconds), self._turns.take(alone=False):
                now = await self._listing(client, wire)
        except Exception:  # noqa: BLE001  # the boundary: then nothing is known, as before
            return False
        if known != {name: tool for name, tool in now.items() if self.server.admits(name)}:
            self._repairs.add(CHANGED)
        self._gone[name] = name not in now
        return self._gone[name]

    async def _pages(self, page: Callable[[str | None], Awaitable[Any]], what: str) -> list[Any]:  # Any: the SDK's list results
        """All pages of a listing; [] if the server does not know the method."""
        from mcp import MCPError
        from mcp_types import METHOD_NOT_FOUND

        pages: list[Any] = []
        seen: set[str] = set()
        cursor: str | None = None
        while len(pages) < MOST_PAGES:
            try:
                result = await page(cursor)
            except MCPError as error:
                if error.code == METHOD_NOT_FOUND and not pages:
                    return []
                raise
            pages.append(result)
            cursor = result.next_cursor
            if not cursor:
                return pages
            if cursor in seen:
                break
            seen.add(cursor)
        self._repairs.add(f"the pages of {what} have no end, and reading stopped after {len(pages)}")
        return pages

    async def list_resources(self) -> list[JsonObject]:
        """What `resources/list` tells; [] if the server has none or cannot tell."""
        return await self._list("resources", lambda client, cursor: client.list_resources(cursor=cursor))

    async def list_prompts(self) -> list[JsonObject]:
        """What `prompts/list` tells; [] if the server has none or cannot tell."""
        return await self._list("prompts", lambda client, cursor: client.list_prompts(cursor=cursor))

    async def _list(self, kind: str, page: Callable[[Client, str | None], Awaitable[Any]]) -> list[JsonObject]:
        client = self._client
        if client is None or getattr(client.server_capabilities, kind) is None:
            return []
        try:
            async with asyncio.timeout(self.server.call_seconds), self._turns.take(alone=False):
                pages = await self._pages(lambda cursor: page(client, cursor), f"the {kind} list")
        except Exception as error:  # noqa: BLE001  # the boundary: a listing that fails is an empty one, and noted
            self._repairs.add(f"the {kind} list could not be read ({str(error) or type(error).__name__})")
            return []
        return [self._dumped(item) for result in pages for item in getattr(result, kind)]

    # ---- calls --------------------------------------------------------------------------------------------------------

    async def call(self, tool: str, arguments: JsonObject, *, seconds: float | None = None) -> ToolReply:
        """Call a tool by the server's own name. Never raises for anything that the server does; cancellation goes through."""
        filled = cast("JsonObject", self._filled(arguments))
        limit = seconds or self.server.call_seconds

        def ask(client: Client) -> Awaitable[Any]:
            return client.call_tool(tool, filled, read_timeout_seconds=limit)

        reply = await self._ask(tool, arguments, ask, limit, alone=not self._may_join(tool))
        unknown = reply.outcome in ("tool_error", "protocol_error") and _UNKNOWN_TOOL.search(reply.text)
        if unknown and await self._no_longer_listed(tool):
            return replace(reply, notes=(*reply.notes, "the server no longer lists this tool"))
        return reply

    async def read_resource(self, uri: str, *, seconds: float | None = None) -> ToolReply:
        """The text of a resource; as `call`."""
        filled = str(self._filled(uri))
        return await self._ask(
            "read_resource", {"uri": uri}, lambda client: client.read_resource(filled), seconds or self.server.call_seconds
        )

    async def get_prompt(self, name: str, arguments: dict[str, str] | None = None, *, seconds: float | None = None) -> ToolReply:
        """The text of a prompt; as `call`."""
        shown: JsonObject = {"name": name, "arguments": cast("JsonValue", arguments or {})}
        limit = seconds or self.server.call_seconds
        return await self._ask("get_prompt", shown, lambda client: client.get_prompt(name, arguments), limit)

    async def answers(self) -> bool:
        """Whether the session can be used: the end of a process is seen, but a URL's server is asked whether it still knows the session."""
        client = self._client
        if client is not None and self.alive and self.server.url and self.protocol < "2026":  # later versions know no sessions
            try:
                with our_call():
                    async with asyncio.timeout(PING_SECONDS):
                        await client.session.send_ping()
            except Exception as error:  # noqa: BLE001  # the boundary: if it was the end, that is noted
                await self._failure(error, PING_SECONDS)
        return self.alive

    def _may_join(self, tool: str) -> bool:
        """Whether a call may run beside others."""
        return self.server.parallel or any(known.name == tool and known.read_only for known in self.tools)

    async def _ask(
        self, tool: str, arguments: JsonObject, ask: Callable[[Client], Awaitable[Any]], seconds: float, *, alone: bool = False
    ) -> ToolReply:
        async with self._turns.take(alone=alone):
            before = len(self._wire.notes) if self._wire else 0
            started = time.perf_counter()
            outcome: ToolOutcome = "server_lost"
            text, result = f"the server {self.server.name!r} is gone: {self._lost or 'it was never opened'}", None
            client = self._client
            if client is not None and not self._lost:
                try:
                    with our_call():
                        async with asyncio.timeout(seconds + SPARE_SECONDS):
                            result = self._dumped(await ask(client))
                except Exception as error:  # noqa: BLE001  # the boundary: nothing that a server does may end a rollout
                    outcome, text = await self._failure(error, seconds)
            took = time.perf_counter() - started
            notes = tuple(map(self._clean_text, self._wire.notes[before:])) if self._wire else ()
        if result is not None:
            return reply_of(result, server=self.server.name, tool=tool, arguments=arguments, seconds=took, notes=notes)
        text = self._clean_text(text)
        return ToolReply(self.server.name, tool, arguments, outcome, cap_text(text), full_text=text, seconds=took, notes=notes)

    async def _failure(self, error: Exception, seconds: float) -> tuple[ToolOutcome, str]:
        """Outcome and text of a call that gave no result."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        name, wire = self.server.name, self._wire
        forgotten = wire is not None and wire.forgotten  # which some servers say with the code of a timeout
        if not forgotten and (isinstance(error, TimeoutError) or (isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT)):
            return "timeout", f"the server {name!r} did not answer within {seconds:g} s"
        closed = (
            isinstance(error, MCPError) and error.code == CONNECTION_CLOSED and (error.message == "Connection closed" or not self.alive)
        )
        if closed or forgotten or not self.alive or not isinstance(error, MCPError | ValueError | RuntimeError):
            code = await wire.child.ending() if wire else None
            if forgotten:
                self._lost = self._lost or "the server no longer knows the session"
            elif code is None and self._owner is not None:
                await asyncio.wait({self._owner}, timeout=OWNER_SECONDS)  # it learns why
            how = f"it ended with {ending(code)}" if code is not None else self._lost or str(error) or type(error).__name__
            tail = tail_of(self.stderr_tail()) if code is not None else ""
            self._lost = self._lost or how
            return "server_lost", f"the server {name!r} was lost during the call: {how}" + (f"; its last lines: {tail}" if tail else "")
        if isinstance(error, MCPError):
            status = f" (HTTP status {wire.status})" if wire and wire.status else ""
            return "protocol_error", f"{error.message or 'the server refused the request'}{status} (error {error.code})"
        return "protocol_error", f"the result of the server {name!r} does not follow the protocol: {' '.join(str(error).split())[:300]}"

    # ---- what callers see of texts ------------------------------------------------------------------------------------

    def _dumped(self, model: Any) -> JsonObject:  # Any: one of the SDK's result models
        raw: JsonObject = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        raw.pop("_meta", None)
        return cast("JsonObject", self._clean(raw))

    def _clean(self, value: JsonValue) -> JsonValue:
        """Without secrets, the private folder's path as `{workdir}`."""
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, list):
            return [self._clean(item) for item in value]
        if isinstance(value, dict):
            return {key: self._clean(item) for key, item in value.items()}
        return value

    def _clean_text(self, text: str) -> str:
        text = self._hide.text(text)
        return text.replace(str(self._place.workdir), WORKDIR) if self._place else text

    def _filled(self, value: JsonValue) -> JsonValue:
        """`value` with the private folder's path where `{workdir}` stands."""
        if self._place is None:
            return value
        if isinstance(value, str):
            return value.replace(WORKDIR, str(self._place.workdir))
        if isinstance(value, list):
            return [self._filled(item) for item in value]
        if isinstance(value, dict):
            return {key: self._filled(item) for key, item in value.items()}
        return value


def _key(server: McpServer) -> str:
    parts: Sequence[object] = (server.transport, server.command, server.url, sorted(server.env), server.cwd)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _may_be_the_probe(failure: Evidence) -> bool:
    """Whether a server might do better when asked the old way."""
    if any(isinstance(error, OSError) and not isinstance(error, ConnectionError) for error in failure.errors) and failure.exit_code is None:
        return False
    return failure.status not in (401, 403) and not any(
        type(error).__name__ in ("ConnectError", "ConnectTimeout") for error in failure.errors
    )


def _copy(source: str, target: Path) -> None:
    shutil.copytree(Path(source).expanduser(), target, symlinks=True, dirs_exist_ok=True)


def _clear(place: Place | None, lease: Lease) -> None:
    try:
        if place is not None:
            place.kill()
            place.remove()
    finally:
        lease.end()
