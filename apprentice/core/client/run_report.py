"""The report of a training run: what its state, its metrics and the ledger's transcripts say, put into `tracking.report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from ..config import TrainConfig
from ..errors import ApprenticeError
from ..records import JsonObject, Scenario, Trajectory
from ..tracking.local import JsonlMetrics
from ..tracking.report import Bar, Curve, Report, Sample, write_report
from .evaluate import Evaluation
from .model import TrainableModel
from .run_state import EvaluationPoint, RunState
from .values import sentence

SAMPLES = 4
CURVES = {
    "rollouts/reward_mean": "Reward of the rollouts",
    "evaluation/mean": "Reward on held-out scenarios",
    "loss": "Loss",
    "entropy": "Entropy (nats)",
    "kl": "KL divergence from the base model",
    "importance_weight/ess": "Effective sample size",
}


async def write_run_report(
    folder: Path, model: TrainableModel, state: RunState, metrics: JsonlMetrics, scenarios: Sequence[Scenario], config: TrainConfig
) -> Path:
    """Write `report.html` and `report.json`; the HTML file's path."""
    shown = _shown(state.evaluations)
    report = Report(
        title=f"{state.policy}: {state.step} steps",
        summary=tuple(_sentences(state, shown)),
        facts={
            "policy": state.policy,
            "base model": model.base_model,
            "run": state.run_id,
            "policy step": state.policy_step,
            "best policy step": state.best_step,
            "seconds": round(state.seconds, 1),
            "tokens trained": state.tokens,
            "train config": json.dumps(config.model_dump(mode="json", exclude_defaults=True)),
        },
        bars=tuple(_bar(name, point.evaluation) for name, point in shown.items()),
        curves=tuple(Curve(name=title, points=tuple(metrics.column(name))) for name, title in CURVES.items()),
        samples=tuple([await sample_of(model, scenario, shown) for scenario in scenarios[:SAMPLES]] if shown else []),
    )
    return write_report(folder, report)


def _shown(evaluations: Sequence[EvaluationPoint]) -> dict[str, EvaluationPoint]:
    """Before, after the warm-up, and after everything."""
    named = {point.at: point for point in evaluations if point.at in ("before", "warm-up")}
    last = evaluations[-1] if evaluations else None
    if last is not None and last.at not in named:
        named["after"] = last
    return named


def _sentences(state: RunState, shown: dict[str, EvaluationPoint]) -> list[str]:
    lines = [f"The run ended because {state.stopped or 'it was asked to'}."]
    if "before" in shown and len(shown) > 1:
        name, last = list(shown.items())[-1]
        before, after = shown["before"].evaluation, last.evaluation
        lines.append(
            f"Held-out reward: {before} before, {after} {name if name == 'after' else 'after the warm-up'}. {verdict(before, after)}"
        )
    return lines


def verdict(before: Evaluation, after: Evaluation) -> str:
    """One sentence: whether the difference can be told from chance."""
    if "single_value" in (before.method, after.method):
        return "Equal values tell nothing about their spread: whether the difference is chance is not known."
    apart = after.ci95[0] > before.ci95[1] or before.ci95[0] > after.ci95[1]
    return f"The 95 % intervals {'do not overlap' if apart else 'overlap'}."


def _bar(name: str, found: Evaluation) -> Bar:
    notes = [f"{found.failures} rollouts failed"] if found.failures else []
    if found.method == "single_value":
        notes.append("all values are equal: the interval says nothing about the spread")
    elif found.method == "wilson":
        notes.append("all values are equal: Wilson interval")
    return Bar(name=name, mean=found.mean, low=found.ci95[0], high=found.ci95[1], n=found.n, note="; ".join(notes))


async def sample_of(model: TrainableModel, scenario: Scenario, shown: Mapping[str, EvaluationPoint]) -> Sample:
    """What became of one scenario in each of the evaluations, side by side."""
    texts: dict[str, str] = {}
    rewards: dict[str, float | None] = {}
    for name, point in shown.items():
        trajectory_id = point.evaluation.trajectories.get(scenario.id)
        if trajectory_id is None:
            texts[name] = "(no finished rollout)"
            continue
        rewards[name] = point.evaluation.values[scenario.id]
        try:
            texts[name] = transcript(await model.fetch(trajectory_id))
        except ApprenticeError as error:
            texts[name] = f"(the transcript could not be read: {sentence(error)})"
    title = scenario.input if isinstance(scenario.input, str) else json.dumps(scenario.input, ensure_ascii=False)
    return Sample(title=title[:200], texts=texts, rewards=rewards)


def transcript(trajectory: Trajectory) -> str:
    """The last call's messages and its reply, as text."""
    if not trajectory.completions:
        return "(no model call)"
    last = trajectory.completions[-1]
    return "\n\n".join(_message(message) for message in (*last.request.messages, last.message))


def _message(message: JsonObject) -> str:
    lines = [f"[{message.get('role', 'assistant')}]"]
    content: JsonValue = message.get("content")
    if content:
        lines.append(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    calls = message.get("tool_calls")
    if calls:
        lines.append(json.dumps(calls, ensure_ascii=False))
    return "\n".join(lines)
