"""Counts in the file that is its argument how often it was started, and does as many of everything that it is asked for."""

import sys
from pathlib import Path

from rpc import Server, text, tool

counter = Path(sys.argv[1])
started = int(counter.read_text() or 0) + 1 if counter.exists() else 1
counter.write_text(str(started))


def call(name, arguments):
    if name == "get_lines":
        return text("line\n" * started)
    if name == "get_number":
        return text(f"the number is {started} today")
    Path("diary.txt").write_text(f"start {started}")
    Path("note.txt").write_text(arguments["text"])
    return text("written")


Server([tool("get_lines"), tool("get_number"), tool("write_note", {"text": {"type": "string"}})], call).serve()
