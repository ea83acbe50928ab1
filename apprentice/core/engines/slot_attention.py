"""Attention over the slot cache, plugged into a Hugging Face causal LM by name ("slots").

A step is one flat row of T tokens, T = one per decoding sequence (first) plus the chunks of prompts being read. Keys and
values are written to their slots; then every token attends to its sequence's pages. Nothing is padded or gathered:

- pages shared by several decoding sequences are read once, for all their queries together;
- pages of one sequence are read in runs of neighbouring pages, one batched call per run;
- a prompt chunk attends causally to itself and, without a mask, to what is cached before it.

Each part gives an output and the log of its softmax normaliser; parts are joined by a softmax over these (exact, as in
FlashAttention, arXiv 2205.14135). The query heads of one KV head stand side by side as queries of one product.
Knows neither requests nor sampling.

Dimensions: L layers, T tokens, D decoding tokens, H query heads, K KV heads, G = H / K, E head size, W pages, P slots a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import EngineError
from .slots import SlotCopy

NAME = "slots"
_BRIDGE = 1
"""Foreign pages read along inside a run: cheaper than another call."""


@dataclass(frozen=True, slots=True)
class StepSequence:
    """One sequence's part of a step: `tokens` new ones after `length` cached ones, in the pages with these numbers."""

    pages: tuple[int, ...]
    length: int
    tokens: int


