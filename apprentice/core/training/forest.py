"""The forest: samples arranged by token prefix, so that whatever they share is computed once. Numpy only; no model, no torch.

A *sample* is one completion: a prompt and the tokens drawn after it. Samples meet wherever their token sequences
(prompt + tokens) agree from the first token on: the prompt of a group, the earlier turns of a rollout (sample k+1's
prompt is sample k's prompt, its tokens and a tool result), a turn up to the token where two draws part. The result is a
compressed prefix tree laid flat:

- `token_ids_T`, `positions_T`: the tokens in depth-first order; a token's position is its depth, as it was when sampled.
- `segments`: maximal stretches without a fork, parents before children. Depth-first order makes every subtree one
  contiguous slice: the descendants of a segment are exactly the tokens `[end, subtree_end)`.
- targets: each sampled token of each sample is one target, predicted from the token before it. Two samples that draw the
  same token in the same context are two targets at one place. Targets stand in the order of samples, then of tokens.
- rows: root-to-leaf chains, one per leaf, which is what training without sharing computes.

The last token of a leaf predicts nothing but stays, so that rows and samples can be read back from the forest.

`Forest.build` arranges samples; `pack` splits them into forests under a token budget. Both sort the sequences once and
then only touch tokens in array operations, so the cost is near-linear in the tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One completion as the trainer sees it. All per-token sequences have the length of `token_ids`.

    `logprobs` are the sampler's at temperature 1, `sampling_logprobs` those of the distribution drawn from, `advantages`
    the weight of each token (equal within a completion unless the caller says otherwise). `prompt_ids` is never empty: the
    first sampled token needs a token to be predicted from.
    """

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequest(f"sample {self.id} has an empty prompt; at least one token must precede the sampled ones")
        lengths = {len(self.token_ids), len(self.logprobs), len(self.sampling_logprobs), len(self.advantages)}
        if len(lengths) != 1:
            raise InvalidRequest(
                f"sample {self.id}: token_ids, logprobs, sampling_logprobs and advantages must have one length, got "
                f"{len(self.token_ids)}, {len(self.logprobs)}, {len(self.sampling_logprobs)} and {len(self.advantages)}"
            )


class Segment(NamedTuple):
    """Tokens `[start, end)` of the forest. `parent` is the index of the segment it continues, -1 for a root.

    `[end, subtree_end)` are the tokens of all its descendants, and of nothing else.
    """

    start: int
    end: int
    parent: int
    subtree_end: int


class Row(NamedTuple):
    """One root-to-leaf chain. `samples` are the indices of those whose targets it holds; each sample has one row."""

    leaf: int
    """Index of the segment it ends with."""
    length: int
    samples: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Forest:
    """See the module. Suffixes: T tokens, N targets, U unique predicting tokens. Build with `Forest.build` or `pack`."""

    samples: tuple[TokenSample, ...]
    numbers: tuple[int, ...]
    """Where each sample stood in the list given to `build` or `pack`."""
    token_ids_T: Ints
    positions_T: Ints
    segments: tuple[Segment, ...]
    rows: tuple[Row, ...]
    """One per leaf, in the forest's order."""
    target_predictor_N: Ints
    """Index in the forest of the token that predicts the target."""
    target_token_N: Ints
    target_sample_N: Ints
    """Index into `samples`."""
    target_index_N: Ints
    """Index into that sample's `token_ids`."""
    predictors_U: Ints
    """The distinct values of `target_predictor_N`, ascending: the places where the language-model head is needed."""
    target_slot_N: Ints
    """`predictors_U[target_slot_N] == target_predictor_N`."""

    @classmethod
    def build(cls, samples: Sequence[TokenSample]) -> Forest:
        """One forest of all samples. Samples without sampled tokens add no tokens and no targets."""
        return _Layout(_sorted_sequences(samples)).forest(tuple(samples), tuple(range(len(samples))))

    @property
    def tokens(self) -> int:
        """Tokens that the model runs over: the cost of training with sharing."""
        return len(self.token_ids_T)

    @property
    def row_tokens(self) -> int:
        """Tokens of all rows: the cost of training row by row."""
        return sum(row.length for row in self.rows)

    @property
    def targets(self) -> int:
        return len(self.target_token_N)

    def row_tokens_at(self, row: Row) -> Ints:
        """Indices in the forest of the row's tokens, from the root down."""
        chain: list[Ints] = []
        index = row.leaf
        while index >= 0:
            start, end, index, _ = self.segments[index]
            chain.append(np.arange(start, end, dtype=np.int64))
        return np.concatenate(chain[::-1])


