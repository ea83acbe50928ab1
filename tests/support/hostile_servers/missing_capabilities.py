"""Answers initialize without capabilities."""

from rpc import PROTOCOL, Server, echo, tool

server = Server([tool("echo")], echo)
server.methods["initialize"] = lambda params: {"protocolVersion": PROTOCOL, "serverInfo": {"name": "bare", "version": "0"}}
server.serve()
