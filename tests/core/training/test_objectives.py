"""Every objective equals TRL 1.16's on the same numbers, and splitting a step never changes its gradient."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trl_oracle import PaddedBatch, random_batch, run_trl

from apprentice.core.config import TrainConfig
from apprentice.core.training.objectives import Normalisers, ObjectiveBatch, importance_weights, kl_k3, policy_loss

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo")
IS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off")


def flat(batch: PaddedBatch, values_BT: Tensor) -> Tensor:
    return values_BT[batch.trained_BT]


def normalisers(batch: PaddedBatch, rows: slice = slice(None), windows: int = 1) -> Normalisers:
    lengths = batch.trained_BT.sum(1).double()
    return Normalisers(lengths[rows], float(lengths[rows].sum()), float(lengths.sum()) / windows, batch.mask_BT.shape[1])


def our_loss(
    batch: PaddedBatch, config: TrainConfig, advantages_B: Tensor, rows: slice = slice(None), windows: int = 1
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss and gradient in the padded layout, for the optimizer step that trains `rows`."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    advantages_BT = advantages_B if advantages_B.dim() == 2 else advantages_B[:, None].expand_as(batch.old_BT)
    sequence_BT = torch.arange(batch.mask_BT.shape[0])[:, None].expand_as(batch.mask_BT)
    chosen_BT = torch.zeros_like(batch.trained_BT)
    chosen_BT[rows] = batch.trained_BT[rows]
    sequence_N = sequence_BT[chosen_BT] - (rows.start or 0)
    old_N = batch.old_BT[chosen_BT]
    objective = ObjectiveBatch(
        logprobs_N=logprobs_BT[chosen_BT],
        old_logprobs_N=old_N,
        importance_weights_N=importance_weights(old_N, batch.sampling_BT[chosen_BT], sequence_N, config),
        ref_logprobs_N=batch.ref_BT[chosen_BT] if config.beta else None,
        advantages_N=advantages_BT[chosen_BT],
        sequence_N=sequence_N,
        normalisers=normalisers(batch, rows, windows),
    )
    loss, sums = policy_loss(objective, config)
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.item(), logprobs_BT.grad, sums


def trl_options(config: TrainConfig) -> dict[str, object]:
    mode = config.importance_sampling
    gspo = config.loss_type == "gspo"
    return {
        "importance_sampling": mode != "off",
        "loss_type": "grpo" if gspo else config.loss_type,
        "importance_sampling_level": "sequence" if gspo else "token",
        "epsilon": config.epsilon,
        "epsilon_high": config.epsilon_high,
        "delta": config.delta,
        "beta": config.beta,
        **({} if mode == "off" else {"vllm_importance_sampling_mode": mode}),
        "vllm_importance_sampling_clip_max": config.importance_sampling_cap,
    }


def assert_equals_trl(folder: Path, batch: PaddedBatch, config: TrainConfig, *, windows: int = 1, window: int = 0) -> None:
    trl = run_trl(folder, batch, windows=windows, window=window, **trl_options(config))
    advantages = trl.advantages_B if batch.advantages_BT is None else batch.advantages_BT
    size = batch.mask_BT.shape[0] // windows
    loss, grad, sums = our_loss(batch, config, advantages, slice(window * size, (window + 1) * size), windows)
    assert loss == pytest.approx(trl.loss, rel=1e-9, abs=1e-12)
    assert torch.allclose(grad, trl.grad_BT, rtol=1e-9, atol=1e-12)
    assert grad.abs().sum() > 0
    if config.beta:
        assert sums["kl"] / sums["tokens"] == pytest.approx(trl.metrics["kl"][0], rel=1e-9)
    if config.loss_type == "cispo":
        assert sums["clip_high"] / sums["clip_units"] == pytest.approx(trl.metrics["cispo_clip_ratio"][0], abs=1e-6)
    elif batch.advantages_BT is None:
        assert sums["clip_low"] / sums["clip_units"] == pytest.approx(trl.metrics["clip_ratio/low_mean"][0], abs=1e-6)
        assert sums["clip_high"] / sums["clip_units"] == pytest.approx(trl.metrics["clip_ratio/high_mean"][0], abs=1e-6)


@pytest.mark.parametrize("mode", IS_MODES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_equal_trl_for_every_loss_and_importance_sampling_mode(tmp_path: Path, loss_type: str, mode: str) -> None:
    config = TrainConfig.model_validate({"loss_type": loss_type, "importance_sampling": mode, "importance_sampling_cap": 1.2})
    assert_equals_trl(tmp_path, random_batch(1), config)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_equal_trl_with_delta_asymmetric_clipping_and_kl(tmp_path: Path, loss_type: str) -> None:
    config = TrainConfig.model_validate({"loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.35, "beta": 0.07})
    for seed in (2, 3):
        assert_equals_trl(tmp_path, random_batch(seed, drift=0.6), config)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_that_differ_within_a_sequence_equal_trl(tmp_path: Path, loss_type: str) -> None:
    batch = random_batch(4)
    batch.advantages_BT = torch.randn(8, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_equals_trl(tmp_path, batch, TrainConfig.model_validate({"loss_type": loss_type, "beta": 0.1}))


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_several_optimizer_steps_in_a_batch_have_trls_normalisers(tmp_path: Path, loss_type: str, window: int) -> None:
    assert_equals_trl(tmp_path, random_batch(5), TrainConfig.model_validate({"loss_type": loss_type}), windows=2, window=window)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_micro_batches_of_trl_sum_to_our_step(tmp_path: Path, loss_type: str) -> None:
    """bnpo is left out on purpose: TRL normalises it per micro-batch, so there its result depends on the split."""
    batch = random_batch(6)
    config = TrainConfig.model_validate({"loss_type": loss_type, "beta": 0.05})
    trl = run_trl(tmp_path, batch, microbatches=4, **trl_options(config))
    loss, grad, _ = our_loss(batch, config, trl.advantages_B)
    assert loss == pytest.approx(trl.loss, rel=1e-9)
    assert torch.allclose(grad, trl.grad_BT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
def test_any_split_into_micro_batches_even_within_a_sequence_has_the_same_gradient(loss_type: str) -> None:
    config = TrainConfig.model_validate({"loss_type": loss_type, "beta": 0.1, "importance_sampling": "sequence_truncate"})
    g = torch.Generator().manual_seed(7)
    batch = random_batch(7)
    old, sampling, ref = (flat(batch, v) for v in (batch.old_BT, batch.sampling_BT, batch.ref_BT))
    sequence = flat(batch, torch.arange(8)[:, None].expand_as(batch.mask_BT))
    advantages = torch.randn(old.shape, generator=g, dtype=torch.float64)
    weights = importance_weights(old, sampling, sequence, config)
    assert weights is not None

    def gradient(parts: list[Tensor]) -> tuple[float, Tensor]:
        logprobs = flat(batch, batch.logprobs_BT).clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for index in parts:
            piece = ObjectiveBatch(
                logprobs[index], old[index], weights[index], ref[index], advantages[index], sequence[index], normalisers(batch)
            )
            total = total + policy_loss(piece, config)[0]
        total.backward()
        assert logprobs.grad is not None
        return total.item(), logprobs.grad

    order = torch.randperm(old.numel(), generator=g)
    whole_loss, whole = gradient([torch.arange(old.numel())])
    split_loss, split = gradient([order[:3], order[3:17], order[17:]])
    assert split_loss == pytest.approx(whole_loss, rel=1e-12)
    assert torch.allclose(split, whole, rtol=1e-12, atol=0)


def test_worked_example_of_clipping_importance_weights_and_normalisers() -> None:
    """Two sequences, A = +1 (tokens with ratio 1.5 and 1.0) and A = -2 (one token with ratio 0.5); w = 2 (capped), 1, 1."""
    old = torch.tensor([math.log(0.2), math.log(0.5), math.log(0.4)], dtype=torch.float64)
    logprobs = torch.tensor([math.log(0.3), math.log(0.5), math.log(0.2)], dtype=torch.float64)
    sampling = torch.tensor([math.log(0.05), math.log(0.5), math.log(0.4)], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1])
    advantages = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)

    def loss(loss_type: str) -> float:
        config = TrainConfig.model_validate({"loss_type": loss_type})
        weights = importance_weights(old, sampling, sequence, config)
        norms = Normalisers(torch.tensor([2.0, 1.0], dtype=torch.float64), 3.0, 6.0, 10)
        return policy_loss(ObjectiveBatch(logprobs, old, weights, None, advantages, sequence, norms), config)[0].item()

    tokens = [-1.2 * 2, -1.0, 0.8 * 2]  # clip(1.5)=1.2 times w=2; ratio 1; max(0.5·2, clip(0.5)=0.8·2)
    assert loss("grpo") == pytest.approx(((tokens[0] + tokens[1]) / 2 + tokens[2]) / 2)
    assert loss("bnpo") == pytest.approx(sum(tokens) / 3)
    assert loss("dapo") == pytest.approx(sum(tokens) / 6)
    assert loss("dr_grpo") == pytest.approx(sum(tokens) / (2 * 10))


def test_on_policy_gradient_is_the_advantage_weighted_score_function() -> None:
    """At π = π_old every loss but cispo (cap ε_high ≥ 1 needed) has dL/dlogp = -A·w / normaliser."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.7], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, 0.5, -1.0, -1.0], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1])
    norms = Normalisers(torch.tensor([2.0, 2.0], dtype=torch.float64), 4.0, 4.0, 2)
    for loss_type in LOSS_TYPES:
        config = TrainConfig.model_validate({"loss_type": loss_type, "epsilon_high": 5.0 if loss_type == "cispo" else None})
        loss, _ = policy_loss(ObjectiveBatch(logprobs, None, None, None, advantages, sequence, norms), config)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert torch.allclose(grad, -advantages / 4)


def test_masking_drops_what_truncation_caps() -> None:
    old, sampling = torch.log(torch.tensor([0.9, 0.3])), torch.log(torch.tensor([0.3, 0.3]))
    sequence = torch.tensor([0, 1])
    truncated = importance_weights(old, sampling, sequence, TrainConfig(importance_sampling="token_truncate"))
    masked = importance_weights(old, sampling, sequence, TrainConfig(importance_sampling="token_mask"))
    assert truncated is not None
    assert masked is not None
    assert truncated.tolist() == pytest.approx([2.0, 1.0])
    assert masked.tolist() == pytest.approx([0.0, 1.0])
    assert importance_weights(old, sampling, sequence, TrainConfig(importance_sampling="off")) is None


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    assert kl_k3(logprobs, logprobs).tolist() == [0.0, 0.0]
    assert (kl_k3(logprobs, logprobs + torch.tensor([0.3, -0.3])) > 0).all()
