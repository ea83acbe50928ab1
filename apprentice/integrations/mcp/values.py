"""JSON values of calls: read out of texts, taken apart into leaves, put together, compared in one spelling."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from typing import cast

from pydantic import JsonValue

from ...core.records import JsonObject
from .spec import WORKDIR

Path = tuple[str, ...]
_LINE = re.compile(r"^\s*([A-Za-z][A-Za-z _-]{0,40}):\s+(\S.*)$")
_SQL = re.compile(r"^\s*(?:select|insert|update|delete|create|drop|alter|with|pragma)\b", re.IGNORECASE)


def parsed(text: str) -> JsonValue:
    """What a result's text means: JSON, a Python literal, `label: value` lines; else the text itself."""
    stripped = text.strip()
    if stripped[:1] in ("{", "[") or re.fullmatch(r"-?\d+(?:\.\d+)?", stripped):
        try:
            return json.loads(stripped)
        except (ValueError, RecursionError):
            pass
        if stripped[:1] in ("{", "[") and len(stripped) < 20_000:
            try:
                return cast("JsonValue", json.loads(json.dumps(ast.literal_eval(stripped))))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                return text
    lines = [line for line in stripped.splitlines() if line.strip()]
    matches = [_LINE.match(line) for line in lines]
    if len(lines) > 1 and all(matches):
        return {match[1].strip(): match[2].strip() for match in matches if match}
    return text


def leaves_of(value: JsonValue, path: Path = ()) -> Iterator[tuple[Path, JsonValue]]:
    """Every leaf with its path; items of a list are `[0]`, `[1]`, …"""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves_of(item, (*path, f"[{index}]"))
    else:
        yield path, value


def at(value: JsonValue, path: Path) -> JsonValue:
    """The value at a path of `leaves_of`; None if there is none."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and re.fullmatch(r"\[\d+\]", part) and int(part[1:-1]) < len(value):
            value = value[int(part[1:-1])]
        else:
            return None
    return value


def put(arguments: JsonObject, path: Path, value: JsonValue) -> None:
    """Set the leaf at a schema's path (`[]`: the first item of a list), making what leads to it."""
    part, rest = path[0], path[1:]
    arguments[part] = _with(arguments.get(part), rest, value)


def _with(here: JsonValue, path: Path, value: JsonValue) -> JsonValue:
    if not path:
        return value
    if path[0] == "[]":
        items = here if isinstance(here, list) else []
        return [_with(items[0] if items else None, path[1:], value), *items[1:]]
    return {**(here if isinstance(here, dict) else {}), path[0]: _with(at(here, path[:1]), path[1:], value)}


def plain(value: JsonValue, key: str = "") -> JsonValue:
    """`value` in one spelling, so that two ways to write the same are equal."""
    if isinstance(value, dict):
        return {name: plain(item, name) for name, item in sorted(value.items()) if item is not None}
    if isinstance(value, list):
        return [plain(item, key) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return _number(float(value))
    return plain_text(value, key)


def _number(value: float) -> JsonValue:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


_SUM = re.compile(r"(?=.*\d)[-+*/^%().\d ]+")
"""An expression of numbers, in which spaces say nothing."""


def plain_text(text: str, key: str = "") -> JsonValue:
    text = text.strip()
    if _SUM.fullmatch(text):
        text = re.sub(r" *([-+*/^%()]) *", r"\1", text)
    if re.fullmatch(r"-?\d+(?:\.\d+)?", text) and len(text) < 16 and not re.fullmatch(r"-?0\d+.*", text):
        return _number(float(text))
    if re.fullmatch(r"\d{1,2}:\d{2}", text):
        return text.zfill(5)
    if _SQL.match(text):
        return plain_sql(text)
    if re.fullmatch(r"[A-Za-z_]+(?:/[A-Za-z0-9_+-]+)+", text) and re.search(r"zone|\btz\b", key, re.IGNORECASE):
        return text.lower()
    if re.search(r"path|file|dir|folder|source|destination", key, re.IGNORECASE) or text.startswith(WORKDIR):
        return plain_path(text)
    return text


def plain_path(text: str) -> str:
    """Without the private folder in front, `./`, double or last slashes."""
    inside = text.removeprefix(WORKDIR) if text.startswith(WORKDIR) else text
    path = posixpath.normpath(inside.lstrip("/") if text.startswith(WORKDIR) else inside or ".")
    return path if inside or not text else "."


_SQL_PART = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\d+(?:\.\d+)?|\w+|<=|>=|<>|!=|==|\S")


def plain_sql(text: str) -> str:
    """One space between parts, words in lower case, no last semicolon; what stands in quotes stays as it is."""
    parts = [part if part[0] in "'" else part.lower().strip('"`') for part in _SQL_PART.findall(text)]
    while parts and parts[-1] == ";":
        parts.pop()
    return " ".join(parts)


_SQL_WORDS = frozenset(
    re.findall(
        r"\w+",
        "select from where and or not insert into values update set delete create table if exists drop alter add column with as on join "
        "left inner outer group by order asc desc limit offset having distinct count sum avg min max lower upper length text integer real "
        "blob varchar numeric null is in like between primary key autoincrement unique default pragma case when then else end union all",
    )
)


def sql_values(text: str) -> list[str]:
    """What a SQL statement names and holds: tables, columns, numbers, texts; [] for other texts."""
    if not _SQL.match(text):
        return []
    parts = [part[1:-1] if part[0] in "'\"" else part for part in _SQL_PART.findall(text)]
    return [part.lower() for part in parts if re.search(r"\w", part) and part.lower() not in _SQL_WORDS]


def canonical(value: JsonValue) -> str:
    """A key for comparing values."""
    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False)
