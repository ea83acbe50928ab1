"""What is trained is what was sampled: the same ids in the same contexts, byte for byte, and the same log-probabilities.

The witness is a spy at the engine's boundary, which the ledger does not know.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from support.real_parts import POLICY as REAL_POLICY
from support.real_parts import RealServer, job, real_server, record_rollouts, registration
from support.small_registry import CONTEXT, POLICY, SmallServer, small_server
from support.tiny_models import tiny_llama, tiny_tokenizer

from apprentice.core.config import TrainConfig
from apprentice.core.engines.memory import ScriptedEngine
from apprentice.core.engines.protocol import PolicyVersion, TokenChunk
from apprentice.core.records import FinishReason, SamplingParams
from apprentice.core.server.job_batch import build_batch
from apprentice.core.training.forest import Forest, TokenSample, pack

TOKENIZER = tiny_tokenizer()
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
Ids = tuple[int, ...]


def finely(text: str) -> list[int]:
    """A spelling that the tokenizer itself would not choose: one token for each byte, but for the markers of tool calls."""
    return [token for character in text for token in TOKENIZER.encode(character, add_special_tokens=False)]


def coarsely(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


END = [TOKENIZER.eos_token_id]
ODD = '<tool_call>\n{"name":   "get_weather",\t"arguments": { "days" :2 ,"city":"Par\\u00eds" } }\n</tool_call>'
PLAIN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BROKEN = 'I try. <tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>'

TURNS: list[tuple[str, list[int], dict[str, Any]]] = [
    ("one call, oddly spaced", finely(ODD) + END, {}),
    ("parallel calls", coarsely("Both. ") + finely(ODD) + coarsely("\n" + PLAIN) + END, {}),
    ("unparsable call", finely(BROKEN) + END, {}),
    ("unicode over several tokens", finely("naïve ☀ 日本語 👩‍🔬") + END, {}),
    ("truncated amid a character", finely("cut here: 👩‍🔬 and on and on"), {"max_tokens": 13}),
    ("truncated amid a call", finely(PLAIN), {"max_tokens": 30}),
    ("a stop string", finely("Thought: done. STOP and never seen") + END, {"stop": ["STOP"]}),
    ("an empty reply", END, {}),
    ("the end", coarsely("That is the weather of the city.") + END, {}),
]


class Spy(ScriptedEngine):
    """Replies by the number of the call within its rollout, and writes down what went in and what came out."""

    def __init__(self, tokens_per_chunk: int) -> None:
        super().__init__(lambda *_: self.next, tokenizer=TOKENIZER, context_length=CONTEXT, tokens_per_chunk=tokens_per_chunk)
        self.next: list[int] = []
        self.seen: list[tuple[Ids, Ids]] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion, stop_token_ids: Sequence[int] = ()
    ) -> AsyncIterator[TokenChunk]:
        drawn: list[int] = []
        async with aclosing(super().generate(prompt_ids, sampling, policy, stop_token_ids)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                drawn.extend(chunk.token_ids)
                if chunk.finish_reason is not None:  # before the last chunk leaves: nobody asks for more after it
                    self.seen.append((tuple(prompt_ids), tuple(drawn)))
                yield chunk


def as_an_agent_sends_it(message: Any) -> dict[str, Any]:
    """The reply as it re-enters the history: only what the client library knows, the arguments parsed and written anew."""
    sent: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.dumps(json.loads(call.function.arguments), sort_keys=True)},
            }
            for call in message.tool_calls
        ]
    return sent


def run_agent(
    server: SmallServer, engine: Spy, trajectory: str, turns: Sequence[tuple[str, list[int], dict[str, Any]]], stream: bool
) -> None:
    """One rollout with the official client, as an agent loop makes it."""
    with OpenAI(base_url=f"{server.url}/t/{trajectory}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is the weather?"}]
        for _, engine.next, options in turns:
            asked: Any = {"model": POLICY, "messages": messages, "tools": [TOOL], **options}
            message = streamed(client, asked) if stream else client.chat.completions.create(**asked).choices[0].message
            messages.append(as_an_agent_sends_it(message))
            if message.tool_calls:
                messages += [{"role": "tool", "tool_call_id": call.id, "content": f"{call.id[-2:]}: 22°"} for call in message.tool_calls]
            else:
                messages.append({"role": "user", "content": "Go on."})


def streamed(client: OpenAI, asked: Any) -> Any:
    """The whole message, put together by the client library from the chunks."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0].message


