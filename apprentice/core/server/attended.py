"""Work for a client that may go away. When it does, the work is cancelled and waited for: sampling stops, partials are kept.

Knows ASGI's `receive` and `send`, nothing of what is worked on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client left; nobody receives it."""


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


async def attended(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`. `ClientGone` if the client disconnects first; by then `work` has ended."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        await _cancelled(task)
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            await _cancelled(task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[T]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


class EventStream(Response):
    """Server-sent events from an async generator of complete events.

    Nothing is sent before the first event is there, so a failure until then is an ordinary error response. The generator
    is closed when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(None, headers={**headers, "cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await attended(receive, self._pump(send))
        except ClientGone:
            return

    async def _pump(self, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not started:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
