"""One rollout as user code sees it: `async with model.trajectory(scenario) as t`.

While a scope is entered it is *ambient*: every call of an Apprentice client made inside (this task, and tasks and
`asyncio.to_thread` calls started by it) carries its trajectory id. A scope ends as finished, or as failed with the
exception's sentence; a failed rollout has no reward, which is not a zero.

This module must not know which agent framework makes the calls, nor how groups are gathered: whoever starts rollouts
leaves an `Assignment` (which group, which ids) in the context, and the scope takes its ids from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from pydantic import JsonValue

from ..errors import ApprenticeError, Conflict, InfrastructureError, InvalidRequest, TrajectoryStateError, UnknownTrajectory
from ..records import JsonObject, Scenario, ToolEvent, Trajectory, TrajectoryStatus, new_id
from ..wire import FailTrajectory, FinishTrajectory, OpenTrajectory, RewardUpdate
from .api import checked_name
from .recording import ToolRecording
from .values import Numbers, finite, is_infrastructure, json_object, sentence

if TYPE_CHECKING:
    from types import TracebackType

    from .api import ControlApi

TRAJECTORY_HEADER = "x-apprentice-trajectory"
CLOSE_SECONDS = 10.0
"""How long a cancelled rollout may take to tell the server."""

LATE_SECONDS = (0.0, 0.05, 0.2)
"""Pauses after which a cancelled opening is looked for on the server."""

INTERRUPTED = "interrupted: "
"""Begins the error of a trajectory whose rollout ended for no fault of its own: a resumed run tries it again."""


@dataclass(slots=True)
class Assignment:
    """What a rollout was started for. The first scope opened in it takes `trajectory_id`, further ones add `.2`, `.3`, …"""

    group_id: str | None = None
    trajectory_id: str | None = None
    metadata: JsonObject = field(default_factory=dict[str, JsonValue])
    deadline: float | None = None
    timeout: asyncio.Timeout | None = None
    opened: list[TrajectoryScope] = field(default_factory=list["TrajectoryScope"])

    def next_id(self) -> str:
        if self.trajectory_id is None:
            return new_id("trj")
        count = len(self.opened) + 1
        return self.trajectory_id if count == 1 else f"{self.trajectory_id}.{count}"


assignment: ContextVar[Assignment | None] = ContextVar("apprentice_assignment", default=None)
_ambient: ContextVar[tuple[TrajectoryScope, ...]] = ContextVar("apprentice_trajectories", default=())


def current_trajectory(policy: str | None = None) -> TrajectoryScope | None:
    """The innermost trajectory that this code runs inside of (of `policy`, `project/name`, if given), or None."""
    return next((scope for scope in reversed(_ambient.get()) if policy is None or scope.policy == policy), None)


class ScopeOwner(Protocol):
    """What a scope needs from its model."""

    @property
    def policy(self) -> str: ...
    @property
    def server_url(self) -> str: ...
    @property
    def api(self) -> ControlApi: ...


class TrajectoryScope:
    """A trajectory being made. Set `reward` (a finite number) inside the block or after it; `metrics` and `metadata` too.

    `completion_rewards` maps completion ids to rewards of their own. `base_url` and `headers` attribute calls of any
    OpenAI client, in any process, to this trajectory.
    """

    def __init__(self, model: ScopeOwner, scenario: Scenario | None, group_id: str | None, metadata: Mapping[str, Any] | None) -> None:
        task = assignment.get()
        self._model = model
        self.scenario = scenario
        self.group_id = group_id or (task.group_id if task else None)
        self.id: str = checked_name(task.next_id() if task else new_id("trj"))
        self.metadata: JsonObject = {**(task.metadata if task else {}), **(metadata or {})}
        self.metrics = Numbers("metrics")
        self.completion_rewards = Numbers("completion_rewards")
        self.status: TrajectoryStatus | None = None
        """None until entered."""
        self.error: str | None = None
        self._reward: float | None = None
        self._told: tuple[Any, ...] | None = None
        self._unheard: FailTrajectory | None = None
        self._opened_with: JsonObject = {}
        self._task = task
        self.recording = ToolRecording(self.id, self.record_tool)
        """For tool events that nobody awaits; the trajectory's end waits for them."""
        if task:
            task.opened.append(self)

    def __repr__(self) -> str:
        return f"TrajectoryScope(id={self.id!r}, status={self.status.value if self.status else 'new'!r}, reward={self._reward!r})"

    @property
    def policy(self) -> str:
        return self._model.policy

    @property
    def reward(self) -> float | None:
        return self._reward

    @reward.setter
    def reward(self, value: SupportsFloat | None) -> None:
        self._reward = None if value is None else finite(value, "reward")

    @property
    def base_url(self) -> str:
        """`OPENAI_BASE_URL` for clients that cannot send a header."""
        return f"{self._model.server_url}/t/{self.id}/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {TRAJECTORY_HEADER: self.id}

    def record(self) -> Trajectory:
        """The trajectory as a record, without its completions (see `TrainableModel.fetch`)."""
        return Trajectory(
            id=self.id,
            policy=self.policy,
            scenario_id=self.scenario.id if self.scenario else None,
            group_id=self.group_id,
            status=self.status or TrajectoryStatus.open,
            error=self.error,
            reward=self._reward,
            completion_rewards=dict(self.completion_rewards),
            metrics=dict(self.metrics),
            metadata=self.metadata,
        )

    async def __aenter__(self) -> TrajectoryScope:
        await self.open()
        self.become_ambient()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave_ambient()
        await self.close(error)

    def become_ambient(self) -> None:
        _ambient.set((*_ambient.get(), self))

    def leave_ambient(self) -> None:
        # Not a token reset: the block may be left in another context than it was entered in (generators, the sync facade).
        _ambient.set(tuple(scope for scope in _ambient.get() if scope is not self))

    async def open(self) -> None:
        """Record the trajectory as open; TrajectoryStateError on a second use."""
        if self.status is not None:
            raise TrajectoryStateError(f"trajectory {self.id} was entered before; make a new one with model.trajectory() for each rollout")
        scenario_id = self.scenario.id if self.scenario else None
        self._opened_with = json_object(self.metadata, "metadata")
        body = OpenTrajectory(id=self.id, policy=self.policy, scenario_id=scenario_id, group_id=self.group_id, metadata=self._opened_with)
        try:
            await self._model.api.open_trajectory(body)
        except (InfrastructureError, asyncio.CancelledError) as error:  # the server may have opened it all the same
            self._unheard = FailTrajectory(error=self._sentence(error))
            if isinstance(error, asyncio.CancelledError):
                await self._take_back_opening()
            raise
        self.status = TrajectoryStatus.open

    async def _take_back_opening(self) -> None:
        """Fail what a cancelled request has opened or is about to open: it may arrive after the one that follows it here."""
        with contextlib.suppress(ApprenticeError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for wait in LATE_SECONDS:
                    await asyncio.sleep(wait)
                    if await self.tell_again():
                        return

    async def close(self, error: BaseException | None = None) -> None:
        """Finish, or fail with `error`'s sentence. A failed end is added to `error` as a note, never raised over it."""
        if self.status is not TrajectoryStatus.open:
            return
        try:
            if error is None or isinstance(error, Exception | asyncio.CancelledError):
                await self.recording.drain()
            if error is None:
                await self._finish()
        except asyncio.CancelledError as cancelled:  # just as it was ending; if the server has finished it, it stays so
            await self._fail(cancelled)
            raise
        if isinstance(error, Exception | asyncio.CancelledError):
            await self._fail(error)

    async def _finish(self) -> None:
        told = self._annotations()
        await self._model.api.finish(self.id, self._update(FinishTrajectory))
        self._told, self.status = told, TrajectoryStatus.finished

    async def _fail(self, error: BaseException) -> None:
        self.status, self.error = TrajectoryStatus.failed, self._sentence(error)
        self._unheard = FailTrajectory(error=self.error)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._model.api.fail(self.id, self._unheard)
            self._unheard = None
        except (ApprenticeError, TimeoutError) as second:
            error.add_note(f"trajectory {self.id} could not be marked as failed on the server: {sentence(second)}")

    @property
    def unheard(self) -> bool:
        """Whether it may be open on the server though it has ended here, because the server did not answer."""
        return self._unheard is not None

    async def tell_again(self) -> bool:
        """Fail it on the server, if that did not hear its end. False if the server does not know it."""
        if self._unheard is not None:
            try:
                await self._model.api.fail(self.id, self._unheard)
            except UnknownTrajectory:
                return False
            except Conflict:  # it has ended there
                pass
            self._unheard = None
        return True

    def _sentence(self, error: BaseException) -> str:
        if isinstance(error, asyncio.CancelledError):
            if self._task and self._task.timeout and self._task.timeout.expired():
                return f"the rollout was stopped at its deadline of {self._task.deadline:g} s"
            return f"{INTERRUPTED}the rollout was cancelled"
        return f"{INTERRUPTED if is_infrastructure(error) else ''}{sentence(error)}"

    async def record_tool(self, event: ToolEvent) -> None:
        """Put an executed tool call into this trajectory, between the model calls before and after it."""
        if event.trajectory_id != self.id:
            raise InvalidRequest(f"the tool event belongs to trajectory {event.trajectory_id}, not to {self.id}", param="trajectory_id")
        await self._model.api.tool_event(event)

    async def settle(self) -> None:
        """Send a reward, metrics or metadata that were set after the block ended."""
        if self.status is TrajectoryStatus.finished and self._told != self._annotations():
            told = self._annotations()
            await self._model.api.reward(self.id, self._update(RewardUpdate))
            self._told = told

    def _annotations(self) -> tuple[Any, ...]:
        return self._reward, dict(self.metrics), dict(self.completion_rewards), dict(self.metadata)

    def _update(self, kind: type[RewardUpdate]) -> Any:  # Any: the body of the class asked for
        return kind(
            reward=self._reward,
            completion_rewards=dict(self.completion_rewards),
            metrics=dict(self.metrics),
            metadata={
                key: value
                for key, value in json_object(self.metadata, "metadata").items()
                if key not in self._opened_with or self._opened_with[key] != value
            },
        )
