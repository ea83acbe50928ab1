"""The supervised warm-up equals a plain label-masked loss, is deterministic, and really teaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_host import ADAPTER, make_host, rollouts, small_llama
from torch import Tensor

from apprentice.core.config import AdapterConfig, SftConfig, TrainConfig
from apprentice.core.errors import ContextOverflow
from apprentice.core.training.forest import TokenSample
from apprentice.core.training.metrics import METRICS
from apprentice.core.training.policy import HostedModel
from apprentice.core.training.sft import shuffled_batches
from apprentice.core.training.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("models"))


def target(prompt: Sequence[int], tokens: Sequence[int], weight: float = 1.0) -> TokenSample:
    zeros = (0.0,) * len(tokens)
    return TokenSample("demo", tuple(prompt), tuple(tokens), zeros, zeros, (weight,) * len(tokens))


def demonstrations(count: int = 5) -> list[list[TokenSample]]:
    """Two turns each, of different lengths, behind one shared system prompt."""
    g = torch.Generator().manual_seed(0)
    found: list[list[TokenSample]] = []
    for number in range(count):
        first = [1, 2, 3, 4, *torch.randint(5, 300, (3 + number,), generator=g).tolist()]
        reply = torch.randint(5, 300, (2 + number,), generator=g).tolist()
        second = [*first, *reply, *torch.randint(5, 300, (4,), generator=g).tolist()]
        found.append([target(first, reply), target(second, torch.randint(5, 300, (3,), generator=g).tolist())])
    return found


def weights(host: HostedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in host.adapter_parameters(ADAPTER).items()}


def plain_sft(host: HostedModel, demos: list[list[TokenSample]], config: SftConfig) -> list[float]:
    """Label-masked cross-entropy as Hugging Face computes it, one padded-free row per demonstration; returns the losses."""
    parameters = list(host.adapter_parameters(ADAPTER).values())
    adamw = torch.optim.AdamW(parameters, lr=config.learning_rate, eps=config.adam_epsilon, weight_decay=0.0)
    losses: list[float] = []
    for epoch in range(config.epochs):
        for batch in shuffled_batches(demos, config, epoch):
            numbers = list(dict.fromkeys(int(s.trajectory_id) for s in batch))
            count = sum(len(turn.token_ids) for n in numbers for turn in demos[n])
            loss = torch.zeros((), dtype=torch.float64)
            for number in numbers:
                last = demos[number][-1]
                ids = [*last.prompt_ids, *last.token_ids]
                labels = [-100] * len(ids)
                for turn in demos[number]:
                    labels[len(turn.prompt_ids) : len(turn.prompt_ids) + len(turn.token_ids)] = turn.token_ids
                with host.using(ADAPTER) as model:
                    loss = loss + model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]), num_items_in_batch=count).loss
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            adamw.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("budget", [64, 8192])
def test_a_warm_up_equals_a_label_masked_loss(folder: Path, budget: int) -> None:
    config = SftConfig(epochs=2, batch_size=2, tokens_per_microbatch=budget, adam_epsilon=0.1, seed=3, max_grad_norm=0.3)
    ours, plain = (make_host(folder, dtype="float64", random_b=0.05) for _ in range(2))
    before = weights(ours)
    outcome = Trainer(ours, ADAPTER).sft(demonstrations(), config)
    losses = plain_sft(plain, demonstrations(), config)
    expected = weights(plain)
    for name, weight in weights(ours).items():
        change = expected[name] - before[name]
        assert (weight - before[name] - change).abs().max() < 3e-6 * change.abs().max(), name
    assert outcome.moved
    assert outcome.metrics["optimizer_steps"] == 6
    assert outcome.metrics["loss"] == pytest.approx(sum(losses) / 6, rel=1e-6)
    assert outcome.metrics["tokens/trained"] == pytest.approx(sum(len(t.token_ids) for demo in demonstrations() for t in demo))
    assert set(outcome.metrics) <= set(METRICS)


def test_the_order_is_shuffled_by_the_seed_and_the_epoch_alone() -> None:
    demos = demonstrations(9)

    def order(seed: int, epoch: int) -> list[str]:
        batches = shuffled_batches(demos, SftConfig(seed=seed, batch_size=4), epoch)
        assert [len({s.trajectory_id for s in batch}) for batch in batches] == [4, 4, 1]
        return list(dict.fromkeys(s.trajectory_id for batch in batches for s in batch))

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(str(n) for n in range(9))


def test_tokens_weigh_as_told(folder: Path) -> None:
    """A target of weight zero moves nothing; it still counts in the mean."""
    host = make_host(folder)
    trainer = Trainer(host, ADAPTER)
    before = weights(host)
    assert not trainer.sft([[target([1, 2], [3, 4], weight=0.0)]], SftConfig()).moved
    whole = trainer.sft([[target([1, 2], [3, 4])]], SftConfig(learning_rate=1e-30)).metrics["loss"]
    half = trainer.sft([[target([1, 2], [3, 4], weight=0.5)]], SftConfig(learning_rate=1e-30)).metrics["loss"]
    assert half == pytest.approx(whole / 2, rel=1e-5)
    assert all((before[n] - w).abs().max() < 1e-20 for n, w in weights(host).items())


def test_nothing_to_learn_is_no_movement(folder: Path) -> None:
    trainer = Trainer(make_host(folder), ADAPTER)
    assert not trainer.sft([], SftConfig()).moved
    assert not trainer.sft([[], [target([1], [])]], SftConfig()).moved


def test_a_demonstration_longer_than_the_context_is_refused(folder: Path) -> None:
    with pytest.raises(ContextOverflow, match="2049 tokens"):
        Trainer(make_host(folder), ADAPTER).sft([[target([1] * 2048, [2])]], SftConfig())


def test_warm_up_and_grpo_share_one_optimizer_state_and_resume_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    dropout = AdapterConfig(rank=4, alpha=8, dropout=0.2)
    host = make_host(folder, adapter=dropout)
    samples = rollouts(host, groups=1, size=2, turns=1)
    trainer = Trainer(host, ADAPTER, seed=1)
    trainer.sft(demonstrations(), SftConfig(batch_size=2))
    trainer.save_state(tmp_path)
    host.save_adapter(ADAPTER, tmp_path / "adapter")
    trainer.step(samples, TrainConfig())
    expected = weights(host)

    def resume(*, state: bool) -> dict[str, Tensor]:
        fresh = HostedModel.load(host.base, device="cpu")
        fresh.load_adapter(ADAPTER, tmp_path / "adapter", trainable=True)
        again = Trainer(fresh, ADAPTER, seed=1)
        if state:
            again.load_state(tmp_path)
        again.step(samples, TrainConfig())
        return weights(fresh)

    assert all(torch.equal(w, expected[n]) for n, w in resume(state=True).items())
    assert not all(torch.equal(w, expected[n]) for n, w in resume(state=False).items())


def test_a_cancelled_warm_up_leaves_nothing_behind(folder: Path) -> None:
    class Cancelled(Exception):
        pass

    def cancel(data: dict[str, Any]) -> None:
        if data["step"] == 3:
            raise Cancelled

    host = make_host(folder)
    before = weights(host)
    with pytest.raises(Cancelled):
        Trainer(host, ADAPTER).sft(demonstrations(), SftConfig(batch_size=2), cancel)
    assert all(torch.equal(w, before[n]) for n, w in weights(host).items())


def test_a_tiny_model_learns_a_mapping(folder: Path) -> None:
    """Five prompts that differ in one token, each with its own answer of two tokens."""
    host = make_host(folder, adapter=AdapterConfig(rank=8, alpha=16))
    demos = [[target([1, 10 + key, 2], [50 + 7 * key, 60 + 5 * key])] for key in range(5)]
    trainer = Trainer(host, ADAPTER)
    first = trainer.sft(demos, SftConfig(learning_rate=1e-9)).metrics["loss"]
    last = trainer.sft(demos, SftConfig(learning_rate=2e-2, epochs=60)).metrics["loss"]
    assert first > 4.0
    assert last < first
    for demo in demos:
        with host.using(ADAPTER) as model, torch.no_grad():
            logits = model(input_ids=torch.tensor([[*demo[0].prompt_ids, *demo[0].token_ids]])).logits[0]
        assert logits[2:4].argmax(-1).tolist() == list(demo[0].token_ids)
