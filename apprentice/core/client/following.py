"""Waiting for a train job: its events as they happen, by polling where streams do not get through.

A job always ends, so this does too: when the job is terminal, when its heartbeat stops, or when the server is gone.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from ..errors import DeadlineExceeded, ServerUnavailable, TrainJobFailed
from ..records import TrainResult
from ..wire import TrainEvent, TrainJob
from .api import ControlApi
from .progress import Progress

TERMINAL = frozenset({"trained", "no_update", "failed"})
STREAM_SILENCE = 45.0
"""Seconds without a byte (heartbeats come every few) after which a stream counts as lost."""
STREAM_TRIES = 3
"""Streams that may break without a new event before polling takes over."""
POLL_SECONDS = 1.0
HEARTBEAT_LIMIT = 600.0
"""Seconds that a running job may be seen without `updated_at` moving."""


async def follow(api: ControlApi, job: TrainJob, progress: Progress) -> TrainResult:
    """The result of a submitted job. TrainJobFailed with its reason; DeadlineExceeded if the job stops moving."""
    if job.state not in TERMINAL:
        await _stream(api, job, progress)
        job = await _poll(api, job.id, progress)
    if job.state == "failed":
        reason = (job.result.reason if job.result else None) or "the server gave no reason"
        details = {"job_id": job.id, "result": job.result.model_dump(mode="json") if job.result else None}
        raise TrainJobFailed(f"train job {job.id} of {job.policy} failed: {reason}", details=details)
    if job.result is None:
        raise TrainJobFailed(f"train job {job.id} ended as {job.state} without a result", details={"job_id": job.id})
    return job.result


async def _stream(api: ControlApi, job: TrainJob, progress: Progress) -> None:
    """Show events until the last one, joining again where a stream broke; gives up silently (polling is next)."""
    seen, failures = 0, 0
    while failures < STREAM_TRIES:
        before = seen
        try:
            async with aclosing(api.events(job.id, seen, STREAM_SILENCE)) as events:
                async for event in events:
                    seen = max(seen, event.seq)
                    show(event, progress)
                    if event.kind == "end":
                        return
        except ServerUnavailable:
            progress.note("the event stream broke, joining again")
        failures = 0 if seen > before else failures + 1
        await asyncio.sleep(0.05 * 2**failures)


async def _poll(api: ControlApi, job_id: str, progress: Progress) -> TrainJob:
    moved, heartbeat = time.monotonic(), -1.0
    while True:
        job = await api.job(job_id)
        if job.state in TERMINAL:
            return job
        if job.updated_at != heartbeat or job.state == "queued":
            moved, heartbeat = time.monotonic(), job.updated_at
        if time.monotonic() - moved > HEARTBEAT_LIMIT:
            raise DeadlineExceeded(f"train job {job_id} is {job.state} ({job.phase}) but showed no sign of life for {HEARTBEAT_LIMIT:g} s")
        progress.note(f"train job: {job.phase}")
        await asyncio.sleep(POLL_SECONDS)


def show(event: TrainEvent, progress: Progress) -> None:
    """An event as one note."""
    data = event.data
    if event.kind == "phase":
        progress.note(f"train job: {data.get('phase', '')}")
    elif event.kind == "progress":
        progress.note("train job: " + ", ".join(f"{key} {value}" for key, value in data.items()))
