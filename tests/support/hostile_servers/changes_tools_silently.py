"""Drops the tool `first` once it was called, lists `second` in its place, and tells nobody. The argument is the protocol it speaks."""

import sys

from rpc import Server, echo, text, tool, write

modern = sys.argv[1] >= "2026"
hints = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"} if modern else {}
server = Server([tool("first"), tool("lamp")], echo)
if modern:
    server.methods["server/discover"] = lambda params: {"supportedVersions": [sys.argv[1]], "capabilities": {"tools": {}}, **hints}
server.methods["tools/list"] = lambda params: {"tools": server.tools, **hints}
answer = server.answer


def call(name, arguments):
    if name == "lamp":
        return text("Tool not found: a lamp needs no tool", **({"resultType": "complete"} if modern else {}))
    if name not in {entry["name"] for entry in server.tools}:
        return text(f"Unknown tool: {name}", isError=True)
    server.tools = [tool("second"), tool("lamp")]
    return {**echo(name, arguments), **({"resultType": "complete"} if modern else {})}


def strict(message):
    name = (message.get("params") or {}).get("name")
    if modern and message["method"] == "tools/call" and name not in {entry["name"] for entry in server.tools}:
        write({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": f"Unknown tool: {name}"}})
    else:
        answer(message)


server.call = call
server.answer = strict
server.serve()
