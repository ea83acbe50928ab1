"""What in a result moves by itself: clocks, random ids, durations. Found by comparing two runs and by looking for today's date.

An entry of `volatile` is a path into the result (`$.target.datetime`), a path with ` date` behind it (only the date moves, the
time of day is a result), or `re:` and a pattern for texts without structure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from ...core.records import JsonObject
from .stock import words
from .values import Path, canonical, leaves_of, parsed, plain

MASK = "•"
LARGEST = 1_000
"""Characters of one entry of a state."""
NEAR = timedelta(minutes=15)
ISO = re.compile(r"\b(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}:\d{2})(?::\d{2}(?:\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")
WEEKDAYS = frozenset(words("monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun"))


def path_text(path: Path) -> str:
    return "$" + "".join(part if part.startswith("[") else f".{part}" for part in path)


def volatile_between(first: str, second: str, now: datetime, given: Sequence[str] = ()) -> list[str] | None:
    """What moves in a result that was got twice; None if the two are different in more than values. `given`: arguments."""
    a, b = parsed(first), parsed(second)
    if isinstance(a, str) or isinstance(b, str):
        return _in_texts(first, second, now)
    one, two = dict(leaves_of(a)), dict(leaves_of(b))
    if one.keys() != two.keys():
        return None
    found: list[str] = []
    dated = False
    texts = [value for value in one.values() if isinstance(value, str)]
    asked_for = any(time in text for time in given if re.fullmatch(r"\d{1,2}:\d{2}", time) for text in texts)
    for path, value in one.items():
        if not isinstance(value, str):
            if value != two[path]:
                found.append(path_text(path))
            continue
        near = _near(value, now)
        if near == "clock" and not asked_for:  # else it is a time of day that somebody asked about, by chance the present one
            found.append(path_text(path))
        elif near:
            found.append(f"{path_text(path)} date")
        elif value != two[path]:
            found.append(path_text(path))
        dated = dated or bool(near)
    if dated:
        found += [path_text(path) for path, value in one.items() if isinstance(value, str) and value.lower() in WEEKDAYS]
    return found


def _near(text: str, now: datetime) -> str:
    """`clock` if a moment in the text is now, `date` if it is today (anywhere on earth)."""
    for match in ISO.finditer(text):
        try:
            day = datetime.fromisoformat(match[1]).date()
            zone = (match[3] or "").replace("Z", "+00:00")
            moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}") if match[2] else None
        except ValueError:
            continue
        if moment is not None and abs((moment if zone else moment.replace(tzinfo=UTC)) - now) < NEAR:
            return "clock"
        if abs((day - now.date()).days) <= 1:
            return "date"
    if str(now.year) in text and now.strftime("%b") in text and re.search(r"\d{1,2}:\d{2}", text):
        return "clock"
    return ""


def _in_texts(first: str, second: str, now: datetime) -> list[str] | None:
    one, two = first.splitlines(), second.splitlines()
    if len(one) != len(two):
        return None
    found: list[str] = []
    for a, b in zip(one, two, strict=True):
        if a != b:
            found.append(_pattern(a, b))
        elif _near(a, now) == "clock":
            found.append("re:" + re.sub(r"(?:\\?\d)+", r"\\d+", re.escape(a)))
    return found


def _pattern(a: str, b: str) -> str:
    """A pattern for a line of which some words move."""
    one, two = a.split(), b.split()
    if len(one) != len(two):
        return f"re:{re.escape(_common(a, b))}.*"
    words = (re.escape(x) if x == y else re.escape(_common(x, y)) + r"\S*" for x, y in zip(one, two, strict=True))
    return r"re:\s*" + r"\s+".join(words)


def _common(a: str, b: str) -> str:
    """The common start, up to its last letter that is no part of a number."""
    size = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return re.sub(r"[\w.:-]*$", "", a[:size])


def masked(text: str, volatile: Sequence[str]) -> JsonValue:
    """The result in one spelling, without what moves."""
    value = parsed(text)
    if isinstance(value, str):
        for entry in volatile:
            if entry.startswith("re:"):
                value = "\n".join(MASK if re.fullmatch(entry[3:], line) else line for line in value.splitlines())
        return "\n".join(line.rstrip() for line in value.strip().splitlines())
    return plain(_masked(value, (), frozenset(volatile)))


def _masked(value: JsonValue, path: Path, volatile: frozenset[str]) -> JsonValue:
    here = path_text(path)
    if here in volatile:
        return MASK
    if isinstance(value, dict):
        return {key: _masked(item, (*path, key), volatile) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, (*path, f"[{index}]"), volatile) for index, item in enumerate(value)]
    if isinstance(value, str) and f"{here} date" in volatile:
        return ISO.sub(lambda match: match[2] or MASK, value)
    return value


def entries_of(state: JsonObject) -> dict[str, JsonValue]:
    """A state as one level: `server/files/path`: content."""
    found: dict[str, JsonValue] = {}
    for server, sections in state.items():
        for section, items in sections.items() if isinstance(sections, dict) else ():
            for key, value in items.items() if isinstance(items, dict) else ():
                found[f"{server}/{section}/{key}"] = _short(plain_content(value))
    return found


def _short(content: JsonValue) -> JsonValue:
    """Large contents are their hash."""
    text = canonical(content)
    return content if len(text) <= LARGEST else f"{len(text)} characters, sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def plain_content(value: JsonValue) -> JsonValue:
    """The content of a file or document so that the order of keys, of JSON lines, and last spaces say nothing."""
    if not isinstance(value, str):
        return plain(value)
    whole = parsed(value)
    if not isinstance(whole, str):
        return plain(whole)
    lines = [line.rstrip() for line in value.rstrip().splitlines()]
    objects = [parsed(line) for line in lines]
    if lines and all(isinstance(item, dict) for item in objects):
        return sorted((plain(item) for item in objects), key=repr)
    return "\n".join(lines)
