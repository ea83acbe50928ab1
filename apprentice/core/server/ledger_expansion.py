"""Rows of completions with their differences resolved, and the content-addressed blobs they refer to.

A row is stored as a difference to its `base`, an earlier row. Expanding it walks the bases in a loop, not by recursion,
and through a bounded cache, so that reading a trajectory in order costs one step per row.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..errors import LedgerError
from .ledger_tokens import ID_BYTES, dump_json, ids_to_raw, load_json, pack_ids, pack_text, unpack_ids, unpack_text

_CACHE_BYTES = 32 * 2**20
_CACHED_BLOBS = 4096
_IDS = b"token ids"


@dataclass(frozen=True, slots=True)
class Expanded:
    """A row with its differences resolved. `ids` and `messages` are raw words and include what was sampled and the reply."""

    id: str
    ids: bytes
    messages: bytes
    lineage: dict[str, str]

    def weight(self) -> int:
        return len(self.ids) + len(self.messages) + 128 * (len(self.lineage) + 2)


class Expansions:
    """A bounded cache of expanded rows by seq. Valid for the connection whose rows it saw; `clear` after an undo."""

    def __init__(self) -> None:
        self._used = 0
        self._rows: OrderedDict[int, Expanded] = OrderedDict()
        self._blobs: OrderedDict[int, Any] = OrderedDict()
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def clear(self) -> None:
        self._used = 0
        self._rows.clear()
        self._blobs.clear()
        self._numbers.clear()

    def get(self, connection: sqlite3.Connection, seq: int) -> Expanded:
        """The expanded row. Reads the uncached part of its chain of bases, oldest first."""
        chain: list[tuple[Any, ...]] = []
        base: int | None = seq
        while base is not None and base not in self._rows:
            row = connection.execute(
                "SELECT seq, id, base, prefix, rest, rest_blob, tokens, message_prefix, messages, reply, lineage "
                "FROM completions WHERE seq = ?",
                (base,),
            ).fetchone()
            if row is None or (row[2] is not None and row[2] >= base):
                raise LedgerError(
                    f"the ledger is damaged: completion number {base}, on which another one builds, is missing or out of order"
                )
            chain.append(row)
            base = row[2]
        known = self._touch(base) if base is not None else None
        for row in reversed(chain):
            known = self.add(row[0], _expand(connection, row, known))
        if known is None:
            raise LedgerError(f"the ledger is damaged: completion number {seq} is missing")
        return known

    def add(self, seq: int, expanded: Expanded) -> Expanded:
        self._rows[seq] = expanded
        self._used += expanded.weight()
        while self._used > _CACHE_BYTES and len(self._rows) > 1:
            self._used -= self._rows.popitem(last=False)[1].weight()
        return expanded

    def json(self, connection: sqlite3.Connection, seq: int) -> Any:
        """The parsed JSON of a blob. Readers share the value and must not change it: records are immutable."""
        if seq in self._blobs:
            self._blobs.move_to_end(seq)
        else:
            self._blobs[seq] = load_json(_blob(connection, seq, unpack_text))
            if len(self._blobs) > _CACHED_BLOBS:
                self._blobs.popitem(last=False)
        return self._blobs[seq]

    def store_json(self, connection: sqlite3.Connection, value: object) -> int:
        """The number of the one blob with this JSON."""
        raw = dump_json(value)
        return self._store(connection, _digest(raw), lambda: pack_text(raw))

    def store_ids(self, connection: sqlite3.Connection, raw: bytes) -> int:
        """The number of the one blob with these token ids."""
        return self._store(connection, _digest(raw, _IDS), lambda: pack_ids(raw))

    def _store(self, connection: sqlite3.Connection, digest: bytes, pack: Callable[[], bytes]) -> int:
        if digest in self._numbers:
            self._numbers.move_to_end(digest)
            return self._numbers[digest]
        find = "SELECT seq FROM blobs WHERE hash = ?"
        row = connection.execute(find, (digest,)).fetchone()
        if row is None:
            connection.execute("INSERT INTO blobs (hash, data) VALUES (?, ?)", (digest, pack()))
            row = connection.execute(find, (digest,)).fetchone()
        self._numbers[digest] = int(row[0])
        if len(self._numbers) > _CACHED_BLOBS:
            self._numbers.popitem(last=False)
        return self._numbers[digest]

    def _touch(self, seq: int) -> Expanded:
        self._rows.move_to_end(seq)
        return self._rows[seq]


def _default_lineage(base: Expanded | None) -> dict[str, str]:
    """What a call that continues `base` has: the base's own lineage, and the base as source of its reply."""
    return {} if base is None else {**base.lineage, str(len(base.messages) // ID_BYTES - 1): base.id}


def pack_lineage(lineage: dict[str, str], base: Expanded | None) -> bytes | None:
    """None for the default, else the shorter of the whole map and its difference to the default."""
    default = _default_lineage(base)
    if lineage == default:
        return None
    changed = {index: source for index, source in lineage.items() if default.get(index) != source}
    difference = {"set": changed, "unset": [index for index in default if index not in lineage]}
    return pack_text(min(dump_json({"all": lineage}), dump_json(difference), key=len))


def _unpack_lineage(packed: bytes | None, base: Expanded | None) -> dict[str, str]:
    lineage = _default_lineage(base)
    if packed is None:
        return lineage
    stored: dict[str, Any] = load_json(unpack_text(packed))
    if "all" in stored:
        return stored["all"]
    unset = set(stored["unset"])
    return {**{index: source for index, source in lineage.items() if index not in unset}, **stored["set"]}


def _expand(connection: sqlite3.Connection, row: tuple[Any, ...], base: Expanded | None) -> Expanded:
    (_, id_, _, prefix, rest, rest_blob, tokens, message_prefix, messages, reply, lineage) = row
    try:
        own = (unpack_ids(rest) if rest is not None else _blob(connection, rest_blob, unpack_ids, _IDS)) + unpack_ids(tokens)
        listed = unpack_ids(messages) + ids_to_raw([reply])
        if base is not None:
            own = base.ids[: prefix * ID_BYTES] + own
            listed = base.messages[: message_prefix * ID_BYTES] + listed
        return Expanded(id_, own, listed, _unpack_lineage(lineage, base))
    except ValueError as error:
        raise LedgerError(f"completion {id_} in the ledger is damaged: {error}") from error


def _blob(connection: sqlite3.Connection, seq: int | None, unpack: Callable[[bytes], bytes], kind: bytes = b"") -> bytes:
    row = connection.execute("SELECT hash, data FROM blobs WHERE seq = ?", (seq,)).fetchone()
    if row is None:
        raise ValueError(f"its blob {seq} is missing")
    raw = unpack(row[1])
    if _digest(raw, kind) != row[0]:
        raise ValueError(f"its blob {seq} differs from its hash")
    return raw


def _digest(raw: bytes, kind: bytes = b"") -> bytes:
    return blake2b(raw, digest_size=16, person=kind).digest()
