"""The thread that samples: continuous batching of requests over a runner.

Between any two steps it obeys commands (submit, load, pause …), admits waiting requests in order of arrival, and then
lets every version that has running requests take one step, so no version starves. When slots run out the youngest
request goes back to the queue and later continues where it was. All state belongs to the thread; other threads only hand
in commands. Knows nothing of asyncio: outcomes leave through each request's `deliver`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from ..errors import ApprenticeError, EngineError
from .protocol import EngineStats, PolicyVersion, TokenChunk
from .request_rules import name_of
from .running import Advance, Request, Runner, Start
from .sampling import Drawn, draw

T = TypeVar("T")

_HAND_OVER = 1e-4
"""Seconds without the model's lock after a step: locks are not fair, and somebody may be waiting to load an adapter."""


class Scheduler:
    def __init__(self, runner: Runner) -> None:
        self.stats = EngineStats(extra={"steps": 0.0, "preemptions": 0.0})
        self.cause: BaseException | None = None
        """What ended the thread, if it did not end by `close`."""
        self._runner = runner
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._leaving: list[tuple[PolicyVersion, Callable[[], None]]] = []
        self._paused = False
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="apprentice-engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing

    def submit(self, request: Request) -> None:
        self._command(lambda: self._waiting.append(request))

    def cancel(self, request: Request) -> None:
        """Free a request's slots before the next step; nothing more is delivered. A request that is done stays so."""
        request.cancelled = True
        if not request.done:
            with self._wake:
                if not self._closing:
                    self._commands.append(self._sweep)
                    self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps, in the engine's thread."""
        future: Future[T] = Future()
        self._command(lambda: _complete(future, function))
        return future

    def when_unused(self, version: PolicyVersion, function: Callable[[], None]) -> Future[None]:
        """Once no request uses `version` any more: forget what is cached for it and run `function`."""
        future: Future[None] = Future()

        def leave() -> None:
            if not self._closing:
                self._runner.forget(version)
            _complete(future, function)

        self._command(lambda: self._leaving.append((version, leave)))
        return future

    def pause(self) -> Future[None]:
        return self.call(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        return self.call(lambda: self._set_paused(False))

    def close(self) -> Future[None]:
        """End the thread after the current step; open requests fail. The future is done when it has ended."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        return self._ended

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise EngineError("the engine is closed") from self.cause
            self._commands.append(command)
            self._wake.notify()

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _run(self) -> None:
        try:
            while self._next_commands():
                if not self._paused:
                    self._step()
                    time.sleep(_HAND_OVER)
                self._let_go()
        except BaseException as cause:  # noqa: BLE001  # the thread's boundary: the engine reports itself closed
            self.cause = cause
        finally:
            self._end()

    def _next_commands(self) -> bool:
        """Wait for work, obey all commands. False: the engine is to close."""
        with self._wake:
            while not (self._closing or self._commands or self._has_work()):
                self._wake.wait()
            commands = list(self._commands) if not self._closing else []
            if not self._closing:
                self._commands.clear()
        for command in commands:
            command()
        return not self._closing

    def _has_work(self) -> bool:
        return not self._paused and bool(self._waiting or self._running)

    def _step(self) -> None:
        self._admit()
        for version in dict.fromkeys(request.version for request in self._running):
            group = [request for request in self._running if request.version == version]
            try:
                self._advance(group)
            except Exception as cause:  # noqa: BLE001  # supervised: the affected requests hear of it, the others go on
                for request in group:
                    if not request.done and request in self._running:
                        self._fail(request, f"sampling with {name_of(version)} failed: {cause}", cause)
        self._count()

    def _admit(self) -> None:
        kept: list[Request] = []
        while self._waiting:
            request = self._waiting.popleft()
            try:
                start = self._runner.start(request, self._running)
            except Exception as cause:  # noqa: BLE001  # supervised, as in _step
                self._fail(request, f"the request could not be started: {cause}", cause)
                continue
            if start is Start.full:
                self._waiting.appendleft(request)
                break
            if start is Start.later:
                kept.append(request)
                continue
            if not request.counted:
                request.counted = True
                self.stats.prompt_tokens += len(request.ids)
                self.stats.cached_prompt_tokens += request.computed
            self._running.append(request)
        self._waiting.extendleft(reversed(kept))
        self._count()

    def _advance(self, group: Sequence[Request]) -> None:
        for request in group:
            self._make_room(request)
        ready = [request for request in group if request in self._running]
        if not ready:
            return
        self.stats.extra["steps"] += 1
        advances = self._runner.advance(ready)
        drawing = [
            (advance.request, advance.logits_WV) for advance in advances if advance.logits_WV is not None and advance.request.drawing
        ]
        if drawing:
            logits_BV = torch.cat([logits_WV for _, logits_WV in drawing])
            drawn = draw(logits_BV, [request.drawing for request, _ in drawing if request.drawing])
            for (request, _), token in zip(drawing, drawn, strict=True):
                self._hand_out(request, token)
        for advance in advances:
            if advance.request.scoring:
                self._score(advance)

    def _make_room(self, request: Request) -> None:
        while request in self._running and not self._runner.make_room(request):
            if len(self._running) == 1:
                raise EngineError(
                    f"a sequence of {len(request.ids)} tokens does not fit the KV cache of {self._runner.cache_tokens} tokens"
                )
            youngest = self._running.pop()
            self._runner.stop(youngest)
            youngest.scores.clear()
            self._waiting.appendleft(youngest)
            self.stats.extra["preemptions"] += 1

    def _hand_out(self, request: Request, drawn: Drawn) -> None:
        assert request.rule is not None  # every drawing request has one
        request.ids.append(drawn.token_id)
        self.stats.sampled_tokens += 1
        ending = request.rule.push(drawn.token_id)
        top = (drawn.top,) if drawn.top else ()
        chunk = TokenChunk((drawn.token_id,), (drawn.logprob,), (drawn.sampling_logprob,), top)
        if ending is not None:
            chunk = TokenChunk(
                chunk.token_ids, chunk.logprobs, chunk.sampling_logprobs, chunk.top_logprobs, ending.reason, ending.stop_string
            )
            self._remove(request)
        if not request.cancelled:
            request.deliver(chunk)

    def _score(self, advance: Advance) -> None:
        request, logits_WV = advance.request, advance.logits_WV
        assert logits_WV is not None  # a scoring wants all
        next_ids = request.ids[request.computed - advance.tokens + 1 : request.computed + 1]
        logits_NV = logits_WV[: len(next_ids)]
        chosen_N = logits_NV.gather(1, torch.tensor(next_ids, dtype=torch.long, device=logits_NV.device)[:, None])[:, 0]
        request.scores.extend((chosen_N - logits_NV.logsumexp(-1)).tolist())
        if request.computed == len(request.ids):
            self._remove(request)
            if not request.cancelled:
                request.deliver(list(request.scores))

    def _remove(self, request: Request) -> None:
        request.done = True
        self._runner.stop(request)
        if request in self._running:
            self._running.remove(request)
        self._count()

    def _fail(self, request: Request, message: str, cause: BaseException | None) -> None:
        self._remove(request)
        self._tell_failure(request, message, cause)

    def _tell_failure(self, request: Request, message: str, cause: BaseException | None) -> None:
        request.done = True
        error = EngineError(message)
        error.__cause__ = cause
        if not request.cancelled:
            request.deliver(error)

    def _sweep(self) -> None:
        if self._closing:
            return
        for request in [request for request in self._running if request.cancelled]:
            self._remove(request)
        self._waiting = deque(request for request in self._waiting if not request.cancelled)

    def _let_go(self) -> None:
        in_use = {request.version for request in (*self._waiting, *self._running)} if self._leaving else set[PolicyVersion]()
        for entry in [entry for entry in self._leaving if entry[0] not in in_use]:
            self._leaving.remove(entry)
            entry[1]()
        self._count()

    def _count(self) -> None:
        self.stats.queued, self.stats.running = len(self._waiting), len(self._running)

    def _end(self) -> None:
        with self._wake:
            self._closing = True
            commands, self._commands = list(self._commands), deque()
        for command in commands:
            command()  # submissions join the queue and fail below; futures are not left hanging
        message = "the engine was closed" if self.cause is None else f"the engine ended: {self.cause}"
        requests, self._running, self._waiting = (*self._running, *self._waiting), [], deque()
        for request in requests:
            self._tell_failure(request, message, self.cause)
        for _, leave in self._leaving:
            leave()
        self._count()
        self._ended.set_result(None)


def _complete(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except ApprenticeError as error:
        future.set_exception(error)
    except Exception as cause:  # noqa: BLE001  # handed to whoever waits
        error = EngineError(f"the engine could not do what was asked: {cause}")
        error.__cause__ = cause
        future.set_exception(error)
