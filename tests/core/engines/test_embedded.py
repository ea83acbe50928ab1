"""The embedded engine's numbers equal a plain forward pass, whatever batching, sharing, eviction and training do around it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_models import tiny_qwen3, tiny_sliding_window, tiny_tokenizer

from apprentice.core.config import AdapterConfig
from apprentice.core.engines.embedded import EmbeddedEngine
from apprentice.core.engines.protocol import BASE, PolicyVersion
from apprentice.core.engines.request_rules import EndRule, plain_decode
from apprentice.core.engines.slot_runner import PAGE_TOKENS
from apprentice.core.errors import ConfigError, ContextOverflow, EngineError
from apprentice.core.records import SamplingParams
from apprentice.core.training.base_models import resolve_base
from apprentice.core.training.policy import HostedModel

_TOKENIZER = tiny_tokenizer()
ONE, TWO = PolicyVersion("mail/agent", 1), PolicyVersion("mail/agent", 2)


@pytest_asyncio.fixture
async def engine(llama_host: HostedModel) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(llama_host, kv_cache_tokens=4096)
    yield engine
    await engine.close()


async def draw(engine: EmbeddedEngine, prompt: Sequence[int], policy: PolicyVersion = BASE, **sampling) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(prompt, SamplingParams(**sampling), policy):
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
    return tokens, logprobs


async def eventually(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # engines tell nobody when counters change
            await asyncio.sleep(0)


def plain(host: HostedModel, prompt: Sequence[int], tokens: Sequence[int], adapter: str | None = None) -> list[float]:
    """Log-probabilities of `tokens` after `prompt` from the model's own forward pass, without cache or batch."""
    with host.using(adapter) as model, torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    return [float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens)]


def some_ids(seed: int, count: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(3, 384) for _ in range(count)]


async def test_a_group_reads_its_shared_prompt_once(engine: EmbeddedEngine, llama_host: HostedModel) -> None:
    prompt = some_ids(1, 300)
    replies = await asyncio.gather(*(draw(engine, prompt, max_tokens=90) for _ in range(8)))
    stats = engine.stats()
    assert stats.prompt_tokens - stats.cached_prompt_tokens == 300 + 7
    assert len({tuple(tokens) for tokens, _ in replies}) == 8
    for tokens, logprobs in replies:
        assert logprobs == pytest.approx(plain(llama_host, prompt, tokens), abs=1e-4)


async def test_the_next_turn_reads_only_what_is_new(engine: EmbeddedEngine, llama_host: HostedModel) -> None:
    ids = some_ids(2, 150)
    for turn in range(4):
        before = engine.stats().prompt_tokens - engine.stats().cached_prompt_tokens
        tokens, logprobs = await draw(engine, ids, max_tokens=37)
        read = engine.stats().prompt_tokens - engine.stats().cached_prompt_tokens - before
        assert read == (150 if turn == 0 else 20 + 1)  # the last drawn token was never fed to the model
        assert logprobs == pytest.approx(plain(llama_host, ids, tokens), abs=1e-4)
        ids += tokens + some_ids(turn, 20)


async def test_a_prompt_longer_than_one_step_is_read_in_parts_beside_decoding_sequences(llama_host: HostedModel) -> None:
    engine = EmbeddedEngine(llama_host, kv_cache_tokens=4096, prefill_tokens=50)
    prompts = [some_ids(seed, length) for seed, length in enumerate((3, 430, 64, 129, 1, 65))]
    replies = await asyncio.gather(*(draw(engine, prompt, max_tokens=40) for prompt in prompts))
    for prompt, (tokens, logprobs) in zip(prompts, replies, strict=True):
        assert logprobs == pytest.approx(plain(llama_host, prompt, tokens), abs=1e-4)
    await engine.close()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), cache_pages=st.integers(4, 20), prefill=st.integers(5, 200))
