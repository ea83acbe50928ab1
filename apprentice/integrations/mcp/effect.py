"""The effect of a rollout beside that of the reference calls: the state that is left, the changes made, the results got."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from ...core.records import JsonObject
from .execute import digest_of_rest
from .facts import told
from .kinds import shape_of
from .masks import entries_of
from .questions import answered
from .reply import ToolReply
from .scenarios import ReferenceCall, ScenarioNotes
from .spec import WORKDIR
from .tools import ToolSet
from .values import canonical, leaves_of, plain

EVERYTHING = ("", ".", "/", "*")
"""Arguments that name no single thing."""


def has_effect(notes: ScenarioNotes, events: Sequence[ToolReply], state: JsonObject | None, tools: ToolSet) -> bool:
    """The right state and the right results. Where the state shows nothing of the changes, they must be those of the reference."""
    if notes.state is not None and (state is None or not same_state(notes.state, state)):
        return False
    if not _shows_changes(notes) and not _same_changes(notes.calls, events, tools):
        return False
    return all(source_of(notes, index, events, tools) is not None for index in _goals(notes))


def name_of(event: ToolReply) -> str:
    return event.function or event.tool


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


# ---- the state and the changes ------------------------------------------------------------------------------------------------


def same_state(reference: JsonObject, state: JsonObject) -> bool:
    """Whether a state has the reference's changes and nothing else, apart from what moves by itself."""
    wanted, ignored = _changed(reference), reference.get("ignored")
    moving = [str(key) for key in ignored] if isinstance(ignored, list) else []
    found = entries_of(state)
    if any(canonical(found.get(key)) != canonical(value) for key, value in wanted.items()):
        return False
    return reference.get("rest") in (None, digest_of_rest(state, [*wanted, *moving]))


def _changed(reference: JsonObject) -> JsonObject:
    changed = reference.get("changed")
    return changed if isinstance(changed, dict) else {}


def _shows_changes(notes: ScenarioNotes) -> bool:
    """Whether the state tells that the task was done. What was made and deleted again leaves nothing, or an empty file that any
    call leaves; an empty thing that a call names is something."""
    given = {str(leaf).removeprefix(f"{WORKDIR}/") for call in notes.calls for _, leaf in leaves_of(plain(call.arguments))}
    for key, content in _changed(notes.state or {}).items():
        empty = content is not None and all(leaf in ("", None, [], {}) for _, leaf in leaves_of(content))
        if not empty or any(value and f"/{value}/" in f"{key}/" for value in given):
            return True
    return False


def _same_changes(calls: Sequence[ReferenceCall], events: Sequence[ToolReply], tools: ToolSet) -> bool:
    """Whether the calls that change something are the reference's: each as often as there, with equal arguments, and no others."""
    wanted = [call for call in calls if call.changes]
    names = {call.tool for call in wanted}
    made = [event for event in events if event.ok and (name_of(event) in names or changes(event, tools))]
    if len(made) != len(wanted):
        return False
    for call in wanted:
        found = next((e for e in made if name_of(e) == call.tool and share_of(call.arguments, e.arguments) == 1.0), None)
        if found is None:
            return False
        made.remove(found)
    return True


def changes(event: ToolReply, tools: ToolSet) -> bool:
    """Whether a call may have changed something, as far as its tool tells."""
    tool = tools.resolve(name_of(event))
    return tool is not None and not shape_of(name_of(event), tool).reads


# ---- the results --------------------------------------------------------------------------------------------------------------


def _goals(notes: ScenarioNotes) -> set[int]:
    """Calls whose results were asked for: those with facts, and the last one if it reads."""
    goals = {int(str(fact["call"])) for fact in notes.live_facts if str(fact.get("call")).isdigit()}
    goals = {index for index in goals if index < len(notes.calls)}
    last = len(notes.calls) - 1
    return goals | ({last} if notes.calls and not notes.calls[last].changes else set())


def source_of(notes: ScenarioNotes, index: int, events: Sequence[ToolReply], tools: ToolSet) -> ToolReply | None:
    """The last call that got what a reference call gets: the same result for the same question, or, by another tool that only
    reads, a result with all the facts. None if there is none."""
    call = notes.calls[index]
    for event in reversed(events):
        if event.ok and (answered(call, name_of(event), event.arguments, event.text) or _tells(notes, call, event, tools)):
            return event
    return None


def _tells(notes: ScenarioNotes, call: ReferenceCall, event: ToolReply, tools: ToolSet) -> bool:
    """Whether another tool that reads was asked about nothing else, and says all the facts and what they are about."""
    if not notes.facts or name_of(event) == call.tool or changes(event, tools):
        return False
    about, given = _values(call.arguments), _values(event.arguments)
    return given.keys() <= about.keys() and all(
        told(text, event.text) for text in (*notes.facts, *(text for key, text in about.items() if key not in given))
    )


def _values(arguments: JsonValue) -> dict[str, str]:
    """The values of arguments by their one spelling, but for yes, no, and what means everything."""
    leaves = (leaf for _, leaf in leaves_of(plain(arguments)) if not isinstance(leaf, bool) and leaf not in (None, *EVERYTHING))
    return {canonical(leaf): str(leaf) for leaf in leaves}
