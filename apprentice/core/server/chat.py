"""The chat codec of one base model: OpenAI messages → token ids, token ids → an OpenAI message.

Nothing else in Apprentice knows how a model family writes a conversation. Decisions a user can notice:

- `tool_choice: none` hides the tools from the model, and its reply is not searched for tool calls.
- `required` and named tools begin the reply inside the call: the prompt ends with `<tool_call>\n{"name": "f", "arguments":`.
  These ids are prompt (never trained, honestly in `prompt_ids`); the message is read from them and what was sampled.
  A dialect that is not JSON gets an instruction instead, and a reply that disobeys says so in `parse_error`.
- A model whose template knows no tools learns the Hermes syntax from its system message (`families.tool_prompt`).
- `response_format` is an instruction in the system message, checked after sampling (`validate_response_format`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import InvalidRequest, ModelRefused
from ..records import JsonObject
from .chat_messages import ToolChoice, read_messages, read_tool_choice, read_tools
from .chat_template import KnownTurn, Template
from .families import syntax_named
from .reply_stream import Detokenizer, Reply, ReplyReader, ReplyStream, StopCutter

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>")
"""Special tokens that end a turn in some family. Sampling one never belongs to an answer, so all that exist stop it."""
_CACHED_TEXTS = 512


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """An assistant turn as it stood in the context: the forced beginning, if any, and the sampled ids."""

    token_ids: Sequence[int]
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and which of the known turns did not enter it as ids."""

    prompt_ids: list[int]
    turn_starts: dict[int, int]
    """Message index of a known turn → where its ids begin in `prompt_ids`."""
    thinking_stripped: frozenset[int]
    misplaced: frozenset[int]


