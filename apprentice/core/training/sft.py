"""Supervised warm-up: cross-entropy on given tokens through the same forests, optimizer and state as GRPO.

The loss of an optimizer step is the mean of -log p over all target tokens of its demonstrations, each token weighed by
its `advantages` entry (1 for a plain target), so splitting into micro-batches never changes it. It must not know chat
templates or where demonstrations come from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ..config import SftConfig
from ..errors import TrainJobFailed
from .batches import StepBatch, TrainSample
from .forest import TokenSample
from .metrics import Meter
from .optimizer import AdapterOptimizer
from .passes import OnProgress, Passes


def shuffled_batches(demonstrations: Sequence[Sequence[TokenSample]], config: SftConfig, epoch: int) -> list[list[TrainSample]]:
    """Demonstrations of one epoch in batches of `batch_size`; the order depends on `config.seed` and the epoch only."""
    order = list(range(len(demonstrations)))
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    batches = [order[start : start + config.batch_size] for start in range(0, len(order), config.batch_size)]
    return [[TrainSample(turn, str(number), str(number)) for number in batch for turn in demonstrations[number]] for batch in batches]


class SupervisedJob:
    """Runs the optimizer steps of a warm-up. Every demonstration is a list of targets and must have a target token."""

    def __init__(
        self,
        passes: Passes,
        optimizer: AdapterOptimizer,
        demonstrations: Sequence[Sequence[TokenSample]],
        config: SftConfig,
        meter: Meter,
        report: OnProgress,
    ) -> None:
        self._passes, self._optimizer, self._config, self._meter, self._report = passes, optimizer, config, meter, report
        self._demonstrations = demonstrations

    def run(self) -> None:
        """Raises TrainJobFailed if a log-probability or a gradient is not finite."""
        epochs = [shuffled_batches(self._demonstrations, self._config, epoch) for epoch in range(self._config.epochs)]
        steps = [batch for epoch in epochs for batch in epoch]
        for done, samples in enumerate(steps, 1):
            batch = self._passes.batch(samples, self._config)
            self._meter.add_batch(batch.tokens, self._passes.size(batch.forests), epochs=self._config.epochs)
            self._optimizer_step(batch, {"phase": "forward_backward", "step": done, "steps": len(steps)})

    def _optimizer_step(self, batch: StepBatch, position: dict[str, str | int]) -> None:
        for done, (forest, place_N) in enumerate(zip(batch.forests, batch.places, strict=True), 1):
            with self._meter.phase("forward_backward"), self._optimizer.dropout_rng(), self._passes.with_gradient(forest) as scores:
                loss = -(scores.logprobs_N.to(self._passes.dtype) * batch.advantages_N[place_N]).sum() / batch.tokens
                if not torch.isfinite(loss):
                    raise TrainJobFailed("the loss is not finite; no optimizer step was made", details={"reason": "non_finite_loss"})
                loss.backward()
            self._meter.add({"loss": float(loss.detach())})
            if scores.entropy_N is not None:
                self._meter.add({"entropy": float(scores.entropy_N.sum()), "entropies": float(scores.entropy_N.numel())})
            self._report({**position, "done": done, "total": len(batch.forests)})
        with self._meter.phase("optimizer"):
            self._meter.add({"grad_norm": self._optimizer.step(self._config.max_grad_norm), "optimizer_steps": 1.0})
