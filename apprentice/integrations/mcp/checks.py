"""Rewards without labels: what a rollout did is compared with what the reference calls did, by executing it.

Judged is the effect, not the text: the state that is left, the results that were got, the facts that the answer tells. A
*success* got the right results and left the right state, by the reference calls or another way, and tells the facts if there
are any. The reward adds shaped credit for the steps on the way, so that a tiny model gets a signal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field, FiniteFloat

from ...core.records import JsonObject, Record, Scenario
from ...core.wire import Demonstration
from .effect import has_effect, name_of, share_of, source_of
from .facts import live_text, told
from .reply import ToolReply
from .scenarios import ReferenceCall, ScenarioNotes, notes_of
from .tools import ToolSet

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

    @property
    def toolset(self) -> ToolSet: ...

    async def state(self) -> JsonObject: ...


async def grade(scenario: Scenario, env: HasState, events: Sequence[ToolReply], answer: str, weights: CheckWeights | None = None) -> Grade:
    """Judge a rollout while its environment still lives. ConfigError if the scenario's metadata are no reference."""
    weights = weights or CheckWeights()
    notes = notes_of(scenario)
    state = await env.state() if notes.state is not None else None
    reached = has_effect(notes, events, state, env.toolset)
    told_share = _told(notes, events, answer, env.toolset) if reached else 0.0
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


def _matches(calls: Sequence[ReferenceCall], events: Sequence[ToolReply]) -> list[tuple[ToolReply | None, float]]:
    """For each reference call the event of the same tool that comes closest, and the share of its arguments; no event twice."""
    free = [event for event in events if isinstance(event.arguments, dict)]
    found: list[tuple[ToolReply | None, float]] = []
    for call in calls:
        scored = [
            (share_of(call.arguments, event.arguments), event.ok, -index, event)
            for index, event in enumerate(free)
            if name_of(event) == call.tool
        ]
        if not scored:
            found.append((None, 0.0))
            continue
        share, _, _, best = max(scored, key=lambda item: item[:3])
        free.remove(best)
        found.append((best, share))
    return found


def _told(notes: ScenarioNotes, events: Sequence[ToolReply], answer: str, tools: ToolSet) -> float:
    """The share of facts in the answer; those that move are read from the rollout's own result."""
    facts = [*notes.facts]
    for fact in notes.live_facts:
        index = int(str(fact.get("call", 0)))
        source = source_of(notes, index, events, tools) if 0 <= index < len(notes.calls) else None
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
