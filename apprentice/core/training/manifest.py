"""Lists of files with their hashes, and durable writes: what a checkpoint and a converted model are checked against.

Knows files and folders only; nothing of models, adapters or policies. A *manifest* is a JSON file at the root of a
folder that names every other file below it, with size and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def files_below(folder: Path) -> list[str]:
    """Relative POSIX paths of everything that is not a folder below `folder`, sorted, the manifest itself left out."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)


def write_manifest(folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Hash every file below `folder` and write the manifest beside them; `extra` keys are stored with it."""
    files = {name: {"size": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in files_below(folder)}
    write_durably(folder / MANIFEST, json.dumps({"format": _FORMAT, **(extra or {}), "files": files}, indent=1))


def read_manifest(folder: Path, fail: Callable[[str], Exception]) -> dict[str, Any]:
    """The manifest as written, its shape checked. `fail` turns a sentence's second half into the error to raise."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise fail(f"{MANIFEST} is missing") from error
    except (ValueError, OSError) as error:
        raise fail(f"{MANIFEST} cannot be read ({error})") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    whole = isinstance(files, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str) for entry in files.values()
    )
    if not whole or manifest.get("format") != _FORMAT:
        raise fail(f"{MANIFEST} does not have the expected form (format {_FORMAT} with a size and a sha256 for every file)")
    return manifest


def verify_manifest(folder: Path, fail: Callable[[str], Exception], *, contents: bool = True) -> dict[str, Any]:
    """Check every file below `folder` against the manifest and return it; `contents=False` compares names and sizes only.

    Raises what `fail` makes of the first difference: a missing, extra, resized or changed file, by name.
    """
    manifest = read_manifest(folder, fail)
    listed: dict[str, dict[str, Any]] = manifest["files"]
    present = set(files_below(folder))
    for name in sorted(present - listed.keys()):
        raise fail(f"{name} is not listed in {MANIFEST}")
    for name, entry in sorted(listed.items()):
        path = folder / name
        if name not in present or not path.is_file():
            raise fail(f"{name} is missing")
        if (size := path.stat().st_size) != entry["size"]:
            raise fail(f"{name} has {size} bytes instead of {entry['size']}")
        if contents and sha256_file(path) != entry["sha256"]:
            raise fail(f"{name} differs from its SHA-256 in {MANIFEST}")
    return manifest


def write_durably(path: Path, text: str) -> None:
    """Write a small text file so that after a crash either the old or the new content is there, never a part."""
    temporary = path.with_name(temporary_name(path.name))
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def temporary_name(name: str) -> str:
    """A name for a file or folder that is being written, from which `is_abandoned` can tell whether its writer still runs."""
    pid = os.getpid()
    return f".tmp-{name}-{pid}-{_started(pid)}"


def is_abandoned(path: Path) -> bool:
    """Whether a path named by `temporary_name` belongs to a process that is gone (killed, or the machine restarted)."""
    pid, _, started = path.name.rpartition("-")
    pid = pid.rpartition("-")[2]
    return path.name.startswith(".tmp-") and not (pid.isdigit() and started == str(_started(int(pid))))


def _started(pid: int) -> int | None:
    """What tells a process from a later one with the same id: when it began; None if there is none.

    On Linux in clock ticks since the machine started. psutil adds these to the wall clock's time of that start, so a
    clock that is set, or drifts over a second, would make of a running process another one.
    """
    if sys.platform == "linux":
        try:
            after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return None
        return int(after_name.split()[19])
    import psutil

    try:
        return round(psutil.Process(pid).create_time() * 100)
    except psutil.NoSuchProcess:
        return None


def sync_tree(folder: Path) -> None:
    """Force every file and folder below `folder`, and `folder` itself, onto the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries onto the disk, where the system can do that (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
