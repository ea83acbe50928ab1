"""Where a training run is, on disk: enough to go on after a kill at any point. Small, written whole or not at all.

Big things are elsewhere and found again by name: rollouts in the server's ledger (deterministic trajectory ids), train
jobs by their idempotency key, metrics in a JSONL file. This module knows neither server nor model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue, ValidationError

from ..errors import ConfigError
from ..records import Name, Record, Scenario
from ..wire import GrpoJob
from .evaluate import Evaluation

Phase: TypeAlias = Literal["baseline", "difficulty", "warmup", "warmed", "rollouts", "train", "evaluate", "keep", "final", "report", "done"]
"""What is to be done next. baseline, warmed, final: evaluations before training, after the warm-up, at the end. difficulty: how often
the base model solves each scenario."""


class Budget(Record):
    """When a run ends at the latest: training steps, seconds (over all resumes), or trained tokens. At least one is needed."""

    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, ge=1)

    def spent(self, steps: int, seconds: float, tokens: float) -> str | None:
        """Which limit is reached, as a sentence; None if none is."""
        if self.steps is not None and steps >= self.steps:
            return f"the budget of {self.steps} step{'' if self.steps == 1 else 's'} is spent"
        if self.seconds is not None and seconds >= self.seconds:
            return f"the budget of {self.seconds:g} s is spent"
        if self.tokens is not None and tokens >= self.tokens:
            return f"the budget of {self.tokens} trained tokens is spent"
        return None


class EarlyStop(Record):
    """`target`: stop once an evaluation's mean reaches it. `patience`: stop after so many evaluations in a row without a new best."""

    target: float | None = None
    patience: int | None = Field(default=None, ge=1)

    def reached(self, mean: float, stale: int) -> str | None:
        if self.target is not None and mean >= self.target:
            return f"the evaluation reached its target of {self.target:g}"
        if self.patience is not None and stale >= self.patience:
            return f"{stale} evaluations in a row brought no new best"
        return None


class EvaluationPoint(Record):
    """One evaluation of the run. `at`: `before`, `warm-up`, or the loop step after which it was made."""

    at: str
    policy_step: int
    evaluation: Evaluation


class RunState(Record):
    """Frozen; each arrow of the loop makes a new one."""

    format: Literal[1] = 1
    run_id: Name
    policy: str
    fingerprint: str
    """Of the scenarios' content: another data set is another run."""
    phase: Phase = "baseline"
    step: int = 0
    """Loop steps completed."""
    policy_step: int = 0
    examples: int = 0
    """The data cursor: scenarios consumed so far, over all epochs, whatever the batch size was."""
    seconds: float = 0.0
    tokens: float = 0.0
    pending: GrpoJob | None = None
    """The train job that was or is about to be submitted, exactly as sent."""
    attempt: int = 0
    """How often the phase's train job has failed: part of its idempotency key, so that a resumed run submits it anew."""
    row: dict[str, JsonValue] = Field(default_factory=dict)
    """Metrics of the step in progress."""
    solve_rates: dict[str, float] = Field(default_factory=dict)
    """Scenario id → share of its latest group that solved it, if the loop has a curriculum."""
    evaluations: tuple[EvaluationPoint, ...] = ()
    best_step: int | None = None
    """Policy step with the best evaluation."""
    best_mean: float | None = None
    pinned_step: int | None = None
    """The checkpoint that this run has pinned as its best."""
    stale: int = 0
    """Evaluations since the best one."""
    stopped: str | None = None
    """Why the run ended."""

    def path(self, folder: Path) -> Path:
        return folder / "state.json"

    def save(self, folder: Path) -> None:
        """Write to a temporary file, flush to disk, rename over the old state, flush the folder."""
        path = self.path(folder)
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(folder)

    @classmethod
    def load(cls, folder: Path) -> RunState | None:
        """The saved state; None if there is none; ConfigError if it cannot be read."""
        path = folder / "state.json"
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as cause:
            first = cause.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(f"{path} is not the state of a run that this version can resume ({where}: {first['msg']})") from cause


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable, where the platform can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fingerprint(scenarios: Sequence[Scenario]) -> str:
    """Of inputs and metadata in their order; ids are left out because they may be new in every process."""
    digest = hashlib.sha256()
    for scenario in scenarios:
        digest.update(scenario.model_dump_json(exclude={"id"}).encode() + b"\n")
    return digest.hexdigest()


@contextmanager
def exclusive(folder: Path) -> Generator[None]:
    """Hold the folder for this process; ConfigError if another run holds it. Freed by the system if the process is killed."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise ConfigError(f"another process is running in {folder}; wait for its end or choose another run_dir") from cause
        yield


@contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Hold the folder, made if need be, for one run. ConfigError if another run works in it, or nothing can be written into it. What
    stays empty is removed again.

    The folder itself is locked, without a file in it, and freed by the system if the process is killed.
    """
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        descriptor = os.open(folder, os.O_RDONLY)
    except (OSError, ValueError) as cause:
        raise ConfigError(f"the run's folder {str(folder)!r} cannot be made or written to: {cause}") from cause
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        os.close(descriptor)
        raise ConfigError(f"another run is working in this folder: {folder}; wait for its end or choose another") from cause
    try:
        yield
    finally:
        if fresh:
            with suppress(OSError):  # it holds something
                folder.rmdir()
        os.close(descriptor)
