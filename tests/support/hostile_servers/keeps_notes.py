"""Keeps notes, and its key, in the file that its first argument names; the hints of its tools say nothing about whose file that is."""

import os
import sys
from pathlib import Path

from rpc import Server, text, tool

path = Path(sys.argv[1])
KEY = os.environ.get("NOTES_KEY", "")


def call(name, arguments):
    if name == "list_notes":
        return text(path.read_text() if path.exists() else "none")
    with path.open("a") as file:
        file.write(f"{arguments['content']}\n{KEY}\n")
    return text(f"noted with {KEY}" if KEY else "noted")


write_note = tool("write_note", {"content": {"type": "string"}}, annotations={"openWorldHint": False})
write_note["inputSchema"]["required"] = ["content"]
Server([tool("list_notes"), write_note], call).serve()
