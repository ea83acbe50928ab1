"""Replies are read the same whole and in pieces; nothing a model can sample is lost or breaks the reader."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_tokenizers import tokenizer_of
from support.tiny_models import tiny_tokenizer

from apprentice.core.server.chat import ChatCodec
from apprentice.core.server.families import HERMES, BadCall, read_json_calls

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
]
FAMILIES = ["smollm2", "qwen3", "llama3_2", "qwen3_5_think"]
FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n",
        "\n</tool_call>",
        '{"name": "search", "arguments": {"q": "x"}}',
        '{"name": "f", "parameters": {}}',
        '{"name": "search", "arguments": {"q": "</tool_call>"}}',
        '{"name": "search", "arguments": {"q": "cut',
        "<function=search>\n<parameter=q>\nx\n</parameter>\n</function>",
        "<think>",
        "</think>",
        "<thi",
        "<tool",
        "\n\n",
        "  ",
        "hello",
        "STOP",
        "ST",
        "😀é漢",
        "}",
        '"',
        "{",
        "\\",
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=6)), max_size=10).map("".join)
CODECS: dict[str, ChatCodec] = {}


def codec(family: str) -> ChatCodec:
    if family not in CODECS:
        CODECS[family] = ChatCodec(tiny_tokenizer() if family == "tiny" else tokenizer_of(family))
    return CODECS[family]


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What an OpenAI client makes of the deltas."""
    message: dict[str, Any] = {}
    for delta in deltas:
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                assert part["id"].startswith("call_")
                assert part["type"] == "function"
                calls.append({"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"content": message.get("content") or "", "reasoning": message.get("reasoning_content", ""), "calls": calls}


def split_ids(family: str, text: str, cuts: list[int]) -> list[int]:
    """Ids that spell `text`, cut into tokens at unusual places."""
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [i for start, end in itertools.pairwise(places) for i in codec(family).encode(text[start:end])]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(FAMILIES), TEXTS, st.lists(st.integers(0, 80), max_size=6), st.lists(st.integers(1, 7), max_size=40), st.booleans())
def test_concatenated_deltas_equal_the_parsed_whole(family: str, text: str, cuts: list[int], sizes: list[int], stops: bool) -> None:
    ids = split_ids(family, text, cuts)
    stop = ("STOP",) if stops else ()
    stream, deltas, at = codec(family).stream(TOOLS, stop=stop), [], 0
    for size in [*sizes, len(ids) or 1]:
        deltas += stream.feed(ids[at : at + size])
        at += size
    deltas += stream.finish()
    whole = codec(family).parse(ids, TOOLS, stop_string="STOP" if stops else None)
    assert without_ids(joined(deltas)) == without_ids(stream.reply().message) == without_ids(whole.message)
    assert whole.parse_error == stream.reply().parse_error
    assert whole.finish == ("tool_calls" if whole.message.get("tool_calls") else "stop")
    for call in whole.message.get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["smollm2", "tiny"]), TEXTS, st.lists(st.integers(0, 80), max_size=6))
def test_a_reply_without_a_valid_call_comes_back_as_the_very_text(family: str, text: str, cuts: list[int]) -> None:
    ids = split_ids(family, text, cuts)
    special = set(codec(family)._tokenizer.all_special_ids)
    expected = codec(family).text([i for i in ids if i not in special])
    assert codec(family).parse(ids).message["content"] == expected
    reply = codec(family).parse(ids, TOOLS)
    if not reply.message.get("tool_calls"):
        assert reply.message["content"] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 383), max_size=40), st.lists(st.integers(1, 5), max_size=20))
def test_any_ids_are_read_even_where_they_are_no_utf8(ids: list[int], sizes: list[int]) -> None:
    stream, deltas, at = codec("tiny").stream(TOOLS), [], 0
    for size in [*sizes, 40]:
        deltas += stream.feed(ids[at : at + size])
        at += size
    deltas += stream.finish()
    assert without_ids(joined(deltas)) == without_ids(codec("tiny").parse(ids, TOOLS).message)
    joined(deltas).get("content", "").encode()


def test_characters_split_over_tokens_are_whole_in_every_delta() -> None:
    smol = codec("smollm2")
    text = "a😀漢字🏳️‍🌈é"
    stream = smol.stream()
    pieces = [delta["content"] for token in smol.encode(text) for delta in stream.feed([token])]
    pieces += [delta["content"] for delta in stream.finish()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_streams_at_once_and_only_a_possible_tag_waits() -> None:
    smol = codec("smollm2")
    stream = smol.stream(TOOLS)
    assert stream.feed(smol.encode("Hello")) == [{"content": "Hello"}]
    assert stream.feed(smol.encode(" <tool")) == []
    assert stream.feed(smol.encode("box> is")) == [{"content": " <toolbox> is"}]
    assert stream.finish() == []


def test_a_call_is_handed_out_whole_name_first_then_its_arguments() -> None:
    smol = codec("smollm2")
    stream = smol.stream(TOOLS)
    assert stream.feed(smol.encode('Let me look.\n<tool_call>\n{"name": "search", "arguments": {"q":  "x" }}')) == [
        {"content": "Let me look."}
    ]
    first, second = stream.feed(smol.encode("\n</tool_call>"))
    assert first["tool_calls"][0]["function"] == {"name": "search", "arguments": ""}
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": '{"q":  "x" }'}}]}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {"a" : 1.50,\n "b":"\\u00e9"}}', '{"a" : 1.50,\n "b":"\\u00e9"}'),
        ('{"arguments": {}, "name": "f"}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "parameters": {"x": []}}', '{"x": []}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"type": "function", "function": {"name": "f", "arguments": {"x": 2}}}', '{"x": 2}'),
    ],
)
def test_arguments_are_the_models_own_json_text(body: str, arguments: str) -> None:
    assert [(call.name, call.arguments) for call in read_json_calls(body)] == [("f", arguments)]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "f(x)",
        "{}",
        '{"name": 3}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1}',
        '{"name": "f", "arguments": {"x": 1,}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"name": "f", "arguments": {"x": ' + "9" * 10_000 + "}}",
        "[" * 5000 + "]" * 5000,
    ],
)
def test_what_is_no_call_is_refused_with_a_reason(body: str) -> None:
    with pytest.raises(BadCall, match=r"\w+"):
        read_json_calls(body)


