"""What the HTTP layer needs from the rest of the server: which model answers, which jobs run, which checkpoints exist.

The routes know only these protocols. They never see torch, a trainer or a file of weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..engines.protocol import Engine, PolicyVersion
from ..wire import CheckpointInfo, GrpoJob, ModelInfo, RegisterModel, SftJob, TrainEvent, TrainJob

if TYPE_CHECKING:
    from .chat import ChatCodec
    from .splice import Splicer


async def _always_ready() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Served:
    """Who answers one request. Resolved once per request; the version does not change while it is sampled."""

    policy: PolicyVersion
    """`policy.policy` is None for the bare base model: recorded, never trainable."""
    alias: str
    """`project/name`, or the base model's own name: under which the completion is recorded."""
    codec: ChatCodec
    splicer: Splicer
    engine: Engine
    context_length: int
    """Tokens that prompt and reply may have together."""
    stop_token_ids: tuple[int, ...]
    held: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a call waits for its turn and is sampled: the version can be loaded as long, whatever jobs end meanwhile."""
    ready: Callable[[], Awaitable[None]] = _always_ready
    """Load the version again if it left the engine while the call waited. Nothing else runs between its end and the caller."""

    @property
    def version(self) -> int | None:
        """The `policy_version` of a reply: None for the bare base model."""
        return None if self.policy.policy is None else self.policy.version


class Jobs(Protocol):
    """Train jobs. `UnknownJob` for an id that was never given out."""

    async def submit(self, request: GrpoJob | SftJob, idempotency_key: str | None) -> TrainJob:
        """The new job, or the earlier one with the same key and body; `IdempotencyConflict` if the body differs."""
        ...

    def job(self, job_id: str) -> TrainJob: ...

    def jobs(self) -> Sequence[TrainJob]:
        """Newest first."""
        ...

    def events(self, job_id: str, after: int) -> AsyncIterator[TrainEvent]:
        """Every event with `seq > after`, then new ones as they happen; ends after the one with `kind="end"`."""
        ...


class Checkpoints(Protocol):
    """Published checkpoints. `UnknownCheckpoint` for one that is not there."""

    def list(self, policy: str | None) -> Sequence[CheckpointInfo]: ...

    def get(self, policy: str, step: int) -> CheckpointInfo: ...

    def pin(self, policy: str, step: int, pinned: bool) -> CheckpointInfo: ...

    def delete(self, policy: str, step: int) -> None:
        """`Conflict` for a pinned checkpoint and for the latest of a policy."""
        ...


class Registry(Protocol):
    """Policies and what serves them."""

    @property
    def jobs(self) -> Jobs: ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    async def resolve(self, model: str) -> Served:
        """`project/name`: the newest version now; `project/name@step`: that one; a base model's name: `BASE`.

        A registered policy, or a version of it, that is not in memory yet is loaded first.

        Anything else is `UnknownModel`; there is no fall-back.
        """
        ...

    async def register(self, body: RegisterModel) -> ModelInfo: ...

    def models(self) -> Sequence[ModelInfo]:
        """The policies in memory."""
        ...

    def base_models(self) -> Sequence[str]:
        """Names under which bare base models can be called."""
        ...

    def engines(self) -> Sequence[Engine]: ...
