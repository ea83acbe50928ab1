"""Why a server could not be used, as one sentence that a user can act on."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from .redaction import Redactor, public_url
from .spec import McpServer

TAIL_LINES = 6
TAIL_CHARACTERS = 600
_OLD = {
    "mcp<2": re.compile(
        r"No module named 'mcp[.']|cannot import name .{0,60} from 'mcp[.']|module 'mcp[.\w]*' has no attribute"
        r"|'Server' object has no attribute|Server\.__init__\(\) (?:got|missing|takes)"
    ),
    "fastmcp<4": re.compile(
        r"No module named 'fastmcp\.|cannot import name .{0,60} from 'fastmcp[.']|module 'fastmcp[.\w]*' has no attribute"
    ),
}
_NAME = r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\b"
_VARIABLE = re.compile(
    _NAME + r"[^\n]{0,60}\b(?:required|must be (?:set|provided)|not (?:set|found|provided|defined|configured)|missing|undefined|unset)\b"
    r"|(?i:\b(?:missing|required|requires|set|provide|need|needs|define|export)\b)[^\n]{0,60}?"
    + _NAME
    + r"|KeyError: '([A-Z][A-Z0-9_]{2,})'"
)
_INTERNAL = (asyncio.CancelledError, LookupError)
"""What says nothing about the server: how the SDK's tasks end each other."""
_INVALID = re.compile(r"\d+ validation errors? for ")
_NOT_FOUND = re.compile(r"can't open file|No module named|Cannot find module|No such file or directory|ENOENT")


@dataclass(slots=True)
class Evidence:
    """What is known about a failed start. `errors`: as they came, groups and causes flattened."""

    server: McpServer
    hide: Redactor
    errors: list[BaseException] = field(default_factory=list[BaseException])
    timed_out: bool = False
    exit_code: int | None = None
    """Of a process that ended before it was told to."""
    command: tuple[str, ...] = ()
    path: str | None = None
    """PATH of the server's process."""
    cwd: Path | None = None
    tail: str = ""
    """The last lines of its log."""
    output: str = ""
    """The first line on its standard output that was no message."""
    status: int | None = None
    """The last HTTP status that was an error."""


def flat(error: BaseException) -> list[BaseException]:
    """The error, or the errors of the group, with what caused each; the outermost first."""
    found: list[BaseException] = []
    pending: list[BaseException] = [error]
    while pending:
        current = pending.pop(0)
        if any(current is known for known in found):
            continue
        if isinstance(current, BaseExceptionGroup):
            pending += cast("BaseExceptionGroup[BaseException]", current).exceptions
        else:
            found.append(current)
        pending += [link for link in (current.__cause__, current.__context__) if link is not None]
    return found


