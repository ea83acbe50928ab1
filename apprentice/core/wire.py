"""Bodies of the control API (`/api/…`), used by the server to validate and by the client to build requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, JsonValue

from .config import AdapterConfig, CheckpointPolicy, SftConfig, TrainConfig
from .records import JsonObject, Name, Record, TrainResult


class RegisterModel(Record):
    """`POST /api/models`. Registering the same policy twice with the same body is a no-op."""

    project: Name
    name: Name
    base_model: Annotated[str, Field(min_length=1, max_length=1024)]
    adapter: AdapterConfig = AdapterConfig()
    checkpoints: CheckpointPolicy = CheckpointPolicy()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    fork_from: str | None = None
    """`project/name@step` of another policy of this server with the same base model: start from its weights."""


class ModelInfo(Record):
    policy: str
    """`project/name`, the alias to call."""
    base_model: str
    step: int
    adapter: AdapterConfig
    context_length: int | None = None
    """This and what follows is known once the policy is in memory: after registration, or its first call after a restart."""
    trainable_parameters: int | None = None
    tool_format: str | None = None
    """How tool calls are written by this model family, e.g. `hermes`."""
    sharing: bool | None = None
    """True: forest training; False: row by row, `warnings` says why."""
    engine: str | None = None
    warnings: tuple[str, ...] = ()


class OpenTrajectory(Record):
    """`POST /api/trajectories`."""

    id: Name | None = None
    policy: str
    scenario_id: str | None = None
    group_id: str | None = None
    metadata: JsonObject = Field(default_factory=dict)


class RewardUpdate(Record):
    """`POST /api/trajectories/{id}/reward`. May be sent while open or after finishing; the last one counts, all are kept."""

    reward: FiniteFloat | None = None
    completion_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    metadata: JsonObject = Field(default_factory=dict)


class FinishTrajectory(RewardUpdate):
    """`POST /api/trajectories/{id}/finish`: an update and the end."""


class FailTrajectory(Record):
    """`POST /api/trajectories/{id}/fail`."""

    error: Annotated[str, Field(min_length=1)]
    reward: FiniteFloat | None = None


class RewardedTrajectory(Record):
    id: Name
    reward: FiniteFloat | None = None
    """None: the reward recorded in the ledger counts."""
    completion_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)


class Demonstration(Record):
    """A conversation to imitate: every assistant message is a target unless it has `"train": false`."""

    messages: tuple[JsonObject, ...]
    tools: tuple[JsonObject, ...] = ()


class GrpoJob(Record):
    kind: Literal["grpo"] = "grpo"
    policy: str
    groups: Annotated[tuple[tuple[RewardedTrajectory, ...], ...], Field(min_length=1)]
    config: TrainConfig = TrainConfig()
    on_busy: Literal["queue", "refuse"] = "queue"


class SftJob(Record):
    """Trains on demonstrations, and on the sampled turns of recorded trajectories."""

    kind: Literal["sft"] = "sft"
    policy: str
    demonstrations: tuple[Demonstration, ...] = ()
    trajectories: tuple[Name, ...] = ()
    config: SftConfig = SftConfig()
    on_busy: Literal["queue", "refuse"] = "queue"


TrainRequest = Annotated[GrpoJob | SftJob, Field(discriminator="kind")]

JobState = Literal["queued", "running", "trained", "no_update", "failed"]
JobPhase = Literal["queued", "loading", "forward_backward", "checkpoint", "sync", "canary", "done"]


class TrainJob(Record):
    """`POST /api/train-jobs` → 202; `GET /api/train-jobs/{id}`."""

    id: str
    policy: str
    kind: Literal["grpo", "sft"]
    state: JobState
    phase: JobPhase
    created_at: float
    updated_at: float
    """Moves at least every few seconds while running: the heartbeat."""
    result: TrainResult | None = None
    """Set once `state` is trained, no_update or failed."""


class TrainEvent(Record):
    """One server-sent event of `GET /api/train-jobs/{id}/events`; the last one has `kind="end"`."""

    seq: int
    job_id: str
    kind: Literal["phase", "progress", "end"]
    at: float
    data: dict[str, JsonValue] = Field(default_factory=dict)


class CheckpointInfo(Record):
    policy: str
    step: int
    path: str
    """The adapter's folder, in plain PEFT format."""
    created_at: float
    metrics: dict[str, float] = Field(default_factory=dict)
    pinned: bool = False
    latest: bool = False


class PinCheckpoint(Record):
    pinned: bool


class Health(Record):
    status: Literal["ready"]
    """A server answers only once it is ready."""
    version: str
    engine: str
    device: str
    dtype: str
    kv_cache_tokens: int
    kv_cache_bytes: int
    queued: int
    running: int
    unattributed_calls: int
    models: tuple[str, ...] = ()
