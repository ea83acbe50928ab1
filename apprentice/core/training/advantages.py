"""From rewards to advantages: which completions are trained, how strongly, and why the others are not.

Plain Python. It knows rewards and ids; it must not know tokens, models or torch.

The rule, in words:

1. A trajectory's reward applies to every completion of the trajectory. A completion reward, where given, replaces
   it for that completion.
2. Values are compared like with like. The *trajectory pool* of a group holds one value per trajectory: its reward.
   The *completion pool* of a group holds every completion reward of the group. The two are never mixed, since their
   scales need not agree (success in {0, 1} beside a format score in 0..10).
3. Within its pool a value x becomes `x - baseline`. With `baseline="mean"` that is the pool's mean (GRPO,
   arXiv 2402.03300, eq. for outcome supervision). With `"leave_one_out"` it is the mean of the values of the *other
   trajectories* (RLOO, arXiv 2402.14740, eq. 8): later calls of one trajectory depend on its earlier ones, so a
   baseline that held them would be biased. If only one trajectory has values, the other values of the pool are used.
4. `scale_rewards` divides by `std + 1e-4`; std has Bessel's correction and is the pool's ("group") or that of all
   pools of the same kind in the job ("batch"); "none" does not divide. Same formulas as TRL 1.16.
5. A pool of one value has no comparison (`group_of_one`); a pool whose std is below `min_reward_std` has no signal
   (`equal_rewards`). Completions judged by such a pool are not trained and count in no normaliser.
6. A reward counts in its pool even if none of the trajectory's completions can be trained. A missing reward counts
   nowhere: it is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config import TrainConfig
from ..errors import InvalidRequest
from ..records import Fate

STD_EPSILON = 1e-4
"""Added to the standard deviation before dividing, as in TRL."""


@dataclass(frozen=True)
class Rollout:
    """What advantages need to know of one trajectory. `completion_ids` are the calls that may be trained."""

    trajectory_id: str
    reward: float | None
    completion_ids: tuple[str, ...]
    completion_rewards: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Advantages:
    """`by_completion` holds the completions to train and nothing else; `fates` has every trajectory."""

    by_completion: dict[str, float]
    fates: dict[str, Fate]
    metrics: dict[str, float]


def group_advantages(rewards: Sequence[float], config: TrainConfig, *, scale_std: float | None = None) -> list[float] | None:
    """Advantages of one group with one reward per trajectory; None if the group gives no update.

    `scale_std` is the standard deviation of the whole job, needed for `scale_rewards="batch"` only.
    """
    _require_finite(rewards)
    pool = _Pool([_Value(str(index), reward, str(index)) for index, reward in enumerate(rewards)])
    return None if pool.reason(config) else pool.advantages(config, scale_std)


def compute_advantages(groups: Sequence[Sequence[Rollout]], config: TrainConfig) -> Advantages:
    """Advantages of a whole job by the module's rule. Raises InvalidRequest for NaN, infinity or a repeated trajectory."""
    _validate(groups)
    trajectory_pools = [_trajectory_pool(group) for group in groups]
    completion_pools = [_completion_pool(group) for group in groups]
    trajectory_std = _std([value.reward for pool in trajectory_pools for value in pool.values])
    completion_std = _std([value.reward for pool in completion_pools for value in pool.values])
    by_completion: dict[str, float] = {}
    fates: dict[str, Fate] = {}
    for group, by_trajectory, by_call in zip(groups, trajectory_pools, completion_pools, strict=True):
        of_trajectory = _lookup(by_trajectory, config, trajectory_std)
        of_completion = _lookup(by_call, config, completion_std)
        for rollout in group:
            found = _rollout_advantages(rollout, of_trajectory, of_completion)
            by_completion.update(found)
            fates[rollout.trajectory_id] = Fate.trained if found else _reason(rollout, by_trajectory, by_call, config)
    return Advantages(by_completion, fates, _metrics(groups, trajectory_pools, completion_pools, by_completion))


@dataclass(frozen=True)
class _Value:
    key: str
    reward: float
    trajectory_id: str


