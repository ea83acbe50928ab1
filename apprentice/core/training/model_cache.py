"""The cache of converted base models: a GGUF file becomes a Hugging Face folder once, whoever asks first.

    <cache>/<file stem>-<first 16 digits of its SHA-256>/   config, tokenizer, safetensors, manifest.json
    <cache>/hashes/<…>.json                                 remembered SHA-256 of files outside the cache, by size and time

Knows files, locks and how to convert; whether a model can be used is `base_models`' question. Two processes that ask at
once convert once (file lock); a converted folder appears whole or not at all (rename), and one that no longer matches
its manifest is converted again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DeadlineExceeded, ModelRefused
from .manifest import MANIFEST, sha256_file, sync_tree, temporary_name, verify_manifest, write_durably, write_manifest

_LOCK_SECONDS = 1800.0
_log = logging.getLogger(__name__)


def default_cache() -> Path:
    """`$APPRENTICE_HOME/models`, else `~/.cache/apprentice/models`."""
    home = os.environ.get("APPRENTICE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "apprentice") / "models"


def prepare_cache(cache: Path) -> None:
    """Create the cache folders; ConfigError if that is not possible."""
    try:
        (cache / "hashes").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the model cache {cache} cannot be created ({error}): set APPRENTICE_HOME to a writable folder") from error


def remembered_hash(path: Path, cache: Path) -> str:
    """SHA-256 of a file, computed again only when its size or modification time changed since the last call."""
    resolved = path.resolve()
    stat = resolved.stat()
    known = {"path": str(resolved), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    note = cache / "hashes" / f"{hashlib.sha256(str(resolved).encode()).hexdigest()[:32]}.json"
    try:
        stored: Any = json.loads(note.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        stored = None  # never hashed, or a note that does not parse: hash now
    if isinstance(stored, dict) and isinstance(stored.get("sha256"), str) and {key: stored.get(key) for key in known} == known:
        return stored["sha256"]
    sha256 = sha256_file(resolved)
    write_durably(note, json.dumps({**known, "sha256": sha256}))
    return sha256


def converted(gguf: Path, sha256: str, cache: Path) -> Path:
    """The Hugging Face folder made from a GGUF file with this hash; converts it on the first call.

    The weights are kept in fp32, exactly as dequantized. Raises ModelRefused for a file that cannot be converted,
    DeadlineExceeded when another process has held the lock for half an hour.
    """
    from filelock import FileLock, Timeout

    folder = cache / f"{gguf.stem}-{sha256[:16]}"
    try:
        with FileLock(folder.with_name(f"{folder.name}.lock"), timeout=_LOCK_SECONDS):
            if not _usable(folder):
                _convert_into(gguf, sha256, folder)
    except Timeout as error:
        raise DeadlineExceeded(
            f"another process has been converting {gguf.name} for {_LOCK_SECONDS:.0f} s: end it and try again"
        ) from error
    return folder


def verify_converted(folder: Path) -> None:
    """Hash every file of a converted folder against its manifest; ModelRefused names the first that differs."""
    verify_manifest(folder, lambda what: ModelRefused(f"the converted model in {folder} is damaged: {what}"))


def _usable(folder: Path) -> bool:
    """Whether the folder is there and whole: names and sizes always, contents when a file is newer than the manifest."""
    if not folder.exists():
        return False
    manifest = folder / MANIFEST
    touched = manifest.exists() and any(
        path.stat().st_mtime_ns > manifest.stat().st_mtime_ns for path in folder.iterdir() if path != manifest
    )
    try:
        verify_manifest(folder, lambda what: ModelRefused(what), contents=touched)
    except ModelRefused as error:
        _log.warning("the converted model in %s is damaged (%s) and is converted again", folder, error)
        return False
    return True


def _convert_into(gguf: Path, sha256: str, folder: Path) -> None:
    for stale in folder.parent.glob(f".tmp-{folder.name}-*"):
        shutil.rmtree(stale)
    temporary = folder.parent / temporary_name(folder.name)
    temporary.mkdir()
    try:
        _convert(gguf, temporary)
        sync_tree(temporary)
        write_manifest(temporary, {"source_sha256": sha256})
        if folder.exists():
            shutil.rmtree(folder)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    except Exception as error:
        raise ModelRefused(f"the GGUF file {gguf} cannot be read: {first_line(error)}") from error
    config: Any = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    try:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise ConfigError(f"the converted model cannot be written to {folder.parent} ({error})") from error


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or the error's class where there is none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
