"""Rewards without labels: what a rollout did is compared with what the reference calls did, by executing it.

Judged is the effect, not the text: the state that is left, the results that were got, the facts that the answer tells. A
*success* got the right results and left the right state, by the reference calls or another way, and tells the facts if there
are any. The reward adds shaped credit for the steps on the way, so that a tiny model gets a signal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field, FiniteFloat, JsonValue

from ...core.records import JsonObject, Record, Scenario
from ...core.wire import Demonstration
from .execute import digest_of_rest
from .facts import live_text, told
from .masks import entries_of, masked
from .reply import ToolReply
from .scenarios import ReferenceCall, ScenarioNotes, notes_of
from .values import canonical, leaves_of, plain, tables_of

LONG_ENOUGH = 12
"""Characters; an equal result of at least so many is not equal by chance."""
Weight = Annotated[FiniteFloat, Field(ge=0)]


class CheckWeights(Record):
    """What each part of a rollout is worth. The first six add up to 1 by default, which is the reward of a success."""

    format: Weight = 0.05
    """A tool was called whose name exists, with arguments that are a JSON object."""
    tool: Weight = 0.1
    """The share of the reference's tools that were called."""
    arguments: Weight = 0.15
    """The share of the reference's argument values that were given, in the same places, after normalisation."""
    executed: Weight = 0.05
    """The share of the reference's tools that were called and worked."""
    result: Weight = 0.4
    """The right results were got and the right state was left: all or nothing."""
    facts: Weight = 0.25
    """The share of the facts that the answer tells; nothing unless `result`. All of it where there are no facts."""
    superfluous: Weight = 0.02
    """Taken off for each call beyond the reference's number, at most five times."""


@dataclass(frozen=True, slots=True)
class Grade:
    """`reward` is at least 0. `parts`: each weight's share, 0 to 1, and the number of superfluous calls."""

    reward: float
    success: bool
    parts: dict[str, float] = field(default_factory=dict[str, float])


class HasState(Protocol):
    """What grading needs of an environment."""

    async def state(self) -> JsonObject: ...


async def grade(scenario: Scenario, env: HasState, events: Sequence[ToolReply], answer: str, weights: CheckWeights | None = None) -> Grade:
    """Judge a rollout while its environment still lives. ConfigError if the scenario's metadata are no reference."""
    weights = weights or CheckWeights()
    notes = notes_of(scenario)
    state = await env.state() if notes.state is not None else None
    reached = _reached(notes, events, state)
    told_share = _told(notes, events, answer) if reached else 0.0
    count = max(len(notes.calls), 1)
    matches = _matches(notes.calls, events)
    parts = {
        "format": float(any(isinstance(event.arguments, dict) and _known(event) for event in events)),
        "tool": sum(best is not None for best, _ in matches) / count,
        "arguments": sum(share for _, share in matches) / count,
        "executed": sum(best is not None and best.ok for best, _ in matches) / count,
        "result": float(reached),
        "facts": told_share,
    }
    extra = max(len(events) - count, 0)
    reward = sum(getattr(weights, name) * share for name, share in parts.items()) - weights.superfluous * min(extra, 5)
    return Grade(max(reward, 0.0), reached and told_share == 1.0, {**parts, "superfluous": float(extra)})


def _known(event: ToolReply) -> bool:
    return not (event.outcome == "tool_error" and event.text.startswith("There is no tool"))


def _name(event: ToolReply) -> str:
    return event.function or event.tool


def _matches(calls: Sequence[ReferenceCall], events: Sequence[ToolReply]) -> list[tuple[ToolReply | None, float]]:
    """For each reference call the event of the same tool that comes closest, and the share of its arguments; no event twice."""
    free = [event for event in events if isinstance(event.arguments, dict)]
    found: list[tuple[ToolReply | None, float]] = []
    for call in calls:
        scored = [
            (share_of(call.arguments, event.arguments), event.ok, -index, event)
            for index, event in enumerate(free)
            if _name(event) == call.tool
        ]
        if not scored:
            found.append((None, 0.0))
            continue
        share, _, _, best = max(scored, key=lambda item: item[:3])
        free.remove(best)
        found.append((best, share))
    return found


def share_of(wanted: JsonObject, given: JsonValue) -> float:
    """The share of leaves that two arguments have in common, in one spelling; 1 only if they are equal."""
    one = {(path, canonical(value)) for path, value in leaves_of(plain(wanted))}
    two = (
        {(path, canonical(value)) for path, value in leaves_of(plain(given))}
        if isinstance(given, dict)
        else set[tuple[tuple[str, ...], str]]()
    )
    if not one:
        return 1.0 if isinstance(given, dict) else 0.0
    return len(one & two) / len(one | two)


# ---- the effect ---------------------------------------------------------------------------------------------------------------


def _reached(notes: ScenarioNotes, events: Sequence[ToolReply], state: JsonObject | None) -> bool:
    """The right state and the right results. Where nothing of the state can be seen, every change must have been made as asked."""
    if notes.state is not None:
        if state is None or not same_state(notes.state, state):
            return False
    elif not all(_made(call, events) for call in notes.calls if call.changes):
        return False
    return all(_got(notes, index, events) for index in _goals(notes))


