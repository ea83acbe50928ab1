"""A train job equals the plain loop over rows, resumes bit for bit, and moves weights completely or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_qwen3, tiny_sliding_window
from tiny_host import ADAPTER, draw, make_host, rollouts, small_llama
from torch import Tensor

from apprentice.core.config import AdapterConfig, TrainConfig
from apprentice.core.errors import CheckpointCorrupt, ContextOverflow, InvalidRequest, TrainJobFailed
from apprentice.core.training.advantages import Rollout, compute_advantages
from apprentice.core.training.batches import TrainSample, cut_by_group
from apprentice.core.training.forest import TokenSample
from apprentice.core.training.metrics import METRICS, Meter
from apprentice.core.training.objectives import Normalisers, ObjectiveBatch, importance_weights, policy_loss
from apprentice.core.training.optimizer import AdapterOptimizer
from apprentice.core.training.policy import HostedModel
from apprentice.core.training.trainer import Trainer, supports_sharing

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[TrainSample]:
    """12 calls of 6 two-turn trajectories in 2 groups, drawn at temperature 1.3."""
    return rollouts(make_host(folder, dtype="float64", random_b=0.05), temperature=1.3)


def weights(host: HostedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in host.adapter_parameters(ADAPTER).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def row_logprobs(host: HostedModel, samples: list[TrainSample], adapter: str | None = ADAPTER) -> Tensor:
    """The plain loop: each call by itself through the model as Hugging Face made it."""
    found: list[Tensor] = []
    for sample in (s.tokens for s in samples):
        with host.using(adapter) as model:
            logits = model(input_ids=torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0]
        start, count = len(sample.prompt_ids) - 1, len(sample.token_ids)
        found.append(logits[start : start + count].log_softmax(-1)[torch.arange(count), torch.tensor(sample.token_ids)])
    return torch.cat(found)


def plain_loop(host: HostedModel, samples: list[TrainSample], config: TrainConfig) -> None:
    """The same job without forests, micro-batches and shortcuts: the reference."""
    parameters = list(host.adapter_parameters(ADAPTER).values())
    adamw = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon, weight_decay=0.0
    )
    parts = cut_by_group(samples, config.steps_per_generation)
    with torch.no_grad():
        old = [row_logprobs(host, part) for part in parts]
        ref = [row_logprobs(host, part, None) for part in parts]
    total = sum(len(s.tokens.token_ids) for s in samples)
    for _ in range(config.num_iterations):
        for part, old_N, ref_N in zip(parts, old, ref, strict=True):
            names = list(dict.fromkeys(s.trajectory_id for s in part))
            sequence_N = torch.tensor([names.index(s.trajectory_id) for s in part for _ in s.tokens.token_ids])
            sampling_N = torch.tensor([x for s in part for x in s.tokens.sampling_logprobs], dtype=torch.float64)
            advantages_N = torch.tensor([x for s in part for x in s.tokens.advantages], dtype=torch.float64)
            lengths_S = torch.bincount(sequence_N).double()
            longest = config.max_completion_length or max(len(s.tokens.token_ids) for s in samples)
            weights_N = importance_weights(old_N, sampling_N, sequence_N, config)
            norms = Normalisers(lengths_S, float(lengths_S.sum()), total / len(parts), longest)
            logprobs_N = row_logprobs(host, part)
            loss, _ = policy_loss(ObjectiveBatch(logprobs_N, old_N, weights_N, ref_N, advantages_N, sequence_N, norms), config)
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            adamw.step()


def assert_equals_plain_loop(folder: Path, samples: list[TrainSample], config: TrainConfig) -> dict[str, float]:
    """The large epsilon makes AdamW's step follow the gradient's size, which it would hide otherwise.

    Even a float64 model computes its norms in fp32, so gradients that meet before or after rounding agree to 1e-7 only.
    """
    config = config.model_copy(update={"adam_epsilon": 0.1})
    ours, plain = (make_host(folder, dtype="float64", random_b=0.05) for _ in range(2))
    start = weights(ours)
    outcome = Trainer(ours, ADAPTER).step(samples, config)
    plain_loop(plain, samples, config)
    found, expected = weights(ours), weights(plain)
    assert outcome.moved
    for name, before in start.items():
        change = expected[name] - before
        assert change.abs().max() > 0
        assert (found[name] - before - change).abs().max() < 3e-6 * change.abs().max(), name
    return outcome.metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_job_equals_the_plain_loop_over_rows(folder: Path, samples: list[TrainSample], loss_type: str) -> None:
    """One optimizer step in several micro-batches (a budget of 64 tokens cuts trajectories apart), with KL."""
    config = TrainConfig.model_validate({"loss_type": loss_type, "beta": 0.2, "tokens_per_microbatch": 64, "learning_rate": 1e-3})
    metrics = assert_equals_plain_loop(folder, samples, config)
    assert metrics["optimizer_steps"] == 1
    assert metrics["tokens/trained"] == sum(len(s.tokens.token_ids) for s in samples)
    assert metrics["tokens/saved_by_sharing"] > 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_epochs_and_several_steps_equal_the_plain_loop(folder: Path, samples: list[TrainSample], loss_type: str) -> None:
    options = {"loss_type": loss_type, "tokens_per_microbatch": 64, "num_iterations": 2, "steps_per_generation": 2, "learning_rate": 3e-3}
    config = TrainConfig.model_validate({**options, "epsilon": 0.05, "delta": 1.3, "beta": 0.1})
    metrics = assert_equals_plain_loop(folder, samples, config)
    assert metrics["optimizer_steps"] == 4
    assert metrics["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate", "sequence_mask", "off"])
def test_importance_sampling_modes_equal_the_plain_loop(folder: Path, samples: list[TrainSample], mode: str) -> None:
    config = TrainConfig.model_validate({"importance_sampling": mode, "importance_sampling_cap": 1.5, "tokens_per_microbatch": 64})
    assert_equals_plain_loop(folder, samples, config)


def test_training_row_by_row_on_request_gives_the_same_weights(folder: Path, samples: list[TrainSample]) -> None:
    metrics = assert_equals_plain_loop(folder, samples, TrainConfig(allow_sharing=False, loss_type="gspo"))
    assert metrics["tokens/saved_by_sharing"] == 0
    assert metrics["tokens/forward"] > metrics["tokens/trained"]


def test_per_token_advantages_reach_the_right_tokens(folder: Path, samples: list[TrainSample]) -> None:
    g = torch.Generator().manual_seed(3)
    own = [
        replace(s, tokens=replace(s.tokens, advantages=tuple(torch.randn(len(s.tokens.token_ids), generator=g).tolist()))) for s in samples
    ]
    assert_equals_plain_loop(folder, own, TrainConfig(tokens_per_microbatch=64, loss_type="gspo"))


def test_two_samples_that_drew_the_same_tokens_both_count(folder: Path, samples: list[TrainSample]) -> None:
    twin = replace(samples[0], tokens=replace(samples[0].tokens, id="twin"), trajectory_id="twin")
    assert_equals_plain_loop(folder, [*samples, twin], TrainConfig(loss_type="grpo"))


@pytest.mark.parametrize("config", [TrainConfig(num_iterations=2, beta=0.1), TrainConfig(loss_type="gspo", tokens_per_microbatch=64)])
def test_resuming_continues_to_the_same_bits(folder: Path, tmp_path: Path, samples: list[TrainSample], config: TrainConfig) -> None:
    dropout = AdapterConfig(rank=4, alpha=8, dropout=0.2)
    unbroken = make_host(folder, adapter=dropout)
    trainer = Trainer(unbroken, ADAPTER, seed=5)
    trainer.step(samples[:6], config)
    trainer.save_state(tmp_path)
    unbroken.save_adapter(ADAPTER, tmp_path / "adapter")
    trainer.step(samples[6:], config)

    resumed = HostedModel.load(unbroken.base, device="cpu")
    resumed.load_adapter(ADAPTER, tmp_path / "adapter", trainable=True)
    assert resumed.adapter_config(ADAPTER).dropout == 0.2
    again = Trainer(resumed, ADAPTER, seed=99)
    again.load_state(tmp_path)
    torch.manual_seed(1234)  # the global generator must not matter
    again.step(samples[6:], config)
    assert same(weights(resumed), weights(unbroken))


def test_without_its_state_a_resume_would_differ(folder: Path, tmp_path: Path, samples: list[TrainSample]) -> None:
    """Guards the test above: moments and generator really matter there."""
    host = make_host(folder, adapter=AdapterConfig(rank=4, alpha=8, dropout=0.2))
    trainer = Trainer(host, ADAPTER, seed=5)
    trainer.step(samples[:6], TrainConfig())
    middle = weights(host)
    trainer.step(samples[6:], TrainConfig())
    after = weights(host)
    with torch.no_grad():
        for name, parameter in host.adapter_parameters(ADAPTER).items():
            parameter.copy_(middle[name])
    Trainer(host, ADAPTER, seed=5).step(samples[6:], TrainConfig())
    assert not same(weights(host), after)


def test_the_global_generator_is_left_as_it_was(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder, adapter=AdapterConfig(rank=4, alpha=8, dropout=0.5))
    before = torch.get_rng_state()
    Trainer(host, ADAPTER).step(samples, TrainConfig())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cancelled_job_leaves_nothing_behind(folder: Path, samples: list[TrainSample]) -> None:
    class Cancelled(BaseException):
        pass

    def cancel(data: dict[str, Any]) -> None:
        if data["phase"] == "forward_backward" and data["done"] == data["total"]:
            raise Cancelled

    host, clean = (make_host(folder, adapter=AdapterConfig(rank=4, alpha=8, dropout=0.2)) for _ in range(2))
    config = TrainConfig(num_iterations=3, tokens_per_microbatch=64)
    before = weights(host)
    trainer = Trainer(host, ADAPTER)
    with pytest.raises(Cancelled):
        trainer.step(samples, config, cancel)
    assert same(weights(host), before)
    assert all(p.grad is None for p in host.adapter_parameters(ADAPTER).values())
    trainer.step(samples, config)
    Trainer(clean, ADAPTER).step(samples, config)
    assert same(weights(host), weights(clean))


def test_progress_counts_every_micro_batch_of_every_phase(folder: Path, samples: list[TrainSample]) -> None:
    seen: list[dict[str, Any]] = []
    Trainer(make_host(folder), ADAPTER).step(samples, TrainConfig(num_iterations=2, beta=0.1, tokens_per_microbatch=64), seen.append)
    totals = {phase: [d["total"] for d in seen if d["phase"] == phase] for phase in ("reference", "old_logprobs", "forward_backward")}
    assert totals["reference"] == totals["old_logprobs"] == [2, 2]
    assert [d["done"] for d in seen if d["phase"] == "forward_backward"] == [1, 2, 3, 4]
    assert totals["forward_backward"] == [4] * 4


def test_weights_that_overflowed_end_the_job_with_the_sample_named(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder)
    with torch.no_grad():
        # not in attention: a softmax whose largest score is not a number is nothing or everything, as the CPU has it
        next(p for name, p in host.adapter_parameters(ADAPTER).items() if "mlp.down_proj" in name).fill_(math.nan)
    with pytest.raises(TrainJobFailed, match=r"token 0 of sample g0t0c0 is not finite") as caught:
        Trainer(host, ADAPTER).step(samples, TrainConfig())
    assert caught.value.details["reason"] == "non_finite_logprob"


def test_a_loss_that_overflows_ends_the_job_and_changes_nothing(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder)
    before = weights(host)
    huge = [replace(s, tokens=replace(s.tokens, advantages=(1e300,) * len(s.tokens.token_ids))) for s in samples]
    with pytest.raises(TrainJobFailed, match="the loss is not finite") as caught:
        Trainer(host, ADAPTER).step(huge, TrainConfig())
    assert caught.value.details["reason"] == "non_finite_loss"
    assert same(weights(host), before)


def test_a_gradient_that_overflows_ends_the_job_and_undoes_earlier_optimizer_steps(folder: Path, samples: list[TrainSample]) -> None:
    """The second group's gradient overflows in fp32 while its loss does not: first part trained, then undone."""
    host = make_host(folder, random_b=1.0)
    before = weights(host)
    large = [
        s if s.group_id == "g0" else replace(s, tokens=replace(s.tokens, advantages=(1e37 * (-1) ** i,) * len(s.tokens.token_ids)))
        for i, s in enumerate(samples)
    ]
    with pytest.raises(TrainJobFailed, match=r"the gradient is not finite") as caught:
        Trainer(host, ADAPTER).step(large, TrainConfig(steps_per_generation=2, loss_type="dr_grpo", epsilon=0.999, epsilon_high=1e6))
    assert caught.value.details["reason"] == "non_finite_gradient"
    assert same(weights(host), before)


