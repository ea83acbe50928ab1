"""The chat codec renders what a client sends and reads back what a model writes, for every template it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from support.chat_tokenizers import family_tokenizer, tokenizer_of
from support.tiny_models import CHATML, tiny_tokenizer

from apprentice.core.errors import InvalidRequest, ModelRefused
from apprentice.core.server.chat import ChatCodec, samples
from apprentice.core.server.chat_messages import same_turn

FAMILIES = ["smollm2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "llama3_2", "gemma", "gemma4_v2"]
TOOL = samples()[-1][1][0]
CODECS: dict[str, ChatCodec] = {}


def codec(family: str) -> ChatCodec:
    if family not in CODECS:
        CODECS[family] = ChatCodec(tokenizer_of(family))
    return CODECS[family]


def rendered(family: str, messages: list[dict[str, Any]], *arguments: Any, **more: Any) -> str:
    return codec(family).text(codec(family).render(messages, *arguments, **more))


def call(arguments: str = '{"city": "Rome"}', call_id: str = "call_1", name: str = "get_weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_reply_is_read_back_as_it_was_written(family: str) -> None:
    assert ChatCodec(tokenizer_of(family)).check_round_trip() == ()


@pytest.mark.parametrize(
    ("family", "syntax"),
    [
        ("smollm2", "hermes"),
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("llama3_2", "llama3_json"),
        ("qwen3_5_think", "qwen3_5_xml"),
        ("nemotron_3_nano", "qwen3_5_xml"),
        ("glm4moe", "glm4_moe"),
        ("gemma4", "gemma4"),
        ("lfm2_2_5", "lfm2_5"),
        ("gemma3", "hermes"),
    ],
)
def test_the_tool_syntax_is_found_by_trying(family: str, syntax: str) -> None:
    assert codec(family).tool_format == syntax


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_equal_the_tokenizers_own_rendering(family: str) -> None:
    tokenizer = tokenizer_of(family)
    messages = [{"role": "user", "content": "Hi é😀"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert codec(family).render(messages) == list(own)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2", "qwen3_5_think", "glm4moe", "lfm2_2_5"])
def test_templates_that_know_tools_get_them_the_familys_own_way(family: str) -> None:
    tokenizer = tokenizer_of(family)
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    theirs = json.loads(json.dumps(messages))
    theirs[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Rome"}
    own = tokenizer.apply_chat_template(theirs, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert rendered(family, messages, [TOOL]) == own


def test_smollm2_learns_its_tools_from_a_short_system_message() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [call('{"city":"Rome"}'), call('{"city": "Oslo"}', "call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "2 °C"}]},
    ]
    text = rendered("smollm2", messages, [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can use these tools:\n<tools>\n{")
    assert '"city"' in text.split("</tools>")[0]
    assert text.endswith(
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\nLooking.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n2 °C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ["{", "", "[1, 2]", "null", '"text"', "NaN", "[" * 50_000])
def test_arguments_that_are_no_json_object_are_shown_and_crash_nothing(family: str, arguments: str) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "bad arguments"},
    ]
    assert "bad arguments" in rendered(family, messages, [TOOL])


@pytest.mark.parametrize("family", FAMILIES)
def test_unusual_conversations_are_rendered_whole(family: str) -> None:
    messages = [
        {"role": "system", "content": "rule_one"},
        {"role": "system", "content": "rule_two"},
        {"role": "user", "content": "ask_one", "name": "ann"},
        {"role": "user", "content": [{"type": "text", "text": "ask_two"}]},
        {"role": "assistant", "content": "said_one", "name": "agent", "refusal": None},
        {"role": "assistant", "content": "said_two"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call(), call(call_id="call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "got_one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "got_two"},
        {"role": "system", "content": "rule_three"},
        {"role": "user", "content": "ask_three"},
    ]
    text = rendered(family, messages, [TOOL])
    for part in ("rule_one", "rule_two", "ask_one", "ask_two", "said_one", "said_two", "got_one", "got_two", "rule_three", "ask_three"):
        assert text.count(part) == 1, part


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)
def test_messages_that_cannot_be_shown_are_refused_by_name(messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        codec("smollm2").render(messages)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "retrieval"}], None, "tools[0]"),
        ([{"type": "function", "function": {"name": ""}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "tools[0].function.parameters"),
        ([], "required", "tool_choice"),
        ([TOOL], "sometimes", "tool_choice"),
        ([TOOL], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
    ],
)
def test_tools_and_choices_that_cannot_be_met_are_refused_by_name(tools: list[Any], choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        codec("smollm2").render([{"role": "user", "content": "x"}], tools, choice)
    assert raised.value.param == param


def test_what_the_template_refuses_is_one_sentence() -> None:
    with pytest.raises(InvalidRequest, match="chat template cannot render"):
        codec("qwen3_5_think").render([{"role": "assistant", "content": "I begin."}])


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "llama3_2", "qwen3_5_think"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_begins_in_the_prompt_and_is_read_with_it(family: str, choice: Any) -> None:
    smol = codec(family)
    prompt = smol.render([{"role": "user", "content": "x"}], [TOOL], choice)
    forced = smol.forced_prefix([TOOL], choice)
    if not forced:  # not a JSON dialect: an instruction, and the violation is reported
        assert "Answer with a call of the tool get_weather." in smol.text(prompt)
        assert "demanded" in str(smol.parse(smol.encode("no"), [TOOL], tool_choice=choice).parse_error)
        return
    assert smol.text(prompt).endswith(forced)
    reply = smol.parse([*smol.encode(' {"city": "Rome"}}'), smol.end_of_turn_id], [TOOL], tool_choice=choice)
    assert reply.message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert reply.parse_error is None
    broken = smol.parse(smol.encode(" no idea"), [TOOL], tool_choice=choice)
    assert "does not parse" in str(broken.parse_error)
    assert str(broken.message["content"]).endswith(" no idea")


def test_required_among_several_tools_leaves_the_name_to_the_model() -> None:
    other = {"type": "function", "function": {"name": "clock"}}
    smol = codec("smollm2")
    assert smol.text(smol.render([{"role": "user", "content": "x"}], [TOOL, other], "required")).endswith('<tool_call>\n{"name": "')
    reply = smol.parse(smol.encode('clock"}\n</tool_call>'), [TOOL, other], tool_choice="required")
    assert reply.message["tool_calls"][0]["function"]["name"] == "clock"
    named = {"type": "function", "function": {"name": "clock"}}
    wrong = smol.parse(smol.encode(' {}}\n</tool_call>\n<tool_call>{"name": "get_weather"}</tool_call>'), [TOOL, other], tool_choice=named)
    assert "demanded the tool 'clock'" in str(wrong.parse_error)


def test_tools_are_hidden_when_tool_choice_is_none() -> None:
    assert "get_weather" not in rendered("smollm2", [{"role": "user", "content": "x"}], [TOOL], "none")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_format_is_told_to_the_model(family: str) -> None:
    schema = {"type": "object", "properties": {"answer_key": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert "answer_key" in rendered(family, [{"role": "user", "content": "x"}], response_format=wanted)
    assert "JSON object" in rendered(family, [{"role": "user", "content": "x"}], response_format={"type": "json_object"})
    with pytest.raises(InvalidRequest, match="response_format"):
        codec(family).render([{"role": "user", "content": "x"}], response_format={"type": "yaml"})


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_are_what_the_model_would_have_sampled(family: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny.", "train": False},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye."},
    ]
    smol = codec(family)
    pairs = smol.demonstration(messages, [TOOL])
    assert len(pairs) == 2
    (first_prompt, first_ids), (last_prompt, last_ids) = pairs
    assert first_prompt == smol.render(messages[:2], [TOOL])
    assert first_ids[-1] == last_ids[-1] == smol.end_of_turn_id
    assert smol.end_of_turn_id in smol.stop_token_ids
    assert same_turn(messages[2], smol.parse(first_ids, [TOOL]).message)
    assert smol.parse(last_ids, [TOOL]).message["content"] == "Bye."
    if family not in ("qwen3", "qwen3_5_think"):  # these strip reasoning, and write an empty one before the last turn
        assert last_prompt[: len(first_prompt) + len(first_ids)] == [*first_prompt, *first_ids]


def test_a_demonstration_must_not_begin_with_the_answer() -> None:
    with pytest.raises(InvalidRequest, match="begin with an assistant"):
        codec("smollm2").demonstration([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "no chat template"),
        ("{{ messages[0].nothing.at_all }}", "cannot render"),
        ("always the same", "does not open an assistant turn"),
        (CHATML.replace("message['content']", "message['content'] | upper"), "does not open an assistant turn"),
    ],
)
def test_templates_that_cannot_carry_a_chat_are_refused(template: str | None, sentence: str) -> None:
    with pytest.raises(ModelRefused, match=sentence):
        ChatCodec(tiny_tokenizer(chat_template=template))


def test_a_template_that_changes_what_is_said_is_refused_at_start_up() -> None:
    template = CHATML.replace("message['content']", "(message['content'] | replace('think', 'thunk'))")
    with pytest.raises(ModelRefused, match="cannot be read back"):
        ChatCodec(tiny_tokenizer(chat_template=template)).check_round_trip()


def test_a_tool_syntax_nobody_can_read_is_replaced_and_said_so() -> None:
    source = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    odd = ChatCodec(tiny_tokenizer(chat_template=source.replace("<tool_call>", "[[call]]").replace("</tool_call>", "[[end]]")))
    assert odd.tool_format == "hermes"
    assert "Hermes-style" in odd.warnings[0]
    assert odd.check_round_trip() == ()


def test_a_family_can_be_named() -> None:
    assert ChatCodec(family_tokenizer("qwen2_5"), family="llama3_json").tool_format == "llama3_json"
    with pytest.raises(ModelRefused, match="no tool-call family 'klingon'"):
        ChatCodec(family_tokenizer("qwen2_5"), family="klingon")