class SlotTensors:
    """Keys and values of every slot, allocated once: two float32 tensors LKSE, S slots."""

    def __init__(self, layers: int, heads: int, slots: int, key_size: int, value_size: int, page_tokens: int, device: torch.device) -> None:
        self.keys = torch.zeros(layers, heads, slots, key_size, device=device)
        self.values = torch.zeros(layers, heads, slots, value_size, device=device)
        self.page_tokens = page_tokens

    @property
    def bytes(self) -> int:
        return 4 * (self.keys.numel() + self.values.numel())

    def clear(self, page: int) -> None:
        """Slots not yet filled are masked, but a NaN that a diverged adapter left there would pass any mask."""
        span = slice(page * self.page_tokens, (page + 1) * self.page_tokens)
        self.keys[:, :, span] = 0
        self.values[:, :, span] = 0

    def copy(self, copy: SlotCopy) -> None:
        size = self.page_tokens
        source = slice(copy.source * size, copy.source * size + copy.count)
        target = slice(copy.target * size, copy.target * size + copy.count)
        for tensor in (self.keys, self.values):
            tensor[:, :, target] = tensor[:, :, source]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Decoding tokens `rows_R` all attend to the slots [start, end)."""

    rows_R: Tensor
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages [first, last), page w attended to by decoding token `rows_W[w]`; `mask` hides slots not yet filled."""

    first: int
    last: int
    rows_W: Tensor
    mask_W11P: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [start, end) of a prompt, after the slots of `past`."""

    start: int
    end: int
    past: tuple[tuple[int, int], ...]


class SlotPlan:
    """Where every token of one step attends; built once and used by all layers."""

    def __init__(self, tensors: SlotTensors, sequences: Sequence[StepSequence], slots_T: Tensor) -> None:
        """`sequences` in the order of their tokens, those with a single token first."""
        self._tensors = tensors
        self._slots_T = slots_T
        decoding = [sequence for sequence in sequences if sequence.tokens == 1]
        self._decoding = len(decoding)
        users: dict[int, list[int]] = {}
        for row, sequence in enumerate(decoding):
            for page in sequence.pages:
                users.setdefault(page, []).append(row)
        self._shared = self._shared_spans(users)
        self._runs = self._private_runs(decoding, users)
        self._parts_DM = self._find_parts()
        self._chunks = list(self._prompt_chunks(sequences[len(decoding) :]))

    def _shared_spans(self, users: dict[int, list[int]]) -> list[_Shared]:
        spans: list[tuple[list[int], int, int]] = []
        for page in sorted(page for page, rows in users.items() if len(rows) > 1):
            if spans and spans[-1][2] == page and spans[-1][0] == users[page]:
                spans[-1] = (users[page], spans[-1][1], page + 1)
            else:
                spans.append((users[page], page, page + 1))
        size = self._tensors.page_tokens
        return [_Shared(self._index(rows), first * size, last * size) for rows, first, last in spans]

    def _private_runs(self, decoding: Sequence[StepSequence], users: dict[int, list[int]]) -> list[_Run]:
        size = self._tensors.page_tokens
        pages = sorted(page for page, rows in users.items() if len(rows) == 1)
        filled = {sequence.pages[-1]: (sequence.length + 1) - (len(sequence.pages) - 1) * size for sequence in decoding}
        bounds: list[list[int]] = []
        for page in pages:
            if bounds and page - bounds[-1][1] <= _BRIDGE:
                bounds[-1][1] = page + 1
            else:
                bounds.append([page, page + 1])
        runs: list[_Run] = []
        for first, last in bounds:
            rows = [users.get(page, [0])[0] for page in range(first, last)]
            counts = [filled.get(page, size) for page in range(first, last)]
            runs.append(_Run(first, last, self._index(rows), self._mask(counts)))
        self._own = set(pages)
        return runs

    def _mask(self, counts: Sequence[int]) -> Tensor | None:
        size = self._tensors.page_tokens
        if min(counts) == size:
            return None
        hidden_WP = torch.arange(size, device=self._slots_T.device) >= self._index(counts)[:, None]
        mask_WP = torch.zeros(hidden_WP.shape, device=hidden_WP.device).masked_fill_(hidden_WP, float("-inf"))
        return mask_WP[:, None, None, :]

    def _find_parts(self) -> Tensor:
        """For each decoding token the numbers of its parts, filled up with the number of an empty part."""
        parts: list[list[int]] = [[] for _ in range(self._decoding)]
        count = 0
        for shared in self._shared:
            for row in shared.rows_R.tolist():
                parts[row].append(count)
                count += 1
        for run in self._runs:
            for page, row in zip(range(run.first, run.last), run.rows_W.tolist(), strict=True):
                if page in self._own:
                    parts[row].append(count)
                count += 1
        width = max(map(len, parts), default=0)
        return torch.tensor([row + [count] * (width - len(row)) for row in parts], dtype=torch.long, device=self._slots_T.device)

    def _prompt_chunks(self, sequences: Sequence[StepSequence]) -> Iterator[_Chunk]:
        at, size = self._decoding, self._tensors.page_tokens
        for sequence in sequences:
            past: list[tuple[int, int]] = []
            for number, page in enumerate(sequence.pages):
                end = page * size + min(size, sequence.length - number * size)
                if end <= page * size:
                    break
                if past and past[-1][1] == page * size:
                    past[-1] = (past[-1][0], end)
                else:
                    past.append((page * size, end))
            yield _Chunk(at, at + sequence.tokens, tuple(past))
            at += sequence.tokens

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._slots_T.device)

    def attend(self, layer: int, query_HTE: Tensor, key_KTE: Tensor, value_KTE: Tensor, scale: float) -> Tensor:
        """Write keys and values to their slots and return the attention's output THE."""
        keys_KSE, values_KSE = self._tensors.keys[layer], self._tensors.values[layer]
        query_HTE, key_KTE, value_KTE = query_HTE.float(), key_KTE.float(), value_KTE.float()
        keys_KSE.index_copy_(1, self._slots_T, key_KTE)
        values_KSE.index_copy_(1, self._slots_T, value_KTE)
        heads = key_KTE.shape[0]
        query_TKGE = query_HTE.transpose(0, 1).unflatten(1, (heads, -1))
        parts = [self._decode(keys_KSE, values_KSE, query_TKGE[: self._decoding], scale)] if self._decoding else []
        for chunk in self._chunks:
            span = slice(chunk.start, chunk.end)
            own = key_KTE[:, span], value_KTE[:, span]
            parts.append(_attend_chunk(keys_KSE, values_KSE, own, query_TKGE[span], chunk.past, scale))
        output_TKGE = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output_TKGE.flatten(1, 2)

    def _decode(self, keys_KSE: Tensor, values_KSE: Tensor, query_DKGE: Tensor, scale: float) -> Tensor:
        _, heads, group, key_size = query_DKGE.shape
        outputs: list[Tensor] = []
        norms: list[Tensor] = []
        for shared in self._shared:
            rows = len(shared.rows_R)
            query_KQE = query_DKGE[shared.rows_R].transpose(0, 1).reshape(1, heads, rows * group, key_size)
            span = slice(shared.start, shared.end)
            output, norm = attend(query_KQE, keys_KSE[None, :, span], values_KSE[None, :, span], None, False, scale)
            outputs.append(output[0].unflatten(1, (rows, group)).transpose(0, 1))
            norms.append(norm[0].unflatten(1, (rows, group)).transpose(0, 1))
        for run in self._runs:
            output, norm = attend(
                query_DKGE[run.rows_W], self._pages(keys_KSE, run), self._pages(values_KSE, run), run.mask_W11P, False, scale
            )
            outputs.append(output)
            norms.append(norm)
        outputs.append(outputs[0].new_zeros(1, heads, group, outputs[0].shape[-1]))
        norms.append(norms[0].new_full((1, heads, group), float("-inf")))
        weight_DMKG = torch.cat(norms)[self._parts_DM].softmax(1)
        return (torch.cat(outputs)[self._parts_DM] * weight_DMKG[..., None]).sum(1)

    def _pages(self, tensor_KSE: Tensor, run: _Run) -> Tensor:
        size = self._tensors.page_tokens
        return tensor_KSE[:, run.first * size : run.last * size].unflatten(1, (run.last - run.first, size)).transpose(0, 1)


