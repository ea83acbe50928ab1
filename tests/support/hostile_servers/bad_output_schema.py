"""Output schemas that results do not keep: an array, a promise without structured content, a wrong type."""

from rpc import Server, text, tool

RESULTS = {
    "rows": text("[1, 2]", structuredContent=[1, 2]),
    "promised": text("no structure here"),
    "wrong": text("x", structuredContent={"n": "three"}),
}
SCHEMAS = {
    "rows": {"type": "array", "items": {"type": "integer"}},
    "promised": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "wrong": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
Server([tool(name, outputSchema=SCHEMAS[name]) for name in RESULTS], lambda name, arguments: RESULTS[name]).serve()
