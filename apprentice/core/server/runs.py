"""What `apprentice runs` and `apprentice checkpoints list` show, read from a ledger beside a running server.

Builds rich renderables; knows no HTTP and no models.
"""

from __future__ import annotations

import json
import statistics
from datetime import datetime
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..records import Completion, Trajectory, TrajectoryStatus
from ..training.checkpoints import CheckpointStore
from .ledger import Ledger
from .registry import StoredCheckpoints

RECENT = 200
"""Trajectories of a policy that its row summarises."""
SHOWN_METRICS = ("reward/mean", "loss", "kl", "grad_norm", "sampling_logp_difference/max", "tokens/trained")


def policies_table(ledger: Ledger) -> RenderableType:
    """One row for each registered policy."""
    table = Table("policy", "base model", "step", "trajectories", "open", "failed", f"reward, last {RECENT}", "train jobs")
    jobs = ledger.jobs()
    for body in ledger.policies():
        alias = f"{body.project}/{body.name}"
        recent = ledger.trajectories(alias, limit=RECENT)
        rewards = [t.reward for t in recent if t.reward is not None]
        states = [t.status for t in recent]
        own = [job for job in jobs if job.policy == alias]
        step = max((c.step for c in ledger.checkpoints(alias)), default=0)
        table.add_row(
            alias,
            body.base_model,
            str(step),
            f"{len(recent)}{'+' if len(recent) == RECENT else ''}",
            str(states.count(TrajectoryStatus.open)),
            str(states.count(TrajectoryStatus.failed)),
            f"{statistics.fmean(rewards):.3f}" if rewards else "-",
            ", ".join(f"{state} {count}" for state, count in _counts([job.state for job in own]).items()) or "-",
        )
    return table


def show(ledger: Ledger, name: str) -> RenderableType:
    """A policy's train jobs if the name has a slash, else a trajectory. Raises UnknownModel, UnknownTrajectory."""
    if "/" in name:
        ledger.policy(name)
        return _jobs_table(ledger, name)
    return _transcript(ledger.trajectory(name))


def checkpoints_table(ledger: Ledger, home: Path, policy: str | None) -> RenderableType:
    """Published checkpoints, the folders being the truth."""
    table = Table("checkpoint", "when", "reward/mean", "", "adapter")
    for info in StoredCheckpoints(CheckpointStore(home / "checkpoints"), ledger).list(policy):
        marks = " ".join(mark for mark, on in (("latest", info.latest), ("pinned", info.pinned)) if on)
        reward = info.metrics.get("reward/mean")
        table.add_row(f"{info.policy}@{info.step}", _when(info.created_at), "-" if reward is None else f"{reward:.3f}", marks, info.path)
    return table


def _jobs_table(ledger: Ledger, policy: str) -> RenderableType:
    table = Table("job", "kind", "when", "state", "step", *SHOWN_METRICS, "reason", title=policy)
    for job in ledger.jobs():
        if job.policy == policy:
            result = job.result
            metrics = result.metrics if result else {}
            values = [f"{metrics[name]:.4g}" if name in metrics else "-" for name in SHOWN_METRICS]
            step = f"{result.previous_step} → {result.step}" if result else "-"
            table.add_row(job.id[:12], job.kind, _when(job.created_at), job.state, step, *values, (result.reason if result else None) or "")
    return table


def _transcript(trajectory: Trajectory) -> RenderableType:
    head = f"{trajectory.id}  {trajectory.policy}  {trajectory.status.value}  reward {trajectory.reward}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if trajectory.error:
        parts.append(Text(trajectory.error, style="red"))
    shown = 0
    for completion in trajectory.completions:
        new = completion.request.messages[shown:] if completion.branch == "continues" else completion.request.messages
        parts += [_message(dict(message)) for message in new]
        parts.append(_reply(completion))
        shown = len(completion.request.messages) + 1
    parts += [Text(f"tool {event.name}: {event.outcome}, {event.seconds:.2f} s", style="dim") for event in trajectory.tool_events]
    return Group(*parts)


def _message(message: dict[str, object]) -> Text:
    return Text.from_markup(f"[cyan]{escape(str(message.get('role')))}[/] {escape(_content(message))}")


def _reply(completion: Completion) -> Text:
    version = "base" if completion.policy_version is None else f"@{completion.policy_version}"
    note = f"  [red]{escape(completion.parse_error)}[/]" if completion.parse_error else ""
    details = f"[dim]({version}, {len(completion.token_ids)} tokens, {completion.finish_reason.value}, {completion.branch.value})[/]"
    return Text.from_markup(f"[green]assistant[/] {escape(_content(dict(completion.message)))} {details}{note}")


def _content(message: dict[str, object]) -> str:
    calls = message.get("tool_calls")
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    return f"{text} {json.dumps(calls, ensure_ascii=False)}".strip() if calls else text


def _counts(states: list[str]) -> dict[str, int]:
    return {state: states.count(state) for state in dict.fromkeys(states)}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
