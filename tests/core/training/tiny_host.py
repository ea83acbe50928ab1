"""A tiny hosted model with one adapter, and samples drawn from it: what the trainer's tests start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from support.tiny_models import tiny_llama

from apprentice.core.config import AdapterConfig
from apprentice.core.training.base_models import resolve_base
from apprentice.core.training.batches import TrainSample
from apprentice.core.training.forest import TokenSample
from apprentice.core.training.policy import HostedModel

ADAPTER = "mail/agent"


def make_host(
    folder: Path, *, dtype: str = "float32", adapter: AdapterConfig | None = None, seed: int = 0, random_b: float = 0.0
) -> HostedModel:
    """`random_b` > 0 gives the adapter's second matrix random values, so that it changes the model from the start."""
    host = HostedModel.load(resolve_base(str(folder)), dtype=dtype, device="cpu")
    host.add_adapter(ADAPTER, adapter or AdapterConfig(rank=4, alpha=8), seed)
    if random_b:
        g = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in host.adapter_parameters(ADAPTER).items():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=g) * random_b)
    return host


def small_llama(folder: Path, *, seed: int = 0, spread: float = 0.1) -> Path:
    """One layer of width 32, 384 tokens, context 2,048."""
    return tiny_llama(folder / "small-llama", layers=1, hidden=32, seed=seed, spread=spread)


@torch.no_grad()
def draw(
    host: HostedModel, prompt: Sequence[int], count: int, g: torch.Generator, *, temperature: float = 1.0, only: int | None = None
) -> TokenSample:
    """`count` tokens sampled after `prompt`, with both kinds of log-probs; `only` limits draws to the first ids."""
    ids = list(prompt)
    logprobs: list[float] = []
    sampling: list[float] = []
    for _ in range(count):
        with host.using(ADAPTER) as model:
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        tempered = logits / temperature
        if only is not None:
            tempered[only:] = -torch.inf
        token = int(torch.multinomial(tempered.softmax(-1), 1, generator=g))
        ids.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
        sampling.append(float(tempered.log_softmax(-1)[token]))
    return TokenSample("?", tuple(prompt), tuple(ids[len(prompt) :]), tuple(logprobs), tuple(sampling), (0.0,) * count)


def as_train(sample: TokenSample, trajectory: str, group: str, advantage: float, name: str | None = None) -> TrainSample:
    tokens = TokenSample(
        name or trajectory,
        sample.prompt_ids,
        sample.token_ids,
        sample.logprobs,
        sample.sampling_logprobs,
        (advantage,) * len(sample.token_ids),
    )
    return TrainSample(tokens, trajectory, group)


def rollouts(
    host: HostedModel, *, groups: int = 2, size: int = 3, turns: int = 2, tokens: int = 4, seed: int = 0, temperature: float = 1.0
) -> list[TrainSample]:
    """Multi-turn trajectories that share their group's prompt; turn two continues turn one after a tool result."""
    g = torch.Generator().manual_seed(seed)
    found: list[TrainSample] = []
    for group in range(groups):
        prompt = torch.randint(3, 300, (9,), generator=g).tolist()
        for member in range(size):
            context = list(prompt)
            advantage = float(torch.randn((), generator=g))
            for turn in range(turns):
                sample = draw(host, context, tokens, g, temperature=temperature)
                found.append(as_train(sample, f"g{group}t{member}", f"g{group}", advantage, f"g{group}t{member}c{turn}"))
                context = [*context, *sample.token_ids, *torch.randint(3, 300, (3,), generator=g).tolist()]
    return found