def test_random_conversations_with_forks_eviction_and_two_versions_get_the_models_own_numbers(
    llama_host: HostedModel, adapter_folders: tuple[Path, Path], seed: int, cache_pages: int, prefill: int
) -> None:
    chooser = random.Random(seed)
    limit = cache_pages * PAGE_TOKENS
    known: list[tuple[PolicyVersion, list[int]]] = []

    async def converse(engine: EmbeddedEngine, policy: PolicyVersion) -> None:
        ids = some_ids(chooser.randrange(3), chooser.randrange(1, 90))
        for _ in range(chooser.randrange(1, 4)):
            tokens, logprobs = await draw(engine, ids, policy, max_tokens=chooser.randrange(1, 30))
            name = None if policy == BASE else "reference"
            assert logprobs == pytest.approx(plain(llama_host, ids, tokens, name), abs=1e-4)
            known.append((policy, ids + tokens))
            _, ids = chooser.choice(known)  # continue, or fork from another conversation or version
            ids = ids[: chooser.randrange(1, len(ids) + 1)] if chooser.random() < 0.4 else ids
            ids = ids + some_ids(chooser.randrange(5), chooser.randrange(0, 30))
            if len(ids) + 30 >= limit:
                return

    async def play() -> None:
        engine = EmbeddedEngine(llama_host, kv_cache_tokens=limit, prefill_tokens=prefill)
        llama_host.load_adapter("reference", adapter_folders[0])
        try:
            await engine.load(ONE, adapter_folders[0])
            await asyncio.gather(*(converse(engine, chooser.choice((BASE, ONE))) for _ in range(5)))
            assert (engine.stats().running, engine.stats().queued) == (0, 0)
        finally:
            await engine.close()
            llama_host.drop_adapter("reference")

    asyncio.run(play())


async def test_requests_beyond_the_cache_wait_and_none_fails(llama_host: HostedModel) -> None:
    engine = EmbeddedEngine(llama_host, kv_cache_tokens=4 * PAGE_TOKENS)
    prompts = [some_ids(seed, 50) for seed in range(6)]
    replies = await asyncio.gather(*(draw(engine, prompt, max_tokens=150) for prompt in prompts))
    for prompt, (tokens, logprobs) in zip(prompts, replies, strict=True):
        assert len(tokens) == 150
        assert logprobs == pytest.approx(plain(llama_host, prompt, tokens), abs=1e-4)
    assert engine.stats().extra["preemptions"] > 0
    assert "fewer than the model's context" in engine.info().notes[0]
    with pytest.raises(ContextOverflow, match="context holds 256"):
        await draw(engine, some_ids(0, 256))
    await engine.close()


async def test_the_cache_bound_is_stated_in_tokens_and_bytes(llama_host: HostedModel) -> None:
    engine = EmbeddedEngine(llama_host, kv_cache_tokens=1000)
    info = engine.info()
    assert info.kv_cache_tokens == 1024  # whole pages
    assert info.kv_cache_bytes == 1024 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, KV heads, head size, float32
    await engine.close()


async def test_a_cache_of_one_version_never_serves_another(
    engine: EmbeddedEngine, llama_host: HostedModel, adapter_folders: tuple[Path, Path]
) -> None:
    await engine.load(ONE, adapter_folders[0])
    prompt = some_ids(3, 200)
    await draw(engine, prompt, max_tokens=2)
    await draw(engine, prompt, ONE, max_tokens=2)
    assert engine.stats().cached_prompt_tokens == 0
    await engine.unload(ONE)
    await engine.load(ONE, adapter_folders[1])  # the same name, other weights
    tokens, logprobs = await draw(engine, prompt, ONE, max_tokens=20)
    assert engine.stats().cached_prompt_tokens == 0
    llama_host.load_adapter("reference", adapter_folders[1])
    assert logprobs == pytest.approx(plain(llama_host, prompt, tokens, "reference"), abs=1e-4)
    llama_host.drop_adapter("reference")


