"""How each model family writes a tool call and its reasoning, and how to read one block of it back.

A `ToolSyntax` knows the tags around a call and reads what is between them; it knows neither tokens nor templates nor
streams. Calls in JSON are read here, so that the arguments stay the model's own text. The dialects that are not JSON
(Qwen 3.5, GLM 4, Nemotron 3, Gemma 4, LFM 2.5) are read by transformers' response parser with TRL's response templates.
Which syntax a model speaks is found by trying: `detect` takes the one that reads back what the model's template renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..records import JsonObject

_DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse_constant(name))
_SPACE = " \t\n\r"


class Call(NamedTuple):
    """One tool call as written: `arguments` is JSON text of an object."""

    name: str
    arguments: str


class BadCall(ValueError):
    """A block that looks like a tool call and is none; `str(error)` says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """The tags and the reader of one dialect. With an empty `open` the whole reply is a call or it is none."""

    name: str
    open: str
    close: str
    read: Callable[[str, Sequence[JsonObject]], list[Call]]
    """(text between the tags, tools) → at least one call; `BadCall` otherwise."""
    json_body: bool = False
    """True: a closing tag inside a JSON string does not close the call."""
    arguments_key: str = "arguments"
    ignored: tuple[str, ...] = ()
    """Special tokens of the dialect that carry nothing, e.g. `<|python_tag|>`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must survive decoding even when they are special tokens."""
        return tuple(tag for tag in (self.open, self.close, *self.ignored) if tag)

    def forced(self, name: str | None) -> str | None:
        """The beginning of a call to `name` (or to any tool), to be put at the prompt's end; None if not JSON."""
        if not self.json_body:
            return None
        opening = f"{self.open}\n" if self.open else ""
        if name is None:
            return opening + '{"name": "'
        return f'{opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments_key}":'

    def write(self, call: Call) -> str:
        """A call in a JSON dialect, the way its models write it."""
        close = f"\n{self.close}" if self.close else ""
        return f"{self.forced(call.name)} {call.arguments}}}{close}"


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags around a family's reasoning."""

    open: str
    close: str


