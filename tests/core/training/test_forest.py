"""The forest holds what the samples say, whatever the tree; packing splits it without losing or doubling a target."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from support.forests import sample, trees

from apprentice.core.errors import InvalidRequest
from apprentice.core.training.forest import Forest, TokenSample, pack

SampleList = list[TokenSample]


def spelled(forest: Forest, token: int) -> tuple[int, ...]:
    """The tokens from the root down to a place in the forest, read along the segments' parents."""
    segment = next(n for n, s in enumerate(forest.segments) if s.start <= token < s.end)
    path = list(forest.token_ids_T[forest.segments[segment].start : token + 1])
    while (segment := forest.segments[segment].parent) >= 0:
        path = list(forest.token_ids_T[forest.segments[segment].start : forest.segments[segment].end]) + path
    return tuple(int(t) for t in path)


def distinct_prefixes(samples: SampleList) -> set[tuple[int, ...]]:
    sequences = [s.prompt_ids + s.token_ids for s in samples if s.token_ids]
    return {sequence[:n] for sequence in sequences for n in range(1, len(sequence) + 1)}


def leaves(samples: SampleList) -> set[tuple[int, ...]]:
    sequences = {s.prompt_ids + s.token_ids for s in samples if s.token_ids}
    return {a for a in sequences if not any(a != b and b[: len(a)] == a for b in sequences)}


@settings(max_examples=80, deadline=None)
@given(trees())
def test_every_distinct_prefix_is_one_token_and_stands_once(samples: SampleList) -> None:
    forest = Forest.build(samples)
    assert sorted(spelled(forest, t) for t in range(forest.tokens)) == sorted(distinct_prefixes(samples))
    assert [len(spelled(forest, t)) - 1 for t in range(forest.tokens)] == forest.positions_T.tolist()


@settings(max_examples=80, deadline=None)
@given(trees())
def test_every_sampled_token_is_one_target_in_its_own_context(samples: SampleList) -> None:
    forest = Forest.build(samples)
    expected = [(n, i) for n, s in enumerate(samples) for i in range(len(s.token_ids))]
    assert list(zip(forest.target_sample_N.tolist(), forest.target_index_N.tolist(), strict=True)) == expected
    for n, (number, index) in enumerate(expected):
        one = samples[number]
        assert spelled(forest, int(forest.target_predictor_N[n])) == one.prompt_ids + one.token_ids[:index]
        assert forest.target_token_N[n] == one.token_ids[index]
    assert (forest.predictors_U[forest.target_slot_N] == forest.target_predictor_N).all()
    assert (np.diff(forest.predictors_U) > 0).all()


@settings(max_examples=80, deadline=None)
@given(trees())
def test_segments_fork_only_at_their_ends_and_subtrees_are_contiguous(samples: SampleList) -> None:
    forest = Forest.build(samples)
    assert [s.start for s in forest.segments] == [0, *(s.end for s in forest.segments[:-1])][: len(forest.segments)]
    children: dict[int, list[int]] = {}
    for number, segment in enumerate(forest.segments):
        assert segment.parent < number
        assert segment.start < segment.end
        children.setdefault(segment.parent, []).append(number)
    for number, segment in enumerate(forest.segments):
        assert len(children.get(number, [])) != 1, "an only child belongs to its parent's segment"
        descendants = {number}
        for later in range(number + 1, len(forest.segments)):
            if forest.segments[later].parent in descendants:
                descendants.add(later)
        assert segment.subtree_end == max(forest.segments[d].end for d in descendants)
        assert sum(forest.segments[d].end - forest.segments[d].start for d in descendants) == segment.subtree_end - segment.start


@settings(max_examples=80, deadline=None)
@given(trees())
def test_there_are_as_many_rows_as_leaves_and_each_sample_lies_on_one(samples: SampleList) -> None:
    forest = Forest.build(samples)
    row_ids = [tuple(forest.token_ids_T[forest.row_tokens_at(row)].tolist()) for row in forest.rows]
    assert sorted(row_ids) == sorted(leaves(samples))
    assert forest.row_tokens == sum(len(ids) for ids in row_ids) == sum(row.length for row in forest.rows)
    assert sorted(n for row in forest.rows for n in row.samples) == [n for n, s in enumerate(samples) if s.token_ids]
    for row, ids in zip(forest.rows, row_ids, strict=True):
        for n in row.samples:
            sequence = samples[n].prompt_ids + samples[n].token_ids
            assert ids[: len(sequence)] == sequence


@settings(max_examples=80, deadline=None)
@given(
    trees(),
    trees(),
)
def test_packing_keeps_every_target_once_and_the_budget(first: SampleList, second: SampleList) -> None:
    samples = first + second
    for budget in (1, 7, 20, 10_000):
        forests = pack(samples, budget)
        found = [
            (forest.numbers[s], i)
            for forest in forests
            for s, i in zip(forest.target_sample_N.tolist(), forest.target_index_N.tolist(), strict=True)
        ]
        assert sorted(found) == [(n, i) for n, s in enumerate(samples) for i in range(len(s.token_ids))]
        for forest in forests:
            assert forest.samples == tuple(samples[n] for n in forest.numbers)
            assert forest.tokens <= budget or len(forest.rows) == 1
            rebuilt = Forest.build(forest.samples)
            assert (rebuilt.segments, rebuilt.rows) == (forest.segments, forest.rows)
            assert (rebuilt.token_ids_T == forest.token_ids_T).all()
            assert (rebuilt.target_predictor_N == forest.target_predictor_N).all()
    assert len(pack(samples, 10_000)) == any(s.token_ids for s in samples)


