"""What the plain servers share: data in one JSON file of the folder they are given, and tools whose parameters are all required."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hostile_servers"))

import rpc  # pyright: ignore[reportMissingImports]

Json = dict[str, Any]


def load(default: Any) -> Any:
    path = Path(sys.argv[1]) / "data.json"
    return json.loads(path.read_text()) if path.exists() else default


def save(data: Any) -> None:
    (Path(sys.argv[1]) / "data.json").write_text(json.dumps(data))


def text(value: str) -> Json:
    return rpc.text(value)


def failed(why: str) -> Json:
    return rpc.text(why, isError=True)


def tool(name: str, description: str, **parameters: str) -> Json:
    """`parameters`: their JSON types by name."""
    properties = {name: {"type": kind} for name, kind in parameters.items()}
    return {
        "name": name,
        "description": description,
        "inputSchema": {"type": "object", "properties": properties, "required": [*properties]},
    }


def serve(tools: list[Json], call: Callable[..., Json]) -> None:
    rpc.Server(tools, lambda name, arguments: call(name, **arguments)).serve()
