"""Which scenarios a loop trains on next: in turn, or those that are solved sometimes more often than others."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..records import Scenario, TrajectoryGroup

LEAST = 0.04
"""The weight of what is solved always or never. Not zero, because rates move, and what was learned must be kept."""


DIFFICULTY = "difficulty"
"""`metadata.purpose` of the attempts that measure it."""


def _by_itself(scenario: Scenario) -> str:
    return scenario.id


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Scenarios are drawn with probabilities by p(1-p), p being the share of attempts that solved them.

    `metric`: of a rollout, 1 where it solved its scenario and 0 where not (or between). `sort`: names the sort of a scenario;
    one that was not tried yet counts as solved as often as the others of its sort. Default: no two are of one sort.
    `attempts`: of the base model at every scenario, before all training; they are left out if the evaluation before found
    that it solves nothing. Later a scenario's rate is that of its latest group.
    """

    metric: str
    sort: Callable[[Scenario], str] = _by_itself
    attempts: int = 0

    def weights(self, scenarios: Sequence[Scenario], solve_rates: Mapping[str, float]) -> list[float]:
        """Positive; highest for p = 1/2, and for sorts of which nothing was tried yet. `solve_rates`: by scenario id."""
        known: dict[str, list[float]] = defaultdict(list)
        for scenario in scenarios:
            if scenario.id in solve_rates:
                known[self.sort(scenario)].append(solve_rates[scenario.id])
        of_sort = {sort: statistics.fmean(rates) for sort, rates in known.items()}
        rates = [solve_rates.get(scenario.id, of_sort.get(self.sort(scenario), 0.5)) for scenario in scenarios]
        return [LEAST + rate * (1.0 - rate) for rate in rates]

    def solve_rates(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Scenario id → mean of the metric over its finished rollouts; scenarios without one are left out."""
        rates: dict[str, float] = {}
        for group in groups:
            values = [trajectory.metrics[self.metric] for trajectory in group.trajectories if self.metric in trajectory.metrics]
            if group.scenario is not None and values:
                rates[group.scenario.id] = statistics.fmean(values)
        return rates


def drawn(size: int, start: int, count: int, seed: int) -> list[int]:
    """Indices of `count` examples from position `start` of the endless stream of shuffled epochs over `size` examples.

    Each epoch's order comes from (seed, epoch) alone, so a position means the same whatever the batches were.
    """
    indices: list[int] = []
    orders: dict[int, list[int]] = {}
    for position in range(start, start + count):
        epoch, offset = divmod(position, size)
        if epoch not in orders:
            order = list(range(size))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            orders[epoch] = order
        indices.append(orders[epoch][offset])
    return indices


def drawn_by_weight(weights: Sequence[float], start: int, count: int, seed: int) -> list[int]:
    """`count` different indices (as many as there are), each step's drawn with probabilities by `weights`, which are positive.

    Weighted sampling without replacement by exponential keys (Efraimidis and Spirakis 2006); from (seed, start) alone.
    """
    chance = random.Random(f"{seed}/weighted/{start}")
    keys = [math.log(1.0 - chance.random()) / weight for weight in weights]
    return sorted(range(len(weights)), key=lambda index: keys[index], reverse=True)[:count]
