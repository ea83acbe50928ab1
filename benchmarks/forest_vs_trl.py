"""One training step (forward, loss, backward) on the same group: our forest against TRL's own GRPO loss on padded rows.

The group is 8 trajectories of SmolLM2-135M in fp32 with LoRA r=16 on all linear layers: a shared 1,500-token prompt (as tool
schemas make it), 48 sampled tokens, a 60-token tool result, 48 sampled tokens. TRL gets one row per trajectory (8, not one
per turn) with the tool results masked, and runs its real `GRPOTrainer._compute_loss` under SDPA, without gradient
checkpointing, micro-batched with gradient accumulation because the activations of all rows together need over 20 GB.
Both sides run in this process with two threads, alternately; medians count.

The last line is one JSON object: `ratio` (TRL seconds / ours), `ratio_short` (300-token prompt), `ratio_tree` (16 leaves that
fork inside sampled turns), `grad_rel` (relative difference of the two adapter gradients of the first group), and the seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from typing import Any

import torch
from _training_groups import ADAPTER, Group, flat_group, forest_step, forked_group, gradient_of, load_host, say

from apprentice.core.training.policy import HostedModel

Gradients = dict[str, torch.Tensor]


class TrlSide:
    """TRL's trainer around its own copy of the model, with the same adapter weights as ours."""

    def __init__(self, host: HostedModel, rows_per_batch: int, folder: str) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            output_dir=folder, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type="dapo", beta=0.0,
            per_device_train_batch_size=rows_per_batch, gradient_accumulation_steps=8 // rows_per_batch, num_generations=8,
            max_completion_length=156, logging_steps=1000,
        )  # fmt: skip
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(host.base.folder, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            processing_class=host.tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        self.model: Any = self.trainer.model
        self.model.train()
        self.rows_per_batch = rows_per_batch
        named = {name.replace(".default.", "."): p for name, p in self.model.named_parameters() if p.requires_grad}
        ours = host.adapter_parameters(ADAPTER)
        if named.keys() != ours.keys():
            raise SystemExit(f"the two adapters differ: {sorted(named.keys() ^ ours.keys())[:4]}")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(ours[name])
        self.parameters = named

    def step(self, group: Group) -> tuple[float, Gradients]:
        self.model.zero_grad(set_to_none=True)
        rows = len(group.trajectories)
        inputs = padded_rows(group)
        parts = rows // self.rows_per_batch
        self.trainer.current_gradient_accumulation_steps = self.trainer.args.steps_per_generation = parts
        started = time.perf_counter()
        for part in range(parts):
            window = slice(part * self.rows_per_batch, (part + 1) * self.rows_per_batch)
            piece = {key: value if value.dim() == 0 else value[window] for key, value in inputs.items()}
            self.trainer._compute_loss(self.model, piece).backward()
        seconds = time.perf_counter() - started
        return seconds, {name: gradient_of(parameter) for name, parameter in self.parameters.items()}


def padded_rows(group: Group) -> dict[str, torch.Tensor]:
    """What TRL's generation step hands to its loss for multi-turn rollouts: rows of one length here, so no padding is lost."""
    completions = [[token for tokens, _ in trajectory for token in tokens] for trajectory in group.trajectories]
    sampled = [[int(flag) for tokens, flag in trajectory for _ in tokens] for trajectory in group.trajectories]
    prompt_ids = torch.tensor([group.prompt] * len(completions))
    completion_ids = torch.tensor(completions)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "tool_mask": torch.tensor(sampled),
        "advantages": torch.tensor(group.advantages),
        "num_items_in_batch": torch.tensor(float(group.sampled_tokens)),
    }


def relative_difference(ours: Gradients, theirs: Gradients) -> float:
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return (difference / sum(float(gradient.double().square().sum()) for gradient in theirs.values())) ** 0.5


def compare(name: str, group: Group, host: HostedModel, trl: TrlSide, repeats: int) -> tuple[float, float, float]:
    """Median seconds of ours and of TRL, and the relative difference of the gradients."""
    ours: list[float] = []
    theirs: list[float] = []
    difference = 0.0
    for repeat in range(repeats):
        seconds, gradient, forest = forest_step(host, group)
        ours.append(seconds)
        seconds, reference = trl.step(group)
        theirs.append(seconds)
        difference = relative_difference(gradient, reference)
        say(
            f"{name} {repeat + 1}/{repeats}: {forest.tokens} tokens {ours[-1]:.2f} s, TRL {forest.row_tokens} tokens "
            f"{theirs[-1]:.2f} s, ratio {theirs[-1] / ours[-1]:.2f}, gradients differ by {difference:.1e}"
        )
    return statistics.median(ours), statistics.median(theirs), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of the long group; the others run one time less, at least once")
    parser.add_argument("--trl-rows", type=int, default=1, choices=(1, 2, 4, 8), help="rows in one of TRL's micro-batches")
    options = parser.parse_args()
    torch.set_num_threads(2)
    fewer = max(1, options.repeats - 1)
    with tempfile.TemporaryDirectory() as folder:
        say("loading SmolLM2-135M twice (ours and TRL's)")
        host = load_host()
        trl = TrlSide(host, options.trl_rows, folder)
        compare("warm-up", flat_group(40), host, trl, 1)
        ours, theirs, grad_rel = compare("long prompt", flat_group(1500), host, trl, options.repeats)
        ours_short, theirs_short, _ = compare("short prompt", flat_group(300), host, trl, fewer)
        ours_tree, theirs_tree, _ = compare("forked tree", forked_group(300), host, trl, fewer)
    result = {
        "ratio": round(theirs / ours, 3),
        "ratio_short": round(theirs_short / ours_short, 3),
        "ratio_tree": round(theirs_tree / ours_tree, 3),
        "grad_rel": grad_rel,
        "forest_seconds": round(ours, 3),
        "trl_seconds": round(theirs, 3),
        "forest_seconds_short": round(ours_short, 3),
        "trl_seconds_short": round(theirs_short, 3),
        "forest_seconds_tree": round(ours_tree, 3),
        "trl_seconds_tree": round(theirs_tree, 3),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
