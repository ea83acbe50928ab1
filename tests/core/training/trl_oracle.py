"""TRL's own GRPOTrainer as the independent source of advantages, importance weights and losses.

Nothing of the arithmetic is replaced: only sampling (`_generate`), the reward functions and the model's forward pass
are given fixed numbers, so that TRL computes everything else from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

VOCABULARY = 16


@dataclass
class PaddedBatch:
    """B rows of T columns, right padded. `mask_BT` is 0 on padding, `tool_mask_BT` on tokens that were not sampled."""

    mask_BT: Tensor
    tool_mask_BT: Tensor
    logprobs_BT: Tensor
    old_BT: Tensor
    sampling_BT: Tensor
    ref_BT: Tensor
    rewards_B: Tensor
    advantages_BT: Tensor | None = None
    group_size: int = 4

    @property
    def trained_BT(self) -> Tensor:
        return (self.mask_BT * self.tool_mask_BT).bool()


@dataclass
class OracleResult:
    loss: float
    grad_BT: Tensor
    advantages_B: Tensor
    metrics: dict[str, list[float]] = field(default_factory=dict)


def random_batch(seed: int, rows: int = 8, columns: int = 9, group_size: int = 4, drift: float = 0.3) -> PaddedBatch:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, columns + 1, (rows,), generator=g)
    lengths[0] = columns
    mask = (torch.arange(columns)[None] < lengths[:, None]).long()
    tool_mask = (torch.rand(rows, columns, generator=g) < 0.7).long()
    tool_mask[:, 0] = 1
    old = -2 * torch.rand(rows, columns, generator=g, dtype=torch.float64) - 0.05

    def near(scale: float) -> Tensor:
        return old + scale * torch.randn(rows, columns, generator=g, dtype=torch.float64)

    rewards = torch.rand(rows, generator=g, dtype=torch.float64).round(decimals=2)
    return PaddedBatch(mask, tool_mask, near(drift), old, near(0.5), near(0.4), rewards, group_size=group_size)


def make_trainer(folder: Path, **options: Any) -> GRPOTrainer:
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    config = GRPOConfig(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1000, **options
    )
    data = Dataset.from_list([{"prompt": "w1 w2"}] * 8)
    return GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=1, target_modules=["q_proj"]),
    )


def run_trl(
    folder: Path, batch: PaddedBatch, *, importance_sampling: bool, microbatches: int = 1, windows: int = 1, window: int = 0, **options: Any
) -> OracleResult:
    """TRL's loss and gradient with respect to `logprobs_BT`, summed over the micro-batches of one optimizer step.

    The batch is cut into `windows` optimizer steps (of which `window` is computed) of `microbatches` each.
    """
    rows = batch.mask_BT.shape[0]
    pieces = windows * microbatches
    options.setdefault("max_completion_length", batch.mask_BT.shape[1])
    trainer = make_trainer(
        folder,
        per_device_train_batch_size=rows // pieces,
        gradient_accumulation_steps=microbatches,
        steps_per_generation=pieces,
        num_generations=batch.group_size,
        num_iterations=2,  # so that TRL asks for the old log-probs
        vllm_importance_sampling_correction=importance_sampling,
        **options,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = microbatches
    trainer.use_vllm = importance_sampling  # switches on the correction only; nothing is sampled here
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    inputs = _score(trainer, batch, importance_sampling, options.get("beta", 0.0))
    if batch.advantages_BT is not None:
        inputs["advantages"] = batch.advantages_BT
    entropies = torch.zeros_like(batch.logprobs_BT)
    total = 0.0
    for index in range(microbatches):
        part = slice((window * microbatches + index) * rows // pieces, (window * microbatches + index + 1) * rows // pieces)
        piece = {k: v if v.dim() == 0 else v[part] for k, v in inputs.items()}
        trainer._get_per_token_logps_and_entropies = lambda *a, p=part, **k: (logprobs_BT[p], entropies[p], None)
        loss = trainer.compute_loss(trainer.model, piece)
        loss.backward()
        total += float(loss)
    return OracleResult(total, logprobs_BT.grad, inputs["advantages"], dict(trainer._metrics["train"]))


def _score(trainer: GRPOTrainer, batch: PaddedBatch, importance_sampling: bool, beta: float) -> dict[str, Tensor]:
    rows = batch.mask_BT.shape[0]
    lengths = batch.mask_BT.sum(1).tolist()
    completions = [[3] * n for n in lengths]
    masks = [batch.tool_mask_BT[i, :n].tolist() for i, n in enumerate(lengths)]
    sampling = [batch.sampling_BT[i, :n].tolist() for i, n in enumerate(lengths)]
    forwards = iter([batch.old_BT, *([batch.ref_BT] if beta else [])])
    trainer._generate = lambda prompts: (
        [[1, 2]] * rows,
        completions,
        masks,
        ["x"] * rows,
        sampling if importance_sampling else None,
        {},
        None,
        None,
    )
    trainer._calculate_rewards = lambda *a: batch.rewards_B[:, None]
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (next(forwards), None, None)
    torch.set_default_dtype(torch.float64)
    try:
        return trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * rows)
    finally:
        torch.set_default_dtype(torch.float32)
