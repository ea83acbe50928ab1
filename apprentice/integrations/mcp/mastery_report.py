"""The report of a mastery run: success before, after the warm-up and after GRPO, per tool and per difficulty, with transcripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import JsonValue

from ...core.client.evaluate import interval
from ...core.client.loop import LoopResult
from ...core.client.model import TrainableModel
from ...core.client.run_report import sample_of
from ...core.client.run_state import EvaluationPoint, RunState
from ...core.records import JsonObject, Record, Scenario
from ...core.tracking.local import JsonlMetrics
from ...core.tracking.report import Bar, Breakdown, Curve, Report, Sample, render_html, write_whole
from .scenarios import notes_of
from .spec import McpServer

SAMPLES = 6
SHOWN_RESULT = 400
"""Characters of an expected result."""
NAMES = {"before": "before", "warmup": "after the warm-up", "after": "after GRPO"}


class Success(Record):
    """Held-out success of one evaluation."""

    success: float
    ci95: tuple[float, float]
    n: int


class MasteryReport(Record):
    """`report.json`."""

    servers: tuple[str, ...]
    policy: str
    base_model: str
    before: Success
    warmup: Success | None
    after: Success
    per_tool: dict[str, dict[str, Success]]
    """Tool → evaluation → success."""
    per_difficulty: dict[str, dict[str, Success]]
    seconds: float
    steps: int
    train_scenarios: int
    test_scenarios: int
    stopped: str
    adapter: str | None
    adapter_step: int | None = None
    """The policy step that `adapter` is of: that of the best evaluation, the last one if none was better than before. None: untrained."""
    adapter_stage: str | None = None
    """Which of `before`, `warmup` and `after` evaluated that step; None if it was an evaluation between them."""
    settings: JsonObject

    @property
    def gained(self) -> bool:
        """Whether the intervals before and after lie apart."""
        return self.after.ci95[0] > self.before.ci95[1]

    @property
    def adapter_origin(self) -> str:
        """Where the adapter comes from, in words; "" if there is none."""
        if self.adapter_step is None:
            return ""
        return f"policy step {self.adapter_step}, {NAMES[self.adapter_stage] if self.adapter_stage else 'during GRPO'}"


async def write_mastery_report(
    out: Path,
    model: TrainableModel,
    result: LoopResult,
    servers: Sequence[McpServer],
    settings: JsonObject,
    train: Sequence[Scenario],
    test: Sequence[Scenario],
) -> MasteryReport:
    """Write `report.json` and `report.html` into `out`."""
    state = RunState.load(out / "run")
    points = _shown(result.evaluations)
    adapter = out / "adapter"
    step = result.adapter_step
    report = MasteryReport(
        servers=tuple(server.name for server in servers),
        policy=model.policy,
        base_model=model.base_model,
        before=_success(points["before"].evaluation.values.values()),
        warmup=_success(points["warmup"].evaluation.values.values()) if "warmup" in points else None,
        after=_success(points["after"].evaluation.values.values()),
        per_tool=_parts(points, test, _tools_of),
        per_difficulty=_parts(points, test, lambda scenario: [str(scenario.metadata.get("kind") or "other")]),
        seconds=round(state.seconds if state else 0.0, 1),
        steps=result.steps,
        train_scenarios=len(train),
        test_scenarios=len(test),
        stopped=result.stopped,
        adapter=str(adapter) if adapter.is_dir() else None,
        adapter_step=step,
        adapter_stage=next((name for name, point in points.items() if point.policy_step == step), None),
        settings=settings,
    )
    compared = {NAMES[name]: points[name] for name in ("before", "after")}
    page = Report(
        title=f"Mastery of {', '.join(report.servers)} by {report.base_model}",
        summary=(_headline(report), f"The run ended because {report.stopped or 'it was asked to'}."),
        facts=_facts(report, servers),
        bars=tuple(_bar(NAMES[name], _success(point.evaluation.values.values())) for name, point in points.items()),
        breakdowns=(_breakdown("Success by tool", report.per_tool), _breakdown("Success by kind of task", report.per_difficulty)),
        curves=_curves(out / "run" / "metrics.jsonl"),
        samples=tuple([await _sample(model, scenario, compared) for scenario in _telling(test, points)]),
    )
    write_whole(out / "report.json", report.model_dump_json(indent=2))
    write_whole(out / "report.html", render_html(page))
    return report


def _shown(evaluations: Sequence[EvaluationPoint]) -> dict[str, EvaluationPoint]:
    warm = [point for point in evaluations if point.at == "warm-up"]
    return {"before": evaluations[0], **({"warmup": warm[0]} if warm else {}), "after": evaluations[-1]}


def _success(values: Iterable[float]) -> Success:
    numbers = list(values)
    low, high, _ = interval(numbers)
    return Success(success=sum(numbers) / len(numbers), ci95=(low, high), n=len(numbers))


def _tools_of(scenario: Scenario) -> list[str]:
    tools = scenario.metadata.get("tools")
    return [str(tool) for tool in dict.fromkeys(map(str, tools))] if isinstance(tools, list) else []


def _parts(
    points: dict[str, EvaluationPoint], scenarios: Sequence[Scenario], keys: Callable[[Scenario], list[str]]
) -> dict[str, dict[str, Success]]:
    """Success of the scenarios that share a key, for each evaluation."""
    members: dict[str, list[str]] = {}
    for scenario in scenarios:
        for key in keys(scenario):
            members.setdefault(key, []).append(scenario.id)
    found: dict[str, dict[str, Success]] = {}
    for key, ids in sorted(members.items()):
        for name, point in points.items():
            values = [point.evaluation.values[identity] for identity in ids if identity in point.evaluation.values]
            if values:
                found.setdefault(key, {})[name] = _success(values)
    return found


def _headline(report: MasteryReport) -> str:
    before, after = report.before, report.after
    verdict = "The 95 % intervals do not overlap." if report.gained else "No significant gain: the 95 % intervals overlap."
    warm = f", {_with_interval(report.warmup)} after the warm-up" if report.warmup else ""
    tasks = "1 task" if after.n == 1 else f"{after.n} tasks"
    return (
        f"Held-out success: {_with_interval(before)} before{warm}, {_with_interval(after)} after, on {tasks} that training never saw. "
        f"{verdict}"
    )


def _with_interval(found: Success) -> str:
    return f"{found.success:.0%} [{found.ci95[0]:.0%}, {found.ci95[1]:.0%}]"


def _facts(report: MasteryReport, servers: Sequence[McpServer]) -> dict[str, JsonValue]:
    return {
        "servers": json.dumps([server.public() for server in servers], ensure_ascii=False),
        "policy": report.policy,
        "base model": report.base_model,
        "GRPO steps": report.steps,
        "scenarios": f"{report.train_scenarios} to train, {report.test_scenarios} held out",
        "seconds": report.seconds,
        "adapter": report.adapter,
        "adapter is of": report.adapter_origin,
        "settings": json.dumps(report.settings, ensure_ascii=False),
    }


async def _sample(model: TrainableModel, scenario: Scenario, compared: dict[str, EvaluationPoint]) -> Sample:
    sample = await sample_of(model, scenario, compared)
    return sample.model_copy(update={"measure": "success", "expected": expected(scenario)})


def expected(scenario: Scenario) -> str:
    """The reference run's calls with their results, and what the answer must tell."""
    notes = notes_of(scenario)
    lines = [f"{call.tool}({json.dumps(call.arguments, ensure_ascii=False)}) → {_short(call.result)}" for call in notes.calls]
    told = [json.dumps(fact, ensure_ascii=False) for fact in notes.facts]
    if notes.live_facts:
        told.append("what its own calls found")
    return "\n".join([*lines, f"The answer tells {', '.join(told)}." if told else "Any answer will do."])


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_RESULT else text[:SHOWN_RESULT] + "…"


