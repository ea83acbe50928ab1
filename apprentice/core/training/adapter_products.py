"""A cheaper product for LoRA layers that run over many tokens: fold the adapter into the weight, for this one product.

PEFT computes x W' + s (x A') B', which reads and writes every output four more times, and twice more in backward. For many
tokens it is cheaper to make W + s B A (a product over the rank only) and multiply once, forwards and backwards; the
gradients of A and B come from products over the rank as before. Nothing is kept: the folded weight is made again in
backward, and the layer's weights never change. The numbers are the same up to rounding.

This module knows PEFT's plain LoRA linear layer and nothing of forests; layers it cannot treat stay with PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear

MANY_TOKENS = 512
"""From here on folding costs less than it saves (rank 16, layers 576 to 1,536 wide: it pays from about 450 tokens on)."""


@contextmanager
def folded_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside, plain LoRA linear layers of `model` multiply by the folded weight. May be nested."""
    layers = [layer for layer in model.modules() if type(layer) is LoraLinear and "forward" not in vars(layer)]
    try:
        for layer in layers:
            layer.forward = partial(_forward, layer)
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own is back


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    adapter = _foldable(layer, x) if not args and not kwargs else None
    if adapter is None:
        return LoraLinear.forward(layer, x, *args, **kwargs)
    base = layer.base_layer
    a_RI, b_OR = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return _FoldedLinear.apply(x, base.weight, base.bias, a_RI, b_OR, layer.scaling[adapter])


def _foldable(layer: Any, x: torch.Tensor) -> str | None:
    """The adapter to fold in, or None if PEFT has to do it: none or several active, merged, dropout, variants, mixed types."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if x.numel() < MANY_TOKENS * x.shape[-1] or layer.disable_adapters or layer.merged or len(active) != 1:
        return None
    name, base = active[0], layer.base_layer
    dropout, down, up = layer.lora_dropout[name], layer.lora_A[name], layer.lora_B[name]
    plain = (
        type(base) is torch.nn.Linear
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and down.bias is None
        and up.bias is None
        and name not in layer.lora_variant
        and not (isinstance(dropout, torch.nn.Dropout) and dropout.training and dropout.p > 0)
        and x.dtype == base.weight.dtype == down.weight.dtype == up.weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )
    return name if plain else None


class _FoldedLinear(torch.autograd.Function):
    """x: ... x I; weight: O x I and bias: O, both frozen; a: R x I; b: O x R. Returns x (W + scale b a)' + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        return torch.nn.functional.linear(x, torch.addmm(weight_OI, b_OR, a_RI, alpha=scale), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR = ctx.saved_tensors
        grad_TO, x_TI = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_TO @ torch.addmm(weight_OI, b_OR, a_RI, alpha=ctx.scale)).view_as(x)
        if ctx.needs_input_grad[3]:
            grad_a = ((grad_TO @ b_OR).T @ x_TI).mul_(ctx.scale)
        if ctx.needs_input_grad[4]:
            grad_b = (grad_TO.T @ (x_TI @ a_RI.T)).mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None
