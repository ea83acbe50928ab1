"""Which room may import which: DESIGN section 2, checked on the syntax trees and on a real import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "apprentice"
MACHINE_LEARNING = ("torch", "transformers", "peft", "trl", "vllm")
SERVER = "apprentice.core.server"
CORE_PUBLIC = tuple(f"apprentice.core.{name}" for name in ("records", "errors", "config", "wire", "client", "tracking"))

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "core": ("apprentice.integrations", "apprentice.ruler", "apprentice.autorl"),
    "core/client": (*MACHINE_LEARNING, SERVER, "apprentice.core.engines", "apprentice.core.training"),
    "core/records.py": (*MACHINE_LEARNING, SERVER),
    "core/errors.py": (*MACHINE_LEARNING, SERVER),
    "core/config.py": (*MACHINE_LEARNING, SERVER),
    "core/wire.py": (*MACHINE_LEARNING, SERVER),
    "core/tracking": (*MACHINE_LEARNING, SERVER),
    "core/engines": (SERVER, "apprentice.core.client"),
    "core/training": (SERVER, "apprentice.core.engines", "apprentice.core.client"),
    "core/server": ("apprentice.core.client",),
    "ruler": (*MACHINE_LEARNING, SERVER, "apprentice.integrations", "apprentice.autorl"),
    "integrations": (*MACHINE_LEARNING, SERVER, "apprentice.ruler", "apprentice.autorl"),
    "integrations/langgraph": ("apprentice.integrations.mcp",),
    "integrations/mcp": ("apprentice.integrations.langgraph",),
}


def absolute_imports(source: str, package: list[str]) -> list[str]:
    """Every module that a source imports, anywhere in it, relative imports resolved; `from a import b` gives `a` and `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, (node.module or "").split("."))])
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return found


def imports_of(path: Path) -> list[str]:
    return absolute_imports(path.read_text(encoding="utf-8"), ["apprentice", *path.relative_to(PACKAGE).parent.parts])


def files_of(room: str) -> list[Path]:
    target = PACKAGE / room
    return [target] if target.suffix == ".py" else sorted(target.rglob("*.py"))


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_nothing_it_must_not_know(room: str) -> None:
    broken = [
        f"{path.relative_to(PACKAGE.parent)} imports {module}"
        for path in files_of(room)
        for module in imports_of(path)
        if any(module == banned or module.startswith(banned + ".") for banned in FORBIDDEN[room])
    ]
    assert broken == []


def test_the_rule_checker_sees_relative_and_nested_imports() -> None:
    source = "def f():\n    from ..server import app\n    from . import scope\n    import torch.nn\n"
    found = absolute_imports(source, ["apprentice", "core", "client"])
    assert {"apprentice.core.server", "apprentice.core.server.app", "apprentice.core.client.scope", "torch.nn"} <= set(found)


def test_the_public_names_load_only_the_thin_client() -> None:
    code = "import sys, apprentice as a; [getattr(a, n) for n in a.__all__]; print(','.join({name.split('.')[0] for name in sys.modules}))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip().split(","))
    heavy = {
        "torch",
        "transformers",
        "peft",
        "trl",
        "numpy",
        "openai",
        "fastapi",
        "uvicorn",
        "typer",
        "polars",
        "litellm",
        "langgraph",
    }
    assert loaded & heavy == set()
    assert {"httpx", "pydantic"} <= loaded
