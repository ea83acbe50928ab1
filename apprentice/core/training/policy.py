"""One base model in memory, shared by sampler and trainer, with any number of named LoRA adapters on it.

The base weights exist once and are frozen. An adapter is a policy (or one of its versions); its name is free text and
mapped to a key that PEFT accepts. Whoever runs the model does so inside `using(name)`, which holds the lock. Knows
nothing of chat, engines, rewards or checkpoints' bookkeeping.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import AdapterConfig
from ..errors import ConfigError, Conflict, ModelRefused, UnknownModel
from .adapter_files import read_adapter, write_adapter
from .base_models import ResolvedBase, context_length_of
from .model_cache import first_line

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class _Adapter:
    key: str
    """PEFT's name of it. Never reused, all of one length, so that no key is a part of another."""
    config: AdapterConfig
    trainable: bool
    parameters: dict[str, nn.Parameter]
    """Under their names in the saved file, in model order."""


class HostedModel:
    """A causal language model with adapters. Build it with `load`; see the module's docstring."""

    def __init__(self, base: ResolvedBase, model: Any, tokenizer: Any) -> None:
        self.base = base
        self.model = model.requires_grad_(False).eval()
        """The plain Hugging Face causal LM. PEFT puts its layers into it, so this object stays the one to call."""
        self.tokenizer = tokenizer
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.context_length = context_length_of(model.config, tokenizer)
        self.lock = threading.RLock()
        """Whoever runs the model, or changes its adapters, holds it."""
        self._linear = _linear_modules(model)
        self._all_linear = _shortest_targets(model, self._linear)
        self._peft: Any = None
        self._adapters: dict[str, _Adapter] = {}
        self._made = 0
        self._in_use: list[tuple[str | None, bool]] = []
        self._layers: list[Any] = []
        """All of PEFT's LoRA layers in the model."""
        self._active: str | None = None
        self._dropout_on = False
        self._attentions: set[str] = set()
        """Attention implementations that transformers has accepted for this model."""

    @classmethod
    def load(cls, base: ResolvedBase, *, dtype: str | None = None, device: str | None = None) -> HostedModel:
        """Read weights and tokenizer. Default device: the GPU if there is one; default dtype: fp32 on CPU, bf16 on GPU.

        Raises ConfigError for an unknown dtype or device, ModelRefused when the weights do not fit the architecture.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place, chosen = placement(device, dtype)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                base.folder, dtype=chosen, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ModelRefused(
                f"base model '{base.name}' cannot be loaded from {base.folder}: {first_line(error)}", param="base_model"
            ) from error
        model, report = loaded
        if absent := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
            raise ModelRefused(f"base model '{base.name}' cannot be used: {len(absent)} weights are missing, first {absent[0]}")
        tokenizer = AutoTokenizer.from_pretrained(base.folder, local_files_only=True, trust_remote_code=False)
        return cls(base, model.to(place), tokenizer)

    def adapters(self) -> frozenset[str]:
        """Names of all adapters in memory."""
        with self.lock:
            return frozenset(self._adapters)

    def adapter_config(self, name: str) -> AdapterConfig:
        """What the adapter was made with. Raises UnknownModel."""
        return self._adapter(name).config

    def is_trainable(self, name: str) -> bool:
        """Whether `using(name)` gives gradients. Raises UnknownModel."""
        return self._adapter(name).trainable

    def add_adapter(self, name: str, config: AdapterConfig, seed: int, trainable: bool = True) -> None:
        """A fresh adapter that changes nothing yet: B is zero, A is Kaiming-uniform from `seed` alone (as PEFT draws it).

        Weights are fp32 (fp64 on an fp64 base). The global random state is left as it was. Raises Conflict when the
        name is taken, ConfigError when `target_modules` names no linear layer.
        """
        with self.lock:
            self._insert(name, config, trainable)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for key, parameter in self.adapter_parameters(name).items():
                    if ".lora_A." in key:
                        drawn = torch.empty(parameter.shape, dtype=torch.float32)
                        parameter.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))

    def load_adapter(self, name: str, folder: Path, trainable: bool = False) -> None:
        """Read a plain PEFT LoRA folder under a new name.

        Raises Conflict when the name is taken, CheckpointCorrupt when files are missing or damaged, ConfigError when the
        adapter does not fit this base model (rank, targets, shapes) or uses PEFT options that are not supported.
        """
        with self.lock:
            config, tensors = read_adapter(folder)
            self._insert(name, config, trainable)
            try:
                parameters = self.adapter_parameters(name)
                _check_fit(folder, parameters, tensors)
            except ConfigError:
                self.drop_adapter(name)
                raise
            with torch.no_grad():
                for key, parameter in parameters.items():
                    parameter.copy_(tensors[key])

    def save_adapter(self, name: str, folder: Path) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json`, loadable by `PeftModel.from_pretrained`."""
        with self.lock:
            adapter = self._adapter(name)
            write_adapter(folder, self._peft.peft_config[adapter.key], self.adapter_parameters(name))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter and free its weights. Raises UnknownModel, or Conflict while it is in use."""
        with self.lock:
            adapter = self._adapter(name)
            if any(name == used for used, _ in self._in_use):
                raise Conflict(f"adapter '{name}' is in use and cannot be dropped now")
            self._set_adapter(None)
            self._peft.base_model.set_adapter([])  # else PEFT picks another adapter and warns
            self._peft.delete_adapter(adapter.key)
            del self._adapters[name]
            self._restore()

    @contextmanager
    def using(self, name: str | None, *, dropout: bool = False) -> Iterator[Any]:
        """The causal LM with exactly this adapter active (None: base weights), the lock held.

        Gradients are on for this adapter's parameters if it is trainable, and for nothing else. `dropout=True` turns the
        adapter's own dropout on; all other modules stay in evaluation mode. May be nested in one thread: the outer
        choice is back afterwards. Raises UnknownModel.
        """
        with self.lock:
            if name is not None:
                self._adapter(name)
            self._in_use.append((name, dropout))
            try:
                self._activate(name, dropout)
                yield self.model
            finally:
                self._in_use.pop()
                if self._in_use:
                    self._activate(*self._in_use[-1])

    @contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """Run with another of transformers' registered attention implementations, the lock held; the old one is back after.

        Raises ConfigError when the model's code cannot switch, or the name is not registered.
        """
        with self.lock:
            config = self.model.config
            before = config._attn_implementation
            self._accept_attention(implementation)
            config._attn_implementation = implementation
            try:
                yield
            finally:
                config._attn_implementation = before

    def _accept_attention(self, implementation: str) -> None:
        """Have transformers check an implementation, once: it walks the whole model each time."""
        if implementation in self._attentions:
            return
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(implementation)
        except ValueError as error:
            raise ConfigError(f"'{implementation}' is not a registered attention implementation") from error
        reached, self.model.config._attn_implementation = self.model.config._attn_implementation, before
        if reached != implementation:
            raise ConfigError(f"{type(self.model).__name__} cannot switch its attention to '{implementation}'")
        self._attentions.add(implementation)

    def adapter_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The adapter's parameters in model order, under their names in the saved file (the same for every adapter)."""
        return dict(self._adapter(name).parameters)

    def trainable_parameters(self, name: str) -> int:
        """How many numbers training this adapter changes; 0 if it is frozen."""
        adapter = self._adapter(name)
        return sum(parameter.numel() for parameter in adapter.parameters.values()) if adapter.trainable else 0

    def target_modules(self) -> tuple[str, ...]:
        """Names that `AdapterConfig.target_modules` may list: the last parts of the linear layers' names, the head left out."""
        return tuple(sorted({name.rpartition(".")[2] for name in self._linear}))

    def _adapter(self, name: str) -> _Adapter:
        with self.lock:
            if name not in self._adapters:
                known = ", ".join(sorted(self._adapters)) or "none"
                raise UnknownModel(f"adapter '{name}' is not loaded; loaded: {known}")
            return self._adapters[name]

    def _insert(self, name: str, config: AdapterConfig, trainable: bool) -> None:
        """Put an adapter with arbitrary weights into the model, the active one and the global random state untouched."""
        from peft import LoraConfig, PeftModelForCausalLM

        if not name:
            raise ConfigError("an adapter's name must not be empty")
        if name in self._adapters:
            raise Conflict(f"an adapter named '{name}' is already loaded")
        peft_config = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # PEFT only divides it by the rank
            lora_dropout=config.dropout,
            target_modules=self._targets(config),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base.reference,
        )
        self._made += 1
        key = f"policy{self._made:08d}"
        with torch.random.fork_rng(devices=[]):
            if self._peft is None:
                self._peft = PeftModelForCausalLM(self.model, peft_config, adapter_name=key)
            else:
                self._peft.add_adapter(key, peft_config)
        infix = f".{key}."
        parameters = {path.replace(infix, "."): value for path, value in self._peft.named_parameters() if infix in path}
        self._adapters[name] = _Adapter(key, config, trainable, parameters)
        self._restore()

    def _targets(self, config: AdapterConfig) -> list[str]:
        """The full names of the modules meant. ConfigError for a name that matches no linear layer."""
        if config.target_modules == "all-linear":
            return self._all_linear
        for target in config.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in self._linear):
                raise ConfigError(
                    f"target_modules names '{target}', which is no linear layer of {self.base.name} that can be adapted; there are: "
                    f"{', '.join(self.target_modules())}",
                    param="target_modules",
                )
        if not config.target_modules:
            raise ConfigError("target_modules must be 'all-linear' or name at least one module", param="target_modules")
        return list(config.target_modules)

    def _restore(self) -> None:
        """After adapters came or went: set everything as the innermost `using` wants it, or off."""
        from peft.tuners.lora import LoraLayer

        self._layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        self.model.requires_grad_(False).eval()
        self._dropout_on = False
        self._set_adapter(None)
        self._activate(*(self._in_use[-1] if self._in_use else (None, False)))

    def _activate(self, name: str | None, dropout: bool) -> None:
        if dropout != self._dropout_on:
            for layer in self._layers:
                layer.lora_dropout.train(dropout)
            self._dropout_on = dropout
        if name != self._active:
            self._set_adapter(name)

    def _set_adapter(self, name: str | None) -> None:
        """Switch all layers. Sets the fields behind PEFT's `set_adapter` and `enable_adapters`, which walk the whole model
        (70 ms for 210 layers, against 1 ms here): the sampler switches within a decoding step."""
        before = self._adapters.get(self._active) if self._active is not None else None
        adapter = self._adapters[name] if name is not None else None
        for parameter in before.parameters.values() if before else ():
            parameter.requires_grad_(False)
        for parameter in adapter.parameters.values() if adapter else ():
            parameter.requires_grad_(adapter is not None and adapter.trainable)
        for layer in self._layers:
            layer._disable_adapters = adapter is None
            layer._active_adapter = [adapter.key] if adapter else []
        self._active = name


