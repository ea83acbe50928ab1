"""Results of forms that no protocol has."""

from rpc import Server, tool

RESULTS = {
    "string": {"content": "just text"},
    "absent": {},
    "unknown": {"content": [{"type": "hologram", "beam": 1}, {"type": "text", "text": "and text"}]},
    "null": {"content": None},
    "list": {"content": ["a", {"type": "text"}]},
}
Server([tool(name) for name in RESULTS], lambda name, arguments: RESULTS[name]).serve()
