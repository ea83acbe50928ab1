"""Lists other tools after every call, with and without telling; drops the tool that was just called."""

from rpc import Server, echo, tool, write

server = Server([tool("first")], echo)


def call(name, arguments):
    if name not in {entry["name"] for entry in server.tools}:
        return {"content": [{"type": "text", "text": f"Unknown tool: {name}"}], "isError": True}
    server.tools = [tool("second")] if name == "first" else [tool("third", {"x": {"type": "integer"}})]
    write({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
    return echo(name, arguments)


server.call = call
server.serve()
