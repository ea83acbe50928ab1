"""The policy-gradient losses: grpo, dr_grpo, dapo, bnpo, cispo and gspo, each equal to TRL 1.16 on the same numbers.

Pure functions of flat tensors over sampled tokens. This module must not know models, forests, rewards or optimizers.

Words. N: sampled tokens of a micro-batch; S: sequences of the optimizer step. A *sequence* is one trajectory (a row of
TRL's padded batch): all its trained tokens, whichever call they came from. π is the policy now, π_old the policy at
the start of the job, π_sample the distribution the token was drawn from (temperature and top-p applied).

    r_t = π / π_old                      per token; gspo: exp of the mean of log r over the sequence (arXiv 2507.18071, eq. 7)
    grpo dr_grpo dapo bnpo gspo:         -min(min(r, delta)·A, clip(r, 1-ε, 1+ε_high)·A)        (arXiv 2402.03300, eq. 3; delta: 2505.07291)
    cispo:                               -min(r, ε_high) (no gradient) · A · log π              (arXiv 2506.13585, eq. 4)
    × w_t = π_old / π_sample             truncated or masked above `importance_sampling_cap`, no gradient
    + beta · r · k3(π_base, π)           k3 = exp(d) - d - 1, d = log π_base - log π (Schulman 2020). The factor r makes
                                         the gradient that of the reverse KL (arXiv 2512.02556); TRL's default
    normaliser   grpo, gspo              mean over the sequence, then mean over sequences
                 bnpo                    trained tokens of the optimizer step
                 dapo, cispo             trained tokens of the whole job ÷ optimizer steps of an epoch
                 dr_grpo                 sequences × max_completion_length

Every normaliser is a number known before the first forward pass (`Normalisers`), so the loss of an optimizer step is
the plain sum of its micro-batches and cutting it differently never changes the gradient. The one exception, a gspo
sequence cut across micro-batches, is for the caller to solve: evaluate the loss on the whole step's log-probs once
and feed each micro-batch its slice of the gradient (`Trainer` does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import TrainConfig


@dataclass(frozen=True)
class Normalisers:
    """What the loss of one optimizer step is divided by.

    `sequence_tokens_S` is the number of trained tokens of each sequence, over all micro-batches; `step_tokens` their
    sum; `job_tokens_per_step` the trained tokens of the whole job divided by the optimizer steps of one epoch.
    """

    sequence_tokens_S: Tensor
    step_tokens: float
    job_tokens_per_step: float
    max_completion_length: int


@dataclass(frozen=True)
class ObjectiveBatch:
    """One micro-batch, flat over its N sampled tokens; `sequence_N` indexes `Normalisers.sequence_tokens_S`.

    `old_logprobs_N=None` means the policy has not moved since the start of the job: π_old is π without gradient.
    `importance_weights_N` comes from `importance_weights`, computed over whole sequences.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor | None
    importance_weights_N: Tensor | None
    ref_logprobs_N: Tensor | None
    advantages_N: Tensor
    sequence_N: Tensor
    normalisers: Normalisers


def is_sequence_level(config: TrainConfig) -> bool:
    """True if some quantity needs all tokens of a sequence at once."""
    return config.loss_type == "gspo" or config.importance_sampling.startswith("sequence")


def importance_weights(old_logprobs_N: Tensor, sampling_logprobs_N: Tensor, sequence_N: Tensor, config: TrainConfig) -> Tensor | None:
    """w = π_old / π_sample per token (or the product over the sequence), capped as configured; None if off.

    "truncate" clips to the cap; "mask" sets weights above it to zero. TRL: `vllm_importance_sampling_mode`.
    Shapes: N in, N out. For the sequence modes the tensors must hold whole sequences.
    """
    if config.importance_sampling == "off":
        return None
    difference_N = (old_logprobs_N - sampling_logprobs_N).detach()
    if config.importance_sampling.startswith("sequence"):
        difference_N = _per_sequence_sum(difference_N, sequence_N)[sequence_N]
    weights_N = difference_N.exp()
    cap = config.importance_sampling_cap
    if config.importance_sampling.endswith("truncate"):
        return weights_N.clamp(max=cap)
    return weights_N.masked_fill(weights_N > cap, 0.0)


