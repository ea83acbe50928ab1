"""An environment's tools in LangChain: told to a model as they are, recorded as our own loop records them, no failure an exception."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.messages import AIMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import JsonValue
from support import mcp_servers
from support.client_server import ClientServer, client_server
from support.tiny_models import tiny_tokenizer

from apprentice.core.errors import InvalidRequest
from apprentice.core.records import JsonObject, ToolEvent
from apprentice.integrations.mcp.agent import McpAgent
from apprentice.integrations.mcp.environment import McpEnvironment, SessionPool
from apprentice.integrations.mcp.langchain import langchain_tools
from apprentice.integrations.mcp.reply import ToolReply
from apprentice.integrations.mcp.spec import McpServer

TOKENIZER = tiny_tokenizer()
CALLS: list[JsonObject] = [{"expression": "6 * 7"}, {"expression": "1 / 0"}, {}]
"""A result, a failure of the tool, and wrong arguments."""


class Scripted:
    """A model that says the lines of a script, one a turn."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, *_: object) -> Sequence[int]:
        return [*TOKENIZER.encode(self.lines.pop(0), add_special_tokens=False), TOKENIZER.eos_token_id]


def script() -> list[str]:
    calls = [f"<tool_call>\n{json.dumps({'name': 'calculate', 'arguments': arguments})}\n</tool_call>" for arguments in CALLS]
    return [*calls, "It is 42."]


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, scripted: Scripted) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), scripted) as running:
        yield running


def spec(name: str) -> McpServer:
    argv = mcp_servers.argv(name) if name == "calculator" else mcp_servers.hostile(name)
    return McpServer(name=name, command=tuple(argv))  # type: ignore[call-arg]


def by_name(tools: Sequence[BaseTool], name: str) -> BaseTool:
    return next(tool for tool in tools if tool.name == name)


def asked(name: str, arguments: JsonObject, call_id: str = "call_1") -> ToolCall:
    return ToolCall(name=name, args=cast("dict[str, Any]", arguments), id=call_id, type="tool_call")


def facts(event: ToolEvent) -> tuple[Any, ...]:
    return event.name, event.arguments, event.outcome, event.result


class Deaf:
    """An environment whose one tool takes any arguments and says them."""

    tools: list[JsonObject] = [  # noqa: RUF012
        {"type": "function", "function": {"name": "say", "description": "", "parameters": {"type": "object", "properties": {}}}}
    ]

    async def call(self, function_name: str, arguments: JsonValue) -> ToolReply:
        return ToolReply("deaf", function_name, arguments, "ok", json.dumps(arguments, sort_keys=True), function=function_name)


async def test_a_tool_is_told_to_a_model_as_the_tool_set_tells_it() -> None:
    async with SessionPool([spec("calculator"), spec("plain")]) as pool, pool.environment() as env:
        tools = langchain_tools(env)
        assert [tool.name for tool in tools] == env.toolset.names
        for tool, entry in zip(tools, env.tools, strict=True):
            function = cast("JsonObject", entry["function"])
            assert (tool.description, tool.args_schema) == (function["description"], function["parameters"])
            assert convert_to_openai_tool(tool) == entry


async def test_calls_are_recorded_as_our_own_loop_records_them(server: ClientServer, scripted: Scripted) -> None:
    model = await server.model("by-langchain")
    async with SessionPool([spec("calculator")]) as pool:
        scripted.lines = script()
        async with pool.environment() as env, model.trajectory() as ours:
            run = await McpAgent(model.openai_client(), model.inference_name).run("What is 6 * 7?", env)
        scripted.lines = script()
        async with pool.environment() as env, model.trajectory() as theirs:
            said = await graph(model, langchain_tools(env))
    first, second = server.stored(ours.id), server.stored(theirs.id)
    assert [facts(event) for event in second.tool_events] == [facts(event) for event in first.tool_events]
    assert [event.outcome for event in second.tool_events] == ["ok", "tool_error", "tool_error"]
    assert [message.content for message in said] == [reply.text for reply in run.replies]
    assert [message.status for message in said] == ["success", "error", "error"]
    assert [event.tool_call_id for event in second.tool_events] == [message.tool_call_id for message in said]
    for completion, event in zip(second.completions, second.tool_events, strict=False):
        assert completion.created_at <= event.created_at
    assert [completion.parent for completion in second.completions[1:]] == [completion.id for completion in second.completions[:-1]]