async def test_the_trainer_can_run_and_change_adapters_while_the_engine_is_paused(
    engine: EmbeddedEngine, llama_host: HostedModel, adapter_folders: tuple[Path, Path]
) -> None:
    prompt = some_ids(4, 40)
    running = [asyncio.ensure_future(draw(engine, prompt, max_tokens=100, seed=1)) for _ in range(3)]
    await eventually(lambda: engine.stats().sampled_tokens > 0)
    await engine.pause()

    def train() -> float:
        llama_host.add_adapter("training", AdapterConfig(rank=4), seed=0)
        with llama_host.using("training") as model:
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(prompt[1:])).backward()
        gradient = sum(float(p.grad.abs().sum()) for p in llama_host.adapter_parameters("training").values() if p.grad is not None)
        llama_host.drop_adapter("training")
        return gradient

    assert await asyncio.wait_for(asyncio.to_thread(train), 60) > 0
    await engine.resume()
    for tokens, logprobs in await asyncio.gather(*running):
        assert logprobs == pytest.approx(plain(llama_host, prompt, tokens), abs=1e-4)


async def test_sampling_goes_on_when_the_trainer_takes_the_lock_without_pausing(engine: EmbeddedEngine, llama_host: HostedModel) -> None:
    taken, finish = threading.Event(), threading.Event()

    def hold() -> None:
        with llama_host.using(None):
            taken.set()
            finish.wait(60)

    holder = asyncio.ensure_future(asyncio.to_thread(hold))
    await asyncio.to_thread(taken.wait, 60)
    waiting = asyncio.ensure_future(draw(engine, some_ids(5, 20), max_tokens=5))
    await eventually(lambda: engine.stats().running > 0)
    assert not waiting.done()
    finish.set()
    await holder
    assert len((await waiting)[0]) == 5


async def test_a_failing_version_fails_its_own_requests_with_the_cause_and_no_others(
    engine: EmbeddedEngine, llama_host: HostedModel, adapter_folders: tuple[Path, Path]
) -> None:
    await engine.load(ONE, adapter_folders[0])
    for parameter in llama_host.adapter_parameters("serving:mail/agent@1").values():
        parameter.data.fill_(float("nan"))
    prompt = some_ids(6, 100)
    good = [asyncio.ensure_future(draw(engine, prompt, max_tokens=60)) for _ in range(3)]
    with pytest.raises(EngineError, match="sampling with mail/agent@1 failed") as caught:
        await draw(engine, prompt, ONE, max_tokens=5)
    assert isinstance(caught.value.__cause__, EngineError)
    for tokens, logprobs in await asyncio.gather(*good):
        assert logprobs == pytest.approx(plain(llama_host, prompt, tokens), abs=1e-4)
    await engine.unload(ONE)
    for seed in range(22):  # every slot is used again; no NaN is left behind
        tokens, logprobs = await draw(engine, some_ids(seed, 190), max_tokens=3)
        assert logprobs == pytest.approx(plain(llama_host, some_ids(seed, 190), tokens), abs=1e-4)


async def test_when_the_scheduler_itself_fails_nothing_hangs_and_the_engine_says_so(llama_host: HostedModel) -> None:
    engine = EmbeddedEngine(llama_host, kv_cache_tokens=1024)
    stream = engine.generate(some_ids(7, 20), SamplingParams(max_tokens=900), BASE)
    await anext(stream)

    def broken(_: object) -> None:
        raise ZeroDivisionError("bookkeeping is broken")

    engine._runner.stop = broken  # type: ignore[method-assign]  # a defect in bookkeeping, not in a step
    await stream.aclose()
    await eventually(lambda: engine._scheduler.closed)
    for ask in (draw(engine, some_ids(7, 20)), engine.score([1, 2], BASE), engine.pause()):
        with pytest.raises(EngineError, match="closed since it failed: bookkeeping is broken") as caught:
            await ask
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await asyncio.wait_for(engine.close(), 60)


async def test_no_version_starves_another(engine: EmbeddedEngine, adapter_folders: tuple[Path, Path]) -> None:
    await engine.load(ONE, adapter_folders[0])
    await engine.load(TWO, adapter_folders[1])
    long = [asyncio.ensure_future(draw(engine, some_ids(8, 30), max_tokens=300)) for _ in range(6)]
    await asyncio.gather(*(draw(engine, some_ids(9, 30), policy, max_tokens=10) for policy in (ONE, TWO)))
    assert not any(future.done() for future in long)
    await asyncio.gather(*long)


