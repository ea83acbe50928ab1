"""OpenAI request messages, tools and tool_choice → one canonical form. Knows no template and no tokenizer.

Canonical messages have `role` (system, user, assistant, tool), `content` (always a string), and where they apply
`tool_calls` (with `arguments` as the JSON text that the client sent), `reasoning_content`, `tool_call_id`, `name`.
Everything that cannot be shown to a language model is refused with the field's name; nothing is dropped silently
except what carries no meaning for the model (`refusal: null`, `annotations`, `audio: null`, ids of messages).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import InvalidRequest
from ..records import JsonObject

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ToolChoice(NamedTuple):
    """`mode` required with a `name`: this tool and no other."""

    mode: Literal["auto", "none", "required"]
    name: str | None = None


def read_messages(messages: Sequence[Mapping[str, Any]], where: str = "messages") -> list[dict[str, Any]]:
    """Canonical messages, one per message of the request, in the same order. Raises `InvalidRequest`, which says `where`."""
    if not messages:
        raise InvalidRequest(f"{where} must hold at least one message, got none", param=where)
    read = [_read_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]
    names = {call["id"]: call["function"]["name"] for message in read for call in message.get("tool_calls", ())}
    for message in read:
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return read


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with a role, got {type(message).__name__}", param=where)
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, got {message.get('role')!r}", param=f"{where}.role")
    read: dict[str, Any] = {"role": role, "content": read_content(message.get("content"), f"{where}.content", role)}
    name = message.get("name")
    if isinstance(name, str) and name and role in ("user", "tool"):
        read["name"] = _text(name, f"{where}.name")
    if role == "assistant":
        _read_assistant(message, read, where)
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        read["tool_call_id"] = message["tool_call_id"]
    return read


def _read_assistant(message: Mapping[str, Any], read: dict[str, Any], where: str) -> None:
    if message.get("function_call") is not None:
        raise InvalidRequest(f"{where}.function_call is not supported, use tool_calls", param=f"{where}.function_call")
    if not read["content"] and isinstance(message.get("refusal"), str):
        read["content"] = _text(message["refusal"], f"{where}.refusal")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        read["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{where}.tool_calls must be a list, got {type(calls).__name__}", param=f"{where}.tool_calls")
    if calls:
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be a function call with a name and arguments", param=where)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = _text(function["name"], f"{where}.function.name")
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": _text(arguments, f"{where}.function.arguments")},
    }


def read_content(content: object, where: str = "content", role: str = "user") -> str:
    """A string, null, or a list of text parts (joined by a newline) → text. Other parts are refused by their type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, null or a list of text parts, got {type(content).__name__}", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        key = "refusal" if kind == "refusal" and role == "assistant" else "text"
        if isinstance(part, str):
            texts.append(_text(part, at))
            continue
        if kind not in ("text", key) or not isinstance(part, Mapping) or not isinstance(part.get(key), str):
            raise InvalidRequest(f"{at} has type {kind!r}, only text parts are supported", param=at)
        texts.append(_text(part[key], at))
    return "\n".join(texts)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where} holds a lone surrogate at character {error.start}, which is no Unicode text", param=where) from error
    return text


def read_tools(tools: Sequence[Mapping[str, Any]] | None, where: str = "tools") -> list[JsonObject]:
    """The request's function tools, validated. Raises `InvalidRequest` naming the tool."""
    read: list[JsonObject] = []
    for index, tool in enumerate(tools or ()):
        at = f"{where}[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise InvalidRequest(f'{at} must be {{"type": "function", "function": {{"name": …}}}}', param=at)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"{at}.function.name must be a string that is not empty", param=f"{at}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequest(f"{at}.function.parameters must be a JSON schema", param=f"{at}.function.parameters")
        _text(json.dumps(function, ensure_ascii=False), at)
        read.append({"type": "function", "function": dict(function)})
    return read


def read_tool_choice(choice: object, tools: Sequence[JsonObject]) -> ToolChoice:
    """`None`, auto, none, required, or a named function. Raises `InvalidRequest` for a demand that cannot be met."""
    if choice is None or choice == "auto":
        return ToolChoice("auto")
    if choice == "none":
        return ToolChoice("none")
    names = [tool["function"]["name"] for tool in tools]  # type: ignore[index, call-overload]
    if choice in ("required", "any"):
        if not names:
            raise InvalidRequest("tool_choice is required, but the request has no tools", param="tool_choice")
        return ToolChoice("required", str(names[0]) if len(names) == 1 else None)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"tool_choice must be auto, none, required or a named function, got {choice!r}", param="tool_choice")
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the request's tools", param="tool_choice")
    return ToolChoice("required", name)


def same_turn(sent: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Whether an assistant message that a client sent back is the recorded one.

    Clients trim text, drop text beside tool calls, and write arguments anew; none of that changes what was said.
    """
    try:
        ours, theirs = read_messages([recorded])[0], read_messages([sent])[0]
    except InvalidRequest:
        return False
    mine, its = ours.get("tool_calls", ()), theirs.get("tool_calls", ())
    if len(mine) != len(its) or not all(_same_call(a["function"], b["function"]) for a, b in zip(mine, its, strict=True)):
        return False
    said, echoed = ours["content"].strip(), theirs["content"].strip()
    return said == echoed or bool(mine and not echoed)


def _same_call(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one["name"] != other["name"]:
        return False
    if one["arguments"] == other["arguments"]:
        return True
    try:
        return json.loads(one["arguments"]) == json.loads(other["arguments"])
    except (ValueError, RecursionError):
        return False
