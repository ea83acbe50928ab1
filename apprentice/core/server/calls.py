"""Sampling one `/v1` call: its turn in the queue, `n` choices from the engine, each committed to the ledger before it is handed out.

What was sampled is kept whatever happens: if the caller goes away or the engine fails half-way, the partial completion is
recorded as aborted. Knows tokens and records; nothing of HTTP, of OpenAI's JSON or of chat templates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from ..engines.protocol import Engine, TokenChunk
from ..errors import EngineError
from ..records import BranchReason, ChatRequest, Completion, FinishReason, JsonObject, Origin, SamplingParams, new_id
from .admission import Admission
from .registry_protocol import Served

if TYPE_CHECKING:
    from .ledger import Ledger
    from .reply_stream import ReplyStream

log = logging.getLogger("apprentice.server")

MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class Call:
    """One request, rendered to token ids and ready to be sampled."""

    served: Served
    prompt_ids: tuple[int, ...]
    request: ChatRequest
    sampling: SamplingParams
    choices: int
    read: Callable[[], ReplyStream]
    """A fresh reader of one choice."""
    check: Callable[[JsonObject], str | None]
    """What a reply lacks of what was asked for, as one sentence."""
    trajectory_id: str | None = None
    origin: Origin = field(default_factory=Origin)
    parent: str | None = None
    branch: BranchReason = BranchReason.root
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created_at: float = field(default_factory=time.time)
    completion_ids: tuple[str, ...] = ()

    def seed_of(self, index: int) -> SamplingParams:
        """Choice `index` is drawn with seed + index, so that the choices of one request differ and repeat."""
        if self.sampling.seed is None or index == 0:
            return self.sampling
        seed = (self.sampling.seed + index + MAX_SEED) % (2 * MAX_SEED) - MAX_SEED
        return self.sampling.model_copy(update={"seed": seed})


@dataclass(slots=True)
class Drawn:
    """What one choice has so far."""

    index: int
    reader: ReplyStream
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    sampling_logprobs: list[float] = field(default_factory=list[float])
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    finish: str | None = None
    queued_seconds: float = 0.0
    started: float = 0.0

    def take(self, chunk: TokenChunk) -> list[JsonObject]:
        """Keep the chunk and give the deltas that it makes certain."""
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.sampling_logprobs.extend(chunk.sampling_logprobs)
        self.tops.extend(chunk.top_logprobs)
        self.finish = chunk.finish_reason or self.finish
        return self.reader.feed(chunk.token_ids)


@dataclass(frozen=True, slots=True)
class Progress:
    """Some tokens of choice `index`. With `completion` set it is the last one of this choice, and committed."""

    index: int
    chunk: TokenChunk
    deltas: list[JsonObject]
    completion: Completion | None = None


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Finished:
    completion: Completion
    tops: tuple[tuple[tuple[int, float], ...], ...]


class Sampler:
    """Runs calls. One per server."""

    def __init__(self, ledger: Ledger, new_admission: Callable[[], Admission], on_record: Callable[[Completion], None]) -> None:
        self._ledger = ledger
        self._new_admission = new_admission
        self._on_record = on_record
        self._admissions: dict[int, tuple[Engine, Admission]] = {}

    def admission(self, engine: Engine) -> Admission:
        """The queue of this engine (the engine is kept beside it, so that its id stays its own)."""
        found = self._admissions.get(id(engine))
        if found is None:
            found = self._admissions[id(engine)] = (engine, self._new_admission())
        return found[1]

    def admissions(self) -> list[Admission]:
        return [admission for _, admission in self._admissions.values()]

    async def complete(self, call: Call) -> list[Finished]:
        """All choices, in order, committed. If one fails the others are stopped and kept as aborted."""
        if call.choices == 1:
            return [await self._choice(call, 0, None)]
        tasks = [asyncio.create_task(self._choice(call, index, None)) for index in range(call.choices)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _stop(tasks)

    async def stream(self, call: Call) -> AsyncGenerator[Progress]:
        """The choices as they are sampled, interleaved. Closing the generator stops the sampling."""
        progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._choice(call, index, progress.put_nowait)) for index in range(call.choices)]
        for task in tasks:
            task.add_done_callback(lambda _: progress.put_nowait(None))
        try:
            running = len(tasks)
            while running:
                item = await progress.get()
                if item is not None:
                    yield item
                    continue
                running -= 1
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            await _stop(tasks)

    async def _choice(self, call: Call, index: int, report: Report | None) -> Finished:
        drawn = Drawn(index, call.read())
        try:
            await self._draw(call, drawn, report)
        except BaseException as cause:
            await self._keep_partial(call, drawn, cause)
            raise
        rest = drawn.reader.finish()
        completion = _completion(call, drawn, aborted=False)
        await self._record(completion)
        if report is not None:
            report(Progress(index, TokenChunk(), rest, completion))
        return Finished(completion, tuple(drawn.tops))

    async def _draw(self, call: Call, drawn: Drawn, report: Report | None) -> None:
        served = call.served
        with served.held():
            async with self.admission(served.engine).slot() as queued:
                await served.ready()
                drawn.queued_seconds, drawn.started = queued, time.monotonic()
                stream = served.engine.generate(call.prompt_ids, call.seed_of(drawn.index), served.policy, served.stop_token_ids)
                async with aclosing(cast("AsyncGenerator[TokenChunk]", cast("AsyncIterator[TokenChunk]", stream))) as chunks:
                    async for chunk in chunks:
                        deltas = drawn.take(chunk)
                        if report is not None:
                            report(Progress(drawn.index, chunk, deltas))
        if drawn.finish is None:
            raise EngineError("the engine ended a completion without saying why")

    async def _keep_partial(self, call: Call, drawn: Drawn, cause: BaseException) -> None:
        if not drawn.token_ids:
            return
        drawn.reader.finish()
        completion = _completion(call, drawn, aborted=True)
        log.info("completion %s was aborted after %d tokens (%s)", completion.id, len(drawn.token_ids), type(cause).__name__)
        await self._record(completion)

    async def _record(self, completion: Completion) -> None:
        """Commit. Once submitted it is written even if the caller is cancelled while it waits."""
        written = self._ledger.submit_completions([completion])
        written.add_done_callback(partial(self._written, completion))
        await asyncio.wrap_future(written)

    def _written(self, completion: Completion, written: Future[None]) -> None:
        """Runs in the ledger's thread."""
        error = written.exception()
        if error is None:
            self._on_record(completion)
        else:
            log.error("completion %s could not be recorded: %s", completion.id, error)


