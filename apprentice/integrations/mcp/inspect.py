"""What a server is, seen by connecting once: its tools and their cost, oddities, repairs, and how rollouts should be kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from ...core.client.progress import Progress, progress_of
from .environment import SessionPool
from .explore import endangered
from .schemas import schema_fault
from .spec import McpServer
from .tools import McpTool, ToolSet

if TYPE_CHECKING:
    from rich.console import RenderableType

WARN_TOKENS = 2000
"""A tool list from here on is worth cutting with --allow for a small model."""


@dataclass(frozen=True, slots=True)
class ToolFinding:
    function: str
    tool: McpTool
    tokens: int
    oddities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    server: McpServer
    protocol: str
    instructions: str
    tools: tuple[ToolFinding, ...]
    tokens: int
    resources: int
    prompts: int
    repairs: tuple[str, ...]
    advice: str


async def inspect_server(server: McpServer, *, progress: bool | Progress = False) -> Inspection:
    """Connect, list everything, close. Raises ToolServerError as any session does."""
    display = progress_of(progress)
    display.begin(f"Waiting for {server.name}, at most {server.connect_seconds:g} s", 0)
    try:
        return await _inspect(server)
    finally:
        display.end()


async def _inspect(server: McpServer) -> Inspection:
    async with SessionPool([server]) as pool, pool.environment() as env:
        session = env.sessions[server.name]
        findings = [
            ToolFinding(
                function=env.toolset.function_name(tool.server, tool.name),
                tool=tool,
                tokens=ToolSet.build([tool]).tokens,
                oddities=tuple(oddities(tool)),
            )
            for tool in session.tools
        ]
        return Inspection(
            server=server,
            protocol=session.protocol,
            instructions=session.instructions,
            tools=tuple(findings),
            tokens=env.toolset.tokens,
            resources=len(await session.list_resources()),
            prompts=len(await session.list_prompts()),
            repairs=tuple(session.repairs),
            advice=advice(server, session.tools),
        )


def oddities(tool: McpTool) -> list[str]:
    """What a model or a trainer may stumble over."""
    found: list[str] = []
    raw = tool.input_schema
    properties = raw.get("properties")
    parameters = properties if isinstance(properties, dict) else {}
    if not tool.description:
        found.append("no description")
    bare = [name for name, schema in parameters.items() if not (isinstance(schema, dict) and schema.get("description"))]
    if bare:
        found.append(f"undescribed: {', '.join(bare)}")
    if "$defs" in raw or "definitions" in raw:
        found.append("references")
    for name, schema in parameters.items():
        if isinstance(schema, dict) and "default" in schema and schema["default"] is None and schema.get("type") not in (None, "null"):
            found.append(f"default of {name} is null against its type")
    if fault := schema_fault(cast("JsonValue", raw)):
        found.append(f"{fault}, so arguments are not checked before a call")
    return found


def advice(server: McpServer, tools: tuple[McpTool, ...]) -> str:
    """How to isolate rollouts, as a sentence, and what a run would say against it."""
    danger = endangered(server, tools)
    refused = f"; as it is, scenarios and runs are refused, because {danger}" if danger else ""
    return f"{_kept_apart(server, tools)}{refused}"


def _kept_apart(server: McpServer, tools: tuple[McpTool, ...]) -> str:
    if server.url:
        return (
            "each rollout has a session of its own, but state that the server keeps for all sessions is shared: "
            "reset it by a setup call, or run the server from a command"
        )
    if tools and all(tool.read_only for tool in tools):
        return "all tools say that they only read: --isolation shared saves a process for every rollout"
    writers = [tool.name for tool in tools if tool.read_only is False]
    reason = f"{', '.join(writers[:3])} may change something" if writers else "the tools do not say whether they change anything"
    return (
        f"a process and a folder for each rollout (the default), because {reason}; --isolation shared only if you know that nothing is kept"
    )


def show_inspection(found: Inspection) -> RenderableType:
    """A table and some lines for a terminal."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    table = Table("tool", "parameters", "tokens", "reads only", "oddities", title=f"{found.server.name}: {len(found.tools)} tools")
    says = {True: "yes", False: "no", None: "?"}
    for finding in found.tools:
        properties = finding.tool.input_schema.get("properties")
        names = ", ".join(properties) if isinstance(properties, dict) else ""
        table.add_row(
            escape(finding.function),
            escape(names),
            str(finding.tokens),
            says[finding.tool.read_only],
            escape("; ".join(finding.oddities)),
        )
    lines = [
        f"protocol {found.protocol}; {found.resources} resources, {found.prompts} prompts; "
        f"instructions: {len(found.instructions)} characters",
        f"the tool list costs about {found.tokens} tokens in every prompt"
        + ("; a small model reads less with --allow" if found.tokens > WARN_TOKENS else ""),
        *(f"repaired: {repair}" for repair in found.repairs),
        f"isolation: {found.advice}",
    ]
    return Group(table, *(escape(line) for line in lines))
