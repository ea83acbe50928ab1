"""`mcpServers` files, as Claude and most hosts have them. What is wrong is named with its key and its line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...core.errors import ConfigError

ROOT = "mcpServers"
_TYPES = {"stdio": "stdio", "http": "http", "streamable-http": "http", "streamableHttp": "http", "streamable_http": "http", "sse": "sse"}
_OURS = ("isolation", "fixture", "setup", "allow", "deny", "bearer_env", "connect_seconds", "call_seconds", "parallel")
_HOSTS = ("disabled", "enabled", "autoApprove", "alwaysAllow", "timeout", "description", "name", "icon", "trust", "autoStart")
"""Keys that hosts put there for themselves: they mean nothing to a training run."""
_KEYS = ("command", "args", "env", "cwd", "type", "transport", "url", "headers", *_OURS)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


def split_reference(text: str) -> tuple[Path, str | None] | None:
    """(file, name) of `FILE.json`, `FILE.json:NAME` or `FILE.json#NAME`; None if the text is something else."""
    match = re.fullmatch(r"(\S.*?\.json)(?:[:#](.+))?", text)
    if match is None or (" " in match[1] and not Path(match[1]).exists()):
        return None
    return Path(match[1]).expanduser(), match[2]


@dataclass(frozen=True, slots=True)
class Entry:
    """One server of a file. `fields`: of McpServer, not yet checked by it. `place(key)`: where a key stands, as an error's beginning."""

    fields: dict[str, Any]
    place: Callable[[str], str]


