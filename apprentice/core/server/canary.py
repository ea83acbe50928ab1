"""The truth check after every sync: does the engine really serve the weights that the trainer made?

The engine scores a few rows. Two tests: its log-probabilities must agree with the trainer's new ones within a tolerance;
and they must have moved as the trainer's did. The second finds an engine that never loaded the adapter even where the
update is far below the tolerance. With o and n the trainer's values before and after, and e the engine's, the share of the
update that the engine shows is the least-squares coefficient

    share = <e - o, n - o> / |n - o|^2              1 for an engine that serves n, 0 for one that serves o

whose standard deviation is noise / |n - o|, where noise is the engine's rounding per token, measured as the smaller of the
root mean squares of e - n and e - o. Where 0.5 is fewer than SIGMAS deviations from either end the update is invisible
and the second test says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..engines.protocol import Engine, PolicyVersion
from ..errors import StaleEngine

CANARY_TEXT = "The quick brown fox jumps over the lazy dog. 1, 2, 3, 4, 5. def f(x): return x + 1"
MAX_ROW = 256
"""Tokens of a canary row; longer ones are cut."""
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest accepted |difference| of a log-probability between engine and trainer, by the engine's dtype."""
SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class CanaryReport:
    max_difference: float
    """Largest |engine - trainer| over all tokens, in nats."""
    moved: float
    """Mean |new - old| of the trainer's log-probabilities, in nats."""


async def check_canary(
    engine: Engine,
    policy: PolicyVersion,
    rows: Sequence[Sequence[int]],
    new: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]] | None,
) -> CanaryReport:
    """Score `rows` (token ids) on the engine and compare. Raises StaleEngine, which fails the job."""
    scored = [await engine.score(row, policy) for row in rows]
    served = [value for row in scored for value in row]
    fresh = [value for row in new for value in row]
    before = [value for row in old for value in row] if old is not None else fresh
    gaps = [abs(a - b) for a, b in zip(served, fresh, strict=True)]
    worst = math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)  # max() alone would pass over a nan
    report = CanaryReport(worst, _mean_gap(fresh, before))
    tolerance = TOLERANCE.get(engine.info().dtype, TOLERANCE["float16"])
    if not report.max_difference <= tolerance:
        raise StaleEngine(
            f"the engine does not serve {policy.policy}@{policy.version}: its log-probabilities differ from the trainer's by up to "
            f"{report.max_difference:.2g}, allowed is {tolerance:g}"
        )
    if _visible(served, fresh, before) and _share(served, fresh, before) < 0.5:
        raise StaleEngine(
            f"the engine still serves the weights before {policy.policy}@{policy.version}: the update changed the log-probabilities by "
            f"{report.moved:.2g} on average, and the engine's have not followed"
        )
    return report


def _mean_gap(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / max(len(a), 1)


def _visible(served: Sequence[float], fresh: Sequence[float], before: Sequence[float]) -> bool:
    """Whether the share can be told from noise; never where nothing moved."""
    noise = min(math.dist(served, fresh), math.dist(served, before)) / math.sqrt(max(len(served), 1))
    return 0.5 * math.dist(fresh, before) > SIGMAS * noise


def _share(served: Sequence[float], fresh: Sequence[float], before: Sequence[float]) -> float:
    along = sum((e - o) * (n - o) for e, n, o in zip(served, fresh, before, strict=True))
    return along / math.dist(fresh, before) ** 2
