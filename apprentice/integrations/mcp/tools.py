"""The tools of one or more servers as a model sees them: OpenAI functions under safe names that lead back to the tools.

Pure values: what a server sent, what the model is told. The raw schema stays beside the cleaned one, and arguments are
judged by the raw one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from pydantic import JsonValue

from ...core.records import JsonObject
from .schemas import parameters_of, violations

MAX_NAME = 64
CHARS_PER_TOKEN = 4
_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool as its server lists it. `input_schema` is raw."""

    server: str
    name: str
    description: str = ""
    input_schema: JsonObject = field(default_factory=dict[str, JsonValue])
    output_schema: JsonObject | None = None
    annotations: JsonObject = field(default_factory=dict[str, JsonValue])
    title: str | None = None
    hidden: str | None = None
    """Why no model may see this tool, if so."""

    @classmethod
    def from_listing(cls, server: str, entry: JsonObject) -> McpTool:
        """A tool from an entry of `tools/list`; whatever has a wrong type counts as absent."""
        title = entry.get("title")
        output = entry.get("outputSchema")
        return cls(
            server=server,
            name=_text(entry.get("name")),
            description=_text(entry.get("description")),
            input_schema=_object(entry.get("inputSchema")),
            output_schema=output if isinstance(output, dict) else None,
            annotations=_object(entry.get("annotations")),
            title=title if isinstance(title, str) else None,
            hidden=_why_hidden(entry),
        )

    @property
    def read_only(self) -> bool | None:
        """The server's own hint; None if it gives none."""
        hint = self.annotations.get("readOnlyHint")
        return hint if isinstance(hint, bool) else None

    @property
    def destructive(self) -> bool | None:
        """The server's own hint; None if it gives none."""
        hint = self.annotations.get("destructiveHint")
        return hint if isinstance(hint, bool) else None


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _why_hidden(entry: JsonObject) -> str | None:
    if _object(_object(entry.get("_meta")).get("ui")).get("visibility") == ["app"]:
        return "is meant for the host application, not for the model"
    if _object(entry.get("execution")).get("taskSupport") == "required":
        return "runs only as a task, which no client supports"
    return None


@dataclass(frozen=True, slots=True)
class ToolSet:
    """`functions` are entries of an OpenAI request's `tools`, in the servers' order."""

    functions: list[JsonObject]
    tools: tuple[McpTool, ...]
    """Tool by tool what `functions` show."""
    hidden: tuple[McpTool, ...] = ()

    @classmethod
    def build(cls, tools: Sequence[McpTool]) -> ToolSet:
        """Hidden tools are left out. Of two equal tools one is kept; two that differ under one name get two functions."""
        shown: list[McpTool] = []
        for tool in tools:
            if not tool.hidden and tool not in shown:
                shown.append(tool)
        names = function_names(shown)
        functions = [_function(name, tool) for name, tool in zip(names, shown, strict=True)]
        return cls(functions=functions, tools=tuple(shown), hidden=tuple(tool for tool in tools if tool.hidden))

    @property
    def names(self) -> list[str]:
        return [str(_object(entry["function"])["name"]) for entry in self.functions]

    def resolve(self, function_name: str) -> McpTool | None:
        """The tool that a model means by this name; None if there is none."""
        return next((tool for name, tool in zip(self.names, self.tools, strict=True) if name == function_name), None)

    def function_name(self, server: str, tool: str) -> str:
        """The name under which the model knows a server's tool; KeyError if it does not."""
        for name, candidate in zip(self.names, self.tools, strict=True):
            if (candidate.server, candidate.name) == (server, tool):
                return name
        raise KeyError(f"{server}/{tool}")

    @property
    def tokens(self) -> int:
        """About how many tokens the tool list costs in every prompt (characters / 4)."""
        functions = [_object(entry["function"]) for entry in self.functions]
        characters = sum(len(str(f["name"])) + len(str(f["description"])) + len(json.dumps(f["parameters"])) for f in functions)
        return -(-characters // CHARS_PER_TOKEN)

    @property
    def digest(self) -> str:
        """Changes with anything that a model is told about the tools; the order in which a server lists them is no change."""
        return hashlib.sha256("\n".join(sorted(map(_canonical, self.functions))).encode()).hexdigest()[:16]

    def violations(self, tool: McpTool, arguments: JsonValue) -> list[str]:
        """What is wrong with the arguments by the tool's raw schema, one sentence each; [] if that schema is itself wrong."""
        return violations(cast("JsonValue", tool.input_schema), arguments)


def _function(name: str, tool: McpTool) -> JsonObject:
    description = tool.description or tool.title or ""
    parameters = parameters_of(cast("JsonValue", tool.input_schema))
    return {"type": "function", "function": {"name": name, "description": description, "parameters": cast("JsonValue", parameters)}}


def function_names(tools: Sequence[McpTool]) -> list[str]:
    """A name of `[a-zA-Z0-9_-]{1,64}` for each tool, all different, and the same whatever the order of the tools.

    A tool keeps its own name where that is allowed and nobody else wants it; the server goes in front only if there are several.
    """
    prefixed = len({tool.server for tool in tools}) > 1
    full = [f"{tool.server}__{tool.name}" if prefixed else tool.name for tool in tools]
    safe = [_UNSAFE.sub("_", name) or "tool" for name in full]
    wanted = Counter(safe)
    taken = {name for name, cleaned in zip(full, safe, strict=True) if name == cleaned and len(name) <= MAX_NAME}
    names: list[str] = []
    for tool, name, cleaned in zip(tools, full, safe, strict=True):
        own = name == cleaned or wanted[cleaned] == 1
        if own and len(cleaned) <= MAX_NAME and cleaned not in names:
            names.append(cleaned)
        else:
            names.append(_hashed(tool, cleaned, {*names, *taken}))
    return names


def _hashed(tool: McpTool, cleaned: str, taken: set[str]) -> str:
    for attempt in range(len(taken) + 1):
        key = _canonical([tool.server, tool.name, *([attempt] if attempt else [])])
        suffix = hashlib.sha256(key.encode()).hexdigest()[:8]
        name = f"{cleaned[: MAX_NAME - len(suffix) - 1]}_{suffix}"
        if name not in taken:
            return name
    raise AssertionError("unreachable: more names than were taken have been tried")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
