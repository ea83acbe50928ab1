"""Policies, train jobs and checkpoints as rows. Knows no locks and no threads.

A job's state moves forward until it is terminal (`trained`, `no_update`, `failed`) and then stays. The checkpoints are a
mirror of the checkpoint folders: the folder is the truth, a row may be written again.
"""

from __future__ import annotations

import sqlite3
import time
from hashlib import sha256
from typing import Any, Literal

from ..errors import Conflict, IdempotencyConflict, ModelMismatch, UnknownCheckpoint, UnknownJob, UnknownModel
from ..records import JsonObject, TrainResult
from ..wire import CheckpointInfo, JobPhase, JobState, RegisterModel, TrainEvent, TrainJob
from .ledger_tokens import dump_json, load_json, pack_text, unpack_text

EventKind = Literal["phase", "progress", "end"]
TERMINAL: frozenset[JobState] = frozenset({"trained", "no_update", "failed"})
_JOB = "seq, id, policy, kind, state, phase, created_at, updated_at, result"


def put_policy(connection: sqlite3.Connection, body: RegisterModel) -> bool:
    """True if new. The same body again is no change; another body for the same policy is a ModelMismatch."""
    policy = f"{body.project}/{body.name}"
    row = connection.execute("SELECT body FROM policies WHERE policy = ?", (policy,)).fetchone()
    if row is None:
        packed = pack_text(body.model_dump_json().encode())
        connection.execute("INSERT INTO policies (policy, body, at) VALUES (?,?,?)", (policy, packed, time.time()))
        return True
    stored = RegisterModel.model_validate_json(unpack_text(row[0]))
    if stored != body:
        differing = [name for name in RegisterModel.model_fields if getattr(stored, name) != getattr(body, name)]
        raise ModelMismatch(f"policy {policy} is already registered with another {', '.join(differing)}", param=differing[0])
    return False


def policies(connection: sqlite3.Connection) -> tuple[RegisterModel, ...]:
    rows = connection.execute("SELECT body FROM policies ORDER BY seq").fetchall()
    return tuple(RegisterModel.model_validate_json(unpack_text(row[0])) for row in rows)


def policy(connection: sqlite3.Connection, name: str) -> RegisterModel:
    row = connection.execute("SELECT body FROM policies WHERE policy = ?", (name,)).fetchone()
    if row is None:
        raise UnknownModel(f"there is no policy {name} in this ledger", param="policy")
    return RegisterModel.model_validate_json(unpack_text(row[0]))


def create_job(connection: sqlite3.Connection, job: TrainJob, request_json: bytes, idempotency_key: str | None) -> TrainJob:
    """Store a job with its request. A known key gives the job it made, if the request is the same, byte for byte."""
    digest = sha256(request_json).digest()
    if idempotency_key is not None:
        row = connection.execute("SELECT id, request_hash FROM jobs WHERE idempotency_key = ?", (idempotency_key,)).fetchone()
        if row is not None:
            if row[1] != digest:
                raise IdempotencyConflict(
                    f"idempotency key {idempotency_key!r} was used for job {row[0]} with another body", param="idempotency_key"
                )
            return find_job(connection, row[0])
    if connection.execute("SELECT 1 FROM jobs WHERE id = ?", (job.id,)).fetchone() is not None:
        raise Conflict(f"train job {job.id} exists already", param="id")
    connection.execute(
        "INSERT INTO jobs (id, policy, kind, state, phase, created_at, updated_at, result, request, idempotency_key, request_hash) "
        "VALUES (?,?,?,?,?,?,?,?,?,?,?)",
        (
            job.id,
            job.policy,
            job.kind,
            job.state,
            job.phase,
            job.created_at,
            job.updated_at,
            None if job.result is None else pack_text(job.result.model_dump_json().encode()),
            pack_text(request_json),
            idempotency_key,
            digest,
        ),
    )
    return job


def update_job(
    connection: sqlite3.Connection, job_id: str, state: JobState | None, phase: JobPhase | None, result: TrainResult | None
) -> TrainJob:
    """Change what is given and move `updated_at`. A job that has ended is not changed: saying the same again is accepted."""
    before = find_job(connection, job_id)
    wanted = before.model_copy(
        update={"state": state or before.state, "phase": phase or before.phase, "result": result if result is not None else before.result}
    )
    if before.state in TERMINAL:
        if wanted.model_dump_json() != before.model_dump_json():
            raise Conflict(f"train job {job_id} has ended as {before.state} and cannot change any more", param="state")
        return before
    connection.execute(
        "UPDATE jobs SET state = ?, phase = ?, result = ?, updated_at = ? WHERE id = ?",
        (
            wanted.state,
            wanted.phase,
            None if wanted.result is None else pack_text(wanted.result.model_dump_json().encode()),
            time.time(),
            job_id,
        ),
    )
    return find_job(connection, job_id)


