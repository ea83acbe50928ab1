"""How good a policy is on scenarios it is not trained on: a mean with a 95 % interval that does not claim more than it knows."""

from __future__ import annotations

import inspect
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias

from ..errors import InvalidRequest, RolloutError
from ..records import Record, Scenario, TrajectoryGroup
from .gather import GatherSettings, GroupPlan, Member, Rollout, run_plans
from .progress import Progress, progress_of
from .values import as_scenarios

RewardFunction: TypeAlias = Callable[[list[TrajectoryGroup]], list[TrajectoryGroup] | Awaitable[list[TrajectoryGroup]]]
"""Groups in, the same groups with rewards out; sync or async."""

RESAMPLES = 2000
Z_95 = 1.959963984540054
EVALUATION = "evaluation"
"""`metadata["purpose"]` of evaluation trajectories."""

Method: TypeAlias = Literal["bootstrap", "wilson", "single_value"]


class Evaluation(Record):
    """What an evaluation found. `n` scenarios gave a value; `values` has each one's mean reward over its repeats."""

    policy: str
    mean: float
    ci95: tuple[float, float]
    method: Method
    """bootstrap: percentiles over resampled scenarios. wilson: all values equal, 0 or 1. single_value: equal otherwise; the
    interval has no width because nothing is known about the spread."""
    n: int
    failures: int
    values: dict[str, float]
    metrics: dict[str, float]
    """Means of the trajectories' own metrics."""
    trajectories: dict[str, str]
    """Scenario id → one of its trajectories, to look at."""

    def __str__(self) -> str:
        failed = f", {self.failures} failed" if self.failures else ""
        bounds = "[interval unknown]" if self.method == "single_value" else f"[{self.ci95[0]:.3f}, {self.ci95[1]:.3f}]"
        return f"{self.mean:.3f} {bounds} (n={self.n}{failed})"


async def evaluate(
    rollout: Rollout,
    scenarios: Sequence[Scenario | object],
    *,
    policy: str,
    repeats: int = 1,
    reward: RewardFunction | None = None,
    concurrency: int = 32,
    deadline: float | None = 600.0,
    max_failures: int | float = 0.5,
    seed: int = 0,
    progress: bool | Progress = True,
) -> Evaluation:
    """Run each scenario `repeats` times and average. Failed rollouts are counted, not averaged in as zeros."""
    if repeats < 1:
        raise InvalidRequest(f"repeats must be at least 1, got {repeats}", param="repeats")
    metadata = {"purpose": EVALUATION}
    plans = [GroupPlan(scenario, [Member() for _ in range(repeats)], metadata={**metadata}) for scenario in as_scenarios(scenarios)]
    settings = GatherSettings(concurrency, deadline, max_failures)
    groups = await run_plans(rollout, plans, settings, progress_of(progress), "evaluation")
    return summarise(await apply_reward(reward, groups), policy=policy, seed=seed)


async def apply_reward(reward: RewardFunction | None, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups as the reward callable leaves them; RolloutError if it gives back other trajectories."""
    if reward is None:
        return groups
    found = reward(groups)
    scored = await found if inspect.isawaitable(found) else found
    before = [[trajectory.id for trajectory in group.trajectories] for group in groups]
    try:
        after = [[trajectory.id for trajectory in group.trajectories] for group in scored]
    except (AttributeError, TypeError):  # something else than groups
        after = None
    if before != after:
        raise RolloutError("the reward function must return the same groups with the same trajectories, in their order")
    return scored


def summarise(groups: Sequence[TrajectoryGroup], *, policy: str, seed: int = 0) -> Evaluation:
    """The evaluation of finished, rewarded groups (one per scenario); RolloutError if nothing has a reward."""
    values: dict[str, float] = {}
    examples: dict[str, str] = {}
    numbers: dict[str, list[float]] = {}
    failures = 0
    for index, group in enumerate(groups):
        failures += len(group.failures)
        missing = next((trajectory for trajectory in group.trajectories if trajectory.reward is None), None)
        if missing is not None:
            raise RolloutError(
                f"evaluation needs a reward for every rollout; trajectory {missing.id} has none: set t.reward or pass reward="
            )
        rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                numbers.setdefault(name, []).append(value)
        if rewards:
            key = group.scenario.id if group.scenario else str(index)
            key = key if key not in values else f"{key}#{index}"
            values[key] = statistics.fmean(rewards)
            examples[key] = group.trajectories[0].id
    if not values:
        raise RolloutError(f"the evaluation has no result: all {failures} rollouts failed")
    low, high, method = interval(list(values.values()), seed)
    return Evaluation(
        policy=policy,
        mean=statistics.fmean(values.values()),
        ci95=(low, high),
        method=method,
        n=len(values),
        failures=failures,
        values=values,
        metrics={name: statistics.fmean(found) for name, found in numbers.items()},
        trajectories=examples,
    )


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, Method]:
    """A 95 % interval of the mean: percentile bootstrap (Efron 1979) with its own generator.

    Resampling equal values gives an interval without width, which would claim certainty; for 0s or 1s the Wilson
    score interval (Wilson 1927, eq. without continuity correction) stands in.
    """
    if len(set(values)) == 1:
        value = values[0]
        if value in (0.0, 1.0):
            return (*wilson(round(value * len(values)), len(values)), "wilson")
        return value, value, "single_value"
    generator = random.Random(seed)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))], "bootstrap"


def wilson(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion."""
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half  # exactly, where rounding would leave a speck
    return low, 1.0 if successes == n else centre + half
