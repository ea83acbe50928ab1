"""What `apprentice runs` and `apprentice checkpoints list` show, read from a ledger beside a running server.

Builds rich renderables; knows no HTTP and no models, and imports nothing heavy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ..records import TrajectoryStatus
from ..training.checkpoints import CheckpointStore
from .ledger import Ledger
from .stored_checkpoints import StoredCheckpoints
from .transcript import transcript

RECENT = 200
"""Trajectories of a policy that its row summarises."""
LATEST = 20
"""Trajectories that a policy's page lists."""
SHOWN_METRICS = ("reward/mean", "loss", "kl", "grad_norm", "sampling_logp_difference/max", "tokens/trained")


def policies_table(ledger: Ledger) -> RenderableType:
    """One row for each registered policy, and how many calls belong to no trajectory."""
    table = _table("policy", "base model", "step", "trajectories", "open", "failed", f"reward, last {RECENT}", "train jobs")
    jobs = ledger.jobs()
    for body in ledger.policies():
        alias = f"{body.project}/{body.name}"
        recent = ledger.trajectories(alias, limit=RECENT)
        rewards = [t.reward for t in recent if t.reward is not None]
        states = [t.status for t in recent]
        step = max((c.step for c in ledger.checkpoints(alias)), default=0)
        ended = _counts([job.state for job in jobs if job.policy == alias])
        table.add_row(
            alias,
            escape(body.base_model),
            str(step),
            f"{len(recent)}{'+' if len(recent) == RECENT else ''}",
            str(states.count(TrajectoryStatus.open)),
            str(states.count(TrajectoryStatus.failed)),
            _number(statistics.fmean(rewards) if rewards else None),
            ", ".join(f"{state} {count}" for state, count in ended.items()) or "-",
        )
    if lost := ledger.counts().unattributed_calls:
        table.caption = f"{lost} calls named no trajectory: they are recorded, and nothing can be learnt from them"
    return table


def show(ledger: Ledger, name: str) -> RenderableType:
    """A policy's train jobs and latest trajectories if the name has a slash, else a trajectory as a tree.

    Raises UnknownModel, UnknownTrajectory.
    """
    if "/" in name:
        ledger.policy(name)
        return Group(_jobs_table(ledger, name), _trajectories_table(ledger, name))
    trajectory = ledger.trajectory(name)
    return transcript(trajectory, [f"{fate} by {job}" for job, fate in _fates(ledger, trajectory.policy, name)])


def checkpoints_table(ledger: Ledger, home: Path, policy: str | None) -> RenderableType:
    """Published checkpoints, the folders being the truth."""
    table = _table("checkpoint", "when", "reward/mean", "", "adapter")
    for info in StoredCheckpoints(CheckpointStore(home / "checkpoints"), ledger).list(policy):
        marks = " ".join(mark for mark, on in (("latest", info.latest), ("pinned", info.pinned)) if on)
        reward = _number(info.metrics.get("reward/mean"))
        table.add_row(f"{info.policy}@{info.step}", _when(info.created_at), reward, marks, escape(info.path))
    return table


def _jobs_table(ledger: Ledger, policy: str) -> RenderableType:
    table = _table("job", "kind", "when", "state", "step", *SHOWN_METRICS, "reason", title=f"train jobs of {policy}")
    for job in ledger.jobs():
        if job.policy == policy:
            result = job.result
            metrics = result.metrics if result else {}
            values = [_number(metrics.get(name)) for name in SHOWN_METRICS]
            step = f"{result.previous_step} → {result.step}" if result else "-"
            reason = escape(result.reason or "") if result else ""
            table.add_row(_short(job.id), job.kind, _when(job.created_at), job.state, step, *values, reason)
    return table


def _trajectories_table(ledger: Ledger, policy: str) -> RenderableType:
    table = _table("trajectory", "when", "scenario", "group", "status", "reward", title=f"its latest trajectories, at most {LATEST}")
    for t in ledger.trajectories(policy, limit=LATEST):
        scenario, group = escape(t.scenario_id or "-"), escape(t.group_id or "-")
        table.add_row(t.id, _when(t.created_at), scenario, group, t.status.value, _number(t.reward))
    return table


def _fates(ledger: Ledger, policy: str, trajectory_id: str) -> Iterator[tuple[str, str]]:
    """(job, what it did with the trajectory), oldest job first."""
    for job in ledger.jobs():
        if job.policy == policy and job.result is not None and trajectory_id in job.result.fates:
            step = f" (step {job.result.step})" if job.state == "trained" else ""
            yield f"train job {_short(job.id)}{step}", job.result.fates[trajectory_id].value


def _table(*columns: str, title: str | None = None) -> Table:
    """A table that folds long values instead of cutting them."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(job_id: str) -> str:
    return job_id[:12]


def _counts(states: list[str]) -> dict[str, int]:
    return {state: states.count(state) for state in dict.fromkeys(states)}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
