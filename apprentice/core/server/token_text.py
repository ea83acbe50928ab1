"""Single tokens as OpenAI's `logprobs` shows them: a string and the UTF-8 bytes it stands for. Knows tokenizers, nothing else."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Text and bytes of the tokens of one tokenizer (a fast Hugging Face one; its type is untyped upstream)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items()}
        self._byte_level = "ByteLevel" in str(getattr(tokenizer.backend_tokenizer, "decoder", ""))
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """(text, bytes); bytes that are no valid UTF-8 on their own show as U+FFFD in the text. An unknown id is empty."""
        found = self._known.get(token_id)
        if found is None:
            raw = self._bytes(token_id)
            found = self._known[token_id] = (raw.decode("utf-8", "replace"), list(raw))
        return found

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(self._tokenizer) else None
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            return bytes(table[character] for character in token if character in table)
        fallback = _BYTE_FALLBACK.fullmatch(token)
        return bytes([int(fallback[1], 16)]) if fallback else token.replace("▁", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet, inverted: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(byte for byte in range(256) if byte not in printable)})
    return table
