"""Where the server runs, seen from user code: somewhere (`RemoteBackend`), or as a child of this process (`LocalBackend`)."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ..errors import ConfigError, ServerUnavailable
from .api import ControlApi
from .local_server import LocalServer, local_server, release
from .transport import Limits, RetryPolicy, Transport

API_KEY_VARIABLE = "APPRENTICE_API_KEY"
READY_SECONDS = 300.0


class Backend(Protocol):
    """A server that a model can be registered with."""

    async def connect(self) -> Transport:
        """The connection to a ready server, started if need be. Always the same one."""
        ...

    async def close(self) -> None:
        """Give the connections back, and stop what was started here."""
        ...


class _Closing(ABC):
    """`async with backend:` closes it."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class RemoteBackend(_Closing):
    """A server that runs elsewhere. The key defaults to the environment's APPRENTICE_API_KEY."""

    def __init__(self, url: str, api_key: str | None = None, *, limits: Limits | None = None, retry: RetryPolicy | None = None) -> None:
        self._transport = Transport(url, api_key or os.environ.get(API_KEY_VARIABLE), limits=limits, retry=retry)
        self._ready = False

    def __repr__(self) -> str:
        return f"RemoteBackend({str(self._transport.url)!r})"

    @property
    def url(self) -> str:
        return str(self._transport.url).rstrip("/")

    async def connect(self) -> Transport:
        if not self._ready:
            await wait_until_ready(ControlApi(self._transport))
            self._ready = True
        return self._transport

    async def close(self) -> None:
        await self._transport.aclose()


class LocalBackend(_Closing):
    """A server of one's own: a child process on a free loopback port with a random key, which ends when this process does.

    `path` is its home (ledger, checkpoints, log); backends of one process with the same home share one server. The
    other options are those of `apprentice serve`: `device` ("cpu", "cuda"), `dtype`, the bound of the KV cache in
    tokens, and the CPU threads of torch; None leaves the choice to the server.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = ".apprentice",
        *,
        device: str | None = None,
        dtype: str | None = None,
        kv_cache_tokens: int | None = None,
        threads: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        options = {"--device": device, "--dtype": dtype, "--kv-cache-tokens": kv_cache_tokens, "--threads": threads}
        try:
            self.home = Path(path).expanduser().resolve()
        except (OSError, RuntimeError, ValueError) as cause:  # a zero byte, an unknown user, a circle of links
            raise ConfigError(f"{str(path)!r} cannot be the home of a server: {cause}", param="path") from cause
        self._serve_args = tuple(text for name, value in options.items() if value is not None for text in (name, str(value)))
        self._limits = limits
        self._server: LocalServer | None = None
        self._transport: Transport | None = None

    def __repr__(self) -> str:
        return f"LocalBackend({str(self.home)!r})"

    @property
    def url(self) -> str:
        if self._transport is None:
            raise ServerUnavailable(f"the server of {self.home} is not started; `await backend.connect()` or register a model first")
        return str(self._transport.url).rstrip("/")

    async def connect(self) -> Transport:
        if self._transport is None:
            # In a thread: starting takes seconds, and other tasks of this loop go on meanwhile.
            server = await asyncio.to_thread(local_server, self.home, self._serve_args)
            if self._transport is None:
                self._server = server
                self._transport = Transport(server.url, server.api_key, limits=self._limits, diagnose=server.cause_of_death)
            else:
                release(server)
        await wait_until_ready(ControlApi(self._transport))
        return self._transport

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        server, self._server = self._server, None
        if transport is not None:
            await transport.aclose()
        if server is not None:
            await asyncio.to_thread(release, server)


async def wait_until_ready(api: ControlApi, seconds: float = READY_SECONDS) -> None:
    """Return once the server answers `/health`, which it does when it is ready; ServerUnavailable if not within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await api.health()
    except TimeoutError as cause:
        raise ServerUnavailable(f"the server at {api.transport.url} gave no answer within {seconds:g} s") from cause
