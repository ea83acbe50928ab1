"""The registry: from a model name to who answers it, for the HTTP layer. Everything it gives out is in memory and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..engines.protocol import BASE, Engine, PolicyVersion
from ..errors import UnknownModel
from ..wire import ModelInfo, RegisterModel
from .bases import BasePool, BaseRuntime
from .jobs import TrainJobs
from .ledger import Ledger
from .policies import Policies, is_step
from .registry_protocol import Served
from .stored_checkpoints import StoredCheckpoints


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
        if at and not is_step(step):
            raise UnknownModel(f"model '{model}' does not exist: after '@' a step number was expected, got '{step}'", param="model")
        runtime = self._policies.running().get(alias)
        if runtime is None:
            runtime = await self._policies.get(alias)
        version = PolicyVersion(alias, int(step)) if at else runtime.version
        await self._policies.load_older(runtime, version.version)
        held, ready = partial(self._policies.held, version), partial(self._policies.load_older, runtime, version.version)
        return replace(_served(runtime.base, version, alias), held=held, ready=ready)

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
