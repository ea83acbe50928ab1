"""Completions as rows: written once, as a difference to an earlier completion of the same trajectory. Knows no locks, no threads.

A row names a `base`: the completion it shares the longest start with (its `parent`, or one of the latest calls of the
trajectory when the parent is absent or shares less). Of its prompt only `rest` is stored: the ids after the first
`prefix` ids of the base's `prompt_ids + token_ids`. Messages are content-addressed blobs (equal messages exist once in
the whole ledger), and a row lists only the references after the base's first `message_prefix`; origin lineage likewise.
So an N-turn rollout costs O(N) bytes. A root's prompt is a blob too: the rollouts of a group share it.

A checksum over the expanded ids, the log-probabilities, the message references and the sampling data is compared on
every read, and a blob's content with its hash.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from ..errors import Conflict, InvalidRequest, LedgerError, TrajectoryStateError, UnknownTrajectory
from ..records import ChatRequest, Completion, JsonObject
from .ledger_expansion import Expanded, Expansions, pack_lineage
from .ledger_tokens import (
    ID_BYTES,
    MAX_ID,
    common_prefix,
    dump_json,
    floats_to_raw,
    ids_to_raw,
    load_json,
    pack_floats,
    pack_ids,
    pack_text,
    raw_to_floats,
    raw_to_ids,
    unpack_floats,
    unpack_ids,
    unpack_text,
)

COLUMNS = (
    "c.seq, c.id, c.call_id, t.id, c.policy, c.policy_version, c.parent, c.created_at, "
    "c.tokens, c.logprobs, c.sampling_logprobs, c.reply, c.settings, c.meta, c.checksum"
)
SELECT = f"SELECT {COLUMNS} FROM completions c LEFT JOIN trajectories t ON t.seq = c.trajectory "
_BASES_TRIED = 4
"""Latest calls of a trajectory that are tried as base besides the parent: enough for a few interleaved agents."""


def insert(connection: sqlite3.Connection, completion: Completion, expansions: Expansions) -> None:
    """Store one completion. The same id with equal content changes nothing; with other content it is a Conflict."""
    stored = find_by_ids(connection, [completion.id], expansions)
    if stored:
        if not _same(stored[0], completion):
            raise Conflict(f"completion {completion.id} is already recorded with other content", param="id")
        return
    trajectory = _open_trajectory(connection, completion.trajectory_id)
    prompt, tokens = _raw_ids(completion.prompt_ids, completion.id), _raw_ids(completion.token_ids, completion.id)
    base = _choose_base(connection, completion.parent, trajectory, prompt, expansions)
    messages = b"".join(ids_to_raw([expansions.store_json(connection, message)]) for message in completion.request.messages)
    reply = expansions.store_json(connection, completion.message)
    prefix, message_prefix, known = 0, 0, None
    if base is not None:
        known = expansions.get(connection, base)
        prefix, message_prefix = common_prefix(known.ids, prompt), common_prefix(known.messages, messages)
    lineage = {str(index): source for index, source in completion.origin.lineage.items()}
    expanded = Expanded(completion.id, prompt + tokens, messages + ids_to_raw([reply]), lineage)
    logprobs, sampling_logprobs = floats_to_raw(completion.logprobs), floats_to_raw(completion.sampling_logprobs)
    rest, meta = prompt[prefix * ID_BYTES :], dump_json(_meta(completion))
    seq = connection.execute(
        "INSERT INTO completions (id, call_id, trajectory, policy, policy_version, parent, created_at, base, prefix, rest, rest_blob, "
        "tokens, logprobs, sampling_logprobs, message_prefix, messages, reply, settings, meta, lineage, text_key, checksum) "
        "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            completion.id,
            completion.call_id,
            trajectory,
            completion.policy,
            completion.policy_version,
            completion.parent,
            completion.created_at,
            base,
            prefix,
            pack_ids(rest) if base is not None else None,
            expansions.store_ids(connection, rest) if base is None else None,
            pack_ids(tokens),
            pack_floats(logprobs),
            None if sampling_logprobs == logprobs else pack_floats(sampling_logprobs),
            message_prefix,
            pack_ids(messages[message_prefix * ID_BYTES :]),
            reply,
            expansions.store_json(connection, _settings(completion.request)),
            pack_text(meta),
            pack_lineage(lineage, known),
            text_key(reply_text(completion.message)),
            _checksum(expanded.ids, logprobs, sampling_logprobs, expanded.messages, meta),
        ),
    ).lastrowid
    if seq is None:
        raise LedgerError(f"completion {completion.id} got no row number from SQLite")
    for call_id in {call_id for call_id in tool_call_ids(completion.message) if _is_unicode(call_id)}:
        connection.execute("INSERT INTO tool_calls (tool_call_id, completion) VALUES (?, ?)", (call_id, seq))
    expansions.add(seq, expanded)


def load(connection: sqlite3.Connection, rows: Iterable[tuple[Any, ...]], expansions: Expansions) -> list[Completion]:
    """Completions from rows of `SELECT`, in the order of the rows. Raises LedgerError if one is not what was written."""
    completions: list[Completion] = []
    for row in rows:
        try:
            completions.append(_decode(connection, row, expansions))
        except ValueError as error:
            raise LedgerError(f"completion {row[1]} in the ledger is damaged: {error}") from error
    return completions


def find_by_ids(connection: sqlite3.Connection, ids: Sequence[str], expansions: Expansions) -> list[Completion]:
    rows: list[tuple[Any, ...]] = []
    for id_ in ids:
        rows += connection.execute(SELECT + "WHERE c.id = ?", (id_,)).fetchall() if _is_unicode(id_) else []
    return load(connection, rows, expansions)


def find_by_tool_call(
    connection: sqlite3.Connection, trajectory_id: str, tool_call_id: str, limit: int, expansions: Expansions
) -> list[Completion]:
    if not _is_unicode(tool_call_id):
        return []
    query = SELECT + "JOIN tool_calls k ON k.completion = c.seq WHERE k.tool_call_id = ? AND t.id = ? ORDER BY c.seq DESC LIMIT ?"
    return load(connection, connection.execute(query, (tool_call_id, trajectory_id, limit)).fetchall(), expansions)


def find_by_text(connection: sqlite3.Connection, trajectory_id: str, text: str, limit: int, expansions: Expansions) -> list[Completion]:
    query = SELECT + "WHERE c.trajectory = (SELECT seq FROM trajectories WHERE id = ?) AND c.text_key = ? ORDER BY c.seq DESC LIMIT ?"
    rows = connection.execute(query, (trajectory_id, text_key(text), limit)).fetchall()
    return [found for found in load(connection, rows, expansions) if reply_text(found.message) == text]


def reply_text(message: JsonObject) -> str | None:
    """The text of a reply: its content, or its text parts joined. None if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))


