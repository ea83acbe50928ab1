"""The server process: ledger, base models, policies, jobs and HTTP put together, and taken apart in the right order."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ..training.checkpoints import CheckpointStore
from ..wire import JobPhase
from .app import bind, create_app, serve
from .auth import Auth
from .bases import BasePool, EngineOptions
from .job_steps import JobSteps
from .jobs import TrainJobs
from .ledger import Ledger
from .limits import Limits
from .policies import Policies
from .registry import ServerRegistry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything a server is told at its start. `home` holds the ledger and the checkpoints."""

    home: Path
    host: str = "127.0.0.1"
    port: int = 7474
    api_key: str | None = None
    base_models: tuple[str, ...] = ()
    """Loaded before the server is ready, so that they can be called without any policy."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)


async def run_server(
    options: ServerOptions, on_ready: Callable[[int], None], on_phase: Callable[[str, JobPhase], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the port.

    Raises ConfigError (address, key, device), ModelRefused (a base model), LedgerError (the ledger is in use or damaged);
    what can be refused before anything is loaded, is.
    """
    auth = Auth.for_bind(options.host, options.api_key)
    options.engine.check()
    bind(options.host, options.port).close()
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger.open(options.home / "ledger.sqlite"))
        bases = BasePool(ledger, options.engine)
        stack.push_async_callback(bases.close)
        for name in options.base_models:
            await bases.get(name)
        store = await asyncio.to_thread(CheckpointStore, options.home / "checkpoints")
        policies = Policies(ledger, store, bases)
        jobs = TrainJobs(ledger, JobSteps(ledger, policies), on_phase)
        registry = ServerRegistry(ledger, policies, bases, jobs)
        app = create_app(registry, ledger, auth=auth, limits=options.limits)
        await jobs.start()
        stack.push_async_callback(jobs.close)

        def ready(port: int) -> None:
            # What is alive now stays: without this, each full collection walks torch's heap for up to 0.8 s.
            gc.collect()
            gc.freeze()
            on_ready(port)

        await serve(app, options.host, options.port, ready, options.limits)
