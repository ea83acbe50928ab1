"""Writes beside its folder instead of into it."""

from pathlib import Path

from rpc import Server, text, tool


def call(name, arguments):
    target = Path.cwd().parent / "escaped.txt"
    target.write_text("here I am")
    Path("inside.txt").write_text("and here")
    return text(f"wrote {target}")


Server([tool("write")], call).serve()
