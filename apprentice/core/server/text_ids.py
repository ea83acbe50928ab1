"""Text → token ids, remembered; and sequences of ids in short. Knows one tokenizer, no templates.

A conversation is encoded message by message between the turns that were sampled, so the same texts come again with every
turn: system prompt, tools and tool results are encoded once as long as they are remembered.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

_REMEMBERED_CHARACTERS = 16_000_000
"""About 50 MB with the ids."""


class Context(NamedTuple):
    """A sequence of ids in short: equal ids have equal contexts."""

    length: int
    digest: bytes


def contexts(ids: Sequence[int], lengths: Sequence[int]) -> list[Context]:
    """The contexts of the first n ids, for every n in `lengths` (ascending), in one pass."""
    raw, digest, done = array("q", ids).tobytes(), blake2b(digest_size=16), 0
    found: list[Context] = []
    for length in lengths:
        digest.update(raw[8 * done : 8 * length])
        done = length
        found.append(Context(length, digest.copy().digest()))
    return found


class TextIds:
    """Ids of texts, without any added tokens; special tokens that are written out become special tokens. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._encode = _encoder(tokenizer)
        self._gate = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self.encoded = 0
        """Texts that were not remembered, so far."""

    def __call__(self, text: str) -> array[int]:
        """The ids of `text`; the array is shared and must not be changed."""
        with self._gate:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return known
            self.encoded += 1
        ids = self._encode(text)
        with self._gate:
            if text not in self._known:
                self._known[text] = ids
                self._characters += len(text)
            while self._characters > _REMEMBERED_CHARACTERS:
                self._characters -= len(self._known.popitem(last=False)[0])
        return ids


def _encoder(tokenizer: Any) -> Callable[[str], array[int]]:
    """The Rust tokenizer is called directly where there is one: transformers' wrapper is not safe across threads."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: array("i", tokenizer.encode(text, add_special_tokens=False))
    backend.no_truncation()
    backend.no_padding()
    return lambda text: array("i", backend.encode(text, add_special_tokens=False).ids)
