"""What a server is and how rollouts on it are kept apart: a value, made from a command line, a URL or an entry of a file.

`{workdir}` stands for a private folder that every session gets anew; `${VAR}` (or `${VAR:-default}`) for a variable of our own
environment, looked up when a session starts, so that no secret is ever part of a spec.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, JsonValue, ValidationError, model_validator

from ...core.errors import ConfigError
from ...core.records import JsonObject, Record
from .redaction import Redactor, argument_secrets, borrowed_secret, public_url, secret, telling, url_secrets

Isolation = Literal["process", "session", "shared"]
Transport = Literal["stdio", "http", "sse"]
WORKDIR = "{workdir}"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):\d+(?:/\S*)?")
_RUNNERS = re.compile(r"(?:python|pypy)[\d.]*|node|nodejs|npx|npm|bun|bunx|deno|uv|uvx|pipx|docker|podman|sh|bash|env|exec|tsx")
_COMMON = {"index", "main", "server", "cli", "__main__", "dist", "build", "src", "lib", "bin", "out", "stdio", "run", "exec", "x"}
_NAME = r"^[A-Za-z0-9_-]{1,32}$"
Seconds = Annotated[FiniteFloat, Field(gt=0)]


class SetupCall(Record):
    """A tool call made on every fresh session before its rollout; `{workdir}` may stand in its arguments."""

    tool: str
    arguments: JsonObject = Field(default_factory=dict)


class McpServer(Record):
    """One server. `name`, `transport` and `isolation` follow from the rest if they are not given."""

    name: Annotated[str, Field(pattern=_NAME)]
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    """Default: the private folder."""
    url: str | None = None
    transport: Transport
    headers: dict[str, str] = Field(default_factory=dict)
    bearer_env: str | None = None
    """Name of the environment variable that holds a bearer token; read again for every request."""
    isolation: Isolation
    fixture: str | None = None
    """A folder that is copied into every private folder."""
    setup: tuple[SetupCall, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    connect_seconds: Seconds = 120.0
    call_seconds: Seconds = 60.0
    parallel: bool = False
    """Whether calls that change something may run at the same time in one session."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        given = dict(cast("dict[str, Any]", data))  # Any: fields not yet validated
        url, command = given.get("url"), given.get("command")
        if isinstance(url, str):
            given.setdefault("transport", "sse" if urlsplit(url).path.rstrip("/").endswith("/sse") else "http")
            given.setdefault("isolation", "session")
            given.setdefault("name", name_of_url(url))
        elif isinstance(command, list | tuple):
            given.setdefault("transport", "stdio")
            given.setdefault("isolation", "process")
            given.setdefault("name", name_of_command([str(part) for part in cast("list[object]", command)]))
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        where = f"server {self.name!r}"
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"{where} needs either a command or a URL, got {'both' if self.url else 'neither'}", param="command")
        if (self.transport == "stdio") != bool(self.command):
            kind = "command" if self.command else "URL"
            raise ConfigError(f"{where} cannot use the transport {self.transport!r} with a {kind}", param="transport")
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname):
            raise ConfigError(f"{where} needs an http or https URL with a host, got {public_url(self.url)!r}", param="url")
        if self.url and not _has_port(self.url):
            raise ConfigError(f"the port of {where} must be a number from 1 to 65535, got {public_url(self.url)!r}", param="url")
        if self.url and self.isolation == "process":
            raise ConfigError(f"{where} runs elsewhere, so its isolation can be session or shared, not process", param="isolation")
        if self.command and (self.headers or self.bearer_env):
            wrong = "headers" if self.headers else "bearer_env"
            raise ConfigError(f"{where} is a command, and headers and bearer tokens are for URLs; give it variables by env", param=wrong)
        if self.url and (self.env or self.fixture or self.cwd):
            wrong = "env" if self.env else "fixture" if self.fixture else "cwd"
            raise ConfigError(f"{where} is a URL, and {wrong} is for commands; use setup calls to lay data into a server", param=wrong)
        if self.fixture is not None and not Path(self.fixture).expanduser().is_dir():
            raise ConfigError(f"the fixture of {where} must be a folder, and there is none at {self.fixture}", param="fixture")
        return self

    @property
    def private(self) -> bool:
        """Whether the server's data are a rollout's own, and thrown away: a process that is told to work in its private folder."""
        return self.isolation == "process" and any(WORKDIR in part for part in (*self.command, *self.env.values(), self.cwd or ""))

    def admits(self, tool: str) -> bool:
        """Whether the allow and deny lists let a tool through."""
        from fnmatch import fnmatchcase

        allowed = not self.allow or any(fnmatchcase(tool, pattern) for pattern in self.allow)
        return allowed and not any(fnmatchcase(tool, pattern) for pattern in self.deny)

    def resolve(self, workdir: Path | None) -> Resolved:
        """The spec with `{workdir}` and `${VAR}` filled in. ConfigError if a variable is not set.

        Without a `cwd` the server runs in its private folder: what the command names relative to ours is named absolutely.
        """
        fill = _Filler(self.name, workdir)
        headers = {name: fill(value, f"header {name}") for name, value in self.headers.items()}
        return Resolved(
            command=tuple(fill(part if self.cwd is not None else _absolute(part), "command") for part in self.command),
            env={name: fill(value, f"env {name}") for name, value in self.env.items()},
            cwd=fill(self.cwd, "cwd") if self.cwd is not None else None,
            url=fill(self.url, "url") if self.url is not None else None,
            headers=headers,
        )

    def bearer(self) -> str | None:
        """The token as it is now. ConfigError if its variable is not set."""
        if self.bearer_env is None:
            return None
        token = os.environ.get(self.bearer_env, "").strip()
        if not token:
            raise ConfigError(
                f"server {self.name!r} takes its bearer token from the environment variable {self.bearer_env}, which is not set",
                param="bearer_env",
            )
        return token

    def redactor(self) -> Redactor:
        """Of this server's secrets as they are now."""
        return Redactor(self._secrets())

    def redact(self, text: str) -> str:
        """`text` with every secret of this server replaced."""
        return self.redactor().text(text)

    def _secrets(self) -> list[str]:
        named = {**self.env, **self.headers}
        found = [part for name, value in named.items() if secret(name, value) for part in (value, *value.split()[1:])]  # "Bearer X": X too
        for name, text in (*named.items(), *(("", text) for text in (*self.command, self.url or "", self.cwd or ""))):
            for match in _VARIABLE.finditer(text):
                value = os.environ.get(match[1]) or match[2] or ""
                if telling(name) or borrowed_secret(match[1], value):
                    found.append(value)
        if self.bearer_env:
            found.append(os.environ.get(self.bearer_env, "").strip())
        return [*found, *argument_secrets(self.command), *url_secrets(self.url or "")]

    def public(self) -> JsonObject:
        """For reports and the ledger: no secret, only names."""
        hide = self.redactor()
        shown = self.model_dump(mode="json", exclude={"env", "headers", "url", "setup"}, exclude_defaults=True)
        shown |= {"name": self.name, "transport": self.transport, "isolation": self.isolation}
        if self.url:
            shown["url"] = hide.text(public_url(self.url))
        if self.env:
            shown["env"] = sorted(self.env)
        if self.headers:
            shown["headers"] = sorted(self.headers)
        if self.setup:
            shown["setup"] = [call.model_dump(mode="json") for call in self.setup]
        return cast("JsonObject", hide.value(cast("JsonValue", shown)))


