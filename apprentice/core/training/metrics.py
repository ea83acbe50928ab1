"""The names of all training metrics, and how sums over micro-batches become them.

One table (`METRICS`) that the documentation prints. Names follow the field (TRL, verl) where it has one. This module
must not know models or optimizers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the job's trajectories (of its completions if only they have rewards)",
    "reward/std": "standard deviation of the same rewards, with Bessel's correction",
    "reward/group_std": "mean over groups of the standard deviation inside the group",
    "advantage/mean": "mean advantage over trained completions",
    "advantage/abs_mean": "mean absolute advantage over trained completions",
    "groups/submitted": "groups sent with the job",
    "groups/trained": "groups with at least one trained trajectory",
    "trajectories/trained": "trajectories with at least one trained completion",
    "loss": "mean loss of the optimizer steps",
    "entropy": "mean entropy in nats of the policy's next-token distribution at trained tokens",
    "kl": "mean over trained tokens of ratio × k3, the estimated divergence from the base model (only with beta > 0)",
    "clip_ratio/low_mean": "share of tokens (gspo: sequences) whose ratio is clipped from below",
    "clip_ratio/high_mean": "share of tokens (gspo: sequences) whose ratio is clipped from above",
    "clip_ratio/region_mean": "share of tokens (gspo: sequences) whose ratio is clipped",
    "importance_weight/mean": "mean of the weight trainer / sampler after truncation or masking; 1 when both agree",
    "importance_weight/max": "largest such weight",
    "importance_weight/ess": "effective sample size of the weights as a share of the tokens, (Σw)² / (N Σw²)",
    "sampling_logp_difference/mean": "mean |trainer − sampler| log-probability of trained tokens, both untempered",
    "sampling_logp_difference/max": "largest such difference",
    "grad_norm": "mean over optimizer steps of the gradient's norm before clipping",
    "learning_rate": "learning rate of the last optimizer step",
    "optimizer_steps": "optimizer steps of the job",
    "tokens/trained": "sampled or demonstrated tokens with a loss, per epoch",
    "tokens/forward": "tokens computed in one forward pass over the job's data",
    "tokens/saved_by_sharing": "tokens that row-by-row training would have computed on top, per pass",
    "tokens/recomputed": "tokens, times the share of the layers, computed once more in backward to save memory, per pass",
    "memory/activations_gib": "estimated peak of the largest micro-batch; above activation_memory_gib if one row alone needs more",
    "seconds/reference": "seconds spent on the base model's log-probabilities",
    "seconds/old_logprobs": "seconds spent on the log-probabilities at the start of the job",
    "seconds/forward_backward": "seconds spent in forward and backward passes",
    "seconds/optimizer": "seconds spent in optimizer steps",
    "seconds/total": "seconds of the whole training step",
    "canary/max_difference": "largest |engine − trainer| log-probability of the canary after the sync",
    "canary/moved": "mean change of the trainer's log-probabilities on the canary by this job (absent after a resume)",
}
"""Every metric that a train job can report. A metric is absent, not zero, where it does not apply."""


class BatchSize(NamedTuple):
    """What one forward and backward pass over a step's micro-batches computes, saves and needs."""

    tokens: int
    """Computed forward."""
    saved: int
    """That rows would have computed on top."""
    recomputed: float
    """Computed again in backward: tokens times the share of the layers."""
    activation_bytes: float
    """Estimated peak of the largest micro-batch."""


class Meter:
    """Collects sums and maxima over micro-batches and seconds per phase."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._started = time.perf_counter()

    def add(self, sums: dict[str, float]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def highest(self, name: str, value: float) -> None:
        self._maxima[name] = max(value, self._maxima.get(name, value))

    def ratio(self, name: str, per: str) -> float | None:
        """Sum `name` over sum `per`; None if either was never added or the latter is zero."""
        if name not in self._sums or not self._sums.get(per):
            return None
        return self._sums[name] / self._sums[per]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add({f"seconds/{name}": time.perf_counter() - started})

    def seconds(self) -> dict[str, float]:
        phases = {name: value for name, value in self._sums.items() if name.startswith("seconds/")}
        return {**phases, "seconds/total": time.perf_counter() - self._started}

    def maximum(self, name: str) -> float | None:
        return self._maxima.get(name)

    def add_batch(self, trained: int, size: BatchSize, *, epochs: int = 1) -> None:
        """The data of one optimizer step, of the first epoch's or of each of several."""
        counts = {"trained": trained, "forward": size.tokens, "saved": size.saved, "recomputed": size.recomputed}
        self.add({name: count / epochs for name, count in counts.items()})
        self.highest("activation_bytes", size.activation_bytes)

    def add_importance_weights(self, weights_N: Tensor | None) -> None:
        if weights_N is None or not weights_N.numel():
            return
        weights_N = weights_N.double()
        self.add({"weights": float(weights_N.numel()), "weight": float(weights_N.sum()), "weight_squared": float(weights_N.square().sum())})
        self.highest("weight", float(weights_N.max()))

    def add_sampler_difference(self, trainer_N: Tensor, sampler_N: Tensor) -> None:
        if not trainer_N.numel():
            return
        difference_N = (trainer_N.detach() - sampler_N).abs().double()
        self.add({"differences": float(difference_N.numel()), "difference": float(difference_N.sum())})
        self.highest("difference", float(difference_N.max()))

    def job_metrics(self, learning_rate: float) -> dict[str, float]:
        """Everything of `METRICS` that was measured, apart from rewards and seconds."""
        low, high = self.ratio("clip_low", "clip_units"), self.ratio("clip_high", "clip_units")
        peak = self.maximum("activation_bytes")
        weight, squared = self.ratio("weight", "weights"), self.ratio("weight_squared", "weights")
        found = {
            "loss": self.ratio("loss", "optimizer_steps"),
            "entropy": self.ratio("entropy", "entropies"),
            "kl": self.ratio("kl", "tokens"),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": None if low is None or high is None else low + high,
            "importance_weight/mean": weight,
            "importance_weight/max": self.maximum("weight"),
            "importance_weight/ess": weight * weight / squared if weight is not None and squared else None,
            "sampling_logp_difference/mean": self.ratio("difference", "differences"),
            "sampling_logp_difference/max": self.maximum("difference"),
            "grad_norm": self.ratio("grad_norm", "optimizer_steps"),
            "learning_rate": learning_rate,
            "optimizer_steps": self._sums.get("optimizer_steps"),
            "tokens/trained": self._sums.get("trained"),
            "tokens/forward": self._sums.get("forward"),
            "tokens/saved_by_sharing": self._sums.get("saved"),
            "tokens/recomputed": self._sums.get("recomputed"),
            "memory/activations_gib": None if peak is None else peak / 2**30,
        }
        return {name: value for name, value in found.items() if value is not None}
