"""What a `/v1` request may say. Everything else is refused by name; nothing is silently ignored.

Three kinds of OpenAI parameters are accepted: those that work; those of `IGNORED`, which cannot change the output; and
unsupported ones at the value that means "off" (`frequency_penalty: 0`, `logit_bias: {}`, `modalities: ["text"]`, null).
Knows the form of requests only: no tokens, no models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator, with_config
from typing_extensions import TypedDict

from ..errors import InvalidRequest
from ..records import ChatRequest, JsonObject, SamplingParams

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Accepted without effect: they concern OpenAI's accounting and storage, never the text."""

MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
_STRICT = ConfigDict(extra="forbid", strict=True)

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]


@with_config(_STRICT)
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


@with_config(_STRICT)
class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


@with_config(_STRICT)
class CalledFunction(TypedDict):
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    parsed_arguments: NotRequired[JsonValue]
    """Added by OpenAI's Python client to what it received; dropped."""


@with_config(_STRICT)
class ToolCall(TypedDict):
    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction
    index: NotRequired[int]


@with_config(_STRICT)
class SystemMessage(TypedDict):
    role: Literal["system", "developer"]
    content: str | list[TextPart]
    name: NotRequired[str | None]


@with_config(_STRICT)
class UserMessage(TypedDict):
    role: Literal["user"]
    content: str | list[TextPart]
    name: NotRequired[str | None]


@with_config(_STRICT)
class AssistantMessage(TypedDict):
    """As a reply says it: `message.model_dump()` of any OpenAI client can be sent back as it is."""

    role: Literal["assistant"]
    content: NotRequired[str | list[TextPart | RefusalPart] | None]
    reasoning_content: NotRequired[str | None]
    name: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]
    refusal: NotRequired[str | None]
    annotations: NotRequired[list[JsonValue] | None]
    audio: NotRequired[None]
    function_call: NotRequired[None]
    parsed: NotRequired[JsonValue]


@with_config(_STRICT)
class ToolMessage(TypedDict):
    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: Annotated[str, Field(min_length=1)]
    name: NotRequired[str | None]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


@with_config(_STRICT)
class FunctionTool(TypedDict):
    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, JsonValue] | None]
    strict: NotRequired[bool | None]


@with_config(_STRICT)
class Tool(TypedDict):
    type: Literal["function"]
    function: FunctionTool


@with_config(_STRICT)
class NamedFunction(TypedDict):
    name: str


@with_config(_STRICT)
class NamedToolChoice(TypedDict):
    type: Literal["function"]
    function: NamedFunction


@with_config(_STRICT)
class JsonSchemaFormat(TypedDict):
    name: NotRequired[str]
    description: NotRequired[str | None]
    schema: dict[str, JsonValue]
    strict: NotRequired[bool | None]


@with_config(_STRICT)
class PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


@with_config(_STRICT)
class SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class StreamOptions(BaseModel):
    model_config = _STRICT
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingBody(BaseModel):
    """What `/v1/chat/completions` and `/v1/completions` have in common."""

    model_config = _STRICT

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    """`project/name` (newest version), `project/name@step` (that version) or the base model's own name."""
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    """Choice i of `n` is drawn with seed + i."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    """Unset: the rest of the context, at most the server's default."""
    return_token_ids: bool | None = None
    """Adds `prompt_token_ids` and `choices[].token_ids` to the reply."""

    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = Field(None, description="Unsupported: only 0.")
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = Field(None, description="Unsupported: only 0.")
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = Field(None, description="Unsupported: only {}.")
    user: JsonValue = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream: true`", param="stream_options")
        return self

    def sampling(self, max_tokens: int, top_logprobs: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=max_tokens,
            seed=self.seed,
            stop=stop,
            top_logprobs=top_logprobs,
        )

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    """`required` and a named tool are asked of the model and checked afterwards (`choices[].parse_error`); sampling is not constrained."""
    parallel_tool_calls: bool | None = None
    """False is checked after sampling: more than one call is reported in `choices[].parse_error`."""
    response_format: PlainFormat | SchemaFormat | None = None
    """Checked after sampling: a reply that does not fit is reported in `choices[].parse_error`."""
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    """Of every sampled token, at temperature 1."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    modalities: list[Literal["text"]] | None = Field(None, description='Unsupported: only ["text"].')
    metadata: JsonValue = Field(None, description="Ignored.")
    store: JsonValue = Field(None, description="Ignored.")
    service_tier: JsonValue = Field(None, description="Ignored.")
    safety_identifier: JsonValue = Field(None, description="Ignored.")
    prompt_cache_key: JsonValue = Field(None, description="Ignored.")
    prompt_cache_retention: JsonValue = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise InvalidRequest(
                f"`max_tokens` and `max_completion_tokens` mean the same, but {self.max_tokens} and {self.max_completion_tokens} came",
                param="max_completion_tokens",
            )
        _check_tools([tool["function"]["name"] for tool in self.tools or ()], self.tool_choice)
        if not self.tools and self.parallel_tool_calls is not None:
            raise InvalidRequest("`parallel_tool_calls` needs `tools`", param="parallel_tool_calls")
        return self

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def request(self) -> ChatRequest:
        """What the model is shown: messages without the empty fields that clients echo."""
        response_format: Any = self.response_format
        return ChatRequest.model_construct(
            messages=tuple(map(_shown_to_the_model, self.messages)),
            tools=tuple(map(_tool_shown, self.tools or ())),
            tool_choice=self.tool_choice,  # pyright: ignore[reportArgumentType]
            response_format=None if response_format is None or response_format["type"] == "text" else response_format,
        )


class CompletionBody(SamplingBody):
    """`POST /v1/completions`: a prompt as text or, exactly, as token ids. One prompt per request."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """The number of alternatives per token."""

    echo: Literal[False] | None = Field(None, description="Unsupported: only false.")
    suffix: Literal[""] | None = Field(None, description='Unsupported: only "".')
    best_of: Literal[1] | None = Field(None, description="Unsupported: only 1.")


def _check_tools(names: list[str], choice: object) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools[{index}].function.name"
            raise InvalidRequest(f"`{where}` repeats {name!r}; names must differ", param=where)
    if isinstance(choice, dict):
        wanted: str = choice["function"]["name"]
        if wanted not in names:
            raise InvalidRequest(f"`tool_choice` names {wanted!r}, which is not among the tools {names}", param="tool_choice")
    elif choice in ("auto", "required") and not names:
        raise InvalidRequest(f"`tool_choice` is {choice!r}, which needs `tools`", param="tool_choice")


_ECHOED = frozenset({"annotations", "audio", "function_call", "parsed"})
"""Fields that clients add to a reply, or that are always empty here; they say nothing to the model."""


def _shown_to_the_model(message: Any) -> JsonObject:
    kept = {key: value for key, value in message.items() if value is not None and key not in _ECHOED}
    if message["role"] == "assistant":
        kept.setdefault("content", None)
        calls = kept.pop("tool_calls", None)
        if calls:
            kept["tool_calls"] = [_call_shown(call) for call in calls]
    return kept


def _call_shown(call: Any) -> JsonObject:
    function = call["function"]
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": function["arguments"]}}


def _tool_shown(tool: Any) -> JsonObject:
    return {**tool, "function": {key: value for key, value in tool["function"].items() if value is not None}}
