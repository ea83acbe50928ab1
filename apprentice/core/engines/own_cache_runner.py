"""The slow path: models with sliding windows, chunks or recurrent layers, each request through the model's own cache.

One forward pass per request and step, no sharing of prefixes: correct for every causal language model of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..training.policy import HostedModel
from .adapters import adapter_name
from .protocol import PolicyVersion
from .running import Advance, Request, Start


@dataclass(slots=True)
class _Hold:
    tokens: int
    cache: Any = None
    """The model's own cache object, made by its first forward pass."""


class OwnCacheRunner:
    """`cache_tokens` bounds the tokens of all running requests together."""

    cache_bytes = 0
    """Unknown: the model's own caches grow as they like."""

    def __init__(self, host: HostedModel, *, cache_tokens: int, reason: str) -> None:
        self._host = host
        self.cache_tokens = cache_tokens
        self.context_length = min(host.context_length, cache_tokens)
        self.notes = (f"sampling takes the slower path, one sequence at a time and without sharing prefixes, because {reason}",)
        self._used = 0

    def start(self, request: Request, running: Sequence[Request]) -> Start:
        need = len(request.ids) + 1
        if running and self._used + need > self.cache_tokens:
            return Start.full
        request.hold, request.computed = _Hold(need), 0
        self._used += need
        return Start.started

    def make_room(self, request: Request) -> bool:
        more = max(0, len(request.ids) + 1 - request.hold.tokens)
        if self._used + more > self.cache_tokens and self._used > request.hold.tokens:
            return False
        request.hold.tokens += more
        self._used += more
        return True

    def advance(self, requests: Sequence[Request]) -> list[Advance]:
        with self._host.using(adapter_name(requests[0].version)) as model, torch.no_grad():
            return [self._step(model, request) for request in requests]

    def stop(self, request: Request) -> None:
        if request.hold is not None:
            self._used -= request.hold.tokens
        request.hold, request.computed = None, 0

    def forget(self, version: PolicyVersion) -> None:
        """Nothing outlives its request."""

    def _step(self, model: Any, request: Request) -> Advance:
        tokens = len(request.ids) - request.computed
        ids_1T = torch.tensor([request.ids[request.computed :]], device=self._host.device)
        keep = tokens if request.scoring else 1
        hold: _Hold = request.hold
        output = model(input_ids=ids_1T, cache=hold.cache, use_cache=True, logits_to_keep=keep)
        hold.cache = output.cache
        request.computed += tokens
        return Advance(request, tokens, output.logits[0, -keep:].float())
