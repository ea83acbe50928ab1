"""How close a training step comes to the machine's own speed: useful FLOP/s of our step over the peak of plain matrix products.

The step is that of `forest_vs_trl.py`: 8 trajectories after a 1,500-token prompt, SmolLM2-135M in fp32, LoRA r=16 on all linear
layers. Only what the mathematics needs is counted, with frozen base weights (forward 2 FLOP per weight and token, backward
through the activations another 2, no gradient of the weights):

    4 x (weights of the linear layers of the blocks) x (tokens of the forest)
  + 4 x (weights of the head) x (places that predict a target)
  + 12 x layers x heads x head size x (query-key pairs that attend)       scores and mixing: 4 forward, 8 backward

The adapter's own products, the recomputation of scores in backward, norms, activations and the softmax are work that earns
nothing here. The peak is the best sustained rate of several fp32 products: square ones of 2,048 and those of the model's own shapes.
Peak and step alternate in one run, because the machine may be shared.

On a machine that others use at the same time, wall-clock rates say how much of it was left. `ratio_cpu` is the same ratio per
CPU second of this process, which leaves that out (and with it the time that one thread waits for the other).

The last line is one JSON object: `ratio` (median of achieved / peak of the same round), `achieved_gflops`, `peak_gflops`,
`ratio_cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a waiting thread that spins would count as CPU time

import torch
from _training_groups import flat_group, forest_step, load_host, say

from apprentice.core.training.attention import AttentionPlan
from apprentice.core.training.forest import Forest
from apprentice.core.training.policy import HostedModel

SHAPES = ((2048, 2048, 2048), (2748, 576, 1536), (2748, 1536, 576), (2748, 576, 576))


class Rate(NamedTuple):
    """FLOP/s, by the clock on the wall and by the CPU time of all threads."""

    wall: float
    cpu: float


def measured(flop: float, wall: float, cpu: float) -> Rate:
    return Rate(flop / (time.perf_counter() - wall), flop / (time.process_time() - cpu))


def peak_rate(seconds: float = 1.0) -> Rate:
    """The best rates that torch's fp32 matrix product sustains on any of the shapes, each run for a while."""
    rates: list[Rate] = []
    for rows, inner, columns in SHAPES:
        a, b, out = torch.randn(rows, inner), torch.randn(columns, inner), torch.empty(rows, columns)
        torch.mm(a, b.T, out=out)
        wall, cpu, products = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - wall < seconds:
            torch.mm(a, b.T, out=out)
            products += 1
        rates.append(measured(2 * rows * inner * columns * products, wall, cpu))
    return Rate(max(rate.wall for rate in rates), max(rate.cpu for rate in rates))


def useful_flop(host: HostedModel, forest: Forest) -> float:
    config = host.model.config
    linear = [
        module.weight.numel()
        for name, module in host.model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name
    ]
    head = config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * AttentionPlan(forest.segments).pairs()
    return 4.0 * sum(linear) * forest.tokens + 4.0 * head * len(forest.predictors_U) + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(2)
    host = load_host()
    group = flat_group(1500)
    forest_step(host, flat_group(40))
    peaks: list[Rate] = []
    achieved: list[Rate] = []
    for repeat in range(options.repeats):
        before = peak_rate()
        wall, cpu = time.perf_counter(), time.process_time()
        seconds, _, forest = forest_step(host, group)
        flop = useful_flop(host, forest)
        achieved.append(measured(flop, wall, cpu))
        after = peak_rate()
        peaks.append(Rate(max(before.wall, after.wall), max(before.cpu, after.cpu)))
        say(
            f"{repeat + 1}/{options.repeats}: {flop / 1e12:.3f} TFLOP in {seconds:.2f} s, {achieved[-1].wall / 1e9:.1f} GFLOP/s of "
            f"{peaks[-1].wall / 1e9:.1f}, ratio {achieved[-1].wall / peaks[-1].wall:.3f}, per CPU second "
            f"{achieved[-1].cpu / peaks[-1].cpu:.3f}"
        )
    rounds = list(zip(achieved, peaks, strict=True))
    result = {
        "ratio": round(statistics.median(a.wall / p.wall for a, p in rounds), 3),
        "achieved_gflops": round(statistics.median(a.wall for a in achieved) / 1e9, 1),
        "peak_gflops": round(statistics.median(p.wall for p in peaks) / 1e9, 1),
        "ratio_cpu": round(statistics.median(a.cpu / p.cpu for a, p in rounds), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
