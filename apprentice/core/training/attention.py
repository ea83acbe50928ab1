"""Attention over a forest, registered with transformers as the attention implementation "forest".

A token attends to itself and to what precedes it in its segment, and to all of its segment's ancestors. The forest lies in
depth-first order, so nothing has to be gathered and no T x T mask exists: the tokens that attend to a whole segment are
the contiguous slice of its descendants. `AttentionPlan` writes this down as a few rectangles (queries x keys), long
segments being tiled so that blocks above the diagonal are skipped.

On CPU each rectangle runs on torch's own flash kernel; the parts of a query are merged by their log-sum-exp, and backward
calls the kernel's backward on each rectangle with the merged output and log-sum-exp, which gives the exact gradient
(Dao et al. 2022, arXiv 2205.14135, eq. for dS; merging as in Liu et al. 2023, arXiv 2310.01889). Elsewhere every segment
is one public scaled-dot-product call over its ancestors' keys followed by its own.

This module must not know samples, losses or adapters. What full attention over ancestors cannot express (sliding windows
shorter than the forest is deep, soft-capped scores, dropout, attention sinks, masks) is refused with ModelRefused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..errors import ModelRefused
from .adapter_products import folded_adapters
from .forest import Segment

NAME = "forest"
TILE = 256
"""Longest stretch of a segment that is computed as one causal square. Of 128 to 768, 256 and 384 were fastest on CPU."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Rectangle(NamedTuple):
    """Queries `[q_start, q_end)` attend to keys `[k_start, k_end)`; `causal` only where both are the same tokens."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool


class AttentionPlan:
    """Who attends to whom in one forest; made once per forest, used by every layer."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.tokens = self.segments[-1].end if self.segments else 0
        self.depth = max(self._depths(), default=0)
        self.rectangles = [*self._squares(), *self._below()]

    def ancestry(self, segment: int) -> list[tuple[int, int]]:
        """Token ranges of a segment's ancestors and of itself, from the root down; neighbouring ranges are joined."""
        ranges: list[tuple[int, int]] = []
        while segment >= 0:
            start, end, segment, _ = self.segments[segment]
            if ranges and ranges[-1][0] == end:
                ranges[-1] = (start, ranges[-1][1])
            else:
                ranges.append((start, end))
        return ranges[::-1]

    def pairs(self) -> int:
        """Query-key pairs that the model's mathematics needs (tiles are not rounded up): the measure of attention's work."""
        pairs = 0
        for start, end, _, subtree_end in self.segments:
            length = end - start
            pairs += length * (length + 1) // 2 + length * (subtree_end - end)
        return pairs

    def _depths(self) -> list[int]:
        """Tokens from the root to the end of each segment."""
        depths: list[int] = []
        for start, end, parent, _ in self.segments:
            depths.append(end - start + (depths[parent] if parent >= 0 else 0))
        return depths

    def _squares(self) -> Iterator[Rectangle]:
        """Each token's own tile. Every token is in exactly one, so these come first and start the merge."""
        for start, end, _, _ in self.segments:
            for tile in range(start, end, TILE):
                stop = min(tile + TILE, end)
                yield Rectangle(tile, stop, tile, stop, True)

    def _below(self) -> Iterator[Rectangle]:
        """Each tile's keys, for all that comes after it in its segment and below: few and tall, which the kernel likes best."""
        for start, end, _, subtree_end in self.segments:
            for tile in range(start, end, TILE):
                stop = min(tile + TILE, end)
                if subtree_end > stop:
                    yield Rectangle(stop, subtree_end, tile, stop, False)


