"""Which scenarios come next: in turn, or by how often they are solved."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apprentice import Scenario
from apprentice.core.client.curriculum import Curriculum, drawn, drawn_by_weight


@given(st.integers(1, 7), st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_the_data_cursor_means_the_same_whatever_the_batches_are(size: int, batches: list[int], seed: int) -> None:
    taken: list[int] = []
    for batch in batches:
        taken += drawn(size, len(taken), batch, seed)
    assert taken == drawn(size, 0, sum(batches), seed)
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))


def test_drawing_does_not_touch_the_global_generator() -> None:
    state = random.getstate()
    assert drawn(10, 0, 20, 1) != drawn(10, 0, 20, 2)
    assert random.getstate() == state


def test_what_is_solved_sometimes_is_drawn_more_often_than_what_is_hopeless_or_trivial() -> None:
    scenarios = [Scenario(id=name, input=name) for name in ("never", "sometimes", "always", "untried")]
    weights = Curriculum("success").weights(scenarios, {"never": 0.0, "sometimes": 0.5, "always": 1.0})
    assert weights[1] == weights[3] > 5 * weights[0] == 5 * weights[2] > 0
    drawn_counts = Counter(index for start in range(2000) for index in drawn_by_weight(weights, start, 1, 0))
    total = sum(weights)
    for index, weight in enumerate(weights):  # single draws are in proportion to the weights
        assert drawn_counts[index] / 2000 == pytest.approx(weight / total, abs=0.04)


def test_an_untried_scenario_counts_as_solved_as_often_as_its_sort() -> None:
    scenarios = [Scenario(id=f"{sort}{n}", input=sort, metadata={"sort": sort}) for sort in ("easy", "open", "new") for n in range(3)]
    curriculum = Curriculum("success", lambda scenario: str(scenario.metadata["sort"]))
    weights = dict(zip((s.id for s in scenarios), curriculum.weights(scenarios, {"easy0": 1.0, "open0": 0.25, "open1": 0.75}), strict=True))
    assert weights["easy1"] == weights["easy2"] == weights["easy0"]
    assert weights["open2"] == weights["new0"] == weights["new2"] > weights["open0"] == weights["open1"] > 4 * weights["easy1"]


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=12), st.integers(0, 1000), st.integers(1, 15))
def test_a_weighted_draw_repeats_nothing_within_a_step_and_itself_for_a_seed(weights: list[float], start: int, count: int) -> None:
    found = drawn_by_weight(weights, start, count, 7)
    assert len(found) == len(set(found)) == min(count, len(weights))
    assert found == drawn_by_weight(weights, start, count, 7)
