"""HTTP between user code and the server: bounded connections, retries, typed errors.

`LoopTransport` is the one seam: an httpx transport that may be used from any event loop, so that a client made in one
loop (a notebook cell, another thread, an earlier `asyncio.run`) works in the next. Each loop has its own connections,
in shards of a bounded size, because one httpx pool slows down with the number of its sockets. A request first waits
for a free slot; the time-outs of httpx start after that, so thousands of open rollouts wait instead of failing.

`Transport` sends one JSON request and knows when sending it again is safe. It must not know what the paths mean.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import ssl
import threading
import urllib.request
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx

from ..errors import (
    ApprenticeError,
    CheckpointCorrupt,
    ConfigError,
    InfrastructureError,
    LedgerFull,
    LedgerVersionError,
    ServerUnavailable,
    StaleEngine,
    TrainJobFailed,
    from_wire,
)

NOT_RETRIED = (CheckpointCorrupt, LedgerFull, LedgerVersionError, StaleEngine, TrainJobFailed)
"""Infrastructure errors that the same request would meet again."""
BUSY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})
MAX_RETRY_AFTER = 60.0


def is_loopback(url: httpx.URL) -> bool:
    """True if the URL's host is this machine's loopback interface."""
    if url.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return False


def parse_url(url: str) -> httpx.URL:
    """A server's address without a trailing slash or `/v1`; ConfigError unless it is http(s) with a host."""
    try:
        parsed = httpx.URL(url.strip().rstrip("/").removesuffix("/v1").rstrip("/"))
    except (httpx.InvalidURL, AttributeError) as cause:
        raise ConfigError(f"the server's URL must look like http://host:7474, got {url!r}", param="url") from cause
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"the server's URL must look like http://host:7474, got {url!r}", param="url")
    return parsed


def environment_proxy(url: httpx.URL) -> httpx.Proxy | None:
    """The proxy that the environment names for this URL; never one for loopback."""
    if is_loopback(url) or urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    address = proxies.get(url.scheme) or proxies.get("all")
    return httpx.Proxy(address) if address else None


def ssl_context(url: httpx.URL) -> ssl.SSLContext:
    """Certificates are loaded only where they are needed: it costs tens of milliseconds."""
    return httpx.create_ssl_context() if url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True, slots=True)
class Limits:
    """Connections that one event loop may hold to one server, and how many of them share a pool.

    The pool of httpx looks at every pair of its connections for every request, so pools are small: with 64 in a pool
    that alone took 10 ms a request, with 8 it is not seen.
    """

    connections: int = 256
    shard_size: int = 8


class _Shard:
    """One pool of at most `size` connections. `load` counts the requests that hold or await a slot."""

    def __init__(self, size: int, context: ssl.SSLContext, proxy: httpx.Proxy | None) -> None:
        self.size = size
        self.load = 0
        self._slots = asyncio.Semaphore(size)
        # The semaphore is the bound; a second one inside the pool could only make a cancelled request's slot leak.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=size, keepalive_expiry=30.0)
        self._http = httpx.AsyncHTTPTransport(verify=context, limits=limits, proxy=proxy, trust_env=False)

    async def send(self, request: httpx.Request) -> httpx.Response:
        self.load += 1
        admitted = False
        try:
            await self._slots.acquire()
            admitted = True
            response = await self._http.handle_async_request(request)
        except BaseException:
            self._release(admitted)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        stream = _ReleasingStream(response.stream, lambda: self._release(True))
        return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)

    def _release(self, admitted: bool) -> None:
        self.load -= 1
        if admitted:
            self._slots.release()

    async def aclose(self) -> None:
        await self._http.aclose()


class _ReleasingStream(httpx.AsyncByteStream):
    """A response body that gives its slot back when it is closed, once."""

    def __init__(self, stream: httpx.AsyncByteStream, release: Callable[[], None]) -> None:
        self._stream = stream
        self._release: Callable[[], None] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        release, self._release = self._release, None
        try:
            await self._stream.aclose()
        finally:
            if release is not None:
                release()


@dataclass(slots=True)
class _LoopPools:
    """The shards of one event loop, and the generator that closes them when the loop shuts down."""

    shards: list[_Shard]
    closer: AsyncGenerator[None] = field(init=False)


class LoopTransport(httpx.AsyncBaseTransport):
    """An httpx transport for one server, safe to use from several event loops and threads."""

    def __init__(self, url: httpx.URL, limits: Limits | None = None) -> None:
        self._url = url
        self._limits = limits or Limits()
        self._context = ssl_context(url)
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopPools] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        shards = (await self._of_this_loop()).shards
        shard = next((shard for shard in shards if shard.load < shard.size), None) or min(shards, key=lambda shard: shard.load)
        return await shard.send(request)

    async def _of_this_loop(self) -> _LoopPools:
        loop = asyncio.get_running_loop()
        with self._lock:
            pools = self._pools.get(loop)
            if pools is None:
                pools = self._pools[loop] = _LoopPools(self._new_shards())
                pools.closer = _closing(pools.shards)
                fresh = True
            else:
                fresh = False
        if fresh:
            await anext(pools.closer)  # now the loop knows the generator and closes it in shutdown_asyncgens
        return pools

    def _new_shards(self) -> list[_Shard]:
        total, size = self._limits.connections, self._limits.shard_size
        proxy = environment_proxy(self._url)
        return [_Shard(min(size, total - start), self._context, proxy) for start in range(0, total, size)]

    async def aclose(self) -> None:
        """Close this loop's connections, and those of other loops that still run; a closed loop has none."""
        here = asyncio.get_running_loop()
        with self._lock:
            everywhere = list(self._pools.items())
            self._pools.clear()
        for loop, pools in everywhere:
            if loop is here:
                await pools.closer.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(pools.closer.aclose(), loop)


