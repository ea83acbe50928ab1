"""What one tool call came to: the one value that sessions give and agents, checks and reports read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from pydantic import JsonValue

from ...core.records import ToolEvent, ToolOutcome

OK: ToolOutcome = "ok"


@dataclass(frozen=True, slots=True)
class ToolReply:
    """`text` is what the model is shown (cut in the middle if it is long), `full_text` all of it. Nothing a server does is an exception."""

    server: str
    tool: str
    """The server's own name of the tool, or what the model called where there is no such tool."""
    arguments: JsonValue
    outcome: ToolOutcome
    text: str
    full_text: str = ""
    structured: JsonValue = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """Oddities that did not stop the call: arguments against the schema, a result the SDK would have refused, …"""
    function: str = ""
    """The name under which the model knows the tool."""

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def truncated(self) -> bool:
        return bool(self.full_text) and self.full_text != self.text

    def named(self, function: str) -> ToolReply:
        return replace(self, function=function)

    def event(self, trajectory_id: str, tool_call_id: str | None = None) -> ToolEvent:
        """The record of this call in a trajectory; it keeps the whole text."""
        return ToolEvent(
            trajectory_id=trajectory_id,
            tool_call_id=tool_call_id,
            name=self.function or self.tool,
            arguments=_read(self.arguments),
            result=self.full_text or self.text,
            outcome=self.outcome,
            seconds=self.seconds,
        )


def _read(arguments: JsonValue) -> JsonValue:
    """Arguments as an object, also where a model's JSON text came no further; what is none stays as it was written."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value: JsonValue = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
