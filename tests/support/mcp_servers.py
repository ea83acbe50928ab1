"""Real MCP servers for tests, each in an environment of its own, and the hostile ones that were written for them.

mcp_servers.argv("time") -> ["…/bin/mcp-server-time", "--local-timezone", "UTC"]
mcp_servers.argv("sqlite") holds "{workdir}", as the specs of servers do; command("sqlite", folder) has the folder in its place.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

HOSTILE = Path(__file__).resolve().parent / "hostile_servers"
_SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "setup_servers.py"


def _setup() -> ModuleType:
    name = "apprentice_setup_servers"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def argv(name: str, *start: str) -> list[str]:
    """How the server is started; it is installed on first use. The test is skipped where that needs Node and there is none."""
    setup = _setup()
    try:
        return setup.argv(name, *start)
    except setup.NotInstallable as error:
        if "node" not in str(error).lower() and "npm, and" not in str(error):
            raise
        pytest.skip(str(error))


def env(name: str) -> dict[str, str]:
    """The environment variables that the server needs; values may hold {workdir}."""
    return dict(_setup().RECIPES[name].env)


def command(name: str, workdir: Path, *start: str) -> tuple[list[str], dict[str, str]]:
    """Command line and variables with {workdir} filled in."""
    filled = [part.replace("{workdir}", str(workdir)) for part in argv(name, *start)]
    return filled, {key: value.replace("{workdir}", str(workdir)) for key, value in env(name).items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def everything_at(mode: str, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The real server-everything over HTTP, as `streamableHttp` or `sse`: its URL and process."""
    with _listening(argv("everything", mode), port) as process:
        yield f"http://127.0.0.1:{port}/{'sse' if mode == 'sse' else 'mcp'}", process


@contextmanager
def modern_at(port: int) -> Iterator[str]:
    """The URL of a server of the SDK's newest protocol."""
    with _listening([sys.executable, str(HOSTILE.parent / "modern_server.py"), str(port)], port):
        yield f"http://127.0.0.1:{port}/mcp"


@contextmanager
def _listening(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PORT": str(port)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def hostile(name: str, *arguments: str) -> list[str]:
    """The command line of `tests/support/hostile_servers/NAME.py`."""
    return [sys.executable, str(HOSTILE / f"{name}.py"), *arguments]