class ChatCodec:
    """Renders and parses for one tokenizer. Safe to use from several threads. `family` overrides the detected tool syntax."""

    def __init__(self, tokenizer: Any, *, family: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer)
        if family is not None:
            syntax = syntax_named(family)
            if syntax is None:
                raise ModelRefused(f"there is no tool-call family {family!r}")
            self._template.syntax = syntax
        self._encode = lru_cache(maxsize=_CACHED_TEXTS)(_encoder(tokenizer))
        self.warnings: list[str] = list(self._template.warnings)
        self.stop_token_ids: tuple[int, ...] = self._find_stop_tokens()
        self._hidden = self._find_hidden()

    @property
    def tool_format(self) -> str:
        """How tool calls are written, e.g. `hermes`."""
        return self._template.syntax.name

    @property
    def end_of_turn_id(self) -> int:
        """The token that the template puts at the end of an assistant turn."""
        return self.stop_token_ids[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: object = None,
        *,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's ids, up to where the reply begins. Raises `InvalidRequest`."""
        return self.render_known(messages, tools, tool_choice, {}, response_format=response_format).prompt_ids

    def render_known(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        tool_choice: object,
        known: Mapping[int, SampledTurn],
        *,
        response_format: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Like `render`; the assistant messages in `known` (by index) enter as the ids given, wherever the template shows them."""
        read, shown, choice = self._read(messages, tools, tool_choice)
        facts = {i: KnownTurn(t.thinks, bool(t.token_ids) and t.token_ids[-1] == self.end_of_turn_id) for i, t in known.items()}
        note = "\n\n".join(part for part in (self._demand(choice), format_instruction(response_format)) if part)
        layout = self._template.layout(read, shown, facts, note)
        ids: list[int] = []
        starts: dict[int, int] = {}
        for part in layout.parts:
            if isinstance(part, int):
                starts[part] = len(ids)
                ids.extend(known[part].token_ids)
            else:
                ids.extend(self._encode(part))
        if prefix := self.forced_prefix(tools, tool_choice):
            ids.extend(self._encode(prefix))
        return Rendered(ids, starts, layout.stripped, layout.misplaced)

    def reply_prefix(self, tools: Sequence[Mapping[str, Any]] = (), tool_choice: object = None) -> str:
        """The part of the reply that already stands at the prompt's end: opened reasoning, a forced call, or nothing."""
        forced = self.forced_prefix(tools, tool_choice)
        return self._template.think_prefix + forced

    def forced_prefix(self, tools: Sequence[Mapping[str, Any]], tool_choice: object) -> str:
        """The beginning of the demanded tool call, appended to the prompt; empty when nothing is demanded."""
        choice = read_tool_choice(tool_choice, read_tools(tools))
        forced = self._template.syntax.forced(choice.name) if choice.mode == "required" else None
        if forced is None:
            return ""
        think = self._template.think
        return f"{think.close}\n\n{forced}" if think is not None and self._template.think_prefix else forced

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        tool_choice: object = None,
        stop_string: str | None = None,
    ) -> Reply:
        """The sampled ids of one whole reply as a message. Never fails on what a model can sample."""
        stream = self.stream(tools, tool_choice=tool_choice, stop=(stop_string,) if stop_string else ())
        stream.feed(token_ids)
        stream.finish()
        return stream.reply()

    def stream(self, tools: Sequence[Mapping[str, Any]] = (), *, tool_choice: object = None, stop: Sequence[str] = ()) -> ReplyStream:
        """A reader for one choice of one reply while it is sampled."""
        read = read_tools(tools)
        choice = read_tool_choice(tool_choice, read)
        syntax = self._template.syntax if read and choice.mode != "none" else None
        demand = choice.name or "" if choice.mode == "required" else None
        reader = ReplyReader(syntax, self._template.think, read, demand)
        return ReplyStream(Detokenizer(self._tokenizer, self._hidden), StopCutter(stop), reader, self.reply_prefix(tools, tool_choice))

    def text(self, token_ids: Sequence[int]) -> str:
        """The plain text of ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written out in it become special tokens. Nothing is added."""
        return list(self._encode(text))

    def _read(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_choice: object
    ) -> tuple[list[dict[str, Any]], list[JsonObject], ToolChoice]:
        read = read_tools(tools)
        choice = read_tool_choice(tool_choice, read)
        return read_messages(messages), [] if choice.mode == "none" else read, choice

    def _demand(self, choice: ToolChoice) -> str:
        if choice.mode != "required" or self._template.syntax.forced(choice.name) is not None:
            return ""
        return f"Answer with a call of the tool {choice.name}." if choice.name else "Answer with a tool call."

    def _find_stop_tokens(self) -> tuple[int, ...]:
        special = {token.content: index for index, token in self._tokenizer.added_tokens_decoder.items()}
        names = (self._template.end_of_turn, self._tokenizer.eos_token, *_END_TOKENS)
        return tuple(dict.fromkeys(special[name] for name in names if name in special))

    def _find_hidden(self) -> frozenset[int]:
        markers = list(self._template.syntax.markers)
        if (think := self._template.think) is not None:
            markers += [think.open, think.close]
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        kept = {i for i in special if any(self._tokenizer.added_tokens_decoder[i].content in marker for marker in markers)}
        return frozenset((special - kept) | set(self.stop_token_ids))


def _encoder(tokenizer: Any) -> Callable[[str], array[int]]:
    """Text → ids without added tokens. The Rust tokenizer is called directly: the wrapper is not safe across threads."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: array("l", tokenizer.encode(text, add_special_tokens=False))
    backend.no_truncation()
    backend.no_padding()
    return lambda text: array("l", backend.encode(text, add_special_tokens=False).ids)


def format_instruction(response_format: Mapping[str, Any] | None) -> str:
    """What the model is told about `response_format`. Raises `InvalidRequest` for an unknown type or a broken schema."""
    schema = _schema_of(response_format)
    if schema is None:
        return ""
    if not schema:
        return "Answer with one JSON object and nothing else."
    written = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return f"Answer with one JSON value and nothing else. It must match this JSON schema:\n{written}"


def _schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """None: any text; empty: any JSON object."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {}
    body = response_format.get("json_schema")
    schema = body.get("schema") if kind == "json_schema" and isinstance(body, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(
            f"response_format must be text, json_object or a json_schema with a schema, got {kind!r}", param="response_format"
        )
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise InvalidRequest(f"response_format's schema is no JSON schema: {error.message}", param="response_format") from error
    return schema


def validate_response_format(message: JsonObject, response_format: Mapping[str, Any] | None) -> str | None:
    """Why the reply breaks the format that was asked for, or None. A reply that calls tools is not held to it."""
    schema = _schema_of(response_format)
    if schema is None or message.get("tool_calls"):
        return None
    try:
        value = json.loads(str(message.get("content") or ""))
    except (ValueError, RecursionError) as error:
        return f"the reply is not JSON: {error}"
    if not schema:
        return None if isinstance(value, dict) else f"the reply is a JSON {type(value).__name__}, expected an object"
    import jsonschema

    validator = jsonschema.validators.validator_for(schema)(schema)
    error = next(iter(sorted(validator.iter_errors(value), key=lambda found: str(found.json_path))), None)
    return None if error is None else f"the reply breaks the schema at {error.json_path}: {error.message}"
