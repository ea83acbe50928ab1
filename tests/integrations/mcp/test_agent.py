"""The plain tool loop against a real gateway and ledger: what it sends, what lands in the trajectory, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import JsonValue
from support.client_server import ClientServer, client_server
from support.tiny_models import tiny_tokenizer

from apprentice.core.errors import InvalidRequest
from apprentice.core.records import JsonObject
from apprentice.integrations.mcp.agent import McpAgent
from apprentice.integrations.mcp.reply import ToolReply

TOKENIZER = tiny_tokenizer()


class Adder:
    """An environment with one tool, and what it was asked."""

    instructions = "Sums are made with add."
    tools: list[JsonObject] = [  # noqa: RUF012
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds.",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
            },
        }
    ]

    def __init__(self) -> None:
        self.asked: list[tuple[str, JsonValue]] = []

    async def call(self, function_name: str, arguments: JsonValue) -> ToolReply:
        self.asked.append((function_name, arguments))
        values = json.loads(str(arguments))
        if function_name != "add":
            return ToolReply("sums", function_name, values, "tool_error", f"there is no tool {function_name}", function=function_name)
        total = str(values["a"] + values["b"])
        return ToolReply("sums", "add", values, "ok", total, full_text=f"{total} exactly", function="add", seconds=0.25)


def call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def says(folder: Path, decide: Callable[[str], str]) -> Iterator[ClientServer]:
    """A server whose model answers a prompt's text with what `decide` says."""

    def reply(prompt: Sequence[int], *_: object) -> list[int]:
        return [*TOKENIZER.encode(decide(TOKENIZER.decode(prompt)), add_special_tokens=False), TOKENIZER.eos_token_id]

    with client_server(folder, reply) as server:
        yield server


async def test_calls_are_run_and_recorded_between_the_model_calls_until_there_is_an_answer(tmp_path: Path) -> None:
    def decide(prompt: str) -> str:
        return "It is 5." if "there is no tool ad" in prompt else both

    both = call("add", a=2, b=3) + call("ad", a=1, b=1)
    with says(tmp_path, decide) as server:
        model, env = await server.model(), Adder()
        async with model.trajectory("What is 2 + 3?") as t:
            run = await McpAgent(model.openai_client(), model.inference_name).run("What is 2 + 3?", env)
            t.reward = 1.0
        stored = server.stored(t.id)
    assert (run.answer, run.stopped) == ("It is 5.", "answer")
    assert [name for name, _ in env.asked] == ["add", "ad"]
    assert [reply.outcome for reply in run.replies] == ["ok", "tool_error"]
    events = stored.tool_events
    assert [(event.name, event.outcome, event.result) for event in events] == [
        ("add", "ok", "5 exactly"),
        ("ad", "tool_error", "there is no tool ad"),
    ]
    first, second = stored.completions
    assert first.created_at <= events[0].created_at <= events[1].created_at <= second.created_at
    asked = first.request.messages
    assert asked[0] == {"role": "system", "content": "Answer with the help of the tools.\n\nSums are made with add."}
    ids = [message["tool_call_id"] for message in second.request.messages if message["role"] == "tool"]
    assert ids == [event.tool_call_id for event in events]
    assert second.parent == first.id


@pytest.mark.parametrize(("turns", "calls", "stopped"), [(2, 16, "turns"), (9, 3, "calls")])
async def test_a_model_that_never_answers_is_stopped(tmp_path: Path, turns: int, calls: int, stopped: str) -> None:
    with says(tmp_path, lambda _: call("add", a=1, b=1)) as server:
        model, env = await server.model(), Adder()
        async with model.trajectory() as t:
            run = await McpAgent(model.openai_client(), model.inference_name, max_turns=turns, max_calls=calls).run("go", env)
            t.reward = 0.0
    assert (run.stopped, run.answer) == (stopped, "")
    assert len(env.asked) == min(turns, calls)


async def test_a_conversation_that_outgrows_the_context_ends_the_run_and_not_the_rollout(tmp_path: Path) -> None:
    with says(tmp_path, lambda _: "unused") as server:
        model = await server.model()
        async with model.trajectory() as t:
            run = await McpAgent(model.openai_client(), model.inference_name).run("x " * 100_000, Adder())
            t.reward = 0.0
    assert run.stopped == "context"


async def test_outside_of_a_trajectory_nothing_is_recorded_and_the_agent_works(tmp_path: Path) -> None:
    with says(tmp_path, lambda _: "Done.") as server:
        model = await server.model()
        run = await McpAgent(model.openai_client(), model.inference_name, system="").run("go", Adder())
    assert run.answer == "Done."
    assert [message["role"] for message in run.messages] == ["system", "user", "assistant"]


def test_an_agent_without_turns_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one turn"):
        McpAgent(None, "m/a", max_turns=0)  # type: ignore[arg-type]
