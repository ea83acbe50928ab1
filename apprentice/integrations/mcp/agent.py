"""A plain agent: ask the model, run the tools it calls, until it answers. The loop that anyone would write, over the gateway.

It knows no training. What it did is in the trajectory (the gateway records model calls, this loop tool events, in their
order) and in the `AgentRun` it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import JsonValue

from ...core.client.scope import TrajectoryScope, current_trajectory
from ...core.errors import InvalidRequest
from ...core.records import JsonObject
from .reply import ToolReply

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SYSTEM = "Answer with the help of the tools."
Stopped = Literal["answer", "turns", "calls", "context"]


class Environment(Protocol):
    """What the loop needs of an `McpEnvironment`."""

    @property
    def tools(self) -> list[JsonObject]: ...
    @property
    def instructions(self) -> str: ...
    async def call(self, function_name: str, arguments: JsonValue) -> ToolReply: ...


@dataclass(slots=True)
class AgentRun:
    """`answer` is empty unless the run ended with one; `stopped` says how it ended."""

    answer: str = ""
    replies: list[ToolReply] = field(default_factory=list[ToolReply])
    messages: list[JsonObject] = field(default_factory=list[JsonObject])
    stopped: Stopped = "turns"


class McpAgent:
    """`await McpAgent(client, model).run(task, env)`.

    `client`: an `AsyncOpenAI` (`model.openai_client()`); `model`: the name to put into requests. `max_turns`: model calls.
    `max_calls`: tool calls; beyond it the run ends. `sampling`: more arguments of each request, such as `temperature`.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        *,
        system: str = SYSTEM,
        max_turns: int = 6,
        max_calls: int = 16,
        max_tokens: int = 256,
        sampling: Mapping[str, Any] | None = None,  # Any: handed on to the client
    ) -> None:
        if max_turns < 1 or max_calls < 1:
            raise InvalidRequest(f"an agent needs at least one turn and one call, got max_turns={max_turns}, max_calls={max_calls}")
        self._client, self._model, self._system = client, model, system
        self._max_turns, self._max_calls = max_turns, max_calls
        self._options: dict[str, Any] = {"max_tokens": max_tokens, **(sampling or {})}

    async def run(self, task: str, env: Environment, trajectory: TrajectoryScope | None = None, **sampling: Any) -> AgentRun:
        """One task. Tool calls go into `trajectory`, else into the ambient one, if there is any."""
        scope = trajectory or current_trajectory()
        run = AgentRun(messages=[*system_messages(self._system, env.instructions), {"role": "user", "content": task}])
        for _ in range(self._max_turns):
            message = await self._ask(run.messages, env.tools, sampling)
            if message is None:
                run.stopped = "context"
                return run
            run.messages.append(message)
            calls = message.get("tool_calls")
            if not isinstance(calls, list) or not calls:
                run.answer, run.stopped = str(message.get("content") or ""), "answer"
                return run
            if len(run.replies) + len(calls) > self._max_calls:
                run.stopped = "calls"
                return run
            await self._execute(run, [call for call in calls if isinstance(call, dict)], env, scope)
        return run

    async def _ask(self, messages: list[JsonObject], tools: list[JsonObject], sampling: Mapping[str, Any]) -> JsonObject | None:
        """The assistant's message; None if the conversation no longer fits the model's context."""
        from openai import BadRequestError

        options: dict[str, Any] = {**self._options, **sampling, **({"tools": tools} if tools else {})}
        create: Any = self._client.chat.completions.create  # its overloads want literal types; the messages are plain JSON
        try:
            reply: Any = await create(model=self._model, messages=messages, **options)
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return reply.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)

    async def _execute(self, run: AgentRun, calls: list[JsonObject], env: Environment, scope: TrajectoryScope | None) -> None:
        """Run the calls of one message together (a session that cannot runs them one by one); results in the order asked."""
        asked: list[tuple[str, str, JsonValue]] = []
        for call in calls:
            function = call.get("function")
            named = function if isinstance(function, dict) else {}
            asked.append((str(call.get("id")), str(named.get("name")), named.get("arguments")))
        replies = await asyncio.gather(*(env.call(name, arguments) for _, name, arguments in asked))
        for (call_id, name, _), reply in zip(asked, replies, strict=True):
            named_reply = reply if reply.function else reply.named(name)
            run.replies.append(named_reply)
            run.messages.append({"role": "tool", "tool_call_id": call_id, "content": reply.text})
            if scope is not None:
                await scope.record_tool(named_reply.event(scope.id, call_id))


def system_messages(system: str, instructions: str) -> list[JsonObject]:
    """The system prompt with the servers' own instructions under it; none if both are empty."""
    text = "\n\n".join(part for part in (system, instructions) if part)
    return [{"role": "system", "content": text}] if text else []
