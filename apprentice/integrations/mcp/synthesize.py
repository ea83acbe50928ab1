"""Scenarios: candidates that were composed (or invented by a language model), executed twice, and found worth keeping."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from ...core.client.progress import Progress, progress_of
from ...core.errors import InfrastructureError
from ...core.records import JsonObject, Scenario
from .compose import Candidate, Composer, PlannedCall
from .environment import SessionPool, processors
from .execute import CALL_SECONDS, Executed, execute
from .explore import Exploration
from .facts import facts_of
from .generator import Generator
from .phrases import names_tool
from .scenarios import scenario_id
from .world import Side

ROUNDS = 12
GIVE_UP = 3
"""A sequence of tools that failed so often and never worked is not tried again."""
MOST_WORDINGS = 2
"""Scenarios with the same calls, in other wordings, where there is little else to ask."""
ALIKE = 0.6
"""Jaccard similarity of word pairs from which two requests for the same calls are the same request."""
LENGTHS: tuple[tuple[int, float], ...] = ((1, 0.5), (2, 0.35), (3, 0.15))
GENERATED_SHARE = 0.5
"""Of the scenarios, where a language model invents some."""


async def synthesize(
    pool: SessionPool,
    exploration: Exploration,
    *,
    count: int,
    seed: int = 0,
    generator: Generator | None = None,
    held_out: int | None = None,
    inferred: float = 0.0,
    progress: bool | Progress = False,
    concurrency: int | None = None,
) -> list[Scenario]:
    """At most `count` scenarios, each of which ran twice with the same result; fewer if no more can be found.

    `held_out`: how many of them a later `split` will want (default: a third); so many have values and wordings of their own.
    `inferred`: share of time-zone requests that name a city, not its zone (`metadata.form` is then `inferred`).
    `generator`: a language model that invents half of them.
    """
    display = progress_of(progress)
    wanted = count // 3 if held_out is None else min(held_out, count)
    maker = _Maker(pool, exploration, count, wanted, seed, inferred, concurrency, display)
    display.begin("Making scenarios", count)
    try:
        if generator is not None:
            await maker.invent(generator, int(count * GENERATED_SHARE))
        await maker.compose()
    finally:
        display.end()
    return maker.scenarios()


class _Maker:
    def __init__(
        self,
        pool: SessionPool,
        exploration: Exploration,
        count: int,
        held_out: int,
        seed: int,
        inferred: float,
        concurrency: int | None,
        display: Progress,
    ) -> None:
        self._pool, self._found, self._count = pool, exploration, count
        self._concurrency, self._display = concurrency, display
        self._chance = random.Random(seed)
        self._composer = Composer(exploration, seed=seed, share=max(held_out / max(count, 1), 0.05), inferred=inferred)
        self._wanted: dict[Side, int] = {"test": held_out, "train": count - held_out}
        self._kept: dict[Side, list[tuple[Candidate, Scenario]]] = {"test": [], "train": []}
        self._uses: Counter[tuple[str, ...]] = Counter()
        self._failures: Counter[tuple[str, ...]] = Counter()
        self._calls: dict[str, list[str]] = defaultdict(list)
        """Requests by the calls they make."""
        self._texts: set[str] = set()

    # ---- without a language model -------------------------------------------------------------------------------------

    async def compose(self) -> None:
        barren = 0
        for number in range(ROUNDS):
            batch = self._batch()
            if not batch:
                return
            before = sum(map(len, self._kept.values()))
            batch = await self._told(batch)
            results = await self._execute([candidate for _, candidate in batch])
            for (side, _), executed in zip(batch, results, strict=True):
                self._judge(side, executed)
            barren = barren + 1 if sum(map(len, self._kept.values())) == before else 0
            if barren == 2 and number > 2:
                return

    def _batch(self) -> list[tuple[Side, Candidate]]:
        batch: list[tuple[Side, Candidate]] = []
        sides: tuple[Side, Side] = ("test", "train")
        for side in sides:
            missing = self._wanted[side] - len(self._kept[side])
            tries = 0
            made = 0
            while made < missing and tries < 3 * missing + 20:
                tries += 1
                lengths = [length for length, _ in LENGTHS]
                length = self._chance.choices(lengths, [weight for _, weight in LENGTHS])[0]
                candidate = self._composer.candidate(side, length, self._uses, self._admits)
                if candidate is not None:
                    self._remember(candidate)
                    batch.append((side, candidate))
                    made += 1
        return batch

    def _admits(self, candidate: Candidate) -> bool:
        return self._failures[candidate.functions] < GIVE_UP and self._new(candidate)

    def _new(self, candidate: Candidate) -> bool:
        """Neither a duplicate nor nearly one."""
        if normalised(candidate.text) in self._texts:
            return False
        same = self._calls[candidate.key]
        return len(same) < MOST_WORDINGS and all(alike(candidate.text, text) < ALIKE for text in same)

    def _remember(self, candidate: Candidate) -> None:
        self._texts.add(normalised(candidate.text))
        self._calls[candidate.key].append(candidate.text)
        self._uses[candidate.functions] += 1

    async def _execute(self, candidates: Sequence[Candidate]) -> list[Executed]:
        return await execute(self._pool, candidates, self._found.state, concurrency=self._concurrency)

    async def _told(self, batch: Sequence[tuple[Side, Candidate]]) -> list[tuple[Side, Candidate]]:
        """The candidates with what their earlier calls tell filled in; those whose calls do not tell it are left out."""
        gate = asyncio.Semaphore(self._concurrency or max(2, processors()))

        async def told(side: Side, candidate: Candidate) -> Candidate | None:
            if not any(call.reference for call in candidate.calls):
                return candidate
            async with gate:
                return await tried(self._pool, self._composer, candidate, side)

        known = await asyncio.gather(*(told(side, candidate) for side, candidate in batch))
        self._failures.update(candidate.functions for (_, candidate), found in zip(batch, known, strict=True) if found is None)
        return [(side, found) for (side, _), found in zip(batch, known, strict=True) if found is not None]

    def _judge(self, side: Side, executed: Executed) -> None:
        candidate = executed.candidate
        if executed.why:
            self._failures[candidate.functions] += 1
            self._display.note(f"{' → '.join(candidate.functions)}: {executed.why}"[:120])
            return
        self._failures[candidate.functions] = -1_000_000  # it works
        if candidate.kind == "free" and side == "test":
            candidate = executed.candidate = replace(candidate, wording=2)
        scenario = scenario_of(executed)
        if all(call.shape.reads for call in candidate.calls) and not scenario.metadata["facts"] and not scenario.metadata["live_facts"]:
            self._uses[candidate.functions] += 1
            if self._factless(side, candidate):
                return
        self._kept[side].append((candidate, scenario))
        self._display.advance()

    def _factless(self, side: Side, candidate: Candidate) -> bool:
        """Whether other tasks of these tools have facts to tell, so that one without is no good."""
        told = [s for c, s in self._kept[side] if c.functions == candidate.functions and (s.metadata["facts"] or s.metadata["live_facts"])]
        return bool(told)

    # ---- with one -----------------------------------------------------------------------------------------------------

    async def invent(self, generator: Generator, wanted: int) -> None:
        """Tasks from a language model. What it writes is only a proposal: each is checked and executed like any other."""
        before = sum(map(len, self._kept.values()))
        for _ in range(ROUNDS):
            made = sum(map(len, self._kept.values())) - before
            if made >= wanted:
                return
            try:
                reply = await generator(invention_prompt(self._found, min(8, wanted - made), self._chance))
            except InfrastructureError as error:
                if not made:
                    raise
                self._display.note(str(error)[:120])
                return
            candidates: list[Candidate] = []
            for candidate in proposals(reply, self._found):
                if self._new(candidate):
                    self._remember(candidate)
                    candidates.append(candidate)
            for executed in await self._execute(candidates):
                side: Side = (
                    "test" if len(self._kept["test"]) * self._wanted["train"] < len(self._kept["train"]) * self._wanted["test"] else "train"
                )
                self._judge(side, executed)

    def scenarios(self) -> list[Scenario]:
        """Mixed, those whose values all stand in the request first."""
        kept = [pair for pairs in self._kept.values() for pair in pairs][: self._count]
        self._chance.shuffle(kept)
        return [scenario for _, scenario in sorted(kept, key=lambda pair: pair[0].form != "explicit")]


async def tried(pool: SessionPool, composer: Composer, candidate: Candidate, side: Side) -> Candidate | None:
    """The candidate with its open arguments filled in from its own calls, made on a fresh session; None if they do not tell them."""
    results: list[str] = []
    async with pool.environment() as env:
        for index in range(len(candidate.calls)):
            found = composer.told(candidate, index, results)
            if found is None:
                return None
            candidate = found
            if not any(later.reference for later in candidate.calls[index + 1 :]):
                return candidate
            call = candidate.calls[index]
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    reply = await env.call(call.shape.function, call.arguments)
            except TimeoutError:
                return None
            if not reply.ok:
                return None
            results.append(reply.full_text or reply.text)
    return candidate


def scenario_of(executed: Executed) -> Scenario:
    candidate, run = executed.candidate, executed.run
    calls: list[JsonValue] = []
    for planned, reply, moves in zip(candidate.calls, run.replies, executed.volatile, strict=True):
        entry: JsonObject = {"tool": planned.shape.function, "arguments": planned.arguments, "result": reply.text}
        if not planned.shape.reads:
            entry["changes"] = True
        if moves:
            entry["volatile"] = [*moves]
        calls.append(entry)
    last = len(candidate.calls) - 1
    shape = candidate.calls[last].shape
    earlier = [call.arguments for call in candidate.calls[:last]]
    facts = (
        facts_of(shape, last, candidate.calls[last].arguments, run.replies[last].text, earlier, executed.volatile[last], candidate.asked)
        if shape.reads
        else []
    )
    metadata: JsonObject = {
        "server": {"name": shape.tool.server},
        "kind": candidate.kind,
        "tools": [*candidate.functions],
        "calls": calls,
        "facts": [fact.text for fact in facts if not fact.live],
        "live_facts": [fact.dump() for fact in facts if fact.live],
        "state": executed.state,
        "form": candidate.form,
        "frame": candidate.frame,
        "wording": candidate.wording,
    }
    plain_calls: JsonValue = [[call.shape.function, call.arguments] for call in candidate.calls]
    return Scenario(id=scenario_id(shape.tool.server, candidate.text, plain_calls), input=candidate.text, metadata=metadata)


def normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def alike(one: str, two: str) -> float:
    """Jaccard similarity of the pairs of words."""
    a, b = _pairs(one), _pairs(two)
    return len(a & b) / len(a | b) if a | b else 1.0


def _pairs(text: str) -> set[tuple[str, str]]:
    words = ["", *normalised(text).split(), ""]
    return set(itertools.pairwise(words))


# ---- a language model's proposals ---------------------------------------------------------------------------------------------

_ASK = """You invent tasks that a person would give to an assistant which has these tools:

