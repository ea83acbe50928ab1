"""Drawn tokens follow the stated distribution, and both log-probabilities are right."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apprentice.core.engines.sampling import Drawing, draw
from apprentice.core.errors import EngineError
from apprentice.core.records import SamplingParams

DRAWS = 40_000


def reference(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """The distribution drawn from, in float64 numpy, written without the code under test."""
    scaled = logits.double().numpy() / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += probabilities[token]
        if mass >= top_p:
            break
    nucleus = np.zeros_like(probabilities)
    nucleus[kept] = probabilities[kept] / probabilities[kept].sum()
    return nucleus


def frequencies(logits: torch.Tensor, **params: float) -> tuple[np.ndarray, list]:
    generator = random.Random(1)
    drawing = Drawing(SamplingParams(**params), generator)
    rows = 2000
    drawn = [row for _ in range(DRAWS // rows) for row in draw(logits.expand(rows, -1), [drawing] * rows)]
    return np.bincount([row.token_id for row in drawn], minlength=len(logits)), drawn


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard normal score of Pearson's statistic (Wilson and Hilferty 1931); cells under 5 expected are merged."""
    big = expected * counts.sum() >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum()) * counts.sum()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    if freedom == 0:
        return 0.0
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("vocabulary", [7, 256, 700])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 1.0), (1.0, 0.8), (0.7, 0.5), (1.5, 0.95)])
def test_drawn_frequencies_follow_the_distribution(vocabulary: int, temperature: float, top_p: float) -> None:
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    expected = reference(logits, temperature, top_p)
    counts, drawn = frequencies(logits, temperature=temperature, top_p=top_p)
    assert counts[expected == 0].sum() == 0
    assert abs(chi_square(counts, expected)) < 4
    model = logits.double().log_softmax(-1)
    for row in drawn[:500]:
        assert row.sampling_logprob == pytest.approx(math.log(expected[row.token_id]), abs=1e-5)
        assert row.logprob == pytest.approx(float(model[row.token_id]), abs=1e-5)


def test_a_wrong_distribution_would_be_noticed() -> None:
    logits = 2 * torch.randn(256, generator=torch.Generator().manual_seed(0))
    counts, _ = frequencies(logits, temperature=1.1)
    assert chi_square(counts, reference(logits, 1.0, 1.0)) > 8


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(2, 3000),
    spread=st.floats(0.1, 20),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**32),
)
def test_the_sampling_logprob_is_that_of_an_independent_implementation(
    vocabulary: int, spread: float, temperature: float, top_p: float, seed: int
) -> None:
    logits = spread * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed))
    drawings = [Drawing.of(SamplingParams(temperature=temperature, top_p=top_p, seed=seed + row)) for row in range(3)]
    for row, drawn in enumerate(draw(logits, drawings)):
        close = [reference(logits[row], temperature, p) for p in (top_p, max(top_p - 1e-6, 1e-9), min(top_p + 1e-6, 1.0))]
        assert any(
            expected[drawn.token_id] > 0 and abs(drawn.sampling_logprob - math.log(expected[drawn.token_id])) < 1e-4 for expected in close
        )


def test_rows_of_one_batch_have_their_own_parameters() -> None:
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(4))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(top_p=0.3, seed=3, top_logprobs=2),
    ]
    together = draw(logits, [Drawing.of(one) for one in params])
    alone = [draw(logits[row : row + 1], [Drawing.of(one)])[0] for row, one in enumerate(params)]
    assert [row.token_id for row in together] == [row.token_id for row in alone]
    assert together[0].token_id == int(logits[0].argmax())
    assert [len(row.top) for row in together] == [0, 0, 0, 2]
    assert together[3].top[0][0] == int(logits[3].argmax())
    assert together[3].top[0][1] == pytest.approx(float(logits[3].log_softmax(-1).max()), abs=1e-5)


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 300)
    before = logits.clone()
    draw(logits, [Drawing.of(SamplingParams(temperature=0.7)), Drawing.of(SamplingParams(top_p=0.5))])
    assert torch.equal(logits, before)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, [3, 255, 256, 999]] = 0.0

    class Edge(random.Random):
        def random(self) -> float:
            return self.value

    for value in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        for params in (SamplingParams(), SamplingParams(top_p=0.999)):
            generator = Edge()
            generator.value = value
            drawn = draw(logits, [Drawing(params, generator)])[0]
            assert drawn.token_id in (3, 255, 256, 999)
            assert drawn.sampling_logprob == pytest.approx(math.log(0.25), abs=1e-6)


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(9))
    cold = draw(logits, [Drawing.of(SamplingParams(temperature=1e-300))])[0]
    assert (cold.token_id, cold.sampling_logprob) == (int(logits.argmax()), 0.0)
    nearly = draw(logits, [Drawing.of(SamplingParams(temperature=2e-5))])[0]
    assert nearly.token_id == cold.token_id
    hot = draw(logits, [Drawing.of(SamplingParams(temperature=100))])[0]
    assert hot.sampling_logprob == pytest.approx(-math.log(50), abs=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 4] = bad
    with pytest.raises(EngineError, match="not finite"):
        draw(logits, [Drawing.of(SamplingParams())] * 2)
