"""Between any transport of the SDK and its session: every message is recorded as it came, and repaired if it needs to be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import JsonValue

from ...core.records import JsonObject
from .redaction import Redactor
from .repairs import Repairs, repaired_result

if TYPE_CHECKING:
    from contextvars import Context

    from mcp.client._transport import ReadStream, TransportStreams, WriteStream
    from mcp.shared.message import SessionMessage

MEMORY = 4_000_000
"""Characters of messages that one session keeps; beyond it the oldest lose their payload."""
MOST_FRAMES = 20_000
LIST_CHANGED = "notifications/tools/list_changed"
CHANGED = "the server changed its tool list during the session, and the one from its start was kept"
ENVELOPE = 64
"""Weight of a message without its payload."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One JSON-RPC message. `at`: seconds since the epoch. `cut`: about how many characters of its payload were dropped to save memory."""

    direction: Literal["out", "in"]
    at: float
    message: JsonObject
    cut: int = 0


class Recording:
    """The messages of one session, secrets and results' `_meta` left out, within bounded memory."""

    def __init__(self, redactor: Redactor, memory: int = MEMORY) -> None:
        self._redactor, self._memory = redactor, memory
        self._whole: deque[tuple[int, Frame]] = deque()
        self._cut: deque[Frame] = deque(maxlen=MOST_FRAMES)
        self._weight = 0
        self.dropped = 0
        """Frames that are gone altogether."""

    def add(self, direction: Literal["out", "in"], message: JsonObject) -> None:
        frame = Frame(direction, time.time(), cast("JsonObject", self._redactor.value(message)))
        weight = weight_of(message)
        self._whole.append((weight, frame))
        self._weight += weight
        while self._whole and (self._weight > self._memory or len(self._whole) > MOST_FRAMES):
            old_weight, old = self._whole.popleft()
            self._weight -= old_weight
            self.dropped += len(self._cut) == MOST_FRAMES
            self._cut.append(replace(old, message=_without_payload(old.message), cut=old_weight))

    @property
    def frames(self) -> list[Frame]:
        return [*self._cut, *(frame for _, frame in self._whole)]


def _without_payload(message: JsonObject) -> JsonObject:
    return {key: value for key, value in message.items() if key in ("jsonrpc", "id", "method")}


def weight_of(value: object) -> int:
    """About how many characters `value` has as JSON; without making that JSON."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, Mapping):
        return ENVELOPE + sum(len(str(key)) + weight_of(item) for key, item in cast("Mapping[object, object]", value).items())
    if isinstance(value, list):
        return ENVELOPE + sum(map(weight_of, cast("list[object]", value)))
    return 8


class Observer:
    """What the two streams of one session tell: recorded, repaired, and what the session must know."""

    def __init__(self, recording: Recording, repairs: Repairs) -> None:
        self.recording, self.repairs = recording, repairs
        self.version = ""
        """The protocol version of the handshake; empty before."""
        self.listed: list[JsonObject] = []
        """Entries of `tools/list` as they are used, output schemas put back."""
        self._asked: dict[str | int, str] = {}
        self.changes = 0
        """How often the server said that its tool list changed."""
        self.settled = False
        """Set once the tool list is frozen: a change after that is noted."""

    def outgoing(self, item: SessionMessage) -> None:
        message = _plain(item.message)
        self.recording.add("out", message)
        method, number = message.get("method"), message.get("id")
        if isinstance(method, str) and isinstance(number, str | int):
            self._asked[number] = method

    def incoming(self, item: SessionMessage | Exception) -> SessionMessage | None:
        """The message as the session shall see it; None for what is no message."""
        if isinstance(item, Exception):
            self.repairs.banner(_input_of(item))
            return None
        message: Any = item.message  # Any: one of four models
        plain = _plain(message)
        if plain.get("method") == LIST_CHANGED:
            self._changed()
        result = plain.get("result")
        method = self._asked.pop(_key(plain.get("id")), "") if "method" not in plain else ""
        self.recording.add("in", {**plain, "result": _without_meta(result)} if isinstance(result, dict) else plain)
        if isinstance(result, dict):
            fixed = repaired_result(method, result, self.version or "2025-11-25", self.repairs)
            self._learn(method, fixed)
            if fixed is not result:
                message.result = fixed
        return item

    def _changed(self) -> None:
        self.changes += 1
        if self.settled:
            self.repairs.add(CHANGED)

    def _learn(self, method: str, result: dict[str, Any]) -> None:
        if method == "initialize":
            self.version = str(result.get("protocolVersion"))
        elif method == "server/discover":
            versions = result.get("supportedVersions")
            if isinstance(versions, list):
                self.version = max((str(version) for version in cast("list[object]", versions)), default="")
        elif method == "tools/list":
            for entry in cast("list[JsonObject]", result["tools"]):
                output = self.repairs.output_schemas.get(str(entry["name"]))
                self.listed.append(entry if output is None else {**entry, "outputSchema": output})


def _key(number: JsonValue) -> str | int:
    """Some servers answer a number with its text."""
    return int(number) if isinstance(number, str) and number.isdigit() else number if isinstance(number, str | int) else ""


def _plain(message: Any) -> JsonObject:  # Any: one of the SDK's four message models
    """The message as JSON, without copying its payload."""
    plain: JsonObject = {"jsonrpc": "2.0"}
    for name in ("id", "method", "params", "result"):
        value = getattr(message, name, None)
        if value is not None:
            plain[name] = value
    error = getattr(message, "error", None)
    if error is not None:
        plain["error"] = error.model_dump(mode="json", exclude_unset=True)
    return plain


def _without_meta(result: JsonObject) -> JsonObject:
    return {key: value for key, value in result.items() if key != "_meta"}


def _input_of(error: Exception) -> str:
    """The text that a parse error is about."""
    errors = getattr(error, "errors", None)
    found: Any = errors() if callable(errors) else []
    return str(found[0].get("input", error)) if found else str(error)


class ObservedRead:
    """A read stream whose messages go through an observer."""

    def __init__(self, inner: ReadStream[SessionMessage | Exception], observer: Observer) -> None:
        self._inner, self._observer = inner, observer

    @property
    def last_context(self) -> Context | None:
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        while True:
            item = self._observer.incoming(await self._inner.receive())
            if item is not None:
                return item

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> ReadStream[SessionMessage | Exception]:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        import anyio

        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None) -> None:
        await self.aclose()


class ObservedWrite:
    """A write stream whose messages an observer sees."""

    def __init__(self, inner: WriteStream[SessionMessage], observer: Observer) -> None:
        self._inner, self._observer = inner, observer

    async def send(self, item: SessionMessage, /) -> None:
        self._observer.outgoing(item)
        await self._inner.send(item)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None) -> None:
        await self.aclose()


@asynccontextmanager
async def observed(transport: AbstractAsyncContextManager[TransportStreams], observer: Observer) -> AsyncGenerator[TransportStreams]:
    """`transport` with `observer` on both its streams."""
    async with transport as (read, write):
        yield ObservedRead(read, observer), ObservedWrite(write, observer)
