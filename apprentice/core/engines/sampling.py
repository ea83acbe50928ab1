"""Drawing tokens from logits: inverse CDF in two levels, with both log-probabilities.

One uniform number per row decides, so a row's draw depends on its own logits and generator alone. A multinomial or Gumbel
draw over a vocabulary of 50,000 costs many times more on a CPU. Knows logits and sampling parameters only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import EngineError
from ..records import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""

_BLOCK = 256
_TOP = 1024
"""Candidates looked at first for top-p; the whole vocabulary is sorted only when they hold too little."""


class Drawn(NamedTuple):
    token_id: int
    logprob: float
    """Temperature 1, whole vocabulary."""
    sampling_logprob: float
    """Of the distribution drawn from; 0.0 for greedy."""
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Drawing:
    """One row's sampling parameters and its own generator. A seed of None takes entropy from the operating system."""

    params: SamplingParams
    generator: random.Random

    @classmethod
    def of(cls, params: SamplingParams) -> Drawing:
        return cls(params, random.Random(params.seed))


def draw(logits_BV: Tensor, drawings: Sequence[Drawing]) -> list[Drawn]:
    """Draw one token per row of float32 logits. Raises EngineError when a row's logits are not finite."""
    normaliser_B = torch.logsumexp(logits_BV, dim=-1)
    _check_finite(normaliser_B)
    token_B = torch.empty(len(drawings), dtype=torch.long, device=logits_BV.device)
    sampling_B = torch.zeros(len(drawings), dtype=torch.float32, device=logits_BV.device)
    kinds: dict[str, list[int]] = {"greedy": [], "full": [], "top_p": []}
    for row, drawing in enumerate(drawings):
        params = drawing.params
        kinds["greedy" if params.temperature < GREEDY_BELOW else "top_p" if params.top_p < 1 else "full"].append(row)
    if kinds["greedy"]:
        rows = torch.tensor(kinds["greedy"], device=logits_BV.device)
        token_B[rows] = logits_BV[rows].argmax(-1)
    for kind, drawer in (("full", _draw_full), ("top_p", _draw_top_p)):
        if kinds[kind]:
            rows = torch.tensor(kinds[kind], device=logits_BV.device)
            token_B[rows], sampling_B[rows] = drawer(logits_BV, rows, [drawings[row] for row in kinds[kind]])
    logprob_B = logits_BV.gather(1, token_B[:, None])[:, 0] - normaliser_B
    tops = _top_logprobs(logits_BV, normaliser_B, drawings)
    return [Drawn(*row) for row in zip(token_B.tolist(), logprob_B.tolist(), sampling_B.tolist(), tops, strict=True)]


def _check_finite(normaliser_B: Tensor) -> None:
    if not bool(torch.isfinite(normaliser_B).all()):
        raise EngineError("the model's logits are not finite, so no token can be drawn from them")


def _scaled(logits_BV: Tensor, rows_R: Tensor, drawings: Sequence[Drawing]) -> Tensor:
    """Logits of the rows divided by their temperatures, largest at 0; a fresh tensor."""
    chosen_RV = logits_BV if len(rows_R) == len(logits_BV) else logits_BV[rows_R]
    shifted_RV = chosen_RV - chosen_RV.amax(-1, keepdim=True)
    if any(drawing.params.temperature != 1 for drawing in drawings):
        shifted_RV /= torch.tensor([drawing.params.temperature for drawing in drawings], device=logits_BV.device)[:, None]
    return shifted_RV


def _uniforms(drawings: Sequence[Drawing], device: torch.device) -> Tensor:
    return torch.tensor([drawing.generator.random() for drawing in drawings], dtype=torch.float64, device=device)


def _draw_full(logits_BV: Tensor, rows_R: Tensor, drawings: Sequence[Drawing]) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the whole vocabulary: first the block of 256 tokens, then the token in the block."""
    weight_RV = _scaled(logits_BV, rows_R, drawings).exp_()
    rows, vocabulary = weight_RV.shape
    if vocabulary % _BLOCK:
        weight_RV = torch.nn.functional.pad(weight_RV, (0, _BLOCK - vocabulary % _BLOCK))
    blocks_RNK = weight_RV.view(rows, -1, _BLOCK)
    block_cdf_RN = blocks_RNK.sum(-1, dtype=torch.float32).double().cumsum(-1)
    total_R = block_cdf_RN[:, -1]
    target_R = _uniforms(drawings, logits_BV.device) * total_R
    block_R, before_R = _invert(block_cdf_RN, target_R)
    every = torch.arange(rows, device=logits_BV.device)
    inside_RK = blocks_RNK[every, block_R]
    place_R, _ = _invert(inside_RK.double().cumsum(-1), target_R - before_R)
    logprob_R = inside_RK[every, place_R].double().log() - total_R.log()
    return block_R * _BLOCK + place_R, logprob_R.float()


def _draw_top_p(logits_BV: Tensor, rows_R: Tensor, drawings: Sequence[Drawing]) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the nucleus: the fewest most likely tokens whose probabilities add up to at least top_p."""
    scaled_RV = _scaled(logits_BV, rows_R, drawings)
    total_R = scaled_RV.exp().sum(-1, dtype=torch.float64)
    top_p_R = torch.tensor([drawing.params.top_p for drawing in drawings], dtype=torch.float64, device=logits_BV.device)
    best_RK, token_RK = scaled_RV.topk(min(_TOP, scaled_RV.shape[-1]), dim=-1)
    if bool((best_RK.exp().sum(-1, dtype=torch.float64) < top_p_R * total_R).any()):
        best_RK, token_RK = scaled_RV.sort(dim=-1, descending=True)
    weight_RK = best_RK.double().exp()
    before_RK = weight_RK.cumsum(-1) - weight_RK
    weight_RK = weight_RK.masked_fill(before_RK >= (top_p_R * total_R)[:, None], 0.0)
    weight_RK[:, 0] = best_RK[:, 0].double().exp()  # the most likely token stays, however small top_p
    cdf_RK = weight_RK.cumsum(-1)
    place_R, _ = _invert(cdf_RK, _uniforms(drawings, logits_BV.device) * cdf_RK[:, -1])
    every = torch.arange(len(drawings), device=logits_BV.device)
    logprob_R = best_RK[every, place_R].double() - cdf_RK[:, -1].log()
    return token_RK[every, place_R], logprob_R.float()


def _invert(cdf_RK: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first entry above the target, never one of probability zero, and the CDF just before it."""
    last_R1 = cdf_RK[:, -1:]
    index_R = torch.minimum((cdf_RK <= target_R[:, None]).sum(-1), (cdf_RK < last_R1).sum(-1))
    before_R = cdf_RK.gather(1, (index_R - 1).clamp(min=0)[:, None])[:, 0]
    return index_R, torch.where(index_R > 0, before_R, 0.0)


def _top_logprobs(logits_BV: Tensor, normaliser_B: Tensor, drawings: Sequence[Drawing]) -> list[tuple[tuple[int, float], ...]]:
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(drawings)
    asked = [row for row, drawing in enumerate(drawings) if drawing.params.top_logprobs]
    if not asked:
        return tops
    most = min(max(drawings[row].params.top_logprobs for row in asked), logits_BV.shape[-1])
    values, ids = (logits_BV[asked] - normaliser_B[asked][:, None]).topk(most, dim=-1)
    for row, row_ids, row_values in zip(asked, ids.tolist(), values.tolist(), strict=True):
        tops[row] = tuple(zip(row_ids, row_values, strict=True))[: drawings[row].params.top_logprobs]
    return tops