def test_a_gradient_that_is_not_finite_is_traced_to_its_weight() -> None:
    fine, broken = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    fine.grad, broken.grad = torch.ones(2), torch.tensor([1.0, math.nan])
    with pytest.raises(TrainJobFailed, match="first in second"):
        AdapterOptimizer({"first": fine, "second": broken}, seed=0).step(1.0)
    assert fine.tolist() == broken.tolist() == [1.0, 1.0]


def test_moved_tells_the_truth(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder, random_b=0.05)
    trainer = Trainer(host, ADAPTER)
    before = weights(host)
    none = [replace(s, tokens=replace(s.tokens, advantages=(0.0,) * len(s.tokens.token_ids))) for s in samples]
    assert not trainer.step(none, TrainConfig()).moved
    assert not trainer.step(samples, TrainConfig(learning_rate=1e-20)).moved
    assert not trainer.step([], TrainConfig()).moved
    assert same(weights(host), before)
    assert trainer.step(samples, TrainConfig()).moved
    assert not same(weights(host), before)


def test_only_the_trained_adapter_changes(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder)
    host.add_adapter("other", AdapterConfig(rank=2), 7)
    other = {name: p.detach().clone() for name, p in host.adapter_parameters("other").items()}
    with host.using(None) as model, torch.no_grad():
        base = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    Trainer(host, ADAPTER).step(samples, TrainConfig(beta=0.1, learning_rate=1e-2))
    with host.using(None) as model, torch.no_grad():
        assert torch.equal(model(input_ids=torch.tensor([[5, 6, 7]])).logits, base)
    assert all(torch.equal(p, other[name]) for name, p in host.adapter_parameters("other").items())