def trained_on(server: SmallServer, names: Sequence[str]) -> list[TokenSample]:
    """What the trainer gets for one group of these trajectories."""
    for number, name in enumerate(names):
        server.http.post(f"/api/trajectories/{name}/finish", json={"reward": float(number)}).raise_for_status()
    group = [server.ledger.trajectory(name) for name in names]
    batch = build_batch([group], TrainConfig(), context_length=CONTEXT)
    assert set(batch.fates.values()) == {"trained"}
    return [sample.tokens for sample in batch.samples]


def targets_in_context(forest: Forest) -> list[tuple[tuple[int, int], Ids, int]]:
    """For every target: (sample, token index), the ids from the root to the predicting token, and the target."""
    context_of: dict[int, Ids] = {}
    for start, end, parent, _ in forest.segments:
        before = context_of[forest.segments[parent].end - 1] if parent >= 0 else ()
        for place in range(start, end):
            before = (*before, int(forest.token_ids_T[place]))
            context_of[place] = before
    found = zip(forest.target_sample_N, forest.target_index_N, forest.target_predictor_N, forest.target_token_N, strict=True)
    return [((forest.numbers[sample], int(index)), context_of[int(place)], int(token)) for sample, index, place, token in found]


@pytest.mark.parametrize("tokens_per_chunk", [1, 7])
def test_the_trainer_gets_exactly_what_the_engine_drew_in_the_context_in_which_it_drew_it(tmp_path: Path, tokens_per_chunk: int) -> None:
    engine = Spy(tokens_per_chunk)
    names = ["plain", "streamed", "reversed", "fork"]
    with small_server(tmp_path, engine=engine) as server:
        run_agent(server, engine, "plain", TURNS, stream=False)
        run_agent(server, engine, "streamed", TURNS, stream=True)
        run_agent(server, engine, "reversed", TURNS[::-1], stream=True)
        run_agent(server, engine, "fork", [*TURNS[:3], TURNS[-1]], stream=False)
        run_agent(server, engine, "fork", [*TURNS[:2], TURNS[6]], stream=True)  # the agent starts over in the same trajectory
        samples = trained_on(server, names)
        completions = [c for name in names for c in server.ledger.completions(name)]
    assert len(engine.seen) == 3 * len(TURNS) + 4 + 3
    assert [(sample.prompt_ids, sample.token_ids) for sample in samples] == engine.seen
    for budget in (10**9, 1500):
        found = [target for forest in pack(samples, budget) for target in targets_in_context(forest)]
        expected = {
            (number, index): ((*prompt, *drawn[:index]), token)
            for number, (prompt, drawn) in enumerate(engine.seen)
            for index, token in enumerate(drawn)
        }
        assert Counter(key for key, _, _ in found) == Counter(dict.fromkeys(expected, 1))
        assert {key: (context, token) for key, context, token in found} == expected
    finishes = [c.finish_reason for c in completions[: len(TURNS)]]
    assert finishes[:2] == [FinishReason.tool_calls] * 2
    assert [finishes[4], finishes[5]] == [FinishReason.length] * 2
    assert len(completions[1].message["tool_calls"]) == 2  # type: ignore[arg-type]
    assert completions[2].parse_error


