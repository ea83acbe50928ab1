"""Sampled token ids → an OpenAI message, bit by bit. The whole reply is read by the very same code as a stream.

Three steps in a row: ids to text (`Detokenizer`), the cut at a stop string (`StopCutter`), text to content, reasoning
and tool calls (`ReplyReader`). Ids are taken one by one, so how a stream was cut into chunks changes nothing.

A tool call is handed out when it is complete and valid, never before: a call that turns out broken must come back as
text, and a client that repairs half a call would run a tool that the model never called. Held back are therefore: a
call until its end, what may be the beginning of a tag or a stop string, blanks that may stand before a call, and half
a Unicode character. Nothing is lost: what does not parse is content, and `parse_error` says why.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..records import JsonObject
from .families import BadCall, Call, ThinkTags, ToolSyntax, ends_inside_string

_LONGEST_CHARACTER = 16
"""Tokens that may be waited for before an incomplete character is given up (a character has at most 4 bytes)."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply in OpenAI's form."""

    message: JsonObject
    finish: Literal["stop", "tool_calls"]
    parse_error: str | None = None


class Detokenizer:
    """Text of ids as they come. Special tokens vanish, except those in `keep`. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._decode = _decoder(tokenizer)
        self._hidden = hidden
        self._window: list[int] = []
        self._read = 0
        self._read_text = ""

    def push(self, token_id: int) -> str:
        """The text that became certain with this id."""
        if token_id in self._hidden:
            return self.flush()
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _LONGEST_CHARACTER:
            return ""
        new = text[len(self._read_text) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._read_text = self._decode(self._window)
        return new

    def flush(self) -> str:
        """What was held back."""
        new = self._decode(self._window)[len(self._read_text) :] if self._read < len(self._window) else ""
        self._window, self._read, self._read_text = [], 0, ""
        return new


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Ids → text with special tokens. The Rust tokenizer is called directly where there is one: it is ten times faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return lambda ids: backend.decode(ids, skip_special_tokens=False)


class StopCutter:
    """Ends the text before the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at, -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[0]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class ReplyReader:
    """Text → deltas. `syntax` None: tool calls are not looked for."""

    def __init__(
        self, syntax: ToolSyntax | None, think: ThinkTags | None, tools: Sequence[JsonObject] = (), demand: str | None = None
    ) -> None:
        """`demand`: the tool that must be called (empty: any tool); None: nothing is demanded."""
        self._syntax, self._think, self._tools, self._demand = syntax, think, tools, demand
        self._state: Literal["start", "think", "text", "call", "bare"] = "start"
        self._buffer = ""
        self._scanned = 0
        self._blank = ""
        self._after_think = False
        self._bare_allowed = syntax is not None and not syntax.open
        self._tool_calls: list[JsonObject] = []
        self._called: list[Call] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._errors: list[str] = []

    def push(self, text: str) -> list[JsonObject]:
        self._buffer += text
        deltas: list[JsonObject] = []
        while self._step(deltas, final=False):
            pass
        return deltas

    def flush(self) -> list[JsonObject]:
        """The end of the reply: everything held back is decided."""
        deltas: list[JsonObject] = []
        while self._step(deltas, final=True):
            pass
        if self._blank and not self._tool_calls and (self._content or not self._after_think):
            self._emit(deltas, "content", self._blank)
        self._blank = ""
        return deltas

    def reply(self) -> Reply:
        """The message so far; after `flush` the whole."""
        content = "".join(self._content)
        message: JsonObject = {"role": "assistant", "content": content if content or not self._tool_calls else None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [*self._tool_calls]
        errors = [*self._errors, *self._disobedience()]
        return Reply(message, "tool_calls" if self._tool_calls else "stop", "; ".join(errors) or None)

    def _disobedience(self) -> list[str]:
        if self._demand is None:
            return []
        if not self._tool_calls:
            return ["tool_choice demanded a tool call and the reply has none"]
        called = {name for name, _ in self._called}
        return [f"tool_choice demanded the tool {self._demand!r}"] if self._demand and called != {self._demand} else []

    def _step(self, deltas: list[JsonObject], final: bool) -> bool:
        """One transition; True if there may be another."""
        match self._state:
            case "start":
                return self._start(final)
            case "think":
                return self._read_thought(deltas, final)
            case "text":
                return self._read_text(deltas, final)
            case "call":
                return self._read_call(deltas, final)
            case "bare":
                return self._read_bare(deltas, final)

    def _start(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        think = self._think if not self._after_think else None
        if think is not None:
            if body.startswith(think.open):
                self._buffer, self._state = body[len(think.open) :].lstrip("\n"), "think"
                return True
            if not final and think.open.startswith(body):
                return False
        if self._bare_allowed:
            assert self._syntax is not None
            if body.startswith(("{", *self._syntax.ignored)):
                self._state = "bare"
                return True
            if not final and (not body or any(tag.startswith(body) for tag in self._syntax.ignored)):
                return False
        if self._after_think:
            self._buffer = body
            if not body and not final:
                return False
        self._state = "text"
        return True

    def _read_thought(self, deltas: list[JsonObject], final: bool) -> bool:
        assert self._think is not None
        at = self._buffer.find(self._think.close)
        if at >= 0:
            self._emit(deltas, "reasoning_content", self._trimmed_thought(self._buffer[:at]))
            self._buffer = self._buffer[at + len(self._think.close) :]
            self._after_think, self._state, self._blank = True, "start", ""
            return True
        keep = 0 if final else _overlap(self._buffer, self._think.close)
        ready = self._buffer[: len(self._buffer) - keep]
        solid = ready if final else ready.rstrip("\n")
        self._emit(deltas, "reasoning_content", self._trimmed_thought(solid) if final else self._thought(solid))
        self._buffer = "" if final else self._buffer[len(solid) :]
        return False

    def _thought(self, text: str) -> str:
        return text if self._reasoning else text.lstrip("\n")

    def _trimmed_thought(self, text: str) -> str:
        return self._thought(text).rstrip("\n")

    def _read_text(self, deltas: list[JsonObject], final: bool) -> bool:
        tag = self._syntax.open if self._syntax is not None else ""
        at = self._buffer.find(tag) if tag else -1
        if at >= 0:
            self._write(deltas, self._buffer[:at])
            self._buffer, self._state, self._scanned = self._buffer[at + len(tag) :], "call", 0
            return True
        keep = _overlap(self._buffer, tag) if tag and not final else 0
        self._write(deltas, self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _read_call(self, deltas: list[JsonObject], final: bool) -> bool:
        assert self._syntax is not None
        close = self._syntax.close
        at = self._buffer.find(close, max(0, self._scanned - len(close) + 1))
        while at >= 0 and self._syntax.json_body and ends_inside_string(self._buffer[:at]):
            at = self._buffer.find(close, at + 1)
        self._scanned = len(self._buffer)
        if at < 0 and not final:
            return False
        if at < 0:  # the end came first: a complete call without its closing tag still is one
            body, rest, tail = self._buffer, "", ""
        else:
            body, rest, tail = self._buffer[:at], self._buffer[at + len(close) :], close
        calls, error = self._try(body)
        if error is None:
            self._hand_out(deltas, calls)
        else:
            if not tail and (first := self._buffer.find(close)) >= 0:  # an open string swallowed the closing tag
                body, rest, tail = self._buffer[:first], self._buffer[first + len(close) :], close
            again = body.find(self._syntax.open)
            if again >= 0:  # the next call began before this one was closed
                body, rest, tail = body[:again], body[again:] + tail + rest, ""
            self._fail(deltas, self._syntax.open + body + tail, error if tail or rest else f"{error} (the reply ends inside the call)")
        self._buffer, self._state = rest, "text"
        return True

    def _read_bare(self, deltas: list[JsonObject], final: bool) -> bool:
        if not final:
            return False
        calls, error = self._try(self._buffer)
        if error is None:
            self._hand_out(deltas, calls)
        elif '"name"' in self._buffer:
            self._fail(deltas, self._buffer, error)
        else:
            self._write(deltas, self._buffer)
        self._buffer = ""
        return False

    def _try(self, body: str) -> tuple[list[Call], str | None]:
        assert self._syntax is not None
        try:
            return self._syntax.read(body, self._tools), None
        except BadCall as error:
            return [], str(error)

    def _hand_out(self, deltas: list[JsonObject], calls: Iterable[Call]) -> None:
        self._blank = ""
        for call in calls:
            index, call_id = len(self._tool_calls), f"call_{uuid.uuid4().hex[:24]}"
            named: JsonObject = {"name": call.name, "arguments": ""}
            deltas.append({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": named}]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
            function: JsonObject = {"name": call.name, "arguments": call.arguments}
            self._called.append(call)
            self._tool_calls.append({"id": call_id, "type": "function", "function": function})

    def _fail(self, deltas: list[JsonObject], text: str, error: str) -> None:
        self._errors.append(f"tool call {len(self._tool_calls) + len(self._errors) + 1} does not parse: {error}")
        self._write(deltas, text)

    def _write(self, deltas: list[JsonObject], text: str) -> None:
        """Content; blanks at its end wait, because they are dropped before a call."""
        text = self._blank + text
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        if not self._content and (self._tool_calls or self._after_think):
            solid = solid.lstrip()
        self._emit(deltas, "content", solid)

    def _emit(self, deltas: list[JsonObject], key: Literal["content", "reasoning_content"], text: str) -> None:
        if text:
            (self._content if key == "content" else self._reasoning).append(text)
            deltas.append({key: text})


class ReplyStream:
    """One choice of one reply while it is sampled. Concatenated deltas equal `reply()` after `finish()`.

    Deltas have OpenAI's chunk form without the role (the first chunk's business): `{"content": …}`,
    `{"reasoning_content": …}` or `{"tool_calls": [{index, id, type, function}]}`: first the name with empty arguments, then the arguments.
    """

    def __init__(self, detokenizer: Detokenizer, cutter: StopCutter, reader: ReplyReader, prefix: str = "") -> None:
        self._detokenizer, self._cutter, self._reader = detokenizer, cutter, reader
        self._waiting: list[JsonObject] = reader.push(prefix) if prefix else []

    def feed(self, token_ids: Iterable[int]) -> list[JsonObject]:
        """The deltas that these ids make certain."""
        deltas, self._waiting = self._waiting, []
        text = "".join(self._cutter.push(self._detokenizer.push(token_id)) for token_id in token_ids)
        if text:
            deltas.extend(self._reader.push(text))
        return deltas

    def finish(self) -> list[JsonObject]:
        """The rest. Call once, at the end."""
        deltas = self.feed(())
        text = self._cutter.push(self._detokenizer.flush()) + self._cutter.flush()
        if text:
            deltas.extend(self._reader.push(text))
        deltas.extend(self._reader.flush())
        return deltas

    def reply(self) -> Reply:
        return self._reader.reply()
