"""The records: what was sampled, what happened, what it was worth. Pure data; no torch, no I/O.

Invariants, which every reader may rely on and every writer must keep:

1. A Completion is one model call exactly as sampled. `prompt_ids` is the context that the engine saw and
   `token_ids` what it drew, end-of-turn token included if it was drawn; they are never re-rendered.
2. `len(logprobs) == len(sampling_logprobs) == len(token_ids)`. `logprobs[i]` is the natural-log probability of
   `token_ids[i]` under the model itself (temperature 1, whole vocabulary); `sampling_logprobs[i]` is the one under
   the distribution really drawn from (temperature and top-p applied). They are equal at temperature 1 and top-p 1.
3. One completion is sampled by one `policy_version` from its first token to its last.
4. Records are immutable. A reward is an annotation: it makes a new Trajectory value around the same completions.
5. A reward is a finite number or absent; absent is not zero.
6. Every record survives `model_validate_json(model_dump_json())` unchanged.
7. A Trajectory is `open` until it is `finished` or `failed`, and never changes state after that.
"""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Pattern of every project, model, trajectory, group and scenario name: safe as a file name and in a URL."""

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
TokenIds = tuple[Annotated[int, Field(ge=0)], ...]
JsonObject = dict[str, JsonValue]


def new_id(kind: str) -> str:
    """A fresh, unique id such as `cmp-9f0c…`; `kind` is a short prefix for the reader's eye."""
    return f"{kind}-{uuid.uuid4().hex}"


class Record(BaseModel):
    """Base of all records: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SamplingParams(Record):
    """How tokens were drawn. `top_p=1, temperature=1` is the model's own distribution; `temperature=0` is greedy."""

    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 512
    seed: int | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0


class Origin(Record):
    """Who made a call. `lineage` maps the index of an assistant message in the request to the completion it came from."""

    agent: str | None = None
    node: str | None = None
    namespace: str | None = None
    source: str | None = None
    attempt: int = 0
    lineage: dict[int, str] = Field(default_factory=dict[int, str])
    extra: JsonObject = Field(default_factory=dict)


class ChatRequest(Record):
    """The part of the request that the model saw, in OpenAI's form."""

    messages: tuple[JsonObject, ...]
    tools: tuple[JsonObject, ...] = ()
    tool_choice: JsonValue = None
    response_format: JsonObject | None = None


class FinishReason(StrEnum):
    stop = "stop"
    length = "length"
    tool_calls = "tool_calls"
    aborted = "aborted"


class BranchReason(StrEnum):
    """Why a completion does not continue the row of the call before it."""

    root = "root"
    continues = "continues"
    sibling = "sibling"
    retry = "retry"
    history_rewritten = "history_rewritten"
    other_agent = "other_agent"
    thinking_stripped = "thinking_stripped"
    truncation = "truncation"


class Completion(Record):
    """One model call as sampled (see the module's invariants).

    `parent` is the completion whose `prompt_ids + token_ids` is the longest recorded prefix of this `prompt_ids`.
    """

    id: str = Field(default_factory=lambda: new_id("cmp"))
    call_id: str = Field(default_factory=lambda: new_id("call"))
    """Shared by the `n` choices of one request."""
    choice: int = 0
    trajectory_id: Name | None = None
    policy: str
    policy_version: int | None = None
    """Weight updates so far; None for the bare base model, which is never trained."""
    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    sampling: SamplingParams
    request: ChatRequest
    message: JsonObject
    finish_reason: FinishReason
    parse_error: str | None = None
    origin: Origin = Field(default_factory=Origin)
    parent: str | None = None
    branch: BranchReason = BranchReason.root
    reward: FiniteFloat | None = None
    created_at: float = Field(default_factory=time.time)
    queued_seconds: float = 0.0
    sampling_seconds: float = 0.0

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if not len(self.token_ids) == len(self.logprobs) == len(self.sampling_logprobs):
            raise ValueError(
                f"token_ids, logprobs and sampling_logprobs must have one length, got "
                f"{len(self.token_ids)}, {len(self.logprobs)} and {len(self.sampling_logprobs)}"
            )
        return self


ToolOutcome = Literal["ok", "tool_error", "reported_failure", "protocol_error", "timeout", "server_lost"]


class ToolEvent(Record):
    """One executed tool call."""

    id: str = Field(default_factory=lambda: new_id("tool"))
    trajectory_id: Name
    tool_call_id: str | None = None
    name: str
    arguments: JsonValue = None
    result: str = ""
    outcome: ToolOutcome = "ok"
    origin: Origin = Field(default_factory=Origin)
    created_at: float = Field(default_factory=time.time)
    seconds: float = 0.0


class Scenario(Record):
    """One task to try. `input` is what the agent is given; `metadata` is for the reward and the report."""

    id: Name = Field(default_factory=lambda: new_id("scn"))
    input: JsonValue
    metadata: JsonObject = Field(default_factory=dict)


class TrajectoryStatus(StrEnum):
    open = "open"
    finished = "finished"
    failed = "failed"


class Trajectory(Record):
    """One rollout: its calls, its tool events, and what it was worth.

    `completions` and `tool_events` may be empty on the client until they are fetched; the ledger has them all.
    """

    id: Name = Field(default_factory=lambda: new_id("trj"))
    policy: str
    scenario_id: str | None = None
    group_id: str | None = None
    status: TrajectoryStatus = TrajectoryStatus.open
    error: str | None = None
    reward: FiniteFloat | None = None
    completion_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    metadata: JsonObject = Field(default_factory=dict)
    completions: tuple[Completion, ...] = ()
    tool_events: tuple[ToolEvent, ...] = ()
    created_at: float = Field(default_factory=time.time)
    finished_at: float | None = None

    def with_reward(self, reward: float, **metrics: float) -> Trajectory:
        """The same trajectory with another reward; given metrics are added. NaN and infinity are refused."""
        data: dict[str, Any] = {**self.__dict__, "reward": reward, "metrics": {**self.metrics, **metrics}}
        return Trajectory.model_validate(data)


class TrajectoryGroup(Record):
    """Trajectories of one scenario, compared with each other. `failures` are rollouts that gave none (never zero rewards)."""

    trajectories: tuple[Trajectory, ...]
    scenario: Scenario | None = None
    failures: tuple[str, ...] = ()
    metadata: JsonObject = Field(default_factory=dict)


class Fate(StrEnum):
    """What a train job did with a trajectory; a closed list."""

    trained = "trained"
    equal_rewards = "equal_rewards"
    group_of_one = "group_of_one"
    no_reward = "no_reward"
    failed = "failed"
    no_completions = "no_completions"
    not_selected = "not_selected"
    """`train_only` selected none of its calls."""
    base_model_only = "base_model_only"
    """All of its calls went to a model that is not this policy."""
    truncated = "truncated"
    """All of its selected calls were cut by the length limit, and `mask_truncated_completions` is on."""
    too_long = "too_long"
    """All of its selected calls are longer than the model's context."""


class TrainStatus(StrEnum):
    trained = "trained"
    no_update = "no_update"
    failed = "failed"


class TrainResult(Record):
    """How a train job ended. `step` moves only if weights moved: `step == previous_step` unless `status` is `trained`."""

    job_id: str
    policy: str
    status: TrainStatus
    reason: str | None = None
    previous_step: int
    step: int
    fates: dict[str, Fate] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    config: JsonObject = Field(default_factory=dict)
    """The effective configuration."""
    checkpoint: str | None = None
    """Folder of the adapter, in plain PEFT format, on the server's disk."""
