"""What every engine promises, run unchanged on each of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from support.tiny_models import tiny_tokenizer

from apprentice.core.engines.embedded import EmbeddedEngine
from apprentice.core.engines.memory import ScriptedEngine
from apprentice.core.engines.protocol import BASE, Engine, PolicyVersion, TokenChunk
from apprentice.core.errors import ContextOverflow, EngineError, InvalidRequest
from apprentice.core.records import SamplingParams
from apprentice.core.training.policy import HostedModel

VOCABULARY = 384
PROMPT = list(range(40, 75))
ONE, TWO = PolicyVersion("mail/agent", 1), PolicyVersion("mail/agent", 2)


@dataclass
class Subject:
    engine: Engine
    adapters: tuple[Path, Path]


def _scripted() -> Engine:
    def reply(prompt_ids, sampling, policy):
        own = random.Random() if sampling.seed is None else random.Random(repr((tuple(prompt_ids), sampling.seed, policy)))
        return [own.randrange(3, VOCABULARY) for _ in range(5000)]

    return ScriptedEngine(reply, tokenizer=tiny_tokenizer(), vocabulary=VOCABULARY, context_length=2048)


@pytest_asyncio.fixture(params=["embedded", "scripted"])
async def subject(request: pytest.FixtureRequest, llama_host: HostedModel, adapter_folders: tuple[Path, Path]) -> AsyncIterator[Subject]:
    engine: Engine = EmbeddedEngine(llama_host, kv_cache_tokens=4096) if request.param == "embedded" else _scripted()
    yield Subject(engine, adapter_folders)
    await asyncio.wait_for(engine.close(), 30)


async def draw(engine: Engine, prompt=PROMPT, policy=BASE, stop_token_ids=(), **sampling) -> TokenChunk:
    """The whole completion as one chunk."""
    chunks = [chunk async for chunk in engine.generate(prompt, SamplingParams(**sampling), policy, stop_token_ids)]
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.sampling_logprobs)
    return TokenChunk(
        *(sum((getattr(chunk, name) for chunk in chunks), ()) for name in ("token_ids", "logprobs", "sampling_logprobs", "top_logprobs")),
        chunks[-1].finish_reason,
        chunks[-1].stop_string,
    )


async def eventually(condition) -> None:
    """Bounded by the test's own time limit."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # engines tell nobody when counters change
            await asyncio.sleep(0)


async def test_a_completion_ends_with_length_after_max_tokens(subject: Subject) -> None:
    for count in (1, 2, 17):
        completion = await draw(subject.engine, max_tokens=count)
        assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
        assert all(0 <= token < VOCABULARY for token in completion.token_ids)
        assert all(logprob <= 0 for logprob in completion.logprobs + completion.sampling_logprobs)


async def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(subject: Subject) -> None:
    first, second, other = [(await draw(subject.engine, max_tokens=24, seed=seed)).token_ids for seed in (5, 5, 6)]
    assert first == second != other


async def test_without_a_seed_completions_differ(subject: Subject) -> None:
    first, second = [(await draw(subject.engine, max_tokens=24)).token_ids for _ in range(2)]
    assert first != second


async def test_a_stop_token_ends_the_completion_and_is_part_of_it(subject: Subject) -> None:
    plain = await draw(subject.engine, max_tokens=24, seed=3)
    stop = plain.token_ids[9]
    stopped = await draw(subject.engine, max_tokens=24, seed=3, stop_token_ids=(stop,))
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", None)


async def test_a_stop_string_is_found_across_token_borders(subject: Subject) -> None:
    tokenizer = tiny_tokenizer()
    plain = await draw(subject.engine, max_tokens=40, seed=8)
    texts = [tokenizer.decode(plain.token_ids[:end]) for end in range(41)]
    # the last whole characters of token k with the first of token k + 1
    end = next(
        k
        for k in range(12, 40)
        if not texts[k].endswith("\ufffd") and len(texts[k + 1]) > len(texts[k]) and "\ufffd" not in texts[k + 1][-4:]
    )
    stop = texts[end + 1][len(texts[end]) - 2 : len(texts[end]) + 1]
    first = next(k for k in range(41) if stop in texts[k])
    stopped = await draw(subject.engine, max_tokens=40, seed=8, stop=("never, never", stop))
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    assert stopped.token_ids == plain.token_ids[:first]