def pack(samples: Sequence[TokenSample], tokens_per_microbatch: int, *, sharing: bool = True) -> list[Forest]:
    """Split samples into forests of at most `tokens_per_microbatch` tokens; every target is in exactly one of them.

    Rows stay whole and keep the forest's order, in which those that share most are neighbours; where a tree is cut, the
    prefix that both parts need is computed in both. Among all such cuts the one with the fewest tokens in total is taken,
    then the one with the fewest forests. A single row longer than the budget becomes a forest of its own.
    `sharing=False` counts whole rows against the budget, for a model that has to be trained row by row.
    """
    if tokens_per_microbatch < 1:
        raise InvalidRequest(f"tokens_per_microbatch must be at least 1, got {tokens_per_microbatch}")
    chains = _chains(_sorted_sequences(samples))
    length = np.array([len(chain[-1].ids) for chain in chains], dtype=np.int64)
    fresh = np.array([len(chain[-1].ids) - (chain[0].shared if sharing else 0) for chain in chains], dtype=np.int64)
    forests: list[Forest] = []
    for start, end in _cheapest_cuts(length, fresh, tokens_per_microbatch):
        part = [sequence for chain in chains[start:end] for sequence in chain]
        numbers = sorted(number for sequence in part for number in sequence.samples)
        local = {number: index for index, number in enumerate(numbers)}
        part = [_Sequence(s.ids, s.shared, tuple(local[number] for number in s.samples)) for s in part]
        part[0] = part[0]._replace(shared=0)
        forests.append(_Layout(part).forest(tuple(samples[n] for n in numbers), tuple(numbers)))
    return forests


class _Sequence(NamedTuple):
    """A distinct token sequence, `shared` tokens of which begin the one before it; the samples that spell it."""

    ids: Ints
    shared: int
    samples: tuple[int, ...]


def _sorted_sequences(samples: Sequence[TokenSample]) -> list[_Sequence]:
    """Distinct sequences in lexicographic order: a depth-first walk of their prefix tree, prefixes before what extends them."""
    arrays = {n: np.array(s.prompt_ids + s.token_ids, dtype=np.int64) for n, s in enumerate(samples) if s.token_ids}
    for number, array in arrays.items():
        if array.min() < 0 or array.max() > np.iinfo(np.uint32).max:
            raise InvalidRequest(f"sample {samples[number].id} has a token id outside 0..2^32-1")
    keys = {n: array.astype(">u4").tobytes() for n, array in arrays.items()}  # big-endian bytes compare as the ids do
    sequences: list[_Sequence] = []
    for _, same in groupby(sorted(keys, key=lambda n: (keys[n], n)), key=lambda n: keys[n]):
        numbers = tuple(same)
        ids = arrays[numbers[0]]
        shared = _common_prefix(sequences[-1].ids, ids) if sequences else 0
        sequences.append(_Sequence(ids, shared, numbers))
    return sequences


def _common_prefix(a: Ints, b: Ints) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _chains(sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
    """Group each sequence with those after it that extend it, up to the leaf: one chain per row."""
    chains: list[list[_Sequence]] = []
    for before, sequence in zip([None, *sequences], sequences, strict=False):
        if before is not None and sequence.shared == len(before.ids):
            chains[-1].append(sequence)
        else:
            chains.append([sequence])
    return chains


def _cheapest_cuts(length: Ints, fresh: Ints, budget: int) -> list[tuple[int, int]]:
    """Cut rows 0..R into consecutive parts; a part costs its first row's length and what each later row adds (`fresh`)."""
    rows = len(length)
    added = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(fresh)])
    best: list[tuple[int, int]] = [(0, 0)]
    cut: list[int] = [0]
    for end in range(1, rows + 1):
        options: list[tuple[int, int, int]] = []
        for start in range(end - 1, -1, -1):
            cost = int(length[start] + added[end] - added[start + 1])
            if cost > budget and start < end - 1:
                if int(added[end] - added[start + 1]) > budget:
                    break
                continue
            options.append((best[start][0] + cost, best[start][1] + 1, start))
        tokens, parts, start = min(options)
        best.append((tokens, parts))
        cut.append(start)
    parts_found: list[tuple[int, int]] = []
    end = rows
    while end > 0:
        parts_found.append((cut[end], end))
        end = cut[end]
    return parts_found[::-1]


class _Run(NamedTuple):
    """Part of the current root-to-leaf path: depths `[depth, depth + tokens)` lie at `[start, start + tokens)`."""

    start: int
    depth: int
    tokens: int


