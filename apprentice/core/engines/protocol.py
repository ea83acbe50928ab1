"""The engine's contract: token ids in, token ids out. An engine knows neither chat nor rewards nor the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from ..records import SamplingParams


class PolicyVersion(NamedTuple):
    """Whose weights to sample from. `BASE` (policy None) is the base model without any adapter."""

    policy: str | None
    version: int


BASE = PolicyVersion(None, 0)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some newly drawn tokens of one completion; all sequences have one length.

    Concatenating the chunks of a stream gives the completion. The last chunk has `finish_reason` set and may be empty.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Natural log, temperature 1, whole vocabulary."""
    sampling_logprobs: tuple[float, ...] = ()
    """Natural log, of the distribution drawn from (0.0 for greedy)."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per token the `SamplingParams.top_logprobs` most likely (token id, logprob) pairs, best first; empty if not asked for."""
    finish_reason: Literal["stop", "length"] | None = None
    """stop: a stop token (included in token_ids) or a stop string; length: max_tokens or the context's end."""
    stop_string: str | None = None
    """The stop string that ended it, if one did. The tokens that spell it are in token_ids; text is cut by the reader."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    name: str
    device: str
    dtype: str
    context_length: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    notes: tuple[str, ...] = ()
    """Sentences for the user, e.g. why a slower path is used."""


@dataclass(slots=True)
class EngineStats:
    """Counters since start."""

    queued: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    sampled_tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict[str, float])


class Engine(Protocol):
    """Samples tokens. Every method may be called from any task of one event loop; all raise `EngineError` when closed."""

    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats: ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion, stop_token_ids: Sequence[int] = ()
    ) -> AsyncIterator[TokenChunk]:
        """Draw one completion, wholly with one policy version. Closing the iterator (`aclose`) cancels the sampling."""
        ...

    async def score(self, token_ids: Sequence[int], policy: PolicyVersion) -> list[float]:
        """Log-probabilities (temperature 1) of token_ids[1:] given what is before each: the canary."""
        ...

    async def load(self, policy: PolicyVersion, adapter_path: Path) -> None:
        """Make a version servable. Returns only when it is; completions of other versions go on unharmed."""
        ...

    async def unload(self, policy: PolicyVersion) -> None:
        """Forget a version once the completions that still use it have ended."""
        ...

    def loaded(self) -> frozenset[PolicyVersion]: ...

    async def pause(self) -> None:
        """Start no new work and wait until no step is running (open completions keep their place): the trainer's turn."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
