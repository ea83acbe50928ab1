"""Replies of `/v1` in OpenAI's form, with Apprentice's additions. Pure: records and samples in, dictionaries out.

Additions, absent from OpenAI's form: `policy_version` (always; null for a base model), `choices[].provenance_id` (always; in
a stream on the first chunk of each choice), `choices[].parse_error` (if a reply is not what was asked for), and with
`return_token_ids` `prompt_token_ids` and `choices[].token_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue

from ..records import Completion
from .token_text import TokenText

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, as in OpenAI's replies."""


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    """Every sampled token, those of tool calls and the end of turn included, at temperature 1."""
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ReplyMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChoiceLogprobs | None = None
    provenance_id: str
    parse_error: str | None = None
    token_ids: list[int] | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(BaseModel):
    """Reply of `/v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    policy_version: int | None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None = None
    provenance_id: str
    parse_error: str | None = None
    token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """Reply of `/v1/completions` without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    policy_version: int | None
    prompt_token_ids: list[int] | None = None


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    base_model: str | None = None
    step: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry] = Field(default_factory=list[ModelEntry])


Tops = Sequence[Sequence[tuple[int, float]]]
Json = dict[str, Any]


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def chat_logprobs(text: TokenText, token_ids: Sequence[int], logprobs: Sequence[float], tops: Tops) -> Json:
    def shown(token_id: int, logprob: float) -> Json:
        token, raw = text.of(token_id)
        return {"token": token, "logprob": finite(logprob), "bytes": raw}

    padded = tops or ((),) * len(token_ids)
    content = [
        {**shown(token_id, logprob), "top_logprobs": [shown(*pair) for pair in top]}
        for token_id, logprob, top in zip(token_ids, logprobs, padded, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(text: TokenText, token_ids: Sequence[int], logprobs: Sequence[float], tops: Tops, offset: int = 0) -> Json:
    tokens = [text.of(token_id)[0] for token_id in token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    alternatives = [{text.of(token_id)[0]: finite(logprob) for token_id, logprob in top} for top in tops]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(logprob) for logprob in logprobs],
        "top_logprobs": alternatives or None,
        "text_offset": offsets,
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def chat_choice(completion: Completion, logprobs: Json | None, with_tokens: bool) -> Json:
    message: Mapping[str, JsonValue] = {"role": "assistant", "content": None, "refusal": None, **completion.message}
    return {"index": completion.choice, "message": message, **_end_of_choice(completion, logprobs, with_tokens)}


def text_choice(completion: Completion, logprobs: Json | None, with_tokens: bool) -> Json:
    return {
        "index": completion.choice,
        "text": completion.message["content"],
        **_end_of_choice(completion, logprobs, with_tokens),
    }


def _end_of_choice(completion: Completion, logprobs: Json | None, with_tokens: bool) -> Json:
    choice: Json = {"finish_reason": completion.finish_reason.value, "logprobs": logprobs, "provenance_id": completion.id}
    if completion.parse_error is not None:
        choice["parse_error"] = completion.parse_error
    if with_tokens:
        choice["token_ids"] = completion.token_ids
    return choice