@pytest.mark.parametrize(
    ("text", "content", "calls", "error"),
    [
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', None, ["f", "g"], None),
        ('<tool_call>{"name": "f"}', None, ["f"], None),
        ('<tool_call>{"name": "f", "arguments": {"a', '<tool_call>{"name": "f", "arguments": {"a', [], "the reply ends inside the call"),
        (
            'A\n<tool_call>{bad}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "A\n<tool_call>{bad}</tool_call>",
            ["g"],
            "does not parse",
        ),
        ('<tool_call>{"name": "f\n<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "f', ["g"], "does not parse"),
        ('<tool_call>{"name": "f", "arguments": {"q": "</tool_call>"}}</tool_call>', None, ["f"], None),
        ('<tool_call>{"name": "never heard of"}</tool_call> done', "done", ["never heard of"], None),
        ('A <tool_call>{"name": "f"}</tool_call> B', "A B", ["f"], None),
        ("  plain \n", "  plain \n", [], None),
    ],
)
def test_hermes_replies(text: str, content: str | None, calls: list[str], error: str | None) -> None:
    smol = codec("smollm2")
    reply = smol.parse([*smol.encode(text), smol.end_of_turn_id], TOOLS)
    assert reply.message["content"] == content
    assert [call["function"]["name"] for call in reply.message.get("tool_calls", ())] == calls
    assert (reply.parse_error is None) if error is None else (error in str(reply.parse_error))
    assert reply.finish == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "search", "parameters": {"q": "x"}}', [("search", '{"q": "x"}')]),
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', [("a", "{}"), ("b", "{}")]),
        ('{"answer": 42}', []),
        ('I would call {"name": "search", "parameters": {}}', []),
    ],
)
def test_llama_replies_are_a_call_as_a_whole_or_text(text: str, calls: list[tuple[str, str]]) -> None:
    llama = codec("llama3_2")
    reply = llama.parse([*llama.encode(text), llama.end_of_turn_id], TOOLS)
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in reply.message.get("tool_calls", ())] == calls
    assert reply.message["content"] == (None if calls else text)


def test_xml_calls_get_the_types_of_the_tools_schema() -> None:
    qwen = codec("qwen3_5_think")
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    call = "<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>\n</function>"
    reply = qwen.parse(qwen.encode(f"I think.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"), tools)
    assert reply.message["reasoning_content"] == "I think."
    assert json.loads(reply.message["tool_calls"][0]["function"]["arguments"]) == {"n": 7, "s": "7"}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "Why?", "So."),
        ("<think>\n\n</think>\n\nSo.", None, "So."),
        ("<think>\ncut of", "cut of", ""),
        ("So. <think>no</think>", None, "So. <think>no</think>"),
        ("<think>a <tool_call>{}</tool_call></think>b", "a <tool_call>{}</tool_call>", "b"),
    ],
)
def test_reasoning_is_kept_apart(text: str, reasoning: str | None, content: str) -> None:
    reply = codec("qwen3").parse(codec("qwen3").encode(text), TOOLS)
    assert (reply.message.get("reasoning_content"), reply.message["content"]) == (reasoning, content)


def test_reasoning_that_the_prompt_opened_is_reasoning() -> None:
    qwen = codec("qwen3_5_think")
    assert qwen.reply_prefix() == "<think>\n"
    reply = qwen.parse(qwen.encode("Why?\n</think>\n\nSo."))
    assert (reply.message["reasoning_content"], reply.message["content"]) == ("Why?", "So.")


@pytest.mark.parametrize(("stop", "content"), [("STOP", "one "), ("one STO", ""), ("two", "one STOP "), ("three", "one STOP two")])
def test_text_ends_before_the_stop_string(stop: str, content: str) -> None:
    smol = codec("smollm2")
    assert smol.parse(smol.encode("one STOP two"), stop_string=stop).message["content"] == content


def test_a_call_in_a_request_without_tools_is_text() -> None:
    smol = codec("smollm2")
    text = HERMES.write(read_json_calls('{"name": "f"}')[0])
    assert smol.parse(smol.encode(text)).message == {"role": "assistant", "content": text}
    hidden = smol.parse(smol.encode(text), TOOLS, tool_choice="none")
    assert (hidden.message["content"], hidden.finish) == (text, "stop")
