"""The phases of a train job: load, train, publish, sync, check. One method a phase; `TrainJobs` decides when they run.

Every phase can be run again: loading reads immutable records, training starts from the published checkpoint, publishing
is atomic and knows its job, sync and canary only read. The step that is served moves last.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..engines.protocol import PolicyVersion
from ..errors import CheckpointCorrupt, TrainJobFailed
from ..records import Fate, JsonObject
from ..training.checkpoints import Checkpoint, CheckpointState
from ..training.forest import TokenSample
from ..training.trainer import StepOutcome
from ..wire import GrpoJob, JobPhase, SftJob
from .canary import MAX_ROW, check_canary
from .job_batch import Batch, build_batch
from .job_inputs import load_groups, load_targets
from .ledger import Ledger
from .policies import Policies, PolicyRuntime, canary_rows, write_policy

SYNC_SECONDS = 600.0
"""Deadline of loading a new adapter into the engine."""

Enter = Callable[[JobPhase], Awaitable[None]]
Progress = Callable[[JsonObject], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `reason` is set exactly if no weight moved."""

    previous_step: int
    step: int
    fates: dict[str, Fate] = field(default_factory=dict[str, Fate])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    checkpoint: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """A job that is ready to be computed by `run(report)`. `example` is one of its rows; None: nothing to train, for `reason`."""

    run: Callable[[Callable[[JsonObject], None]], StepOutcome]
    fates: dict[str, Fate]
    metrics: dict[str, float]
    example: TokenSample | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Trained:
    """What training left: the metrics, and the rows of the canary with the log-probabilities before the step."""

    metrics: dict[str, float]
    fates: dict[str, Fate]
    rows: list[list[int]]
    old: list[list[float]]


