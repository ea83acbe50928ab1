"""The fast path: full-attention models over the slot cache, many requests and prompt chunks in one flat forward pass.

Knows requests and their tokens, not who waits for them or when a completion ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import EngineError
from ..training.policy import HostedModel
from .adapters import adapter_name
from .head import head_in_blocks
from .protocol import PolicyVersion
from .running import Advance, Request, Start
from .slot_attention import NAME, ShapeProbe, SlotPlan, SlotTensors, StepSequence, register
from .slots import SlotPool, common_prefix

PAGE_TOKENS = 64
"""Small enough to waste little of a sequence's last page, large enough that a decode step needs few parts."""
WORTH_WAITING = 16
"""A prompt waits for another one that is just being read if that saves at least so many tokens."""
SCORE_TOKENS = 128
"""Chunk of a scoring: its logits are kept for every token."""


class SlotRunner:
    """See the module. Raises EngineError when the model's attention cannot run over slots."""

    def __init__(self, host: HostedModel, *, cache_tokens: int | None, prefill_tokens: int) -> None:
        register()
        self._host = host
        self._prefill_tokens = prefill_tokens
        layers, heads, key_size, value_size = _cache_shape(host)
        tokens = cache_tokens or _default_tokens(host, 4 * layers * heads * (key_size + value_size))
        pages = -(-tokens // PAGE_TOKENS)
        self.cache_tokens = pages * PAGE_TOKENS
        self.context_length = min(host.context_length, self.cache_tokens)
        self._tensors = SlotTensors(layers, heads, self.cache_tokens, key_size, value_size, PAGE_TOKENS, host.device)
        self._pool = SlotPool(pages, PAGE_TOKENS, self._tensors.clear)
        self.cache_bytes = self._tensors.bytes
        short = f"the KV cache holds {self.cache_tokens} tokens, fewer than the model's context of {host.context_length}"
        self.notes = (short,) if self.context_length < host.context_length else ()

    def start(self, request: Request, running: Sequence[Request]) -> Start:
        pool, ids = self._pool, request.ids
        cached, pages = (0, -(-len(ids) // PAGE_TOKENS)) if request.scoring else pool.outlook(request.version, ids)
        if not request.scoring and any(_will_share(request, other, cached + WORTH_WAITING) for other in running):
            return Start.later
        if running and pages + len(running) > pool.available():  # each running one may soon need another page
            return Start.full
        lease, copy = pool.lease(request.version, ids, reuse=not request.scoring)
        if copy is not None:
            self._tensors.copy(copy)
        request.hold, request.computed = lease, lease.length
        return Start.started

    def make_room(self, request: Request) -> bool:
        return self._pool.reserve(request.hold, self._next(request, self._prefill_tokens))

    def advance(self, requests: Sequence[Request]) -> list[Advance]:
        budget, parts = self._prefill_tokens, list[tuple[Request, int]]()
        for request in requests:
            tokens = min(self._next(request, self._prefill_tokens), 1 if len(request.ids) - request.computed == 1 else budget)
            if tokens > 0:
                parts.append((request, tokens))
                budget -= tokens if tokens > 1 else 0
        parts.sort(key=lambda part: part[1] != 1)  # single tokens first, otherwise in order
        return self._forward(parts)

    def stop(self, request: Request) -> None:
        if request.hold is not None:
            self._pool.release(request.hold)
        request.hold, request.computed = None, 0

    def forget(self, version: PolicyVersion) -> None:
        self._pool.forget(version)

    def _next(self, request: Request, budget: int) -> int:
        return min(len(request.ids) - request.computed, SCORE_TOKENS if request.scoring else budget)

    def _forward(self, parts: Sequence[tuple[Request, int]]) -> list[Advance]:
        ids, positions, slots, wanted, sequences, counts = [], [], [], [], [], []
        for request, tokens in parts:
            first, last = request.computed, request.computed + tokens
            if request.scoring:
                ends = range(len(ids), len(ids) + tokens)
            else:
                ends = range(len(ids) + tokens - 1, len(ids) + (tokens if last == len(request.ids) else tokens - 1))
            wanted.extend(ends)
            counts.append(len(ends))
            ids.extend(request.ids[first:last])
            positions.extend(range(first, last))
            slots.extend(self._pool.slots(request.hold, tokens))
            pages = tuple(page.index for page in request.hold.pages[: -(-last // PAGE_TOKENS)])
            sequences.append(StepSequence(pages, first, tokens))
        device = self._host.device
        ids_T, positions_T, slots_T, wanted_W = (torch.tensor(x, device=device) for x in (ids, positions, slots, wanted or [len(ids) - 1]))
        plan = SlotPlan(self._tensors, sequences, slots_T)
        version = parts[0][0].version
        with self._host.using(adapter_name(version)) as model, self._host.attention(NAME), head_in_blocks(model), torch.no_grad():
            output = model(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, logits_to_keep=wanted_W, slot_plan=plan)
        logits = output.logits[0].float()[: len(wanted)].split(counts)
        for request, tokens in parts:
            self._pool.commit(request.hold, request.ids[request.computed : request.computed + tokens])
            request.computed += tokens
        return [
            Advance(request, tokens, logits_WV if len(logits_WV) else None)
            for (request, tokens), logits_WV in zip(parts, logits, strict=True)
        ]


def _will_share(request: Request, other: Request, least: int) -> bool:
    """Whether `other` is still reading a prompt whose start, at least so long, is also this request's."""
    reading = len(other.ids) - other.computed > 1 and not other.scoring and other.version == request.version
    return reading and common_prefix(request.ids[:-1], other.ids) >= least


def _cache_shape(host: HostedModel) -> tuple[int, int, int, int]:
    """Layers, KV heads, key size and value size, learnt from one tiny forward pass."""
    probe = ShapeProbe()
    with host.using(None) as model, host.attention(NAME), torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=host.device)
        model(input_ids=ids, position_ids=torch.arange(2, device=host.device)[None], use_cache=False, slot_plan=probe)
    shapes = set(probe.shapes.values())
    if len(shapes) != 1 or set(probe.shapes) != set(range(host.model.config.get_text_config().num_hidden_layers)):
        raise EngineError("the model's layers do not all have attention with keys and values of one shape")
    return len(probe.shapes), *shapes.pop()


def _default_tokens(host: HostedModel, token_bytes: int) -> int:
    """32,768 tokens, or what fits 4 GiB, on a CPU; a third of the free memory, at most 524,288 tokens, on a GPU."""
    if host.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(host.device)
        return max(PAGE_TOKENS, min(524_288, free // 3 // token_bytes))
    return min(32_768, (4 << 30) // token_bytes)
