"""Reads everything and answers nothing: from the start, or (with the argument `calls`) only to tool calls."""

import sys

from rpc import Server, echo, tool

server = Server([tool("ask")], echo)
answer = server.answer


def silent(message):
    if sys.argv[1:] == ["calls"] and message["method"] != "tools/call":
        answer(message)


server.answer = silent
server.serve()
