"""Values that must not be seen: taken out of every text that leaves this machine's memory.

What counts as secret: bearer tokens, what came from the environment by `${VAR}` (but paths and the like), values after options
such as `--api-key`, passwords and query values of URLs, and values of variables and headers that are called a key, token or
password or look like one.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from pydantic import JsonValue

MARK = "•••"
TOKEN_LENGTH = 8
SHORTEST = 4
"""Shorter values are not looked for: they would be found inside other words everywhere."""
_TELLING = re.compile(r"key|token|secret|passw|passphrase|credential|auth|cookie|dsn|signature", re.IGNORECASE)
_TOKEN = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[^\s/]+(?:[/+=][^\s/]*)*")
_HARMLESS = re.compile(
    r"true|false|yes|no|on|off|none|null|debug|info|warn(?:ing)?|error|production|development|test|utf-?8|utc", re.IGNORECASE
)
_COMMON = {"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "TZ", "USER"}
_logger = logging.getLogger("apprentice")
_ours: ContextVar[bool] = ContextVar("apprentice_mcp_ours", default=False)
_LOGGERS = ("client", "httpx2", "mcp.client.sse", "mcp.client.stdio", "mcp.client.streamable_http", "mcp.shared.jsonrpc_dispatcher")


def telling(name: str) -> bool:
    """Whether a variable, header or option of this name holds a secret."""
    return bool(_TELLING.search(name))


def secret(name: str, value: str) -> bool:
    """Whether the value of a variable or header is to be hidden: by its name, or because it looks like a token."""
    if telling(name):
        return True
    return (
        len(value) >= TOKEN_LENGTH and bool(_TOKEN.fullmatch(value)) and not value.startswith(("/", "./", "~")) and "{workdir}" not in value
    )


def borrowed_secret(name: str, value: str) -> bool:
    """Whether a value that came from our own environment is to be hidden: it is, unless it plainly is none."""
    if telling(name):
        return True
    return name not in _COMMON and not value.startswith(("/", "./", "~")) and not _HARMLESS.fullmatch(value) and not value.isdecimal()


class Redactor:
    """Replaces secrets, in the forms that they take in JSON and in URLs too. Without secrets it gives texts back untouched."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms: set[str] = set()
        for secret in secrets:
            if len(secret) >= SHORTEST:
                encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
                forms |= {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe=""), encoded}
        self.forms = _longest_first(forms)

    def also(self, secrets: Iterable[str]) -> Redactor:
        """One that hides these too."""
        both = Redactor(secrets)
        both.forms = _longest_first({*self.forms, *both.forms})
        return both

    def text(self, text: str) -> str:
        for form in self.forms:
            if form in text:
                text = text.replace(form, MARK)
        return text

    def value(self, value: JsonValue) -> JsonValue:
        """`value` with its texts and keys redacted; the same object if there is nothing to hide."""
        return self._value(value) if self.forms else value

    def _value(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self._value(item) for key, item in value.items()}
        return value


def _longest_first(forms: set[str]) -> tuple[str, ...]:
    return tuple(sorted(forms, key=len, reverse=True))  # one secret may hold another


class _LogFilter(logging.Filter):
    """On the loggers of the SDK and its HTTP client, for all sessions of the process: what the SDK says about ours is kept from the
    user's console (it is in the session's outcomes and repairs), and no logger writes a secret.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._active: list[Redactor] = []

    def add(self, redactor: Redactor) -> None:
        with self._lock:
            if not self._active:
                for name in _LOGGERS:
                    logging.getLogger(name).addFilter(self)
            self._active.append(redactor)

    def remove(self, redactor: Redactor) -> None:
        with self._lock:
            self._active.remove(redactor)
            if not self._active:
                for name in _LOGGERS:
                    logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        hidden = message
        for redactor in tuple(self._active):
            hidden = redactor.text(hidden)
        if hidden != message:
            record.msg, record.args = hidden, ()
        if record.exc_info and any(redactor.forms for redactor in tuple(self._active)):
            text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            for redactor in tuple(self._active):
                text = redactor.text(text)
            record.exc_text = text
        if _ours.get() and not record.name.startswith("httpx2"):
            _logger.debug("%s: %s", record.name, hidden)
            return False
        return True


_FILTER = _LogFilter()


@contextmanager
def guarded_logs(redactor: Redactor) -> Generator[None]:
    """While this is open, nothing writes these secrets to a log; what the SDK logs in this task and its children goes to ours, as debug."""
    _FILTER.add(redactor)
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
        _FILTER.remove(redactor)


@contextmanager
def our_call() -> Generator[None]:
    """While this is open, what the SDK logs in this task goes to our log, as debug."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def variable_secrets(environment: Mapping[str, str]) -> list[str]:
    """Values of variables with telling names, in an environment that holds many others (`SSH_AUTH_SOCK` is a path)."""
    return [value for name, value in environment.items() if telling(name) and len(value) >= TOKEN_LENGTH and value[0] not in "/~."]


def url_secrets(url: str) -> list[str]:
    """Passwords and query values of a URL."""
    parts = urlsplit(url)
    found = [value for _, value in parse_qsl(parts.query)]
    if parts.password:
        found += [parts.password, unquote(parts.password)]
    return found


def public_url(url: str) -> str:
    """The URL without user, password and query values."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "&".join(f"{name}={MARK}" for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


def argument_secrets(arguments: Iterable[str]) -> list[str]:
    """Values that follow options with telling names: `--api-key X`, `--token=X`."""
    found: list[str] = []
    expected = False
    for argument in arguments:
        if expected and not argument.startswith("-"):
            found.append(argument)
        name, joined, value = argument.partition("=")
        option = name.startswith("-") and telling(name)
        if option and joined:
            found.append(value)
        expected = option and not joined
    return found
