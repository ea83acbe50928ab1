"""How much memory the activations of one forward and backward pass take, and how to stay under a bound.

Activations are what autograd keeps of a forward pass until backward. Two things make them smaller: fewer tokens in a pass,
which computes shared prefixes again in the next one, and *recomputing* layers (activation checkpointing, Chen et al. 2016,
arXiv 1604.06174), which keeps a layer's input alone and runs the layer again in backward. With frozen base weights a token
costs as much backward as forward, so recomputing every layer costs half of a pass on top (`ActivationCost.work`).

`measure` counts bytes on a small forest, `pack_within` cuts samples into forests that fit with the least work, and
`recomputing` makes a model run its first layers that way. The choice depends on samples, options and the count alone, so a
job that is run again makes it again. This module must not know losses, optimizers or adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from .forest import Forest, TokenSample, pack
from .logprobs import LOGITS_AT_ONCE

GIB = 2**30
CPU_BOUND = int(0.6 * GIB)
"""Default bound on CPU: the whole server then stays under 2.5 GB beside the KV cache, with a model of 135 million parameters."""
GPU_SHARE = 4
"""On a GPU the default bound is this part of its whole memory."""
BUDGETS_TRIED = 5
"""Numbers of recomputed layers for which a cut is tried, from all to none."""

HEAP_SPREAD = 2.6
"""What a pass takes of a heap that keeps its blocks, over its activations (measured: 2.3 to 2.5)."""
NEW_PAGES = 1.3
"""Time of a pass on CPU whose blocks are always new to the process, over one that recycles them (measured: 1.3 to 1.4)."""


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Bytes that a model keeps for backward: per token in one layer (mean), per token outside of layers, and so on."""

    layers: int
    layer: float
    layer_input: float
    """Per token: what stays of a recomputed layer."""
    outside: float
    """Per token: embeddings, the last norm, hidden states of the head."""
    head: float
    """Per predicting position: logits that are kept until backward; 0 for a head that does not keep them."""
    logits: float
    """Per predicting position: logits while they exist; a head makes at most `LOGITS_AT_ONCE` at a time if it keeps none."""

    def bytes(self, tokens: int, predictors: int, recomputed: int) -> float:
        """Estimated peak of a pass whose first `recomputed` layers run twice.

        Backward frees the last layers first, so a recomputed layer takes the place of one that is gone. One layer more
        stands for what a layer needs while it runs: results that are not kept, and gradients.
        """
        kept = max(self.layers - recomputed, min(self.layers, 1))
        per_token = self.outside + recomputed * self.layer_input + (kept + 1) * self.layer
        return tokens * per_token + predictors * self.head + self._passing_logits(predictors)

    def recomputed(self, tokens: int, predictors: int, bound: float) -> int:
        """The fewest layers to recompute so that a pass fits; all of them if nothing makes it fit."""
        fits = (count for count in range(self.layers) if self.bytes(tokens, predictors, count) <= bound)
        return next(fits, self.layers)

    def work(self, tokens: int, recomputed: int) -> float:
        """Computation in units of a token's forward and backward pass without recomputation."""
        return tokens * (1 + 0.5 * recomputed / max(self.layers, 1))

    def most_tokens(self, predictors_per_token: float, recomputed: int, bound: float) -> int:
        """Tokens that fit when so many layers are recomputed, at least 1."""
        per_token = (self.bytes(2**20, 0, recomputed) / 2**20) + predictors_per_token * self.head
        room = bound - self._passing_logits(2**20)
        return max(1, int(room / per_token))

    def _passing_logits(self, predictors: int) -> float:
        return min(predictors * self.logits, 2 * 4 * LOGITS_AT_ONCE)


@dataclass(frozen=True, slots=True)
class ActivationBound:
    """What a model costs and how many bytes a pass may take."""

    cost: ActivationCost
    bound: float
    on_heap: bool = True
    """Whether tensors lie in the C library's heap: on CPU."""

    def recomputed(self, forest: Forest) -> int:
        """Layers to recompute in a pass over this forest."""
        return self.cost.recomputed(forest.tokens, len(forest.predictors_U), self.bound)

    def bytes(self, forest: Forest) -> float:
        """Estimated peak of a pass over this forest; above the bound only where nothing makes it fit."""
        return self.cost.bytes(forest.tokens, len(forest.predictors_U), self.recomputed(forest))

    def lets_heap_recycle(self, forest: Forest) -> bool:
        """Whether a pass over this forest stays under the bound even in a heap that keeps its blocks (see `heap`)."""
        return self.on_heap and HEAP_SPREAD * self.bytes(forest) <= self.bound

    def work(self, forest: Forest) -> float:
        """Time of a pass with gradient in units of a token's, nothing recomputed and blocks recycled."""
        work = self.cost.work(forest.tokens, self.recomputed(forest))
        return work * NEW_PAGES if self.on_heap and not self.lets_heap_recycle(forest) else work

    def scoring_tokens(self, most: int) -> int:
        """Tokens of a pass without gradient, which holds no more than one layer's activations at a time, up to `most`."""
        per_token = self.cost.outside + 2 * self.cost.layer
        return max(1, min(most, int(self.bound / max(per_token, 1.0))))