async def _closing(shards: list[_Shard]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        for shard in shards:
            await shard.aclose()


class BorrowedTransport(httpx.AsyncBaseTransport):
    """Another's transport: closing the client that borrowed it leaves it open."""

    def __init__(self, owner: httpx.AsyncBaseTransport) -> None:
        self._owner = owner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._owner.handle_async_request(request)

    async def aclose(self) -> None:
        """Nothing: the owner closes."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter; `attempts` includes the first."""

    attempts: int = 8
    first_seconds: float = 0.25
    longest_seconds: float = 8.0
    rng: random.Random = field(default_factory=random.Random)

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the failed attempt number `attempt` (from 1)."""
        ceiling = min(self.longest_seconds, self.first_seconds * 2 ** (attempt - 1))
        return self.rng.uniform(ceiling / 2, ceiling)


class Transport:
    """Sends JSON to one server.

    `diagnose` is asked when there is no answer: it may return the reason (the child process ended, say), which is
    then raised at once instead of trying again.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        limits: Limits | None = None,
        retry: RetryPolicy | None = None,
        diagnose: Callable[[], ApprenticeError | None] | None = None,
    ) -> None:
        self.url = parse_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key must consist of printable ASCII characters", param="api_key")
        self.api_key = api_key
        self.retry = retry or RetryPolicy()
        self.pool = LoopTransport(self.url, limits)
        self._diagnose = diagnose
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(transport=self.pool, base_url=self.url, headers=self._headers, trust_env=False)

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        idempotent: bool = True,
        seconds: float = 60.0,
    ) -> bytes:
        """The answer's body. A request that surely never ran is sent again; others only if `idempotent`.

        Raises the server's own error, or ServerUnavailable. `seconds` bounds each attempt's silence, after admission.
        """
        request_headers = {**(headers or {}), **({"content-type": "application/json"} if content is not None else {})}
        attempt = 0
        while True:
            attempt += 1
            request = self._http.build_request(
                method, path, content=content, params=params, headers=request_headers, timeout=httpx.Timeout(seconds, connect=10.0)
            )
            wait: float | None = None
            try:
                response = await self._http.send(request)
            except httpx.TransportError as cause:
                self._raise_diagnosis(cause)
                if attempt >= self.retry.attempts or not (idempotent or _never_sent(cause)):
                    raise self._unavailable(method, path, cause) from cause
            else:
                if response.is_success:
                    return response.content
                error = _error_of(response)
                if attempt >= self.retry.attempts or not _again_helps(error, response.status_code):
                    raise error
                wait = _retry_after(response)
            await asyncio.sleep(self.retry.delay(attempt) if wait is None else wait)

    def _raise_diagnosis(self, cause: Exception) -> None:
        reason = self._diagnose() if self._diagnose else None
        if reason is not None:
            raise reason from cause

    def _unavailable(self, method: str, path: str, cause: Exception) -> ServerUnavailable:
        what = str(cause) or type(cause).__name__
        return ServerUnavailable(f"{method} {self.url}{path} got no answer: {what}")

    async def lines(self, path: str, *, params: Mapping[str, str | int] | None = None, silence: float = 60.0) -> AsyncGenerator[str]:
        """The lines of a streamed answer, e.g. server-sent events; one attempt. `silence` is the longest gap in seconds."""
        timeout = httpx.Timeout(silence, connect=10.0)
        headers = {"accept": "text/event-stream"}
        try:
            async with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _error_of(response)
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as cause:
            self._raise_diagnosis(cause)
            raise self._unavailable("GET", path, cause) from cause

    async def aclose(self) -> None:
        await self._http.aclose()


def _never_sent(cause: httpx.TransportError) -> bool:
    return isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def _error_of(response: httpx.Response) -> ApprenticeError:
    try:
        body: object = response.json()
    except ValueError:
        body = None
    error = from_wire(body, response.status_code)
    if not isinstance(body, dict) or "error" not in body:
        request = response.request
        error.message = f"{request.method} {request.url} answered with HTTP status {response.status_code}; is it an Apprentice server?"
        error.args = (error.message,)
    return error


def _again_helps(error: ApprenticeError, status: int) -> bool:
    return isinstance(error, InfrastructureError) and status in BUSY and not isinstance(error, NOT_RETRIED)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return min(MAX_RETRY_AFTER, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):  # absent, or a date
        return None
