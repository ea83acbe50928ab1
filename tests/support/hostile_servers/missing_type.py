"""Tool schemas without `type: object`, without properties, or of no schema at all."""

from rpc import Server, echo

TOOLS = [
    {"name": "untyped", "inputSchema": {"properties": {"x": {"type": "integer"}}}},
    {"name": "empty", "inputSchema": {}},
    {"name": "absent"},
    {"name": "null", "inputSchema": None, "description": None},
]
Server(TOOLS, echo).serve()