{tools}

Values that exist:
{values}

Write {count} different tasks as a JSON list. Each is an object with "request" (one or two natural sentences, never a tool's \
name, with every value that the assistant needs) and "calls" (a list of objects with "tool" and "arguments": what the assistant \
should call, in order). Use one to three calls. Begin with {letter}. Answer with the JSON list only."""


def invention_prompt(found: Exploration, count: int, chance: random.Random) -> list[JsonObject]:
    shown = [
        {"name": shape.function, "description": shape.tool.description[:300], "parameters": shape.tool.input_schema}
        for shape in found.shapes
        if shape.reads or shape.function in found.changing
    ]
    values = {kind: chance.sample(known, min(8, len(known))) for kind, known in found.values.items() if known}
    text = _ASK.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in shown),
        values=json.dumps(values, ensure_ascii=False)[:2000] or "none known",
        count=count,
        letter=f"a task about {chance.choice(shown)['name']}" if shown else "any task",
    )
    return [{"role": "user", "content": text}]


def proposals(reply: str, found: Exploration) -> list[Candidate]:
    """The tasks in a model's answer that are well-formed, use tools that may be tried, and do not name them."""
    start, end = reply.find("["), reply.rfind("]")
    try:
        items: JsonValue = json.loads(reply[start : end + 1]) if 0 <= start < end else []
    except (ValueError, RecursionError):
        return []
    return [candidate for item in items if (candidate := _proposal(item, found)) is not None] if isinstance(items, list) else []


def _proposal(item: JsonValue, found: Exploration) -> Candidate | None:
    if not isinstance(item, dict):
        return None
    request, calls = item.get("request"), item.get("calls")
    if not isinstance(request, str) or not request.strip() or len(request) > 500 or not isinstance(calls, list) or not 1 <= len(calls) <= 3:
        return None
    planned: list[PlannedCall] = []
    for call in calls:
        shape = found.shape(str(call.get("tool"))) if isinstance(call, dict) else None
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if shape is None or not isinstance(arguments, dict) or not (shape.reads or shape.function in found.changing):
            return None
        if names_tool(request, shape):
            return None
        planned.append(PlannedCall(shape, arguments))
    return Candidate(request.strip(), tuple(planned), "free", "free", 0)
