"""`TrainableModel`: the model of an agent, as user code holds it. Calls go through a backend; nothing is computed here."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import ValidationError

from ..config import AdapterConfig, CheckpointPolicy, OptimizerConfig, SftConfig, TrainConfig
from ..errors import ConfigError, InvalidRequest, ServerUnavailable
from ..records import NAME_PATTERN, Scenario, TrainResult, Trajectory, TrajectoryGroup
from ..wire import CheckpointInfo, Demonstration, GrpoJob, ModelInfo, RegisterModel, RewardedTrajectory, SftJob
from .api import ControlApi
from .backends import Backend
from .clients import async_openai, sync_openai
from .following import follow
from .progress import Progress, progress_of
from .scope import TrajectoryScope
from .transport import Transport
from .values import as_scenario

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from .evaluate import Evaluation, RewardFunction
    from .gather import Rollout
    from .sync import SyncModel

OnBusy = Literal["queue", "refuse"]
Config = TypeVar("Config", bound=OptimizerConfig)


class TrainableModel:
    """A policy `project/name`: a base model with a LoRA adapter that train jobs move.

    Register it with a backend first. All methods may be called from any task of any event loop.
    """

    def __init__(
        self,
        project: str,
        name: str,
        base_model: str,
        adapter: AdapterConfig | None = None,
        checkpoints: CheckpointPolicy | None = None,
        seed: int = 0,
        *,
        fork_from: str | None = None,
    ) -> None:
        """`fork_from`: `project/name@step` of another policy of the same server to start from (see `fork`)."""
        self.spec = _registration(
            project=project,
            name=name,
            base_model=base_model,
            adapter=adapter or AdapterConfig(),
            checkpoints=checkpoints or CheckpointPolicy(),
            seed=seed,
            fork_from=fork_from,
        )
        self.info: ModelInfo | None = None
        """What the server said at registration: context length, tool format, warnings."""
        self.backend: Backend | None = None
        self._pinned: int | None = None
        self._transport: Transport | None = None
        self._api: ControlApi | None = None

    @classmethod
    async def attach(cls, backend: Backend, policy: str) -> TrainableModel:
        """A policy that the server already has, by name; `project/name@step` calls that version only.

        Raises ConfigError for what is no name, before the backend is asked; UnknownModel, UnknownCheckpoint.
        """
        alias, step = parse_policy(policy)
        transport = await backend.connect()
        api = ControlApi(transport)
        info = await api.model(alias)
        if step is not None:
            await api.checkpoint(alias, step)
        project, _, name = alias.partition("/")
        model = cls(project, name, info.base_model, info.adapter)
        model.info, model.backend, model._transport, model._pinned = info, backend, transport, step
        return model

    def __repr__(self) -> str:
        return f"TrainableModel({self.policy!r}, base_model={self.spec.base_model!r})"

    # Who it is

    @property
    def project(self) -> str:
        return self.spec.project

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def base_model(self) -> str:
        return self.spec.base_model

    @property
    def policy(self) -> str:
        """`project/name`."""
        return f"{self.spec.project}/{self.spec.name}"

    @property
    def inference_name(self) -> str:
        """What to put into a request's `model`: always the newest version, resolved by the server per request (see `attach`)."""
        return self.policy if self._pinned is None else self.inference_name_at(self._pinned)

    def inference_name_at(self, step: int) -> str:
        """The name of one pinned version."""
        return f"{self.policy}@{step}"

    @property
    def server_url(self) -> str:
        return str(self.transport.url).rstrip("/")

    @property
    def base_url(self) -> str:
        """The OpenAI base URL, e.g. `http://127.0.0.1:7474/v1`."""
        return f"{self.server_url}/v1"

    @property
    def api_key(self) -> str:
        """The backend's key; never empty, because OpenAI clients refuse an empty one."""
        return self.transport.api_key or "no-key"

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise ServerUnavailable(f"model {self.policy} has no backend yet; call `await model.register(LocalBackend())` first")
        return self._transport

    @property
    def api(self) -> ControlApi:
        if self._api is None:
            self._api = ControlApi(self.transport)
        return self._api

    async def register(self, backend: Backend) -> ModelInfo:
        """Connect (a LocalBackend starts its server now) and make the policy known. Doing it again is a no-op."""
        transport = await backend.connect()
        self.info = await ControlApi(transport).register(self.spec)
        self.backend, self._transport, self._api = backend, transport, None
        return self.info

    async def get_step(self) -> int:
        """Weight updates so far."""
        self.info = await self.api.model(self.policy)
        return self.info.step

    # Being called

    def openai_client(self, **options: Any) -> AsyncOpenAI:  # Any: handed on to AsyncOpenAI
        """An `openai.AsyncOpenAI` for this model. Inside `model.trajectory()` each call carries the trajectory's id, wherever the
        client was made; it works in any event loop."""
        return async_openai(self, **options)

    def sync_openai_client(self, **options: Any) -> OpenAI:  # Any: handed on to OpenAI
        """An `openai.OpenAI` for this model, attributed the same way; usable from several threads."""
        return sync_openai(self, **options)

    def trajectory(
        self, scenario: Scenario | object = None, *, group_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> TrajectoryScope:
        """`async with model.trajectory(scenario) as t:` records every call made inside. Under `gather` the group is known by itself."""
        return TrajectoryScope(self, as_scenario(scenario), group_id, metadata)

    async def fetch(self, trajectory: str | Trajectory | TrajectoryScope) -> Trajectory:
        """The trajectory as the ledger has it, with completions and tool events."""
        return await self.api.trajectory(trajectory if isinstance(trajectory, str) else trajectory.id)

    # Learning

    async def train(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        on_busy: OnBusy = "queue",
        progress: bool | Progress = True,
        idempotency_key: str | None = None,
        **options: Any,  # Any: fields of TrainConfig, checked by it
    ) -> TrainResult:
        """One GRPO job; returns when it has ended. `options` override fields of `config`.

        The result says whether weights moved (`status`) and what became of every trajectory (`fates`). A failed job
        raises TrainJobFailed. A lost answer never trains twice: each call has its own idempotency key.
        """
        job = GrpoJob(policy=self.policy, groups=rewarded(groups), config=configured(config or TrainConfig(), options), on_busy=on_busy)
        return await self.run_job(job, idempotency_key, progress)

    async def train_sft(
        self,
        examples: Iterable[Demonstration | Mapping[str, Any] | Trajectory | TrajectoryScope],
        config: SftConfig | None = None,
        *,
        on_busy: OnBusy = "queue",
        progress: bool | Progress = True,
        idempotency_key: str | None = None,
        **options: Any,  # Any: fields of SftConfig, checked by it
    ) -> TrainResult:
        """Supervised steps on demonstrations (`{"messages": …, "tools": …}`) and on the sampled turns of recorded trajectories."""
        demonstrations, trajectories = _examples(examples)
        settings = configured(config or SftConfig(), options)
        job = SftJob(policy=self.policy, demonstrations=demonstrations, trajectories=trajectories, config=settings, on_busy=on_busy)
        return await self.run_job(job, idempotency_key, progress)

    async def run_job(self, job: GrpoJob | SftJob, idempotency_key: str | None = None, progress: bool | Progress = True) -> TrainResult:
        """Submit a job, or find the earlier one with the same key, and wait for its end."""
        display = progress_of(progress)
        display.begin("training" if job.kind == "grpo" else "supervised training", 0)
        try:
            submitted = await self.api.submit(job, idempotency_key or f"train-{uuid.uuid4().hex}")
            return await follow(self.api, submitted, display)
        finally:
            display.end()

    async def evaluate(
        self,
        rollout: Rollout,
        scenarios: Sequence[Scenario | object],
        *,
        repeats: int = 1,
        reward: RewardFunction | None = None,
        concurrency: int = 32,
        deadline: float | None = 600.0,
        max_failures: int | float = 0.5,
        seed: int = 0,
        progress: bool | Progress = True,
    ) -> Evaluation:
        """Mean reward over scenarios with a 95 % interval; nothing is trained. See `core.client.evaluate`."""
        from .evaluate import evaluate

        return await evaluate(
            rollout,
            scenarios,
            policy=self.policy,
            repeats=repeats,
            reward=reward,
            concurrency=concurrency,
            deadline=deadline,
            max_failures=max_failures,
            seed=seed,
            progress=progress,
        )

    # Checkpoints

    async def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Oldest first."""
        return tuple(sorted(await self.api.checkpoints(self.policy), key=lambda checkpoint: checkpoint.step))

    async def checkpoint(self, step: int) -> CheckpointInfo:
        return await self.api.checkpoint(self.policy, step)

    async def pin_checkpoint(self, step: int, pinned: bool = True) -> None:
        """A pinned checkpoint is never retired."""
        await self.api.pin_checkpoint(self.policy, step, pinned)

    async def delete_checkpoint(self, step: int) -> None:
        await self.api.delete_checkpoint(self.policy, step)

    async def fork(self, name: str, step: int | None = None) -> TrainableModel:
        """A new policy of the same project that starts from this one's weights (at `step`, else the newest), registered and ready."""
        if self.backend is None:
            raise ServerUnavailable(f"model {self.policy} has no backend yet; register it before forking it")
        at = await self.get_step() if step is None else step
        spec = self.spec
        source = self.inference_name_at(at)
        child = TrainableModel(spec.project, name, spec.base_model, spec.adapter, spec.checkpoints, spec.seed, fork_from=source)
        await child.register(self.backend)
        return child

    @cached_property
    def sync(self) -> SyncModel:
        """The same methods for code without `await`; works in plain scripts and in notebooks."""
        from .sync import SyncModel

        return SyncModel(self)


def parse_policy(policy: str) -> tuple[str, int | None]:
    """`project/name` and the step of `project/name@step`, if there is one. Raises ConfigError."""
    alias, at, step = policy.partition("@")
    parts = alias.split("/")
    if len(parts) != 2 or not all(re.fullmatch(NAME_PATTERN, part) for part in parts) or (at and not re.fullmatch("[0-9]{1,9}", step)):
        raise ConfigError(f"a policy is named project/name or project/name@step, got {policy!r}", param="policy")
    return alias, int(step) if at else None


def rewarded(groups: Iterable[TrajectoryGroup]) -> tuple[tuple[RewardedTrajectory, ...], ...]:
    """The groups as a train job names them. Groups in which every rollout failed are left out; they are in `group.failures`."""
    body: list[tuple[RewardedTrajectory, ...]] = []
    for index, group in enumerate(groups):
        if group.trajectories:
            body.append(
                tuple(RewardedTrajectory(id=t.id, reward=t.reward, completion_rewards=t.completion_rewards) for t in group.trajectories)
            )
        elif not group.failures:
            raise InvalidRequest(f"group {index} has no trajectories", param="groups")
    if not body:
        raise InvalidRequest("there is nothing to train on: no group has a trajectory", param="groups")
    return tuple(body)


def configured(config: Config, options: Mapping[str, Any]) -> Config:
    """`config` with some fields replaced; ConfigError names a wrong one."""
    if not options:
        return config
    try:
        return type(config).model_validate({**config.model_dump(), **options})
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"train option {where!r}: {first['msg']}, got {first['input']!r}", param=where) from cause


def _registration(**fields: Any) -> RegisterModel:  # Any: checked by RegisterModel
    try:
        return RegisterModel(**fields)
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where} of the model: {first['msg']}, got {first['input']!r}", param=where) from cause


def _examples(
    examples: Iterable[Demonstration | Mapping[str, Any] | Trajectory | TrajectoryScope],
) -> tuple[tuple[Demonstration, ...], tuple[str, ...]]:
    demonstrations: list[Demonstration] = []
    trajectories: list[str] = []
    for index, example in enumerate(examples):
        if isinstance(example, Trajectory | TrajectoryScope):
            trajectories.append(example.id)
            continue
        try:
            demonstrations.append(Demonstration.model_validate(example))
        except ValidationError as cause:
            first = cause.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the example"
            raise InvalidRequest(f"example {index}: {where}: {first['msg']}", param="examples") from cause
    if not demonstrations and not trajectories:
        raise InvalidRequest("there is nothing to learn from: no demonstration and no trajectory was given", param="examples")
    return tuple(demonstrations), tuple(trajectories)