def tool_call_ids(message: JsonObject) -> list[str]:
    calls = message.get("tool_calls")
    ids = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [id_ for id_ in ids if isinstance(id_, str)]


def text_key(text: str | None) -> int | None:
    """A signed 64-bit hash for the index; equal texts are told apart from collisions by comparing them."""
    if not text:
        return None
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True)


def _open_trajectory(connection: sqlite3.Connection, trajectory_id: str | None) -> int | None:
    if trajectory_id is None:
        return None
    row = connection.execute("SELECT seq, status FROM trajectories WHERE id = ?", (trajectory_id,)).fetchone()
    if row is None:
        raise UnknownTrajectory(f"there is no trajectory {trajectory_id}: open it before calling the model in it", param="trajectory_id")
    if row[1] != "open":
        raise TrajectoryStateError(f"trajectory {trajectory_id} is {row[1]} and takes no more calls", param="trajectory_id")
    return int(row[0])


def _choose_base(
    connection: sqlite3.Connection, parent: str | None, trajectory: int | None, prompt: bytes, expansions: Expansions
) -> int | None:
    """The row that shares the longest start with `prompt`: the parent if the prompt continues it, else the best of the latest."""
    if trajectory is None:
        return None
    named = connection.execute("SELECT seq FROM completions WHERE id = ? AND trajectory = ?", (parent, trajectory)).fetchone()
    if named is not None and prompt.startswith(expansions.get(connection, named[0]).ids):
        return int(named[0])
    latest = connection.execute("SELECT seq FROM completions WHERE trajectory = ? ORDER BY seq DESC LIMIT ?", (trajectory, _BASES_TRIED))
    candidates = ([int(named[0])] if named is not None else []) + [int(row[0]) for row in latest.fetchall()]
    shared = {seq: common_prefix(expansions.get(connection, seq).ids, prompt) for seq in candidates}
    return max(shared, key=shared.__getitem__, default=None)


