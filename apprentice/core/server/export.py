"""Recorded calls as files for other tools: Parquet or JSON lines, one row per completion, nothing rounded or left out.

Works in batches over a snapshot per batch, so its memory is bounded whatever the ledger holds, and beside a running
server. The file appears under its name only when it is complete. Knows the ledger's public reads, not its rows.

A JSON line is `{"completion": <the Completion record>, <what is said of its trajectory>}`. A Parquet row holds the same
with the completion's fields as columns: ids as lists of unsigned integers, log-probabilities as lists of doubles, and
whatever has no fixed shape (messages, tools, sampling, origin, metadata) as JSON text.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl

from ..errors import InvalidRequest, LedgerFull
from ..records import Completion, Trajectory
from .ledger import Ledger

ExportFormat = Literal["parquet", "jsonl"]

_BATCH = 32
_PIECE_BYTES = 64 * 2**20
_IDS, _FLOATS = pl.List(pl.UInt32()), pl.List(pl.Float64())
SCHEMA: dict[str, pl.DataType] = {
    "id": pl.String(),
    "call_id": pl.String(),
    "choice": pl.Int64(),
    "trajectory_id": pl.String(),
    "policy": pl.String(),
    "policy_version": pl.Int64(),
    "prompt_ids": _IDS,
    "token_ids": _IDS,
    "logprobs": _FLOATS,
    "sampling_logprobs": _FLOATS,
    "sampling": pl.String(),
    "messages": pl.String(),
    "tools": pl.String(),
    "tool_choice": pl.String(),
    "response_format": pl.String(),
    "message": pl.String(),
    "finish_reason": pl.String(),
    "parse_error": pl.String(),
    "origin": pl.String(),
    "parent": pl.String(),
    "branch": pl.String(),
    "created_at": pl.Float64(),
    "queued_seconds": pl.Float64(),
    "sampling_seconds": pl.Float64(),
    "completion_reward": pl.Float64(),
    "reward": pl.Float64(),
    "status": pl.String(),
    "error": pl.String(),
    "scenario_id": pl.String(),
    "group_id": pl.String(),
    "metrics": pl.String(),
    "metadata": pl.String(),
}
"""Columns of the Parquet file. `reward` is the trajectory's, `completion_reward` the completion's own; null is no reward."""

_JSON_COLUMNS = ("sampling", "messages", "tools", "tool_choice", "response_format", "message", "origin", "metrics", "metadata")


def export_runs(ledger: Ledger, out: Path, format: ExportFormat | None = None, *, policy: str | None = None) -> int:
    """Write all recorded completions to `out` and return how many; with `policy` only its calls and trajectories.

    Without `format` the file's suffix says it. Raises InvalidRequest for an unknown format or a path that is no place for
    a file, LedgerFull if the target cannot be written.
    """
    if (format or out.suffix.removeprefix(".")) not in get_args(ExportFormat):
        expected = " or ".join(get_args(ExportFormat))
        raise InvalidRequest(f"an export is {expected}, by its format or its file's suffix, got {format or out.name!r}", param="format")
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidRequest(f"an export goes to a file in an existing folder, got {out}", param="out")
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            part = Path(folder) / out.name
            written = (
                _write_lines(ledger, part, policy)
                if (format or part.suffix) in ("jsonl", ".jsonl")
                else _write_parquet(ledger, part, policy)
            )
            os.replace(part, out)
    except OSError as error:
        raise LedgerFull(f"the export {out} could not be written: {error}") from error
    return written


def _write_lines(ledger: Ledger, part: Path, policy: str | None) -> int:
    written = 0
    with part.open("w", encoding="utf-8") as lines:
        for batch in _batches(ledger, policy):
            for completion, trajectory in batch:
                lines.write(json.dumps({"completion": completion.model_dump(), **_context(completion, trajectory)}) + "\n")
            written += len(batch)
        lines.flush()
        os.fsync(lines.fileno())
    return written


def _write_parquet(ledger: Ledger, part: Path, policy: str | None) -> int:
    """Pieces of bounded size become files of their own beside `part`; polars then streams them into one."""
    pieces: list[Path] = []
    written, frames = 0, [pl.DataFrame(schema=SCHEMA)]

    def flush() -> None:
        pieces.append(part.with_name(f"piece-{len(pieces):08d}.parquet"))
        pl.concat(frames).write_parquet(pieces[-1])
        del frames[1:]

    for batch in _batches(ledger, policy):
        frames.append(pl.DataFrame([_row(*one) for one in batch], schema=SCHEMA, orient="row"))
        written += len(batch)
        if sum(frame.estimated_size() for frame in frames) > _PIECE_BYTES:
            flush()
    flush()
    pl.scan_parquet(pieces, glob=False).sink_parquet(part)
    return written


def _batches(ledger: Ledger, policy: str | None) -> Iterator[list[tuple[Completion, Trajectory | None]]]:
    for batch in ledger.scan(policy=policy, batch=_BATCH):
        ids = dict.fromkeys(completion.trajectory_id for completion in batch if completion.trajectory_id is not None)
        known = {id_: ledger.trajectory(id_, tokens=False) for id_ in ids}
        yield [(completion, known.get(completion.trajectory_id or "")) for completion in batch]


def _row(completion: Completion, trajectory: Trajectory | None) -> dict[str, Any]:
    fields = completion.model_dump()
    request: dict[str, Any] = fields.pop("request")
    row = {**fields, **request, **_context(completion, trajectory)}
    packed = {name: None if row[name] is None else json.dumps(row[name]) for name in _JSON_COLUMNS}
    return {name: packed[name] if name in packed else row[name] for name in SCHEMA}


def _context(completion: Completion, trajectory: Trajectory | None) -> dict[str, Any]:
    """What is said of a completion besides its record: rewards, and the trajectory it belongs to."""
    rewards: dict[str, float] = {} if trajectory is None else trajectory.completion_rewards
    said = ("reward", "status", "error", "scenario_id", "group_id", "metrics", "metadata")
    values: dict[str, Any] = dict.fromkeys(said) if trajectory is None else trajectory.model_dump(include=set(said))
    return {"completion_reward": rewards.get(completion.id, completion.reward), **values}
