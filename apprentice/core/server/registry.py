"""The registry: from a model name to who answers it, for the HTTP layer. Everything it gives out is in memory and checked."""

from __future__ import annotations

from collections.abc import Sequence

from ..engines.protocol import BASE, Engine, PolicyVersion
from ..errors import Conflict, UnknownModel
from ..training.checkpoints import CheckpointStore
from ..wire import CheckpointInfo, ModelInfo, RegisterModel
from .bases import BasePool, BaseRuntime
from .jobs import TrainJobs
from .ledger import Ledger
from .policies import Policies, checkpoint_info
from .registry_protocol import Served


class StoredCheckpoints:
    """The published checkpoints, for the control API. The folders are the truth; the ledger mirrors them."""

    def __init__(self, store: CheckpointStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    def list(self, policy: str | None) -> Sequence[CheckpointInfo]:
        """By policy and step. Raises UnknownModel."""
        if policy is not None:
            self._ledger.policy(policy)
            names = [policy]
        else:
            names = [f"{body.project}/{body.name}" for body in self._ledger.policies()]
        found = {name: self._store.list(name) for name in names}
        return [checkpoint_info(c, latest=c.step == checkpoints[-1].step) for checkpoints in found.values() for c in checkpoints]

    def get(self, policy: str, step: int) -> CheckpointInfo:
        return checkpoint_info(self._store.get(policy, step), latest=self._is_latest(policy, step))

    def pin(self, policy: str, step: int, pinned: bool) -> CheckpointInfo:
        checkpoint = self._store.pin(policy, step, pinned)
        self._ledger.mark_checkpoint(policy, step, pinned=pinned)
        return checkpoint_info(checkpoint, latest=self._is_latest(policy, step))

    def delete(self, policy: str, step: int) -> None:
        checkpoint = self._store.get(policy, step)
        if checkpoint.pinned:
            raise Conflict(f"checkpoint {policy}@{step} is pinned; unpin it before deleting it", param="step")
        if self._is_latest(policy, step):
            raise Conflict(
                f"checkpoint {policy}@{step} is the latest of its policy, which is served from it; it cannot be deleted", param="step"
            )
        self._store.delete(policy, step)
        self._ledger.mark_checkpoint(policy, step, deleted=True)

    def _is_latest(self, policy: str, step: int) -> bool:
        latest = self._store.latest(policy)
        return latest is not None and latest.step == step


class ServerRegistry:
    """Implements `registry_protocol.Registry` on real base models, policies and jobs."""

    def __init__(self, ledger: Ledger, policies: Policies, bases: BasePool, jobs: TrainJobs) -> None:
        self._ledger = ledger
        self._policies = policies
        self._bases = bases
        self.jobs = jobs
        self.checkpoints = StoredCheckpoints(policies.store, ledger)

    async def resolve(self, model: str) -> Served:
        """See the protocol. A registered policy that is not in memory yet is restored first."""
        bases = self._bases.loaded()
        if model in bases:
            return _served(bases[model], BASE, model)
        alias, at, step = model.partition("@")
        if at and not (step.isascii() and step.isdecimal() and len(step) < 10):
            raise UnknownModel(f"model '{model}' does not exist: after '@' a step number was expected, got '{step}'", param="model")
        runtime = self._policies.running().get(alias)
        if runtime is None:
            runtime = await self._policies.get(alias)
        if not at:
            return _served(runtime.base, runtime.version, alias)
        await self._policies.load_older(runtime, int(step))
        return _served(runtime.base, PolicyVersion(alias, int(step)), alias)

    async def register(self, body: RegisterModel) -> ModelInfo:
        return (await self._policies.register(body)).info()

    def models(self) -> Sequence[ModelInfo]:
        """All registered policies by name; of those that are not in memory only what the ledger and the checkpoints tell."""
        running = self._policies.running()
        bodies = {f"{body.project}/{body.name}": body for body in self._ledger.policies()}
        return [running[alias].info() if alias in running else self._policies.asleep(bodies[alias]) for alias in sorted(bodies)]

    def base_models(self) -> Sequence[str]:
        return sorted(self._bases.loaded())

    def engines(self) -> Sequence[Engine]:
        return [base.engine for base in self._bases.loaded().values()]


def _served(base: BaseRuntime, policy: PolicyVersion, alias: str) -> Served:
    return Served(
        policy=policy,
        alias=alias,
        codec=base.codec,
        splicer=base.splicer,
        engine=base.engine,
        context_length=base.host.context_length,
        stop_token_ids=tuple(base.codec.stop_token_ids),
    )
