"""A small honest MCP server over stdio on the standard library, for scripts that are honest in all but one thing.

Not the SDK: it would not misbehave. It speaks the handshake protocol (2025-06-18) and knows no method that it need not know.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

PROTOCOL = "2025-06-18"
Json = dict[str, Any]
Handler = Callable[[Json], Any]


def write(message: Json) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read() -> Json | None:
    """The next message; None at the end of input."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def text(value: str, **more: Any) -> Json:
    return {"content": [{"type": "text", "text": value}], **more}


def tool(name: str, properties: Json | None = None, **more: Any) -> Json:
    schema = {"type": "object", "properties": properties or {}}
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema, **more}


class Server:
    """`call(name, arguments)` returns a result. Other methods are answered by `methods`, which a script may change."""

    def __init__(self, tools: list[Json], call: Callable[[str, Json], Any]) -> None:
        self.tools = tools
        self.call = call
        self.methods: dict[str, Handler] = {
            "initialize": lambda params: {
                "protocolVersion": PROTOCOL,
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "hostile", "version": "1"},
            },
            "ping": lambda params: {},
            "tools/list": lambda params: {"tools": self.tools},
            "tools/call": lambda params: self.call(params["name"], params.get("arguments") or {}),
        }

    def serve(self) -> None:
        while (message := read()) is not None:
            if "id" in message and "method" in message:
                self.answer(message)

    def answer(self, message: Json) -> None:
        handler = self.methods.get(message["method"])
        if handler is None:
            write({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "Method not found"}})
        else:
            write({"jsonrpc": "2.0", "id": message["id"], "result": handler(message.get("params") or {})})


def echo(name: str, arguments: Json) -> Json:
    return text(f"{name} {json.dumps(arguments, sort_keys=True)}")


def note(value: str) -> None:
    """Append a line to the file that $NOTES names, for the test to read."""
    with open(os.environ["NOTES"], "a") as file:
        file.write(value + "\n")
