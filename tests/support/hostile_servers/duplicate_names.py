"""Two tools of one name with other descriptions, and names that no function may have."""

from rpc import Server, echo, tool

go_south = {**tool("go"), "description": "Goes south."}
Server([tool("go"), go_south, tool("a.b"), tool("a_b"), tool("x" * 90), tool("")], echo).serve()
