"""The chat codec of one base model: OpenAI messages → token ids, token ids → an OpenAI message.

Nothing else in Apprentice knows how a model family writes a conversation. Decisions a user can notice:

- `tool_choice: none` hides the tools from the model, and its reply is not searched for tool calls.
- `required` and named tools begin the reply inside the call: the prompt ends with `<tool_call>\n{"name": "f", "arguments":`.
  These ids are prompt (never trained, honestly in `prompt_ids`); the message is read from them and what was sampled.
  A dialect that is not JSON gets an instruction instead, and a reply that disobeys says so in `parse_error`.
- A model whose template knows no tools learns the Hermes syntax from its system message (`families.tool_prompt`).
- `response_format` becomes a short instruction in the system message; the reply is checked after sampling, not constrained.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest, ModelRefused
from ..records import Completion, JsonObject
from .chat_messages import ToolChoice, read_messages, read_tool_choice, read_tools, same_turn
from .chat_template import Template
from .families import syntax_named
from .reply_stream import Detokenizer, Reply, ReplyReader, ReplyStream, StopCutter
from .text_ids import Context, TextIds, contexts

_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|observation|>",
)
"""Special tokens that end a turn in some family. Sampling one never belongs to an answer, so all that exist stop it."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """An assistant turn as it stood in a context: the forced beginning of the reply and what was sampled."""

    token_ids: Sequence[int]
    thinks: bool = False
    context: Context | None = None
    """What stood before the turn; decides between turns that read alike. None: not known."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and which of the known turns did not enter it as ids."""

    prompt_ids: list[int]
    turns: dict[int, tuple[int, int]]
    """Message index of a known turn → (where its ids begin in `prompt_ids`, which of its candidates was taken)."""
    thinking_stripped: frozenset[int] = frozenset()
    misplaced: frozenset[int] = frozenset()


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
        self._encode = TextIds(tokenizer)
        self.warnings: list[str] = list(self._template.warnings)
        self.stop_token_ids: tuple[int, ...] = self._find_stop_tokens()
        self._hidden = self._find_hidden()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer (untyped upstream) that it works with."""
        return self._tokenizer

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
        known: Mapping[int, Sequence[SampledTurn]],
        *,
        response_format: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Like `render`; an assistant message in `known` (by index) enters as ids, wherever the template shows the turn as it was.

        Of several candidates for one message the one sampled in exactly this context is taken, else the first.
        """
        read, shown, choice = self._read(messages, tools, tool_choice)
        note = "\n\n".join(part for part in (self._demand(choice), format_instruction(response_format)) if part)
        layout = self._template.layout(read, shown, {index: turns[0].thinks for index, turns in known.items()}, note)
        ids: list[int] = []
        placed: dict[int, tuple[int, int]] = {}
        end_of_turn = ""
        for part in layout.parts:
            if isinstance(part, str):
                ids.extend(self._encode_part(end_of_turn + part))
                continue
            taken = _fitting(known[part], ids)
            turn = known[part][taken].token_ids
            placed[part] = (len(ids), taken)
            ids.extend(turn)
            end_of_turn = "" if turn and turn[-1] == self.end_of_turn_id else self._template.end_of_turn
        ids.extend(self._encode(self.forced_prefix(tools, tool_choice)))  # never joined with what is before it: see turn_of
        return Rendered(ids, placed, layout.stripped, layout.misplaced)

    def demonstration(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, ids to imitate) of every assistant message without `"train": false`, as the template writes it.

        The ids end with the end-of-turn token. Turn k+1's prompt begins with turn k's prompt and ids wherever the template
        lets turns stand. Raises `InvalidRequest` if an assistant message comes first or the template cannot show one.
        """
        read, shown = read_messages(messages), read_tools(tools)
        pairs: list[tuple[list[int], list[int]]] = []
        known: dict[int, list[SampledTurn]] = {}
        for index, message in enumerate(read):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise InvalidRequest("a demonstration must not begin with an assistant message", param="messages[0]")
            if len(message.get("tool_calls", ())) > 1 and not self._template.parallel_calls:
                raise InvalidRequest("this model's chat template takes one tool call per message", param=f"messages[{index}].tool_calls")
            prompt_ids = self.render_known(messages[:index], tools, None, known).prompt_ids
            written = self._template.turn(read[: index + 1], shown)
            token_ids = [*self._encode(written), self.end_of_turn_id]
            turn_ids = [*self._encode(self._template.think_prefix), *token_ids]
            known[index] = [SampledTurn(turn_ids, self._thinks(turn_ids))]
            if messages[index].get("train") is not False:
                pairs.append((prompt_ids, token_ids))
        return pairs

    def check_round_trip(self) -> tuple[str, ...]:
        """Write sample replies as the model would, read them back; returns the new warnings (they join `warnings`).

        Raises `ModelRefused` if even plain text does not come back.
        """
        found: list[str] = []
        for messages, tools in samples():
            expected: dict[str, Any] = messages[-1]
            if len(expected.get("tool_calls", ())) > 1 and not self._template.parallel_calls:
                continue
            try:
                token_ids = self.demonstration(messages, tools)[-1][1]
            except InvalidRequest as error:
                found.append(f"the chat template cannot write a sample reply: {error}")
                continue
            reply = self.parse(token_ids, tools)
            if reply.parse_error is None and same_turn(expected, reply.message):
                continue
            what = f"{len(expected['tool_calls'])} tool call(s)" if "tool_calls" in expected else "plain text"
            if "tool_calls" not in expected:
                raise ModelRefused("the model's chat template writes plain text in a form that cannot be read back as that text")
            found.append(f"a reply with {what} is not read back as it is written ({reply.parse_error or 'it reads otherwise'})")
        self.warnings.extend(found)
        return tuple(found)

    def turn_of(self, completion: Completion) -> SampledTurn:
        """A recorded reply as a turn: what its prompt already had of it (opened reasoning, a forced call) and what was sampled."""
        request = completion.request
        prefix = [
            *self._encode(self._template.think_prefix),
            *self._encode(self.forced_prefix(request.tools, request.tool_choice)),
        ]
        cut = len(completion.prompt_ids) - len(prefix)
        if list(completion.prompt_ids[max(cut, 0) :]) != prefix:
            prefix, cut = [], len(completion.prompt_ids)
        turn = array("i", [*prefix, *completion.token_ids])
        return SampledTurn(turn, self._thinks(turn), contexts(completion.prompt_ids, [cut])[0])

    def reads_as_recorded(self, completion: Completion) -> bool:
        """Whether these ids mean here what they meant when they were recorded: false for another base model's tokenizer."""
        request = completion.request
        stream = self.stream(request.tools, tool_choice=request.tool_choice, stop=completion.sampling.stop)
        stream.feed(completion.token_ids)
        stream.finish()
        return same_turn(completion.message, stream.reply().message)

    def _encode_part(self, text: str) -> list[int]:
        """Opened reasoning at the prompt's end is encoded apart, so that it can be told from the rest of the prompt."""
        prefix = self._template.think_prefix
        if prefix and text.endswith(self._template.header + prefix):
            return [*self._encode(text.removesuffix(prefix)), *self._encode(prefix)]
        return list(self._encode(text))

    def _thinks(self, turn_ids: Sequence[int]) -> bool:
        think = self._template.think
        return think is not None and think.open in self.text(turn_ids)

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
        think, opened = self._template.think, self._template.think_prefix
        return f"{think.close}\n\n{forced}" if think is not None and opened and think.close not in opened else forced

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


