"""Activations stay under the bound, with the least work that does it, and what is trained stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import tiny_llama
from tiny_host import ADAPTER, make_host, rollouts
from torch.autograd.graph import saved_tensors_hooks

from apprentice.core.config import AdapterConfig, SftConfig, TrainConfig
from apprentice.core.training import heap
from apprentice.core.training.activation_memory import (
    GIB,
    HEAP_SPREAD,
    ActivationBound,
    ActivationCost,
    decoder_layers,
    measure,
    pack_within,
    recomputing,
)
from apprentice.core.training.attention import forest_attention_in
from apprentice.core.training.batches import TrainSample
from apprentice.core.training.forest import Forest, TokenSample, pack
from apprentice.core.training.logprobs import forest_logprobs
from apprentice.core.training.passes import activation_cost
from apprentice.core.training.policy import HostedModel
from apprentice.core.training.trainer import Trainer

LAYERS = 4
DROPOUT = AdapterConfig(rank=4, alpha=8, dropout=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "four-layers", layers=LAYERS, hidden=32, seed=0, spread=0.1)


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[TrainSample]:
    return rollouts(make_host(folder, random_b=0.05))


def gradients(host: HostedModel, forest: Forest, layers: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    with host.using(ADAPTER, dropout=True) as model, recomputing(model, layers), forest_attention_in(model):
        forest_logprobs(model, forest).logprobs_N.square().sum().backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in host.adapter_parameters(ADAPTER).items():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    return found


def kept_bytes(host: HostedModel, forest: Forest, layers: int) -> int:
    """Distinct memory that hangs on the graph between forward and backward, parameters left out."""
    known = {t.untyped_storage().data_ptr() for t in [*host.model.parameters(), *host.model.buffers()]}
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor.detach())
        return alive[-1]

    with host.using(ADAPTER) as model, saved_tensors_hooks(keep, lambda x: x), recomputing(model, layers), forest_attention_in(model):
        forest_logprobs(model, forest)
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive if t.untyped_storage().data_ptr() not in known
        }.values()
    )


@pytest.mark.parametrize("adapter", [AdapterConfig(rank=4, alpha=8), DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("layers", [1, 3, LAYERS])
def test_recomputed_layers_give_the_same_gradient_bit_for_bit(
    folder: Path, samples: list[TrainSample], adapter: AdapterConfig, layers: int
) -> None:
    host = make_host(folder, adapter=adapter, random_b=0.05)
    forest = Forest.build([sample.tokens for sample in samples])
    expected, found = gradients(host, forest, 0), gradients(host, forest, layers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(gradient.abs().max() > 0 for gradient in found.values())


def test_recomputing_leaves_the_global_generator_where_it_would_be(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder, adapter=DROPOUT, random_b=0.05)
    forest = Forest.build([sample.tokens for sample in samples])
    states: list[torch.Tensor] = []
    for layers in (0, LAYERS):
        gradients(host, forest, layers)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_afterwards_the_layers_are_as_they_were(folder: Path) -> None:
    host = make_host(folder)
    before = [dict(vars(layer)) for layer in decoder_layers(host.model)]
    with recomputing(host.model, 2):
        assert ["forward" in vars(layer) for layer in decoder_layers(host.model)] == [True, True, False, False]
    assert [dict(vars(layer)) for layer in decoder_layers(host.model)] == before


def test_the_measured_cost_predicts_what_a_larger_forest_keeps(folder: Path) -> None:
    host = make_host(folder, random_b=0.05)
    cost = activation_cost(host, ADAPTER, sharing=True)
    large = Forest.build([sample.tokens for sample in rollouts(host, groups=3, size=5, tokens=6, seed=2)])
    assert cost.layers == LAYERS
    assert cost.layer_input == 32 * 4
    assert cost.head == 0
    whole = large.tokens * (cost.outside + LAYERS * cost.layer)
    assert kept_bytes(host, large, 0) == pytest.approx(whole, rel=0.05)
    assert kept_bytes(host, large, LAYERS) < 0.2 * whole


def test_dropout_keeps_more_and_counting_draws_nothing_from_the_global_generator(folder: Path) -> None:
    state = torch.get_rng_state()
    plain, dropped = (activation_cost(make_host(folder, adapter=a), ADAPTER, sharing=True) for a in (None, DROPOUT))
    assert dropped.layer > plain.layer
    assert activation_cost(make_host(folder, adapter=DROPOUT, seed=7), ADAPTER, sharing=True) == dropped
    assert torch.equal(torch.get_rng_state(), state)


def test_logits_that_a_scaled_head_keeps_are_counted(folder: Path, samples: list[TrainSample]) -> None:
    host = make_host(folder)
    vocabulary = host.model.config.vocab_size
    host.model.config.logit_scale = 1.0  # read by the scorer only: the head is then the model's own
    forest = Forest.build([sample.tokens for sample in samples])
    with host.using(ADAPTER) as model:
        cost = measure(model, forest, lambda: forest_logprobs(model, forest).logprobs_N)
    assert cost.head >= 2 * 4 * vocabulary
    assert cost.logits == 0


COST = ActivationCost(layers=4, layer=100.0, layer_input=10.0, outside=20.0, head=0.0, logits=0.0)


def test_only_as_many_layers_are_recomputed_as_must_be() -> None:
    assert [COST.bytes(1, 1, count) for count in range(5)] == [520, 430, 340, 250, 260]
    assert [COST.recomputed(10, 5, bound) for bound in (5200, 5199, 3400, 2600, 1)] == [0, 1, 2, 3, 4]
    assert COST.work(100, 4) == 150
    assert COST.most_tokens(0.5, 0, 5200) == 10


def tree(prompt: int, rows: int, turn: int) -> list[TokenSample]:
    zeros = (0.0,) * turn
    return [TokenSample(str(n), tuple(range(prompt)), (1000 + n,) * turn, zeros, zeros, zeros) for n in range(rows)]


@pytest.mark.parametrize(
    ("prompt", "turn", "forests"),
    [(200, 10, 1), (10, 40, 8)],
    ids=["a long prompt is kept together and recomputed", "a short prompt is cut and nothing is recomputed"],
)
def test_the_cheaper_of_cutting_and_recomputing_is_taken(prompt: int, turn: int, forests: int) -> None:
    """Eight rows, of which one fits as it is and all fit with recomputation."""
    samples = tree(prompt, 8, turn)
    memory = ActivationBound(COST, max(COST.bytes(prompt + turn, 1, 0), COST.bytes(prompt + 8 * turn, 1, 3)))
    found = pack_within(samples, 8192, memory)
    recomputed = [memory.recomputed(forest) for forest in found]
    if forests == 1:
        assert len(found) == 1
        assert recomputed[0] > 0
    else:
        assert len(found) > 1
        assert recomputed == [0] * len(found)
    assert all(memory.bytes(forest) <= memory.bound for forest in found)


def test_a_row_that_fits_in_no_way_is_a_forest_of_its_own_and_recomputes_everything() -> None:
    memory = ActivationBound(COST, 3000.0)
    (*others, longest) = sorted(pack_within([*tree(5, 1, 3), *tree(400, 1, 10)], 8192, memory), key=lambda forest: forest.tokens)
    assert [forest.tokens for forest in others] == [8]
    assert memory.recomputed(longest) == 4
    assert memory.bytes(longest) == 410 * 260 > memory.bound


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 30), st.floats(1e3, 1e5), st.integers(64, 400))
def test_every_target_is_kept_and_every_forest_fits_or_is_one_row(prompt: int, rows: int, turn: int, bound: float, most: int) -> None:
    samples = tree(prompt, rows, turn)
    memory = ActivationBound(COST, bound)
    found = pack_within(samples, most, memory)
    assert sorted(number for forest in found for number in forest.numbers) == list(range(rows))
    for forest in found:
        assert len(forest.rows) == 1 or (memory.bytes(forest) <= bound and forest.tokens <= most)
    budgets = {COST.most_tokens(1.0, count, bound) for count in (0, 4)} | {COST.most_tokens(1.0, 0, bound / HEAP_SPREAD)}
    for budget in budgets:
        assert sum(map(memory.work, found)) <= sum(map(memory.work, pack(samples, min(budget, most)))) + 1e-9


def test_a_bound_with_room_to_spare_is_cut_so_that_the_heap_can_recycle() -> None:
    """Two rows that share nothing: together they fit, but only apart do they leave room for a heap that keeps its blocks."""
    samples = [TokenSample(str(n), (100 + n,) * 20, (1,) * 10, (0.0,) * 10, (0.0,) * 10, (0.0,) * 10) for n in range(2)]
    room = HEAP_SPREAD * COST.bytes(30, 10, 0)
    on_cpu, elsewhere = (ActivationBound(COST, room, on_heap) for on_heap in (True, False))
    found = pack_within(samples, 8192, on_cpu)
    assert [forest.tokens for forest in found] == [30, 30]
    assert all(map(on_cpu.lets_heap_recycle, found))
    assert [forest.tokens for forest in pack_within(samples, 8192, elsewhere)] == [60]
    assert not elsewhere.lets_heap_recycle(found[0])


def test_blocks_are_recycled_inside_a_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, option: int, value: int) -> None:
            calls.append((option, value))

        def malloc_trim(self, pad: int) -> None:
            calls.append((0, pad))

    monkeypatch.setattr(heap, "_c_library", Library)
    kept = heap._JobHeap()
    kept.recycle(True)
    assert calls == []
    with kept.job():
        tight = calls[-2:]
        kept.recycle(True)
        assert calls[-2:] != tight
        count = len(calls)
        kept.recycle(True)
        assert len(calls) == count
        kept.recycle(False)
        assert calls[count:] == [*tight, (0, 0)]
    assert calls[-1] == (0, 0)
    assert dict(calls[-3:-1])[-3] == 2**25


def trained(folder: Path, samples: list[TrainSample], gib: float | None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    host = make_host(folder, dtype="float64", random_b=0.05)
    config = TrainConfig(activation_memory_gib=gib, adam_epsilon=0.1, learning_rate=1e-2, num_iterations=2, beta=0.1)
    outcome = Trainer(host, ADAPTER).step(samples, config)
    return {name: p.detach().clone() for name, p in host.adapter_parameters(ADAPTER).items()}, outcome.metrics


def test_a_job_with_little_memory_trains_the_same_weights_and_says_what_it_cost(folder: Path, samples: list[TrainSample]) -> None:
    start = {name: p.detach().clone() for name, p in make_host(folder, dtype="float64", random_b=0.05).adapter_parameters(ADAPTER).items()}
    plenty, roomy = trained(folder, samples, None)
    assert roomy["tokens/recomputed"] == 0
    assert 0 < roomy["memory/activations_gib"] < 1
    bound = 0.2 * roomy["memory/activations_gib"]
    little, tight = trained(folder, samples, bound)
    assert tight["tokens/recomputed"] > 0
    assert tight["memory/activations_gib"] <= bound
    for name, before in start.items():
        change = plenty[name] - before
        assert (little[name] - plenty[name]).abs().max() <= 1e-6 * change.abs().max(), name
    again, _ = trained(folder, samples, bound)
    assert all(torch.equal(again[name], little[name]) for name in little)


def test_rows_without_sharing_recompute_too(folder: Path, samples: list[TrainSample]) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    for gib in (1.0, 1 / GIB):
        host = make_host(folder, adapter=DROPOUT, random_b=0.05)
        outcome = Trainer(host, ADAPTER).step(samples, TrainConfig(allow_sharing=False, activation_memory_gib=gib))
        weights.append({name: p.detach().clone() for name, p in host.adapter_parameters(ADAPTER).items()})
        assert outcome.metrics["tokens/recomputed"] == (0 if gib == 1.0 else outcome.metrics["tokens/forward"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_supervised_jobs_keep_the_bound_too(folder: Path, samples: list[TrainSample]) -> None:
    turns = [[replace(sample.tokens, advantages=(1.0,) * len(sample.tokens.token_ids))] for sample in samples]
    outcome = Trainer(make_host(folder), ADAPTER).sft(turns, SftConfig(epochs=2, batch_size=4, activation_memory_gib=1 / GIB))
    assert outcome.moved
    assert outcome.metrics["tokens/recomputed"] == outcome.metrics["tokens/forward"]
    assert outcome.metrics["memory/activations_gib"] > 1 / GIB


def test_scoring_is_cut_to_the_bound_as_well() -> None:
    assert ActivationBound(COST, 2200.0).scoring_tokens(8192) == 10
    assert ActivationBound(COST, 1e9).scoring_tokens(8192) == 8192
