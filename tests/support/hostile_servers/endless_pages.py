"""A tool list without an end: every page has a next one, the cursor always the same (or, with `new`, always another)."""

import sys

from rpc import Server, echo, tool

server = Server([], echo)
page = 0


def tools(params):
    global page
    page += 1
    return {"tools": [tool(f"tool_{page}")], "nextCursor": f"page-{page}" if sys.argv[1:] == ["new"] else "again"}


server.methods["tools/list"] = tools
server.serve()
