"""One GRPO job on one policy: log-probs at the start, epochs of optimizer steps, micro-batches, metrics.

Arithmetic is in `objectives`, forward passes in `passes`, the update in `optimizer`; here they meet. It must not know
rewards, checkpoints or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import TrainConfig
from ..errors import TrainJobFailed
from .batches import StepBatch
from .metrics import Meter
from .objectives import Normalisers, ObjectiveBatch, importance_weights, is_sequence_level, policy_loss
from .optimizer import AdapterOptimizer
from .passes import OnProgress, Passes


@dataclass(eq=False)
class _Part:
    """One optimizer step's data, and what is known of it before the first gradient."""

    batch: StepBatch
    normalisers: Normalisers
    old_N: Tensor | None = None
    """None: π_old is what the one forward pass with gradient gives."""
    ref_N: Tensor | None = None
    weights_N: Tensor | None = None

    def objective(self, logprobs_N: Tensor, place_N: Tensor, config: TrainConfig) -> ObjectiveBatch:
        """The objective's view of the tokens at `place_N`, whose log-probs are `logprobs_N`."""
        batch = self.batch
        sequence_N = batch.sequence_N[place_N]
        weights_N = None if self.weights_N is None else self.weights_N[place_N]
        if self.old_N is None:
            weights_N = importance_weights(logprobs_N.detach(), batch.sampling_logprobs_N[place_N], sequence_N, config)
        return ObjectiveBatch(
            logprobs_N=logprobs_N,
            old_logprobs_N=None if self.old_N is None else self.old_N[place_N],
            importance_weights_N=weights_N,
            ref_logprobs_N=None if self.ref_N is None else self.ref_N[place_N],
            advantages_N=batch.advantages_N[place_N],
            sequence_N=sequence_N,
            normalisers=self.normalisers,
        )


class PolicyJob:
    """Runs the optimizer steps of a job. `run` leaves the weights moved; undoing a failure is the caller's."""

    def __init__(
        self,
        passes: Passes,
        optimizer: AdapterOptimizer,
        batches: Sequence[StepBatch],
        config: TrainConfig,
        meter: Meter,
        report: OnProgress,
    ) -> None:
        self._passes, self._optimizer, self._config, self._meter, self._report = passes, optimizer, config, meter, report
        tokens = float(sum(batch.tokens for batch in batches))
        longest = config.max_completion_length or max(len(s.token_ids) for b in batches for f in b.forests for s in f.samples)
        self._parts = [
            _Part(batch, Normalisers(batch.sequence_tokens_S, float(batch.tokens), tokens / len(batches), longest)) for batch in batches
        ]
        self._moved = False
        self._done = 0

    def run(self) -> None:
        """Raises TrainJobFailed if a log-probability, the loss or a gradient is not finite."""
        self._score_before()
        for epoch in range(self._config.num_iterations):
            for part in self._parts:
                self._optimizer_step(part, first_epoch=epoch == 0)

    def _score_before(self) -> None:
        """π_old and π_base, where they are needed and one forward pass with gradient will not give them."""
        config, passes, report = self._config, self._passes, self._report
        split = any(len(part.batch.forests) > 1 for part in self._parts)
        steps = config.num_iterations * len(self._parts)
        for part in self._parts:
            forests, places = part.batch.forests, part.batch.places
            if config.beta > 0:
                with self._meter.phase("reference"):
                    part.ref_N = passes.logprobs(forests, places, base=True, phase="reference", report=report)
            if steps > 1 or (split and is_sequence_level(config)):
                with self._meter.phase("old_logprobs"):
                    part.old_N = passes.logprobs(forests, places, phase="old_logprobs", report=report)
                part.weights_N = importance_weights(part.old_N, part.batch.sampling_logprobs_N, part.batch.sequence_N, config)

    def _optimizer_step(self, part: _Part, *, first_epoch: bool) -> None:
        gradient_N = self._whole_gradient(part)
        if first_epoch and part.old_N is not None:
            self._observe(part.weights_N, part.old_N, part.batch.logprobs_N)
        for forest, place_N in zip(part.batch.forests, part.batch.places, strict=True):
            with self._meter.phase("forward_backward"), self._optimizer.dropout_rng(), self._passes.with_gradient(forest) as scores:
                logprobs_N = scores.logprobs_N.to(self._passes.dtype)
                if gradient_N is not None:
                    logprobs_N.backward(gradient_N[place_N])
                else:
                    objective = part.objective(logprobs_N, place_N, self._config)
                    self._loss(objective).backward()
                    if first_epoch and part.old_N is None:
                        self._observe(objective.importance_weights_N, logprobs_N.detach(), part.batch.logprobs_N[place_N])
            if scores.entropy_N is not None:
                self._meter.add({"entropy": float(scores.entropy_N.sum()), "entropies": float(scores.entropy_N.numel())})
            self._progress()
        with self._meter.phase("optimizer"):
            self._meter.add({"grad_norm": self._optimizer.step(self._config.max_grad_norm), "optimizer_steps": 1.0})
        self._moved = True

    def _whole_gradient(self, part: _Part) -> Tensor | None:
        """dL/dlogprobs of the whole step, if its ratios need sequences that lie in several micro-batches; else None."""
        if self._config.loss_type != "gspo" or len(part.batch.forests) == 1:
            return None
        now_N = part.old_N
        if self._moved or now_N is None:
            with self._meter.phase("old_logprobs"):
                now_N = self._passes.logprobs(part.batch.forests, part.batch.places, phase="ratios", report=self._report)
        leaf_N = now_N.clone().requires_grad_()
        loss = self._loss(part.objective(leaf_N, torch.arange(len(leaf_N), device=leaf_N.device), self._config))
        return torch.autograd.grad(loss, leaf_N)[0]

    def _loss(self, objective: ObjectiveBatch) -> Tensor:
        loss, sums = policy_loss(objective, self._config)
        if not torch.isfinite(loss):
            raise TrainJobFailed(
                f"the loss is not finite ({float(loss.detach())}), because {_cause(objective)}; no optimizer step was made",
                details={"reason": "non_finite_loss"},
            )
        self._meter.add({"loss": float(loss.detach()), **sums})
        return loss

    def _observe(self, weights_N: Tensor | None, trainer_N: Tensor, sampler_N: Tensor) -> None:
        self._meter.add_importance_weights(weights_N)
        self._meter.add_sampler_difference(trainer_N, sampler_N)

    def _progress(self) -> None:
        self._done += 1
        total = self._config.num_iterations * sum(len(part.batch.forests) for part in self._parts)
        self._report({"phase": "forward_backward", "done": self._done, "total": total})


def _cause(objective: ObjectiveBatch) -> str:
    old_N, ref_N = objective.old_logprobs_N, objective.ref_logprobs_N
    if ref_N is not None and not torch.isfinite((ref_N - objective.logprobs_N).exp()).all():
        return "the divergence from the base model overflowed"
    if old_N is not None and not torch.isfinite((objective.logprobs_N - old_N).exp()).all():
        return "the ratio between the new and the old policy overflowed"
    return "advantages and ratios multiply to more than a float holds"
