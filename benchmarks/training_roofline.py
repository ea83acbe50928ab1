"""How close a training step comes to the machine's own speed: useful FLOP/s of our step over the peak of plain matrix products.

The step is that of `forest_vs_trl.py`: 8 trajectories after a 1,500-token prompt, SmolLM2-135M in fp32, LoRA r=16 on all linear
layers. Only what the mathematics needs is counted, with frozen base weights (forward 2 FLOP per weight and token, backward
through the activations another 2, no gradient of the weights):

    4 x (weights of the linear layers of the blocks) x (tokens of the forest)
  + 4 x (weights of the head) x (places that predict a target)
  + 6 x (weights of the adapter) x (tokens of the forest)                 2 forward, 4 backward: their gradient is wanted
  + 12 x layers x heads x head size x (query-key pairs that attend)       scores and mixing: 4 forward, 8 backward

The recomputation of scores in backward, norms, activations and the softmax are work that earns nothing here.

The peak is the best sustained rate of several fp32 products: square ones of 2,048 and those of the model's own shapes. Peak
and step alternate in one run, because the machine may be shared.

Memory is kept as a train job keeps it when `activation_memory_gib` leaves room (here 10; `heap` says how), and one step goes
before, as in a job of several micro-batches. `ratio_tight` is one more step kept as under a bound that is only just enough:
every large block is given back when it is freed and its pages are new to the next tensor.

The last line is one JSON object: `ratio` (median of achieved / peak of the same round), `achieved_gflops`, `peak_gflops`,
`ratio_tight`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from _training_groups import ADAPTER, Group, flat_group, forest_step, load_host, say

from apprentice.core.training.attention import AttentionPlan
from apprentice.core.training.forest import Forest
from apprentice.core.training.heap import job_heap, recycle_blocks
from apprentice.core.training.policy import HostedModel

SHAPES = ((2048, 2048, 2048), (2748, 576, 1536), (2748, 1536, 576), (2748, 576, 576))


def peak_rate(seconds: float = 1.0) -> float:
    """The best FLOP/s that torch's fp32 matrix product sustains on any of the shapes, each run for a while."""
    rates: list[float] = []
    for rows, inner, columns in SHAPES:
        a, b, out = torch.randn(rows, inner), torch.randn(columns, inner), torch.empty(rows, columns)
        torch.mm(a, b.T, out=out)
        started, products = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            torch.mm(a, b.T, out=out)
            products += 1
        rates.append(2 * rows * inner * columns * products / (time.perf_counter() - started))
    return max(rates)


def useful_flop(host: HostedModel, forest: Forest) -> float:
    config = host.model.config
    linear = [
        module.weight.numel()
        for name, module in host.model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name
    ]
    head = config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * AttentionPlan(forest.segments).pairs()
    adapter = sum(parameter.numel() for parameter in host.adapter_parameters(ADAPTER).values())
    return (4.0 * sum(linear) + 6.0 * adapter) * forest.tokens + 4.0 * head * len(forest.predictors_U) + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(2)
    host = load_host()
    group = flat_group(1500)
    with job_heap():
        tight = one_round(host, group, "tight")
    with job_heap():
        recycle_blocks(True)
        forest_step(host, group)
        rounds = [one_round(host, group, f"{repeat + 1}/{options.repeats}") for repeat in range(options.repeats)]
    result = {
        "ratio": round(statistics.median(achieved / peak for achieved, peak in rounds), 3),
        "achieved_gflops": round(statistics.median(achieved for achieved, _ in rounds) / 1e9, 1),
        "peak_gflops": round(statistics.median(peak for _, peak in rounds) / 1e9, 1),
        "ratio_tight": round(tight[0] / tight[1], 3),
    }
    print(json.dumps(result))


def one_round(host: HostedModel, group: Group, name: str) -> tuple[float, float]:
    """Achieved and peak FLOP/s: one step between two measurements of the peak."""
    before = peak_rate()
    seconds, _, forest = forest_step(host, group)
    flop = useful_flop(host, forest)
    achieved, peak = flop / seconds, max(before, peak_rate())
    say(
        f"{name}: {flop / 1e12:.3f} TFLOP in {seconds:.2f} s, {achieved / 1e9:.1f} GFLOP/s of {peak / 1e9:.1f}, ratio {achieved / peak:.3f}"
    )
    return achieved, peak


if __name__ == "__main__":
    main()