@pytest.mark.parametrize("options", [{"kv_cache_tokens": 0}, {"prefill_tokens": 0}])
async def test_impossible_bounds_are_refused(llama_host: HostedModel, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        EmbeddedEngine(llama_host, **options)


async def test_models_with_query_and_key_norms_take_the_fast_path(tmp_path: Path) -> None:
    host = HostedModel.load(resolve_base(str(tiny_qwen3(tmp_path))), dtype="float32", device="cpu")
    engine = EmbeddedEngine(host, kv_cache_tokens=1024)
    assert engine.info().kv_cache_bytes > 0
    tokens, logprobs = await draw(engine, some_ids(1, 90), max_tokens=40)
    assert logprobs == pytest.approx(plain(host, some_ids(1, 90), tokens), abs=1e-4)
    await engine.close()


async def test_a_large_head_gives_the_same_numbers(tmp_path: Path) -> None:
    host = HostedModel.load(resolve_base(str(wide_llama(tmp_path))), dtype="float32", device="cpu")
    engine = EmbeddedEngine(host, kv_cache_tokens=1024)
    replies = await asyncio.gather(*(draw(engine, some_ids(seed, 30), max_tokens=20) for seed in range(3)))
    for seed, (tokens, logprobs) in enumerate(replies):
        assert logprobs == pytest.approx(plain(host, some_ids(seed, 30), tokens), abs=1e-4)
    assert max(max(tokens) for tokens, _ in replies) > 8192  # the last blocks are drawn from too
    await engine.close()
    assert "forward" not in vars(host.model.get_output_embeddings())


def wide_llama(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=9001, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_gemma3(folder: Path) -> HostedModel:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=512, sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return _host(AutoModelForCausalLM.from_config(config), folder)


def tiny_mamba(folder: Path) -> HostedModel:
    from transformers import AutoModelForCausalLM, MambaConfig

    return _host(AutoModelForCausalLM.from_config(MambaConfig(vocab_size=384, hidden_size=32, num_hidden_layers=2, state_size=4)), folder)


def tiny_qwen3_next(folder: Path) -> HostedModel:
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=2,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0,
        max_position_embeddings=512, mlp_only_layers=[0, 1],
    )  # fmt: skip
    return _host(AutoModelForCausalLM.from_config(config), folder)


def _host(model, folder: Path) -> HostedModel:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return HostedModel.load(resolve_base(str(folder)), dtype="float32", device="cpu")


def tiny_mistral(folder: Path) -> HostedModel:
    return HostedModel.load(resolve_base(str(tiny_sliding_window(folder))), dtype="float32", device="cpu")


@pytest.mark.parametrize("make", [tiny_mistral, tiny_gemma3, tiny_mamba, tiny_qwen3_next])
async def test_models_without_full_attention_go_through_their_own_cache_and_say_so(make, tmp_path: Path) -> None:
    host = make(tmp_path)
    engine = EmbeddedEngine(host, kv_cache_tokens=300)
    assert "slower path" in engine.info().notes[0]
    prompts = [some_ids(seed, 30 + seed) for seed in range(5)]
    replies = await asyncio.gather(*(draw(engine, prompt, max_tokens=50) for prompt in prompts))
    for prompt, (tokens, logprobs) in zip(prompts, replies, strict=True):
        assert len(tokens) == 50
        assert logprobs == pytest.approx(plain(host, prompt, tokens), abs=1e-4)
        assert (await engine.score([*prompt, *tokens], BASE))[-50:] == pytest.approx(logprobs, abs=1e-4)
    await engine.close()


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abé漢🙂 \n", min_size=1, max_size=200), data=st.data())
def test_a_stop_string_ends_at_the_first_token_whose_text_completes_it(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    tokenizer = _TOKENIZER
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = next(end for end in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
    rule = EndRule(SamplingParams(max_tokens=1000, stop=("zzzz", stop)), (), room=1000, decode=plain_decode(tokenizer))
    ended = next((end, ending) for end, token in enumerate(ids, start=1) if (ending := rule.push(token)))
    assert (ended[0], ended[1].reason, ended[1].stop_string) == (expected, "stop", stop)
