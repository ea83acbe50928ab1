"""Training on a forest equals training sample by sample, in loss and in gradient, whatever the tree.

The oracle is the naive loop below: one plain forward of the model per sample, all logits, torch's own log-softmax. It shares
no code with what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.forests import sample, trees

from apprentice.core.errors import ModelRefused
from apprentice.core.training import adapter_products, attention, logprobs
from apprentice.core.training.attention import AttentionPlan, forest_attention_in
from apprentice.core.training.forest import Forest, TokenSample, pack
from apprentice.core.training.logprobs import forest_logprobs, row_logprobs

SampleList = list[TokenSample]
Score = Callable[[Any, Forest], torch.Tensor]
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HARD_TREES: list[SampleList] = [
    # forks inside sampled turns, at its first, middle and last token
    [sample("a", (1, 2), (3, 0, 1, 2)), sample("b", (1, 2), (3, 0, 2, 2)), sample("c", (1, 2), (0,)), sample("d", (1, 2), (3, 0, 1, 3))],
    # several targets at one position, the same and different tokens, from different prompts lengths
    [sample("a", (1, 2), (3,)), sample("b", (1, 2), (3,)), sample("c", (1,), (2, 3)), sample("d", (1, 2), (0,)), sample("e", (1, 2), (1,))],
    # one-token segments all the way down
    [sample(str(n), (1,) * (n + 1), (2, 3) if n % 2 else (3,)) for n in range(6)],
    # a rollout of several turns, with a branch at every turn
    [
        sample("a", (1, 2, 3), (0, 1)),
        sample("b", (1, 2, 3, 0, 1, 2, 2), (3, 3, 0)),
        sample("c", (1, 2, 3, 0, 1, 2, 2, 3, 3, 0, 1), (1, 2)),
        sample("d", (1, 2, 3), (0, 2)),
        sample("e", (1, 2, 3, 0, 1, 2, 2), (3, 0)),
        sample("f", (1, 2, 3, 0, 1, 2, 2, 3, 3, 0, 1), (2,)),
    ],
    # identical samples, one a prefix of another, and a second tree
    [sample("a", (1,), (2, 3)), sample("b", (1,), (2, 3)), sample("c", (1,), (2,)), sample("d", (3, 1), (2, 3))],
]


def _config(family: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": 23, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip
    match family:
        case "llama":
            return LlamaConfig(**sizes, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**sizes, tie_word_embeddings=False)
        case _:
            return Qwen3Config(**sizes, head_dim=12)


def _double_norms(module: Any) -> None:
    """transformers' RMSNorm computes in fp32 whatever the model's type; torch's own stays in float64."""
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
            norm.weight = child.weight
            setattr(module, name, norm)
        _double_norms(child)


@cache
def model_of(family: str, *, lora: bool = False, double: bool = True) -> Any:
    """A tiny random model, all of it trainable or only a LoRA adapter whose B matrices are not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(_config(family))
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    if double:
        model.double()
        _double_norms(model)
    return model


def naive(model: Any, forest: Forest) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for one in forest.samples:
        ids = torch.tensor([one.prompt_ids + one.token_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids, dtype=torch.long)[:, None])[:, 0])
    return torch.cat(found)


def shared(model: Any, forest: Forest) -> torch.Tensor:
    return forest_logprobs(model, forest).logprobs_N


def by_rows(model: Any, forest: Forest) -> torch.Tensor:
    return row_logprobs(model, forest).logprobs_N


def weighted(logprobs_N: torch.Tensor, weights_N: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (logprobs_N * weights_N).sum()


def clipped(logprobs_N: torch.Tensor, weights_N: torch.Tensor, name_N: torch.Tensor) -> torch.Tensor:
    """A clipped ratio against old log-probabilities that differ from token to token."""
    old_N = logprobs_N.detach() + 0.4 * torch.sin(name_N)
    ratio_N = torch.exp(logprobs_N - old_N)
    return -torch.minimum(ratio_N * weights_N, ratio_N.clamp(0.8, 1.2) * weights_N).sum()


def loss_and_gradient(model: Any, forests: list[Forest], score: Score, objective: Objective) -> tuple[float, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = 0.0
    for forest in forests:
        advantages = [one.advantages[i] for one in forest.samples for i in range(len(one.token_ids))]
        names = [31 * n + i for n, one in zip(forest.numbers, forest.samples, strict=True) for i in range(len(one.token_ids))]
        dtype = parameters[0].dtype
        loss = objective(score(model, forest), torch.tensor(advantages, dtype=dtype), torch.tensor(names, dtype=dtype))
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def assert_equal_training(model: Any, samples: SampleList, forests: list[Forest], score: Score, tolerance: float) -> None:
    if not any(one.token_ids for one in samples):
        return
    for objective in (weighted, clipped):
        # What no rounding may exceed: the same loss with every term positive.
        scale = sum(abs(a) for one in samples for a in one.advantages)
        expected, expected_gradient = loss_and_gradient(model, [Forest.build(samples)], naive, objective)
        loss, gradient = loss_and_gradient(model, forests, score, objective)
        assert abs(loss - expected) <= tolerance * max(abs(expected), scale)
        assert (gradient - expected_gradient).norm() <= tolerance * max(float(expected_gradient.norm()), scale)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of four tokens and a head of three positions at a time, so that small trees meet every seam."""
    monkeypatch.setattr(attention, "TILE", 4)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 3 * 23)


