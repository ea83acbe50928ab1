"""One tokenizer's chat template: what it can do, found by trying, and canonical messages → text.

Every capability is probed once by rendering (system role, tools, several calls, roles that repeat …), so that no list
of model names is needed. What a template cannot take is rewritten before it is rendered: see `_adapt`.
A turn whose ids are known enters as marks; `Template.layout` finds where the template put it. Knows no parsing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ..errors import InvalidRequest, ModelRefused
from ..records import JsonObject
from .families import HERMES, Call, ThinkTags, ToolSyntax, detect, think_tags, tool_prompt, tool_response

_PROBE_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_PROBE_ARGUMENTS: JsonObject = {"city": "Paris", "days": 3}
_USER = {"role": "user", "content": "Hello"}
_FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What a template raises on messages that it cannot take: its own refusal, or an accident in its expressions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rendered text, cut at the turns whose ids are known."""

    parts: tuple[str | int, ...]
    """Text, or the index of a known turn (in the request's messages)."""
    stripped: frozenset[int]
    """Known turns whose reasoning the template leaves out; they are text in `parts`."""
    misplaced: frozenset[int]
    """Known turns that the template does not show as a turn of its own; they are text in `parts`."""


class Template:
    """The chat template of `tokenizer`. Raises `ModelRefused` if there is none or it cannot render a plain conversation."""

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        if not template:
            raise ModelRefused("the model has no chat template; use an instruction-tuned model, whose tokenizer has one")
        self._tokenizer = tokenizer
        self._source: str = template
        self._today = time.strftime("%d %b %Y")
        self.think: ThinkTags | None = think_tags(template)
        self.warnings: list[str] = []
        self.knows_tools = self.carries_text = self.carries_calls = False
        self._probe_roles()
        self._probe_turn()
        self.syntax: ToolSyntax = self._probe_tools()
        self._probe_carrying()

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject] = (), *, generation: bool = True, note: str = ""
    ) -> str:
        """Canonical messages → the prompt's text. `note` is added to the system message. Raises `InvalidRequest`."""
        return self._render(self._adapt(messages, tools, note), tools if self.knows_tools else (), generation)

    def turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject] = ()) -> str:
        """The last message, an assistant's, as the model would write it after the prompt, without the end-of-turn token.

        Raises `InvalidRequest` where the template does not show it after the prompt that leads to it.
        """
        prompt = self.text(messages[:-1], tools)
        whole = self.text(messages, tools, generation=False)
        before = prompt.removesuffix(self.think_prefix)
        if whole.startswith(prompt):
            written = whole[len(prompt) :]
        elif whole.startswith(before) and self.think is not None:  # the prompt opens reasoning that the history does not show
            body = whole[len(before) :]
            thought = str(messages[-1].get("reasoning_content") or "")
            if body.startswith(self.think.open):
                written = body.removeprefix(self.think.open).lstrip("\n")
            elif self.think.close in self.think_prefix:
                written = body
            else:
                written = f"{thought}\n{self.think.close}\n\n{body}"
        else:
            raise InvalidRequest("this model's chat template does not show the assistant message where the prompt ends", param="messages")
        at = written.rfind(self.end_of_turn)
        return written[:at] if at >= 0 else written

    def layout(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject], known: Mapping[int, bool], note: str = ""
    ) -> Layout:
        """Like `text`, with the known turns (message index → whether its ids hold reasoning) cut out, end-of-turn token included.

        A turn whose reasoning the template strips, or that it does not show as a turn of its own, is rendered as text.
        """
        stripped: set[int] = set()
        misplaced = {index for index in known if not self._can_carry(messages, index)}
        while True:
            marks = {index: _Marks.fresh() for index in known if index not in stripped | misplaced}
            text = self.text([self._marked(message, marks.get(index)) for index, message in enumerate(messages)], tools, note=note)
            lost = {index for index in marks if known[index] and marks[index].thought not in text}
            stripped |= lost
            parts, hidden = self._cut(text, {index: mark for index, mark in marks.items() if index not in lost})
            misplaced |= hidden
            if not lost and not hidden:
                return Layout(tuple(parts), frozenset(stripped), frozenset(misplaced))

    def _can_carry(self, messages: Sequence[Mapping[str, Any]], index: int) -> bool:
        near = [messages[at]["role"] for at in (index - 1, index + 1) if 0 <= at < len(messages)]
        merged = not self.repeated_roles and "assistant" in near
        return not merged and (self.carries_calls if messages[index].get("tool_calls") else self.carries_text)

    def _cut(self, text: str, marks: Mapping[int, _Marks]) -> tuple[list[str | int], set[int]]:
        parts: list[str | int] = []
        hidden: set[int] = set()
        cursor = 0
        for index in sorted(marks):
            found = [(at, at + len(mark)) for mark in marks[index].all() if (at := text.find(mark, cursor)) >= 0]
            first, last = (min(found)[0], max(end for _, end in found)) if found else (-1, -1)
            header = text.rfind(self.header, cursor, first) if found else -1
            end = text.find(self.end_of_turn, last) if found else -1
            start = header + len(self.header)
            if header < 0 or end < 0 or self.end_of_turn in text[start:first]:
                hidden.add(index)
                continue
            parts += [text[cursor:start], index]
            cursor = end + len(self.end_of_turn)
        parts.append(text[cursor:])
        return parts, hidden

    def _marked(self, message: Mapping[str, Any], marks: _Marks | None) -> dict[str, Any]:
        if marks is None:
            return dict(message)
        marked: dict[str, Any] = {"role": "assistant", "content": marks.content, "reasoning_content": marks.thought}
        if message.get("tool_calls") and self.knows_tools:
            first = message["tool_calls"][0]
            marked["tool_calls"] = [{**first, "function": {"name": marks.call, "arguments": "{}"}}]
        return marked

    def _adapt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject], note: str) -> list[dict[str, Any]]:
        """Canonical messages → messages that this template takes."""
        taught = [tool_prompt(tools)] if tools and not self.knows_tools else []
        adapted = [self._adapt_message(message) for message in messages]
        adapted = [part for message in adapted for part in self._split_calls(message)]
        system = [message["content"] for message in _leading_system(adapted)]
        rest = adapted[len(system) :]
        head = "\n\n".join(text for text in (*system, *taught, *([note] if note else [])) if text)
        if not self.system_anywhere:
            rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
        if head and self.system_role:
            rest = [{"role": "system", "content": head}, *rest]
        elif head:
            at = next((index for index, m in enumerate(rest) if m["role"] == "user"), None)
            if at is None:
                rest = [{"role": "user", "content": head}, *rest]
            else:
                rest[at] = {**rest[at], "content": f"{head}\n\n{rest[at]['content']}"}
        return _merged(rest, merge_all=not self.repeated_roles)

    def _adapt_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message["content"]
        calls = message.get("tool_calls")
        if not self.knows_tools:
            if role == "tool":
                return {"role": "user", "content": tool_response(content), "result": True}
            if calls:
                written = "\n".join(HERMES.write(Call(c["function"]["name"], c["function"]["arguments"])) for c in calls)
                return {"role": "assistant", "content": f"{content}\n{written}" if content else written}
            return {"role": role, "content": content, **_reasoning(message)}
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            kept["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}} for call in calls
            ]
        return kept

    def _arguments(self, text: str) -> Any:
        if self.arguments_as_text:
            return text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"arguments": text}

    def _split_calls(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """One message per call where the template takes only one call in a message."""
        calls = message.get("tool_calls") or []
        if len(calls) < 2 or self.parallel_calls:
            return [message]
        return [{**message, "content": message["content"] if i == 0 else "", "tool_calls": [call]} for i, call in enumerate(calls)]

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject], generation: bool) -> str:
        try:
            return self._raw(messages, tools, generation)
        except _FAILURES as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidRequest(f"this model's chat template cannot render these messages: {reason}", param="messages") from error

    def _raw(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject] = (), generation: bool = False) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            chat_template=self._source,
            add_generation_prompt=generation,
            tokenize=False,
            date_string=self._today,
        )
        if not isinstance(rendered, str):
            raise TypeError(f"the template rendered {type(rendered).__name__}, expected text")
        return rendered

    def _takes(self, *messages: Mapping[str, Any], shows: Sequence[str] = (), tools: Sequence[JsonObject] = ()) -> bool:
        try:
            text = self._raw(messages, tools)
        except _FAILURES:
            return False
        return all(part in text for part in shows)

    def _probe_roles(self) -> None:
        answer, again = {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Again"}
        system = {"role": "system", "content": "system_sentinel"}
        self.system_role = self._takes(system, _USER, shows=["system_sentinel"])
        self.system_anywhere = self.system_role and self._takes(_USER, answer, system, _USER, shows=["system_sentinel"])
        self.repeated_roles = self._takes(_USER, again) and self._takes(_USER, answer, answer, again)

    def _probe_turn(self) -> None:
        """`header` opens an assistant turn, `think_prefix` is reasoning that the prompt opens itself, `end_of_turn` ends it."""
        try:
            plain, prompt = self._raw([_USER]), self._raw([_USER], generation=True)
            dialogue = self._raw([_USER, {"role": "assistant", "content": "answer_sentinel"}, {"role": "user", "content": "next_sentinel"}])
        except _FAILURES as error:
            raise ModelRefused(f"the model's chat template cannot render a plain conversation: {error}") from error
        if not prompt.startswith(plain):  # some templates end a finished conversation with the end-of-text token
            plain = plain.removesuffix(self._tokenizer.eos_token or "")
        if not prompt.startswith(plain) or "answer_sentinel" not in dialogue:
            raise ModelRefused("the model's chat template does not open an assistant turn after a user's message")
        generation = prompt[len(plain) :]
        at = generation.find(self.think.open) if self.think is not None else -1
        self.header, self.think_prefix = (generation, "") if at < 0 else (generation[:at], generation[at:])
        after = dialogue[dialogue.index("answer_sentinel") + len("answer_sentinel") :].split("next_sentinel")[0]
        self.end_of_turn = self._first_special(after) or self._tokenizer.eos_token or ""
        if not self.end_of_turn:
            raise ModelRefused("the model's chat template ends an assistant turn with no special token, and there is no end-of-text token")

    def _first_special(self, text: str) -> str | None:
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        found = [(at, -len(token), token) for token in added if (at := text.find(token)) >= 0]
        return min(found)[2] if found else None

    def _probe_tools(self) -> ToolSyntax:
        self.knows_tools, self.parallel_calls, self.arguments_as_text = False, True, False
        for as_text in (False, True):
            syntax = self._try_tools(as_text)
            if syntax is not None:
                self.knows_tools, self.arguments_as_text = True, as_text
                calls = [_probe_call("probe_one", as_text), _probe_call("probe_two", as_text)]
                turn = {"role": "assistant", "content": "", "tool_calls": calls}
                self.parallel_calls = self._takes(_USER, turn, *_results(calls), shows=["probe_one", "probe_two"])
                return syntax
        if "tool_calls" in self._source:
            self.warnings.append(
                "the chat template writes tool calls in a syntax that cannot be read back; tools are taught by a Hermes-style prompt"
            )
        return HERMES

    def _probe_carrying(self) -> None:
        """Whether turns can be cut out of the rendered text without losing what is between them, as text and as tool calls."""
        answer, following = {"role": "assistant", "content": "answer"}, {"role": "user", "content": "next_sentinel"}
        call = _probe_call("probe_tool", as_text=True)
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        self.carries_text = self.carries_calls = True
        carries_text = self._carries([_USER, answer, following, answer, following], ["next_sentinel"] * 2)
        dialogue = [_USER, calling, *_results([call]), calling, *_results([call]), answer, following]
        self.carries_calls = self._carries(dialogue, ["result_sentinel", "result_sentinel", "next_sentinel"])
        self.carries_text = carries_text
        if not self.carries_text or not self.carries_calls:
            kind = "tool-calling turns" if self.carries_text else "earlier turns"
            self.warnings.append(f"the chat template does not let {kind} stand as sampled; they are rendered anew, and rows branch")

    def _carries(self, messages: Sequence[Mapping[str, Any]], between: Sequence[str]) -> bool:
        known = {index: False for index, message in enumerate(messages) if message["role"] == "assistant"}
        try:
            layout = self.layout(messages, [_PROBE_TOOL], known)
        except InvalidRequest:
            return False
        texts = [part for part in layout.parts if isinstance(part, str)][1:]
        return len(texts) == len(between) and all(wanted in text for wanted, text in zip(between, texts, strict=True))

    def _try_tools(self, as_text: bool) -> ToolSyntax | None:
        call = _probe_call("probe_tool", as_text)
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        if not self._takes(_USER, turn, *_results([call]), shows=["probe_tool", "Paris", "result_sentinel"]):
            return None
        if not self._takes(_USER, tools=[_PROBE_TOOL], shows=["probe_tool"]):
            return None
        try:
            prompt, whole = self._raw([_USER], generation=True), self._raw([_USER, turn])
        except _FAILURES:
            return None
        shared = prompt[: len(prompt) - len(self.think_prefix)]
        if not whole.startswith(shared):
            return None
        body = whole[len(shared) :].partition(self.end_of_turn)[0]
        if self.think is not None and self.think.close in body:
            body = body.partition(self.think.close)[2]
        return detect(body, "probe_tool", _PROBE_ARGUMENTS, [_PROBE_TOOL])


@dataclass(frozen=True, slots=True)
class _Marks:
    """Texts that stand for a known turn: they occur nowhere else."""

    thought: str
    content: str
    call: str

    @classmethod
    def fresh(cls) -> _Marks:
        key = secrets.token_hex(8)
        return cls(f"thought{key}", f"content{key}", f"call{key}")

    def all(self) -> tuple[str, str, str]:
        return self.thought, self.content, self.call


def _probe_call(name: str, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(_PROBE_ARGUMENTS) if as_text else dict(_PROBE_ARGUMENTS)
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _results(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "result_sentinel"} for call in calls]


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"reasoning_content": message["reasoning_content"]} if message.get("reasoning_content") else {}


def _leading_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    end = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return list(messages[:end])


def _merged(messages: Sequence[dict[str, Any]], *, merge_all: bool) -> list[dict[str, Any]]:
    """Neighbouring tool results taught as user messages become one; all repeated roles do where the template wants it so."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        result = message.get("result", False)
        message = {key: value for key, value in message.items() if key != "result"}
        before = merged[-1] if merged else None
        results = result and before is not None and before.get("content", "").endswith("</tool_response>") and before["role"] == "user"
        same = merge_all and before is not None and before["role"] == message["role"] and "tool_calls" not in {**before, **message}
        if before is not None and (results or (same and message["role"] != "tool")):
            gap = "\n" if results else "\n\n"
            merged[-1] = {**before, "content": f"{before['content']}{gap}{message['content']}"}
        else:
            merged.append(message)
    return merged