async def test_greedy_draws_have_sampling_logprob_zero_and_the_models_own_logprob(subject: Subject) -> None:
    completion = await draw(subject.engine, max_tokens=8, temperature=0, seed=1, top_logprobs=3)
    assert set(completion.sampling_logprobs) == {0.0}
    assert all(logprob < 0 for logprob in completion.logprobs)
    assert [top[0][0] for top in completion.top_logprobs] == list(completion.token_ids)


async def test_top_logprobs_are_given_best_first_when_asked_for_and_only_then(subject: Subject) -> None:
    completion = await draw(subject.engine, max_tokens=6, top_logprobs=4)
    assert [len(top) for top in completion.top_logprobs] == [4] * 6
    for top in completion.top_logprobs:
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert len({token for token, _ in top}) == 4
    assert (await draw(subject.engine, max_tokens=6)).top_logprobs == ()


async def test_scoring_agrees_with_the_logprobs_of_the_completion(subject: Subject) -> None:
    completion = await draw(subject.engine, max_tokens=20)
    scores = await subject.engine.score([*PROMPT, *completion.token_ids], BASE)
    assert len(scores) == len(PROMPT) + 19
    assert scores[-20:] == pytest.approx(completion.logprobs, abs=1e-4)


async def test_scoring_one_token_gives_no_scores(subject: Subject) -> None:
    assert await subject.engine.score(PROMPT[:1], BASE) == []


async def test_a_version_that_is_not_loaded_is_an_error_and_never_another_version(subject: Subject) -> None:
    for ask in (draw(subject.engine, policy=ONE), subject.engine.score(PROMPT, ONE), subject.engine.unload(ONE)):
        with pytest.raises(EngineError, match="does not serve mail/agent@1"):
            await ask


async def test_loaded_versions_are_served_side_by_side_with_different_numbers(subject: Subject) -> None:
    engine = subject.engine
    await engine.load(ONE, subject.adapters[0])
    await engine.load(TWO, subject.adapters[1])
    assert engine.loaded() == {BASE, ONE, TWO}
    scores = [await engine.score(PROMPT, policy) for policy in (BASE, ONE, TWO, ONE)]
    assert scores[1] == pytest.approx(scores[3], abs=1e-4)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert max(abs(x - y) for x, y in zip(scores[left], scores[right], strict=True)) > 0.01
    completions = await asyncio.gather(*(draw(engine, policy=policy, max_tokens=20) for policy in (BASE, ONE, TWO) * 3))
    for policy, completion in zip((BASE, ONE, TWO) * 3, completions, strict=True):
        scores_now = await engine.score([*PROMPT, *completion.token_ids], policy)
        assert scores_now[-20:] == pytest.approx(completion.logprobs, abs=1e-4)


async def test_loading_refuses_a_missing_folder_and_a_version_twice(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="must be a folder"):
        await subject.engine.load(ONE, tmp_path / "missing")
    await subject.engine.load(ONE, subject.adapters[0])
    with pytest.raises(EngineError, match="already loaded"):
        await subject.engine.load(ONE, subject.adapters[0])


async def test_unloading_waits_for_open_completions_and_refuses_new_ones(subject: Subject) -> None:
    engine = subject.engine
    await engine.load(ONE, subject.adapters[0])
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=1500), ONE)
    await anext(stream)
    unloading = asyncio.ensure_future(engine.unload(ONE))
    await eventually(lambda: ONE not in engine.loaded())
    with pytest.raises(EngineError, match="does not serve"):
        await draw(engine, policy=ONE)
    await anext(stream)
    assert not unloading.done()
    await stream.aclose()
    await asyncio.wait_for(unloading, 30)
    await engine.load(ONE, subject.adapters[1])
    assert ONE in engine.loaded()


