"""What the engines of this package do alike with a request: refuse an impossible prompt, and decide when a completion ends.

Knows token ids and a `decode` function; nothing of torch, chat templates or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ..errors import ContextOverflow, EngineError, InvalidRequest
from ..records import SamplingParams
from .protocol import BASE, PolicyVersion

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included, spaces untouched."""

_MARGIN = 8
"""Characters kept beyond the longest stop string: an unfinished UTF-8 sequence shows as up to three replacement characters."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that an engine needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


def plain_decode(tokenizer: Tokenizer) -> Decode:
    """`tokenizer.decode` that shows special tokens and leaves spaces alone."""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check_prompt(prompt_ids: Sequence[int], *, context_length: int, vocabulary: int, room: int = 1) -> None:
    """Refuse a prompt that is empty, names a token outside the vocabulary, or leaves no room for `room` new tokens."""
    if not prompt_ids:
        raise InvalidRequest("the prompt must hold at least one token id, but it is empty", param="prompt")
    if len(prompt_ids) + room > context_length:
        raise ContextOverflow(
            f"the prompt has {len(prompt_ids)} tokens and the model's context holds {context_length}, which leaves no room for a reply",
            param="prompt",
            details={"prompt_tokens": len(prompt_ids), "context_length": context_length},
        )
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocabulary:
        raise InvalidRequest(
            f"token ids must lie between 0 and {vocabulary - 1}, but the prompt holds {low if low < 0 else high}", param="prompt"
        )


def check_adapter_folder(policy: PolicyVersion, adapter_path: Path) -> None:
    if not adapter_path.is_dir():
        raise EngineError(f"the adapter of {name_of(policy)} must be a folder, but {adapter_path} is not one")


def name_of(policy: PolicyVersion) -> str:
    return "the base model" if policy == BASE else f"{policy.policy}@{policy.version}"


def not_loaded(policy: PolicyVersion, loaded: Iterable[PolicyVersion]) -> EngineError:
    """The error for a version that the engine does not serve. It never falls back to another one."""
    names = ", ".join(sorted(name_of(version) for version in loaded))
    return EngineError(f"the engine does not serve {name_of(policy)}; it serves {names}")


@dataclass(frozen=True, slots=True)
class Ending:
    reason: Literal["stop", "length"]
    stop_string: str | None = None


class EndRule:
    """Decides after each token whether a completion has ended: stop token, then stop string, then length.

    Stop strings are found across token borders and characters whose UTF-8 bytes are spread over several tokens. The text
    of only the last tokens is decoded, so a step costs the same however long the completion is.
    """

    def __init__(self, sampling: SamplingParams, stop_token_ids: Sequence[int], *, room: int, decode: Decode | None) -> None:
        if sampling.stop and decode is None:
            raise EngineError("this engine has no tokenizer, so it cannot look for stop strings")
        self._decode = decode
        self._stop_strings = sampling.stop
        self._stop_token_ids = frozenset(stop_token_ids)
        self._left = min(sampling.max_tokens, room)
        self._keep = max(map(len, sampling.stop), default=0) + _MARGIN
        self._window: list[int] = []

    def push(self, token_id: int) -> Ending | None:
        """How the completion ends with this token, or None if it goes on."""
        self._left -= 1
        if token_id in self._stop_token_ids:
            return Ending("stop")
        if self._stop_strings:
            found = self._find(token_id)
            if found is not None:
                return Ending("stop", found)
        return Ending("length") if self._left <= 0 else None

    def _find(self, token_id: int) -> str | None:
        assert self._decode is not None  # checked in __init__
        self._window.append(token_id)
        text = self._decode(self._window)
        hits = [(text.find(stop), -len(stop), stop) for stop in self._stop_strings if stop in text]
        if hits:
            return min(hits)[2]
        if len(text) > 4 * self._keep:
            self._shorten()
        return None

    def _shorten(self) -> None:
        assert self._decode is not None
        rest = self._window
        while len(rest) > 1 and len(self._decode(rest)) >= self._keep:
            self._window, rest = rest, rest[(len(rest) + 1) // 2 :]
