"""Forward passes of one policy over forests, by sharing or row by row, and the probe that decides which.

The one place where the trainer touches the model. It knows no loss, no reward and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import OptimizerConfig
from ..errors import ApprenticeError, TrainJobFailed
from ..records import JsonObject
from .activation_memory import ActivationBound, ActivationCost, measure, pack_within, recomputing
from .attention import forest_attention_in
from .batches import StepBatch, TrainSample
from .forest import Forest, TokenSample, pack
from .heap import recycle_blocks
from .logprobs import Scores, forest_logprobs, row_logprobs
from .metrics import BatchSize
from .policy import HostedModel

OnProgress = Callable[[JsonObject], None]
"""Called after each micro-batch with `{"phase", "done", "total"}`; an exception from it cancels the job and undoes it."""

PARITY_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest accepted difference in nats between shared and row-by-row log-probabilities: rounding, not another attention."""


def ignore_progress(data: JsonObject) -> None:
    """For callers that do not watch."""


class Passes:
    """Scores forests under `adapter` or under the base model. `sharing=False` runs every row by itself."""

    def __init__(self, host: HostedModel, adapter: str, *, sharing: bool, memory: ActivationBound) -> None:
        self._host = host
        self._adapter = adapter
        self._sharing = sharing
        self._memory = memory
        self._dropout = host.adapter_config(adapter).dropout > 0
        self.device = host.device
        self.dtype = torch.float64 if host.dtype is torch.float64 else torch.float32
        """Of log-probabilities and everything made from them."""

    def batch(self, samples: Sequence[TrainSample], config: OptimizerConfig) -> StepBatch:
        """One optimizer step's data in micro-batches that fit the memory for activations; without sharing each is one row."""
        tokens = [sample.tokens for sample in samples]
        forests = pack_within(tokens, config.tokens_per_microbatch, self._memory) if self._sharing else pack(tokens, 1)
        return StepBatch.build(samples, forests, self.dtype, self.device)

    def pack_to_score(self, samples: Sequence[TokenSample], most_tokens: int) -> list[Forest]:
        """Forests for passes without gradient."""
        return pack(samples, self._memory.scoring_tokens(most_tokens) if self._sharing else 1)

    def size(self, forests: Sequence[Forest]) -> BatchSize:
        """What one pass over the forests computes, saves and needs."""
        rows = sum(forest.row_tokens for forest in forests)
        computed = sum(forest.tokens for forest in forests) if self._sharing else rows
        layers = max(self._memory.cost.layers, 1)
        again = sum(forest.tokens * self._memory.recomputed(forest) / layers for forest in forests)
        return BatchSize(computed, rows - computed, again, max(map(self._memory.bytes, forests), default=0.0))

    @contextmanager
    def with_gradient(self, forest: Forest) -> Iterator[Scores]:
        """Log-probabilities (with gradient) and entropies under the adapter, its dropout on. Call backward inside."""
        recomputed = self._memory.recomputed(forest)
        recycle_blocks(self._memory.lets_heap_recycle(forest))
        with self._host.using(self._adapter, dropout=self._dropout) as model, torch.enable_grad(), ExitStack() as layers:
            if recomputed:
                layers.enter_context(recomputing(model, recomputed))
                if self._sharing:  # backward runs layers too
                    layers.enter_context(forest_attention_in(model))
            yield self._score(model, forest, entropy=True)

    def logprobs(
        self,
        forests: Sequence[Forest],
        places: Sequence[Tensor],
        *,
        base: bool = False,
        phase: str = "scoring",
        report: OnProgress = ignore_progress,
    ) -> Tensor:
        """Log-probabilities without gradient and dropout, flat in the order that `places` gives; of the base model if asked."""
        total = sum(len(place) for place in places)
        flat_N = torch.zeros(total, dtype=self.dtype, device=self.device)
        for done, (forest, place) in enumerate(zip(forests, places, strict=True), 1):
            with self._host.using(None if base else self._adapter) as model, torch.no_grad():
                flat_N[place] = self._score(model, forest, entropy=False).logprobs_N.to(self.dtype)
            report({"phase": phase, "done": done, "total": len(forests)})
        return flat_N

    def _score(self, model: object, forest: Forest, *, entropy: bool) -> Scores:
        scores = (forest_logprobs if self._sharing else row_logprobs)(model, forest, entropy=entropy)
        if not torch.isfinite(scores.logprobs_N).all():
            place = int(torch.nonzero(~torch.isfinite(scores.logprobs_N))[0])
            sample = forest.samples[int(forest.target_sample_N[place])]
            raise TrainJobFailed(
                f"the model's log-probability of token {int(forest.target_index_N[place])} of sample {sample.id} is not finite, "
                "so nothing was trained; the adapter's or the base model's weights have overflowed",
                details={"reason": "non_finite_logprob", "sample": sample.id},
            )
        return scores


def activation_cost(host: HostedModel, adapter: str, *, sharing: bool) -> ActivationCost:
    """What a pass under the adapter, its dropout on, keeps for backward. Counted on a small forest, or row if nothing is shared."""
    samples = _probe_samples(host.model.config.get_text_config().vocab_size)
    forest = Forest.build(samples if sharing else samples[-2:-1])
    score: Any = forest_logprobs if sharing else row_logprobs
    with host.using(adapter, dropout=host.adapter_config(adapter).dropout > 0) as model:
        return measure(model, forest, lambda: score(model, forest, entropy=True).logprobs_N)


def supports_sharing(host: HostedModel) -> tuple[bool, str]:
    """Whether this model can be trained on forests, and one sentence why (not).

    Reads the configuration (a sliding window shorter than the context shows in no small probe), then compares the
    log-probabilities of a small random tree, shared and row by row, under the base weights.
    """
    if reason := _partial_attention(host):
        return False, f"training runs row by row, without sharing prefixes, because {reason}"
    forest = Forest.build(_probe_samples(host.model.config.get_text_config().vocab_size))
    try:
        with host.using(None) as model, torch.no_grad():
            shared, rows = forest_logprobs(model, forest).logprobs_N, row_logprobs(model, forest).logprobs_N
    except (ApprenticeError, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return False, f"training runs row by row, without sharing prefixes, because the model cannot attend by forest: {error}"
    difference = float((shared - rows).abs().max())
    if not difference <= PARITY_TOLERANCE[host.dtype]:
        return False, (
            "training runs row by row, without sharing prefixes, because on a probe the shared log-probabilities differ from "
            f"row-by-row ones by {difference:.2g}, more than rounding explains"
        )
    return True, f"prefixes are shared in training; on a probe the log-probabilities agree within {difference:.1g}"


def _partial_attention(host: HostedModel) -> str | None:
    config = host.model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        return f"the model has layers of type {', '.join(kinds)}"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < host.context_length:
        return f"its attention sees only the last {window} tokens"
    return None


def _probe_samples(vocabulary: int) -> list[TokenSample]:
    """A tree with a shared prompt, a fork inside a sampled turn, a second turn, and two draws of the same token."""
    draw = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(x) for x in draw.integers(0, vocabulary, count))

    def sample(name: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> TokenSample:
        zeros = (0.0,) * len(tokens)
        return TokenSample(name, prompt, tokens, zeros, zeros, zeros)

    prompt, first, second = ids(12), ids(6), ids(5)
    forked = (*first[:3], *ids(4))
    return [
        sample("a", prompt, first),
        sample("b", prompt, forked),
        sample("c", (*prompt, *first, *ids(4)), second),
        sample("d", (*prompt, *forked, *ids(3)), second),
        sample("e", ids(5), ids(3)),
    ]