def default_bound(device: torch.device) -> float:
    """Bytes for activations where the options name none."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GPU_SHARE
    return CPU_BOUND


def pack_within(samples: Sequence[TokenSample], most_tokens: int, memory: ActivationBound) -> list[Forest]:
    """Cut samples into forests of at most `most_tokens` tokens that fit the bound, with the least estimated work.

    Tries the cuts that fit when all, three quarters, … or none of the layers are recomputed, and the one that lets the heap
    recycle; in each, a forest recomputes only as many layers as it must. Ties go to the larger forests. A single row that
    fits in no way stays a forest of its own.
    """
    cost = memory.cost
    whole = pack(samples, most_tokens)
    tokens = sum(forest.tokens for forest in whole)
    density = sum(len(forest.predictors_U) for forest in whole) / max(tokens, 1)
    recomputed = [cost.layers - cost.layers * step // (BUDGETS_TRIED - 1) for step in range(BUDGETS_TRIED)]
    budgets = [cost.most_tokens(density, layers, memory.bound) for layers in recomputed]
    if memory.on_heap:
        budgets.append(cost.most_tokens(density, 0, memory.bound / HEAP_SPREAD))
    best, least = whole, float("inf")
    for budget in sorted({min(most_tokens, budget) for budget in budgets}, reverse=True):
        forests = whole if budget == most_tokens else pack(samples, budget)
        if sum(forest.tokens for forest in forests) >= least:  # smaller forests have more tokens: nothing is left to gain
            break
        work = sum(map(memory.work, forests))
        if work < least:
            best, least = forests, work
    return best


def decoder_layers(model: nn.Module) -> list[Any]:
    """The layers of the model's longest stack, in order; none if the model's code does not mark its layers."""
    stacks = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    return max(stacks, key=len, default=[])


@contextmanager
def recomputing(model: nn.Module, layers: int) -> Iterator[None]:
    """Inside, the first `layers` decoder layers keep their inputs alone and run again in backward, with the same dropout.

    Call backward inside. The layers' modes stay as they are (transformers' own switch needs them in training mode).
    """
    chosen = decoder_layers(model)[:layers]
    for layer in chosen:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True)
    try:
        yield
    finally:
        for layer in chosen:
            del layer.forward  # the class's own is back


def measure(model: Any, forest: Forest, score: Callable[[], Tensor]) -> ActivationCost:
    """Count what autograd keeps when `score` runs `model` over `forest`, of which it should keep the result alone.

    Parameters and buffers are not activations, and a block of memory that several operations keep counts once, where it
    was kept first. The global random state is left as it was.
    """
    counter = _Counter(model)
    layers = decoder_layers(model)
    hooks = [hook for layer in layers for hook in counter.watch(layer)]
    try:
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), saved_tensors_hooks(counter.keep, lambda kept: kept):
            score()
    finally:
        for hook in hooks:
            hook.remove()
    tokens, predictors, count = forest.tokens, len(forest.predictors_U), max(len(layers), 1)
    logits = model.config.get_text_config().vocab_size * 4.0
    head = counter.logits / predictors
    return ActivationCost(
        layers=len(layers),
        layer=counter.inside / tokens / count,
        layer_input=counter.inputs / tokens / count,
        outside=counter.outside / tokens,
        head=head + (logits if head else 0),  # and their gradient
        logits=0.0 if head else 2 * logits,
    )


class _Counter:
    """Bytes of kept tensors by where they were kept."""

    def __init__(self, model: Any) -> None:
        self._vocabulary = model.config.get_text_config().vocab_size
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self._alive: list[Tensor] = []
        """Freed memory would be given to the next tensor and be taken for known."""
        self._in_layer = False
        self.inside = self.inputs = self.outside = self.logits = 0

    def watch(self, layer: nn.Module) -> list[Any]:
        return [layer.register_forward_pre_hook(self._enter, with_kwargs=True), layer.register_forward_hook(self._leave)]

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._seen:
            return tensor.detach()
        self._seen.add(storage.data_ptr())
        self._alive.append(tensor.detach())
        if self._in_layer:
            self.inside += storage.nbytes()
        elif tensor.shape[-1:] == (self._vocabulary,):
            self.logits += storage.nbytes()
        else:
            self.outside += storage.nbytes()
        return tensor.detach()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._in_layer = True
        hidden = next(value for value in [*args, *kwargs.values()] if isinstance(value, Tensor))
        self.inputs += hidden.untyped_storage().nbytes()

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._in_layer = False