def _attend_chunk(
    keys_KSE: Tensor,
    values_KSE: Tensor,
    own: tuple[Tensor, Tensor],
    query_TKGE: Tensor,
    past: tuple[tuple[int, int], ...],
    scale: float,
) -> Tensor:
    tokens, heads, group, _ = query_TKGE.shape
    query_KGTE = query_TKGE.permute(1, 2, 0, 3)
    key_KGTE, value_KGTE = (tensor[:, None].expand(-1, group, -1, -1) for tensor in own)
    output, norm = attend(query_KGTE, key_KGTE, value_KGTE, None, True, scale)
    if past:
        query_1KQE = query_KGTE.reshape(1, heads, group * tokens, -1)
        outputs, norms = [output], [norm]
        for start, end in past:
            output, norm = attend(query_1KQE, keys_KSE[None, :, start:end], values_KSE[None, :, start:end], None, False, scale)
            outputs.append(output[0].unflatten(1, (group, tokens)))
            norms.append(norm[0].unflatten(1, (group, tokens)))
        weight = torch.stack(norms).softmax(0)
        output = (torch.stack(outputs) * weight[..., None]).sum(0)
    return output.permute(2, 0, 1, 3)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of 4-D float32 tensors; output and the log of the normaliser (without the last dimension)."""
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        output, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return output, norm
    scores = query @ key.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


class ShapeProbe:
    """Stands in for a plan to learn the shapes of a model's keys and values; attends as the model itself would."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, query_HTE: Tensor, key_KTE: Tensor, value_KTE: Tensor, scale: float) -> Tensor:
        self.shapes[layer] = (key_KTE.shape[0], key_KTE.shape[-1], value_KTE.shape[-1])
        own = key_KTE.float(), value_KTE.float()
        query_TKGE = query_HTE.float().transpose(0, 1).unflatten(1, (key_KTE.shape[0], -1))
        return _attend_chunk(own[0], own[1], own, query_TKGE, (), scale).flatten(1, 2)


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slot_plan: SlotPlan | ShapeProbe | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer."""
    if slot_plan is None or attention_mask is not None or query.shape[0] != 1:
        raise EngineError("the model does not hand the sampling step through to its attention layers")
    for name in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if options.get(name) is not None:
            raise EngineError(f"the model's attention uses {name}, which the slot cache does not know")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output_THE = slot_plan.attend(module.layer_idx, query[0], key[0], value[0], scale)
    return output_THE.to(query.dtype)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def register() -> None:
    """Make the name known to transformers. Registering again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, cast(Any, slot_attention))
    AttentionMaskInterface.register(NAME, cast(Any, _no_mask))
