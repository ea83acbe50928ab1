"""Honest: echoes, fails as it should, refuses as a protocol error, counts, is slow on demand."""

import time

from rpc import Server, echo, text, tool, write

count = 0


def call(name, arguments):
    global count
    if name == "count":
        count += 1
        return text(str(count), structuredContent={"count": count})
    if name == "fail":
        return text("no such city", isError=True)
    if name == "slow":
        time.sleep(float(arguments.get("seconds", 1)))
        return text("done")
    if name == "progress":
        return progress(arguments)
    return echo(name, arguments)


def progress(arguments):
    for step in (1, 2):
        write({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": step, "total": 2}})
    return text("progressed")


token = None
server = Server([tool("echo", {"value": {"type": "string"}}), tool("count"), tool("fail"), tool("slow"), tool("progress")], call)
plain_call = server.methods["tools/call"]


def with_token(params):
    global token
    token = (params.get("_meta") or {}).get("progressToken")
    return plain_call(params)


server.methods["tools/call"] = with_token
answer = server.answer


def refuse(message):
    if message["method"] == "tools/call" and message["params"]["name"] == "refuse":
        write({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": "Unknown tool: refuse", "data": {"known": 5}}})
    elif message["method"] == "tools/call" and message["params"]["name"] == "grow":
        server.tools.append(tool(f"tool_{len(server.tools)}"))
        write({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        write({"jsonrpc": "2.0", "id": message["id"], "result": text("grown")})
    else:
        answer(message)


server.answer = refuse
server.serve()
