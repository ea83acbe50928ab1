"""How a person would ask for a call: sentences worked out from the verb, the object, and the kinds and names of what is given.

A frame is a list of wordings for a kind of call; `{slots}` are filled with the arguments' values, so that every value can be
read off the request. Each wording has a number; held-out scenarios use other numbers than training. The tool's name never
appears.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from .frames import FRAMES, Frame
from .kinds import Leaf, Shape, Verb, plural, singular, words_of

Slots = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Wording:
    frame: str
    number: int
    text: str
    asks_for: str = ""
    """The name of the value in the result that is asked for, if the text names one."""


GENERAL = ", in general"
"""Behind the name of a frame that was worked out from the names of parameters alone."""
_READ = (
    "What {is} the {object}{rest}?",
    "Show me the {object}{rest}.",
    "I need the {object}{rest}.",
    "Please look up the {object}{rest}.",
    "Could you tell me the {object}{rest}?",
    "Give me the {object}{rest}, please.",
)
_READ_DO = ("show me the {object}{rest}", "look up the {object}{rest}", "tell me the {object}{rest}")
_CHANGES: dict[Verb, tuple[str, str, str]] = {
    "create": ("make a new {one}{rest}", "set up a new {one}{rest}", "put together a new {one}{rest}"),
    "write": ("keep a {one}{rest}", "put down the {one}{rest}", "store a {one}{rest}"),
    "add": ("put in a new {one}{rest}", "take in one more {one}{rest}", "enter a new {one}{rest}"),
    "update": ("change the {one}{rest}", "make a change to the {one}{rest}", "alter the {one}{rest}"),
    "move": ("bring the {one} elsewhere{rest}", "put the {one} in another place{rest}", "take the {one} elsewhere{rest}"),
    "delete": ("get rid of the {one}{rest}", "take away the {one}{rest}", "throw out the {one}{rest}"),
    "send": ("start the {one}{rest}", "see to the {one}{rest}", "set off the {one}{rest}"),
}
"""Clauses for changes that no frame knows."""


_THING = re.compile(r"\b(?:the|an?(?: new)?|one more) \{(?:one|objects?)\}")
_QUOTED = re.compile(r'"(the (?:first|last|new) one)"')
_SWITCHED: dict[str, str] = {"enable": "on", "activate": "on", "disable": "off", "deactivate": "off", "toggle": "on or off"}
_SAID = frozenset({"complete", "finish", "close", "archive", "resolve", "approve", "reject", "reopen", "pause", "resume"})
"""Verbs that a person would use too, because no other says the same."""


def _own_clauses(shape: Shape) -> tuple[str, str, str] | None:
    """Clauses for changes whose meaning lies in the very verb of the tool."""
    words = words_of(shape.tool.name)
    verb = next((word for word in words if word in _SAID or word in _SWITCHED or word == "increment"), "")
    if verb in _SAID:
        return f"{verb} the {{one}}{{rest}}", f"go and {verb} the {{one}}{{rest}}", f"see to it that you {verb} the {{one}}{{rest}}"
    if verb in _SWITCHED:
        way = _SWITCHED[verb]
        return f"switch {way} the {{object}}{{rest}}", f"switch the {{object}} {way}{{rest}}", f"turn the {{object}} {way}{{rest}}"
    if verb:
        return "raise the {one} by one{rest}", "let the {one} go up by one{rest}", "make the {one} one higher{rest}"
    return None


def _asked(clauses: tuple[str, str, str]) -> tuple[str, ...]:
    first, second, third = clauses
    return (*(f"{_capital(text)}." for text in clauses), f"Please {first}.", f"Can you {second}?", f"I want you to {third}.")


_PLACED = {
    **dict.fromkeys(("timezone", "city", "country", "language", "path", "folder", "currency"), " in {v}"),
    **{"date": " on {v}", "time": " at {v}", "datetime": " at {v}", "email": " to {v}", "url": " from {v}"},
}
_BY_LABEL = (
    (r"\b(?:city|location|place|country|region|town|state)\b", " in {v}"),
    (r"\b(?:topic|subject|theme)\b", " about {v}"),
    (r"\b(?:user|owner|person|customer)\b", " for {v}"),
)
_SPANS = {"days", "hours", "minutes", "seconds", "weeks", "months", "years", "nights", "people", "persons"}
JOINS: tuple[tuple[str, ...], ...] = (
    (
        "{D1}, then {d2}.",
        "{D1}. After that, {d2}.",
        "First {d1}, and then {d2}.",
        "Please {d1} and {d2}.",
        "{D1}, and afterwards {d2}.",
        "I want you to {d1}. Then {d2}.",
    ),
    (
        "{D1}, {d2}, and then {d3}.",
        "{D1}. Then {d2}. After that, {d3}.",
        "First {d1}, then {d2}, and at last {d3}.",
        "Please {d1}, {d2} and {d3}.",
        "{D1}; next {d2}; finally {d3}.",
        "I want you to {d1}, then {d2}. Then {d3}.",
    ),
)


def slot_of(leaf: Leaf, leaves: Sequence[Leaf]) -> str:
    """The slot that a leaf fills: its role and kind, with its name where numbers need one."""
    kind = leaf.kind
    if kind in ("integer", "number"):
        words = words_of(leaf.name)
        if {"head", "first", "top", "limit"} & set(words):
            return "number head"
        if {"tail", "last"} & set(words):
            return "number tail"
        numbers = [other for other in leaves if other.kind in ("integer", "number") and other.required]
        return f"number {'ab'[numbers.index(leaf)]}" if len(numbers) == 2 and leaf in numbers else "number"
    role = leaf.role if any(other.kind == kind and other is not leaf and other.role for other in leaves) else ""
    if kind in ("currency", "enum", "text", "language") and leaf.role:
        return leaf.role
    if kind == "text" and not leaf.role:
        return "text"
    return f"{role} {kind}".strip()


def quoted(kind: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    plain_kinds = {
        "timezone",
        "time",
        "date",
        "datetime",
        "url",
        "email",
        "path",
        "folder",
        "integer",
        "number",
        "enum",
        "currency",
        "table",
        "id",
        "boolean",
    }
    return text if kind in plain_kinds else f'"{text}"'


def wordings(
    shape: Shape,
    given: Sequence[tuple[Leaf, object]],
    shown: Mapping[str, str] | None = None,
    *,
    joined: bool = False,
    asked: str = "",
) -> list[Wording]:
    """All wordings for a call with these arguments. `shown`: what is said instead of a value (a city for its zone).

    `joined`: clauses for `join`. `asked`: a field of the result to ask for, where no frame knows the call. Wordings that would
    name the tool are left out, but keep their numbers free.
    """
    leaves = [leaf for leaf, _ in given]
    slots = {slot_of(leaf, leaves): (leaf, value) for leaf, value in given}
    texts = {slot: (shown or {}).get(slot) or _said(value) for slot, (_, value) in slots.items()}
    noun = " ".join(words_of(asked)) or shape.object or "result"
    if names_tool(noun, shape):
        noun = "entry"  # the tool is called what it is about
    words = noun.split()
    one = " ".join([*words[:-1], singular(words[-1])])
    filled = {
        **texts,
        "object": noun,
        "one": one,
        "is": "are" if words and plural(words[-1]) == words[-1] else "is",
        "objects": " ".join([*words[:-1], plural(words[-1])]),
    }
    frame = _frame(shape, slots.keys()) if len(slots) == len(given) else None
    if frame is not None:
        templates, name, asked = (frame.does if joined else frame.asks), frame.name, frame.asks_for
    else:
        pointed = [slot for slot in slots if slot in (shown or {}) and slots[slot][0].kind != "timezone"]
        others = [(leaf, value) for leaf, value in given if slot_of(leaf, leaves) not in pointed]
        filled["rest"] = "".join(_clause(shape, leaf, value, index, len(others)) for index, (leaf, value) in enumerate(others))
        reading = shape.reads or shape.verb == "other"
        changes = _own_clauses(shape) or _CHANGES.get(shape.verb, _CHANGES["send"])
        asks = _READ if reading else _asked(changes)
        templates, name = (_READ_DO if reading else changes) if joined else asks, f"{shape.function}{GENERAL}"
        if pointed:  # "the first one" stands for the whole thing
            templates = tuple(_THING.sub(texts[pointed[0]], template) for template in templates)
    found = [Wording(name, number, _QUOTED.sub(r"\1", fill(template, filled)), asked) for number, template in enumerate(templates)]
    return [wording for wording in found if not names_tool(wording.text, shape)]


def _frame(shape: Shape, slots: object) -> Frame | None:
    wanted = set(slots)  # pyright: ignore[reportArgumentType,reportUnknownVariableType,reportUnknownArgumentType]
    for frame in FRAMES:
        if set(frame.slots) == wanted and (not frame.verbs or shape.verb in frame.verbs) and re.search(frame.about, shape.object):
            return frame
    return None


def _clause(shape: Shape, leaf: Leaf, value: object, index: int, count: int) -> str:
    """How one more value is put in: by a preposition where its kind or name has one, else by its name."""
    for pattern, place in _BY_LABEL:
        if re.search(pattern, leaf.label) and leaf.kind in ("enum", "text", "name", "city", "country"):
            return place.format(v=value)
    if leaf.kind in _PLACED and (count == 1 or leaf.kind not in ("path", "folder", "timezone")):
        return _PLACED[leaf.kind].format(v=value)
    if leaf.kind in ("integer", "number") and leaf.label in _SPANS:
        return f" for {value} {leaf.label}"
    label = leaf.label if leaf.label not in ("", shape.object) else leaf.kind
    owner = leaf.kind in ("text", "name") and leaf.label in _OWNERS
    if index == 0 and owner and (shape.reads or shape.verb == "other"):
        return f" of the {label} {quoted(leaf.kind, value)}"
    lead = " with" if index == 0 else " and" if index == count - 1 else ","
    return f"{lead} the {label} {quoted(leaf.kind, value)}"


_OWNERS = frozenset(
    [
        "account",
        "customer",
        "project",
        "order",
        "product",
        "company",
        "team",
        "employee",
        "device",
        "repository",
        "repo",
        "item",
        "user",
        "member",
        "person",
    ]
)
"""Things that have what is asked for."""


def _said(value: object) -> str:
    return " and ".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


def names_tool(text: str, shape: Shape) -> bool:
    """Whether a request tells the tool's name, as it is or as words."""
    words = words_of(shape.tool.name)
    spoken = " ".join(words_of(text)) if len(words) > 1 else " ".join(re.findall(r"[a-z]+", text.lower()))
    return shape.function.lower() in text.lower().split() or f" {' '.join(words)} " in f" {spoken} "


def join(clauses: Sequence[str], number: int) -> str:
    """Two or three clauses as one request."""
    if len(clauses) == 1:
        return f"{_capital(clauses[0])}."
    template = JOINS[len(clauses) - 2][number]
    parts = {f"d{index}": clause for index, clause in enumerate(clauses, 1)} | {
        f"D{index}": _capital(clause) for index, clause in enumerate(clauses, 1)
    }
    return fill(template, parts)


def fill(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda match: values.get(match[1], match[0]), template)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