def find_job(connection: sqlite3.Connection, job_id: str) -> TrainJob:
    return _job(_job_row(connection, job_id))


def jobs(connection: sqlite3.Connection, state: JobState | None) -> tuple[TrainJob, ...]:
    where, values = ("", ()) if state is None else ("WHERE state = ? ", (state,))
    return tuple(_job(row) for row in connection.execute(f"SELECT {_JOB} FROM jobs {where}ORDER BY seq", values).fetchall())


def job_of_key(connection: sqlite3.Connection, idempotency_key: str) -> str | None:
    row = connection.execute("SELECT id FROM jobs WHERE idempotency_key = ?", (idempotency_key,)).fetchone()
    return None if row is None else str(row[0])


def job_request(connection: sqlite3.Connection, job_id: str) -> bytes:
    seq = _job_row(connection, job_id)[0]
    return unpack_text(connection.execute("SELECT request FROM jobs WHERE seq = ?", (seq,)).fetchone()[0])


def append_event(connection: sqlite3.Connection, job_id: str, kind: EventKind, data: JsonObject) -> TrainEvent:
    """The next event of a job; `seq` counts from 1 without gaps."""
    job = _job_row(connection, job_id)[0]
    seq = int(connection.execute("SELECT COALESCE(MAX(seq), 0) + 1 FROM job_events WHERE job = ?", (job,)).fetchone()[0])
    event = TrainEvent(seq=seq, job_id=job_id, kind=kind, at=time.time(), data=data)
    connection.execute("INSERT INTO job_events (job, seq, body) VALUES (?,?,?)", (job, seq, pack_text(dump_json(event.model_dump()))))
    return event


def events(connection: sqlite3.Connection, job_id: str, after: int) -> tuple[TrainEvent, ...]:
    job = _job_row(connection, job_id)[0]
    rows = connection.execute("SELECT body FROM job_events WHERE job = ? AND seq > ? ORDER BY seq", (job, after)).fetchall()
    return tuple(TrainEvent.model_validate(load_json(unpack_text(row[0]))) for row in rows)


def put_checkpoint(connection: sqlite3.Connection, info: CheckpointInfo) -> None:
    connection.execute(
        "INSERT INTO checkpoints (policy, step, path, created_at, metrics, pinned) VALUES (?,?,?,?,?,?) "
        "ON CONFLICT (policy, step) DO UPDATE SET path = excluded.path, created_at = excluded.created_at, "
        "metrics = excluded.metrics, pinned = excluded.pinned, deleted = 0",
        (info.policy, info.step, info.path, info.created_at, pack_text(dump_json(info.metrics)), int(info.pinned)),
    )


def checkpoints(connection: sqlite3.Connection, policy: str | None) -> tuple[CheckpointInfo, ...]:
    """Those not deleted, by policy and step; `latest` marks the highest step of each policy."""
    where, values = ("", ()) if policy is None else ("AND policy = ? ", (policy,))
    rows = connection.execute(
        "SELECT policy, step, path, created_at, metrics, pinned, step = MAX(step) OVER (PARTITION BY policy) "
        f"FROM checkpoints WHERE deleted = 0 {where}ORDER BY policy, step",
        values,
    ).fetchall()
    return tuple(_checkpoint(row) for row in rows)


def mark_checkpoint(connection: sqlite3.Connection, policy: str, step: int, pinned: bool | None, deleted: bool | None) -> None:
    row = connection.execute("SELECT pinned, deleted FROM checkpoints WHERE policy = ? AND step = ?", (policy, step)).fetchone()
    if row is None:
        raise UnknownCheckpoint(f"there is no checkpoint {policy}@{step} in this ledger", param="step")
    values = (row[0] if pinned is None else int(pinned), row[1] if deleted is None else int(deleted), policy, step)
    connection.execute("UPDATE checkpoints SET pinned = ?, deleted = ? WHERE policy = ? AND step = ?", values)


def _job_row(connection: sqlite3.Connection, job_id: str) -> tuple[Any, ...]:
    row = connection.execute(f"SELECT {_JOB} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise UnknownJob(f"there is no train job {job_id} in this ledger", param="id")
    return row


def _job(row: tuple[Any, ...]) -> TrainJob:
    names = ("id", "policy", "kind", "state", "phase", "created_at", "updated_at")
    result = None if row[8] is None else TrainResult.model_validate_json(unpack_text(row[8]))
    return TrainJob.model_validate({**dict(zip(names, row[1:8], strict=True)), "result": result})


def _checkpoint(row: tuple[Any, ...]) -> CheckpointInfo:
    names = ("policy", "step", "path", "created_at")
    metrics = load_json(unpack_text(row[4]))
    return CheckpointInfo.model_validate(
        {**dict(zip(names, row[:4], strict=True)), "metrics": metrics, "pinned": bool(row[5]), "latest": bool(row[6])}
    )
