"""Advantages equal TRL's, and every trajectory has a fate."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl_oracle import random_batch, run_trl

from apprentice.core.config import TrainConfig
from apprentice.core.errors import InvalidRequest
from apprentice.core.records import Fate
from apprentice.core.training.advantages import Rollout, compute_advantages, group_advantages

NO_FLOOR = {"min_reward_std": 0.0}


def rollouts(prefix: str, rewards: list[float | None]) -> list[Rollout]:
    return [Rollout(f"{prefix}{i}", reward, (f"{prefix}{i}.0", f"{prefix}{i}.1")) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl_for_every_scaling(tmp_path: Path, scale: str) -> None:
    batch = random_batch(11, rows=12)
    trl = run_trl(tmp_path, batch, importance_sampling=False, scale_rewards=scale).advantages_B.tolist()
    rewards = batch.rewards_B.tolist()
    groups = [rollouts(f"g{g}-", rewards[g * 4 : g * 4 + 4]) for g in range(3)]
    ours = compute_advantages(groups, TrainConfig.model_validate({"scale_rewards": scale}))
    assert [ours.by_completion[f"g{i // 4}-{i % 4}.1"] for i in range(12)] == pytest.approx(trl, rel=1e-9)
    assert ours.metrics["reward/mean"] == pytest.approx(batch.rewards_B.mean().item())
    assert ours.metrics["reward/std"] == pytest.approx(batch.rewards_B.std().item())


def test_worked_example_of_one_group() -> None:
    """Rewards 0, 1: mean 0.5, std with Bessel 0.70710…, so ±0.5 / (0.70710… + 1e-4)."""
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert group_advantages([0.0, 1.0], TrainConfig()) == pytest.approx([-expected, expected])
    assert group_advantages([0.0, 1.0], TrainConfig(scale_rewards="none")) == [-0.5, 0.5]
    assert group_advantages([0.0, 1.0], TrainConfig(scale_rewards="batch"), scale_std=1.0) == pytest.approx([-0.5 / 1.0001, 0.5 / 1.0001])


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one(rewards: list[float]) -> None:
    """Kool et al. 2019: r_i - mean of the others = n / (n-1) · (r_i - mean of all)."""
    config = {"scale_rewards": "none", **NO_FLOOR}
    mean = group_advantages(rewards, TrainConfig.model_validate(config))
    left_out = group_advantages(rewards, TrainConfig.model_validate({**config, "baseline": "leave_one_out"}))
    if mean is None:
        assert left_out is None
        assert min(rewards) == max(rewards)
    else:
        assert left_out == pytest.approx([a * len(rewards) / (len(rewards) - 1) for a in mean], abs=1e-9)


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=5), min_size=1, max_size=4))
def test_every_trajectory_has_a_fate_and_only_trained_ones_have_advantages(rewards: list[list[float | None]]) -> None:
    groups = [rollouts(f"g{g}-", group) for g, group in enumerate(rewards)]
    found = compute_advantages(groups, TrainConfig(scale_rewards="none"))
    everyone = {r.trajectory_id for group in groups for r in group}
    assert set(found.fates) == everyone
    assert {c.rsplit(".", 1)[0] for c in found.by_completion} == {t for t, fate in found.fates.items() if fate is Fate.trained}
    for group in groups:
        values = [found.by_completion[r.completion_ids[0]] for r in group if found.fates[r.trajectory_id] is Fate.trained]
        assert sum(values) == pytest.approx(0.0, abs=1e-9)


def test_reasons_for_no_update_are_told_apart() -> None:
    groups = [
        rollouts("equal", [0.3, 0.3, 0.3]),
        rollouts("noise", [0.5, 0.5004, None]),
        rollouts("alone", [1.0]),
        rollouts("judgeless", [None, None]),
        rollouts("lonely", [0.7, None]),
        [Rollout("empty", 1.0, ()), Rollout("full", 0.0, ("c",))],
    ]
    found = compute_advantages(groups, TrainConfig())
    assert found.fates == {
        "equal0": Fate.equal_rewards,
        "equal1": Fate.equal_rewards,
        "equal2": Fate.equal_rewards,
        "noise0": Fate.equal_rewards,
        "noise1": Fate.equal_rewards,
        "noise2": Fate.no_reward,
        "alone0": Fate.group_of_one,
        "judgeless0": Fate.no_reward,
        "judgeless1": Fate.no_reward,
        "lonely0": Fate.group_of_one,
        "lonely1": Fate.no_reward,
        "empty": Fate.no_completions,
        "full": Fate.trained,
    }
    assert set(found.by_completion) == {"c"}
    assert found.metrics["groups/submitted"] == 6
    assert found.metrics["groups/trained"] == 1
    assert found.metrics["trajectories/trained"] == 1


def test_equal_rewards_give_no_update_even_without_a_floor() -> None:
    assert group_advantages([0.1] * 7, TrainConfig(min_reward_std=0.0)) is None
    assert group_advantages([0.1, 0.1 + 1e-9], TrainConfig(min_reward_std=0.0)) is not None


def test_a_missing_reward_is_not_zero() -> None:
    with_gap = compute_advantages([rollouts("a", [1.0, None, 3.0])], TrainConfig(scale_rewards="none"))
    assert with_gap.by_completion == {"a0.0": -1.0, "a0.1": -1.0, "a2.0": 1.0, "a2.1": 1.0}


def test_completion_rewards_replace_the_trajectorys_and_are_compared_with_each_other_only() -> None:
    group = [
        Rollout("a", 1.0, ("a.0", "a.1"), {"a.0": 10.0}),
        Rollout("b", 0.0, ("b.0", "b.1"), {"b.1": 30.0}),
    ]
    found = compute_advantages([group], TrainConfig(scale_rewards="none"))
    assert found.by_completion == {"a.0": -10.0, "a.1": 0.5, "b.0": -0.5, "b.1": 10.0}


def test_equal_completion_rewards_leave_the_trajectory_trained_by_its_other_calls() -> None:
    group = [Rollout("a", 1.0, ("a.0", "a.1"), {"a.0": 1.0}), Rollout("b", 0.0, ("b.0",), {"b.0": 1.0})]
    found = compute_advantages([group], TrainConfig())
    assert set(found.by_completion) == {"a.1"}
    assert found.fates == {"a": Fate.trained, "b": Fate.equal_rewards}


def test_completion_rewards_alone_can_train_a_single_trajectory() -> None:
    found = compute_advantages([[Rollout("a", None, ("x", "y"), {"x": 0.0, "y": 1.0})]], TrainConfig(scale_rewards="none"))
    assert found.by_completion == {"x": -0.5, "y": 0.5}
    assert found.metrics["reward/mean"] == 0.5


def test_leave_one_out_leaves_out_the_whole_trajectory() -> None:
    group = [Rollout("a", None, ("a.0", "a.1"), {"a.0": 4.0, "a.1": 6.0}), Rollout("b", None, ("b.0",), {"b.0": 1.0})]
    found = compute_advantages([group], TrainConfig(scale_rewards="none", baseline="leave_one_out"))
    assert found.by_completion == {"a.0": 3.0, "a.1": 5.0, "b.0": -4.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    with pytest.raises(InvalidRequest, match="trajectory t must be a finite number"):
        compute_advantages([[Rollout("t", bad, ("c",))]], TrainConfig())
    with pytest.raises(InvalidRequest, match="finite"):
        compute_advantages([[Rollout("t", 1.0, ("c",), {"c": bad})]], TrainConfig())
    with pytest.raises(InvalidRequest, match="finite"):
        group_advantages([bad, 1.0], TrainConfig())


def test_a_trajectory_in_two_groups_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="t came twice"):
        compute_advantages([[Rollout("t", 1.0, ("c",))], [Rollout("t", 0.0, ("d",))]], TrainConfig())