def entry_of(path: Path, name: str | None) -> Entry:
    """One server; without a name the file must hold exactly one. Of the other entries only their names are read.

    ConfigError for anything that is not an mcpServers file with that entry.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "it is not UTF-8" if isinstance(cause, UnicodeError) else str(cause)
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}", param="config") from cause
    try:
        body = json.loads(text)
    except json.JSONDecodeError as cause:
        raise ConfigError(f"{path}, line {cause.lineno}: this is no JSON: {cause.msg}", param="config") from cause
    except (RecursionError, ValueError) as cause:
        raise ConfigError(f"{path} is nested too deeply to be a configuration file, or holds too long a number", param="config") from cause
    reader = _Reader(path, lines_of(text))
    servers = reader.servers(body)
    if name is None:
        if len(servers) != 1:
            raise ConfigError(f"{path} holds {len(servers)} servers ({', '.join(servers)}); choose one by {path}:NAME", param="server")
        name = next(iter(servers))
    if name not in servers:
        close = difflib.get_close_matches(name, servers, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{path} holds no server {name!r}, only {', '.join(map(repr, servers)) or 'none'}{hint}", param="server")
    return reader.entry(name, servers[name])


class _Reader:
    def __init__(self, path: Path, lines: dict[tuple[str, ...], list[int]]) -> None:
        self._path, self._lines = path, lines

    def servers(self, body: object) -> dict[str, Any]:
        """The entries by name, unread."""
        root = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        if ROOT not in root:
            keys = ", ".join(map(repr, root)) or "none"
            raise ConfigError(f"{self._path} must be a JSON object with the key {ROOT!r}, and its keys are: {keys}", param="config")
        entries = self._object(root[ROOT], (ROOT,))
        if not entries:
            raise self._error((ROOT,), "holds no server")
        return entries

    def entry(self, name: str, value: object) -> Entry:
        """The named entry, read in full."""
        lines = self._lines.get((ROOT, name), [])
        if len(lines) > 1:
            raise ConfigError(f"{self._path}, lines {lines[0]} and {lines[1]}: the server {name!r} is there twice", param=name)
        return Entry(self._fields(name, value), lambda key: self._place(*self._nearest(name, key)))

    def _fields(self, name: str, value: object) -> dict[str, Any]:
        at = (ROOT, name)
        entry = self._object(value, at)
        for key in entry:
            if key not in _KEYS and key not in _HOSTS:
                close = difflib.get_close_matches(key, _KEYS, n=1)
                raise self._error(
                    (*at, key), "is no known key" + (f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(_KEYS)}")
                )
        for key, off in (("disabled", True), ("enabled", False)):
            if entry.get(key) is off:
                raise self._error((*at, key), f"is {json.dumps(off)}, so this server is switched off; switch it on to train on it")
        if ("command" in entry) == ("url" in entry):
            raise self._error(at, "needs either 'command' or 'url'" + (", and has both" if "url" in entry else ", and has neither"))
        fields: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:32] or "server"}
        kind = entry.get("type", entry.get("transport"))
        key = "type" if "type" in entry else "transport"
        if kind is not None:
            if not isinstance(kind, str) or kind not in _TYPES:
                raise self._error((*at, key), f"must be one of {', '.join(_TYPES)}, got {kind!r}")
            fields["transport"] = _TYPES[kind]
            if (fields["transport"] == "stdio") != ("command" in entry):
                raise self._error((*at, key), f"is {kind!r}, which does not go with {'a command' if 'command' in entry else 'a url'}")
        if "command" in entry:
            fields["command"] = (self._text(entry["command"], (*at, "command")), *self._texts(entry.get("args", []), (*at, "args")))
        else:
            fields["url"] = self._text(entry["url"], (*at, "url"))
        for key in ("env", "headers"):
            if key in entry:
                pairs = self._object(entry[key], (*at, key))
                fields[key] = {inner: self._text(item, (*at, key, inner), empty=True) for inner, item in pairs.items()}
        if "cwd" in entry:
            fields["cwd"] = self._text(entry["cwd"], (*at, "cwd"))
        for key in ("allow", "deny"):
            if key in entry:
                fields[key] = self._texts(entry[key], (*at, key))
        return {key: entry[key] for key in _OURS if key in entry} | fields

    def _object(self, value: object, at: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(at, f"must be an object, got {json.dumps(value)[:60]}")
        return cast("dict[str, Any]", value)

    def _text(self, value: object, at: tuple[str, ...], *, empty: bool = False) -> str:
        if not isinstance(value, str) or not (value or empty):
            shown = type(value).__name__ if at[-2:-1] in (("env",), ("headers",)) else json.dumps(value)[:60]  # may be a secret
            raise self._error(at, f"must be a text in quotes, got {shown}")
        return value

    def _texts(self, value: object, at: tuple[str, ...]) -> list[str]:
        if not isinstance(value, list):
            raise self._error(at, f"must be a list of texts, got {type(value).__name__}")
        items = cast("list[object]", value)
        if not all(isinstance(item, str) for item in items):
            raise self._error(at, f"must be a list of texts, got {json.dumps(items)[:60]}")
        return cast("list[str]", items)

    def _nearest(self, name: str, key: str) -> tuple[str, ...]:
        at = (ROOT, name, key)
        return at if at in self._lines else at[:-1]

    def _place(self, *at: str) -> str:
        lines = self._lines.get(at)
        return f"{self._path}, line {lines[0]}: {'.'.join(at)}" if lines else f"{self._path}: {'.'.join(at)}"

    def _error(self, at: tuple[str, ...], what: str) -> ConfigError:
        return ConfigError(f"{self._place(*at)} {what}", param=".".join(at))


def lines_of(text: str) -> dict[tuple[str, ...], list[int]]:
    """The lines on which each key of a valid JSON text stands, by its path; indexes of lists are left out."""
    found: dict[tuple[str, ...], list[int]] = {}
    path: list[str | None] = []
    last, line, end = "", 1, 0
    last_line = 1
    for match in _TOKEN.finditer(text):
        line += text.count("\n", end, match.start())
        end = match.start()
        token = match[0]
        if token in "{[":
            path.append(None)
        elif token in "}]":
            path.pop()
        elif token == ":" and path:
            path[-1] = json.loads(last)
            found.setdefault(tuple(part for part in path if part is not None), []).append(last_line)
        last, last_line = token, line
    return found