def test_scores_are_the_models_log_probabilities_and_follow_training(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder, random_b=0.05)
    trainer = Trainer(host, ADAPTER)
    rows = [[5, 6, 7, 8], [5, 6, 9], [11], [5, 6, 7, 8, 10]]
    scored = trainer.score(rows)
    assert [len(row) for row in scored] == [3, 2, 0, 4]
    for row, found in zip(rows, scored, strict=True):
        with host.using(ADAPTER) as model, torch.no_grad():
            expected = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        assert found == pytest.approx([float(expected[i, t]) for i, t in enumerate(row[1:])], abs=1e-5)
    trainer.step(samples, TrainConfig(learning_rate=1e-2))
    assert max(abs(a - b) for a, b in zip(trainer.score(rows)[0], scored[0], strict=True)) > 1e-4
    assert trainer.score([]) == []
    with pytest.raises(InvalidRequest, match="row 1 is empty"):
        trainer.score([[1], []])


def test_metrics_are_named_in_the_table_and_true_on_policy(folder: Path) -> None:
    host = make_host(folder)
    on_policy = rollouts(host, tokens=3)
    metrics = Trainer(host, ADAPTER).step(on_policy, TrainConfig(beta=0.1)).metrics
    assert set(metrics) <= set(METRICS)
    assert metrics["importance_weight/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["importance_weight/ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["sampling_logp_difference/max"] < 1e-5
    assert metrics["kl"] == 0.0
    assert metrics["clip_ratio/region_mean"] == 0.0
    assert metrics["learning_rate"] == 1e-4
    assert metrics["loss"] == pytest.approx(-sum(sum(s.tokens.advantages) for s in on_policy) / metrics["tokens/trained"], abs=1e-5)
    with host.using(None) as model, torch.no_grad():
        logprobs = [model(input_ids=torch.tensor([s.tokens.prompt_ids + s.tokens.token_ids])).logits[0].log_softmax(-1) for s in on_policy]
    entropies = [-(row.exp() * row).sum(-1)[len(s.tokens.prompt_ids) - 1 : -1] for row, s in zip(logprobs, on_policy, strict=True)]
    assert metrics["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-4)


def test_sampling_temperature_shows_in_the_importance_weights_and_not_in_the_difference(folder: Path, samples: list[TrainSample]) -> None:
    metrics = (
        Trainer(make_host(folder, dtype="float64", random_b=0.05), ADAPTER)
        .step(samples, TrainConfig(importance_sampling_cap=100.0))
        .metrics
    )
    ratios = [math.exp(a - b) for s in samples for a, b in zip(s.tokens.logprobs, s.tokens.sampling_logprobs, strict=True)]
    assert metrics["importance_weight/mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-6)
    assert metrics["importance_weight/max"] == pytest.approx(max(ratios), rel=1e-6)
    assert metrics["importance_weight/ess"] == pytest.approx(sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios), rel=1e-6)
    assert metrics["sampling_logp_difference/max"] < 1e-9


def test_effective_sample_size_of_a_worked_example() -> None:
    meter = Meter()
    meter.add_importance_weights(torch.tensor([2.0, 0.0]))
    assert meter.job_metrics(1.0)["importance_weight/ess"] == 0.5


@pytest.mark.parametrize(("parts", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
def test_optimizer_steps_are_cut_by_whole_groups_in_order(folder: Path, parts: int, sizes: list[int]) -> None:
    items = [replace(_one_sample(), trajectory_id=f"{g}.{m}", group_id=str(g)) for m in range(2) for g in range(5)]
    cut = cut_by_group(items, parts)
    assert [len({s.group_id for s in part}) for part in cut] == sizes
    assert [s.group_id for part in cut for s in part] == [str(g) for g in range(5) for _ in range(2)]


def _one_sample(**changes: Any) -> TrainSample:
    fields = {"id": "x", "prompt_ids": (1, 2), "token_ids": (3,), "logprobs": (-1.0,), "sampling_logprobs": (-1.0,), "advantages": (1.0,)}
    tokens = TokenSample(**{**fields, **changes})
    return TrainSample(tokens, tokens.id, "g")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt_ids": (1,) * 2048}, ContextOverflow, "sample x has 2049 tokens, but the model's context is 2048"),
        ({"token_ids": (384,)}, InvalidRequest, "outside the model's vocabulary of 384"),
        ({"prompt_ids": (-1,)}, InvalidRequest, "outside the model's vocabulary of 384"),
        ({"sampling_logprobs": (-math.inf,)}, InvalidRequest, "sample x has a log-probability or advantage that is not a finite"),
        ({"advantages": (math.nan,)}, InvalidRequest, "not a finite number"),
    ],
)
def test_samples_that_the_model_cannot_have_drawn_are_refused_by_name(
    folder: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Trainer(make_host(folder), ADAPTER).step([_one_sample(**changes)], TrainConfig())


def test_a_state_of_another_adapter_or_a_broken_file_is_refused(folder: Path, tmp_path: Path, samples: list[TrainSample]) -> None:
    trainer = Trainer(make_host(folder), ADAPTER)
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        trainer.load_state(tmp_path)
    trainer.step(samples, TrainConfig())
    trainer.save_state(tmp_path)
    with pytest.raises(CheckpointCorrupt, match=r"of shape \(4, 64\), but this adapter expects \(2, 64\)"):
        Trainer(make_host(folder, adapter=AdapterConfig(rank=2)), ADAPTER).load_state(tmp_path)
    file = tmp_path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        trainer.load_state(tmp_path)


def test_full_attention_models_share_prefixes(folder: Path, tmp_path: Path) -> None:
    for path in (folder, tiny_qwen3(tmp_path / "qwen", layers=1, hidden=32)):
        sharing, reason = supports_sharing(make_host(path))
        assert sharing
        assert "agree within" in reason


def test_a_sliding_window_model_is_found_out_and_trained_row_by_row(tmp_path: Path) -> None:
    path = tiny_sliding_window(tmp_path / "mistral", layers=1, window=8)
    host = make_host(path, dtype="float64", random_b=0.05)
    sharing, reason = supports_sharing(host)
    assert not sharing
    assert "sees only the last 8 tokens" in reason
    drawn = rollouts(host, groups=1, size=2, tokens=3)
    metrics = assert_equals_plain_loop(path, drawn, TrainConfig())
    assert metrics["tokens/saved_by_sharing"] == 0
    assert len(Trainer(host, ADAPTER).score([[1, 2, 3]])[0]) == 2


def test_a_model_whose_attention_does_not_follow_the_forest_is_found_out_by_the_probe(folder: Path) -> None:
    host = make_host(folder)
    layer = host.model.model.layers[0].self_attn
    original = layer.forward
    layer.forward = lambda *a, **k: original(*a, **{n: v for n, v in k.items() if n != "forest_plan"})
    sharing, reason = supports_sharing(host)
    assert not sharing
    assert "cannot attend by forest" in reason
    layer.forward = lambda hidden_states, *a, **k: (original(hidden_states.cumsum(1), *a, **k)[0], None)
    sharing, reason = supports_sharing(host)
    assert not sharing
    assert "more than rounding explains" in reason


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_real_model_learns_a_real_reward(tmp_path: Path, loss_type: str) -> None:
    """A bandit: the reward is the share of sampled tokens from a set of 96 of 384, about a quarter of them at first."""
    host = make_host(small_llama(tmp_path, spread=0.5))
    good = set(host.model.get_input_embeddings().weight[:, 0].topk(96).indices.tolist())
    trainer = Trainer(host, ADAPTER)
    options = {"loss_type": loss_type, "learning_rate": 2e-2, "epsilon_high": 5.0 if loss_type == "cispo" else None}
    config = TrainConfig.model_validate(options)
    g = torch.Generator().manual_seed(0)
    means: list[float] = []
    for _ in range(25):
        drawn = _draw_group(host, [7, 8, 9], size=24, tokens=3, g=g)
        rewards = {name: sum(t in good for t in s.tokens.token_ids) / 3 for name, s in drawn.items()}
        means.append(sum(rewards.values()) / len(rewards))
        found = compute_advantages([[Rollout(name, r, (name,)) for name, r in rewards.items()]], config).by_completion
        trainer.step([replace(s, tokens=replace(s.tokens, advantages=(found[n],) * 3)) for n, s in drawn.items() if n in found], config)
    assert sum(means[:3]) / 3 < 0.45
    assert sum(means[-3:]) / 3 > 0.8


@torch.no_grad()
def _draw_group(host: HostedModel, prompt: list[int], *, size: int, tokens: int, g: torch.Generator) -> dict[str, TrainSample]:
    ids_BT = torch.tensor([prompt] * size)
    steps: list[Tensor] = []
    for _ in range(tokens):
        with host.using(ADAPTER) as model:
            logprobs_BV = model(input_ids=ids_BT).logits[:, -1].log_softmax(-1)
        token_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=g)
        steps.append(logprobs_BV.gather(1, token_B1)[:, 0])
        ids_BT = torch.cat([ids_BT, token_B1], dim=1)
    logprobs = torch.stack(steps, dim=1).tolist()
    drawn = ids_BT[:, len(prompt) :].tolist()
    return {
        str(b): _one_sample(
            id=str(b),
            prompt_ids=tuple(prompt),
            token_ids=tuple(drawn[b]),
            logprobs=tuple(logprobs[b]),
            sampling_logprobs=tuple(logprobs[b]),
            advantages=(0.0,) * tokens,
        )
        for b in range(size)
    }


def test_greedy_samples_have_a_finite_weight(folder: Path) -> None:
    """At temperature 0 the distribution drawn from has probability one, so the weight is the model's own probability."""
    host = make_host(folder)
    g = torch.Generator().manual_seed(0)
    sample = draw(host, [5, 6], 3, g, temperature=1e-6)
    assert sample.sampling_logprobs == pytest.approx((0.0,) * 3, abs=1e-9)
    greedy = TrainSample(replace(sample, id="greedy", advantages=(1.0,) * 3), "t", "g")
    metrics = Trainer(host, ADAPTER).step([greedy], TrainConfig()).metrics
    assert metrics["importance_weight/mean"] == pytest.approx(sum(math.exp(x) for x in sample.logprobs) / 3, rel=1e-4)
