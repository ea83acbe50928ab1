"""Options of adapters and train jobs, shared by client, server and trainer. Unknown keys are errors.

Names and defaults follow TRL 1.16's `GRPOConfig` wherever TRL has the option; where a default differs, the
docstring says why.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from .records import Record

Positive = Annotated[FiniteFloat, Field(gt=0)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]


class AdapterConfig(Record):
    """A LoRA adapter. `target_modules="all-linear"` means every linear layer but the output head, as in PEFT."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    alpha: Positive = 32.0
    dropout: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class OptimizerConfig(Record):
    """AdamW with gradient clipping; what GRPO and supervised steps share."""

    learning_rate: Positive = 1e-4
    """TRL's 1e-6 is for full fine-tuning; LoRA needs about a hundred times more."""
    adam_beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    tokens_per_microbatch: Annotated[int, Field(ge=64)] = 8192
    """Bound on the packed forest's tokens in one forward and backward pass. Larger single trees are split by leaves."""
    activation_memory_gib: Positive | None = None
    """Bound on the memory of one forward and backward pass, kept by smaller passes or by computing layers again. None: 0.6 GiB
    on CPU, a quarter of a GPU's memory."""


class TrainConfig(OptimizerConfig):
    """One GRPO job."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo"] = "dapo"
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    """None: equal to `epsilon` (for cispo the cap is `epsilon_high` itself, as in TRL)."""
    delta: Positive | None = None
    beta: NonNegative = 0.0
    """Weight of the KL term to the base model (k3 estimator, Schulman 2020)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    min_reward_std: NonNegative = 1e-3
    """A group whose reward standard deviation is below this floor gives no update (fate `equal_rewards`)."""
    importance_sampling: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"] = "token_truncate"
    importance_sampling_cap: Positive = 2.0
    mask_truncated_completions: bool = False
    max_completion_length: Annotated[int, Field(ge=1)] | None = None
    """Normaliser of dr_grpo; None: the longest trained completion of the job."""
    num_iterations: Annotated[int, Field(ge=1)] = 1
    """Epochs over the batch."""
    steps_per_generation: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per epoch; the batch is cut into that many parts by group."""
    train_only: dict[Literal["agent", "node", "namespace", "source"], str] | None = None
    allow_sharing: bool = True
    """False trains row by row (for comparison; results are equal)."""


class SftConfig(OptimizerConfig):
    """A supervised warm-up: cross-entropy on assistant turns, mean over target tokens of a batch."""

    learning_rate: Positive = 2e-4
    epochs: Annotated[int, Field(ge=1)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Demonstrations per optimizer step."""
    seed: int = 0
    """Decides the order of the demonstrations in each epoch."""


class CheckpointPolicy(Record):
    """Retention: the last `keep_last` checkpoints, the best by `best_metric` (higher is better), and all pinned ones stay."""

    keep_last: Annotated[int, Field(ge=1)] = 3
    best_metric: str | None = "reward/mean"