async def test_closing_a_stream_ends_its_sampling_and_no_other(subject: Subject) -> None:
    engine = subject.engine
    other = asyncio.ensure_future(draw(engine, max_tokens=200))
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=1900), BASE)
    await anext(stream)
    await stream.aclose()
    assert len((await other).token_ids) == 200
    await eventually(lambda: engine.stats().running == 0)
    assert engine.stats().sampled_tokens < 1900


async def test_while_paused_nothing_is_sampled_and_afterwards_completions_go_on(subject: Subject) -> None:
    engine = subject.engine
    open_stream = engine.generate(PROMPT, SamplingParams(max_tokens=300), BASE)
    await anext(open_stream)
    await engine.pause()
    waiting = asyncio.ensure_future(draw(engine, max_tokens=3))
    before = engine.stats().sampled_tokens
    await engine.load(ONE, subject.adapters[0])  # a round trip through the engine
    await engine.load(TWO, subject.adapters[1])
    assert engine.stats().sampled_tokens == before
    assert not waiting.done()
    await engine.resume()
    rest = [chunk async for chunk in open_stream]
    assert sum(len(chunk.token_ids) for chunk in rest) == 299
    assert len((await waiting).token_ids) == 3


async def test_a_stream_closed_while_paused_is_freed(subject: Subject) -> None:
    stream = subject.engine.generate(PROMPT, SamplingParams(max_tokens=1900), BASE)
    await anext(stream)
    await subject.engine.pause()
    await stream.aclose()
    await eventually(lambda: subject.engine.stats().running == 0)


async def test_closing_the_engine_fails_open_completions_and_every_later_call(subject: Subject) -> None:
    engine = subject.engine
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=1900), BASE)
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    await engine.close()
    for call in (engine.info, engine.stats, engine.loaded):
        with pytest.raises(EngineError, match="closed"):
            call()
    for ask in (draw(engine), engine.score(PROMPT, BASE), engine.pause(), engine.resume(), engine.unload(ONE), engine.load(ONE, Path("."))):
        with pytest.raises(EngineError, match="closed"):
            await ask


async def test_closing_while_paused_ends_everything(subject: Subject) -> None:
    await subject.engine.pause()
    waiting = asyncio.ensure_future(draw(subject.engine, max_tokens=3))
    await eventually(lambda: subject.engine.stats().queued + subject.engine.stats().running == 1)
    await asyncio.wait_for(subject.engine.close(), 30)
    with pytest.raises(EngineError, match="closed"):
        await waiting


async def test_impossible_prompts_are_refused_with_one_sentence(subject: Subject) -> None:
    context = subject.engine.info().context_length
    with pytest.raises(InvalidRequest, match="at least one token"):
        await draw(subject.engine, prompt=[])
    for token in (-1, VOCABULARY):
        with pytest.raises(InvalidRequest, match=f"between 0 and {VOCABULARY - 1}, but the prompt holds {token}"):
            await draw(subject.engine, prompt=[1, token, 2])
    with pytest.raises(ContextOverflow, match=f"the prompt has {context} tokens and the model's context holds {context}"):
        await draw(subject.engine, prompt=[7] * context)


async def test_a_completion_ends_with_length_at_the_contexts_end(subject: Subject) -> None:
    context = subject.engine.info().context_length
    completion = await draw(subject.engine, prompt=[7] * (context - 5), max_tokens=100)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


async def test_many_requests_at_once_all_get_their_own_completion(subject: Subject) -> None:
    lengths = [1 + 7 * number % 23 for number in range(60)]
    completions = await asyncio.gather(*(draw(subject.engine, prompt=PROMPT[: 1 + n % 30], max_tokens=k) for n, k in enumerate(lengths)))
    assert [len(completion.token_ids) for completion in completions] == lengths
    stats = subject.engine.stats()
    assert (stats.sampled_tokens, stats.prompt_tokens) == (sum(lengths), sum(1 + n % 30 for n in range(60)))
    assert (stats.queued, stats.running) == (0, 0)
