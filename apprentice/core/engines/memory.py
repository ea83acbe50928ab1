"""An engine without a model: replies come from a Python function, log-probabilities are made up.

It keeps every promise of the protocol (versions, stopping, cancelling, pausing, closing), so that servers and their tests
run against it in microseconds and the gateway's own cost can be measured. Made-up log-probabilities depend on the
policy version and the tokens alone, so `generate` and `score` agree as they do on a real engine.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, repeat
from pathlib import Path

from ..errors import EngineError
from ..records import SamplingParams
from .protocol import BASE, EngineInfo, EngineStats, PolicyVersion, TokenChunk
from .request_rules import EndRule, Tokenizer, check_adapter_folder, check_prompt, name_of, not_loaded, plain_decode

Reply = Callable[[Sequence[int], SamplingParams, PolicyVersion], Sequence[int]]
"""From (prompt_ids, sampling, policy) to the token ids to "draw". It may be cut by max_tokens, stop tokens and stop strings."""


class ScriptedEngine:
    """Replies with `reply(prompt_ids, sampling, policy)`, `tokens_per_chunk` tokens at a time.

    A reply shorter than `max_tokens` ends with "stop". An exception from `reply` becomes an `EngineError` that keeps it as
    its cause. Stop strings need a `tokenizer`.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        tokenizer: Tokenizer | None = None,
        vocabulary: int = 1 << 20,
        context_length: int = 1 << 17,
        tokens_per_chunk: int = 1,
    ) -> None:
        self._reply = reply
        self._decode = plain_decode(tokenizer) if tokenizer is not None else None
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._tokens_per_chunk = tokens_per_chunk
        self._loaded = {BASE}
        self._in_use: Counter[PolicyVersion] = Counter()
        self._unused: dict[PolicyVersion, asyncio.Event] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self._stats = EngineStats()

    def info(self) -> EngineInfo:
        self._check_open()
        return EngineInfo("scripted", "none", "none", self._context_length, 0, 0, ("Replies are scripted: no model is loaded.",))

    def stats(self) -> EngineStats:
        self._check_open()
        return self._stats

    def loaded(self) -> frozenset[PolicyVersion]:
        self._check_open()
        return frozenset(self._loaded)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion, stop_token_ids: Sequence[int] = ()
    ) -> AsyncIterator[TokenChunk]:
        self._check_version(policy)
        check_prompt(prompt_ids, context_length=self._context_length, vocabulary=self._vocabulary)
        rule = EndRule(sampling, stop_token_ids, room=self._context_length - len(prompt_ids), decode=self._decode)
        with self._using(policy):
            await self._turn()
            tokens = self._script(prompt_ids, sampling, policy)
            self._stats.prompt_tokens += len(prompt_ids)
            for chunk in self._chunks(prompt_ids, tokens, sampling, policy, rule):
                await self._turn()
                self._stats.sampled_tokens += len(chunk.token_ids)
                yield chunk

    async def score(self, token_ids: Sequence[int], policy: PolicyVersion) -> list[float]:
        self._check_version(policy)
        check_prompt(token_ids, context_length=self._context_length, vocabulary=self._vocabulary, room=0)
        with self._using(policy):
            await self._turn()
            return [made_up_logprob(policy, position, *pair) for position, pair in enumerate(pairwise(token_ids), start=1)]

    async def load(self, policy: PolicyVersion, adapter_path: Path) -> None:
        self._check_open()
        if policy == BASE or policy in self._loaded:
            raise EngineError(f"{name_of(policy)} is already loaded")
        check_adapter_folder(policy, adapter_path)
        self._loaded.add(policy)

    async def unload(self, policy: PolicyVersion) -> None:
        self._check_version(policy)
        if policy == BASE:
            raise EngineError("the base model cannot be unloaded")
        self._loaded.remove(policy)
        if self._in_use[policy]:
            unused = self._unused[policy] = asyncio.Event()
            await unused.wait()

    async def pause(self) -> None:
        self._check_open()
        self._running.clear()

    async def resume(self) -> None:
        self._check_open()
        self._running.set()

    async def close(self) -> None:
        """End everything: open completions raise `EngineError`. Closing twice is fine."""
        self._closed = True
        self._running.set()
        for unused in self._unused.values():
            unused.set()

    def _script(self, prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion) -> Sequence[int]:
        try:
            return self._reply(prompt_ids, sampling, policy)
        except Exception as cause:
            raise EngineError(f"the scripted reply failed: {cause}") from cause

    def _chunks(
        self, prompt_ids: Sequence[int], tokens: Sequence[int], sampling: SamplingParams, policy: PolicyVersion, rule: EndRule
    ) -> Iterator[TokenChunk]:
        ids: list[int] = []
        logprobs: list[float] = []
        before, position, ending = prompt_ids[-1], len(prompt_ids), None
        for position, token in enumerate(tokens, start=len(prompt_ids)):
            ids.append(token)
            logprobs.append(made_up_logprob(policy, position, before, token))
            before = token
            ending = rule.push(token)
            if ending is not None:
                break
            if len(ids) == self._tokens_per_chunk:
                yield _chunk(ids, logprobs, sampling)
                ids, logprobs = [], []
        reason, stop_string = (ending.reason, ending.stop_string) if ending is not None else ("stop", None)
        last = _chunk(ids, logprobs, sampling)
        yield TokenChunk(last.token_ids, last.logprobs, last.sampling_logprobs, last.top_logprobs, reason, stop_string)

    async def _turn(self) -> None:
        """Let other tasks run, and wait while paused."""
        await asyncio.sleep(0)
        await self._running.wait()
        self._check_open()

    @contextmanager
    def _using(self, policy: PolicyVersion) -> Iterator[None]:
        self._in_use[policy] += 1
        self._stats.running += 1
        try:
            yield
        finally:
            self._in_use[policy] -= 1
            self._stats.running -= 1
            if self._in_use[policy] == 0 and policy in self._unused:
                self._unused.pop(policy).set()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_version(self, policy: PolicyVersion) -> None:
        self._check_open()
        if policy not in self._loaded:
            raise not_loaded(policy, self._loaded)


