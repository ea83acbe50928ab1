"""Answers what is no JSON and no UTF-8: from the start, or (with the argument `calls`) to tool calls."""

import sys

from rpc import Server, echo, tool

server = Server([tool("ask")], echo)
answer = server.answer


def garbage(message):
    if sys.argv[1:] == ["calls"] and message["method"] != "tools/call":
        answer(message)
    else:
        sys.stdout.buffer.write(b'\xff\xfe{{{ not json\n[1, 2]\n{"jsonrpc": "1.0"}\n')
        sys.stdout.flush()


server.answer = garbage
server.serve()
