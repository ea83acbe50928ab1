"""The trainer of one policy: GRPO jobs, supervised jobs, scoring, and the state that a resume needs.

    trainer = Trainer(host, "mail/agent-001", seed=0)
    outcome = trainer.step(samples, TrainConfig(), report)      # or trainer.sft(demonstrations, SftConfig(), report)
    trainer.save_state(folder)                                  # optimizer moments and generators; weights are the host's

A job moves weights completely or not at all: whatever ends it early (an error, a cancelling `report`) leaves weights,
moments and generators as they were. On CPU the same weights, state, samples and config give the same bits again. It
must not know rewards, trajectories' records, checkpoints' layout, engines or the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import OptimizerConfig, SftConfig, TrainConfig
from ..errors import InvalidRequest
from .activation_memory import GIB, ActivationBound, ActivationCost, default_bound
from .batches import TrainSample, check_samples, cut_by_group, target_places
from .forest import TokenSample
from .heap import job_heap
from .metrics import Meter
from .optimizer import AdapterOptimizer
from .passes import OnProgress, Passes, activation_cost, ignore_progress, supports_sharing
from .policy import HostedModel
from .policy_step import PolicyJob
from .sft import SupervisedJob

__all__ = ["StepOutcome", "Trainer", "supports_sharing"]

SCORING_TOKENS = 8192
"""Tokens of one forward pass in `score`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`moved` is True only if some bit of some weight changed. `metrics` are named in `metrics.METRICS`."""

    metrics: dict[str, float]
    moved: bool


class Trainer:
    """See the module. The adapter must be in `host` and trainable; its optimizer starts empty."""

    def __init__(self, host: HostedModel, adapter: str, seed: int = 0) -> None:
        self._host = host
        self._adapter = adapter
        self._optimizer = AdapterOptimizer(host.adapter_parameters(adapter), seed)
        self._sharing: tuple[bool, str] | None = None
        self._cost: dict[bool, ActivationCost] = {}
        """What activations cost with sharing and without; counted when first needed."""

    def sharing(self) -> tuple[bool, str]:
        """Whether prefixes are shared, and one sentence why; the probe runs once."""
        if self._sharing is None:
            self._sharing = supports_sharing(self._host)
        return self._sharing

    def step(self, samples: Sequence[TrainSample], config: TrainConfig, report: OnProgress = ignore_progress) -> StepOutcome:
        """One GRPO job: `num_iterations` epochs of `steps_per_generation` optimizer steps, cut by group in the given order.

        Samples of one `trajectory_id` are one sequence of the objective. Raises InvalidRequest or ContextOverflow for
        samples that this model cannot have drawn, TrainJobFailed if a number is not finite.
        """
        trainable = [sample for sample in samples if sample.tokens.token_ids]
        self._check([sample.tokens for sample in trainable])
        if not trainable:
            return StepOutcome({"tokens/trained": 0.0}, moved=False)
        meter, passes = Meter(), self._passes(config.allow_sharing, config.activation_memory_gib)
        batches = [passes.batch(part, config) for part in cut_by_group(trainable, config.steps_per_generation)]
        for batch in batches:
            meter.add_batch(batch.tokens, passes.size(batch.forests))
        return self._run(PolicyJob(passes, self._optimizer, batches, config, meter, report), config, meter)

    def sft(self, demonstrations: Sequence[Sequence[TokenSample]], config: SftConfig, report: OnProgress = ignore_progress) -> StepOutcome:
        """One supervised job; each demonstration is a list of targets whose tokens' `advantages` are their weights.

        Raises as `step` does. Demonstrations without a target token are left out.
        """
        targets = [[turn for turn in turns if turn.token_ids] for turns in demonstrations]
        targets = [turns for turns in targets if turns]
        self._check([turn for turns in targets for turn in turns])
        if not targets:
            return StepOutcome({"tokens/trained": 0.0}, moved=False)
        meter = Meter()
        passes = self._passes(True, config.activation_memory_gib)
        return self._run(SupervisedJob(passes, self._optimizer, targets, config, meter, report), config, meter)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of `row[1:]` for each row of token ids, under the adapter; [] for a row of one token.

        Raises InvalidRequest for an empty row or an unknown token id, ContextOverflow for a row that is too long.
        """
        for number, row in enumerate(rows):
            if not row:
                raise InvalidRequest(f"a row to score needs at least one token, but row {number} is empty", param="rows")
        samples = [_plain_sample(str(number), row[:1], row[1:]) for number, row in enumerate(rows)]
        self._check(samples)
        passes = self._passes(True, None)
        forests = passes.pack_to_score(samples, SCORING_TOKENS)
        places = target_places(forests, [len(sample.token_ids) for sample in samples])
        flat = passes.logprobs(forests, [torch.from_numpy(place).to(passes.device) for place in places]).tolist()
        found: list[list[float]] = []
        for sample in samples:
            found.append(flat[: len(sample.token_ids)])
            flat = flat[len(sample.token_ids) :]
        return found

    def save_state(self, folder: Path) -> None:
        """Write optimizer moments and generators into an existing folder."""
        self._optimizer.save(folder)

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote. Raises CheckpointCorrupt."""
        self._optimizer.load(folder)

    def _run(self, job: PolicyJob | SupervisedJob, config: OptimizerConfig, meter: Meter) -> StepOutcome:
        with job_heap():
            with self._optimizer.transaction() as before:
                self._optimizer.configure(config)
                job.run()
            return StepOutcome({**meter.job_metrics(config.learning_rate), **meter.seconds()}, self._optimizer.moved_since(before))

    def _passes(self, allow_sharing: bool, memory_gib: float | None) -> Passes:
        sharing = allow_sharing and self.sharing()[0]
        if sharing not in self._cost:
            self._cost[sharing] = activation_cost(self._host, self._adapter, sharing=sharing)
        bound = default_bound(self._host.device) if memory_gib is None else memory_gib * GIB
        return Passes(
            self._host, self._adapter, sharing=sharing, memory=ActivationBound(self._cost[sharing], bound, self._host.device.type == "cpu")
        )

    def _check(self, samples: Sequence[TokenSample]) -> None:
        check_samples(samples, self._host.model.config.get_text_config().vocab_size, self._host.context_length)


def _plain_sample(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> TokenSample:
    zeros = (0.0,) * len(tokens)
    return TokenSample(name, tuple(prompt), tuple(tokens), zeros, zeros, zeros)
