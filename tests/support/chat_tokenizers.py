"""Real tokenizers for the chat layer: SmolLM2's own, and the same vocabulary under the chat templates of other families."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

SPECIALS = (
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|turn>",
    "<turn|>",
)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added but not special, as in Qwen's tokenizers."""


@cache
def smol_tokenizer() -> Any:
    """SmolLM2-135M-Instruct's tokenizer with its own template, which knows no tools."""
    from transformers import AutoTokenizer

    from apprentice.core.training.base_models import resolve_base

    return AutoTokenizer.from_pretrained(resolve_base("smollm2-135m").folder)


@cache
def family_tokenizer(template: str) -> Any:
    """SmolLM2's vocabulary, the special tokens of the common families, and TRL's copy of `template` (e.g. `qwen3`)."""
    import trl
    from transformers import AutoTokenizer

    from apprentice.core.training.base_models import resolve_base

    tokenizer = AutoTokenizer.from_pretrained(resolve_base("smollm2-135m").folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    tokenizer.add_tokens(list(MARKERS))
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def tokenizer_of(family: str) -> Any:
    return smol_tokenizer() if family == "smollm2" else family_tokenizer(family)