async def graph(model: Any, tools: list[BaseTool]) -> list[ToolMessage]:
    """What every LangGraph agent does: the tools bound, a model's calls given to the tools whole, results sent back."""
    openai = model.openai_client()
    messages: list[Any] = [
        {"role": "system", "content": "Answer with the help of the tools."},
        {"role": "user", "content": "What is 6 * 7?"},
    ]
    results: list[ToolMessage] = []
    bound: list[Any] = [convert_to_openai_tool(tool) for tool in tools]
    while True:
        reply = await openai.chat.completions.create(model=model.inference_name, messages=messages, tools=bound, max_tokens=256)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return results
        calls = [asked(call.function.name, json.loads(call.function.arguments), call.id) for call in message.tool_calls]
        for call in AIMessage("", tool_calls=calls).tool_calls:
            result = await by_name(tools, call["name"]).ainvoke(call)
            results.append(result)
            messages.append({"role": "tool", "tool_call_id": result.tool_call_id, "content": result.content})


async def test_a_result_carries_the_whole_reply_and_its_call() -> None:
    async with SessionPool([spec("calculator")]) as pool, pool.environment() as env:
        (tool,) = langchain_tools(env)
        result = await tool.ainvoke(asked("calculate", {"expression": "6 * 7"}, "call_7"))
        bare = await tool.ainvoke({"expression": "6 * 7"})
    assert isinstance(result, ToolMessage)
    assert (result.content, result.name, result.tool_call_id, result.status) == ("42", "calculate", "call_7", "success")
    assert isinstance(result.artifact, ToolReply)
    assert (result.artifact.tool, result.artifact.arguments, result.artifact.outcome) == ("calculate", {"expression": "6 * 7"}, "ok")
    assert bare == "42"


async def test_a_server_that_is_lost_is_an_answer_like_any_other() -> None:
    async with SessionPool([spec("exits_mid_call")]) as pool, pool.environment() as env:
        tool = by_name(langchain_tools(env), "exit")
        result = await tool.ainvoke(asked("exit", {}))
        again = await tool.ainvoke(asked("exit", {}))
        text = await tool.ainvoke("no arguments at all")
    assert (result.status, result.artifact.outcome) == ("error", "server_lost")
    assert (again.status, again.artifact.outcome) == ("error", "server_lost")
    assert "'exits_mid_call'" in again.content
    assert text.startswith("The arguments must be a JSON object")


async def test_the_given_trajectory_goes_before_the_ambient_one_and_without_any_nothing_is_recorded(server: ClientServer) -> None:
    model = await server.model("scopes")
    env = cast("McpEnvironment", Deaf())
    async with model.trajectory() as outer, model.trajectory() as inner:
        (given,), (ambient,) = langchain_tools(env, outer), langchain_tools(env)
        await given.ainvoke(asked("say", {"n": 1}, "call_1"))
        await ambient.ainvoke(asked("say", {"n": 2}, "call_2"))
        await ambient.ainvoke({"n": 3})
    outside = await ambient.ainvoke(asked("say", {"n": 4}))
    assert outside.content == '{"n": 4}'
    assert [(event.tool_call_id, event.arguments) for event in server.stored(outer.id).tool_events] == [("call_1", {"n": 1})]
    found = [(event.tool_call_id, event.arguments) for event in server.stored(inner.id).tool_events]
    assert found == [("call_2", {"n": 2}), (None, {"n": 3})]


@pytest.mark.parametrize("name", ["self", "config", "run_manager", "callbacks", "tool_call_id", "arguments", "args", "kwargs", "type"])
async def test_an_argument_may_have_any_name(name: str) -> None:
    (tool,) = langchain_tools(cast("McpEnvironment", Deaf()))
    result = await tool.ainvoke(asked("say", {name: "x", "other": 1}))
    assert json.loads(result.content) == {name: "x", "other": 1}


def test_a_call_that_is_not_awaited_is_refused_in_one_sentence() -> None:
    (tool,) = langchain_tools(cast("McpEnvironment", Deaf()))
    with pytest.raises(InvalidRequest, match="'say' of an MCP session can only be awaited; use ainvoke"):
        tool.invoke(asked("say", {}))


def test_without_langchain_only_the_function_is_missing(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["langchain_core"] = None
import apprentice.integrations.mcp.agent, apprentice.integrations.mcp.environment, apprentice.integrations.mcp.session
try:
    from apprentice.integrations.mcp.langchain import langchain_tools
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    expected = "ConfigError: langchain_tools() needs the langchain-core package: pip install 'apprentice-rl[langgraph]'"
    assert done.stdout.strip() == expected
