"""AdamW over one adapter's weights, with the state a resume needs: moments, step counts and the dropout generator.

Weights move in whole jobs: `transaction` puts everything back if the job does not finish. This module must not know
losses, samples or the model around the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config import OptimizerConfig
from ..errors import CheckpointCorrupt, TrainJobFailed

STATE_FILE = "optimizer.safetensors"
_RNG = "rng"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class AdapterOptimizer:
    """AdamW with gradient clipping. `parameters` maps stable names to the adapter's trainable tensors."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], seed: int) -> None:
        if not parameters:
            raise ValueError("an adapter without trainable weights cannot be optimized")
        self._parameters = dict(parameters)
        self._adamw = torch.optim.AdamW(list(self._parameters.values()), foreach=False)
        self._device = next(iter(self._parameters.values())).device
        self._rng = self._fresh_rng(seed)

    def configure(self, config: OptimizerConfig) -> None:
        """Apply the job's hyperparameters; moments are kept."""
        for group in self._adamw.param_groups:
            group["lr"] = config.learning_rate
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_epsilon
            group["weight_decay"] = config.weight_decay

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self, max_grad_norm: float) -> float:
        """Clip, check and apply the accumulated gradient; returns its norm before clipping.

        Raises TrainJobFailed, naming a weight, if the gradient is not finite; no weight has moved then.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise TrainJobFailed("the loss depends on no weight of the adapter, so there is no gradient to apply")
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            self._raise_not_finite(float(norm))
        torch.nn.utils.clip_grads_with_norm_(list(self._parameters.values()), max_grad_norm, norm)
        self._adamw.step()
        self.zero_grad()
        return float(norm)

    @contextmanager
    def dropout_rng(self) -> Iterator[None]:
        """Run with this policy's own random generator, and remember where it stopped."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self._rng["cpu"])
            if devices:
                torch.cuda.set_rng_state(self._rng["cuda"], self._device)
            yield
            self._rng["cpu"] = torch.get_rng_state()
            if devices:
                self._rng["cuda"] = torch.cuda.get_rng_state(self._device)

    @contextmanager
    def transaction(self) -> Iterator[dict[str, Tensor]]:
        """All or nothing: on any exception weights, moments and generator are what they were before. Gives a copy of the weights."""
        weights = self.weights()
        moments = {name: value.clone() for name, value in self._state_tensors().items()}
        rng = {name: value.clone() for name, value in self._rng.items()}
        try:
            yield weights
        except BaseException:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(weights[name])
            self._restore_tensors(moments)
            self._rng = rng
            raise
        finally:
            self.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the adapter's weights."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def moved_since(self, weights: Mapping[str, Tensor]) -> bool:
        """True if any bit of any weight differs from `weights`."""
        return any(not torch.equal(_bits(p.detach()), _bits(weights[name])) for name, p in self._parameters.items())

    def save(self, folder: Path) -> None:
        """Write moments and generator (not the weights) into an existing folder."""
        tensors = {**self._state_tensors(), **{f"{_RNG}/{name}": state for name, state in self._rng.items()}}
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises CheckpointCorrupt if it is missing or belongs to another adapter."""
        try:
            tensors = load_file(folder / STATE_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointCorrupt(f"the optimizer state in {folder} cannot be read: {error}") from error
        self._check_shapes(tensors, folder)
        self._restore_tensors(tensors)
        self._rng = {name: tensors.get(f"{_RNG}/{name}", state) for name, state in self._rng.items()}

    def _fresh_rng(self, seed: int) -> dict[str, Tensor]:
        rng = {"cpu": torch.Generator().manual_seed(seed).get_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.Generator(self._device).manual_seed(seed).get_state()
        return rng

    def _state_tensors(self) -> dict[str, Tensor]:
        state = self._adamw.state
        return {f"{name}/{key}": state[p][key] for name, p in self._parameters.items() if p in state for key in _MOMENTS}

    def _restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}/step" in tensors:
                moments = {key: tensors[f"{name}/{key}"].clone() for key in _MOMENTS}
                self._adamw.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in moments.items()}

    def _check_shapes(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """A parameter has all of its moments or none; shapes are the adapter's. A state from a CPU may lack the GPU's generator."""
        shapes = {f"{_RNG}/{n}": tuple(state.shape) for n, state in self._rng.items() if n == "cpu" or f"{_RNG}/{n}" in tensors}
        for name, parameter in self._parameters.items():
            if any(f"{name}/{key}" in tensors for key in _MOMENTS):
                shapes |= {f"{name}/{key}": () if key == "step" else tuple(parameter.shape) for key in _MOMENTS}
        for name in sorted(shapes.keys() | (key for key in tensors if not key.startswith(f"{_RNG}/"))):
            found = tuple(tensors[name].shape) if name in tensors else None
            if found != shapes.get(name):
                raise CheckpointCorrupt(
                    f"the optimizer state in {folder} has {name} of shape {found}, but this adapter expects {shapes.get(name)}"
                )

    def _raise_not_finite(self, norm: float) -> None:
        bad = next((n for n, p in self._parameters.items() if p.grad is not None and not torch.isfinite(p.grad).all()), "the total norm")
        self.zero_grad()
        raise TrainJobFailed(
            f"the gradient is not finite ({norm}, first in {bad}), so no optimizer step was made; try a lower learning_rate",
            details={"reason": "non_finite_gradient", "parameter": bad},
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