async def _stop(tasks: list[asyncio.Task[Finished]]) -> None:
    """Cancel what still runs and wait until each task has kept its partial completion. Failures were told already."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _completion(call: Call, drawn: Drawn, *, aborted: bool) -> Completion:
    reply = drawn.reader.reply()
    reason = FinishReason.length if drawn.finish == "length" else FinishReason(reply.finish)
    errors = [reply.parse_error, None if aborted else call.check(reply.message)]
    served = call.served
    return Completion(
        id=call.completion_ids[drawn.index],
        call_id=call.id,
        choice=drawn.index,
        trajectory_id=call.trajectory_id,
        policy=served.alias,
        policy_version=served.version,
        prompt_ids=call.prompt_ids,
        token_ids=tuple(drawn.token_ids),
        logprobs=tuple(drawn.logprobs),
        sampling_logprobs=tuple(drawn.sampling_logprobs),
        sampling=call.seed_of(drawn.index),
        request=call.request,
        message=reply.message,
        finish_reason=FinishReason.aborted if aborted else reason,
        parse_error="; ".join(error for error in errors if error) or None,
        origin=call.origin,
        parent=call.parent,
        branch=call.branch,
        created_at=call.created_at,
        queued_seconds=drawn.queued_seconds,
        sampling_seconds=time.monotonic() - drawn.started,
    )
