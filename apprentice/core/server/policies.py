"""Policies in memory: each is a training adapter on its base model, and the version of it that is served.

A policy comes from its registration (step 0) or from its latest checkpoint; either way the engine loads the published
folder, as it will after every train job, and the canary checks it. Knows checkpoints and engines; no HTTP, no jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from ..engines.protocol import PolicyVersion
from ..errors import ConfigError, ModelMismatch, UnknownModel
from ..training.checkpoints import Checkpoint, CheckpointState, CheckpointStore
from ..training.policy import HostedModel
from ..training.trainer import Trainer
from ..wire import CheckpointInfo, ModelInfo, RegisterModel
from .bases import BasePool, BaseRuntime
from .canary import CANARY_TEXT, CanaryReport, check_canary
from .ledger import Ledger

log = logging.getLogger(__name__)

PINNED_VERSIONS_IN_MEMORY = 4
"""Older versions (`project/name@step`) that stay loaded; the least recently used one goes first."""
REGISTRATION = "registration"
"""The job id that stands in a step-0 checkpoint."""


@dataclass(slots=True)
class PolicyRuntime:
    """One policy that can be sampled and trained. `step` is the version that its alias means now."""

    body: RegisterModel
    base: BaseRuntime
    trainer: Trainer
    step: int
    older: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

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
            await asyncio.to_thread(self._ledger.put_policy, body)
            self._running[alias] = runtime
            return runtime

    async def get(self, alias: str) -> PolicyRuntime:
        """The policy, restored from its latest checkpoint if it is not in memory. Raises UnknownModel."""
        if alias in self._running:
            return self._running[alias]
        async with self._lock:
            return await self._get(alias)

    async def load_older(self, runtime: PolicyRuntime, step: int) -> None:
        """Make an earlier version servable. Raises UnknownCheckpoint, CheckpointCorrupt."""
        if step == runtime.step:
            return
        async with self._lock:
            if step not in runtime.older:
                checkpoint = await asyncio.to_thread(self.store.get, runtime.alias, step)
                await asyncio.to_thread(self.store.verify, checkpoint)
                version = PolicyVersion(runtime.alias, step)
                if version in self._retiring:
                    await self._retiring[version]
                await runtime.base.engine.load(version, checkpoint.adapter)
            runtime.older[step] = None
            runtime.older.move_to_end(step)
            while len(runtime.older) > PINNED_VERSIONS_IN_MEMORY:
                dropped, _ = runtime.older.popitem(last=False)
                self._retire(runtime, PolicyVersion(runtime.alias, dropped))

    async def advance(self, runtime: PolicyRuntime, checkpoint: Checkpoint) -> None:
        """Let the alias mean the new version, which the engine serves already, and forget what retention lets go."""
        before, runtime.step = runtime.version, checkpoint.step
        await asyncio.to_thread(self._ledger.put_checkpoint, checkpoint_info(checkpoint, latest=True))
        self._retire(runtime, before)
        dropped = await asyncio.to_thread(self.store.retain, runtime.alias, runtime.body.checkpoints)
        for step in dropped:
            await asyncio.to_thread(self._ledger.mark_checkpoint, runtime.alias, step, deleted=True)

    def _retire(self, runtime: PolicyRuntime, version: PolicyVersion) -> None:
        """Unload a version once nothing samples it any more; nobody waits for that."""
        task = asyncio.create_task(runtime.base.engine.unload(version))
        self._retiring[version] = task
        task.add_done_callback(lambda _: self._retiring.pop(version, None))

    async def revert(self, runtime: PolicyRuntime) -> None:
        """Put the trainer back to the newest published checkpoint, which is the version that is served."""
        checkpoint = await asyncio.to_thread(self.store.latest, runtime.alias)
        if checkpoint is None:
            raise UnknownModel(f"policy {runtime.alias} has no checkpoint to go back to")
        await asyncio.to_thread(_load_trainer, runtime, checkpoint)

    async def canary(self, runtime: PolicyRuntime, version: PolicyVersion) -> CanaryReport:
        """Check that the engine serves what the trainer holds. Raises StaleEngine."""
        rows = canary_rows(runtime.base)
        new = await asyncio.to_thread(runtime.trainer.score, rows)
        return await check_canary(runtime.base.engine, version, rows, new, None)

    async def _get(self, alias: str) -> PolicyRuntime:
        if alias not in self._running:
            body = await asyncio.to_thread(self._ledger.policy, alias)
            base = await self._bases.get(body.base_model)
            checkpoint = await asyncio.to_thread(self.store.latest, alias)
            if checkpoint is None:
                raise UnknownModel(f"policy {alias} is registered but its checkpoints are gone from {self.store.root}", param="model")
            await asyncio.to_thread(self.store.verify, checkpoint)
            trainer = await asyncio.to_thread(_restored_trainer, base.host, alias, body.seed, checkpoint)
            self._running[alias] = await self._serve(PolicyRuntime(body, base, trainer, checkpoint.step), checkpoint)
        return self._running[alias]

    async def _create(self, body: RegisterModel, alias: str, base: BaseRuntime) -> PolicyRuntime:
        leftover = await asyncio.to_thread(self.store.latest, alias)
        if leftover is not None:  # a registration that was killed before it was recorded
            await asyncio.to_thread(self.store.delete, alias, leftover.step)
        source = await self._fork_source(body)
        trainer = await asyncio.to_thread(_fresh_trainer, base.host, alias, body, source)

        def publish() -> Checkpoint:
            state = CheckpointState(step=0, job_id=REGISTRATION, config=body.model_dump(mode="json"))
            return self.store.publish(alias, 0, lambda folder: write_policy(base.host, trainer, alias, folder), state)

        checkpoint = await asyncio.to_thread(publish)
        await asyncio.to_thread(self._ledger.put_checkpoint, checkpoint_info(checkpoint, latest=True))
        return await self._serve(PolicyRuntime(body, base, trainer, 0), checkpoint)

    async def _fork_source(self, body: RegisterModel) -> Path | None:
        if body.fork_from is None:
            return None
        alias, _, step = body.fork_from.partition("@")
        if not step.isdecimal():
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
        await runtime.base.engine.load(runtime.version, checkpoint.adapter)
        await self.canary(runtime, runtime.version)
        return runtime


def canary_rows(base: BaseRuntime) -> list[list[int]]:
    return [base.codec.encode(CANARY_TEXT)]


def write_policy(host: HostedModel, trainer: Trainer, alias: str, folder: Path) -> None:
    """The full state: `adapter/` in plain PEFT format, `trainer/` with optimizer moments and generators."""
    host.save_adapter(alias, folder / "adapter")
    (folder / "trainer").mkdir()
    trainer.save_state(folder / "trainer")


def checkpoint_info(checkpoint: Checkpoint, *, latest: bool) -> CheckpointInfo:
    return CheckpointInfo(
        policy=checkpoint.policy,
        step=checkpoint.step,
        path=str(checkpoint.adapter),
        created_at=checkpoint.state.created_at,
        metrics=checkpoint.state.metrics,
        pinned=checkpoint.pinned,
        latest=latest,
    )


def _fresh_trainer(host: HostedModel, alias: str, body: RegisterModel, source: Path | None) -> Trainer:
    if alias in host.adapters():
        host.drop_adapter(alias)
    if source is None:
        host.add_adapter(alias, body.adapter, body.seed)
    else:
        host.load_adapter(alias, source, trainable=True)
    return Trainer(host, alias, body.seed)


def _restored_trainer(host: HostedModel, alias: str, seed: int, checkpoint: Checkpoint) -> Trainer:
    if alias in host.adapters():
        host.drop_adapter(alias)
    host.load_adapter(alias, checkpoint.adapter, trainable=True)
    trainer = Trainer(host, alias, seed)
    trainer.load_state(checkpoint.trainer)
    return trainer


def _load_trainer(runtime: PolicyRuntime, checkpoint: Checkpoint) -> None:
    runtime.trainer = _restored_trainer(runtime.base.host, runtime.alias, runtime.body.seed, checkpoint)


def _check_same(alias: str, known: RegisterModel, body: RegisterModel) -> None:
    for name in ("base_model", "adapter", "checkpoints", "seed", "fork_from"):
        if getattr(known, name) != getattr(body, name):
            raise ModelMismatch(
                f"policy {alias} is registered with {name} {getattr(known, name)!r}, now {getattr(body, name)!r} came; use another name",
                param=name,
            )
