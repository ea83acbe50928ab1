"""The admission queue of one engine: so many completions are sampled at once, the others wait their turn, first come first served.

Thousands of open rollouts wait here instead of failing. Knows nothing of HTTP or of what is sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..errors import DeadlineExceeded, QueueFull


@dataclass(slots=True)
class Admission:
    """At most `max_running` holders of a slot and `max_waiting` behind them, each for at most `wait_seconds`.

    A waiter that is cancelled leaves the queue; a slot that it was just handed goes to the next one.
    """

    max_running: int
    max_waiting: int
    wait_seconds: float
    running: int = 0
    refused: int = 0
    """Calls turned away with `QueueFull` since start."""
    expired: int = 0
    """Calls that gave up after `wait_seconds` since start."""
    _queue: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Hold a slot; gives the seconds waited. `QueueFull` at the bound, `DeadlineExceeded` after `wait_seconds`."""
        waited = 0.0
        if self.running < self.max_running and not self._queue:
            self.running += 1
        else:
            waited = await self._wait()
        try:
            yield waited
        finally:
            self._release()

    async def _wait(self) -> float:
        if len(self._queue) >= self.max_waiting:
            self.refused += 1
            raise QueueFull(
                f"the queue holds {len(self._queue)} waiting calls, which is its bound; try again later",
                details={"waiting": len(self._queue), "max_waiting": self.max_waiting},
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.wait_seconds):
                await turn
        except BaseException as cause:
            self._leave(turn)
            if not isinstance(cause, TimeoutError):
                raise
            self.expired += 1
            raise DeadlineExceeded(f"the call waited {self.wait_seconds:g} s for its turn to be sampled, which is the limit") from None
        return time.monotonic() - started

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self._release()
        elif turn in self._queue:
            self._queue.remove(turn)

    def _release(self) -> None:
        """Hand the slot to the first waiter, or free it."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
