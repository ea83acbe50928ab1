"""Asks the user back in the middle of a call and reports the answer."""

import json

from rpc import Server, read, text, tool, write

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "default": "Ada"}, "age": {"type": "integer"}}, "required": ["age"]}


def call(name, arguments):
    params = {"message": "Who are you?", "requestedSchema": SCHEMA}
    write({"jsonrpc": "2.0", "id": "ask-1", "method": "elicitation/create", "params": params})
    while (message := read()) is not None:
        if message.get("id") == "ask-1":
            return text(json.dumps(message.get("result") or message.get("error"), sort_keys=True))
    return text("nobody answered")


Server([tool("ask")], call).serve()
