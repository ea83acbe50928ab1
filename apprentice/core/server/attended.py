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
    """The result of `work`. `ClientGone` if the client disconnects first; `work` was cancelled and has ended by then."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def on_end_of_watch(watch: asyncio.Future[None]) -> None:
        nonlocal gone
        if not watch.cancelled():
            gone = True
            task.cancel()

    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(on_end_of_watch)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
