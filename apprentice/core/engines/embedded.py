"""The default engine: torch in the server's own process, on the weights that the trainer trains.

The asyncio side of sampling: checks requests, hands them to the scheduler's thread, and turns what comes back into
streams. Which path runs the model is chosen once, here: the slot cache for models with full attention that pass the
self-check, the model's own cache for the others.

Seeds: a seeded request issued alone draws the same tokens every time. In company it may not: which requests share a
batch changes the rounding of matrix products, and a near-tie can then fall the other way. Log-probabilities always
belong to the tokens really drawn.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch

from ..errors import ConfigError, EngineError
from ..records import SamplingParams
from ..training.policy import HostedModel
from .adapters import adapter_name
from .own_cache_runner import OwnCacheRunner
from .protocol import BASE, EngineInfo, EngineStats, PolicyVersion, TokenChunk
from .request_rules import EndRule, check_adapter_folder, check_prompt, name_of, not_loaded, plain_decode
from .running import Outcome, Request, Runner
from .sampling import Drawing
from .scheduler import Scheduler
from .self_check import TOLERANCE, TOLERANCE_16_BIT, largest_difference
from .slot_runner import SlotRunner

OWN_CACHE_TOKENS = 32_768


class EmbeddedEngine:
    """An `Engine` over a `HostedModel`. Close it before the model is dropped.

    `kv_cache_tokens` bounds the KV cache (default: 32,768 tokens or 4 GiB on a CPU, a third of the free memory on a GPU).
    `prefill_tokens` bounds the prompt tokens read in one step beside the sequences being decoded.
    """

    def __init__(self, host: HostedModel, *, kv_cache_tokens: int | None = None, prefill_tokens: int = 512) -> None:
        if kv_cache_tokens is not None and kv_cache_tokens < 1:
            raise ConfigError(f"kv_cache_tokens must be at least 1, got {kv_cache_tokens}", param="kv_cache_tokens")
        if prefill_tokens < 1:
            raise ConfigError(f"prefill_tokens must be at least 1, got {prefill_tokens}", param="prefill_tokens")
        self._host = host
        self._decode = plain_decode(copy.deepcopy(host.tokenizer))  # fast tokenizers must not be shared between threads
        self._vocabulary: int = host.model.config.get_text_config().vocab_size
        self._runner = _choose_runner(host, kv_cache_tokens, prefill_tokens)
        self._loaded = {BASE}
        self._changing: set[PolicyVersion] = set()
        self._scheduler = Scheduler(self._runner)

    def info(self) -> EngineInfo:
        self._check_open()
        runner = self._runner
        dtype = str(self._host.dtype).removeprefix("torch.")
        return EngineInfo(
            "embedded", str(self._host.device), dtype, runner.context_length, runner.cache_tokens, runner.cache_bytes, runner.notes
        )

    def stats(self) -> EngineStats:
        self._check_open()
        return self._scheduler.stats

    def loaded(self) -> frozenset[PolicyVersion]:
        self._check_open()
        return frozenset(self._loaded)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion, stop_token_ids: Sequence[int] = ()
    ) -> AsyncIterator[TokenChunk]:
        self._check_version(policy)
        context = self._runner.context_length
        check_prompt(prompt_ids, context_length=context, vocabulary=self._vocabulary)
        rule = EndRule(sampling, stop_token_ids, room=context - len(prompt_ids), decode=self._decode)
        request, mailbox = self._request(prompt_ids, policy)
        request.drawing, request.rule = Drawing.of(sampling), rule
        self._scheduler.submit(request)
        try:
            while True:
                chunk = await mailbox.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                assert isinstance(chunk, TokenChunk)  # a drawing request hears nothing else
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._scheduler.cancel(request)

    async def score(self, token_ids: Sequence[int], policy: PolicyVersion) -> list[float]:
        self._check_version(policy)
        check_prompt(token_ids, context_length=self._runner.context_length, vocabulary=self._vocabulary, room=0)
        request, mailbox = self._request(token_ids, policy)
        self._scheduler.submit(request)
        try:
            scores = await mailbox.get()
        finally:
            self._scheduler.cancel(request)
        if isinstance(scores, BaseException):
            raise scores
        assert isinstance(scores, list)  # a scoring hears nothing else
        return scores

    async def load(self, policy: PolicyVersion, adapter_path: Path) -> None:
        self._check_open()
        name = adapter_name(policy)
        if name is None or policy in self._loaded or policy in self._changing:
            raise EngineError(f"{name_of(policy)} is already loaded")
        check_adapter_folder(policy, adapter_path)
        self._changing.add(policy)
        try:
            await asyncio.wrap_future(self._scheduler.call(lambda: self._host.load_adapter(name, adapter_path)))
            self._loaded.add(policy)
        finally:
            self._changing.discard(policy)

    async def unload(self, policy: PolicyVersion) -> None:
        self._check_version(policy)
        name = adapter_name(policy)
        if name is None:
            raise EngineError("the base model cannot be unloaded")
        self._loaded.remove(policy)
        self._changing.add(policy)
        try:
            await asyncio.wrap_future(self._scheduler.when_unused(policy, lambda: self._host.drop_adapter(name)))
        finally:
            self._changing.discard(policy)

    async def pause(self) -> None:
        self._check_open()
        await asyncio.wrap_future(self._scheduler.pause())

    async def resume(self) -> None:
        self._check_open()
        await asyncio.wrap_future(self._scheduler.resume())

    async def close(self) -> None:
        """End everything: open completions raise `EngineError`, and the adapters it loaded are dropped. Closing twice is fine."""
        await asyncio.wrap_future(self._scheduler.close())
        leaving, self._loaded = self._loaded - {BASE}, {BASE}
        for name in map(adapter_name, leaving):
            if name is not None:
                await asyncio.to_thread(self._host.drop_adapter, name)

    def _request(self, ids: Sequence[int], policy: PolicyVersion) -> tuple[Request, asyncio.Queue[Outcome]]:
        mailbox: asyncio.Queue[Outcome] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(outcome: Outcome) -> None:
            try:
                loop.call_soon_threadsafe(mailbox.put_nowait, outcome)
            except RuntimeError:  # the loop is closed: nobody listens any more
                request.cancelled = True

        request = Request(policy, list(ids), deliver)
        return request, mailbox

    def _check_open(self) -> None:
        if self._scheduler.closed:
            cause = self._scheduler.cause
            raise EngineError("the engine is closed" if cause is None else f"the engine is closed since it failed: {cause}") from cause

    def _check_version(self, policy: PolicyVersion) -> None:
        self._check_open()
        if policy not in self._loaded:
            raise not_loaded(policy, self._loaded)


def _choose_runner(host: HostedModel, cache_tokens: int | None, prefill_tokens: int) -> Runner:
    """The slot cache if the model's attention can run over it and gives the same numbers, else the model's own cache."""
    reason = _why_not_slots(host)
    if reason is None:
        try:
            runner = SlotRunner(host, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens)
            difference = largest_difference(host, runner)
        except Exception as error:  # noqa: BLE001  # whatever a model's own code says: it is told in the notes, and the slow path serves
            reason = f"its attention cannot run over the slot cache ({error})"
        else:
            tolerance = TOLERANCE_16_BIT if torch.finfo(host.dtype).bits == 16 else TOLERANCE
            if difference <= tolerance:
                return runner
            reason = f"its log-probabilities over the slot cache differ from the model's own by {difference:.1e}"
    return OwnCacheRunner(host, cache_tokens=cache_tokens or OWN_CACHE_TOKENS, reason=reason)


def _why_not_slots(host: HostedModel) -> str | None:
    config = host.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"the model has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"its attention sees only the last {config.sliding_window} tokens"
    return None
