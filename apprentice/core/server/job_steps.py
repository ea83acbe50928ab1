"""The phases of a train job: load, train, publish, sync, check. One method a phase; `TrainJobs` decides when they run.

Every phase can be run again: loading reads immutable records, training starts from the published checkpoint, publishing
is atomic and knows its job, sync and canary only read. The step that is served moves last. Whoever cancels a job waits
until the thread that computes has let go of the weights.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..engines.protocol import Engine, PolicyVersion
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
from .policies import Policies, PolicyRuntime, canary_rows
from .policy_state import write_policy

log = logging.getLogger(__name__)

ENGINE_SECONDS = 600.0
"""Deadline of what a job asks of the engine: to pause, to load the new adapter, to score the canary."""

Enter = Callable[[JobPhase], Awaitable[None]]
Progress = Callable[[JsonObject], Coroutine[None, None, None]]
T = TypeVar("T")


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
        checkpoint = await _in_thread(self._publish, runtime, job_id, request, trained)
        return await self._after_publishing(runtime, checkpoint, enter, trained)

    async def undo(self, job_id: str, alias: str) -> int:
        """After a failure: withdraw the job's checkpoint, put the trainer back, and say which step is served."""
        published = await asyncio.to_thread(self._policies.store.latest, alias)
        if published is not None and published.state.job_id == job_id:
            await self._policies.withdraw(alias, published)
        runtime = self._policies.running().get(alias)
        if runtime is not None and runtime.dirty:
            await self._policies.revert(runtime)
        return await self.step(alias)

    async def step(self, alias: str) -> int:
        """The step that is served, or would be once the policy is in memory."""
        runtime = self._policies.running().get(alias)
        if runtime is not None:
            return runtime.step
        latest = await asyncio.to_thread(self._policies.store.latest, alias)
        return 0 if latest is None else latest.step

    async def _train(self, runtime: PolicyRuntime, request: GrpoJob | SftJob, enter: Enter, progress: Progress) -> _Trained | Outcome:
        if runtime.dirty:
            await self._policies.revert(runtime)
        work = await _in_thread(self._prepare, runtime, request)
        if work.example is None:
            return Outcome(runtime.step, runtime.step, work.fates, work.metrics, reason=work.reason)
        rows = [*canary_rows(runtime.base), [*work.example.prompt_ids, *work.example.token_ids][-MAX_ROW:]]
        await enter("forward_backward")
        async with _paused(runtime.base.engine), self._reports(progress) as report:
            old = await _in_thread(runtime.trainer.score, rows)
            runtime.dirty = True
            outcome = await _in_thread(work.run, report)
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

    @asynccontextmanager
    async def _reports(self, progress: Progress) -> AsyncIterator[Callable[[JsonObject], None]]:
        """For the training thread: hand a report over and go on, or end there if the server stops.

        All reports are recorded, in their order, when the block ends; an error of recording is raised then.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[JsonObject | None]()

        async def record() -> None:
            while (data := await queue.get()) is not None:
                await progress(data)

        def report(data: JsonObject) -> None:
            if self._stopping.is_set():
                raise TrainJobFailed("the server is stopping; the job goes on when it starts again")
            loop.call_soon_threadsafe(queue.put_nowait, data)

        recorder = asyncio.create_task(record())
        try:
            yield report
        finally:
            queue.put_nowait(None)
            await recorder

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
        version, engine = PolicyVersion(runtime.alias, checkpoint.step), runtime.base.engine
        await enter("sync")
        if version not in engine.loaded():
            async with _deadline(f"the engine did not load {runtime.alias}@{checkpoint.step}"):
                await self._policies.load(runtime.base, version, checkpoint.adapter)
        await enter("canary")
        metrics = dict(checkpoint.state.metrics)
        async with _deadline(f"the engine did not score the canary of {runtime.alias}@{checkpoint.step}"):
            if trained is None:
                report = await self._policies.canary(runtime, version)
            else:
                new = await _in_thread(runtime.trainer.score, trained.rows)
                report = await check_canary(engine, version, trained.rows, new, trained.old)
                metrics["canary/moved"] = report.moved
        metrics["canary/max_difference"] = report.max_difference
        await self._policies.advance(runtime, checkpoint)
        return Outcome(checkpoint.step - 1, checkpoint.step, checkpoint.state.fates, metrics, str(checkpoint.adapter))


@asynccontextmanager
async def _deadline(what: str) -> AsyncIterator[None]:
    """TrainJobFailed, saying `what`, if the block takes longer than ENGINE_SECONDS."""
    try:
        async with asyncio.timeout(ENGINE_SECONDS):
            yield
    except TimeoutError as error:
        raise TrainJobFailed(f"{what} within {ENGINE_SECONDS:g} s") from error


@asynccontextmanager
async def _paused(engine: Engine) -> AsyncIterator[None]:
    """The engine rests within the block, and works again after it, however it ends."""
    try:
        async with _deadline("the engine did not pause"):
            await engine.pause()
        yield
    finally:
        await engine.resume()


async def _in_thread(function: Callable[..., T], *arguments: object) -> T:
    """The function's result. Cancelled, it waits for the thread's end first: what the thread uses is free afterwards."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()) is not None:
            log.info("the job was stopped: %s", error)
        raise


def _nothing_to_train(batch: Batch) -> str:
    """One sentence with the count of each fate."""
    counts = {fate: list(batch.fates.values()).count(fate) for fate in dict.fromkeys(batch.fates.values())}
    listed = ", ".join(f"{count} {fate.value}" for fate, count in counts.items())
    return f"none of {len(batch.fates)} trajectories gives a gradient ({listed})"