def _refuse_constant(name: str) -> Any:
    raise BadCall(f"{name} is not JSON")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except BadCall:
        raise
    except json.JSONDecodeError as error:
        raise BadCall(f"{error.msg} at character {error.pos} of the call") from error
    except (RecursionError, ValueError) as error:
        raise BadCall("its JSON is nested too deeply or holds a number that is too long") from error


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Members of the JSON object at `at`: key → (value, its text as written); and the position after the object."""
    if at >= len(text) or text[at] != "{":
        raise BadCall("expected a JSON object")
    members: dict[str, tuple[Any, str]] = {}
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        key, at = _value(text, at)
        at = _skip_space(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise BadCall(f"expected a quoted key and a colon at character {at} of the call")
        start = _skip_space(text, at + 1)
        value, at = _value(text, start)
        members[key] = (value, text[start:at])
        at = _skip_space(text, at)
        mark = text[at : at + 1]
        if mark == "}":
            return members, at + 1
        if mark != ",":
            raise BadCall(f"expected a comma or a closing brace at character {at} of the call")
        at = _skip_space(text, at + 1)


def _is_text(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _json_call(text: str, at: int) -> tuple[Call, int]:
    members, end = _members(text, at)
    if isinstance(members.get("function", ("",))[0], dict):
        members, _ = _members(members["function"][1], 0)
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name or not _is_text(name):
        raise BadCall('the call has no "name"')
    value, written = members.get("arguments") or members.get("parameters") or ({}, "{}")
    if value is None:
        value, written = {}, "{}"
    if isinstance(value, str):  # arguments encoded twice
        inner, after = _value(value.strip(), 0)
        if not isinstance(inner, dict) or after != len(value.strip()):
            raise BadCall("the arguments are a string that holds no JSON object")
        value, written = inner, value.strip()
    if not isinstance(value, dict):
        raise BadCall(f"the arguments are a {type(value).__name__}, expected a JSON object")
    if not _is_text(written):
        raise BadCall("the arguments are not valid Unicode")
    return Call(name, written), end


def read_json_calls(text: str, tools: Sequence[JsonObject] = ()) -> list[Call]:
    """One or several JSON calls, one after the other (or as one JSON list), separated by blanks, commas or semicolons."""
    del tools
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    calls: list[Call] = []
    at = _skip_space(text, 0)
    while at < len(text):
        call, at = _json_call(text, at)
        calls.append(call)
        while at < len(text) and text[at] in _SPACE + ",;":
            at += 1
    if not calls:
        raise BadCall("the call is empty")
    return calls


def ends_inside_string(text: str) -> bool:
    """Whether `text` stops inside a JSON string."""
    inside = False
    for match in re.finditer(r'\\.|"', text, flags=re.DOTALL):
        if match.group() == '"':
            inside = not inside
    return inside


def _read_bare(text: str, tools: Sequence[JsonObject]) -> list[Call]:
    return read_json_calls(text.replace("<|python_tag|>", ""), tools)


def _template_reader(template: dict[str, Any], opening: str, closing: str) -> Callable[[str, Sequence[JsonObject]], list[Call]]:
    """A reader of blocks by transformers' response parser; its values are typed by the tools' JSON schemas."""

    def read(text: str, tools: Sequence[JsonObject]) -> list[Call]:
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(f"{opening}{text}{closing}", template, prefix="", tools=list(tools))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BadCall(str(error).splitlines()[0]) from error
        calls: list[Call] = []
        for found in message.get("tool_calls") or []:
            function = found.get("function") or {}
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str) or not name or not isinstance(arguments or {}, dict):
                raise BadCall("the call has no name, or arguments that are no object")
            calls.append(Call(name, json.dumps(arguments or {}, ensure_ascii=False)))
        if not calls or (message.get("content") or "").strip():
            raise BadCall("the block between the tags is not a tool call of this family")
        return calls

    return read


HERMES = ToolSyntax("hermes", "<tool_call>", "</tool_call>", read_json_calls, json_body=True)
"""`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5, Qwen 3, and every model without a syntax of its own."""

LLAMA3 = ToolSyntax("llama3_json", "", "", _read_bare, json_body=True, arguments_key="parameters", ignored=("<|python_tag|>",))
"""The whole reply is `{"name": …, "parameters": …}`: Llama 3.1, 3.2."""

_THINK = ThinkTags("<think>", "</think>")
_GEMMA_THINK = ThinkTags("<|channel>thought\n", "<channel|>")


def syntaxes() -> list[ToolSyntax]:
    """All syntaxes, in the order in which they are tried. Imports TRL."""
    from trl import chat_template_utils as trl

    def by_template(name: str, opening: str, closing: str, template: dict[str, Any]) -> ToolSyntax:
        return ToolSyntax(name, opening, closing, _template_reader(template, opening, closing))

    return [
        HERMES,
        LLAMA3,
        by_template("qwen3_5_xml", "<tool_call>", "</tool_call>", trl.qwen3_5_template),
        by_template("glm4_moe", "<tool_call>", "</tool_call>", trl.glm4moe_template),
        by_template("gemma4", "<|tool_call>", "<tool_call|>", trl.gemma4_template),
        by_template("lfm2_5", "<|tool_call_start|>", "<|tool_call_end|>", trl.lfm2_2_5_template),
    ]


def syntax_named(name: str) -> ToolSyntax | None:
    return next((syntax for syntax in syntaxes() if syntax.name == name), None)


def detect(rendered_call: str, name: str, arguments: JsonObject, tools: Sequence[JsonObject]) -> ToolSyntax | None:
    """The syntax that reads `rendered_call` (an assistant turn as the template writes it) back as this call, or None."""
    for syntax in syntaxes():
        body = rendered_call
        if syntax.open:
            before, opened, rest = rendered_call.partition(syntax.open)
            body, closed, _ = rest.partition(syntax.close)
            if not opened or not closed:
                continue
            del before
        try:
            calls = syntax.read(body, tools)
        except BadCall:
            continue
        if [(call.name, json.loads(call.arguments)) for call in calls] == [(name, arguments)]:
            return syntax
    return None


def think_tags(template: str) -> ThinkTags | None:
    """The reasoning tags that a chat template mentions, or None for a family that does not think aloud."""
    if "<channel|>" in template and "<|channel>" in template:
        return _GEMMA_THINK
    return _THINK if _THINK.close in template else None


def tool_prompt(tools: Sequence[JsonObject]) -> str:
    """The system prompt that teaches the Hermes syntax to a model whose template knows no tools. Kept short: it is paid per call."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False, separators=(",", ":")) for tool in tools)
    return (
        f"You can use these tools:\n<tools>\n{listed}\n</tools>\n"
        'To use one, answer with\n<tool_call>\n{"name": "the tool", "arguments": {"its": "arguments"}}\n</tool_call>'
    )


def tool_response(content: str) -> str:
    """A tool's result for a model whose template knows no tools (it goes into a user message)."""
    return f"<tool_response>\n{content}\n</tool_response>"
