"""Rollouts of an interrupted step, found again in the ledger by their ids `<prefix>-a<attempt>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import TrajectoryStateError
from ..records import Trajectory, TrajectoryStatus
from ..wire import FailTrajectory
from .api import ControlApi
from .gather import GroupPlan, Member
from .scope import INTERRUPTED

ID = re.compile(r"(?P<prefix>.+)-a(?P<attempt>\d+)(?P<further>\.\d+)?")


async def restore(api: ControlApi, plans: Sequence[GroupPlan], *, rewards_needed: bool) -> None:
    """Give each member what an earlier process already made of it.

    Finished: its result. Failed by itself: its failure. Left open, or failed for no fault of its own: the next attempt
    is free to be made. A rollout that opened several trajectories is made again, because which one it returned is not
    recorded; so is one without a reward where rollouts must set it (`rewards_needed`): it may have been about to.
    """
    for plan in plans:
        members = {member.prefix: member for member in plan.members}
        newest: dict[str, list[Trajectory]] = {}
        for trajectory in await api.trajectories(group_id=plan.group_id):
            match = ID.fullmatch(trajectory.id)
            if match is None or (member := members.get(match["prefix"])) is None:
                continue
            attempt = int(match["attempt"])
            if attempt > member.attempt or match["prefix"] not in newest:
                member.attempt, newest[match["prefix"]] = attempt, []
            closed = await _closed(api, trajectory)
            if attempt == member.attempt:
                newest[match["prefix"]].append(closed)
        for prefix, found in newest.items():
            _settle(members[prefix], found, rewards_needed)


async def _closed(api: ControlApi, trajectory: Trajectory) -> Trajectory:
    """The trajectory after an open one was failed; if a late request of the process that is gone ended it first, as it ended."""
    if trajectory.status is not TrajectoryStatus.open:
        return trajectory
    error = f"{INTERRUPTED}the run was stopped while this rollout was going on"
    try:
        await api.fail(trajectory.id, FailTrajectory(error=error))
    except TrajectoryStateError:
        return await api.trajectory(trajectory.id)
    return trajectory.model_copy(update={"status": TrajectoryStatus.failed, "error": error})


def _settle(member: Member, found: list[Trajectory], rewards_needed: bool) -> None:
    last = found[-1]
    if len(found) == 1 and last.status is TrajectoryStatus.finished and not (rewards_needed and last.reward is None):
        member.result = last
    elif last.status is TrajectoryStatus.failed and not (last.error or "").startswith(INTERRUPTED):
        member.failure = last.error or "no reason was recorded"
    else:
        member.attempt += 1
