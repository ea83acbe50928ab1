"""Groups of trajectories for the training benchmarks, and one training step of ours on them (forward, loss, backward)."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from apprentice.core.config import AdapterConfig, TrainConfig
from apprentice.core.training.base_models import resolve_base
from apprentice.core.training.forest import Forest, TokenSample
from apprentice.core.training.logprobs import forest_logprobs
from apprentice.core.training.objectives import Normalisers, ObjectiveBatch, policy_loss
from apprentice.core.training.policy import HostedModel

ADAPTER = "bench"
CONFIG = TrainConfig(loss_type="dapo", importance_sampling="off")


@dataclass(frozen=True)
class Group:
    """Trajectories after one prompt. A trajectory is a list of (tokens, sampled): turns and tool results in order."""

    prompt: tuple[int, ...]
    trajectories: tuple[tuple[tuple[tuple[int, ...], bool], ...], ...]
    advantages: tuple[float, ...]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(tokens) for trajectory in self.trajectories for tokens, sampled in trajectory if sampled)

    def samples(self) -> tuple[list[TokenSample], list[int]]:
        """One sample per turn, as the server records them, and the trajectory of each sample."""
        samples: list[TokenSample] = []
        owners: list[int] = []
        for number, (trajectory, advantage) in enumerate(zip(self.trajectories, self.advantages, strict=True)):
            history = self.prompt
            for tokens, sampled in trajectory:
                if sampled:
                    zeros = (0.0,) * len(tokens)
                    samples.append(TokenSample(f"{number}-{len(history)}", history, tokens, zeros, zeros, (advantage,) * len(tokens)))
                    owners.append(number)
                history += tokens
        return samples, owners


def flat_group(prompt_tokens: int, trajectories: int = 8, *, turn: int = 48, tool: int = 60, seed: int = 0) -> Group:
    """Trajectories that share nothing but the prompt: a sampled turn, a tool result, a sampled turn."""
    rng = random.Random(seed)
    rows = tuple(((draw(rng, turn), True), (draw(rng, tool), False), (draw(rng, turn), True)) for _ in range(trajectories))
    return Group(draw(rng, prompt_tokens), rows, draw_advantages(rng, trajectories))


def forked_group(prompt_tokens: int, *, turn: int = 48, tool: int = 60, seed: int = 1) -> Group:
    """16 trajectories of the same shape that part at the start and in the middle of each of the two sampled turns."""
    rng = random.Random(seed)
    prompt = draw(rng, prompt_tokens)
    firsts = [head + draw(rng, turn - turn // 2) for head in (draw(rng, turn // 2), draw(rng, turn // 2)) for _ in range(2)]
    rows: list[tuple[tuple[tuple[int, ...], bool], ...]] = []
    for first in firsts:
        result = draw(rng, tool)
        for head in (draw(rng, turn // 2), draw(rng, turn // 2)):
            rows += [((first, True), (result, False), (head + draw(rng, turn - turn // 2), True)) for _ in range(2)]
    return Group(prompt, tuple(rows), draw_advantages(rng, len(rows)))


def draw(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 49_000) for _ in range(count))


def draw_advantages(rng: random.Random, count: int) -> tuple[float, ...]:
    raw = [rng.gauss(0.0, 1.0) for _ in range(count)]
    return tuple(value - sum(raw) / count for value in raw)


def load_host() -> HostedModel:
    """SmolLM2-135M in fp32 with a LoRA adapter of rank 16 on all linear layers, its B matrices away from zero."""
    host = HostedModel.load(resolve_base("smollm2-135m"), dtype="float32", device="cpu")
    host.add_adapter(ADAPTER, AdapterConfig(), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in host.adapter_parameters(ADAPTER).items():
            if ".lora_B." in name:
                parameter.normal_(std=0.01, generator=generator)
    return host


def forest_step(host: HostedModel, group: Group) -> tuple[float, dict[str, torch.Tensor], Forest]:
    """Arrange, forward, loss, backward. Returns seconds, the adapter's gradient and the forest."""
    parameters = host.adapter_parameters(ADAPTER)
    for parameter in parameters.values():
        parameter.grad = None
    started = time.perf_counter()
    samples, owners = group.samples()
    forest = Forest.build(samples)
    with host.using(ADAPTER) as model:
        logprobs_N = forest_logprobs(model, forest).logprobs_N
        loss, _ = policy_loss(objective_batch(logprobs_N, forest, owners, group), CONFIG)
        loss.backward()
    seconds = time.perf_counter() - started
    return seconds, {name: gradient_of(parameter) for name, parameter in parameters.items()}, forest


def objective_batch(logprobs_N: torch.Tensor, forest: Forest, owners: list[int], group: Group) -> ObjectiveBatch:
    sequence_N = torch.tensor(owners)[torch.from_numpy(forest.target_sample_N)]
    advantages_N = torch.tensor([a for sample in forest.samples for a in sample.advantages], dtype=logprobs_N.dtype)
    lengths_S = torch.bincount(sequence_N, minlength=len(group.trajectories)).to(logprobs_N.dtype)
    total = float(group.sampled_tokens)
    return ObjectiveBatch(
        logprobs_N, None, None, None, advantages_N, sequence_N, Normalisers(lengths_S, total, total, int(lengths_S.max()))
    )  # fmt: skip


def gradient_of(parameter: Any) -> torch.Tensor:
    return parameter.grad.detach().clone()


def say(text: str) -> None:
    print(text, flush=True)
