"""Exact, compact bytes for what the ledger stores: token ids, log-probabilities, JSON. Knows no database and no records.

Numbers are held as little-endian words ("raw" bytes) and packed by byte plane: all lowest bytes first, then all second
bytes, and so on, with the planes that are zero throughout left out, then zlib where that helps. Token ids of a 49k
vocabulary take at most two bytes each; log-probabilities are stored as float32 when every value is exactly one (engines
compute in float32), else as float64, so that what comes back is bit for bit what was recorded, NaN included. Every
`unpack_*` and `load_json` raises ValueError for bytes that are not its own.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

ID_BYTES = 4
MAX_ID = 2**32 - 1
_ZLIB = 0x80
_WORTH_COMPRESSING = 64
_LEVEL = 6
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def ids_to_raw(ids: Sequence[int]) -> bytes:
    """Unsigned 32-bit little-endian words. Raises OverflowError for an id that does not fit."""
    return _little_endian(array("I", ids))


def raw_to_ids(raw: bytes) -> tuple[int, ...]:
    words = array("I")
    words.frombytes(raw)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


def floats_to_raw(values: Sequence[float]) -> bytes:
    """float64 little-endian words."""
    return _little_endian(array("d", values))


def raw_to_floats(raw: bytes) -> tuple[float, ...]:
    words = array("d")
    words.frombytes(raw)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


def pack_ids(raw: bytes) -> bytes:
    return _pack(raw, ID_BYTES)


def unpack_ids(packed: bytes) -> bytes:
    return _unpack(packed, ID_BYTES)


def pack_floats(raw: bytes) -> bytes:
    """Pack float64 words; as float32 when that loses nothing."""
    narrow = _as_float32(raw)
    return _pack(narrow, 4, kind=4) if narrow is not None else _pack(raw, 8, kind=8)


def unpack_floats(packed: bytes) -> bytes:
    kind = (packed[0] & 0x7F) >> 3 if packed else 0
    if kind == 8:
        return _unpack(packed, 8)
    narrow = array("f")
    narrow.frombytes(_unpack(packed, 4))
    if sys.byteorder == "big":
        narrow.byteswap()
    return _little_endian(array("d", narrow))


def common_prefix(left: bytes, right: bytes, width: int = ID_BYTES) -> int:
    """How many leading words two raw sequences share. One memory comparison when one continues the other."""
    low, high = 0, min(len(left), len(right)) // width
    if left[: high * width] == right[: high * width]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low * width : middle * width] == right[low * width : middle * width]:
            low = middle
        else:
            high = middle
    return low


def dump_json(value: object) -> bytes:
    """Canonical only in its separators: the order of keys is kept, since templates render it. Lone surrogates survive."""
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def load_json(raw: bytes) -> Any:
    """The parsed value; typed by the caller, who knows what it stored."""
    return json.loads(raw.decode("utf-8", "surrogatepass"))


def pack_text(raw: bytes) -> bytes:
    if len(raw) >= _WORTH_COMPRESSING:
        small = zlib.compress(raw, _LEVEL)
        if len(small) < len(raw):
            return b"\x80" + small
    return b"\x00" + raw


def unpack_text(packed: bytes) -> bytes:
    if packed[:1] == b"\x80":
        return _inflate(packed[1:])
    if packed[:1] == b"\x00":
        return packed[1:]
    raise ValueError(f"expected a packed text to start with byte 0x00 or 0x80, got {packed[:1]!r}")


def _inflate(body: bytes) -> bytes:
    try:
        return zlib.decompress(body)
    except zlib.error as error:
        raise ValueError(f"expected zlib data, got something else ({error})") from error


def _little_endian(words: array[Any]) -> bytes:
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _as_float32(raw: bytes) -> bytes | None:
    values = raw_to_floats(raw)
    try:
        narrow = array("f", values)
    except OverflowError:
        return None
    return _little_endian(narrow) if floats_to_raw(narrow) == raw else None


def _pack(raw: bytes, width: int, kind: int = 0) -> bytes:
    """Header byte (zlib flag, kind in bits 3-6, planes kept minus one in bits 0-2), then the planes."""
    planes = [raw[i::width] for i in range(width)]
    while len(planes) > 1 and not any(planes[-1]):
        planes.pop()
    body, header = b"".join(planes), len(planes) - 1 | kind << 3
    if len(body) >= _WORTH_COMPRESSING:
        small = zlib.compress(body, _LEVEL)
        if len(small) < len(body):
            return bytes([header | _ZLIB]) + small
    return bytes([header]) + body


def _unpack(packed: bytes, width: int) -> bytes:
    if not packed:
        raise ValueError("expected a header byte, got an empty value")
    header, body = packed[0], packed[1:]
    if header & _ZLIB:
        body = _inflate(body)
    kept = (header & 0x07) + 1
    if kept > width or len(body) % kept:
        raise ValueError(f"expected up to {width} whole byte planes, got {kept} in {len(body)} bytes")
    count = len(body) // kept
    raw = bytearray(count * width)
    for plane in range(kept):
        raw[plane::width] = body[plane * count : (plane + 1) * count]
    return bytes(raw)