class _Layout:
    """Lays sorted sequences flat, one after the other, each adding only what it does not share with the one before."""

    def __init__(self, sequences: Sequence[_Sequence]) -> None:
        self._parts: list[Ints] = []
        self._size = 0
        self._path: list[_Run] = []
        self._parent_token: dict[int, int] = {}
        """First token of each segment → the token it continues (-1 for a root)."""
        self._places: dict[int, Ints] = {}
        """Sample → the forest indices of its tokens, from the first prompt token on."""
        self._row_samples: list[list[int]] = []
        self._row_end: list[tuple[int, int]] = []
        before = 0
        for sequence in sequences:
            extends = before > 0 and sequence.shared == before
            before = len(sequence.ids)
            if not extends:
                self._row_samples.append([])
                self._row_end.append((0, 0))
            self._add(sequence)
            self._row_samples[-1].extend(sequence.samples)
            self._row_end[-1] = (self._size - 1, len(sequence.ids))

    def _add(self, sequence: _Sequence) -> None:
        shared, ids = sequence.shared, sequence.ids
        while self._path and self._path[-1].depth >= shared:
            self._path.pop()
        parent = -1
        if self._path:
            start, depth, tokens = self._path[-1]
            keep = shared - depth
            parent = start + keep - 1
            if parent + 1 < self._size:  # a fork: what already follows the parent becomes its child
                self._path[-1] = _Run(start, depth, keep)
                self._parent_token.setdefault(parent + 1, parent)
        fresh = len(ids) - shared
        if parent >= 0 and parent + 1 == self._size:
            start, depth, tokens = self._path[-1]
            self._path[-1] = _Run(start, depth, tokens + fresh)
        else:
            self._parent_token[self._size] = parent
            self._path.append(_Run(self._size, shared, fresh))
        self._parts.append(ids[shared:])
        self._size += fresh
        places = np.concatenate([np.arange(run.start, run.start + run.tokens, dtype=np.int64) for run in self._path])
        for sample in sequence.samples:
            self._places[sample] = places

    def forest(self, samples: tuple[TokenSample, ...], numbers: tuple[int, ...]) -> Forest:
        segments = self._segments()
        token_ids_T = np.concatenate(self._parts) if self._parts else np.zeros(0, dtype=np.int64)
        positions_T = np.zeros(self._size, dtype=np.int64)
        for start, end, parent, _ in segments:
            first = 0 if parent < 0 else int(positions_T[segments[parent].end - 1]) + 1
            positions_T[start:end] = np.arange(first, first + end - start)
        starts = [segment.start for segment in segments]
        rows = tuple(
            Row(int(np.searchsorted(starts, last, side="right")) - 1, length, tuple(sorted(row_samples)))
            for (last, length), row_samples in zip(self._row_end, self._row_samples, strict=True)
        )
        predictor_N, token_N, sample_N, index_N = self._targets(samples)
        predictors_U, slot_N = np.unique(predictor_N, return_inverse=True)
        return Forest(
            samples, numbers, token_ids_T, positions_T, segments, rows, predictor_N, token_N, sample_N, index_N,
            predictors_U, slot_N.astype(np.int64),
        )  # fmt: skip

    def _segments(self) -> tuple[Segment, ...]:
        starts = sorted(self._parent_token)
        ends = [*starts[1:], self._size][: len(starts)]
        last_token = {end - 1: number for number, end in enumerate(ends)}
        parents = [-1 if self._parent_token[start] < 0 else last_token[self._parent_token[start]] for start in starts]
        subtree_end = list(ends)
        for number in range(len(starts) - 1, -1, -1):
            if parents[number] >= 0:
                subtree_end[parents[number]] = max(subtree_end[parents[number]], subtree_end[number])
        rows = zip(starts, ends, parents, subtree_end, strict=True)
        return tuple(Segment(*row) for row in rows)

    def _targets(self, samples: tuple[TokenSample, ...]) -> tuple[Ints, Ints, Ints, Ints]:
        empty = np.zeros(0, dtype=np.int64)
        predictors, tokens, owners, indices = [empty], [empty], [empty], [empty]
        for number, sample in enumerate(samples):
            if number not in self._places:
                continue
            places, first, count = self._places[number], len(sample.prompt_ids), len(sample.token_ids)
            predictors.append(places[first - 1 : first + count - 1])
            tokens.append(np.array(sample.token_ids, dtype=np.int64))
            owners.append(np.full(count, number, dtype=np.int64))
            indices.append(np.arange(count, dtype=np.int64))
        return np.concatenate(predictors), np.concatenate(tokens), np.concatenate(owners), np.concatenate(indices)