def policy_loss(batch: ObjectiveBatch, config: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's share of the step's loss (a scalar with gradient), and sums for the metrics.

    `clip_low` and `clip_high` divided by `clip_units` over the whole step are TRL's clip ratios (gspo counts sequences,
    the others tokens); `kl` divided by `tokens` is TRL's kl, present with `beta` only.
    """
    logprobs_N, advantages_N = batch.logprobs_N, batch.advantages_N
    old_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N
    ratio_N = _ratio(logprobs_N - old_N, batch, config)
    loss_N, low_N, high_N = _surrogate(logprobs_N, ratio_N, advantages_N, config)
    if batch.importance_weights_N is not None:
        loss_N = loss_N * batch.importance_weights_N
    lengths_N = batch.normalisers.sequence_tokens_S[batch.sequence_N]
    weight_N = 1.0 / lengths_N if config.loss_type == "gspo" else torch.ones_like(lengths_N)
    sums = {
        "tokens": float(logprobs_N.numel()),
        "clip_units": float(weight_N.sum()),
        "clip_low": float((low_N * weight_N).sum()),
        "clip_high": float((high_N * weight_N).sum()),
    }
    if config.beta > 0 and batch.ref_logprobs_N is not None:
        kl_N = kl_k3(logprobs_N, batch.ref_logprobs_N) * ratio_N
        loss_N = loss_N + config.beta * kl_N
        sums["kl"] = float(kl_N.detach().sum())
    return _reduce(loss_N, lengths_N, batch.normalisers, config), sums


def kl_k3(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """The k3 estimate of KL(π ‖ π_ref) per token, never negative (Schulman 2020, "Approximating KL divergence")."""
    difference_N = ref_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1


def _ratio(log_ratio_N: Tensor, batch: ObjectiveBatch, config: TrainConfig) -> Tensor:
    if config.loss_type == "gspo":
        lengths_S = batch.normalisers.sequence_tokens_S
        sums_S = torch.zeros_like(lengths_S).index_add(0, batch.sequence_N, log_ratio_N)
        log_ratio_N = (sums_S / lengths_S.clamp(min=1.0))[batch.sequence_N]
    return log_ratio_N.exp()


def _surrogate(logprobs_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Loss per token, and where the ratio was clipped from below (A < 0) and from above (A > 0)."""
    epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type == "cispo":
        loss_N = -ratio_N.clamp(max=epsilon_high).detach() * advantages_N * logprobs_N
        high_N = (ratio_N > epsilon_high) & (advantages_N > 0)
        return loss_N, torch.zeros_like(high_N), high_N
    clipped_N = ratio_N.clamp(1 - config.epsilon, 1 + epsilon_high)
    if config.delta is not None:
        ratio_N = ratio_N.clamp(max=config.delta)
    loss_N = -torch.min(ratio_N * advantages_N, clipped_N * advantages_N)
    low_N = (ratio_N < 1 - config.epsilon) & (advantages_N < 0)
    high_N = (ratio_N > 1 + epsilon_high) & (advantages_N > 0)
    return loss_N, low_N, high_N


def _reduce(loss_N: Tensor, lengths_N: Tensor, normalisers: Normalisers, config: TrainConfig) -> Tensor:
    sequences = normalisers.sequence_tokens_S.numel()
    match config.loss_type:
        case "grpo" | "gspo":
            return (loss_N / lengths_N).sum() / sequences
        case "bnpo":
            return loss_N.sum() / normalisers.step_tokens
        case "dr_grpo":
            return loss_N.sum() / (sequences * normalisers.max_completion_length)
        case "dapo" | "cispo":
            return loss_N.sum() / normalisers.job_tokens_per_step


def _per_sequence_sum(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    return values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)
