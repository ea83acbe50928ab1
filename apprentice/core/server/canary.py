"""The truth check after every sync: does the engine really serve the weights that the trainer made?

The engine scores a few rows; its log-probabilities must agree with the trainer's new ones within a tolerance, and,
where the update moved them visibly, must be nearer to the new than to the old ones. An engine that never loaded the
adapter fails the second test even when the update is smaller than the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engines.protocol import Engine, PolicyVersion
from ..errors import StaleEngine

CANARY_TEXT = "The quick brown fox jumps over the lazy dog. 1, 2, 3, 4, 5. def f(x): return x + 1"
MAX_ROW = 256
"""Tokens of a canary row; longer ones are cut."""
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest accepted |difference| of a log-probability between engine and trainer, by the engine's dtype."""
VISIBLE = 3e-5
"""A mean change above this is larger than the noise of fp32 (about 1e-5) and must show in the engine."""


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
    report = CanaryReport(max((abs(a - b) for a, b in zip(served, fresh, strict=True)), default=0.0), _mean_gap(fresh, before))
    tolerance = TOLERANCE.get(engine.info().dtype, TOLERANCE["float16"])
    if not report.max_difference <= tolerance:
        raise StaleEngine(
            f"the engine does not serve {policy.policy}@{policy.version}: its log-probabilities differ from the trainer's by up to "
            f"{report.max_difference:.2g}, allowed is {tolerance:g}"
        )
    if report.moved > VISIBLE and _mean_gap(served, before) < _mean_gap(served, fresh):
        raise StaleEngine(
            f"the engine still serves the weights before {policy.policy}@{policy.version}: the update changed the log-probabilities by "
            f"{report.moved:.2g} on average, and the engine's are nearer to the old ones"
        )
    return report


def _mean_gap(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / max(len(a), 1)
