"""Tokens per second of a multi-turn load, on the embedded engine and on its peers, in one run.

The load: rollouts of several turns that share a long system prompt (as tool schemas make it); each turn adds a question or
a tool result and draws a fixed number of tokens. Peers: transformers' `generate` (same dtype, all rollouts of a turn in one
left-padded batch, KV cache, SDPA). vLLM has no side here yet: `ratio_vllm` is null.

    python benchmarks/sampler_vs_vllm.py

The last line is one JSON object. Every drawn token is checked: `max_logprob_difference` is the largest difference between
the engine's log-probabilities and a plain forward pass over the whole sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from apprentice.core.config import AdapterConfig
from apprentice.core.engines.embedded import EmbeddedEngine
from apprentice.core.engines.protocol import BASE, PolicyVersion
from apprentice.core.records import SamplingParams
from apprentice.core.training.base_models import resolve_base
from apprentice.core.training.policy import HostedModel


@dataclass(frozen=True)
class Load:
    """Sizes in tokens."""

    rollouts: int
    turns: int
    system: int
    question: int
    reply: int
    tool_result: int


@dataclass
class Rollout:
    ids: list[int]
    drawn: list[tuple[int, float]] = field(default_factory=list)
    """Position in `ids` and log-probability of every drawn token."""


def start(load: Load, vocabulary: int) -> tuple[list[Rollout], list[list[list[int]]]]:
    """Rollouts with system prompt and question, and the tool results that follow each turn but the last."""
    chooser = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [chooser.randrange(100, vocabulary) for _ in range(tokens)]

    system = text(load.system)
    rollouts = [Rollout(system + text(load.question)) for _ in range(load.rollouts)]
    return rollouts, [[text(load.tool_result) for _ in range(load.turns - 1)] for _ in rollouts]


async def run_engine(engine: EmbeddedEngine, policy: PolicyVersion, load: Load, vocabulary: int) -> tuple[float, list[Rollout]]:
    rollouts, results = start(load, vocabulary)

    async def play(rollout: Rollout, tool_results: list[list[int]]) -> None:
        for turn in range(load.turns):
            prompt = list(rollout.ids)
            async for chunk in engine.generate(prompt, SamplingParams(max_tokens=load.reply), policy):
                for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
                    rollout.drawn.append((len(rollout.ids), logprob))
                    rollout.ids.append(token)
            if turn < load.turns - 1:
                rollout.ids += tool_results[turn]

    began = time.perf_counter()
    await asyncio.gather(*map(play, rollouts, results))
    return time.perf_counter() - began, rollouts


def run_generate(model: Any, pad: int, load: Load, vocabulary: int) -> float:
    rollouts, results = start(load, vocabulary)
    began = time.perf_counter()
    for turn in range(load.turns):
        width = max(len(rollout.ids) for rollout in rollouts)
        ids = torch.tensor([[pad] * (width - len(rollout.ids)) + rollout.ids for rollout in rollouts])
        mask = torch.tensor([[0] * (width - len(rollout.ids)) + [1] * len(rollout.ids) for rollout in rollouts])
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": pad, "eos_token_id": None}
        out = model.generate(input_ids=ids, attention_mask=mask, min_new_tokens=load.reply, max_new_tokens=load.reply, **options)
        for rollout, row, result in zip(rollouts, out[:, width:].tolist(), results, strict=True):
            rollout.ids += row + (result[turn] if turn < load.turns - 1 else [])
    return time.perf_counter() - began


def largest_difference(model: Any, rollouts: list[Rollout]) -> float:
    worst = 0.0
    for rollout in rollouts:
        with torch.no_grad():
            hidden_TE = model.model(input_ids=torch.tensor([rollout.ids])).last_hidden_state[0]
            places = torch.tensor([at - 1 for at, _ in rollout.drawn])
            logprobs = model.lm_head(hidden_TE[places]).log_softmax(-1)
        for row_V, (at, logprob) in zip(logprobs, rollout.drawn, strict=True):
            worst = max(worst, abs(float(row_V[rollout.ids[at]]) - logprob))
    return worst


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    load = Load(options.rollouts, options.turns, options.system, options.question, options.reply, options.tool_result)
    host = HostedModel.load(resolve_base(options.model), dtype="float32", device="cpu")
    vocabulary = host.model.config.vocab_size
    tokens = load.rollouts * load.turns * load.reply
    print(f"{load}; {tokens} tokens to draw; {torch.get_num_threads()} threads", flush=True)
    report: dict[str, Any] = {"tokens": tokens}
    seconds = run_generate(host.model, host.tokenizer.eos_token_id, load, vocabulary)  # before any adapter: the peer's best case
    report["generate"] = tokens / seconds
    print(f"transformers generate: {seconds:.1f} s", flush=True)
    engine = EmbeddedEngine(host)
    print(engine.info(), flush=True)
    await run_engine(engine, BASE, Load(2, 1, 16, 4, 2, 0), vocabulary)
    seconds, rollouts = await run_engine(engine, BASE, load, vocabulary)
    report["engine"] = tokens / seconds
    print(f"embedded engine, base model: {seconds:.1f} s, {engine.stats()}", flush=True)
    policy = PolicyVersion("benchmark/policy", 1)
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(host, Path(folder))
        await engine.load(policy, Path(folder))
    seconds, _ = await run_engine(engine, policy, load, vocabulary)
    report["engine_lora"] = tokens / seconds
    print(f"embedded engine, LoRA adapter: {seconds:.1f} s", flush=True)
    await engine.close()
    report["max_logprob_difference"] = largest_difference(host.model, rollouts[: options.checked])
    return report


def save_adapter(host: HostedModel, folder: Path) -> None:
    """A LoRA adapter on all linear layers that changes the model a little."""
    host.add_adapter("made", AdapterConfig(), seed=0)
    with torch.no_grad():
        for name, parameter in host.adapter_parameters("made").items():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)
    host.save_adapter("made", folder)
    host.drop_adapter("made")


def main() -> None:
    parser = argparse.ArgumentParser(description="The embedded engine against transformers' generate on a multi-turn load.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--system", type=int, default=400, help="tokens of the shared system prompt")
    parser.add_argument("--question", type=int, default=40)
    parser.add_argument("--reply", type=int, default=48)
    parser.add_argument("--tool-result", type=int, default=30)
    parser.add_argument("--checked", type=int, default=8, help="rollouts whose log-probabilities are checked")
    report = asyncio.run(measure(parser.parse_args()))
    generate, engine = report["generate"], report["engine"]
    print(
        json.dumps(
            {
                "ratio_generate": round(engine / generate, 2),
                "ratio_generate_lora": round(report["engine_lora"] / generate, 2),
                "ratio_vllm": None,
                "tokens_per_second": {
                    "engine": round(engine, 1),
                    "engine_lora": round(report["engine_lora"], 1),
                    "generate": round(generate, 1),
                },
                "tokens": report["tokens"],
                "max_logprob_difference": report["max_logprob_difference"],
            }
        )
    )


if __name__ == "__main__":
    main()
