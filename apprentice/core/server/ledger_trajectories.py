"""Trajectories, their rewards and their tool events as rows. Knows no locks and no threads.

Rewards are only ever added; what a trajectory is worth is the fold of all its updates in their order: the last reward
that was given counts, maps are merged key by key with the last value winning.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from ..errors import Conflict, InvalidRequest, LedgerError, TrajectoryStateError, UnknownTrajectory
from ..records import Completion, ToolEvent, Trajectory, TrajectoryStatus
from ..wire import FailTrajectory, FinishTrajectory, RewardUpdate
from .ledger_tokens import dump_json, load_json, pack_text, unpack_text

_COLUMNS = "seq, id, policy, scenario_id, group_id, status, error, metadata, created_at, finished_at"


def open_trajectory(connection: sqlite3.Connection, trajectory: Trajectory) -> Trajectory:
    """Store a new, empty, open trajectory. The same id with the same body gives the recorded one."""
    fresh = Trajectory(id=trajectory.id, policy=trajectory.policy, created_at=trajectory.created_at)
    identity = {"scenario_id": trajectory.scenario_id, "group_id": trajectory.group_id, "metadata": trajectory.metadata}
    if trajectory != fresh.model_copy(update=identity):
        raise InvalidRequest(f"trajectory {trajectory.id} must be opened without status, rewards, metrics, calls or tool events")
    metadata = pack_text(dump_json(trajectory.metadata))
    row = connection.execute(f"SELECT {_COLUMNS} FROM trajectories WHERE id = ?", (trajectory.id,)).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO trajectories (id, policy, scenario_id, group_id, status, metadata, created_at) VALUES (?,?,?,?,?,?,?)",
            (trajectory.id, trajectory.policy, trajectory.scenario_id, trajectory.group_id, "open", metadata, trajectory.created_at),
        )
    elif (row[2:5], unpack_text(row[7])) != ((trajectory.policy, trajectory.scenario_id, trajectory.group_id), unpack_text(metadata)):
        raise Conflict(f"trajectory {trajectory.id} is already open with another policy, scenario, group or metadata", param="id")
    return summary(connection, trajectory.id)


def update(connection: sqlite3.Connection, trajectory_id: str, body: RewardUpdate) -> Trajectory:
    """Add a reward update, whatever the status."""
    seq, _ = _find(connection, trajectory_id)
    _add_rewards(connection, seq, trajectory_id, body)
    return summary(connection, trajectory_id)


def finish(connection: sqlite3.Connection, trajectory_id: str, body: FinishTrajectory) -> Trajectory:
    """End an open trajectory. The same call again changes nothing; another end than the recorded one is refused."""
    seq, _ = _find(connection, trajectory_id)
    if _end(connection, seq, trajectory_id, TrajectoryStatus.finished, body.model_dump(), None):
        _add_rewards(connection, seq, trajectory_id, body)
    return summary(connection, trajectory_id)


def fail(connection: sqlite3.Connection, trajectory_id: str, body: FailTrajectory) -> Trajectory:
    seq, _ = _find(connection, trajectory_id)
    if _end(connection, seq, trajectory_id, TrajectoryStatus.failed, body.model_dump(), body.error) and body.reward is not None:
        _add_rewards(connection, seq, trajectory_id, RewardUpdate(reward=body.reward))
    return summary(connection, trajectory_id)


def add_tool_event(connection: sqlite3.Connection, event: ToolEvent) -> None:
    """Store an executed tool call. The same id with equal content changes nothing."""
    body = dump_json(event.model_dump())
    stored = connection.execute("SELECT body FROM tool_events WHERE id = ?", (event.id,)).fetchone()
    if stored is not None:
        if unpack_text(stored[0]) != body:
            raise Conflict(f"tool event {event.id} is already recorded with other content", param="id")
        return
    seq, status = _find(connection, event.trajectory_id)
    if status != "open":
        raise TrajectoryStateError(f"trajectory {event.trajectory_id} is {status} and takes no more tool events", param="trajectory_id")
    connection.execute(
        "INSERT INTO tool_events (id, trajectory, body, at) VALUES (?,?,?,?)", (event.id, seq, pack_text(body), event.created_at)
    )


def tool_events(connection: sqlite3.Connection, trajectory_id: str) -> tuple[ToolEvent, ...]:
    seq, _ = _find(connection, trajectory_id)
    rows = connection.execute("SELECT body FROM tool_events WHERE trajectory = ? ORDER BY seq", (seq,)).fetchall()
    return tuple(ToolEvent.model_validate(_load(row[0], trajectory_id)) for row in rows)


def summary(connection: sqlite3.Connection, trajectory_id: str) -> Trajectory:
    """The trajectory without its completions and tool events."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM trajectories WHERE id = ?", (trajectory_id,)).fetchone()
    if row is None:
        raise _unknown(trajectory_id)
    return _trajectory(connection, row)


