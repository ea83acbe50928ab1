"""Assembly: routes, auth, errors, health and metrics in one application, and the process that serves it."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING
from uuid import uuid4

import h11
import uvicorn
from fastapi import FastAPI
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import AuthenticationError, ConfigError, InvalidRequest
from ..wire import Health
from .auth import Auth
from .control import control_router
from .gateway import gateway_routers
from .gateway_calls import Gateway
from .http_errors import documented, error_response, install_error_handlers
from .limits import Limits
from .metrics import CONTENT_TYPE, Metrics
from .registry_protocol import Registry

if TYPE_CHECKING:
    from .ledger import Ledger

BACKLOG = 4096
"""Connections that the kernel holds until they are accepted."""
MAX_HEADER_BYTES = 256 * 1024
"""A long conversation's lineage travels in a header."""


def create_app(registry: Registry, ledger: Ledger, *, auth: Auth, limits: Limits | None = None) -> FastAPI:
    """The whole HTTP interface. `registry` and `ledger` stay the caller's to close, after the application has shut down."""
    limits = limits or Limits()
    metrics = Metrics()
    gateway = Gateway(registry, ledger, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        gateway.close()

    app = FastAPI(
        title="Apprentice",
        version=package_version(),
        description="OpenAI's API in front of trainable models (`/v1`), and the control of their training (`/api`).",
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.max_body_bytes = limits.max_body_bytes
    install_error_handlers(app)
    for router in gateway_routers(gateway):
        app.include_router(router)
    app.include_router(control_router(registry, ledger, limits, gateway.forget))
    _add_status_routes(app, gateway, ledger)
    app.add_middleware(Gate, auth=auth, metrics=metrics)
    return app


def _add_status_routes(app: FastAPI, gateway: Gateway, ledger: Ledger) -> None:
    def waiting() -> int:
        return sum(admission.waiting for admission in gateway.sampler.admissions())

    def running() -> int:
        return sum(admission.running for admission in gateway.sampler.admissions())

    gateway.metrics.gauge("queued", "Completions waiting for their turn", waiting)
    gateway.metrics.gauge("running", "Completions being sampled", running)

    @app.get("/health", tags=["Status"], responses=documented())
    async def health() -> Health:
        """What runs, on what, how busy it is, and how many calls came without a trajectory id."""
        counts = await run_in_threadpool(ledger.counts)
        infos = [engine.info() for engine in gateway.registry.engines()]
        return Health(
            status="ready",
            version=package_version(),
            engine=_joined(info.name for info in infos),
            device=_joined(info.device for info in infos),
            dtype=_joined(info.dtype for info in infos),
            kv_cache_tokens=sum(info.kv_cache_tokens for info in infos),
            kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
            queued=waiting(),
            running=running(),
            unattributed_calls=counts.unattributed_calls,
            models=tuple(info.policy for info in gateway.registry.models()),
        )

    @app.get("/metrics", tags=["Status"], response_class=Response, responses={**documented(), 200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)


def _joined(names: object) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"  # type: ignore[call-overload]


def package_version() -> str:
    try:
        return version("apprentice-rl")
    except PackageNotFoundError:
        return "0+source"


class Gate:
    """ASGI middleware around everything: authentication, `x-request-id`, and the count of requests."""

    def __init__(self, app: ASGIApp, auth: Auth, metrics: Metrics) -> None:
        self.app, self.auth, self.metrics = app, auth, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req-{uuid4().hex}"

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._count(scope, message["status"])
            await send(message)

        try:
            self.auth.check(Headers(scope=scope))
        except AuthenticationError as error:
            await error_response(error, headers={"www-authenticate": "Bearer"})(scope, receive, send_counted)
            return
        await self.app(scope, receive, send_counted)

    def _count(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        self.metrics.requests.labels(scope["method"], route, status).inc()


class _Protocol(H11Protocol):
    """uvicorn's HTTP, whose answer to what is no HTTP (or has too long a header) is an error in our form too."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way already: it ends here
            self.transport.close()
            return
        body = to_json(InvalidRequest(f"what came is not a valid HTTP request, or its headers exceed {MAX_HEADER_BYTES} bytes").to_wire())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn, telling when it accepts connections. `app.state.stop()` ends it as SIGTERM does."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def stop(self) -> None:
        self.should_exit = True


async def serve(app: FastAPI, host: str, port: int, on_ready: Callable[[int], None], limits: Limits | None = None) -> None:
    """Serve until SIGINT or SIGTERM. `port` 0 takes a free one; `on_ready` gets the port once connections are accepted."""
    raise_open_files()
    gc.freeze()  # what is loaded by now stays: it need not be searched for garbage again and again
    listener = bind(host, port)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int((limits or Limits()).shutdown_seconds),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
    )
    bound: int = listener.getsockname()[1]
    server = _Server(config, lambda: on_ready(bound))
    app.state.stop = server.stop
    try:
        await server.serve([listener])
    finally:
        listener.close()


def run(app: FastAPI, host: str, port: int, on_ready: Callable[[int], None], limits: Limits | None = None) -> None:
    """`serve` in an event loop of its own."""
    asyncio.run(serve(app, host, port, on_ready, limits))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. `ConfigError` if the port is in use or the address is not of this machine.

    The protocol is named because asyncio sets TCP_NODELAY only where it is: without it each reply waits 40 ms for an ACK.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as cause:
        listener.close()
        raise ConfigError(f"the server cannot listen on {host}:{port}: {cause}; choose another port or address", param="port") from cause
    listener.setblocking(False)
    return listener


def raise_open_files() -> int:
    """Lift this process's limit of open files to what the system allows it, since each open rollout holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