class JobSteps:
    """Runs one job at a time on the server's policies."""

    def __init__(self, ledger: Ledger, policies: Policies) -> None:
        self._ledger = ledger
        self._policies = policies
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let the training thread end at its next progress report; what it did is thrown away."""
        self._stopping.set()

    async def run(self, job_id: str, request: GrpoJob | SftJob, enter: Enter, progress: Progress) -> Outcome:
        """The whole job. Any exception means that nothing changed for those who sample, once `undo` has run."""
        await enter("loading")
        runtime = await self._policies.get(request.policy)
        published = await asyncio.to_thread(self._policies.store.latest, request.policy)
        if published is not None and published.state.job_id == job_id:
            return await self._after_publishing(runtime, published, enter, None)
        trained = await self._train(runtime, request, enter, progress)
        if isinstance(trained, Outcome):
            return trained
        await enter("checkpoint")
        checkpoint = await asyncio.to_thread(self._publish, runtime, job_id, request, trained)
        return await self._after_publishing(runtime, checkpoint, enter, trained)

    async def undo(self, job_id: str, alias: str) -> int:
        """After a failure: withdraw the job's checkpoint, put the trainer back, and say which step is served."""
        runtime = self._policies.running().get(alias)
        if runtime is None:
            latest = await asyncio.to_thread(self._policies.store.latest, alias)
            return 0 if latest is None else latest.step
        published = await asyncio.to_thread(self._policies.store.latest, alias)
        if published is not None and published.state.job_id == job_id:
            await runtime.base.engine.unload(PolicyVersion(alias, published.step))
            await asyncio.to_thread(self._policies.store.delete, alias, published.step)
        await self._policies.revert(runtime)
        return runtime.step

    async def _train(self, runtime: PolicyRuntime, request: GrpoJob | SftJob, enter: Enter, progress: Progress) -> _Trained | Outcome:
        work = await asyncio.to_thread(self._prepare, runtime, request)
        if work.example is None:
            return Outcome(runtime.step, runtime.step, work.fates, work.metrics, reason=work.reason)
        rows = [*canary_rows(runtime.base), [*work.example.prompt_ids, *work.example.token_ids][-MAX_ROW:]]
        report = self._threadsafe(progress)
        await enter("forward_backward")
        await runtime.base.engine.pause()
        try:
            old = await asyncio.to_thread(runtime.trainer.score, rows)
            outcome = await asyncio.to_thread(work.run, report)
        finally:
            await runtime.base.engine.resume()
        metrics = {**work.metrics, **outcome.metrics}
        if not outcome.moved:
            await self._policies.revert(runtime)
            reason = "the gradient was too small to move any weight"
            return Outcome(runtime.step, runtime.step, work.fates, metrics, reason=reason)
        return _Trained(metrics, work.fates, rows, old)

    def _prepare(self, runtime: PolicyRuntime, request: GrpoJob | SftJob) -> _Work:
        """Load and arrange what the job trains on."""
        if isinstance(request, GrpoJob):
            groups = load_groups(self._ledger, request)
            batch = build_batch(groups, request.config, context_length=runtime.base.host.context_length)
            example = max((s.tokens for s in batch.samples), key=lambda tokens: abs(tokens.advantages[0]), default=None)
            run = partial(runtime.trainer.step, batch.samples, request.config)
            return _Work(run, batch.fates, batch.metrics, example, _nothing_to_train(batch))
        targets = load_targets(self._ledger, runtime.base.codec, request)
        recorded = zip(request.trajectories, targets[len(request.demonstrations) :], strict=True)
        fates = {name: Fate.trained if turns else Fate.no_completions for name, turns in recorded}
        example = next((turns[0] for turns in targets if turns), None)
        run = partial(runtime.trainer.sft, targets, request.config)
        return _Work(run, fates, {}, example, "none of the trajectories has a sampled turn to learn from")

    def _threadsafe(self, progress: Progress) -> Callable[[JsonObject], None]:
        """For the training thread: hand a report to the event loop and go on, or end here if the server stops."""
        loop = asyncio.get_running_loop()

        def report(data: JsonObject) -> None:
            if self._stopping.is_set():
                raise TrainJobFailed("the server is stopping; the job goes on when it starts again")
            asyncio.run_coroutine_threadsafe(progress(data), loop)

        return report

    def _grpo_batch(self, runtime: PolicyRuntime, request: GrpoJob) -> Batch:
        return build_batch(load_groups(self._ledger, request), request.config, context_length=runtime.base.host.context_length)

    def _publish(self, runtime: PolicyRuntime, job_id: str, request: GrpoJob | SftJob, trained: _Trained) -> Checkpoint:
        """Write the full state, read it back, and let it appear in one rename."""
        host, alias = runtime.base.host, runtime.alias

        def write(folder: Path) -> None:
            write_policy(host, runtime.trainer, alias, folder)

        def verify(folder: Path) -> None:
            name = f"{alias}#readback"
            host.load_adapter(name, folder / "adapter")
            try:
                live, read = host.adapter_parameters(alias), host.adapter_parameters(name)
                if any(not bool((live[key] == read[key]).all()) for key in live):
                    raise CheckpointCorrupt(f"the adapter of {alias} read back from {folder} differs from the one that was written")
            finally:
                host.drop_adapter(name)

        state = CheckpointState(
            step=runtime.step + 1,
            job_id=job_id,
            metrics=trained.metrics,
            config=request.config.model_dump(mode="json"),
            fates=trained.fates,
        )
        return self._policies.store.publish(alias, runtime.step + 1, write, state, verify)

    async def _after_publishing(self, runtime: PolicyRuntime, checkpoint: Checkpoint, enter: Enter, trained: _Trained | None) -> Outcome:
        """Sync and canary; `trained` is None when a resumed job was published before the kill."""
        version = PolicyVersion(runtime.alias, checkpoint.step)
        await enter("sync")
        if version not in runtime.base.engine.loaded():
            try:
                async with asyncio.timeout(SYNC_SECONDS):
                    await runtime.base.engine.load(version, checkpoint.adapter)
            except TimeoutError as error:
                raise TrainJobFailed(f"the engine did not load {runtime.alias}@{checkpoint.step} within {SYNC_SECONDS:g} s") from error
        await enter("canary")
        metrics = dict(checkpoint.state.metrics)
        if trained is None:
            report = await self._policies.canary(runtime, version)
        else:
            new = await asyncio.to_thread(runtime.trainer.score, trained.rows)
            report = await check_canary(runtime.base.engine, version, trained.rows, new, trained.old)
            metrics["canary/moved"] = report.moved
        metrics["canary/max_difference"] = report.max_difference
        if runtime.step != checkpoint.step:
            await self._policies.advance(runtime, checkpoint)
        return Outcome(checkpoint.step - 1, checkpoint.step, checkpoint.state.fates, metrics, str(checkpoint.adapter))


def _nothing_to_train(batch: Batch) -> str:
    """One sentence with the count of each fate."""
    counts = {fate: list(batch.fates.values()).count(fate) for fate in dict.fromkeys(batch.fates.values())}
    listed = ", ".join(f"{count} {fate.value}" for fate, count in counts.items())
    return f"none of {len(batch.fates)} trajectories gives a gradient ({listed})"
