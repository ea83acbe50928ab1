"""Installs the real MCP servers that tests, benchmarks and the demo use: standard library only, nothing if they are there.

Usage: python3 tools/setup_servers.py [NAME ...]    prints how each is started, one shell line per server; without a name all

Every server has an environment of its own (servers need other versions of the MCP SDK than Apprentice does), outside the
checkout, in ~/.cache/apprentice/servers or $APPRENTICE_SERVERS; the folder's name holds a hash of what is pinned here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

READY = ".apprentice-ready"


class NotInstallable(Exception):
    """A server cannot be installed on this machine; the message is one sentence."""


@dataclass(frozen=True)
class Recipe:
    """`start` and `env` may hold {workdir}: a private folder of whoever starts the server."""

    kind: str
    """`pip` or `npm`."""
    packages: tuple[str, ...]
    entry: str
    """The executable in the environment (pip), or the script that Node runs (npm)."""
    start: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        runtime = f"python {platform.python_version()}" if self.kind == "pip" else "node"
        digest = hashlib.sha256("\n".join((self.kind, runtime, *self.packages)).encode()).hexdigest()[:12]
        return servers_folder() / f"{name}-{digest}"


def _npm(package: str, version: str, *start: str, **env: str) -> Recipe:
    return Recipe("npm", (f"{package}@{version}",), f"node_modules/{package}/dist/index.js", start, env)


RECIPES: dict[str, Recipe] = {
    "time": Recipe("pip", ("mcp-server-time==2026.10.19", "mcp==2.3.0"), "mcp-server-time", ("--local-timezone", "UTC")),
    "sqlite": Recipe("pip", ("mcp-server-sqlite==2025.4.25", "mcp==1.30.0"), "mcp-server-sqlite", ("--db-path", "{workdir}/data.db")),
    "calculator": Recipe("pip", ("mcp-server-calculator==0.2.1", "mcp==1.30.0"), "mcp-server-calculator"),
    "filesystem": _npm("@modelcontextprotocol/server-filesystem", "2026.8.31", "{workdir}"),
    "memory": _npm("@modelcontextprotocol/server-memory", "2026.8.31", MEMORY_FILE_PATH="{workdir}/memory.jsonl"),
    "everything": _npm("@modelcontextprotocol/server-everything", "2026.8.31", "stdio"),
}


def servers_folder() -> Path:
    named = os.environ.get("APPRENTICE_SERVERS")
    return Path(named) if named else Path.home() / ".cache" / "apprentice" / "servers"


def argv(name: str, *start: str) -> list[str]:
    """How to start the server, installed if need be; `start` instead of its usual arguments."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise NotInstallable(f"there is no server {name!r} here; there are {', '.join(RECIPES)}")
    folder = install(name)
    program = [str(folder / "bin" / recipe.entry)] if recipe.kind == "pip" else [_node(), str(folder / recipe.entry)]
    return [*program, *(start or recipe.start)]


def install(name: str, recipe: Recipe | None = None) -> Path:
    """The folder of the installed server. Any number of processes may ask at once; one installs, the others wait."""
    recipe = recipe or RECIPES[name]
    folder = recipe.folder(name)
    if (folder / READY).exists():
        return folder
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not (folder / READY).exists():
            shutil.rmtree(folder, ignore_errors=True)  # an installation that was interrupted
            print(f"Installing {name} (once)", file=sys.stderr, flush=True)
            (_install_pip if recipe.kind == "pip" else _install_npm)(folder, recipe.packages)
            (folder / READY).touch()
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install_pip(folder: Path, packages: tuple[str, ...]) -> None:
    venv.create(folder, with_pip=True)
    _run([str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages])


def _install_npm(folder: Path, packages: tuple[str, ...]) -> None:
    npm = shutil.which("npm")
    _node()
    if npm is None:
        raise NotInstallable(f"{', '.join(packages)} needs npm, and there is none on PATH")
    folder.mkdir(parents=True)
    _run([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", *packages])


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise NotInstallable("this server needs Node 20 or newer, and there is no `node` on PATH")
    return node


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise NotInstallable(f"`{shlex.join(command)}` failed with exit code {done.returncode}; the lines above say why")


def main() -> None:
    try:
        for name in sys.argv[1:] or RECIPES:
            command = argv(name)  # first: it refuses what is unknown
            variables = [f"{key}={value}" for key, value in RECIPES[name].env.items()]
            print(shlex.join([*(["env", *variables] if variables else []), *command]))
    except NotInstallable as error:
        raise SystemExit(f"setup: {error}") from None


if __name__ == "__main__":
    main()
