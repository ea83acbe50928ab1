"""What one rollout has: one session per server, their tools under names for a model, and the state it leaves. And the pool that
gives rollouts their environments.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from ...core.errors import ApprenticeError, ConfigError, ToolServerError
from ...core.records import JsonObject
from .document_tools import Run, document_tools
from .processes import Lease
from .reply import ToolReply
from .session import McpSession
from .spec import McpServer
from .tools import McpTool, ToolSet

NAMED_TOOLS = 20
"""So many names are told to a model that called a tool which does not exist."""
_BLOCKING = re.compile(r"is a required property|required argument is missing|is not of type|is not valid under any of the given schemas")
"""Breaches that a server cannot but refuse; by the validator's own words."""
STARTS_PER_PROCESSOR = 4
"""Starting is work for a processor, with pauses; on a machine that others use too, fewer get less of it than is theirs."""
READ_RESOURCES = 50
"""So many resources are part of a state."""


class McpEnvironment:
    """Made by `SessionPool.environment()`. `renew` gives the session in place of a shared one that was lost."""

    def __init__(
        self,
        sessions: dict[str, McpSession],
        documents: dict[str, list[tuple[McpTool, Run]]] | None = None,
        renew: Callable[[McpServer], Awaitable[McpSession]] | None = None,
    ) -> None:
        self.sessions = sessions
        self._renew = renew
        made = documents or {}
        self._runs = {id(tool): run for pairs in made.values() for tool, run in pairs}
        listed = [tool for name, session in sessions.items() for tool in (*session.tools, *(tool for tool, _ in made.get(name, [])))]
        self.toolset = ToolSet.build(listed)

    @property
    def tools(self) -> list[JsonObject]:
        """Entries of an OpenAI request's `tools`."""
        return self.toolset.functions

    @property
    def instructions(self) -> str:
        """What the servers say about themselves, for the system prompt; "" if nothing."""
        said = {name: session.instructions.strip() for name, session in self.sessions.items() if session.instructions.strip()}
        if len(self.sessions) == 1:
            return "\n\n".join(said.values())
        return "\n\n".join(f"{name}: {text}" for name, text in said.items())

    async def call(self, function_name: str, arguments: JsonValue) -> ToolReply:
        """Call what a model asked for: `arguments` as an object or as the JSON text that it wrote. Never raises for a wrong call.

        No such tool, broken JSON, a required argument missing or of the wrong type: a `tool_error` with one sentence, and the
        server is not asked. Other breaches of the schema are noted, and the server judges them.
        Where the server was lost, later calls are `server_lost` too, unless it is shared: then they have a new session.
        """
        tool = self.toolset.resolve(function_name)
        if tool is None:
            return self._refused(function_name, "", arguments, self._no_such_tool(function_name))
        given, fault = _object(arguments)
        if given is None:
            return self._refused(function_name, tool.name, arguments, fault, tool.server)
        wrong = self.toolset.violations(tool, given)
        blocking = [sentence for sentence in wrong if _BLOCKING.search(sentence)]
        if blocking:
            return self._refused(
                function_name, tool.name, given, f"The arguments of {function_name} are wrong: {'; '.join(blocking)}.", tool.server
            )
        session = await self._session(tool.server)
        run = self._runs.get(id(tool))
        reply = await (run(session, given) if run is not None else session.call(tool.name, given))
        notes = (*reply.notes, *(f"against the schema: {sentence}" for sentence in wrong or _unknown(tool.input_schema, given)))
        return replace(reply, tool=tool.name, arguments=given, function=function_name, notes=notes)

    async def _session(self, name: str) -> McpSession:
        """A rollout's own session, whatever became of it: what its server knew is gone. Of shared ones, nothing is expected to be kept."""
        session = self.sessions[name]
        if session.alive or session.server.isolation != "shared" or self._renew is None:
            return session
        try:
            self.sessions[name] = await self._renew(session.server)
        except ApprenticeError:
            return session  # a call of it says that it is lost; the next one tries again
        return self.sessions[name]

    def _refused(self, function: str, tool: str, arguments: JsonValue, text: str, server: str = "") -> ToolReply:
        owner = server or next(iter(self.sessions), "")
        return ToolReply(owner, tool or function, arguments, "tool_error", text, full_text=text, function=function)

    def _no_such_tool(self, function: str) -> str:
        names = self.toolset.names
        close = difflib.get_close_matches(function, names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        more = ", …" if len(names) > NAMED_TOOLS else ""
        return f"There is no tool {function!r}.{hint} The tools are: {', '.join(names[:NAMED_TOOLS])}{more}."

    async def state(self) -> JsonObject:
        """What can be seen of the servers' state: `{server: {"files": {path: text or hash or tables}, "resources": {uri: text}}}`.

        Secrets are not in it. Servers of which nothing can be seen are left out. Two runs that did the same have the same state.
        """
        found: JsonObject = {}
        for name in self.sessions:
            session = await self._session(name)
            seen: JsonObject = {}
            if files := await session.files():
                seen["files"] = files
            if resources := await _resources(session):
                seen["resources"] = resources
            if seen:
                found[name] = seen
        return found


def _object(arguments: JsonValue) -> tuple[JsonObject | None, str]:
    """The arguments as an object, or the sentence that says why they are none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return None, f"The arguments must be a JSON object, and they are no JSON: {error}."
    if arguments is None:
        return {}, ""
    if not isinstance(arguments, dict):
        return None, f"The arguments must be a JSON object, and they are {json.dumps(arguments)[:60]}."
    return arguments, ""


def _unknown(schema: JsonObject, arguments: JsonObject) -> list[str]:
    """Arguments that the schema does not name, where it names any and does not say that there may be others."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or schema.keys() & {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}:
        return []
    return [f"the argument {name!r} is unknown" for name in arguments if name not in properties]


async def _resources(session: McpSession) -> JsonObject:
    found: JsonObject = {}
    for item in (await session.list_resources())[:READ_RESOURCES]:
        uri = item.get("uri")
        if isinstance(uri, str):
            reply = await session.read_resource(uri)
            if reply.ok:
                found[uri] = reply.full_text or reply.text
    return found


async def _close(sessions: Sequence[McpSession]) -> None:
    """All of them, whatever becomes of one; cancellation waits for the ends."""
    results = await asyncio.gather(*(session.aclose() for session in sessions), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class SessionPool:
    """Sessions for rollouts, each fresh: `async with SessionPool(servers) as pool: async with pool.environment() as env: …`.

    `warm`: sessions of each server that are kept ready in advance. `starts`: servers that may start at the same time (default:
    four per processor). `resources`: models get tools to read resources and prompts.
    A server with `isolation="shared"` has one session, and all environments have it.
    """

    def __init__(self, servers: Sequence[McpServer], *, warm: int = 0, starts: int | None = None, resources: bool = False) -> None:
        names = [server.name for server in servers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if not servers or twice is not None:
            what = f"two are called {twice!r}" if twice is not None else "there is none"
            raise ConfigError(f"a pool needs servers with different names, and {what}", param="servers")
        if warm < 0 or (starts is not None and starts < 1):
            raise ConfigError(f"a pool needs warm of at least 0 and starts of at least 1, got warm={warm}, starts={starts}", param="warm")
        self.servers = tuple(servers)
        self._warm, self._documents = warm, resources
        self._starts = asyncio.Semaphore(starts or STARTS_PER_PROCESSOR * processors())
        self._ready: dict[str, deque[asyncio.Task[McpSession]]] = {server.name: deque() for server in servers}
        self._shared: dict[str, asyncio.Task[McpSession]] = {}
        self._lease: Lease | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        if any(server.command for server in self.servers):
            self._lease = Lease()  # so that the watchdog does not end between two rollouts
        self._open = True
        for server in self.servers:
            self._refill(server)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open = False
        tasks = [*self._shared.values(), *(task for ready in self._ready.values() for task in ready)]
        self._shared.clear()
        for ready in self._ready.values():
            ready.clear()
        try:
            await asyncio.gather(*(_discard(task) for task in tasks))
        finally:
            if self._lease is not None:
                await self._lease.release()

    @asynccontextmanager
    async def environment(self) -> AsyncGenerator[McpEnvironment]:
        """A fresh environment, gone on exit. ToolServerError or ConfigError if a server cannot be used or has no tool for a model."""
        taken = [asyncio.create_task(self._take(server)) for server in self.servers]
        try:
            await asyncio.wait(taken)
        except asyncio.CancelledError:
            await asyncio.gather(*(_discard(task, keep=self._is_shared) for task in taken))
            raise
        failed = next((task.exception() for task in taken if not task.cancelled() and task.exception() is not None), None)
        own = [task.result() for task in taken if not task.cancelled() and task.exception() is None]
        try:
            if failed is not None:
                raise failed
            sessions = {session.server.name: session for session in own}
            documents = {name: await document_tools(session) for name, session in sessions.items()} if self._documents else {}
            env = McpEnvironment(sessions, documents, self._take)
            _check_tools(env)
            yield env
        finally:
            await _close([session for session in own if not self._is_shared(session)])

    def _is_shared(self, session: McpSession) -> bool:
        return session.server.isolation == "shared"

    async def _take(self, server: McpServer) -> McpSession:
        if server.isolation == "shared":
            return await self._take_shared(server)
        ready = self._ready[server.name]
        while ready:
            task = ready.popleft()
            self._refill(server)
            if task.done() and task.exception() is not None:
                break  # that was then
            try:
                session = await asyncio.shield(task)
            except asyncio.CancelledError:
                await _discard(task)
                raise
            if await session.answers():
                return session
            await session.aclose()  # it died while it waited
        return await self._start(server)

    async def _take_shared(self, server: McpServer) -> McpSession:
        """The one session; a new one if it was lost."""
        for _ in range(2):
            task = self._shared.get(server.name)
            if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                task = self._shared[server.name] = asyncio.create_task(self._start(server))
            session = await asyncio.shield(task)
            if await session.answers():
                return session
            if self._shared.get(server.name) is task:
                del self._shared[server.name]
            await session.aclose()
        raise ToolServerError(f"the server {server.name!r} was lost right after it was started, twice")

    def _refill(self, server: McpServer) -> None:
        ready = self._ready[server.name]
        while self._open and server.isolation != "shared" and len(ready) < self._warm:
            ready.append(asyncio.create_task(self._start(server)))

    async def _start(self, server: McpServer) -> McpSession:
        if not self._open:
            raise ConfigError("a pool gives environments inside `async with`")
        async with self._starts:
            session = McpSession(server)
            await session.open()
            return session


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_tools(env: McpEnvironment) -> None:
    """ToolServerError if a model would have no tool at all."""
    if env.toolset.functions:
        return
    for name, session in env.sessions.items():
        if session.hidden:
            tool = session.hidden[0]
            raise ToolServerError(f"no tool of the server {name!r} can be shown to a model: {tool.name!r} {tool.hidden}")
        if session.listed:
            allow, deny = list(session.server.allow), list(session.server.deny)
            raise ConfigError(
                f"none of the {session.listed} tools of the server {name!r} is left by allow={allow} and deny={deny}", param="allow"
            )
    raise ToolServerError(f"the server {', '.join(map(repr, env.sessions))} lists no tools, so there is nothing to learn on it")


async def _discard(task: asyncio.Task[McpSession], keep: Callable[[McpSession], bool] | None = None) -> None:
    """Cancel what is being started, close what was."""
    task.cancel()
    try:
        session = await task
    except (asyncio.CancelledError, ApprenticeError):
        return
    if keep is None or not keep(session):
        await session.aclose()