def _fitting(turns: Sequence[SampledTurn], ids: list[int]) -> int:
    """Which of the candidates was sampled after exactly these ids; the first if none was."""
    if len(turns) == 1:
        return 0
    (here,) = contexts(ids, [len(ids)])
    return next((at for at, turn in enumerate(turns) if turn.context == here), 0)


def samples() -> list[tuple[list[JsonObject], list[JsonObject]]]:
    """Conversations whose last message every model must be able to write: text, one tool call, two in parallel."""
    tool: JsonObject = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }

    def turn(content: str, *cities: str) -> JsonObject:
        calls: list[Any] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
            for i, city in enumerate(cities)
        ]
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    user: JsonObject = {"role": "user", "content": "Hello"}
    return [
        ([user, turn("It is 20 °C, I think.")], []),
        ([user, turn("It is 20 °C, I think.")], [tool]),
        ([user, turn("", "Paris")], [tool]),
        ([user, turn("", "Paris", "Rome")], [tool]),
    ]


def format_instruction(response_format: Mapping[str, Any] | None) -> str:
    """What the model is told about `response_format`. The reply is checked elsewhere, after sampling."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return ""
    if kind == "json_object":
        return "Answer with one JSON object and nothing else."
    body = response_format.get("json_schema")
    schema = body.get("schema") if kind == "json_schema" and isinstance(body, Mapping) else None
    if schema is None:
        raise InvalidRequest(
            f"response_format must be text, json_object or a json_schema with a schema, got {kind!r}", param="response_format"
        )
    written = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return f"Answer with one JSON value and nothing else. It must match this JSON schema:\n{written}"
