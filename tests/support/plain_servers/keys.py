"""Values under keys."""

import json

from stored import failed, load, save, serve, text, tool


def call(name, key="", value=""):
    data = load({})
    if name == "set":
        save({**data, key: value})
        return text("OK")
    if name == "keys":
        return text(json.dumps(sorted(data)))
    return text(data[key]) if key in data else failed(f"no such key: {key}")


serve(
    [
        tool("set", "Set a key to a value.", key="string", value="string"),
        tool("get", "Get the value of a key.", key="string"),
        tool("keys", "All keys."),
    ],
    call,
)
