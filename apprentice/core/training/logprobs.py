"""Log-probabilities of a forest's targets under a causal language model, with gradient: by sharing, or row by row.

    forest_logprobs(model, forest)   every token of the forest once
    row_logprobs(model, forest)      every row by itself, with the model's own attention: the reference and the fall-back

Both take a Hugging Face causal LM (or a PeftModel around one) as it is, in whatever mode and with whatever adapter active,
and return `Scores` in the order of the forest's targets, so that one can stand for the other. Gradients flow when autograd
is on. They must not know losses, optimizers or adapters.

The language-model head runs only where a target is predicted. If the head is a plain frozen linear layer, its logits are
made a few at a time and never kept: the gradient of log p(t | h) with respect to h is W[t] - sum_v p(v) W[v], and the
second term does not depend on what the loss does with the log-probabilities, so forward computes it once and backward needs
neither logits nor another product with W. Any other head (adapted, trainable, scaled or soft-capped logits) is the model's
own: its logits, positions x vocabulary, are then kept until backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from .attention import AttentionPlan, forest_attention_in
from .forest import Forest

LOGITS_AT_ONCE = 2**24
"""Logits held at one time by a frozen head (64 MB in fp32)."""

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Config entries by which models change what their head returns."""


class Scores(NamedTuple):
    """N targets in the forest's order. Natural logarithms, temperature 1; entropy in nats, never with gradient."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor | None = None
    """Of the distribution that each target was drawn from; None unless asked for."""


def forest_logprobs(model: Any, forest: Forest, *, entropy: bool = False) -> Scores:
    """Score the targets, running the model over each token of the forest once.

    Equal to `row_logprobs` in value and gradient up to rounding, dropout excepted. Raises ModelRefused if the model's
    attention cannot be shared. With gradient checkpointing, hold `forest_attention_in(model)` around backward as well.
    """
    causal = _causal_lm(model)
    plan = AttentionPlan(forest.segments)
    with forest_attention_in(causal):
        return _score(
            causal, forest.token_ids_T, forest.positions_T, forest.predictors_U, forest.target_slot_N, forest.target_token_N,
            entropy, forest_plan=plan,
        )  # fmt: skip


def row_logprobs(model: Any, forest: Forest, *, entropy: bool = False) -> Scores:
    """Score the targets one root-to-leaf row at a time, as if nothing were shared."""
    causal = _causal_lm(model)
    found: list[tuple[npt.NDArray[np.int64], Scores]] = []
    for row in forest.rows:
        tokens = forest.token_ids_T[forest.row_tokens_at(row)]
        targets = np.flatnonzero(np.isin(forest.target_sample_N, row.samples))
        depth_N = forest.positions_T[forest.target_predictor_N[targets]]
        depths_U, slot_N = np.unique(depth_N, return_inverse=True)
        found.append((targets, _score(causal, tokens, np.arange(len(tokens)), depths_U, slot_N, forest.target_token_N[targets], entropy)))
    if not found:
        return _nothing(causal, entropy)
    order = torch.from_numpy(np.argsort(np.concatenate([targets for targets, _ in found]))).to(causal.device)
    logprobs_N = torch.cat([scores.logprobs_N for _, scores in found])[order]
    entropies = [scores.entropy_N for _, scores in found if scores.entropy_N is not None]
    return Scores(logprobs_N, torch.cat(entropies)[order] if entropies else None)


def _causal_lm(model: Any) -> PreTrainedModel:
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if unwrap is not None else model


def _nothing(causal: PreTrainedModel, entropy: bool) -> Scores:
    empty = torch.zeros(0, device=causal.device)
    return Scores(empty, empty if entropy else None)


def _score(
    causal: PreTrainedModel,
    token_ids_T: npt.NDArray[np.int64],
    positions_T: npt.NDArray[np.int64],
    predictors_U: npt.NDArray[np.int64],
    slot_N: npt.NDArray[np.int64],
    target_N: npt.NDArray[np.int64],
    entropy: bool,
    **kwargs: Any,
) -> Scores:
    """Target n is token `target_N[n]`, predicted at `predictors_U[slot_N[n]]` of one sequence of T tokens."""
    if not len(target_N):
        return _nothing(causal, entropy)
    device = causal.device
    ids_1T, positions_1T = (torch.from_numpy(x).to(device)[None] for x in (token_ids_T, positions_T))
    predictors, slots, targets = (torch.from_numpy(x).to(device) for x in (predictors_U, slot_N, target_N))
    inputs: dict[str, Any] = {"input_ids": ids_1T, "position_ids": positions_1T, "use_cache": False, **kwargs}
    head = causal.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and _is_frozen(causal, head):
        hidden_UD = causal.base_model(**inputs).last_hidden_state[0, predictors]
        logprobs_N, entropy_N = _FrozenHead.apply(hidden_UD, head.weight, head.bias, slots, targets, entropy)
        return Scores(logprobs_N, entropy_N)
    logits_UV = causal(**inputs, logits_to_keep=predictors).logits[0]
    logprobs_UV = logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32)).log_softmax(-1)
    return Scores(logprobs_UV[slots, targets], _entropy(logprobs_UV.detach())[slots] if entropy else None)


def _entropy(logprobs_UV: torch.Tensor) -> torch.Tensor:
    return -(logprobs_UV.exp() * logprobs_UV).sum(-1)


def _is_frozen(causal: PreTrainedModel, head: torch.nn.Linear) -> bool:
    config = causal.config.get_text_config()
    return (
        type(head) is torch.nn.Linear
        and not any(parameter.requires_grad for parameter in head.parameters())
        and all(getattr(config, name, None) is None for name in _LOGIT_CHANGES)
    )


class _FrozenHead(torch.autograd.Function):
    """hidden: U x D, weight: V x D, bias: V or None; slots, targets: N. Returns log-probabilities N and entropies N (or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        slot_N: torch.Tensor,
        target_N: torch.Tensor,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        exact = torch.promote_types(hidden_UD.dtype, torch.float32)
        logprobs_N = hidden_UD.new_empty(len(slot_N), dtype=exact)
        entropy_U = hidden_UD.new_empty(len(hidden_UD), dtype=exact) if entropy else None
        mean_UD = torch.empty_like(hidden_UD) if ctx.needs_input_grad[0] else None
        order_N = torch.argsort(slot_N)
        sorted_slot_N = slot_N[order_N].contiguous()
        step = min(max(1, LOGITS_AT_ONCE // len(weight_VD)), len(hidden_UD))
        raw = hidden_UD.new_empty(step, len(weight_VD))  # made once: touching new pages costs as much as the product
        for start in range(0, len(hidden_UD), step):
            rows = slice(start, min(start + step, len(hidden_UD)))
            logits = torch.mm(hidden_UD[rows], weight_VD.T, out=raw[: rows.stop - start])
            logits = (logits if bias_V is None else logits.add_(bias_V)).to(exact)
            first, last = torch.searchsorted(sorted_slot_N, torch.tensor([rows.start, rows.stop], device=slot_N.device)).tolist()
            here = order_N[first:last]
            drawn = logits[slot_N[here] - start, target_N[here]]
            largest = logits.amax(-1, keepdim=True)
            weights = (logits - largest if entropy else logits.sub_(largest)).exp_()
            total = weights.sum(-1, keepdim=True)
            logsumexp = largest + total.log()
            logprobs_N[here] = drawn - logsumexp[slot_N[here] - start, 0]
            if entropy_U is not None:
                entropy_U[rows] = (logsumexp - torch.linalg.vecdot(weights, logits)[:, None] / total)[:, 0]
            if mean_UD is not None:
                mean_UD[rows] = weights.to(weight_VD.dtype) @ weight_VD / total.to(weight_VD.dtype)
        ctx.save_for_backward(weight_VD, mean_UD, slot_N, target_N)
        entropy_N = None if entropy_U is None else entropy_U[slot_N]
        if entropy_N is not None:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_VD, mean_UD, slot_N, target_N = ctx.saved_tensors
        grad_N = grads[0].to(mean_UD.dtype)
        total_U = grad_N.new_zeros(len(mean_UD)).index_add_(0, slot_N, grad_N)
        hidden_UD = (mean_UD * -total_U[:, None]).index_add_(0, slot_N, weight_VD[target_N] * grad_N[:, None])
        return hidden_UD, None, None, None, None, None
