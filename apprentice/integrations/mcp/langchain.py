"""An environment's tools for LangChain and LangGraph: the same names, descriptions and schemas, the same records as `McpAgent`'s.

Only this module of the package needs langchain-core, and it must not know LangGraph: agents and graphs take the tools as any others.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import PrivateAttr

from ...core.client.scope import TrajectoryScope, current_trajectory
from ...core.errors import ConfigError, InvalidRequest
from ...core.records import JsonObject
from .environment import McpEnvironment
from .reply import ToolReply

try:
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import BaseTool
except ModuleNotFoundError as cause:
    raise ConfigError("langchain_tools() needs the langchain-core package: pip install 'apprentice-rl[langgraph]'") from cause


def langchain_tools(env: McpEnvironment, trajectory: TrajectoryScope | None = None) -> list[BaseTool]:
    """The environment's tools, for `create_agent`, `ToolNode` or `bind_tools`. They live as long as the environment.

    Calls are asynchronous. Each goes into `trajectory`, else into the one it is made in, if there is any, before its result is
    given. A call that fails is a `ToolMessage` with `status="error"`, and never an exception; `artifact` is the `ToolReply`.
    """
    return [_Tool.of(env, cast("JsonObject", entry["function"]), trajectory) for entry in env.tools]


class _Tool(BaseTool):
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    _env: McpEnvironment = PrivateAttr()
    _trajectory: TrajectoryScope | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, env: McpEnvironment, function: JsonObject, trajectory: TrajectoryScope | None) -> _Tool:
        tool = cls(name=str(function["name"]), description=str(function["description"]), args_schema=cast("Any", function["parameters"]))
        tool._env, tool._trajectory = env, trajectory
        return tool

    def _to_args_and_kwargs(self, tool_input: str | dict[str, Any], tool_call_id: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As they came, not as keywords: a server's argument may be called `self` or `config`, and a JSON schema gets no injected id.
        return (tool_input, tool_call_id), {}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidRequest(
            f"the tool {self.name!r} of an MCP session can only be awaited; use ainvoke or astream, of the graph or agent too"
        )

    async def _arun(self, arguments: Any, tool_call_id: str | None) -> tuple[ToolMessage | str, ToolReply]:
        reply = await self._env.call(self.name, arguments)
        scope = self._trajectory or current_trajectory()
        if scope is not None:
            await scope.record_tool(reply.event(scope.id, tool_call_id))
        if tool_call_id is None:  # a call by hand, with bare arguments
            return reply.text, reply
        status = "success" if reply.ok else "error"
        return ToolMessage(reply.text, tool_call_id=tool_call_id, name=self.name, status=status, artifact=reply), reply