def _decode(connection: sqlite3.Connection, row: tuple[Any, ...], expansions: Expansions) -> Completion:
    (seq, id_, call_id, trajectory_id, policy, policy_version, parent, created_at) = row[:8]
    (tokens, logprobs, sampling_logprobs, reply, settings, packed_meta, checksum) = row[8:]
    expanded = expansions.get(connection, seq)
    raw_logprobs = unpack_floats(logprobs)
    raw_sampling = raw_logprobs if sampling_logprobs is None else unpack_floats(sampling_logprobs)
    meta = unpack_text(packed_meta)
    if _checksum(expanded.ids, raw_logprobs, raw_sampling, expanded.messages, meta) != checksum:
        raise ValueError("its checksum differs from the one recorded")
    ids, count = raw_to_ids(expanded.ids), len(unpack_ids(tokens)) // ID_BYTES
    fields: dict[str, Any] = load_json(meta)
    fields["origin"]["lineage"] = expanded.lineage
    choices: dict[str, Any] = expansions.json(connection, settings)
    request = ChatRequest.model_construct(
        messages=tuple(expansions.json(connection, reference) for reference in raw_to_ids(expanded.messages)[:-1]),
        tools=tuple(choices["tools"]),
        tool_choice=choices["tool_choice"],
        response_format=choices["response_format"],
    )
    return Completion.model_validate(
        {
            **fields,
            "id": id_,
            "call_id": call_id,
            "trajectory_id": trajectory_id,
            "policy": policy,
            "policy_version": policy_version,
            "parent": parent,
            "created_at": created_at,
            "prompt_ids": ids[: len(ids) - count],
            "token_ids": ids[len(ids) - count :],
            "logprobs": raw_to_floats(raw_logprobs),
            "sampling_logprobs": raw_to_floats(raw_sampling),
            "request": request,
            "message": expansions.json(connection, reply),
        }
    )


def _settings(request: ChatRequest) -> JsonObject:
    """What repeats from call to call: stored once per distinct value."""
    return {"tools": list(request.tools), "tool_choice": request.tool_choice, "response_format": request.response_format}


def _meta(completion: Completion) -> dict[str, Any]:
    fields = ("choice", "sampling", "finish_reason", "parse_error", "origin", "branch", "reward", "queued_seconds", "sampling_seconds")
    meta = completion.model_dump(include=set(fields))
    del meta["origin"]["lineage"]
    return meta


def _checksum(*parts: bytes) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _same(left: Completion, right: Completion) -> bool:
    """Equality of content; the JSON form is compared too, because NaN differs from itself."""
    return left == right or left.model_dump_json() == right.model_dump_json()


def _raw_ids(ids: Sequence[int], completion_id: str) -> bytes:
    try:
        return ids_to_raw(ids)
    except OverflowError as error:
        raise InvalidRequest(
            f"token ids of completion {completion_id} must be below {MAX_ID + 1}, got {max(ids)}", param="prompt_ids"
        ) from error


def _is_unicode(text: str) -> bool:
    """SQLite's TEXT cannot hold lone surrogates, so a key with one is known to be absent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
