"""Checkpoints on disk: each policy's steps, whole or absent, checked by hash, kept and removed by rule.

    <root>/<project>/<name>/<step, six digits>/
        adapter/         plain PEFT format
        trainer/         optimizer, random state: whatever the writer puts there
        state.json       CheckpointState
        manifest.json    size and SHA-256 of every file above
    <root>/<project>/<name>/pins.json          pinned steps
    <root>/<project>/<name>/.tmp-…             a step being written, or the rest of one that a crash interrupted

Knows folders and hashes; what an adapter or an optimizer is, the writer and the verifier passed in know. Several
processes may share a root, as long as each policy is written by one of them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ..config import CheckpointPolicy
from ..errors import ApprenticeError, CheckpointCorrupt, ConfigError, Conflict, InfrastructureError, InvalidRequest, UnknownCheckpoint
from ..records import NAME_PATTERN, Fate, JsonObject, Record
from .manifest import is_abandoned, sync_folder, sync_tree, temporary_name, verify_manifest, write_durably, write_manifest

_STATE = "state.json"
_PINS = "pins.json"
_STEP = re.compile(r"^[0-9]{6,}$")


class CheckpointState(Record):
    """What is known of a checkpoint besides its weights; stored as `state.json`."""

    step: Annotated[int, Field(ge=0)]
    job_id: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    config: JsonObject = Field(default_factory=dict)
    """The effective configuration of the job that made it."""
    fates: dict[str, Fate] = Field(default_factory=dict)
    """What that job did with each trajectory, so that a resumed job can report it."""
    created_at: float = Field(default_factory=time.time)


@dataclass(frozen=True)
class Checkpoint:
    """A published step."""

    policy: str
    step: int
    path: Path
    state: CheckpointState
    pinned: bool

    @property
    def adapter(self) -> Path:
        """The folder for `HostedModel.load_adapter` and `PeftModel.from_pretrained`."""
        return self.path / "adapter"

    @property
    def trainer(self) -> Path:
        """The folder with whatever the trainer needs to go on."""
        return self.path / "trainer"


class CheckpointStore:
    """All checkpoints below one root folder. Thread-safe; the root is created, and swept at start of what killed processes left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the checkpoint folder {root} cannot be created ({error})") from error
        for path in root.glob("*/*/.tmp-*"):
            if is_abandoned(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def publish(
        self,
        policy: str,
        step: int,
        write: Callable[[Path], None],
        state: CheckpointState,
        verify: Callable[[Path], None] | None = None,
    ) -> Checkpoint:
        """Make a step visible, whole and on the disk, or not at all.

        `write` gets an empty folder and fills it (`adapter/`, `trainer/`); `verify` gets the folder with every hash checked,
        loads it back and raises if that does not give what was saved. A step that exists is returned unchanged when the same
        job published it, else Conflict. Our own errors from `write` and `verify` pass through; any other one, such as a full
        disk, becomes an InfrastructureError. In all these cases nothing is left behind.
        """
        if state.step != step:
            raise InvalidRequest(f"state.step must be the published step {step}, got {state.step}")
        with self._lock:
            final = self._folder(policy) / _step_name(step)
            if final.exists():
                return self._already(policy, step, state)
            try:
                self._publish(policy, step, final, write, state, verify)
            except ApprenticeError:
                raise
            except Exception as error:
                raise InfrastructureError(f"checkpoint {policy}@{step} could not be written to {final.parent}: {error}") from error
            return self.get(policy, step)

    def get(self, policy: str, step: int) -> Checkpoint:
        """A published step; its hashes are not checked here. Raises UnknownCheckpoint, CheckpointCorrupt for a bad `state.json`."""
        path = self._folder(policy) / _step_name(step)
        if not path.is_dir():
            raise self._unknown(policy, step)
        return Checkpoint(policy, step, path, _read_state(path, step), step in self._pins(policy))

    def latest(self, policy: str) -> Checkpoint | None:
        """The highest step, or None."""
        with self._lock:
            steps = self._steps(policy)
            return self.get(policy, steps[-1]) if steps else None

    def list(self, policy: str) -> tuple[Checkpoint, ...]:
        """All published steps, lowest first."""
        with self._lock:
            return tuple(self.get(policy, step) for step in self._steps(policy))

    def policies(self) -> tuple[str, ...]:
        """Names of all policies with a checkpoint, sorted."""
        found = {f"{path.parent.parent.name}/{path.parent.name}" for path in self.root.glob("*/*/*") if _STEP.match(path.name)}
        return tuple(sorted(found))

    def verify(self, checkpoint: Checkpoint) -> None:
        """Read every file and compare with the manifest. Raises CheckpointCorrupt naming the first file that differs."""
        self._unchanged(checkpoint.policy, checkpoint.step, checkpoint.path)

    def delete(self, policy: str, step: int) -> None:
        """Remove a step at once: it is hidden before its files go. Raises UnknownCheckpoint, Conflict when it is pinned."""
        with self._lock:
            path = self._folder(policy) / _step_name(step)
            if not path.is_dir():
                raise self._unknown(policy, step)
            if step in self._pins(policy):
                raise Conflict(f"checkpoint {policy}@{step} is pinned: unpin it before deleting it")
            hidden = path.with_name(temporary_name(f"deleted-{path.name}"))
            path.rename(hidden)
            sync_folder(path.parent)
            shutil.rmtree(hidden)

    def pin(self, policy: str, step: int, pinned: bool = True) -> Checkpoint:
        """Keep a step from retention and deletion, or release it. Raises UnknownCheckpoint."""
        with self._lock:
            self.get(policy, step)
            pins = self._pins(policy)
            wanted = pins | {step} if pinned else pins - {step}
            if wanted != pins:
                write_durably(self._folder(policy) / _PINS, json.dumps(sorted(wanted)))
            return self.get(policy, step)

    def retain(self, policy: str, rule: CheckpointPolicy, *, protect: Iterable[int] = (), dry_run: bool = False) -> tuple[int, ...]:
        """Delete what the rule does not keep; return the steps that went (or, with `dry_run`, that would go).

        Kept: the last `keep_last`, the best by `best_metric` (the later of two equal ones), pinned steps and `protect`.
        """
        with self._lock:
            checkpoints = self.list(policy)
            kept = {checkpoint.step for checkpoint in checkpoints[-rule.keep_last :]} | self._pins(policy) | set(protect)
            scores = [(c.state.metrics.get(rule.best_metric or "", math.nan), c.step) for c in checkpoints]
            kept.add(max((pair for pair in scores if not math.isnan(pair[0])), default=(0.0, -1))[1])
            going = tuple(checkpoint.step for checkpoint in checkpoints if checkpoint.step not in kept)
            for step in () if dry_run else going:
                self.delete(policy, step)
            return going

    def _folder(self, policy: str) -> Path:
        project, separator, name = policy.partition("/")
        if not separator or not all(re.fullmatch(NAME_PATTERN, part) for part in (project, name)):
            raise InvalidRequest(f"a policy is named project/name, each of letters, digits, '.', '_' and '-', got '{policy}'")
        return self.root / project / name

    def _steps(self, policy: str) -> list[int]:
        folder = self._folder(policy)
        return sorted(int(path.name) for path in folder.iterdir() if _STEP.match(path.name)) if folder.is_dir() else []

    def _pins(self, policy: str) -> set[int]:
        path = self._folder(policy) / _PINS
        if not path.exists():
            return set()
        try:
            pins = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointCorrupt(f"{path} is not readable JSON ({error})") from error
        if not isinstance(pins, list) or not all(isinstance(step, int) for step in pins):
            raise CheckpointCorrupt(f"{path} must hold a list of steps")
        return set(pins)

    def _unknown(self, policy: str, step: int) -> UnknownCheckpoint:
        steps = ", ".join(str(known) for known in self._steps(policy)) or "none"
        return UnknownCheckpoint(f"policy '{policy}' has no checkpoint of step {step}; its steps: {steps}")

    def _already(self, policy: str, step: int, state: CheckpointState) -> Checkpoint:
        existing = self.get(policy, step)
        if state.job_id is None or existing.state.job_id != state.job_id:
            raise Conflict(f"checkpoint {policy}@{step} exists already, published by job {existing.state.job_id}")
        return existing

    def _publish(
        self,
        policy: str,
        step: int,
        final: Path,
        write: Callable[[Path], None],
        state: CheckpointState,
        verify: Callable[[Path], None] | None,
    ) -> None:
        temporary = final.parent / temporary_name(final.name)
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            (temporary / _STATE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
            sync_tree(temporary)
            write_manifest(temporary)
            self._unchanged(policy, step, temporary)
            if verify is not None:
                verify(temporary)
                self._unchanged(policy, step, temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for folder in (final.parent, final.parent.parent, self.root):
            sync_folder(folder)

    def _unchanged(self, policy: str, step: int, path: Path) -> None:
        verify_manifest(path, lambda what: CheckpointCorrupt(f"checkpoint {policy}@{step} in {path} is damaged: {what}"))


def _step_name(step: int) -> str:
    if step < 0:
        raise InvalidRequest(f"a step is 0 or more, got {step}")
    return f"{step:06d}"


def _read_state(path: Path, step: int) -> CheckpointState:
    try:
        state = CheckpointState.model_validate_json((path / _STATE).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"the checkpoint in {path} is damaged: {_STATE} is missing") from error
    except ValidationError as error:
        raise CheckpointCorrupt(f"the checkpoint in {path} is damaged: {_STATE} does not have the expected form") from error
    if state.step != step:
        raise CheckpointCorrupt(f"the checkpoint in {path} is damaged: {_STATE} says step {state.step}")
    return state