@dataclass(frozen=True)
class _Pool:
    values: list[_Value]

    def reason(self, config: TrainConfig) -> Fate | None:
        """Why this pool gives no update; None if it does."""
        rewards = [value.reward for value in self.values]
        if len(rewards) < 2:
            return Fate.group_of_one
        if min(rewards) == max(rewards) or _std(rewards) < config.min_reward_std:
            return Fate.equal_rewards
        return None

    def advantages(self, config: TrainConfig, batch_std: float | None) -> list[float]:
        rewards = [value.reward for value in self.values]
        centred = [value.reward - self._baseline(index, config) for index, value in enumerate(self.values)]
        if config.scale_rewards == "none":
            return centred
        std = _std(rewards)
        if config.scale_rewards == "batch":
            if batch_std is None:
                raise ValueError('scale_rewards="batch" needs the standard deviation of the whole job')
            std = batch_std
        return [value / (std + STD_EPSILON) for value in centred]

    def _baseline(self, index: int, config: TrainConfig) -> float:
        if config.baseline == "mean":
            return _mean(value.reward for value in self.values)
        own = self.values[index]
        others = [value.reward for value in self.values if value.trajectory_id != own.trajectory_id]
        if not others:
            others = [value.reward for value in self.values if value.key != own.key]
        return _mean(others)


def _trajectory_pool(group: Sequence[Rollout]) -> _Pool:
    return _Pool([_Value(r.trajectory_id, r.reward, r.trajectory_id) for r in group if r.reward is not None])


def _completion_pool(group: Sequence[Rollout]) -> _Pool:
    return _Pool(
        [_Value(c, r.completion_rewards[c], r.trajectory_id) for r in group for c in r.completion_ids if c in r.completion_rewards]
    )


def _lookup(pool: _Pool, config: TrainConfig, batch_std: float) -> dict[str, float]:
    if pool.reason(config):
        return {}
    return dict(zip((value.key for value in pool.values), pool.advantages(config, batch_std), strict=True))


def _rollout_advantages(rollout: Rollout, of_trajectory: dict[str, float], of_completion: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for completion_id in rollout.completion_ids:
        if completion_id in rollout.completion_rewards:
            advantage = of_completion.get(completion_id)
        else:
            advantage = of_trajectory.get(rollout.trajectory_id)
        if advantage is not None:
            found[completion_id] = advantage
    return found


def _reason(rollout: Rollout, by_trajectory: _Pool, by_call: _Pool, config: TrainConfig) -> Fate:
    if not rollout.completion_ids:
        return Fate.no_completions
    without_own = [c for c in rollout.completion_ids if c not in rollout.completion_rewards]
    if without_own and rollout.reward is not None:
        return by_trajectory.reason(config) or Fate.equal_rewards
    if len(without_own) < len(rollout.completion_ids):
        return by_call.reason(config) or Fate.equal_rewards
    return Fate.no_reward


def _metrics(
    groups: Sequence[Sequence[Rollout]],
    trajectory_pools: list[_Pool],
    completion_pools: list[_Pool],
    by_completion: dict[str, float],
) -> dict[str, float]:
    rewards = [value.reward for pool in trajectory_pools for value in pool.values]
    rewards = rewards or [value.reward for pool in completion_pools for value in pool.values]
    trained = [{r.trajectory_id for r in group if any(c in by_completion for c in r.completion_ids)} for group in groups]
    stds = [_std([v.reward for v in pool.values]) for pool in trajectory_pools if len(pool.values) > 1]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/group_std": _mean(stds),
        "advantage/mean": _mean(by_completion.values()),
        "advantage/abs_mean": _mean(abs(a) for a in by_completion.values()),
        "groups/submitted": float(len(groups)),
        "groups/trained": float(sum(bool(ids) for ids in trained)),
        "trajectories/trained": float(sum(len(ids) for ids in trained)),
    }


def _validate(groups: Sequence[Sequence[Rollout]]) -> None:
    seen: set[str] = set()
    for rollout in (rollout for group in groups for rollout in group):
        if rollout.trajectory_id in seen:
            raise InvalidRequest(f"a trajectory can be in one group once, but {rollout.trajectory_id} came twice", param="groups")
        seen.add(rollout.trajectory_id)
        _require_finite(
            [*([] if rollout.reward is None else [rollout.reward]), *rollout.completion_rewards.values()], rollout.trajectory_id
        )


def _require_finite(rewards: Iterable[float], trajectory_id: str | None = None) -> None:
    for reward in rewards:
        if not math.isfinite(reward):
            where = f" of trajectory {trajectory_id}" if trajectory_id else ""
            raise InvalidRequest(f"a reward{where} must be a finite number, got {reward}", param="reward")


def _mean(values: Iterable[float]) -> float:
    """The mean; 0.0 of nothing."""
    items = list(values)
    return math.fsum(items) / len(items) if items else 0.0


def _std(values: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction (as TRL's `nanstd`); 0.0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
