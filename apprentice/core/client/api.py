"""The control API (`/api/…`), one typed method per endpoint: the only module of the client that knows its paths."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from ..errors import InvalidRequest, ServerUnavailable
from ..records import NAME_PATTERN, Record, ToolEvent, Trajectory, TrajectoryStatus
from ..wire import (
    CheckpointInfo,
    FailTrajectory,
    FinishTrajectory,
    GrpoJob,
    Health,
    ModelInfo,
    OpenTrajectory,
    PinCheckpoint,
    RegisterModel,
    RewardUpdate,
    SftJob,
    TrainEvent,
    TrainJob,
)
from .transport import Transport

T = TypeVar("T")

HEALTH = TypeAdapter(Health)
MODEL = TypeAdapter(ModelInfo)
TRAJECTORY = TypeAdapter(Trajectory)
TRAJECTORIES = TypeAdapter(tuple[Trajectory, ...])
JOB = TypeAdapter(TrainJob)
JOBS = TypeAdapter(tuple[TrainJob, ...])
CHECKPOINT = TypeAdapter(CheckpointInfo)
CHECKPOINTS = TypeAdapter(tuple[CheckpointInfo, ...])

PAGE = 500
"""Trajectories per page of a listing."""
REGISTER_SECONDS = 1800.0
"""A base model may have to be downloaded and loaded first."""


def checked_name(value: str) -> str:
    """A name that is safe in a path, or InvalidRequest."""
    if not re.fullmatch(NAME_PATTERN, value):
        raise InvalidRequest(f"an id has letters, digits, '.', '_' and '-', at most 128, got {value!r}", param="id")
    return value


class ControlApi:
    """Typed calls to one server. Every method is safe to repeat, so all are retried on a lost answer."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    async def health(self) -> Health:
        return await self._get(HEALTH, "/health")

    async def register(self, body: RegisterModel) -> ModelInfo:
        return await self._post(MODEL, "/api/models", body, seconds=REGISTER_SECONDS)

    async def model(self, policy: str) -> ModelInfo:
        return await self._get(MODEL, f"/api/models/{policy}")

    async def open_trajectory(self, body: OpenTrajectory) -> None:
        """The caller chooses the id, so that a repeated request opens nothing twice."""
        await self._send("/api/trajectories", body)

    async def tool_event(self, event: ToolEvent) -> None:
        """Recorded once, however often it is sent."""
        await self._send(f"/api/trajectories/{checked_name(event.trajectory_id)}/tool-events", event)

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        """With its completions and tool events."""
        return await self._get(TRAJECTORY, f"/api/trajectories/{checked_name(trajectory_id)}")

    async def trajectories(
        self, *, policy: str | None = None, group_id: str | None = None, status: TrajectoryStatus | None = None
    ) -> list[Trajectory]:
        """Without completions, oldest first."""
        given = {"policy": policy, "group_id": group_id, "status": status.value if status else None}
        params: dict[str, str | int] = {key: value for key, value in given.items() if value is not None}
        found: list[Trajectory] = []
        while True:
            page = await self._get(TRAJECTORIES, "/api/trajectories", {**params, "limit": PAGE})
            found.extend(page)
            if len(page) < PAGE:
                return found[::-1]  # pages come newest first
            params["after"] = page[-1].id

    async def reward(self, trajectory_id: str, body: RewardUpdate) -> None:
        await self._send(f"/api/trajectories/{trajectory_id}/reward", body)

    async def finish(self, trajectory_id: str, body: FinishTrajectory) -> None:
        await self._send(f"/api/trajectories/{trajectory_id}/finish", body)

    async def fail(self, trajectory_id: str, body: FailTrajectory) -> None:
        await self._send(f"/api/trajectories/{trajectory_id}/fail", body)

    async def submit(self, body: GrpoJob | SftJob, idempotency_key: str) -> TrainJob:
        if not re.fullmatch("[!-~]{1,200}", idempotency_key):
            raise InvalidRequest(
                f"an idempotency key has 1 to 200 printable ASCII characters and no spaces, got {idempotency_key!r}",
                param="idempotency_key",
            )
        return await self._post(JOB, "/api/train-jobs", body, headers={"idempotency-key": idempotency_key})

    async def job(self, job_id: str) -> TrainJob:
        return await self._get(JOB, f"/api/train-jobs/{job_id}")

    async def jobs(self) -> tuple[TrainJob, ...]:
        """Newest first."""
        return await self._get(JOBS, "/api/train-jobs")

    async def events(self, job_id: str, after: int, silence: float) -> AsyncGenerator[TrainEvent]:
        """One stream of a job's events with `seq > after`; ends with the job, or raises ServerUnavailable."""
        async for line in self.transport.lines(f"/api/train-jobs/{job_id}/events", params={"after": after}, silence=silence):
            if line.startswith("data:"):
                yield TrainEvent.model_validate_json(line.removeprefix("data:").strip())

    async def checkpoints(self, policy: str) -> tuple[CheckpointInfo, ...]:
        return await self._get(CHECKPOINTS, "/api/checkpoints", {"policy": policy})

    async def checkpoint(self, policy: str, step: int) -> CheckpointInfo:
        return await self._get(CHECKPOINT, f"/api/checkpoints/{policy}/{step}")

    async def pin_checkpoint(self, policy: str, step: int, pinned: bool) -> None:
        await self._send(f"/api/checkpoints/{policy}/{step}/pin", PinCheckpoint(pinned=pinned))

    async def delete_checkpoint(self, policy: str, step: int) -> None:
        await self.transport.request("DELETE", f"/api/checkpoints/{policy}/{step}")

    async def _get(self, shape: TypeAdapter[T], path: str, params: Mapping[str, str | int] | None = None) -> T:
        return self._parse(shape, path, await self.transport.request("GET", path, params=params))

    async def _post(
        self, shape: TypeAdapter[T], path: str, body: Record, *, headers: Mapping[str, str] | None = None, seconds: float = 60.0
    ) -> T:
        return self._parse(shape, path, await self._send(path, body, headers=headers, seconds=seconds))

    async def _send(self, path: str, body: Record, *, headers: Mapping[str, str] | None = None, seconds: float = 60.0) -> bytes:
        try:
            content = body.model_dump_json().encode()
        except (PydanticSerializationError, UnicodeEncodeError) as cause:
            raise InvalidRequest(f"the body of {path} cannot be written as JSON: {cause}") from cause
        return await self.transport.request("POST", path, content=content, headers=headers, seconds=seconds)

    def _parse(self, shape: TypeAdapter[T], path: str, answer: bytes) -> T:
        try:
            return shape.validate_json(answer)
        except ValidationError as cause:
            first = cause.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise ServerUnavailable(
                f"{self.transport.url}{path} answered something else than expected ({where}: {first['msg']}); "
                "server and client may be of different versions of Apprentice"
            ) from cause
