"""A server of the newest protocol over HTTP, as the SDK makes them: python modern_server.py PORT."""

import sys

from mcp.server import MCPServer

server = MCPServer("modern")


@server.tool()
def echo(message: str) -> str:
    return message


server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