@settings(max_examples=20, deadline=None)
@given(trees())
@example(HARD_TREES[0])
@example(HARD_TREES[1])
@example(HARD_TREES[2])
@example(HARD_TREES[3])
@example(HARD_TREES[4])
def test_forest_equals_sample_by_sample_in_float64_for_all_parameters(samples: SampleList) -> None:
    assert_equal_training(model_of("llama"), samples, [Forest.build(samples)], shared, 1e-9)


@settings(max_examples=20, deadline=None)
@given(trees())
@example(HARD_TREES[1])
@example(HARD_TREES[3])
def test_forest_equals_sample_by_sample_in_float64_for_an_adapter_on_a_frozen_base(samples: SampleList) -> None:
    assert_equal_training(model_of("llama", lora=True), samples, [Forest.build(samples)], shared, 1e-9)


@settings(max_examples=12, deadline=None)
@given(trees())
@example(HARD_TREES[0])
@example(HARD_TREES[3])
def test_forest_equals_sample_by_sample_in_fp32(samples: SampleList) -> None:
    assert_equal_training(model_of("llama", lora=True, double=False), samples, [Forest.build(samples)], shared, 1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("tree", range(len(HARD_TREES)))
def test_other_families_equal_sample_by_sample_too(family: str, lora: bool, tree: int) -> None:
    samples = HARD_TREES[tree]
    assert_equal_training(model_of(family, lora=lora), samples, [Forest.build(samples)], shared, 1e-9)


@settings(max_examples=6, deadline=None)
@given(trees())
@example(HARD_TREES[3])
def test_micro_batches_add_up_to_the_same_gradient(samples: SampleList) -> None:
    for budget in (1, 9, 25):
        assert_equal_training(model_of("llama", lora=True), samples, pack(samples, budget), shared, 1e-9)


@settings(max_examples=10, deadline=None)
@given(trees())
@example(HARD_TREES[3])
def test_row_by_row_equals_sample_by_sample(samples: SampleList) -> None:
    assert_equal_training(model_of("llama", lora=True), samples, [Forest.build(samples)], by_rows, 1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tree", range(len(HARD_TREES)))
def test_folding_the_adapter_into_the_weight_changes_nothing(family: str, tree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_products, "MANY_TOKENS", 1)
    folded: list[int] = []
    forward = adapter_products._FoldedLinear.apply
    monkeypatch.setattr(adapter_products._FoldedLinear, "apply", lambda *args: folded.append(1) or forward(*args))
    model, samples = model_of(family, lora=True), HARD_TREES[tree]
    assert_equal_training(model, samples, [Forest.build(samples)], shared, 1e-9)
    assert len(folded) == 2 * 2 * 7, "two layers of seven products, for each of two objectives"
    assert not any("forward" in vars(module) for module in model.modules())


def test_adapters_that_cannot_be_folded_stay_with_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(adapter_products, "MANY_TOKENS", 1)
    forest = Forest.build(HARD_TREES[3])

    def refuse(*_: Any) -> None:
        raise AssertionError("folded")

    monkeypatch.setattr(adapter_products._FoldedLinear, "apply", refuse)
    for options in ({"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}):
        model: Any = get_peft_model(
            AutoModelForCausalLM.from_config(_config("llama")), LoraConfig(r=2, target_modules="all-linear", **options)
        )
        model.train()
        assert torch.isfinite(shared(model, forest)).all()
    two = model_of("llama", lora=True)
    with two.disable_adapter():
        bare = shared(two, forest)
    assert not torch.equal(bare, by_rows(two, forest))


@pytest.mark.parametrize("tile", [1, 3, 256])
def test_the_tile_size_does_not_change_the_result(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", tile)
    samples = [sample("a", range(20), (1, 2, 3)), sample("b", range(20), (1, 4, 2, 0, 1)), sample("c", range(11), (7, 7))]
    assert_equal_training(model_of("llama"), samples, [Forest.build(samples)], shared, 1e-9)


@settings(max_examples=12, deadline=None)
@given(trees(), st.sampled_from([2, 3]))
@example(HARD_TREES[3], 3)
def test_the_portable_attention_equals_the_flash_one(samples: SampleList, group: int) -> None:
    """Also for an odd number of query heads, whose backward is cut in halves."""
    plan = AttentionPlan(Forest.build(samples).segments)
    if not plan.tokens:
        return
    generator = torch.Generator().manual_seed(0)
    results: list[list[torch.Tensor]] = []
    for attend in (attention._MergedAttention.apply, attention._portable_attention):
        generator.manual_seed(0)
        q, k, v, g = (
            torch.randn(1, heads, plan.tokens, 8, dtype=torch.float64, generator=generator).requires_grad_()
            for heads in (3 * group, 3, 3, 3 * group)
        )
        out = attend(q, k, v, plan, 0.3)
        results.append([out, *torch.autograd.grad(out, [q, k, v], g.detach())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lora", [False, True])
def test_entropy_is_that_of_the_distribution_each_token_was_drawn_from(lora: bool) -> None:
    model, forest = model_of("llama", lora=lora), Forest.build(HARD_TREES[3])
    expected: list[torch.Tensor] = []
    for one in forest.samples:
        logits = model(input_ids=torch.tensor([one.prompt_ids + one.token_ids])).logits[0, len(one.prompt_ids) - 1 : -1]
        expected.append(torch.distributions.Categorical(logits=logits).entropy())
    for score in (forest_logprobs, row_logprobs):
        scores = score(model, forest, entropy=True)
        assert scores.entropy_N is not None
        assert not scores.entropy_N.requires_grad
        torch.testing.assert_close(scores.entropy_N, torch.cat(expected).detach(), rtol=1e-9, atol=1e-9)
        assert score(model, forest).entropy_N is None


def test_scoring_without_gradient_gives_the_same_numbers() -> None:
    model, forest = model_of("llama", lora=True), Forest.build(HARD_TREES[0])
    with torch.no_grad():
        without = shared(model, forest)
    assert not without.requires_grad
    torch.testing.assert_close(without, shared(model, forest).detach(), rtol=1e-12, atol=1e-12)


def test_the_models_own_attention_is_back_afterwards_even_when_a_pass_fails() -> None:
    model = model_of("llama")
    before = model.config._attn_implementation
    shared(model, Forest.build(HARD_TREES[0]))
    assert model.config._attn_implementation == before
    with pytest.raises(IndexError):
        shared(model, Forest.build([sample("a", (1,), (2, 999, 1))]))
    assert model.config._attn_implementation == before


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    model, samples = model_of("llama", lora=True), HARD_TREES[3]
    expected = loss_and_gradient(model, [Forest.build(samples)], shared, weighted)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        with forest_attention_in(model.get_base_model()):
            found = loss_and_gradient(model, [Forest.build(samples)], shared, weighted)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)


def test_an_empty_forest_gives_no_scores() -> None:
    for score in (forest_logprobs, row_logprobs):
        scores = score(model_of("llama"), Forest.build([]), entropy=True)
        assert scores.logprobs_N.shape == (0,)
        assert scores.entropy_N is not None


def test_a_plan_counts_the_pairs_that_attend() -> None:
    forest = Forest.build([sample("a", (1, 2), (3, 4, 5)), sample("b", (1, 2), (3, 6))])
    assert AttentionPlan(forest.segments).pairs() == sum(int(p) + 1 for p in forest.positions_T)
    assert AttentionPlan(forest.segments).depth == 5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"softcap": 30.0}, "soft-capped"),
        ({"sliding_window": 3}, "sliding window of 3 tokens below a depth of 6"),
        ({"dropout": 0.1}, "dropout"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1)}, "attention mask"),
        ({"forest_plan": None}, "needs the forest's plan"),
        ({"query": torch.zeros(2, 4, 9, 8)}, "one row of 9 tokens"),
    ],
)
def test_attention_that_cannot_be_shared_is_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    plan = AttentionPlan(Forest.build([sample("a", (1, 2), (3, 4, 5, 6)), sample("b", (1, 2), (4, 6, 1))]).segments)
    heads = {"query": torch.zeros(1, 4, 9, 8), "key": torch.zeros(1, 2, 9, 8), "value": torch.zeros(1, 2, 9, 8)}
    arguments: dict[str, Any] = {"module": torch.nn.Module(), **heads, "attention_mask": None, "forest_plan": plan, **change}
    with pytest.raises(ModelRefused, match=sentence):
        attention.forest_attention(**arguments)


def test_a_window_that_the_forest_never_leaves_is_no_obstacle() -> None:
    plan = AttentionPlan(Forest.build([sample("a", (1, 2), (3, 4))]).segments)
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    out, _ = attention.forest_attention(torch.nn.Module(), q, k, k, None, forest_plan=plan, sliding_window=4)
    assert out.shape == (1, 4, 4, 8)
    assert torch.isfinite(out).all()
