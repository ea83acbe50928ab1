"""Tool events on their way to the ledger, beside the code that made them: in order, never awaited, never an error.

Whoever watches a user's session (and must not slow it) hands events here. The end of a trajectory waits for them, for a
bounded time. It must not know where events come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from ..records import ToolEvent
from .values import sentence

DRAIN_SECONDS = 10.0
"""How long an end may wait for events that are still on their way."""

logger = logging.getLogger("apprentice")


class ToolRecording:
    """The tool events of one trajectory. Usable from several event loops; the first failure is one warning, further ones none."""

    def __init__(self, trajectory_id: str, send: Callable[[ToolEvent], Awaitable[None]]) -> None:
        self.trajectory_id = trajectory_id
        self.failures = 0
        self._send = send
        self._last: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def soon(self, make: Callable[[], ToolEvent]) -> None:
        """Send the event that `make` returns after all that came before. `make` runs in a thread: results can be large."""
        before, done = self._last, Future[None]()
        self._last = done
        task = asyncio.get_running_loop().create_task(self._record(before, make, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Also where the loop ends before the task ran once: nobody may wait for it any longer.
        task.add_done_callback(lambda _: done.done() or done.set_result(None))

    async def drain(self) -> None:
        """Return when every event handed over so far is sent or has failed, at the latest after DRAIN_SECONDS."""
        if self._last is not None and not await _wait(self._last, DRAIN_SECONDS):
            self._failed(f"not sent within {DRAIN_SECONDS:g} s")

    async def _record(self, before: Future[None] | None, make: Callable[[], ToolEvent], done: Future[None]) -> None:
        try:
            if before is not None:
                await _wait(before)
            await self._send(await asyncio.to_thread(make))
        except Exception as error:  # noqa: BLE001  recording must not break what it records
            self._failed(sentence(error))
        finally:
            done.set_result(None)

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("tool calls of trajectory %s are missing in the ledger: %s", self.trajectory_id, why)


async def _wait(future: Future[None], seconds: float | None = None) -> bool:
    """Whether the future was done in time. Not `wait_for`: it would cancel the future, which others wait for too."""
    if future.done():
        return True
    done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    return bool(done)