@pytest.mark.parametrize("stream", [False, True])
def test_every_turn_re_enters_the_next_prompt_as_the_ids_that_were_drawn(tmp_path: Path, stream: bool) -> None:
    engine = Spy(3)
    with small_server(tmp_path, engine=engine) as server:
        run_agent(server, engine, "run", TURNS, stream)
        samples = server.ledger.completions("run")
    for (name, _, _), before, after in zip(TURNS, engine.seen, engine.seen[1:], strict=False):
        whole = before[0] + before[1]
        assert after[0][: len(whole)] == whole, f"after the turn with {name} the drawn ids are not in the next prompt"
    assert [c.parent for c in samples] == [None, *(c.id for c in samples[:-1])]
    forest = Forest.build([TokenSample(c.id, c.prompt_ids, c.token_ids, c.logprobs, c.sampling_logprobs, c.logprobs) for c in samples])
    assert len(forest.rows) == 1
    assert forest.tokens == len(engine.seen[-1][0]) + len(engine.seen[-1][1])


def warped(logits_V: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Log-probabilities after temperature and nucleus (Holtzman et al. 2020): the smallest set with a mass of `top_p` or more."""
    probabilities_V = (logits_V.double() / temperature).softmax(-1)
    ordered, order = probabilities_V.sort(descending=True)
    kept = order[: int((ordered.cumsum(0) < top_p).sum()) + 1]
    result_V = torch.full_like(probabilities_V, -math.inf)
    result_V[kept] = (probabilities_V[kept] / probabilities_V[kept].sum()).log()
    return result_V


def differences(server: RealServer, names: Sequence[str], temperature: float, top_p: float) -> tuple[float, float, int]:
    """Largest |sampler - trainer| of the log-probabilities, the same for those drawn from, and the number of tokens."""
    completions = [c for name in names for c in server.ledger.completions(name)]
    runtime = server.runtime()
    assert {c.policy_version for c in completions} == {runtime.step}
    scored = runtime.trainer.score([[*c.prompt_ids, *c.token_ids] for c in completions])
    plain, drawn_from, count = 0.0, 0.0, 0
    for completion, row in zip(completions, scored, strict=True):
        length = len(completion.token_ids)
        plain = max(plain, *(abs(a - b) for a, b in zip(completion.logprobs, row[-length:], strict=True)))
        with runtime.base.host.using(REAL_POLICY) as model, torch.no_grad():
            logits_TV = model(torch.tensor([[*completion.prompt_ids, *completion.token_ids]])).logits[0, -length - 1 : -1]
        expected = [
            float(warped(logits_V, temperature, top_p)[token]) for logits_V, token in zip(logits_TV, completion.token_ids, strict=True)
        ]
        drawn_from = max(drawn_from, *(abs(a - b) for a, b in zip(completion.sampling_logprobs, expected, strict=True)))
        count += length
    return plain, drawn_from, count


async def test_sampler_and_trainer_agree_within_1e_4_on_every_token_before_and_after_training(tmp_path: Path) -> None:
    temperature, top_p = 0.7, 0.9
    sampling: Any = {"temperature": temperature, "top_p": top_p, "max_tokens": 24}
    async with real_server(tmp_path / "home") as server:
        await server.post("/api/models", registration(tiny_llama(tmp_path / "base")))
        for step in range(3):
            groups = await record_rollouts(server, prefix=f"s{step}-", turns=3, **sampling)
            names = [member["id"] for group in groups for member in group]
            plain, drawn_from, count = differences(server, names, temperature, top_p)
            assert count > 200
            assert plain < 1e-4
            assert drawn_from < 1e-4
            result = await server.train(job(groups))
            assert (result["status"], result["step"]) == ("trained", step + 1), result["reason"]
            assert result["metrics"]["sampling_logp_difference/max"] < 1e-4
            assert result["metrics"]["tokens/trained"] == count
        stats = server.runtime().base.engine.stats()
        assert stats.cached_prompt_tokens > 0.3 * stats.prompt_tokens, "later turns were meant to reuse their prefixes"