def _bar(name: str, success: Success) -> Bar:
    return Bar(name=name, mean=success.success, low=success.ci95[0], high=success.ci95[1], n=success.n)


def _breakdown(title: str, parts: dict[str, dict[str, Success]]) -> Breakdown:
    return Breakdown(title=title, rows={key: tuple(_bar(NAMES[name], value) for name, value in row.items()) for key, row in parts.items()})


def _curves(path: Path) -> tuple[Curve, ...]:
    metrics = JsonlMetrics(path)
    titles = {
        "rollout/success": "Success of the training rollouts",
        "rollouts/reward_mean": "Reward of the training rollouts",
        "loss": "Loss",
    }
    return tuple(Curve(name=title, points=tuple(metrics.column(name))) for name, title in titles.items())


def _telling(test: Sequence[Scenario], points: dict[str, EvaluationPoint]) -> list[Scenario]:
    """Scenarios to show: first what was learned, then what was not."""
    before, after = points["before"].evaluation.values, points["after"].evaluation.values

    def gain(scenario: Scenario) -> float:
        return after.get(scenario.id, 0.0) - before.get(scenario.id, 0.0)

    ranked = sorted(test, key=gain, reverse=True)
    learned = [scenario for scenario in ranked if gain(scenario) > 0][: SAMPLES - 2]
    failed = [scenario for scenario in ranked if after.get(scenario.id, 0.0) < 1.0][: SAMPLES - len(learned)]
    return learned + [scenario for scenario in failed if scenario not in learned]