@settings(max_examples=60, deadline=None)
@given(trees())
def test_packing_finds_the_cheapest_cut_of_the_rows_in_order(samples: SampleList) -> None:
    budget = 14
    rows = sorted(leaves(samples))

    def cost(part: list[tuple[int, ...]]) -> int:
        return len({row[:n] for row in part for n in range(1, len(row) + 1)})

    def cheapest(start: int) -> tuple[int, int]:
        if start == len(rows):
            return 0, 0
        options: list[tuple[int, int]] = []
        for end in range(start + 1, len(rows) + 1):
            if cost(rows[start:end]) <= budget or end == start + 1:
                tokens, parts = cheapest(end)
                options.append((tokens + cost(rows[start:end]), parts + 1))
        return min(options)

    if len(rows) <= 8:
        forests = pack(samples, budget)
        assert (sum(f.tokens for f in forests), len(forests)) == cheapest(0)


def test_a_rollout_of_several_turns_is_one_row_with_targets_in_the_middle() -> None:
    turns = [sample("a", (1, 2), (3, 4)), sample("b", (1, 2, 3, 4, 9, 9), (5,)), sample("c", (1, 2, 3, 4, 9, 9, 5, 8), (6, 7))]
    forest = Forest.build(turns)
    assert forest.token_ids_T.tolist() == [1, 2, 3, 4, 9, 9, 5, 8, 6, 7]
    assert len(forest.rows) == len(forest.segments) == 1
    assert forest.rows[0].samples == (0, 1, 2)
    assert forest.target_predictor_N.tolist() == [1, 2, 5, 7, 8]


def test_identical_samples_are_one_row_and_separate_targets() -> None:
    forest = Forest.build([sample("a", (1,), (2, 3)), sample("b", (1,), (2, 3)), sample("c", (1, 2), (3,))])
    assert forest.tokens == 3
    assert forest.rows[0].samples == (0, 1, 2)
    assert forest.target_predictor_N.tolist() == [0, 1, 0, 1, 1]
    assert forest.predictors_U.tolist() == [0, 1]


def test_a_fork_inside_a_sampled_turn_cuts_the_segment_there() -> None:
    forest = Forest.build([sample("a", (1, 2), (3, 4, 5)), sample("b", (1, 2), (3, 6))])
    assert [(s.start, s.end, s.parent, s.subtree_end) for s in forest.segments] == [(0, 3, -1, 6), (3, 5, 0, 5), (5, 6, 0, 6)]
    assert forest.target_predictor_N.tolist() == [1, 2, 3, 1, 2]


def test_samples_without_tokens_add_nothing() -> None:
    forest = Forest.build([sample("a", (1, 2), ()), sample("b", (3,), (4,))])
    assert (forest.tokens, forest.targets, forest.rows[0].samples) == (2, 1, (1,))
    assert Forest.build([]).tokens == 0
    assert pack([], 10) == []


def test_a_group_of_separate_tokens_fills_micro_batches_without_sharing_when_told_so() -> None:
    group = [sample(str(n), (1, 2, 3, 4), (n,)) for n in range(5, 9)]
    assert [f.tokens for f in pack(group, 8)] == [8]
    assert [f.row_tokens for f in pack(group, 10, sharing=False)] == [10, 10]


def test_building_a_large_job_costs_a_bounded_number_of_python_steps() -> None:
    """Counted, not timed: the work besides array operations grows with the samples, not with their tokens."""
    import sys

    def steps(tokens: int) -> int:
        rng = random.Random(0)
        prompt = [rng.randrange(50_000) for _ in range(tokens)]
        samples = [sample(str(n), prompt, [rng.randrange(50_000) for _ in range(tokens)]) for n in range(8)]
        lines = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # pyright: ignore[reportArgumentType]
        try:
            Forest.build(samples)
        finally:
            sys.settrace(before)
        return lines

    assert steps(4_000) < 1.5 * steps(40)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt_ids": ()}, "empty prompt"),
        ({"logprobs": (0.0,)}, "must have one length"),
        ({"advantages": ()}, "must have one length"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused_with_a_sentence(fields: dict[str, tuple[float, ...]], sentence: str) -> None:
    good = {"prompt_ids": (1,), "token_ids": (2, 3), "logprobs": (0.0, 0.0), "sampling_logprobs": (0.0, 0.0), "advantages": (1.0, 1.0)}
    with pytest.raises(InvalidRequest, match=sentence):
        TokenSample("x", **{**good, **fields})  # pyright: ignore[reportArgumentType]


def test_impossible_budgets_and_token_ids_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1, got 0"):
        pack([sample("a", (1,), (2,))], 0)
    with pytest.raises(InvalidRequest, match="sample a has a token id outside"):
        Forest.build([sample("a", (1,), (-2,))])
