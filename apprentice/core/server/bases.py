"""Base models in memory: each with its codec, its engine and its splicer, loaded once, when first needed.

This is the only place that decides which engine serves a base model. It knows no policies and no jobs.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from ..engines.embedded import EmbeddedEngine
from ..engines.protocol import Engine
from ..errors import ApprenticeError, ModelRefused
from ..training.base_models import BaseCapabilities, inspect_base, resolve_base
from ..training.policy import HostedModel, placement
from ..training.trainer import supports_sharing
from .chat import ChatCodec
from .ledger import Ledger
from .splice import Splicer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How base models are loaded and sampled. None: decided by the hardware (see `apprentice doctor`)."""

    dtype: str | None = None
    device: str | None = None
    kv_cache_tokens: int | None = None
    cache: Path | None = None
    """Where converted base models are kept."""

    def check(self) -> None:
        """Raises ConfigError for an unknown device or dtype, before anything is loaded."""
        placement(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class BaseRuntime:
    """A base model that answers."""

    name: str
    host: HostedModel
    capabilities: BaseCapabilities
    codec: ChatCodec
    engine: Engine
    splicer: Splicer
    sharing: bool
    warnings: tuple[str, ...]


class BasePool:
    """The base models of one server. `get` loads; `loaded` only looks."""

    def __init__(self, ledger: Ledger, options: EngineOptions) -> None:
        self._ledger = ledger
        self._options = options
        self._loaded: dict[str, BaseRuntime] = {}
        self._lock = asyncio.Lock()

    def loaded(self) -> dict[str, BaseRuntime]:
        return dict(self._loaded)

    async def get(self, name: str) -> BaseRuntime:
        """The base model, loaded if it was not. Raises ModelRefused, ConfigError."""
        async with self._lock:
            if name not in self._loaded:
                log.info("loading base model %s", name)
                self._loaded[name] = await asyncio.to_thread(self._loaded_or_refused, name)
                log.info("base model %s is ready: %s", name, self._loaded[name].engine.info())
            return self._loaded[name]

    def _loaded_or_refused(self, name: str) -> BaseRuntime:
        try:
            return self._load(name)
        except ApprenticeError:
            raise
        except Exception as cause:  # a folder may hold anything, and what reads it then raises anything
            reason = next(iter(str(cause).splitlines()), "")
            raise ModelRefused(f"base model '{name}' cannot be used: {type(cause).__name__}: {reason}", param="base_model") from cause

    def _load(self, name: str) -> BaseRuntime:
        base = resolve_base(name, cache=self._options.cache)
        capabilities = inspect_base(base)
        if not capabilities.has_chat_template:
            raise ModelRefused(f"base model '{name}' has no chat template, so an agent cannot talk to it", param="base_model")
        host = HostedModel.load(base, dtype=self._options.dtype, device=self._options.device)
        codec = ChatCodec(host.tokenizer)
        codec.check_round_trip()
        sharing, reason = supports_sharing(host)
        engine = EmbeddedEngine(host, kv_cache_tokens=self._options.kv_cache_tokens)
        warnings = (*capabilities.notes, *codec.warnings, *engine.info().notes, *(() if sharing else (reason,)))
        return BaseRuntime(name, host, capabilities, codec, engine, Splicer(codec, self._ledger), sharing, tuple(dict.fromkeys(warnings)))

    async def close(self) -> None:
        for base in self._loaded.values():
            await base.engine.close()
        self._loaded.clear()
