"""Train jobs: queued in the ledger, run one at a time, resumed after a kill at any point, always ended with a reason.

A job is a pure function of the checkpoint it starts from and of what the ledger holds, so running it again from the
start gives the same weights, bit for bit, on the same machine. A resume therefore needs one fact only: was the job's
checkpoint published? If so, the job goes on with the sync; if not, it starts again.

    queued → loading → forward_backward → checkpoint → sync → canary → done

Sampling is paused while gradients are computed. Versions that are being sampled go on afterwards as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from pydantic import TypeAdapter

from ..errors import ApprenticeError, JobConflict, LedgerError
from ..records import JsonObject, TrainResult, TrainStatus, new_id
from ..wire import GrpoJob, JobPhase, SftJob, TrainEvent, TrainJob, TrainRequest
from .job_inputs import check_request
from .job_steps import JobSteps
from .ledger import Ledger
from .ledger_jobs import EventKind

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
LEDGER_SECONDS = 5.0
"""Pause before a job's end that the ledger did not take (a full disk, say) is written again."""
_REQUEST: TypeAdapter[GrpoJob | SftJob] = TypeAdapter(TrainRequest)


class TrainJobs:
    """The queue and its one worker. `start` first; `close` stops after the running phase, the job goes on at the next start.

    `on_phase(job_id, phase)` is called as each phase begins, before any of its work.
    """

    def __init__(self, ledger: Ledger, steps: JobSteps, on_phase: Callable[[str, JobPhase], None] | None = None) -> None:
        self._ledger = ledger
        self._steps = steps
        self._on_phase = on_phase
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._accepting = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin working; jobs that a killed server left behind come first, in their order."""
        self._worker = asyncio.create_task(self._work(), name="apprentice-train-jobs")
        self._wake.set()

    async def close(self) -> None:
        self._steps.stop()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
            self._worker = None

    async def submit(self, request: GrpoJob | SftJob, idempotency_key: str | None) -> TrainJob:
        """Check everything that can be known now, record the job and queue it.

        Raises UnknownModel, UnknownTrajectory, TrajectoryStateError (open), ForeignTrajectory, InvalidRequest,
        JobConflict (`on_busy="refuse"`), IdempotencyConflict.
        """
        now = time.time()
        job = TrainJob(
            id=new_id("job"), policy=request.policy, kind=request.kind, state="queued", phase="queued", created_at=now, updated_at=now
        )
        body = request.model_dump_json().encode()
        known = await asyncio.to_thread(self._ledger.job_of_key, idempotency_key) if idempotency_key else None
        if known is None:
            await asyncio.to_thread(check_request, self._ledger, request)
        async with self._accepting:  # of two jobs that want to be alone, one is refused
            if known is None and request.on_busy == "refuse" and (busy := await self._unfinished()):
                raise JobConflict(f"train job {busy[0].id} is {busy[0].state}, and on_busy is 'refuse'", param="on_busy")
            job = await asyncio.to_thread(self._ledger.create_job, job, body, idempotency_key)
        self._wake.set()
        return job

    def job(self, job_id: str) -> TrainJob:
        return self._ledger.job(job_id)

    def jobs(self) -> Sequence[TrainJob]:
        return self._ledger.jobs()[::-1]

    async def events(self, job_id: str, after: int) -> AsyncIterator[TrainEvent]:
        """Every event after `after`, then new ones as they come; ends after `kind="end"`. Raises UnknownJob."""
        while True:
            async with self._changed:
                found = await asyncio.to_thread(self._ledger.events, job_id, after)
                ended = not found and await self._ended(job_id)
                if not found and not ended:
                    await self._changed.wait()
            for event in found:
                yield event
                after = event.seq
                if event.kind == "end":
                    return
            if ended and not await asyncio.to_thread(self._ledger.events, job_id, after):
                return

    async def _ended(self, job_id: str) -> bool:
        """Whether the job has ended. Writes the last event if the server was killed between the job's end and that event."""
        job = await asyncio.to_thread(self._ledger.job, job_id)
        if job.result is None:
            return False
        events = await asyncio.to_thread(self._ledger.events, job_id, 0)
        if not any(event.kind == "end" for event in events):
            await asyncio.to_thread(self._ledger.append_event, job_id, "end", {"result": job.result.model_dump(mode="json")})
        return True

    async def _unfinished(self) -> list[TrainJob]:
        """Oldest first; one that a killed server left running comes before those that wait."""
        queued = await asyncio.to_thread(self._ledger.jobs, "queued")
        running = await asyncio.to_thread(self._ledger.jobs, "running")  # after the queued ones: none is missed that starts now
        started = {job.id for job in running}
        return [*running, *(job for job in queued if job.id not in started)]

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while waiting := await self._unfinished():
                    await self._run(waiting[0])
            except Exception:  # the supervised boundary of the queue: jobs stay in the ledger and are looked at again
                log.exception("the queue of train jobs stumbled; it goes on in %g s", LEDGER_SECONDS)
                await asyncio.sleep(LEDGER_SECONDS)
                self._wake.set()

    async def _run(self, job: TrainJob) -> None:
        """One job to its terminal state. Whatever goes wrong becomes the job's reason."""
        heartbeat = asyncio.create_task(self._beat(job.id))
        try:
            await self._end(job.id, await self._result(job))
        finally:
            heartbeat.cancel()

    async def _result(self, job: TrainJob) -> TrainResult:
        config: JsonObject = {}
        try:
            request = _REQUEST.validate_json(await asyncio.to_thread(self._ledger.job_request, job.id))
            config = request.config.model_dump(mode="json")
            outcome = await self._steps.run(
                job.id, request, lambda phase: self._enter(job.id, phase), lambda data: self._tell(job.id, "progress", data)
            )
        except ApprenticeError as error:
            log.error("train job %s failed: %s", job.id, error)
            return await self._failed(job, config, str(error))
        except OverflowError as error:
            log.error("train job %s failed: %s", job.id, error)
            return await self._failed(job, config, f"a reward or an option of the job is too large to compute with: {error}")
        except Exception as error:  # the supervised boundary: a job always ends, with its cause
            log.exception("train job %s failed", job.id)
            return await self._failed(job, config, f"the job stopped on an unexpected error, {_named(error)}")
        return TrainResult(
            job_id=job.id,
            policy=job.policy,
            status=TrainStatus.no_update if outcome.reason else TrainStatus.trained,
            reason=outcome.reason,
            previous_step=outcome.previous_step,
            step=outcome.step,
            fates=outcome.fates,
            metrics=outcome.metrics,
            config=config,
            checkpoint=outcome.checkpoint,
        )

    async def _failed(self, job: TrainJob, config: JsonObject, reason: str) -> TrainResult:
        """What was served goes on being served; a policy that could not be put back is put back before it trains again."""
        try:
            step = await self._steps.undo(job.id, job.policy)
        except Exception as error:  # as above: the second error is told beside the first
            log.exception("train job %s could not be undone", job.id)
            reason = f"{reason}; the policy could not be put back either: {_named(error)}"
            step = await self._steps.step(job.policy)
        return TrainResult(
            job_id=job.id, policy=job.policy, status=TrainStatus.failed, reason=reason, previous_step=step, step=step, config=config
        )

    async def _enter(self, job_id: str, phase: JobPhase) -> None:
        await asyncio.to_thread(self._ledger.update_job, job_id, state="running", phase=phase)
        await self._tell(job_id, "phase", {"phase": phase})
        if self._on_phase is not None:
            self._on_phase(job_id, phase)

    async def _beat(self, job_id: str) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                await asyncio.to_thread(self._ledger.update_job, job_id)
            except LedgerError as error:
                log.warning("the heartbeat of train job %s could not be recorded: %s", job_id, error)

    async def _end(self, job_id: str, result: TrainResult) -> None:
        """Record how the job ended. While the ledger takes nothing the job counts as running: its end is written again."""
        while True:
            try:
                async with self._changed:
                    await asyncio.to_thread(self._ledger.update_job, job_id, state=result.status.value, phase="done", result=result)
                    await self._ended(job_id)
                    self._changed.notify_all()
                break
            except LedgerError as error:
                log.error("the end of train job %s could not be recorded, it is tried again: %s", job_id, error)
                await asyncio.sleep(LEDGER_SECONDS)
        if self._on_phase is not None:
            self._on_phase(job_id, "done")

    async def _tell(self, job_id: str, kind: EventKind, data: JsonObject) -> None:
        await asyncio.to_thread(self._ledger.append_event, job_id, kind, data)
        async with self._changed:
            self._changed.notify_all()


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, ApprenticeError) else f"{type(error).__name__}: {error}"
