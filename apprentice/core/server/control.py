"""The `/api` routes: models, trajectories, train jobs, checkpoints. Bodies and answers are those of `core/wire.py`.

Routes check the form and call the registry and the ledger; they decide nothing. Ledger calls are short and run in threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Header, Path, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ..errors import InvalidRequest, UnknownModel
from ..records import NAME_PATTERN, ToolEvent, Trajectory, TrajectoryStatus, new_id
from ..wire import (
    CheckpointInfo,
    FailTrajectory,
    FinishTrajectory,
    ModelInfo,
    OpenTrajectory,
    PinCheckpoint,
    RegisterModel,
    RewardUpdate,
    TrainEvent,
    TrainJob,
    TrainRequest,
)
from .http_errors import documented
from .json_body import JsonRoute
from .limits import Limits
from .registry_protocol import Registry

if TYPE_CHECKING:
    from .ledger import Ledger

NameInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
Step = Annotated[int, Path(ge=0, lt=2**31)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200, pattern=r"^[!-~]+$")]


def control_router(registry: Registry, ledger: Ledger, limits: Limits, forget: Callable[[str], None]) -> APIRouter:
    """`/api/…`. `forget(trajectory_id)` is called when a trajectory ends, so that the gateway takes no more calls for it."""
    router = APIRouter()
    router.include_router(_models(registry))
    router.include_router(_trajectories(registry, ledger, forget))
    router.include_router(_train_jobs(registry, limits))
    router.include_router(_checkpoints(registry))
    return router


def _routes(tag: str) -> APIRouter:
    """The prefix stands here, because a route knows only that of its own router, and metrics name requests by the route."""
    return APIRouter(prefix="/api", route_class=JsonRoute, tags=[tag])


def _models(registry: Registry) -> APIRouter:
    routes = _routes("Models")

    @routes.post("/models", responses=documented(404, 409, 413, 503))
    async def register(body: RegisterModel) -> ModelInfo:
        """Make a policy trainable. The same body again changes nothing; another one for the same policy is refused."""
        return await registry.register(body)

    @routes.get("/models", responses=documented())
    async def models() -> list[ModelInfo]:
        return list(registry.models())

    @routes.get("/models/{project}/{name}", responses=documented(404))
    async def model(project: NameInPath, name: NameInPath) -> ModelInfo:
        return await policy_info(registry, f"{project}/{name}")

    return routes


async def policy_info(registry: Registry, policy: str) -> ModelInfo:
    """The registered policy of this name, loaded if it is not in memory. `UnknownModel` if there is none."""
    known = {info.policy: info for info in registry.models()}
    if policy not in known:
        await registry.resolve(policy)
        known = {info.policy: info for info in registry.models()}
    if policy not in known:
        raise UnknownModel(f"{policy!r} is not the name of a policy; a policy is called project/name, without a step", param="policy")
    return known[policy]


def _trajectories(registry: Registry, ledger: Ledger, forget: Callable[[str], None]) -> APIRouter:
    routes = _routes("Trajectories")

    @routes.post("/trajectories", status_code=201, responses=documented(404, 409, 413, 503, 507))
    async def open_trajectory(body: OpenTrajectory) -> Trajectory:
        """Open a trajectory. The same body again changes nothing; an id that is taken by another one is refused."""
        await policy_info(registry, body.policy)
        chosen = body.model_dump(exclude={"id"})
        trajectory = Trajectory(id=body.id or new_id("trj"), **chosen)
        return await run_in_threadpool(ledger.open_trajectory, trajectory)

    @routes.get("/trajectories", responses=documented(404))
    async def trajectories(
        policy: Annotated[str | None, Query(max_length=300)] = None,
        status: TrajectoryStatus | None = None,
        group_id: Annotated[str | None, Query(max_length=300)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None,
    ) -> list[Trajectory]:
        """Without completions, newest first; the next page comes after the last id of this one."""
        found = await run_in_threadpool(
            lambda: ledger.trajectories(policy=policy, status=status, group_id=group_id, limit=limit, after=after)
        )
        return list(found)

    @routes.get("/trajectories/{trajectory_id}", response_model=Trajectory, responses=documented(404))
    async def trajectory(trajectory_id: NameInPath, tokens: bool = True) -> Response:
        """With completions and tool events. `tokens=false` leaves the completions out."""
        found = await run_in_threadpool(lambda: ledger.trajectory(trajectory_id, tokens=tokens))
        return Response(await run_in_threadpool(found.model_dump_json), media_type="application/json")

    @routes.post("/trajectories/{trajectory_id}/reward", status_code=204, responses=documented(404, 413, 503, 507))
    async def reward(trajectory_id: NameInPath, body: RewardUpdate) -> None:
        """A reward, metrics or metadata; the last one counts, all are kept."""
        await run_in_threadpool(ledger.update_trajectory, trajectory_id, body)

    @routes.post("/trajectories/{trajectory_id}/finish", status_code=204, responses=documented(404, 409, 413, 503, 507))
    async def finish(trajectory_id: NameInPath, body: FinishTrajectory) -> None:
        """The end: no call is taken after it. A reward may still be given."""
        forget(trajectory_id)
        await run_in_threadpool(ledger.finish_trajectory, trajectory_id, body)
        forget(trajectory_id)

    @routes.post("/trajectories/{trajectory_id}/fail", status_code=204, responses=documented(404, 409, 413, 503, 507))
    async def fail(trajectory_id: NameInPath, body: FailTrajectory) -> None:
        """The end of a rollout that failed. It has no reward unless one is given."""
        await run_in_threadpool(ledger.fail_trajectory, trajectory_id, body)
        forget(trajectory_id)

    @routes.post("/trajectories/{trajectory_id}/tool-events", status_code=204, responses=documented(404, 409, 413, 503, 507))
    async def tool_event(trajectory_id: NameInPath, body: ToolEvent) -> None:
        if body.trajectory_id != trajectory_id:
            raise InvalidRequest(f"the path names trajectory {trajectory_id} and the body {body.trajectory_id}", param="trajectory_id")
        await run_in_threadpool(ledger.append_tool_event, body)

    return routes


def _train_jobs(registry: Registry, limits: Limits) -> APIRouter:
    routes = _routes("Train jobs")

    @routes.post("/train-jobs", status_code=202, responses=documented(404, 409, 413, 503, 507))
    async def submit(body: TrainRequest, idempotency_key: IdempotencyKey = None) -> TrainJob:
        """Start or queue a job. The same `Idempotency-Key` with the same body gives the same job."""
        return await registry.jobs.submit(body, idempotency_key)

    @routes.get("/train-jobs", responses=documented())
    async def jobs() -> list[TrainJob]:
        """Newest first."""
        return list(await run_in_threadpool(registry.jobs.jobs))

    @routes.get("/train-jobs/{job_id}", responses=documented(404))
    async def job(job_id: NameInPath) -> TrainJob:
        return await run_in_threadpool(registry.jobs.job, job_id)

    @routes.get(
        "/train-jobs/{job_id}/events",
        response_class=EventSourceResponse,
        responses={**documented(404), 200: {"description": "Events with `id: seq` and `data:` a TrainEvent; ends with the job."}},
    )
    async def events(
        job_id: NameInPath,
        request: Request,
        after: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> EventSourceResponse:
        """Server-sent events from the start, or from after `after` (or the header `Last-Event-ID`) on."""
        await run_in_threadpool(registry.jobs.job, job_id)
        start = after if after is not None else _event_number(last_event_id)
        return EventSourceResponse(_server_sent(registry.jobs.events(job_id, start)), ping=limits.heartbeat_seconds)  # pyright: ignore[reportArgumentType]

    return routes


def _event_number(last_event_id: str | None) -> int:
    if last_event_id is None:
        return 0
    if last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19:
        return int(last_event_id)
    raise InvalidRequest(f"the header Last-Event-ID must be the number of an event, but {last_event_id!r} came", param="last-event-id")


async def _server_sent(events: AsyncIterator[TrainEvent]) -> AsyncIterator[ServerSentEvent]:
    async for event in events:
        yield ServerSentEvent(event.model_dump_json(), event=event.kind, id=str(event.seq), sep="\n")


def _checkpoints(registry: Registry) -> APIRouter:
    routes = _routes("Checkpoints")
    path = "/checkpoints/{project}/{name}/{step}"

    @routes.get("/checkpoints", responses=documented(404))
    async def checkpoints(policy: Annotated[str | None, Query(max_length=300)] = None) -> list[CheckpointInfo]:
        """Of one policy, or of all."""
        return list(await run_in_threadpool(registry.checkpoints.list, policy))

    @routes.get(path, responses=documented(404))
    async def checkpoint(project: NameInPath, name: NameInPath, step: Step) -> CheckpointInfo:
        return await run_in_threadpool(registry.checkpoints.get, f"{project}/{name}", step)

    @routes.post(f"{path}/pin", responses=documented(404, 413, 503))
    async def pin(project: NameInPath, name: NameInPath, step: Step, body: PinCheckpoint) -> CheckpointInfo:
        """A pinned checkpoint is never deleted by retention."""
        return await run_in_threadpool(registry.checkpoints.pin, f"{project}/{name}", step, body.pinned)

    @routes.delete(path, status_code=204, responses=documented(404, 409, 503))
    async def delete(project: NameInPath, name: NameInPath, step: Step) -> None:
        """Neither a pinned checkpoint nor the latest one can be deleted."""
        await run_in_threadpool(registry.checkpoints.delete, f"{project}/{name}", step)

    return routes