class NullEngine(ScriptedEngine):
    """Replies at once with `length` made-up tokens of an alphabet of `vocabulary` ids; the seed decides which."""

    def __init__(
        self, *, length: int = 16, tokenizer: Tokenizer | None = None, vocabulary: int = 256, context_length: int = 1 << 17
    ) -> None:
        def reply(prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion) -> list[int]:
            start = _hash(policy, len(prompt_ids), prompt_ids[-1], sampling.seed or 0)
            return [(start + 7 * i) % vocabulary for i in range(min(length, sampling.max_tokens))]

        super().__init__(reply, tokenizer=tokenizer, vocabulary=vocabulary, context_length=context_length, tokens_per_chunk=length)


def made_up_logprob(policy: PolicyVersion, position: int, before: int, token: int) -> float:
    """A number in (-2, -1] that depends on nothing but the arguments, equal in every process."""
    return -1.0 - (_hash(policy, position, before, token) % 1000) / 1000


def _hash(policy: PolicyVersion, *numbers: int) -> int:
    return zlib.crc32(repr((policy.policy, policy.version, *numbers)).encode())


def _chunk(ids: list[int], logprobs: list[float], sampling: SamplingParams) -> TokenChunk:
    drawn = tuple(logprobs) if sampling.temperature > 0 else (0.0,) * len(logprobs)
    top = tuple(map(_top, ids, logprobs, repeat(sampling.top_logprobs))) if sampling.top_logprobs else ()
    return TokenChunk(tuple(ids), tuple(logprobs), drawn, top)


def _top(token: int, logprob: float, count: int) -> tuple[tuple[int, float], ...]:
    step = -1 if token >= count else 1
    return tuple((token + step * rank, logprob - rank) for rank in range(count))
