"""The host's end of the proxy over stdio, as streams of the SDK's form.

Not the SDK's own `stdio_server`: that reads in a thread which nothing can interrupt, and a proxy has to end when its server does.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, BinaryIO

import anyio

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

LONGEST_LINE = 1 << 30
"""Bytes of one message."""


@asynccontextmanager
async def host_streams(stdin: BinaryIO | None = None, stdout: BinaryIO | None = None) -> AsyncGenerator[tuple[HostReader, HostWriter]]:
    """What the host writes and reads. The standard streams are pipes; files (`< requests.jsonl`) are read and written at once."""
    reader, incoming = await _reader(stdin or sys.stdin.buffer)
    writer = await _writer(stdout or sys.stdout.buffer)
    try:
        yield HostReader(reader), HostWriter(writer)
    finally:
        if incoming is not None:
            incoming.close()
        if isinstance(writer, asyncio.StreamWriter):
            writer.close()


async def _reader(file: BinaryIO) -> tuple[asyncio.StreamReader, asyncio.ReadTransport | None]:
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    if not _comes_in_time(file):
        reader.feed_data(file.read())
        reader.feed_eof()
        return reader, None
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader, transport


def _comes_in_time(file: BinaryIO) -> bool:
    """Whether what is read has to be waited for: a pipe, a socket, a terminal; not a file, nor a device such as /dev/null."""
    mode = os.fstat(file.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or file.isatty()


async def _writer(file: BinaryIO) -> asyncio.StreamWriter | BinaryIO:
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), file)
    except ValueError:
        return file
    return asyncio.StreamWriter(transport, protocol, None, loop)


class HostReader:
    """Messages of the host, one a line. A line that is no JSON-RPC is an exception as an item."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def receive(self) -> SessionMessage | Exception:
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        line = await self._reader.readline()
        if not line:
            raise anyio.EndOfStream
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as error:
            return error

    def __aiter__(self) -> HostReader:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class HostWriter:
    """Messages for the host. Raises anyio.BrokenResourceError once it no longer reads."""

    def __init__(self, writer: asyncio.StreamWriter | BinaryIO) -> None:
        self._writer = writer

    async def send(self, item: SessionMessage) -> None:
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        try:
            self._writer.write(line)
            if isinstance(self._writer, asyncio.StreamWriter):
                await self._writer.drain()
            else:
                self._writer.flush()
        except OSError as error:
            raise anyio.BrokenResourceError from error