def tail_of(text: str) -> str:
    """The last lines of a log, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    joined = " | ".join(lines)
    return joined if len(joined) <= TAIL_CHARACTERS else f"…{joined[-TAIL_CHARACTERS:]}"


def diagnose(evidence: Evidence) -> str:
    """One sentence; secrets are taken out of it."""
    sentence = _url(evidence) if evidence.server.url else _command(evidence)
    return evidence.hide.text(" ".join(sentence.split()))


def _command(evidence: Evidence) -> str:
    server = f"the server {evidence.server.name!r}"
    spawn = next((error for error in evidence.errors if isinstance(error, OSError) and not isinstance(error, ConnectionError)), None)
    if spawn is not None and evidence.exit_code is None:
        return _not_started(evidence, server, spawn)
    last = f"; its last lines: {evidence.tail}" if evidence.tail else "; it wrote nothing to its log"
    shown = f", and wrote to its output: {evidence.output}" if evidence.output else ""
    if evidence.exit_code is not None:
        return f"{server} ended with {ending(evidence.exit_code)} before it spoke MCP{shown}{_advice(evidence)}{last}"
    if evidence.timed_out:
        waited = f"did not answer the MCP handshake within {evidence.server.connect_seconds:g} s"
        return f"{server} {waited}{shown}; is `{_shown(evidence)}` an MCP server on stdio?{_logged(evidence)}"
    return f"{server} speaks no MCP that can be understood: {_reason(evidence)}{shown}{_logged(evidence)}"


def _not_started(evidence: Evidence, server: str, error: OSError) -> str:
    program = evidence.command[0] if evidence.command else ""
    if evidence.cwd is not None and not evidence.cwd.is_dir():
        return f"{server} cannot start, because its working directory {evidence.cwd} does not exist"
    found = shutil.which(program, path=evidence.path)
    if found is None and not (os.sep in program and Path(program).exists()):
        where = "" if os.sep in program else " on PATH"
        return f"{server} cannot start, because there is no command {program!r}{where}"
    if isinstance(error, PermissionError):
        return f"{server} cannot start, because {program} may not be executed"
    return f"{server} cannot start {program}: {error.strerror or error}"


def ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _advice(evidence: Evidence) -> str:
    for version, sign in _OLD.items():
        if sign.search(evidence.tail):
            return f'; it was written for an older MCP SDK: install it in an environment of its own together with "{version}"'
    if match := _VARIABLE.search(evidence.tail):
        name = match[1] or match[2] or match[3]
        return f"; it seems to need the environment variable {name}: give it with --env {name}=…, or in env"
    if evidence.server.cwd is None and _NOT_FOUND.search(evidence.tail):
        return "; it runs in a folder of its own: name files by absolute paths, or give a cwd"
    return ""


def _logged(evidence: Evidence) -> str:
    return f"; its last lines: {evidence.tail}" if evidence.tail else ""


def _shown(evidence: Evidence) -> str:
    return shlex.join(evidence.command or evidence.server.command)


def _url(evidence: Evidence) -> str:
    url = public_url(evidence.server.url or "")
    server = f"the server {evidence.server.name!r} at {url}"
    if evidence.status in (401, 403):
        given = evidence.server.bearer_env or evidence.server.headers
        want = (
            "the token or header it was given is not accepted"
            if given
            else "it wants a bearer token (--bearer-env, or bearer_env in a file) or a header (--header, or headers)"
        )
        return f"{server} refused access with HTTP status {evidence.status}: {want}"
    tls = next((error for error in evidence.errors if isinstance(error, ssl.SSLError)), None)
    if tls is not None or "CERTIFICATE_VERIFY" in " ".join(map(str, evidence.errors)):
        why = (tls.reason if tls is not None else None) or _reason(evidence)
        return f"{server} cannot be trusted, because the TLS connection failed: {why}"
    refused = next((error for error in evidence.errors if type(error).__name__ in ("ConnectError", "ConnectTimeout")), None)
    if refused is not None:
        return f"nothing answers at {url} for the server {evidence.server.name!r}: {refused}"
    if evidence.timed_out:
        return f"{server} did not answer the MCP handshake within {evidence.server.connect_seconds:g} s"
    if evidence.status is not None:
        other = "an SSE server (transport sse)" if evidence.server.transport == "http" else "a streamable-HTTP server (transport http)"
        hint = f"; check its path, and whether it is {other}" if evidence.status in (400, 404, 405, 406, 415) else ""
        return f"{server} answered with HTTP status {evidence.status} instead of MCP{hint}"
    return f"{server} speaks no MCP that can be understood: {_reason(evidence)}"


def _reason(evidence: Evidence) -> str:
    """The most telling of the errors, without the internals of the libraries that raised them."""
    if any(isinstance(error, ConnectionResetError) for error in evidence.errors):
        hint = "; does it want https?" if (evidence.server.url or "").lower().startswith("http:") else ""
        return f"it closed the connection without an answer{hint}"
    told = [error for error in evidence.errors if not isinstance(error, _INTERNAL) and str(error)]
    if not told:
        return "it closed the connection"
    text = str(told[0])
    if "input_value=b''" in text or "input_value=''" in text or text.rstrip().endswith("content type:"):
        return "its answer is empty"
    if not _INVALID.search(text):
        return text
    return "its answer is no JSON" if "Invalid JSON" in text else "its answer is no message of the protocol"
