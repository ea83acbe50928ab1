"""Policies in memory: each is a training adapter on its base model, and the version of it that is served.

A policy comes from its registration (step 0) or from its latest checkpoint; either way the engine loads the published
folder, as it will after every train job, and the canary checks it. What fails half-way leaves nothing in memory. Knows
checkpoints and engines; no HTTP, no jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..engines.protocol import PolicyVersion
from ..errors import CheckpointCorrupt, ConfigError, Conflict, ModelMismatch, ModelRefused, TrainJobFailed, UnknownCheckpoint, UnknownModel
from ..training.checkpoints import Checkpoint, CheckpointState, CheckpointStore
from ..training.trainer import Trainer
from ..wire import ModelInfo, RegisterModel
from .bases import BasePool, BaseRuntime
from .canary import CANARY_TEXT, CanaryReport, check_canary
from .ledger import Ledger
from .policy_state import copy_into_trainer, drop_trainer, fresh_trainer, restored_trainer, write_policy
from .stored_checkpoints import checkpoint_info

log = logging.getLogger(__name__)

PINNED_VERSIONS_IN_MEMORY = 4
"""Older versions that stay loaded, for `project/name@step` and for calls that wait for their turn with one; the least recently
used one goes first. A call whose version has gone loads it again when its turn comes."""
REGISTRATION = "registration"
"""The job id that stands in a step-0 checkpoint."""


@dataclass(slots=True)
class PolicyRuntime:
    """One policy that can be sampled and trained. `step` is the version that its alias means now.

    `dirty`: the trainer may hold something else than the checkpoint of `step`; `revert` it before it trains.
    """

    body: RegisterModel
    base: BaseRuntime
    trainer: Trainer
    step: int
    older: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    dirty: bool = False

    @property
    def alias(self) -> str:
        return f"{self.body.project}/{self.body.name}"

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.alias, self.step)

    def info(self) -> ModelInfo:
        return ModelInfo(
            policy=self.alias,
            base_model=self.body.base_model,
            step=self.step,
            adapter=self.body.adapter,
            context_length=self.base.host.context_length,
            trainable_parameters=self.base.host.trainable_parameters(self.alias),
            tool_format=self.base.codec.tool_format,
            sharing=self.base.sharing,
            engine=self.base.engine.info().name,
            warnings=self.base.warnings,
        )


class Policies:
    """All policies of one server, brought into memory when first needed."""

    def __init__(self, ledger: Ledger, store: CheckpointStore, bases: BasePool) -> None:
        self._ledger = ledger
        self._bases = bases
        self.store = store
        self._running: dict[str, PolicyRuntime] = {}
        self._retiring: dict[PolicyVersion, asyncio.Task[None]] = {}
        self._held: Counter[PolicyVersion] = Counter()
        self._lock = asyncio.Lock()

    def running(self) -> dict[str, PolicyRuntime]:
        return dict(self._running)

    def asleep(self, body: RegisterModel) -> ModelInfo:
        """What is known of a registered policy without bringing it into memory."""
        alias = f"{body.project}/{body.name}"
        latest = self.store.latest(alias)
        return ModelInfo(policy=alias, base_model=body.base_model, step=0 if latest is None else latest.step, adapter=body.adapter)

    async def register(self, body: RegisterModel) -> PolicyRuntime:
        """Make the policy, or find it as it was made before. Raises ModelMismatch, ModelRefused, ConfigError."""
        alias = f"{body.project}/{body.name}"
        async with self._lock:
            known = {f"{p.project}/{p.name}": p for p in await asyncio.to_thread(self._ledger.policies)}
            if alias in known:
                _check_same(alias, known[alias], body)
                return await self._get(alias)
            base = await self._bases.get(body.base_model)
            runtime = await self._create(body, alias, base)
            self._running[alias] = runtime
            return runtime

    async def get(self, alias: str) -> PolicyRuntime:
        """The policy, restored from its latest checkpoint if it is not in memory. Raises UnknownModel, CheckpointCorrupt."""
        if alias in self._running:
            return self._running[alias]
        await asyncio.to_thread(self._ledger.policy, alias)  # an unknown one need not wait for the lock
        async with self._lock:
            return await self._get(alias)

    async def load_older(self, runtime: PolicyRuntime, step: int) -> None:
        """Make an earlier version servable. Raises UnknownCheckpoint, CheckpointCorrupt."""
        if step == runtime.step:
            return
        if step > runtime.step:  # it may be on the disk already, but no canary has seen it
            raise UnknownCheckpoint(f"policy '{runtime.alias}' has no checkpoint of step {step} yet; it is at step {runtime.step}")
        if step not in runtime.older:
            async with self._lock:
                if step not in runtime.older:
                    checkpoint = await asyncio.to_thread(self.store.get, runtime.alias, step)
                    await asyncio.to_thread(self.store.verify, checkpoint)
                    await self.load(runtime.base, PolicyVersion(runtime.alias, step), checkpoint.adapter)
        self._keep_older(runtime, step)

    @contextmanager
    def held(self, version: PolicyVersion) -> Iterator[None]:
        """Within it, retention leaves the version's checkpoint where it is, so that `load_older` finds it."""
        self._held[version] += 1
        try:
            yield
        finally:
            self._held[version] -= 1
            if not self._held[version]:
                del self._held[version]

    async def load(self, base: BaseRuntime, version: PolicyVersion, folder: Path) -> None:
        """Load a version into the engine, after an earlier one of the same number is gone from it. Raises EngineError."""
        if version in self._retiring:
            await asyncio.wait([self._retiring[version]])
        await base.engine.load(version, folder)

    async def advance(self, runtime: PolicyRuntime, checkpoint: Checkpoint) -> None:
        """Let the alias mean the new version, which the engine serves already, and forget what retention lets go."""
        await asyncio.to_thread(self._ledger.put_checkpoint, checkpoint_info(checkpoint, latest=True))
        before, runtime.step, runtime.dirty = runtime.step, checkpoint.step, False
        if before != runtime.step:
            self._keep_older(runtime, before)
        try:
            held = [version.version for version in self._held if version.policy == runtime.alias]
            await asyncio.to_thread(self.store.retain, runtime.alias, runtime.body.checkpoints, protect=held)
            await asyncio.to_thread(self._mirror, runtime.alias)
        except Exception:  # the version is served: tidying up again after the next job is enough
            log.exception("old checkpoints of %s could not be removed; it is tried again after the next job", runtime.alias)

    async def revert(self, runtime: PolicyRuntime) -> None:
        """Put the trainer back to the version that is served. Raises UnknownCheckpoint, CheckpointCorrupt."""
        checkpoint = await asyncio.to_thread(self.store.get, runtime.alias, runtime.step)
        await asyncio.to_thread(self.store.verify, checkpoint)
        await asyncio.to_thread(copy_into_trainer, runtime.base.host, runtime.trainer, runtime.alias, checkpoint)
        runtime.dirty = False

    async def withdraw(self, alias: str, checkpoint: Checkpoint) -> None:
        """Take back the latest checkpoint; the alias means the one before, if it did mean this one.

        One without a predecessor stays: there is nothing to go back to.
        """
        steps = [found.step for found in await asyncio.to_thread(self.store.list, alias) if found.step < checkpoint.step]
        if not steps:
            log.error("checkpoint %s@%d has no predecessor and stays", alias, checkpoint.step)
            return
        runtime, version = self._running.get(alias), PolicyVersion(alias, checkpoint.step)
        if runtime is not None and runtime.step == checkpoint.step:
            runtime.dirty = True
            if steps[-1] not in runtime.older:
                before = await asyncio.to_thread(self.store.get, alias, steps[-1])
                await self.load(runtime.base, PolicyVersion(alias, before.step), before.adapter)
            runtime.older.pop(steps[-1], None)
            runtime.step = steps[-1]
        if runtime is not None and version in runtime.base.engine.loaded():
            self._retire(runtime.base, version)
        await asyncio.to_thread(self.store.pin, alias, checkpoint.step, False)
        await asyncio.to_thread(self.store.delete, alias, checkpoint.step)
        await asyncio.to_thread(self._mirror, alias)

    async def canary(self, runtime: PolicyRuntime, version: PolicyVersion) -> CanaryReport:
        """Check that the engine serves what the trainer holds. Raises StaleEngine."""
        rows = canary_rows(runtime.base)
        new = await asyncio.to_thread(runtime.trainer.score, rows)
        return await check_canary(runtime.base.engine, version, rows, new, None)

    def _keep_older(self, runtime: PolicyRuntime, step: int) -> None:
        """Note the use of an earlier version that is loaded, and let go of the one whose use is longest ago."""
        runtime.older[step] = None
        runtime.older.move_to_end(step)
        while len(runtime.older) > PINNED_VERSIONS_IN_MEMORY:
            dropped, _ = runtime.older.popitem(last=False)
            self._retire(runtime.base, PolicyVersion(runtime.alias, dropped))

    def _retire(self, base: BaseRuntime, version: PolicyVersion) -> None:
        """Unload a version once nothing samples it any more; nobody waits for that."""
        task = asyncio.create_task(base.engine.unload(version))
        self._retiring[version] = task
        task.add_done_callback(lambda done: self._retired(version, done))

    def _retired(self, version: PolicyVersion, task: asyncio.Task[None]) -> None:
        self._retiring.pop(version, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s@%d could not be unloaded: %s", version.policy, version.version, error)

    def _mirror(self, alias: str) -> None:
        """Make the ledger's rows say what the folders hold: a kill can fall between the two."""
        folders = {checkpoint.step: checkpoint for checkpoint in self.store.list(alias)}
        rows = {row.step: row for row in self._ledger.checkpoints(alias)}
        for step, checkpoint in folders.items():
            if step not in rows or rows[step].pinned != checkpoint.pinned:
                self._ledger.put_checkpoint(checkpoint_info(checkpoint, latest=step == max(folders)))
        for step in rows.keys() - folders.keys():
            self._ledger.mark_checkpoint(alias, step, deleted=True)

    async def _get(self, alias: str) -> PolicyRuntime:
        if alias not in self._running:
            body = await asyncio.to_thread(self._ledger.policy, alias)
            base = await self._bases.get(body.base_model)
            checkpoint = await asyncio.to_thread(self.store.latest, alias)
            if checkpoint is None:
                raise UnknownModel(f"policy {alias} is registered but its checkpoints are gone from {self.store.root}", param="model")
            await asyncio.to_thread(self.store.verify, checkpoint)
            async with self._whole_or_absent(base, PolicyVersion(alias, checkpoint.step)):
                trainer = await asyncio.to_thread(restored_trainer, base.host, alias, body.seed, checkpoint)
                runtime = await self._serve(PolicyRuntime(body, base, trainer, checkpoint.step), checkpoint)
            try:
                await asyncio.to_thread(self._mirror, alias)
            except CheckpointCorrupt as error:  # the latest one is whole: the policy is served
                log.error("the checkpoints of %s in the ledger may be out of date: %s", alias, error)
            self._running[alias] = runtime
        return self._running[alias]

    async def _create(self, body: RegisterModel, alias: str, base: BaseRuntime) -> PolicyRuntime:
        await asyncio.to_thread(self._clear_leftover, alias)
        source = await self._fork_source(body)
        async with self._whole_or_absent(base, PolicyVersion(alias, 0)):
            trainer = await asyncio.to_thread(fresh_trainer, base.host, alias, body, source)

            def publish() -> Checkpoint:
                state = CheckpointState(step=0, job_id=REGISTRATION, config=body.model_dump(mode="json"))
                return self.store.publish(alias, 0, lambda folder: write_policy(base.host, trainer, alias, folder), state)

            checkpoint = await asyncio.to_thread(publish)
            runtime = await self._serve(PolicyRuntime(body, base, trainer, 0), checkpoint)
            await asyncio.to_thread(self._ledger.put_checkpoint, checkpoint_info(checkpoint, latest=True))
            await asyncio.to_thread(self._ledger.put_policy, body)
        return runtime

    def _clear_leftover(self, alias: str) -> None:
        """Delete what a registration left that was killed before it was recorded; refuse to touch anything else."""
        found = self.store.list(alias)
        for checkpoint in found:
            if checkpoint.step > 0 or checkpoint.state.job_id != REGISTRATION:
                raise Conflict(
                    f"{checkpoint.path.parent} holds checkpoints of a policy {alias} that this ledger does not know; "
                    "move them away or use another name",
                    param="name",
                )
        for checkpoint in found:
            self.store.delete(alias, checkpoint.step)

    @asynccontextmanager
    async def _whole_or_absent(self, base: BaseRuntime, version: PolicyVersion) -> AsyncIterator[None]:
        """On any failure neither trainer nor engine keeps anything of the policy."""
        try:
            yield
        except BaseException:
            if version in base.engine.loaded():
                self._retire(base, version)
            await asyncio.to_thread(drop_trainer, base.host, str(version.policy))
            raise

    async def _fork_source(self, body: RegisterModel) -> Path | None:
        if body.fork_from is None:
            return None
        alias, _, step = body.fork_from.partition("@")
        if not is_step(step):
            raise ConfigError(f"fork_from must be 'project/name@step', got '{body.fork_from}'", param="fork_from")
        source = await asyncio.to_thread(self._ledger.policy, alias)
        if (source.base_model, source.adapter) != (body.base_model, body.adapter):
            raise ModelMismatch(
                f"{alias} can be forked only with its own base model and adapter options, {source.base_model} and {source.adapter}",
                param="fork_from",
            )
        checkpoint = await asyncio.to_thread(self.store.get, alias, int(step))
        await asyncio.to_thread(self.store.verify, checkpoint)
        return checkpoint.adapter

    async def _serve(self, runtime: PolicyRuntime, checkpoint: Checkpoint) -> PolicyRuntime:
        await self.load(runtime.base, runtime.version, checkpoint.adapter)
        try:
            await self.canary(runtime, runtime.version)
        except TrainJobFailed as error:  # the trainer's words for weights that give no finite numbers
            raise ModelRefused(f"policy {runtime.alias} cannot be served: {error}", param="base_model") from error
        return runtime


def is_step(text: str) -> bool:
    """Whether this is what stands after the `@` in the name of a version."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def canary_rows(base: BaseRuntime) -> list[list[int]]:
    return [base.codec.encode(CANARY_TEXT)]


def _check_same(alias: str, known: RegisterModel, body: RegisterModel) -> None:
    for name in ("base_model", "adapter", "checkpoints", "seed", "fork_from"):
        if getattr(known, name) != getattr(body, name):
            raise ModelMismatch(
                f"policy {alias} is registered with {name} {getattr(known, name)!r}, now {getattr(body, name)!r} came; use another name",
                param=name,
            )
