"""What scheduler and runners share: a request in flight, and what a runner does. Knows no asyncio and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from .protocol import PolicyVersion, TokenChunk
from .request_rules import EndRule
from .sampling import Drawing

Outcome = TokenChunk | list[float] | BaseException
"""What a request hears: chunks of a completion, the scores of a scoring, or why it failed."""


@dataclass(eq=False)
class Request:
    """One completion to draw or, without `drawing`, one text to score."""

    version: PolicyVersion
    ids: list[int]
    """The prompt, then what was drawn."""
    deliver: Callable[[Outcome], None]
    drawing: Drawing | None = None
    rule: EndRule | None = None
    cancelled: bool = False
    done: bool = False
    counted: bool = False
    """In the statistics; a request that was sent back to the queue is counted once."""
    computed: int = 0
    """Tokens of `ids` whose keys and values (or state) are in the cache."""
    scores: list[float] = field(default_factory=list[float])
    hold: Any = None
    """The runner's own: its hold on the cache."""

    @property
    def scoring(self) -> bool:
        return self.drawing is None


class Start(Enum):
    started = "started"
    later = "later"
    """A running request is just reading the same prompt; wait until its prefix can be shared. Others may overtake."""
    full = "full"
    """No memory now. Nobody may overtake, so that large requests are not starved."""


@dataclass(frozen=True, slots=True)
class Advance:
    """One request's part of a finished step: `tokens` more are computed, with the logits at the wanted ones (the last, or
    all of a scoring)."""

    request: Request
    tokens: int
    logits_WV: Tensor | None


class Runner(Protocol):
    """Runs the model for some requests of one version, and keeps their caches."""

    context_length: int
    cache_tokens: int
    cache_bytes: int
    notes: tuple[str, ...]

    def start(self, request: Request, running: Sequence[Request]) -> Start: ...

    def make_room(self, request: Request) -> bool:
        """Whether the request's next token fits, making room by forgetting old prefixes."""
        ...

    def advance(self, requests: Sequence[Request]) -> list[Advance]:
        """One step for requests of one version that all have room."""
        ...

    def stop(self, request: Request) -> None:
        """Free the request's hold. What it computed may be kept for later prompts."""
        ...

    def forget(self, version: PolicyVersion) -> None: ...
