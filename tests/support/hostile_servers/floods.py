"""One result of 32 MB."""

from rpc import Server, text, tool

Server([tool("flood")], lambda name, arguments: text("x" * 32_000_000)).serve()
