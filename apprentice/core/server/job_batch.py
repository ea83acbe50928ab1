"""From recorded trajectories and their rewards to what the trainer takes: token samples with an advantage each, and fates.

All choices of *what* is trained are made here: whose calls, which origin, which are too long. The trainer only sees numbers.
It must not know models, engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import TrainConfig
from ..records import Completion, Fate, FinishReason, Trajectory, TrajectoryStatus
from ..training.advantages import Rollout, compute_advantages
from ..training.batches import TrainSample
from ..training.forest import TokenSample


@dataclass(frozen=True, slots=True)
class Batch:
    """What one GRPO job trains on. Every trajectory that was sent has a fate."""

    samples: list[TrainSample]
    fates: dict[str, Fate]
    metrics: dict[str, float]


def build_batch(groups: Sequence[Sequence[Trajectory]], config: TrainConfig, *, context_length: int) -> Batch:
    """Advantages by group, then one sample for each completion that has one.

    The reward of a failed trajectory counts only if it was given one. Aborted calls were never seen whole by the agent
    and are left out. Raises InvalidRequest for rewards that are not finite.
    """
    reasons: dict[str, Fate] = {}
    rollouts: list[list[Rollout]] = []
    usable: dict[str, dict[str, Completion]] = {}
    for group in groups:
        members: list[Rollout] = []
        for trajectory in group:
            chosen, reason = _selected(trajectory, config, context_length)
            usable[trajectory.id] = chosen
            if reason is not None:
                reasons[trajectory.id] = reason
            if reason is not Fate.failed:
                rewards = {key: value for key, value in trajectory.completion_rewards.items() if key in chosen}
                members.append(Rollout(trajectory.id, trajectory.reward, tuple(chosen), rewards))
        rollouts.append(members)
    advantages = compute_advantages(rollouts, config)
    samples = _samples(groups, usable, advantages.by_completion)
    return Batch(samples, {**advantages.fates, **reasons}, advantages.metrics)


def supervised_samples(trajectory: Trajectory) -> list[TokenSample]:
    """Every whole sampled turn as a target of supervised training; weight one."""
    return [_sample(c, 1.0) for c in trajectory.completions if c.token_ids and c.finish_reason is not FinishReason.aborted]


def _selected(trajectory: Trajectory, config: TrainConfig, context_length: int) -> tuple[dict[str, Completion], Fate | None]:
    """The completions that may be trained, and why there are none."""
    if trajectory.status is TrajectoryStatus.failed and trajectory.reward is None and not trajectory.completion_rewards:
        return {}, Fate.failed
    sampled = [c for c in trajectory.completions if c.token_ids and c.finish_reason is not FinishReason.aborted]
    if not sampled:
        return {}, Fate.no_completions
    own = [c for c in sampled if c.policy == trajectory.policy and c.policy_version is not None]
    if not own:
        return {}, Fate.base_model_only
    wanted = [c for c in own if _matches(c, config.train_only)]
    if not wanted:
        return {}, Fate.not_selected
    if config.mask_truncated_completions:
        wanted = [c for c in wanted if c.finish_reason is not FinishReason.length]
        if not wanted:
            return {}, Fate.truncated
    fitting = [c for c in wanted if len(c.prompt_ids) + len(c.token_ids) <= context_length]
    if not fitting:
        return {}, Fate.too_long
    return {c.id: c for c in fitting}, None


def _matches(completion: Completion, train_only: Mapping[Any, str] | None) -> bool:
    return all(getattr(completion.origin, key) == value for key, value in (train_only or {}).items())


def _samples(
    groups: Sequence[Sequence[Trajectory]], usable: Mapping[str, Mapping[str, Completion]], advantages: Mapping[str, float]
) -> list[TrainSample]:
    return [
        TrainSample(_sample(completion, advantages[completion.id]), trajectory.id, str(number))
        for number, group in enumerate(groups)
        for trajectory in group
        for completion in usable[trajectory.id].values()
        if completion.id in advantages
    ]


def _sample(completion: Completion, advantage: float) -> TokenSample:
    return TokenSample(
        id=completion.id,
        prompt_ids=completion.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        sampling_logprobs=completion.sampling_logprobs,
        advantages=(advantage,) * len(completion.token_ids),
    )
