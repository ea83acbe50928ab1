"""Known turns re-enter the next prompt as the very ids that were sampled, and every branch has its true reason."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_tokenizers import tokenizer_of
from support.tiny_models import tiny_tokenizer

from apprentice.core.records import BranchReason, ChatRequest, Completion, FinishReason, Origin, SamplingParams, Trajectory
from apprentice.core.server.chat import ChatCodec, samples
from apprentice.core.server.ledger import Ledger
from apprentice.core.server.splice import SplicedPrompt, Splicer

TOOL = samples()[-1][1][0]
NAMES = (f"trj-{number}" for number in itertools.count())
CODECS: dict[str, ChatCodec] = {}


def codec(family: str) -> ChatCodec:
    if family not in CODECS:
        CODECS[family] = ChatCodec(tiny_tokenizer() if family == "tiny" else tokenizer_of(family))
    return CODECS[family]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger.open(tmp_path_factory.mktemp("ledger") / "ledger.db") as opened:
        yield opened


class Rollout:
    """One trajectory against a scripted model: every reply is given as the ids that were sampled."""

    def __init__(self, ledger: Ledger, family: str = "smollm2", *, tools: bool = True, name: str | None = None) -> None:
        self.ledger, self.codec = ledger, codec(family)
        self.splicer = Splicer(self.codec, ledger)
        self.name = name or next(NAMES)
        self.tools = (TOOL,) if tools else ()
        if name is None:
            ledger.open_trajectory(Trajectory(id=self.name, policy="p/a"))

    def prompt(self, messages: list[dict[str, Any]], origin: Origin | None = None, **more: Any) -> SplicedPrompt:
        return self.splicer.prompt(self.name, ChatRequest(messages=tuple(messages), tools=self.tools, **more), origin or Origin())

    def call(
        self, messages: list[dict[str, Any]], reply: str | list[int], *, origin: Origin | None = None, end: bool = True, **more: Any
    ) -> tuple[SplicedPrompt, Completion]:
        spliced = self.prompt(messages, origin, **more)
        return spliced, self.record(messages, spliced, reply, origin=origin, end=end, **more)

    def record(
        self,
        messages: list[dict[str, Any]],
        spliced: SplicedPrompt,
        reply: str | list[int],
        *,
        origin: Origin | None = None,
        end: bool = True,
        policy: str = "p/a",
        choice: int = 0,
        **more: Any,
    ) -> Completion:
        ids = [*(self.codec.encode(reply) if isinstance(reply, str) else reply), *([self.codec.end_of_turn_id] if end else [])]
        read = self.codec.parse(ids, self.tools, tool_choice=more.get("tool_choice"))
        completion = Completion(
            trajectory_id=self.name,
            policy=policy,
            policy_version=0,
            choice=choice,
            prompt_ids=tuple(spliced.prompt_ids),
            token_ids=tuple(ids),
            logprobs=(-1.0,) * len(ids),
            sampling_logprobs=(-1.0,) * len(ids),
            sampling=SamplingParams(),
            request=ChatRequest(messages=tuple(messages), tools=self.tools, **more),
            message=read.message,
            finish_reason=FinishReason(read.finish) if end else FinishReason.length,
            parse_error=read.parse_error,
            origin=origin or Origin(),
            parent=spliced.parent,
            branch=spliced.branch,
        )
        self.ledger.append_completions([completion])
        return completion


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def echo(message: dict[str, Any], how: str = "same") -> dict[str, Any]:
    """The reply as a client sends it back."""
    sent = json.loads(json.dumps(message))
    sent.pop("reasoning_content", None)
    for number, call in enumerate(sent.get("tool_calls", ())):
        if how in ("respaced", "new ids"):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(" ,", " : "))
        if how == "new ids":
            call["id"] = f"fc_{number}"
    return sent


def answers(message: dict[str, Any], text: str = "ok") -> list[dict[str, Any]]:
    calls = message.get("tool_calls", ())
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls] or [user(text)]


def whole(completion: Completion) -> list[int]:
    return [*completion.prompt_ids, *completion.token_ids]


SYNTAX = {
    "hermes": '<tool_call>\n{{"name":  "get_weather","arguments": {arguments}}}\n</tool_call>',
    "llama3_json": '{{"name": "get_weather",  "parameters": {arguments}}}',
    "qwen3_5_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis {{1}}\n</parameter>\n</function>\n</tool_call>",
}
VALID = ['{"city":"Rome"}', '{ "city" :\n"Z\\u00fcrich" }', "{}", '{"city": "漢 😀", "n": 1.50}']
ARGUMENTS = st.sampled_from([*VALID, '{"city": "Rome"', "{city: 1}"])
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>{}|", exclude_categories=["Cc"]), min_size=1, max_size=12)
TURNS = st.lists(
    st.tuples(
        st.sampled_from(["text", "call", "calls"]), WORDS, ARGUMENTS, st.booleans(), st.sampled_from(["same", "respaced", "new ids"]),
        st.lists(st.integers(0, 60), max_size=4), st.booleans(), st.sampled_from(["lineage", "none"]),
    ),
    min_size=2,
    max_size=4,
)  # fmt: skip


def oddly_split(text: str, cuts: list[int], used: ChatCodec) -> list[int]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [token for start, end in itertools.pairwise(places) for token in used.encode(text[start:end])]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["smollm2", "qwen2_5", "qwen3", "llama3_2", "gemma"]), TURNS)
def test_the_next_prompt_is_the_last_one_and_exactly_what_was_sampled(ledger: Ledger, family: str, turns: list[Any]) -> None:
    rollout = Rollout(ledger, family)
    messages, before, lineage = [{"role": "system", "content": "Be brief."}, user("Hi é")], None, {}
    for kind, words, arguments, ended, how, cuts, stranger, pointing in turns:
        spliced = rollout.prompt(messages, Origin(lineage=lineage if pointing == "lineage" else {}))
        if before is None:
            assert (spliced.parent, spliced.branch) == (None, BranchReason.root)
        else:
            assert spliced.prompt_ids[: len(whole(before))] == whole(before)
            assert (spliced.parent, spliced.branch) == (before.id, BranchReason.continues)
        written = SYNTAX[rollout.codec.tool_format].format(arguments=arguments)
        text = {"text": words, "call": written, "calls": f"{words}\n{written}\n{written}"}[kind]
        before = rollout.record(messages, spliced, oddly_split(text, cuts, rollout.codec), end=ended)
        lineage = {**lineage, len(messages): before.id}
        messages = [*messages, echo(before.message, how), *answers(before.message, words)]
        if stranger and family != "gemma":
            messages = [*messages, {"role": "assistant", "content": "Nobody sampled this."}, user("Go on")]
    last = rollout.prompt(messages, Origin(lineage=lineage))
    assert last.prompt_ids[: len(whole(before))] == whole(before)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(3, 383), max_size=12), min_size=2, max_size=4), st.booleans())
def test_any_sampled_ids_survive_even_if_they_are_no_text(ledger: Ledger, replies: list[list[int]], tools: bool) -> None:
    rollout = Rollout(ledger, "tiny", tools=tools)
    messages, before = [user("Hi")], None
    for reply in replies:
        spliced, completion = rollout.call(messages, reply)
        if before is not None:
            assert spliced.prompt_ids[: len(whole(before))] == whole(before)
            assert spliced.parent == before.id
        before, messages = completion, [*messages, echo(completion.message), user("more")]


def test_replies_that_read_alike_keep_their_own_ids(ledger: Ledger) -> None:
    rollout = Rollout(ledger, "tiny")
    one, other = rollout.codec.encode("the"), [token for letter in "the" for token in rollout.codec.encode(letter)]
    assert one != other
    messages, before = [user("Hi")], None
    for ids in (one, other, one, other):
        spliced, completion = rollout.call(messages, ids)
        assert before is None or spliced.prompt_ids[: len(whole(before))] == whole(before)
        before, messages = completion, [*messages, echo(completion.message), user("again")]


@pytest.mark.parametrize("family", ["smollm2", "qwen2_5", "qwen3", "llama3_2"])
def test_a_forced_call_stays_in_the_history_with_its_beginning(ledger: Ledger, family: str) -> None:
    rollout = Rollout(ledger, family)
    messages = [user("Weather?")]
    _, first = rollout.call(messages, ' {"city":"Rome"}}', tool_choice="required")
    messages = [*messages, echo(first.message, "respaced"), *answers(first.message)]
    spliced = rollout.prompt(messages)
    assert spliced.prompt_ids[: len(whole(first))] == whole(first)
    assert (spliced.parent, spliced.branch) == (first.id, BranchReason.continues)


def test_a_fresh_process_splices_from_the_ledger_alone(ledger: Ledger) -> None:
    rollout = Rollout(ledger)
    messages = [user("Weather?")]
    _, first = rollout.call(messages, '<tool_call>\n{"name":"get_weather","arguments":{"city":  "Rome"}}\n</tool_call>')
    messages = [*messages, echo(first.message, "respaced"), *answers(first.message)]
    again = Rollout(ledger, name=rollout.name)
    spliced = again.prompt(messages)
    assert spliced.prompt_ids[: len(whole(first))] == whole(first)
    assert (spliced.parent, spliced.branch) == (first.id, BranchReason.continues)
    assert again.prompt(messages[:1]).branch is BranchReason.retry


def test_another_agents_prompt_holds_the_sampled_ids_too(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    ann, bob = Origin(agent="ann"), Origin(agent="bob", lineage={2: "?"})
    _, said = rollout.call([user("Plan")], [*rollout.codec.encode("Fir"), *rollout.codec.encode("st  this")], origin=ann)
    bob = Origin(agent="bob", lineage={2: said.id})
    messages = [{"role": "system", "content": "You are Bob."}, user("Plan"), echo(said.message), user("Bob?")]
    spliced, heard = rollout.call(messages, "Yes.", origin=bob)
    assert (spliced.parent, spliced.branch) == (None, BranchReason.other_agent)
    prompt = ",".join(map(str, spliced.prompt_ids))
    assert ",".join(map(str, said.token_ids)) in prompt
    more = [*messages, echo(heard.message), {"role": "assistant", "content": "First  this"}, user("And now?")]
    following = rollout.prompt(more, Origin(agent="bob", lineage={2: said.id, 4: heard.id}))
    assert (following.parent, following.branch) == (heard.id, BranchReason.continues)
    assert "Another agent calls: bob" in rollout.splicer.why(rollout.name)[heard.id]


def test_a_known_turn_of_another_trajectory_is_spliced_but_is_no_parent(ledger: Ledger) -> None:
    first = Rollout(ledger, tools=False)
    ids = [*first.codec.encode("Hel"), *first.codec.encode("lo")]
    _, said = first.call([user("Hi")], ids)
    second = Rollout(ledger, tools=False)
    spliced = second.prompt([user("Hi"), echo(said.message), user("more")], Origin(lineage={1: said.id}))
    assert spliced.prompt_ids[: len(whole(said))] == whole(said)
    assert spliced.parent is None


def test_an_edited_turn_is_shown_as_edited_and_the_history_counts_as_rewritten(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    _, first = rollout.call([user("Hi")], "My secret is 42.")
    edited = [user("Hi"), {"role": "assistant", "content": "My secret is [hidden]."}, user("more")]
    spliced, second = rollout.call(edited, "ok", origin=Origin(lineage={1: first.id}))
    assert (spliced.parent, spliced.branch) == (None, BranchReason.history_rewritten)
    assert "[hidden]" in rollout.codec.text(spliced.prompt_ids)
    assert "42" not in rollout.codec.text(spliced.prompt_ids)
    assert f"since {first.id}: message 1 (assistant) is not the reply" in rollout.splicer.why(rollout.name)[second.id]


def test_repaired_broken_json_is_no_sampled_turn(ledger: Ledger) -> None:
    rollout = Rollout(ledger)
    _, first = rollout.call([user("Hi")], '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro', end=False)
    assert str(first.message["content"]).endswith('"Ro')
    assert first.parse_error is not None
    call = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ro"}'}}
    messages = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [call]}, *answers({"tool_calls": [call]})]
    assert rollout.prompt(messages, Origin(lineage={1: first.id})).branch is BranchReason.history_rewritten


def test_thinking_that_the_template_strips_branches_and_says_so(ledger: Ledger) -> None:
    rollout = Rollout(ledger, "qwen3")
    call = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    messages = [user("Weather?")]
    _, first = rollout.call(messages, call)
    messages = [*messages, echo(first.message), *answers(first.message)]
    spliced, second = rollout.call(messages, "<think>\nFine.\n</think>\n\nSunny.")
    assert (spliced.parent, spliced.branch) == (first.id, BranchReason.continues)
    assert spliced.prompt_ids[: len(whole(first))] == whole(first)
    messages = [*messages, echo(second.message), user("Thanks")]
    stripped, third = rollout.call(messages, "<think>\n.\n</think>\n\nBye.")
    assert (stripped.parent, stripped.branch) == (None, BranchReason.thinking_stripped)
    assert stripped.prompt_ids == rollout.codec.render(messages, rollout.tools)
    assert "reasoning" in rollout.splicer.why(rollout.name)[third.id]


def test_same_prompts_are_retries_of_one_caller_and_siblings_of_two(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    twin, other = Origin(node="work", namespace="work:1"), Origin(node="work", namespace="work:2")
    first, _ = rollout.call([user("Hi")], "one", origin=twin)
    sibling, second = rollout.call([user("Hi")], "two", origin=other)
    retry, third = rollout.call([user("Hi")], "three", origin=twin.model_copy(update={"attempt": 1}))
    assert [p.branch for p in (first, sibling, retry)] == [BranchReason.root, BranchReason.sibling, BranchReason.retry]
    why = rollout.splicer.why(rollout.name)
    assert "for another caller (work/work:2)" in why[second.id]
    assert "same caller, same prompt" in why[third.id]


def test_a_call_that_was_never_answered_makes_the_next_a_retry(ledger: Ledger) -> None:
    rollout = Rollout(ledger)
    rollout.prompt([user("Hi")])
    assert rollout.prompt([user("Hi")]).branch is BranchReason.retry


def test_going_back_in_time_makes_a_sibling_of_the_same_parent(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    _, first = rollout.call([user("Hi")], "Hello")
    history = [user("Hi"), echo(first.message)]
    straight, _ = rollout.call([*history, user("left")], "L")
    back, fork = rollout.call([*history, user("right")], "R")
    assert [(p.parent, p.branch) for p in (straight, back)] == [(first.id, BranchReason.continues), (first.id, BranchReason.sibling)]
    assert first.id in rollout.splicer.why(rollout.name)[fork.id]


def test_dropped_first_messages_are_a_truncation(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    messages = [{"role": "system", "content": "S"}, user("one")]
    for word in ("alpha", "beta", "gamma"):
        _, said = rollout.call(messages, word)
        messages = [*messages, echo(said.message), user(f"after {word}")]
    cut, last = rollout.call([messages[0], *messages[3:]], "delta")
    assert (cut.parent, cut.branch) == (None, BranchReason.truncation)
    assert "dropped" in rollout.splicer.why(rollout.name)[last.id]


def test_a_changed_system_prompt_or_tool_is_a_rewritten_history(ledger: Ledger) -> None:
    rollout = Rollout(ledger)
    _, first = rollout.call([{"role": "system", "content": "A"}, user("Hi")], "Hello")
    changed, second = rollout.call([{"role": "system", "content": "B"}, user("Hi"), echo(first.message), user("more")], "x")
    rollout.tools = ()
    fewer, third = rollout.call([{"role": "system", "content": "B"}, user("Hi"), echo(first.message), user("more")], "y")
    assert changed.branch is fewer.branch is BranchReason.history_rewritten
    why = rollout.splicer.why(rollout.name)
    assert "message 0 (system) reads otherwise" in why[second.id]
    assert "the tools differ" in why[third.id]


def test_a_new_conversation_in_the_same_trajectory_is_a_root(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    rollout.call([user("Hi")], "Hello")
    assert rollout.prompt([user("Something else")]).branch is BranchReason.root


def test_a_call_without_a_trajectory_still_splices_by_lineage(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    _, said = rollout.call([user("Hi")], [*rollout.codec.encode("Hel"), *rollout.codec.encode("lo")])
    request = ChatRequest(messages=(user("Hi"), echo(said.message), user("more")))
    spliced = rollout.splicer.prompt(None, request, Origin(lineage={1: said.id}))
    assert spliced.prompt_ids[: len(whole(said))] == whole(said)
    assert (spliced.parent, spliced.branch) == (None, BranchReason.root)
    assert rollout.splicer.prompt(None, request, Origin(lineage={1: "cmp-unknown"})).prompt_ids == rollout.codec.render(request.messages)


def test_ids_of_another_tokenizer_are_never_spliced(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    _, said = rollout.call([user("Hi")], "Hello there")
    foreign = Splicer(codec("tiny"), ledger)
    request = ChatRequest(messages=(user("Hi"), echo(said.message), user("more")))
    spliced = foreign.prompt(rollout.name, request, Origin(lineage={1: said.id}))
    assert spliced.prompt_ids == codec("tiny").render(request.messages)


def test_concurrent_calls_of_one_trajectory_do_not_disturb_each_other(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    failures: list[BaseException] = []

    def conversation(number: int) -> None:
        try:
            origin, messages, before = Origin(agent=f"agent-{number}"), [user(f"I am {number}")], None
            for turn in range(6):
                spliced, said = rollout.call(messages, f"reply {turn} of  {number}", origin=origin)
                assert spliced.parent == (before.id if before else None)
                assert before is None or spliced.prompt_ids[: len(whole(before))] == whole(before)
                before, messages = said, [*messages, echo(said.message), user("more")]
        except BaseException as error:  # noqa: BLE001  a thread's failure must reach the test
            failures.append(error)

    threads = [threading.Thread(target=conversation, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_long_rollout_asks_the_ledger_and_the_tokenizer_once_per_turn(ledger: Ledger) -> None:
    rollout = Rollout(ledger, tools=False)
    asked, encoded = [], []
    find = ledger.find_reply

    class Counting:
        completions = staticmethod(ledger.completions)

        @staticmethod
        def find_reply(*arguments: Any, **key: Any) -> Any:
            asked.append(key)
            return find(*arguments, **key)

    rollout.splicer = Splicer(rollout.codec, Counting())
    messages = [user("Hi")]
    for turn in range(24):
        _, said = rollout.call(messages, f"reply {turn}")
        messages = [*messages, echo(said.message), user(f"go on {turn}")]
        encoded.append(rollout.codec._encode.encoded)
    assert len(asked) == 23
    assert max(later - earlier for earlier, later in itertools.pairwise(encoded)) <= 3