@dataclass(frozen=True, slots=True, repr=False)
class Resolved:
    """A spec's values as a session uses them. They hold secrets: never shown."""

    command: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None
    url: str | None
    headers: dict[str, str]


class _Filler:
    def __init__(self, server: str, workdir: Path | None) -> None:
        self._server, self._workdir = server, workdir

    def __call__(self, text: str, where: str) -> str:
        def variable(match: re.Match[str]) -> str:
            value = os.environ.get(match[1]) or match[2]
            if value is None:
                raise ConfigError(
                    f"{where} of server {self._server!r} needs the environment variable {match[1]}, which is not set", param=match[1]
                )
            return value

        filled = _VARIABLE.sub(variable, text)
        return filled.replace(WORKDIR, str(self._workdir)) if self._workdir is not None else filled


def _has_port(url: str) -> bool:
    """Whether the port of a URL, if it names one, can be one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _absolute(part: str) -> str:
    """An argument that is a relative path to something that exists, made absolute; in `--option=PATH` the path."""
    option, joined, path = part.rpartition("=") if part.startswith("-") else ("", "", part)
    looks = "/" in path or path.startswith(".") or "." in path
    if not looks or path.startswith(("-", "/", "~")) or WORKDIR in path:
        return part
    here = Path(path)
    if not (here.is_file() or (("/" in path or path.startswith(".")) and here.is_dir())):
        return part
    return f"{option}{joined}{here.absolute()}"


def name_of_command(command: list[str]) -> str:
    """A short name from the executable, or from what a runner such as npx or `python -m` runs."""
    for index, part in enumerate(command):
        if part.startswith("-") or _RUNNERS.fullmatch(PurePosixPath(part).name) or ("=" in part and index and command[0].endswith("env")):
            continue
        package = re.sub(r"(?<=.)@[^/@]*$", "", part)  # without a version
        pieces = [re.sub(r"\.(?:py|js|mjs|cjs|ts|sh|exe)$", "", piece) for piece in PurePosixPath(package).parts]
        telling_pieces = [piece for piece in pieces if piece.lower() not in _COMMON and not piece.startswith("@")]
        return _safe((telling_pieces or pieces)[-1])
    return _safe(PurePosixPath(command[0]).name if command else "")


def name_of_url(url: str) -> str:
    return _safe(urlsplit(url).hostname or "")


def _safe(text: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")
    short = re.sub(r"^(?:mcp[-_]server|server|mcp)[-_](?=.)|(?<=.)[-_](?:mcp[-_]server|mcp|server)$", "", cleaned)
    return short[:32] or "server"


def parse_server(text: str, **options: Any) -> McpServer:  # Any: fields of McpServer, checked by it
    """The server that `text` means: a URL, a command line, `FILE.json` with one entry, or `FILE.json:NAME`.

    `options` are fields of McpServer and win over what the file says; `env` and `headers` are joined. Raises ConfigError.
    """
    from .config_file import entry_of, split_reference

    text = text.strip()
    if not text:
        raise ConfigError("a server is a command line, a URL or FILE.json:NAME, got an empty text", param="server")
    reference = split_reference(text)
    entry = entry_of(*reference) if reference is not None else None
    base = entry.fields if entry is not None else _base(text)
    for key in ("env", "headers"):
        if options.get(key) and base.get(key):
            options[key] = {**base[key], **options[key]}
    try:
        return McpServer(**{**base, **options})
    except ValidationError as cause:
        error = cause.errors(include_url=False)[0]
        key, field = str((*error["loc"], "server")[0]), ".".join(str(part) for part in error["loc"]) or "server"
        came = f", got {error['input']!r}" if key in _NEVER_SECRET else ""
        what, wrong = f"the field {field!r} is wrong: {error['msg']}{came}", cause
    except ConfigError as cause:  # of rules across fields
        key = field = cause.param or ""
        what, wrong = cause.message, cause
    place = f"{entry.place(key)}: " if entry is not None and key not in options else ""
    raise ConfigError(f"{place}{what}", param=field) from wrong


_NEVER_SECRET = ("transport", "isolation", "connect_seconds", "call_seconds", "parallel")


def _base(text: str) -> dict[str, Any]:
    """The fields of a URL or a command line."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return {"url": text}
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        raise ConfigError(f"{text!r} is no command but looks like an address: write http://{text}", param="server")
    try:
        return {"command": tuple(shlex.split(text))}
    except ValueError as cause:
        raise ConfigError(f"the command line of a server must have its quotes closed, got {text!r}", param="server") from cause
