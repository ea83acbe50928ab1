"""Samples of a job arranged for training: optimizer steps, micro-batches, and flat tensors over their tokens.

A `StepBatch` is the data of one optimizer step. All its tensors are flat over the step's N trained tokens, in the order
of samples, then of tokens; `places` says which of them a micro-batch computes. Knows no model and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..errors import ContextOverflow, InvalidRequest
from .forest import Forest, TokenSample


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion to train, and the trajectory (the *sequence* of the objectives) and group it belongs to."""

    tokens: TokenSample
    trajectory_id: str
    group_id: str


@dataclass(frozen=True, eq=False)
class StepBatch:
    """See the module. N: trained tokens of the step; S: its trajectories."""

    forests: list[Forest]
    places: list[Tensor]
    """Per forest: the position in 0..N of each of its targets."""
    logprobs_N: Tensor
    """The sampler's, untempered."""
    sampling_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    sequence_tokens_S: Tensor

    @property
    def tokens(self) -> int:
        return self.advantages_N.numel()

    @classmethod
    def build(cls, samples: Sequence[TrainSample], forests: list[Forest], dtype: torch.dtype, device: torch.device) -> StepBatch:
        """`forests` are what the samples were packed into. Samples without sampled tokens have no place here."""
        tokens = [sample.tokens for sample in samples]
        sequence_of = {name: index for index, name in enumerate(dict.fromkeys(sample.trajectory_id for sample in samples))}
        lengths = [len(t.token_ids) for t in tokens]
        sequence_N = torch.repeat_interleave(
            torch.tensor([sequence_of[sample.trajectory_id] for sample in samples]), torch.tensor(lengths)
        ).to(device)

        def flat(name: str) -> Tensor:
            return torch.tensor([value for t in tokens for value in getattr(t, name)], dtype=dtype, device=device)

        return cls(
            forests=forests,
            places=[torch.from_numpy(places).to(device) for places in target_places(forests, lengths)],
            logprobs_N=flat("logprobs"),
            sampling_logprobs_N=flat("sampling_logprobs"),
            advantages_N=flat("advantages"),
            sequence_N=sequence_N,
            sequence_tokens_S=torch.bincount(sequence_N, minlength=len(sequence_of)).to(dtype),
        )


def target_places(forests: Sequence[Forest], lengths: Sequence[int]) -> list[np.ndarray]:
    """Per forest, where each target stands among the flat tokens of all samples (`lengths` tokens each, in order)."""
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.array(lengths, dtype=np.int64))])
    return [offsets[np.array(f.numbers, dtype=np.int64)[f.target_sample_N]] + f.target_index_N for f in forests]


def cut_by_group(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """At most `parts` consecutive runs of whole groups, as even in groups as they go; never an empty one."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    ordered = list(groups.values())
    parts = min(parts, len(ordered))
    bounds = [len(ordered) * part // parts for part in range(parts + 1)] if parts else [0]
    return [[s for group in ordered[a:b] for s in group] for a, b in pairwise(bounds)]


def check_samples(samples: Sequence[TokenSample], vocabulary: int, context_length: int) -> None:
    """Raises ContextOverflow or InvalidRequest, naming the sample, for what the model cannot have been given or drawn."""
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.token_ids)
        if length > context_length:
            raise ContextOverflow(f"sample {sample.id} has {length} tokens, but the model's context is {context_length}")
        if max(*sample.prompt_ids, *sample.token_ids, 0) >= vocabulary or min(*sample.prompt_ids, *sample.token_ids, 0) < 0:
            raise InvalidRequest(f"sample {sample.id} has a token id outside the model's vocabulary of {vocabulary}")
        values = np.array([sample.logprobs, sample.sampling_logprobs, sample.advantages], dtype=np.float64)
        if not np.isfinite(values).all():
            raise InvalidRequest(f"sample {sample.id} has a log-probability or advantage that is not a finite number")
