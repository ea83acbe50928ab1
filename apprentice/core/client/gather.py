"""Many rollouts at once, as groups: bounded, cancelled cleanly, with failures counted and never turned into zero rewards.

`gather` makes a plan (which scenario, how often) and runs it; the training loop makes plans of its own, with known ids
and with rollouts that an interrupted run has already done. What a rollout does inside is not known here.

Two kinds of failure are kept apart. An infrastructure error is tried again, with back-off, in a fresh trajectory. Any
other exception of the rollout is final: the trajectory is failed with its sentence, which also stands in
`group.failures`. If too many fail, the rest is cancelled and RunAborted carries the first cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import JsonValue

from ..errors import ApprenticeError, DeadlineExceeded, InvalidRequest, RolloutError, RunAborted
from ..records import JsonObject, Scenario, Trajectory, TrajectoryGroup, TrajectoryStatus, new_id
from .progress import Progress, progress_of
from .scope import CLOSE_SECONDS, Assignment, TrajectoryScope, assignment
from .transport import RetryPolicy
from .values import as_scenarios, is_infrastructure, sentence

Returned: TypeAlias = TrajectoryScope | Trajectory | None
Rollout: TypeAlias = Callable[[Scenario], Awaitable[Returned]]
"""`async def rollout(scenario)`; returns the scope (or Trajectory) that it made."""

HOPELESS = 16
"""So many failures without any success end a run, unless every failure is allowed."""


@dataclass(slots=True)
class Member:
    """One place in a group. `prefix` makes its trajectory ids `<prefix>-a<attempt>`; None: fresh ids."""

    prefix: str | None = None
    attempt: int = 0
    result: Trajectory | None = None
    failure: str | None = None

    def trajectory_id(self) -> str | None:
        return None if self.prefix is None else f"{self.prefix}-a{self.attempt}"


@dataclass(slots=True)
class GroupPlan:
    """One group to make. Members that already have a result or a failure are not run."""

    scenario: Scenario | None
    members: list[Member]
    group_id: str = field(default_factory=lambda: new_id("grp"))
    metadata: JsonObject = field(default_factory=dict[str, JsonValue])

    def group(self) -> TrajectoryGroup:
        """What came of it."""
        return TrajectoryGroup(
            trajectories=tuple(member.result for member in self.members if member.result is not None),
            scenario=self.scenario,
            failures=tuple(member.failure for member in self.members if member.failure is not None),
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True)
class FailureBudget:
    """How many of `total` rollouts may fail: a count (int) or a share (float in [0, 1])."""

    limit: int | float
    total: int

    def __post_init__(self) -> None:
        share = isinstance(self.limit, float)
        if isinstance(self.limit, bool) or not self.limit >= 0 or (share and self.limit > 1):
            raise InvalidRequest(f"max_failures must be a count (int) or a share between 0.0 and 1.0 (float), got {self.limit!r}")

    @property
    def allowed(self) -> int:
        return math.floor(self.limit * self.total + 1e-9) if isinstance(self.limit, float) else self.limit

    def exhausted(self, failures: int, successes: int) -> bool:
        if self.allowed >= self.total:
            return False
        return failures > self.allowed or (not successes and failures >= HOPELESS)


@dataclass(frozen=True, slots=True)
class GatherSettings:
    """`deadline`: seconds for one attempt of one rollout, from the moment it is admitted; None: no limit."""

    concurrency: int = 32
    deadline: float | None = 600.0
    max_failures: int | float = 0.5
    retries: int = 3
    backoff: RetryPolicy = field(default_factory=lambda: RetryPolicy(first_seconds=0.5, longest_seconds=30.0))

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequest(f"concurrency must be at least 1, got {self.concurrency}", param="concurrency")
        if self.deadline is not None and not self.deadline > 0:
            raise InvalidRequest(f"deadline must be a positive number of seconds or None, got {self.deadline}", param="deadline")
        if self.retries < 0:
            raise InvalidRequest(f"retries must not be negative, got {self.retries}", param="retries")


async def gather(
    rollout: Rollout,
    scenarios: Iterable[Scenario | object],
    *,
    group_size: int = 8,
    concurrency: int = 32,
    deadline: float | None = 600.0,
    max_failures: int | float = 0.5,
    retries: int = 3,
    progress: bool | Progress = True,
) -> list[TrajectoryGroup]:
    """Run `rollout(scenario)` `group_size` times for each scenario; one group per scenario, in their order.

    `deadline`: seconds for one attempt, from its admission. `max_failures`: a count (int) or a share (float) of all
    rollouts; beyond it the rest is cancelled and RunAborted raised from the first failure. `retries`: further
    attempts after infrastructure errors; nothing else is tried again.
    """
    if group_size < 1:
        raise InvalidRequest(f"group_size must be at least 1, got {group_size}", param="group_size")
    plans = [GroupPlan(scenario, [Member() for _ in range(group_size)]) for scenario in as_scenarios(scenarios)]
    settings = GatherSettings(concurrency, deadline, max_failures, retries)
    return await run_plans(rollout, plans, settings, progress_of(progress), "rollouts")


async def gather_trajectory_groups(
    groups: Iterable[Iterable[Awaitable[Returned]]],
    *,
    pbar_desc: str = "gather",
    max_exceptions: int | float = 0,
    concurrency: int = 32,
    deadline: float | None = 600.0,
    progress: bool | Progress = True,
) -> list[TrajectoryGroup]:
    """ART's form: groups of coroutines, `[(rollout(model, s) for _ in range(8)) for s in scenarios]`.

    A coroutine runs once, so nothing is tried again; `gather` can.
    """
    plans: list[GroupPlan] = []
    waiting: dict[int, Awaitable[Returned]] = {}
    for group in groups:
        members: list[Member] = []
        for awaitable in group:
            members.append(Member())
            waiting[id(members[-1])] = awaitable
        plans.append(GroupPlan(None, members))
    settings = GatherSettings(concurrency, deadline, max_exceptions, retries=0)
    runner = _Runner(lambda plan, member: waiting.pop(id(member)), settings, plans, progress_of(progress))
    try:
        return await runner.run(pbar_desc)
    finally:
        for awaitable in waiting.values():  # never started: say so to asyncio instead of letting it warn
            if asyncio.iscoroutine(awaitable):
                awaitable.close()


async def run_plans(
    rollout: Rollout, plans: Sequence[GroupPlan], settings: GatherSettings, progress: Progress, what: str
) -> list[TrajectoryGroup]:
    """Fill in every member that has neither result nor failure."""

    def call(plan: GroupPlan, member: Member) -> Awaitable[Returned]:
        assert plan.scenario is not None
        return rollout(plan.scenario)

    return await _Runner(call, settings, plans, progress).run(what)


class _Abort(Exception):
    """Ends the task group; never leaves this module."""


class _Runner:
    """One call of gather."""

    def __init__(
        self,
        call: Callable[[GroupPlan, Member], Awaitable[Returned]],
        settings: GatherSettings,
        plans: Sequence[GroupPlan],
        progress: Progress,
    ) -> None:
        self._call = call
        self._settings = settings
        self._plans = plans
        self._progress = progress
        self._slots = asyncio.Semaphore(settings.concurrency)
        members = [member for plan in plans for member in plan.members]
        self._budget = FailureBudget(settings.max_failures, len(members))
        self._successes = sum(member.result is not None for member in members)
        self._failures = sum(member.failure is not None for member in members)
        self._first_cause: Exception | None = None
        self._unheard: list[TrajectoryScope] = []

    async def run(self, what: str) -> list[TrajectoryGroup]:
        if not self._plans or not self._budget.total:
            raise InvalidRequest("there is nothing to roll out: no scenario was given", param="scenarios")
        self._progress.begin(what, self._budget.total)
        try:
            async with asyncio.TaskGroup() as tasks:
                for plan in self._plans:
                    for member in plan.members:
                        if member.result is None and member.failure is None:
                            tasks.create_task(self._member(plan, member))
                        else:
                            self._show(member)
        except* _Abort:
            pass
        finally:
            self._progress.end()
            await self._tell_again()
        if self._budget.exhausted(self._failures, self._successes):
            raise RunAborted(
                f"{self._failures} of {self._budget.total} rollouts failed ({self._budget.allowed} were allowed); the first cause: "
                f"{sentence(self._first_cause) if self._first_cause else 'recorded by the interrupted run'}"
            ) from self._first_cause
        return [plan.group() for plan in self._plans]

    async def _member(self, plan: GroupPlan, member: Member) -> None:
        async with self._slots:
            if self._budget.exhausted(self._failures, self._successes):
                return  # the task group is about to cancel this one
            try:
                member.result = await self._attempts(plan, member)
            except Exception as error:  # noqa: BLE001  the supervised boundary of user code; the cause is kept
                member.failure = sentence(error)
                self._first_cause = self._first_cause or error
            self._show(member)
            self._successes += member.failure is None
            self._failures += member.failure is not None
            if self._budget.exhausted(self._failures, self._successes):
                raise _Abort

    def _show(self, member: Member) -> None:
        if member.failure is not None:
            self._progress.failed(member.failure)
        elif member.result is not None:
            self._progress.advance(member.result.reward)

    async def _attempts(self, plan: GroupPlan, member: Member) -> Trajectory:
        tries = 0
        while True:
            tries += 1
            try:
                return await self._attempt(plan, member)
            except Exception as error:
                again = is_infrastructure(error) and not isinstance(error, DeadlineExceeded)
                if not again or tries > self._settings.retries:
                    raise
                self._progress.note(f"trying again: {sentence(error)}")
            member.attempt += 1
            await asyncio.sleep(self._settings.backoff.delay(tries))

    async def _attempt(self, plan: GroupPlan, member: Member) -> Trajectory:
        task = Assignment(plan.group_id, member.trajectory_id(), {**plan.metadata}, self._settings.deadline)
        token = assignment.set(task)
        try:
            async with asyncio.timeout(self._settings.deadline) as task.timeout:
                returned = await self._call(plan, member)
                return await self._settled(returned)
        except TimeoutError as cause:
            if task.timeout is not None and task.timeout.expired():
                error = DeadlineExceeded(f"a rollout did not end within its deadline of {self._settings.deadline:g} s")
                await self._abandon(task, error)
                raise error from cause
            await self._abandon(task, cause)
            raise
        except (Exception, asyncio.CancelledError) as error:
            await self._abandon(task, error)
            raise
        finally:
            assignment.reset(token)

    async def _abandon(self, task: Assignment, error: BaseException) -> None:
        """Fail what the rollout opened and did not close."""
        for scope in task.opened:
            await scope.close(error)
            if scope.unheard:
                self._unheard.append(scope)

    async def _tell_again(self) -> None:
        """Fail what a server that did not answer for a while still holds open. If it answers no more, nothing can be done here."""
        with contextlib.suppress(ApprenticeError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for scope in self._unheard:
                    await scope.tell_again()

    @staticmethod
    async def _settled(returned: Returned) -> Trajectory:
        if isinstance(returned, TrajectoryScope):
            await returned.settle()
            trajectory = returned.record()
        elif isinstance(returned, Trajectory):
            trajectory = returned
        else:
            raise RolloutError(
                f"the rollout returned {type(returned).__name__}; it must return the trajectory it made: "
                "`async with model.trajectory(scenario) as t: …` and then `return t`"
            )
        if trajectory.status is TrajectoryStatus.open:
            raise RolloutError(f"the rollout returned trajectory {trajectory.id} while it is open; return it after its `async with` block")
        if trajectory.status is TrajectoryStatus.failed:
            raise RolloutError(f"trajectory {trajectory.id} failed: {trajectory.error or 'no reason given'}")
        return trajectory
