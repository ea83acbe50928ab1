"""LoRA adapters on disk in plain PEFT format: `adapter_config.json` and `adapter_model.safetensors`.

Knows the format and nothing of models in memory. Written files are what `PeftModel.from_pretrained` reads; read files
may come from anywhere and are checked for being a LoRA adapter of the plain kind.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ..config import AdapterConfig
from ..errors import CheckpointCorrupt, ConfigError, InfrastructureError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MUST_BE_OFF = (
    *("use_dora", "use_rslora", "use_qalora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters"),
    *("trainable_token_indices", "exclude_modules", "layers_to_transform", "layers_pattern", "alora_invocation_tokens"),
)
"""PEFT options under which the same weights would mean another function than plain LoRA."""

_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to draw the first weights that leave the base model alone."""


def write_adapter(folder: Path, peft_config: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter. `parameters` under their PEFT file names; weights are stored in their own dtype.

    The list of targets is sorted, so that equal adapters give equal files. Raises InfrastructureError when the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(peft_config)
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    tensors = {key: parameter.detach().cpu().contiguous() for key, parameter in parameters.items()}
    try:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise InfrastructureError(f"the adapter could not be written to {folder} ({error})") from error


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """An adapter's options and weights (on the CPU). CheckpointCorrupt: missing or damaged; ConfigError: another kind of adapter."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _read_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise CheckpointCorrupt(f"the adapter folder {folder} has no {WEIGHTS_FILE}")
    try:
        return config, load_file(weights)
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(f"{weights} is damaged or cut short ({error})") from error


def _read_config(folder: Path) -> AdapterConfig:
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"the adapter folder {folder} has no {CONFIG_FILE}") from error
    except (ValueError, OSError) as error:
        raise CheckpointCorrupt(f"{path} is not readable JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(f"the adapter in {folder} must be a LoRA adapter (peft_type LORA), got {kind}")
    if raw.get("bias", "none") != "none":
        raise ConfigError(f"the adapter in {folder} trains biases (bias={raw['bias']}), which is not supported")
    for option in _MUST_BE_OFF:
        if raw.get(option):
            raise ConfigError(f"the adapter in {folder} uses PEFT's option {option}, which is not supported")
    if raw.get("init_lora_weights") not in _PLAIN_INITS:
        raise ConfigError(
            f"the adapter in {folder} was made with init_lora_weights={raw['init_lora_weights']!r}, which changes the base weights"
        )
    targets = raw.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(f"the adapter in {folder} names its target_modules by a pattern ('{targets}'), expected a list of names")
    try:
        return AdapterConfig(
            rank=raw.get("r", 8),
            alpha=raw.get("lora_alpha", 8),
            dropout=raw.get("lora_dropout", 0.0),
            target_modules="all-linear" if targets == "all-linear" else tuple(targets or ()),
        )
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{path} holds values that no LoRA adapter can have ({_first(error)})") from error


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return f"{detail['loc'][0]}: {detail['msg']}" if detail["loc"] else detail["msg"]
    return str(error)
