"""A server as a child process that speaks over its standard streams: a transport of the MCP SDK, for servers of every kind.

The SDK's own `stdio_client` does not tell the process's number (needed to end all its descendants), reads a long line in
quadratic time on the event loop, which stops every other rollout, and writes a traceback for each line that is no message.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from . import launcher
from .repairs import Repairs, repaired_envelope

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
"""All that a server inherits of our environment: nothing that could be a secret of the trainer."""
LONGEST = 64 * 1024 * 1024
"""Bytes of one message; a server that sends more in one line is cut off."""
LARGEST_LOG = 8 * 1024 * 1024
"""Bytes of a server's log; at that size it starts anew."""
EXIT_SECONDS = 2.0
"""How long a server may take to end by itself once its input is closed, and once more after SIGTERM."""
FLUSH_SECONDS = 0.5
POLL_SECONDS = 0.1
LAUNCHED = sys.platform == "linux"
_CHUNK = 256 * 1024


class ServerProcess:
    """The child, as seen from outside the transport."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.ended: int | None = None
        """The exit code, if it ended before it was told to."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def returncode(self) -> int | None:
        """None while it runs, and before it was started."""
        return self.process.returncode if self.process else None

    async def ending(self) -> int | None:
        """The exit code of a process whose connection broke; None if it goes on living."""
        if self.process is not None:
            await _ended(self.process, FLUSH_SECONDS)
        return self.returncode


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """What a server gets: a few harmless variables of ours, and its own."""
    own = {name: value for name in INHERITED if (value := os.environ.get(name)) is not None and not value.startswith("()")}
    return {**own, **extra}


@asynccontextmanager
async def stdio_transport(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    child: ServerProcess,
    repairs: Repairs,
    started: Callable[[int], None],
    kill: Callable[[], bool],
) -> AsyncGenerator[TransportStreams]:
    """Start the server and give its streams; on exit its input is closed, and what does not end then is made to.

    `env` is the child's whole environment; `started` is told its number, and `kill` ends all its processes at once. The child leads a
    session of its own, so that Ctrl-C does not reach it. Raises OSError.
    """
    process, failure = await _start(argv, env, cwd, log, started)
    # No await until the try: a cancellation in between would leave a process behind.
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    written = anyio.Event()
    try:
        if failure is not None and (code := await asyncio.to_thread(_drained, failure)):
            raise OSError(code, os.strerror(code), argv[0])
        child.process = process
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, process, incoming, repairs)
            tasks.start_soon(_write, process, outgoing, incoming, written)
            tasks.start_soon(_watch, process, incoming, log)
            try:
                yield read, write
            finally:
                with anyio.CancelScope(shield=True):
                    if process.stdout is not None and process.stdout.at_eof():
                        await _ended(process, FLUSH_SECONDS)  # its output is closed: it is about to end, or has
                    child.ended = process.returncode
                    read.close()
                    write.close()
                    with anyio.move_on_after(FLUSH_SECONDS):
                        await written.wait()
                    await _stop(process, kill)
                tasks.cancel_scope.cancel()
    finally:
        for stream in (incoming, read, write, outgoing):
            stream.close()
        _close(process)


async def _start(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, started: Callable[[int], None]
) -> tuple[asyncio.subprocess.Process, int | None]:
    """The process, and where its launcher tells (until it closes it) that it could not start."""
    reading, writing = os.pipe() if LAUNCHED else (None, None)
    prefix = [] if writing is None else [sys.executable, "-I", "-S", launcher.__file__, str(writing)]
    try:
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                pass_fds=[] if writing is None else [writing],
                limit=_CHUNK,
            )
    except BaseException:
        if reading is not None:
            os.close(reading)
        raise
    finally:
        if writing is not None:
            os.close(writing)
    started(process.pid)
    return process, reading


def _drained(pipe: int) -> int:
    """The number in a pipe that is closed then; 0 if it is empty."""
    with open(pipe, "rb") as file:
        return int(file.read() or 0)


async def _read(
    process: asyncio.subprocess.Process, incoming: MemoryObjectSendStream[SessionMessage | Exception], repairs: Repairs
) -> None:
    """Lines as messages, until the server closes its output; then whatever still comes is thrown away."""
    assert process.stdout is not None
    parts: list[bytes] = []
    size = 0
    try:
        while chunk := await process.stdout.read(_CHUNK):
            *lines, rest = chunk.split(b"\n")
            if lines:
                lines[0] = b"".join((*parts, lines[0]))
                parts, size = [], 0
            for line in lines:
                if (message := message_of(line, repairs)) is not None:
                    await incoming.send(SessionMessage(message))
            if rest:
                parts.append(rest)
                size += len(rest)
            if size > LONGEST:
                repairs.add(f"a line of more than {LONGEST // 2**20} MiB was cut off, and the session with it")
                break
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        pass
    incoming.close()
    with suppress(OSError):
        while await process.stdout.read(_CHUNK):
            pass


def message_of(line: bytes, repairs: Repairs) -> Any:  # Any: a union that the SDK builds at run time
    """The message on a line; None for a line that holds none, which is noted."""
    line = line.strip()
    if not line:
        return None
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass
    text = line.decode("utf-8", "replace")
    try:
        raw: object = json.loads(text)
        if isinstance(raw, dict):
            message = jsonrpc_message_adapter.validate_python(repaired_envelope(cast("dict[str, Any]", raw), repairs), by_name=False)
            if "\ufffd" in text:
                repairs.add("bytes that are no UTF-8 were replaced")
            return message
    except (ValueError, RecursionError):
        pass
    repairs.banner(text)
    return None


async def _write(
    process: asyncio.subprocess.Process,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
    written: anyio.Event,
) -> None:
    assert process.stdin is not None
    try:
        async with outgoing:
            async for item in outgoing:
                process.stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        incoming.close()  # the session sees the end of the connection instead of waiting for an answer
    finally:
        written.set()


async def _watch(process: asyncio.subprocess.Process, incoming: MemoryObjectSendStream[SessionMessage | Exception], log: Path) -> None:
    """See the server's end even where a child of its own still holds its output, and keep its log from filling the disk."""
    while process.returncode is None:
        await anyio.sleep(POLL_SECONDS)
        with suppress(OSError):
            if os.stat(log).st_size > LARGEST_LOG:
                os.truncate(log, 0)
    await anyio.sleep(2 * POLL_SECONDS)  # what it wrote last is still read
    incoming.close()


async def _stop(process: asyncio.subprocess.Process, kill: Callable[[], bool]) -> None:
    """Close the input and wait; then SIGTERM to the group and wait; then end whoever still lives."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    if await _ended(process, EXIT_SECONDS):
        return
    with suppress(OSError):
        os.killpg(process.pid, 15)
    if await _ended(process, EXIT_SECONDS):
        return
    await asyncio.to_thread(kill)
    await _ended(process, EXIT_SECONDS)


async def _ended(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Poll: `process.wait()` would also wait for whoever holds the output."""
    deadline = anyio.current_time() + seconds
    pause = 0.002
    while process.returncode is None:
        if anyio.current_time() >= deadline:
            return False
        await anyio.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return True


def _close(process: asyncio.subprocess.Process) -> None:
    """Close the pipes' ends here, which asyncio keeps while a descendant holds the others; nothing public does that."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        with suppress(OSError):
            transport.close()