def page(
    connection: sqlite3.Connection, policy: str | None, status: str | None, group_id: str | None, limit: int, after: str | None
) -> tuple[Trajectory, ...]:
    """Summaries, newest first; `after` is the id of the last one of the page before."""
    wanted: dict[str, Any] = {"policy = ?": policy, "status = ?": status, "group_id = ?": group_id}
    if after is not None:
        wanted["seq < ?"] = _find(connection, after)[0]
    wanted = {clause: value for clause, value in wanted.items() if value is not None}
    where = f"WHERE {' AND '.join(wanted)} " if wanted else ""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM trajectories {where}ORDER BY seq DESC LIMIT ?", (*wanted.values(), limit)).fetchall()
    return tuple(_trajectory(connection, row) for row in rows)


def with_contents(trajectory: Trajectory, completions: list[Completion], events: tuple[ToolEvent, ...]) -> Trajectory:
    return trajectory.model_copy(update={"completions": tuple(completions), "tool_events": events})


def _trajectory(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Trajectory:
    (seq, id_, policy, scenario_id, group_id, status, error, metadata, created_at, finished_at) = row
    folded: dict[str, Any] = {"reward": None, "completion_rewards": {}, "metrics": {}, "metadata": _load(metadata, id_)}
    for (body,) in connection.execute("SELECT body FROM rewards WHERE trajectory = ? ORDER BY seq", (seq,)).fetchall():
        added: dict[str, Any] = _load(body, id_)
        folded["reward"] = added["reward"] if added["reward"] is not None else folded["reward"]
        for key in ("completion_rewards", "metrics", "metadata"):
            folded[key].update(added[key])
    return Trajectory(
        id=id_,
        policy=policy,
        scenario_id=scenario_id,
        group_id=group_id,
        status=TrajectoryStatus(status),
        error=error,
        created_at=created_at,
        finished_at=finished_at,
        **folded,
    )


def _add_rewards(connection: sqlite3.Connection, seq: int, trajectory_id: str, body: RewardUpdate) -> None:
    for completion_id in body.completion_rewards:
        row = connection.execute("SELECT 1 FROM completions WHERE id = ? AND trajectory = ?", (completion_id, seq)).fetchone()
        if row is None:
            raise InvalidRequest(
                f"completion_rewards names {completion_id}, which is no completion of trajectory {trajectory_id}",
                param="completion_rewards",
            )
    update = RewardUpdate.model_validate(body.model_dump())
    if update != RewardUpdate():
        connection.execute(
            "INSERT INTO rewards (trajectory, body, at) VALUES (?,?,?)", (seq, pack_text(dump_json(update.model_dump())), time.time())
        )


def _end(
    connection: sqlite3.Connection, seq: int, trajectory_id: str, status: TrajectoryStatus, body: dict[str, Any], error: str | None
) -> bool:
    """True if this call ended it, False if an equal one did before."""
    wanted = dump_json(body)
    ended = connection.execute("SELECT status, body FROM status_changes WHERE trajectory = ? ORDER BY seq DESC LIMIT 1", (seq,)).fetchone()
    if ended is not None:
        if (ended[0], unpack_text(ended[1])) == (status.value, wanted):
            return False
        raise TrajectoryStateError(f"trajectory {trajectory_id} is already {ended[0]}, and not by the same call", param="id")
    now = time.time()
    connection.execute(
        "INSERT INTO status_changes (trajectory, status, body, at) VALUES (?,?,?,?)", (seq, status.value, pack_text(wanted), now)
    )
    connection.execute("UPDATE trajectories SET status = ?, error = ?, finished_at = ? WHERE seq = ?", (status.value, error, now, seq))
    return True


def _find(connection: sqlite3.Connection, trajectory_id: str) -> tuple[int, str]:
    row = connection.execute("SELECT seq, status FROM trajectories WHERE id = ?", (trajectory_id,)).fetchone()
    if row is None:
        raise _unknown(trajectory_id)
    return int(row[0]), str(row[1])


def _unknown(trajectory_id: str) -> UnknownTrajectory:
    return UnknownTrajectory(f"there is no trajectory {trajectory_id} in this ledger", param="id")


def _load(packed: bytes, trajectory_id: str) -> Any:
    try:
        return load_json(unpack_text(packed))
    except ValueError as error:
        raise LedgerError(f"a record of trajectory {trajectory_id} in the ledger is damaged: {error}") from error
