"""A call as server-sent events in OpenAI's chunk form. A failure after the first chunk is an error event, and no `[DONE]` follows.

With `logprobs` or `return_token_ids` every sampled token appears on exactly one chunk: tokens whose text is not yet certain
wait for the next chunk of their choice, at the latest the one with the finish reason.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import to_json

from ..engines.protocol import TokenChunk
from ..errors import ApprenticeError
from .calls import Call, Progress
from .gateway_reply import Json, chat_logprobs, text_logprobs, usage
from .http_errors import unexpected
from .token_text import TokenText

log = logging.getLogger("apprentice.server")

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the reply shall look."""

    kind: Literal["chat", "text"]
    model: str
    """What was asked for."""
    logprobs: bool
    token_ids: bool
    usage: bool
    text: TokenText


@dataclass(slots=True)
class _Held:
    """Tokens of one choice that no chunk has shown yet."""

    chunks: list[TokenChunk] = field(default_factory=list[TokenChunk])
    begun: bool = False
    offset: int = 0
    """Characters of tokens shown so far, for `text_offset`."""


class ChunkWriter:
    """Turns the progress of one call into chunks."""

    def __init__(self, call: Call, wishes: Wishes) -> None:
        self._call, self._wishes = call, wishes
        self._held = [_Held() for _ in range(call.choices)]
        self._first = True
        self._sampled = 0

    def write(self, progress: Progress) -> list[Json]:
        held = self._held[progress.index]
        held.chunks.append(progress.chunk)
        self._sampled += len(progress.chunk.token_ids)
        chunks = [] if held.begun else self._begin(progress.index, held)
        chunks += [self._chunk(progress.index, delta, held) for delta in progress.deltas]
        if progress.completion is not None:
            end = self._chunk(progress.index, {}, held, progress.completion.finish_reason.value)
            if progress.completion.parse_error is not None:
                end["choices"][0]["parse_error"] = progress.completion.parse_error
            chunks.append(end)
        return chunks

    def usage(self) -> Json:
        return {**self._head(), "choices": [], "usage": usage(len(self._call.prompt_ids), self._sampled)}

    def _begin(self, index: int, held: _Held) -> list[Json]:
        held.begun = True
        choice: Json = {"index": index, "finish_reason": None, "logprobs": None, "provenance_id": self._call.completion_ids[index]}
        if self._wishes.kind == "chat":
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["text"] = ""
        chunk = {**self._head(), "choices": [choice]}
        if self._first and self._wishes.token_ids:
            chunk["prompt_token_ids"] = self._call.prompt_ids
        self._first = False
        return [chunk]

    def _chunk(self, index: int, delta: Json, held: _Held, finish: str | None = None) -> Json:
        choice: Json = {"index": index, "finish_reason": finish, "logprobs": None}
        if self._wishes.kind == "chat":
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        if held.chunks:
            self._show_tokens(choice, held)
        return {**self._head(), "choices": [choice]}

    def _show_tokens(self, choice: Json, held: _Held) -> None:
        ids = [token_id for chunk in held.chunks for token_id in chunk.token_ids]
        if self._wishes.token_ids:
            choice["token_ids"] = ids
        if self._wishes.logprobs:
            logprobs = [logprob for chunk in held.chunks for logprob in chunk.logprobs]
            tops = [top for chunk in held.chunks for top in chunk.top_logprobs]
            if self._wishes.kind == "chat":
                choice["logprobs"] = chat_logprobs(self._wishes.text, ids, logprobs, tops)
            else:
                choice["logprobs"] = text_logprobs(self._wishes.text, ids, logprobs, tops, held.offset)
                held.offset += sum(map(len, choice["logprobs"]["tokens"]))
        held.chunks.clear()

    def _head(self) -> Json:
        return {
            "id": self._call.id,
            "object": "chat.completion.chunk" if self._wishes.kind == "chat" else "text_completion",
            "created": int(self._call.created_at),
            "model": self._wishes.model,
            "policy_version": self._call.served.version,
        }


async def events(call: Call, progress: AsyncGenerator[Progress], wishes: Wishes) -> AsyncGenerator[bytes]:
    """The whole stream. An error before the first chunk is raised."""
    writer = ChunkWriter(call, wishes)
    begun = False
    try:
        async with aclosing(progress):
            async for item in progress:
                for chunk in writer.write(item):
                    yield _event(chunk)
                    begun = True
    except Exception as error:  # the supervised boundary of a stream: its client is told before the connection ends
        if not begun:
            raise
        known = isinstance(error, ApprenticeError)
        log.error("call %s failed in the middle of its stream: %s", call.id, error, exc_info=None if known else error)
        yield _event((error if known else unexpected(error)).to_wire())
        return
    if wishes.usage:
        yield _event(writer.usage())
    yield DONE


def _event(body: Any) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
