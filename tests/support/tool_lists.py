"""Tool lists that no server has: for tests of what is guessed from names, types and descriptions."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from apprentice.integrations.mcp.explore import Exploration
from apprentice.integrations.mcp.kinds import shape_of
from apprentice.integrations.mcp.tools import McpTool, ToolSet

TEXT: dict[str, Any] = {"type": "string"}


def tool(name: str, description: str = "", hints: dict[str, JsonValue] | None = None, /, **properties: dict[str, Any]) -> McpTool:
    """A tool all of whose parameters are required, except those whose schema says `"optional": True`."""
    required = [key for key, schema in properties.items() if not schema.get("optional")]
    plain = {key: {k: v for k, v in schema.items() if k != "optional"} for key, schema in properties.items()}
    return McpTool("s", name, description, {"type": "object", "properties": plain, "required": required}, annotations=hints or {})


CLOCK = (
    tool("now_in", "Current time of a place", {"readOnlyHint": True}, tz={"type": "string", "description": "IANA name"}),
    tool(
        "translate_time",
        "Between zones",
        {"readOnlyHint": True},
        from_timezone=TEXT,
        to_timezone=TEXT,
        time={"type": "string", "description": "HH:MM"},
    ),
)
NOTES = (
    tool("save_note", "Writes a file", path=TEXT, content=TEXT),
    tool("read_note", "Reads a note file", path=TEXT),
    tool("list_folder", "Files of a directory", directory=TEXT),
    tool("make_directory", "Makes a directory", directory=TEXT),
    tool("rename_file", "Renames a file", source=TEXT, destination=TEXT),
    tool("delete_note", "Deletes a note file", path=TEXT),
)
DATABASE = (
    tool("run_select", "Run a SELECT", query={"type": "string", "description": "SQL SELECT"}),
    tool("modify", "Execute INSERT, UPDATE or DELETE SQL", sql={"type": "string", "description": "SQL"}),
    tool("new_table", "CREATE TABLE statement", sql={"type": "string", "description": "CREATE TABLE SQL"}),
    tool("list_tables", "All tables"),
    tool("describe_table", "Columns of a table", table_name=TEXT),
)
PEOPLE = (
    tool(
        "create_people",
        "Adds people",
        people={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": TEXT, "type": TEXT, "notes": {"type": "array", "items": TEXT}},
                "required": ["name", "type", "notes"],
            },
        },
    ),
    tool("add_remark", "Adds a remark", name=TEXT, remark={"type": "string", "description": "x"}, note=TEXT),
    tool("find_people", "Searches people", query=TEXT),
    tool("show_people", "Shows people", names={"type": "array", "items": TEXT}),
    tool("remove_people", "Removes people", {"destructiveHint": True}, names={"type": "array", "items": TEXT}),
)
MISCELLANEOUS = (
    tool(
        "get_forecast",
        "Weather",
        city={"type": "string", "enum": ["Oslo", "Lima", "Rome", "Cairo", "Perth", "Quito"]},
        days={"type": "integer", "minimum": 1, "maximum": 9},
    ),
    tool("convert_money", "Currency", amount={"type": "number"}, from_currency=TEXT, to_currency=TEXT),
    tool("calculate", "Evaluates", expression=TEXT),
    tool("get_sum", "Adds", a={"type": "number"}, b={"type": "number"}),
    tool("send_mail", "Sends", to={"type": "string", "format": "email"}, body=TEXT),
)
LISTS: dict[str, tuple[McpTool, ...]] = {
    "clock": CLOCK,
    "notes": NOTES,
    "database": DATABASE,
    "people": PEOPLE,
    "miscellaneous": MISCELLANEOUS,
}


def exploration_of(tools: tuple[McpTool, ...]) -> Exploration:
    """As after exploring a private, empty server."""
    toolset = ToolSet.build(tools)
    shapes = tuple(shape_of(name, item) for name, item in zip(toolset.names, toolset.tools, strict=True))
    return Exploration(shapes=shapes, values={"folder": ["."]}, changing=frozenset(s.function for s in shapes if not s.reads))
