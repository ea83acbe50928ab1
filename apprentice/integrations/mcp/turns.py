"""Who may call a session's server now: one at a time, in the order of asking; calls that only read may run together."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Turns:
    """A fair lock for readers and writers."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._readers = 0
        self._writing = False

    def take(self, *, alone: bool) -> Turn:
        return Turn(self, alone)

    def free(self, alone: bool) -> bool:
        return not self._writing and not (alone and self._readers)

    async def enter(self, alone: bool) -> None:
        if not self._waiting and self.free(alone):
            self._grab(alone)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, alone))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(alone)
            else:
                self._waiting.remove((future, alone))
                self._wake()
            raise

    def leave(self, alone: bool) -> None:
        if alone:
            self._writing = False
        else:
            self._readers -= 1
        self._wake()

    def _grab(self, alone: bool) -> None:
        if alone:
            self._writing = True
        else:
            self._readers += 1

    def _wake(self) -> None:
        while self._waiting and self.free(self._waiting[0][1]):
            future, alone = self._waiting.popleft()
            self._grab(alone)
            future.set_result(None)


class Turn:
    """One call's turn, as an async context manager."""

    __slots__ = ("_alone", "_turns")

    def __init__(self, turns: Turns, alone: bool) -> None:
        self._turns, self._alone = turns, alone

    async def __aenter__(self) -> None:
        await self._turns.enter(self._alone)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._turns.leave(self._alone)