def placement(device: str | None = None, dtype: str | None = None) -> tuple[torch.device, torch.dtype]:
    """Where and in which precision a model runs, None being decided by the hardware. Raises ConfigError."""
    place = _device(device)
    chosen = _DTYPES.get(dtype) if dtype is not None else (torch.float32 if place.type == "cpu" else torch.bfloat16)
    if chosen is None:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got '{dtype}'", param="dtype")
    return place, chosen


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be 'cpu' or 'cuda', got '{device}'", param="device") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu' or 'cuda', got '{device}'", param="device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise ConfigError(f"device '{device}' was asked for, but torch sees {seen} GPU here", param="device")
    return place


def _linear_modules(model: Any) -> list[str]:
    """Full names of all linear layers in model order, the output head left out."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]


def _shortest_targets(model: Any, linear: list[str]) -> list[str]:
    """Last parts of the names where they pick out exactly the linear layers, as PEFT users write them; else the full names."""
    last_parts = {name.rpartition(".")[2] for name in linear}
    matched = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts]
    return sorted(last_parts) if matched == linear else linear


def _check_fit(folder: Path, parameters: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
    for key in sorted(tensors.keys() ^ parameters.keys()):
        side = "has a weight that this base model has no place for" if key in tensors else "lacks a weight of this base model"
        raise ConfigError(f"the adapter in {folder} {side}: {key}")
    for key, parameter in parameters.items():
        if tensors[key].shape != parameter.shape:
            raise ConfigError(
                f"the adapter in {folder} does not fit this base model: {key} has shape {tuple(tensors[key].shape)}, "
                f"expected {tuple(parameter.shape)}"
            )
        if not torch.isfinite(tensors[key]).all():
            raise ConfigError(f"the adapter in {folder} holds values that are not finite: {key}")
