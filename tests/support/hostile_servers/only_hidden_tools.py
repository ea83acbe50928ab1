"""Has tools, none of which a model may see."""

from rpc import Server, echo, tool

Server(
    [tool("panel", _meta={"ui": {"visibility": ["app"]}}), tool("research", execution={"taskSupport": "required"})],
    echo,
).serve()