class _MergedAttention(torch.autograd.Function):
    """q: 1 x H x T x D; k, v: 1 x K x T x D with H a multiple of K. Returns 1 x H x T x D, laid out as 1 x T x H x D."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        _, heads, tokens, dim = q.shape
        keys, values = _per_query_head(k, heads), _per_query_head(v, heads)
        out = q.new_empty(1, tokens, heads, dim).transpose(1, 2)
        lse = q.new_empty(1, tokens, heads).transpose(1, 2)
        for a, b, c, d, causal in plan.rectangles:
            part, part_lse = _flash(q[:, :, a:b], keys[:, :, c:d], values[:, :, c:d], 0.0, causal, scale=scale)
            if causal:
                out[:, :, a:b], lse[:, :, a:b] = part, part_lse
                continue
            merged, merged_lse = out[:, :, a:b], lse[:, :, a:b]
            merged.lerp_(part, torch.sigmoid(part_lse - merged_lse).unsqueeze(-1))
            torch.logaddexp(merged_lse, part_lse, out=merged_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (g,) = grads
        heads = q.shape[1]
        keys, values = _per_query_head(k, heads), _per_query_head(v, heads)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for a, b, c, d, causal in ctx.plan.rectangles:
            # The kernel gives each head to one thread; an odd number of heads is evened out by halving the queries.
            halves = 1 if causal or heads % 2 == 0 or b - a < 2 else 2
            for first, last, parts in _even(a, b, halves):
                queries = [_as_batch(x[:, :, first:last], parts) for x in (g, q, out, lse)]
                part_q, part_k, part_v = _flash_backward(
                    queries[0], queries[1], keys[:, :, c:d].expand(parts, -1, -1, -1), values[:, :, c:d].expand(parts, -1, -1, -1),
                    queries[2], queries[3], 0.0, causal, scale=ctx.scale,
                )  # fmt: skip
                part_q = part_q.transpose(0, 1).flatten(1, 2)[None]
                part_k, part_v = (_per_key_head(x.sum(0, keepdim=True) if parts > 1 else x, k.shape[1]) for x in (part_k, part_v))
                if causal:
                    dq[:, :, a:b], dk[:, :, c:d], dv[:, :, c:d] = part_q, part_k, part_v
                else:
                    dq[:, :, first:last] += part_q
                    dk[:, :, c:d] += part_k
                    dv[:, :, c:d] += part_v
        return dq, dk, dv, None, None


def _even(start: int, end: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """`(start, end, parts)` with a length that `parts` divides, and what is left over as one part."""
    middle = end - (end - start) % parts
    yield start, middle, parts
    if middle < end:
        yield middle, end, 1


def _as_batch(x: torch.Tensor, parts: int) -> torch.Tensor:
    """1 x H x S (x D) → parts x H x S/parts (x D), as a view."""
    return x if parts == 1 else x[0].unflatten(1, (parts, -1)).transpose(0, 1)


def _per_query_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """1 x K x T x D → 1 x H x T x D; consecutive query heads share a key head."""
    kv_heads = x.shape[1]
    return x if kv_heads == heads else x.repeat_interleave(heads // kv_heads, dim=1)


def _per_key_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def _portable_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """The same for any device and any head sizes, by public calls only."""
    shares_heads = q.shape[1] != k.shape[1]
    pieces: list[torch.Tensor] = []
    for number, (start, end, _, _) in enumerate(plan.segments):
        ranges = plan.ancestry(number)
        keys, values = (torch.cat([x[:, :, a:b] for a, b in ranges], dim=2) for x in (k, v))
        mask: Any = causal_lower_right(end - start, keys.shape[2]) if end - start > 1 else None
        pieces.append(scaled_dot_product_attention(q[:, :, start:end], keys, values, attn_mask=mask, scale=scale, enable_gqa=shares_heads))
    return torch.cat(pieces, dim=2)


def forest_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    forest_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. query: 1 x H x T x D, key and value: 1 x K x T x D; returns 1 x T x H x D."""
    _refuse_unsupported(module, query, key, attention_mask, dropout, forest_plan, kwargs)
    assert forest_plan is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    on_flash = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    attend = _MergedAttention.apply if on_flash else _portable_attention
    return attend(query, key, value, forest_plan, scale).transpose(1, 2), None


def _refuse_unsupported(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    plan: AttentionPlan | None,
    kwargs: dict[str, Any],
) -> None:
    who = type(module).__name__
    if plan is None:
        raise ModelRefused(f"forest attention needs the forest's plan in every layer, but {who} was called without one")
    if query.shape[0] != 1 or query.shape[2] != plan.tokens or key.shape[2] != plan.tokens:
        raise ModelRefused(
            f"forest attention expects one row of {plan.tokens} tokens without a cache, "
            f"but {who} passed queries {tuple(query.shape)} and keys {tuple(key.shape)}"
        )
    window = kwargs.get("sliding_window")
    reasons = {
        "soft-capped attention scores": kwargs.get("softcap") is not None,
        f"a sliding window of {window} tokens below a depth of {plan.depth}": window is not None and window < plan.depth,
        "attention dropout": dropout != 0.0,
        "attention sinks": kwargs.get("s_aux") is not None,
        "a position bias": kwargs.get("position_bias") is not None,
        "an attention mask": attention_mask is not None,
        "attention that is not causal": kwargs.get("is_causal") is False or not getattr(module, "is_causal", True),
    }
    for reason, found in reasons.items():
        if found:
            raise ModelRefused(f"{who} uses {reason}, which forest attention does not support")


@contextmanager
def forest_attention_in(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` attend by forests inside, and fold plain LoRA adapters for long products (`adapter_products`).

    All is as before afterwards. Backward does not need it, except under gradient checkpointing, which runs the layers again.
    """
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = NAME
        with folded_adapters(model):
            yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan says who attends to whom; transformers need not build a mask."""


AttentionInterface.register(NAME, forest_attention)
AttentionMaskInterface.register(NAME, _no_mask)  # pyright: ignore[reportArgumentType]
