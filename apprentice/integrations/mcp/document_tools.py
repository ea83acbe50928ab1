"""Tools made for a server's resources and prompts, so that a model which only knows tools can read them too."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from pydantic import JsonValue

from ...core.records import JsonObject
from .reply import ToolReply
from .results import cap_text
from .session import McpSession
from .tools import McpTool

Run = Callable[[McpSession, JsonObject], Awaitable[ToolReply]]
_READS: JsonObject = {"readOnlyHint": True}


async def document_tools(session: McpSession) -> list[tuple[McpTool, Run]]:
    """Two tools if the server has resources, two if it has prompts; none of them takes the name of a tool of its own."""
    made: list[tuple[McpTool, Run]] = []
    taken = {tool.name for tool in (*session.tools, *session.hidden)}

    def add(name: str, description: str, properties: JsonObject, run: Run, required: list[JsonValue]) -> None:
        free = name if name not in taken else f"{name}_of_server"
        schema: JsonObject = {"type": "object", "properties": properties, "required": required}
        made.append((McpTool(session.server.name, free, description, schema, annotations=_READS), run))

    if await session.list_resources():
        add("list_resources", "List the documents that can be read, with their URIs.", {}, _list_resources, [])
        uri: JsonObject = {"uri": {"type": "string", "description": "URI of the document"}}
        add("read_resource", "Read one document.", uri, _read_resource, ["uri"])
    if await session.list_prompts():
        add("list_prompts", "List the prepared prompts, with their arguments.", {}, _list_prompts, [])
        fields: JsonObject = {
            "name": {"type": "string", "description": "Name of the prompt"},
            "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
        }
        add("get_prompt", "Get the text of a prepared prompt.", fields, _get_prompt, ["name"])
    return made


async def _list_resources(session: McpSession, _: JsonObject) -> ToolReply:
    return _listing(
        session, "list_resources", [_some(item, "uri", "name", "description", "mimeType") for item in await session.list_resources()]
    )


async def _list_prompts(session: McpSession, _: JsonObject) -> ToolReply:
    return _listing(session, "list_prompts", [_some(item, "name", "description", "arguments") for item in await session.list_prompts()])


async def _read_resource(session: McpSession, arguments: JsonObject) -> ToolReply:
    return await session.read_resource(str(arguments["uri"]))


async def _get_prompt(session: McpSession, arguments: JsonObject) -> ToolReply:
    given = arguments.get("arguments")
    pairs = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()} if isinstance(given, dict) else {}
    return await session.get_prompt(str(arguments["name"]), pairs)


def _some(item: JsonObject, *keys: str) -> JsonObject:
    return {key: item[key] for key in keys if key in item}


def _listing(session: McpSession, tool: str, items: list[JsonObject]) -> ToolReply:
    text = json.dumps(items, ensure_ascii=False, indent=1)
    return ToolReply(session.server.name, tool, {}, "ok", cap_text(text), full_text=text)