def _goals(notes: ScenarioNotes) -> set[int]:
    """Calls whose results were asked for: those with facts, and the last one if it reads."""
    goals = {int(str(fact["call"])) for fact in notes.live_facts if str(fact.get("call")).isdigit()}
    goals = {index for index in goals if index < len(notes.calls)}
    last = len(notes.calls) - 1
    return goals | ({last} if notes.calls and not notes.calls[last].changes else set())


def same_state(reference: JsonObject, state: JsonObject) -> bool:
    """Whether a state has the reference's changes and nothing else, apart from what moves by itself."""
    changed, ignored = reference.get("changed"), reference.get("ignored")
    wanted = changed if isinstance(changed, dict) else {}
    moving = [str(key) for key in ignored] if isinstance(ignored, list) else []
    found = entries_of(state)
    if any(canonical(found.get(key)) != canonical(value) for key, value in wanted.items()):
        return False
    return reference.get("rest") in (None, digest_of_rest(state, [*wanted, *moving]))


def _made(call: ReferenceCall, events: Sequence[ToolReply]) -> bool:
    return any(event.ok and _name(event) == call.tool and share_of(call.arguments, event.arguments) == 1.0 for event in events)


def _got(notes: ScenarioNotes, index: int, events: Sequence[ToolReply]) -> bool:
    """Whether some call got the result of a reference call: the same result, or all its facts by the same values of another tool."""
    return _source(notes, index, events) is not None


def _source(notes: ScenarioNotes, index: int, events: Sequence[ToolReply]) -> ToolReply | None:
    """The last call that got what a reference call gets: the same result for the same question, or, by another tool that was
    given the same values, a result with all the facts."""
    call = notes.calls[index]
    wanted = canonical(masked(call.result, call.volatile))
    for event in reversed(events):
        if not event.ok:
            continue
        same = canonical(masked(event.text, call.volatile)) == wanted
        if same and _same_question(call, event):
            return event
        other_way = _name(event) != call.tool and _values(event.arguments) == _values(call.arguments)
        if other_way and notes.facts and all(told(fact, event.text) for fact in notes.facts):
            return event
    return None


def _values(arguments: JsonValue) -> list[str]:
    return sorted(canonical(value) for _, value in leaves_of(plain(arguments)))


def _same_question(call: ReferenceCall, event: ToolReply) -> bool:
    """Whether an equal result answers the same question, and is not equal by chance (a count, two tables with equal columns)."""
    if not isinstance(event.arguments, dict):
        return False
    if _name(event) == call.tool:
        wanted, given = dict(leaves_of(plain(call.arguments))), dict(leaves_of(plain(event.arguments)))
        return wanted.keys() == given.keys() and all(_means_the_same(value, given[path]) for path, value in wanted.items())
    if not call.arguments:
        return len(call.result) >= LONG_ENOUGH
    return set(_values(call.arguments)) <= set(_values(event.arguments))


def _means_the_same(one: JsonValue, two: JsonValue) -> bool:
    """Equal; or expressions of the same parts in another order; or queries of the same tables."""
    if canonical(one) == canonical(two):
        return True
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    tables = tables_of(one)
    return (bool(tables) and tables == tables_of(two)) or sorted(re.findall(r"\w+", one)) == sorted(re.findall(r"\w+", two)) != []


def _told(notes: ScenarioNotes, events: Sequence[ToolReply], answer: str) -> float:
    """The share of facts in the answer; those that move are read from the rollout's own result."""
    facts = [*notes.facts]
    for fact in notes.live_facts:
        index = int(str(fact.get("call", 0)))
        source = _source(notes, index, events) if 0 <= index < len(notes.calls) else None
        text = live_text(fact, source.text) if source else None
        facts.append(text or "\0")
    return sum(told(fact, answer) for fact in facts) / len(facts) if facts else 1.0


# ---- the reference as a demonstration -----------------------------------------------------------------------------------------


def demonstration(scenario: Scenario, system: str, tools: Sequence[JsonObject]) -> Demonstration:
    """The reference run as a conversation: its calls, their results as the model sees them, and a short answer with the facts."""
    notes = notes_of(scenario)
    messages: list[JsonObject] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": scenario.input})
    for number, call in enumerate(notes.calls, 1):
        call_id = f"call_{number}"
        function: JsonObject = {"name": call.tool, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        messages.append({"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": call.result})
    messages.append({"role": "assistant", "content": final_answer(notes)})
    return Demonstration(messages=tuple(messages), tools=tuple(tools))


def final_answer(notes: ScenarioNotes) -> str:
    """What a good answer says, in a few words."""
    facts = list(notes.facts)
    for fact in notes.live_facts:
        index = int(str(fact.get("call", 0)))
        text = live_text(fact, notes.calls[index].result) if 0 <= index < len(notes.calls) else None
        facts += [text] if text else []
    if facts:
        listed = facts[0] if len(facts) == 1 else f"{', '.join(facts[:-1])} and {facts[-1]}"
        return f"The answer is {listed}."
    if notes.calls and not notes.calls[-1].changes:
        return notes.calls[-1].result if len(notes.calls[-1].result) <= 300 else "Here it is."
    return "Done."
