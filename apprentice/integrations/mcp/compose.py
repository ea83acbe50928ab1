"""Candidates: calls with arguments that make sense together, and a request that says all of them. Nothing is executed here.

A `World` is what exists at a point of a task: what exploring found, and what the task's earlier calls have made. A call that
needs a thing takes one from the world; a call that makes one puts it there. That gives create → read, list → get and
write → change → read-back without knowing any server.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TypeVar

from pydantic import JsonValue

from ...core.records import JsonObject
from .explore import INVENTED, Exploration, secret_or_slow
from .kinds import Leaf, Shape, words_of
from .listings import fields_of, listings_of, uses_of
from .phrases import GENERAL, JOINS, Wording, fill, join, names_tool, slot_of, wordings
from .references import OPEN, Reference, value_in
from .spec import WORKDIR
from .sql_phrases import Row, Rows, Statement, creation, insertion, new_row, question, update
from .stock import MAKERS, SMALL_STOCKS, TABLE_FAMILIES, TABLES, Table, city_of, company, fact, named, number, person, thing_fact, words
from .values import at, canonical, leaves_of, put
from .world import Side, Sides, World

T = TypeVar("T")
TRIES = 40
LONGEST_REQUEST = 400
HERE = "the current folder"
"""How people say where they are."""
_NOT_FOR_TASKS = re.compile(r"\bdeprecated\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    shape: Shape
    arguments: JsonObject = field(hash=False)
    given: tuple[tuple[Leaf, JsonValue], ...] = field(hash=False, default=())
    statement: Statement | None = None
    reference: Reference | None = None
    """Where the one argument that is still open will come from."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`form`: `explicit` if every value stands in the request as it is, `inferred` if one must be known (the zone of a city), `looked up`
    if one is in an earlier result."""

    text: str
    calls: tuple[PlannedCall, ...]
    kind: str
    frame: str
    wording: int
    form: str = "explicit"
    asked: str = ""
    """The name of the value that the request asks for, if it names one."""

    @property
    def reads(self) -> bool:
        return all(call.shape.reads for call in self.calls)

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(call.shape.function for call in self.calls)

    @property
    def key(self) -> str:
        """Equal for candidates that make the same calls."""
        return "\n".join(f"{call.shape.function} {canonical(call.arguments)}" for call in self.calls)


class Composer:
    """Makes candidates for one exploration. `inferred`: share of time-zone requests that name the city only."""

    def __init__(self, exploration: Exploration, *, seed: int, share: float, inferred: float) -> None:
        self._found, self._inferred = exploration, inferred
        self._chance = random.Random(seed)
        self.sides = Sides(seed, share)
        for kind in ("table", "path", "folder", "name", "id", "key"):
            self.sides.deal([value for value in exploration.values.get(kind, []) if value not in (".", WORKDIR)])
        self.sides.deal_groups(TABLE_FAMILIES)
        for stock in SMALL_STOCKS:
            self.sides.deal([*stock])
        for shape in exploration.shapes:
            for leaf in shape.leaves:
                self.sides.deal(leaf.options)
        usable = [
            s
            for s in exploration.shapes
            if not _NOT_FOR_TASKS.search(s.tool.description) and not secret_or_slow(s.tool) and not _MEDIA & set(s.object.split())
        ]
        self._fields = {shape.function: fields_of(exploration, shape) for shape in exploration.shapes}
        self._listings = listings_of(exploration)
        self.readers = [shape for shape in usable if shape.reads]
        self.changers = [shape for shape in usable if shape.function in exploration.changing]
        self._uses = uses_of([*self.readers, *self.changers], self.changers)
        makers = [shape for shape in self.changers if shape.verb in ("create", "write")]
        self._created = {leaf.kind for shape in makers for leaf in shape.required if not leaf.role}
        """Kinds of things that a tool is there for to make; where there is none, tools that add make them."""

    def candidate(self, side: Side, length: int, uses: Counter[tuple[str, ...]], admits: Callable[[Candidate], bool]) -> Candidate | None:
        """A task of so many calls for a part; sequences of tools that were used least come first. None if none comes to mind."""
        made: list[Candidate] = []
        for _ in range(TRIES):
            found = self._attempt(side, length)
            if found is not None and self._dealt(found, side) and admits(found):
                made.append(found)
            if len(made) == 6:
                break
        return min(made, key=lambda c: (uses[c.functions], self._chance.random()), default=None)

    def _dealt(self, candidate: Candidate, side: Side) -> bool:
        """Whether the part is right for calls that have no value of their own: those belong to one part as values do."""
        valued = any(leaf not in (".", WORKDIR) for call in candidate.calls for _, leaf in leaves_of(call.arguments))
        return valued or self.sides.of(candidate.key) == side

    def _attempt(self, side: Side, length: int) -> Candidate | None:
        if length == 2 and self._listings and self._chance.random() < 0.3:
            return self._looked_up(side)
        if length == 3 and self._uses and self._chance.random() < 0.6:
            return next(filter(None, (self._listed(side) for _ in range(6))), None)
        world = self._world(side)
        calls: list[PlannedCall] = []
        for index in range(length):
            pool = self._pool(index, length)
            if not pool:
                return None
            world.linked, world.step = False, index
            call = self._call(self._chance.choice(pool), world, side)
            if call is None or (index and not world.linked):
                return None
            if calls and (call.shape.function == calls[-1].shape.function or (calls[-1].shape.verb == "delete" and not call.shape.reads)):
                return None
            calls.append(call)
        return self._phrased(calls, side)

    def _pool(self, index: int, length: int) -> list[Shape]:
        if length == 1:
            return [*self.readers, *self.changers]
        if index < length - 1:
            return self.changers
        return self.readers if self._chance.random() < 0.7 and self.readers else self.changers

    def _world(self, side: Side) -> World:
        found = self._found
        known: dict[str, list[JsonValue]] = {}
        for kind, values in found.values.items():
            known[kind] = [value for value in values if value in (".", WORKDIR) or self.sides.admits(value, side, values)]
        tables: list[Rows] = []
        for name, content in found.tables.items():
            if self.sides.admits(name, side, sorted(found.tables)):
                rows = _known_rows(name, content)
                if rows is not None:
                    tables.append(rows)
        return World(known=known, tables=tables)

    # ---- one call ---------------------------------------------------------------------------------------------------------

    def _call(self, shape: Shape, world: World, side: Side) -> PlannedCall | None:
        arguments: JsonObject = {}
        given: list[tuple[Leaf, JsonValue]] = []
        statement: Statement | None = None
        after: list[Callable[[], None]] = []
        triple = _triple(shape, world, self._chance)
        world.awaited = None
        for leaf in (*sorted(shape.required, key=_order), *self._optional(shape)):
            if leaf.kind.startswith("sql"):
                statement = self._statement(leaf.kind, world, side, after)
                value: JsonValue = statement.sql if statement else None
            elif triple is not None and _part(leaf):
                value = triple.get(_part(leaf))
            elif _MANY & set(shape.object.split()) and leaf.many:
                value = self._several(leaf, world)
            else:
                value = self._value(shape, leaf, given, world, side, after)
            if value is None:
                return None
            given.append((leaf, value))
        ordered = [pair for leaf in shape.leaves for pair in given if pair[0] is leaf]
        for leaf, value in ordered:
            if isinstance(value, list):
                put(arguments, leaf.path[:-1], value)
            else:
                put(arguments, leaf.path, value)
        _remember_deeds(shape, ordered, world, after)
        if not shape.required and shape.reads and (world.made or world.new_tables):
            world.linked = True  # an overview shows what was made; that it does is checked when it has run
        for remember in after:
            remember()
        if not shape.reads and shape.verb in ("create", "write", "add"):
            world.results.append((world.step, shape.thing))
        return PlannedCall(shape, arguments, tuple(ordered), statement, world.awaited)

    def _several(self, leaf: Leaf, world: World) -> JsonValue:
        """Two things that exist, for tools made for many at once."""
        made, known = world.made.get(leaf.kind, []), world.known.get(leaf.kind, [])
        every = [*dict.fromkeys(str(value) for value in (*made, *known))]
        world.linked = world.linked or bool(made)
        return [*self._chance.sample(every, 2)] if len(every) > 1 else None

    def _optional(self, shape: Shape) -> list[Leaf]:
        """Optional leaves are mostly left out."""
        if shape.required or self._chance.random() < 0.4:
            return []
        fitting = [leaf for leaf in shape.leaves if leaf.kind in ("enum", "integer", "number") and len(leaf.path) == 1]
        return [self._chance.choice(fitting)] if fitting else []

    def _value(
        self, shape: Shape, leaf: Leaf, given: Sequence[tuple[Leaf, JsonValue]], world: World, side: Side, after: list[Callable[[], None]]
    ) -> JsonValue:
        taken = [value for _, value in given]
        chance = self._chance
        kind = leaf.kind
        if leaf.options:
            options = [value for value in leaf.options if value is not None and self.sides.admits(value, side, leaf.options)]
            return chance.choice(options) if options else None
        if kind == "boolean":
            return chance.random() < 0.5
        if leaf.identifies or kind == "key":
            return self._identity(shape, leaf, world, side, taken, after)
        if kind in ("integer", "number"):
            return self._number(leaf, side)
        if kind in INVENTED and not (world.known.get(kind)):
            return self._new(MAKERS[kind], side, taken)
        if kind in ("path", "folder"):
            return self._path(shape, leaf, world, side, taken, after)
        if kind == "glob":
            path = world.take("path", chance)
            return None if path is None else f"*{PurePosixPath(str(path)).stem[:12]}*"
        if kind == "name":
            return self._name(shape, leaf, given, world, side, after)
        if kind == "sentence":
            return self._sentence(shape, leaf, given, world, side, after)
        if kind == "search":
            return self._searched(shape, world, chance)
        if kind in ("table", "uri"):
            if kind == "table" and world.new_tables:
                world.linked = True
                return chance.choice(world.new_tables).table.name
            return self._seen(shape, leaf, world, side)
        if kind == "category":
            return (
                self._new(MAKERS[kind], side, taken) if not self._seen(shape, leaf, world, side) else self._seen(shape, leaf, world, side)
            )
        seen = self._seen(shape, leaf, world, side)
        if seen is not None or kind not in MAKERS:
            return seen
        return self._new(MAKERS[kind], side, taken)

    def _identity(
        self, shape: Shape, leaf: Leaf, world: World, side: Side, taken: Sequence[JsonValue], after: list[Callable[[], None]]
    ) -> JsonValue:
        """Made by this task, told by one of its calls, thought up (a key, or the id that a new thing is given), or seen."""
        made = world.made.get(leaf.label, [])
        makes = not shape.reads and shape.verb in ("create", "write", "add", "other") and words_of(leaf.name)[:-1] in ([], [shape.thing])
        if made and not (makes and self._chance.random() < 0.7):
            world.linked = True
            return self._chance.choice(made)
        told = [step for step, thing in world.results if thing == shape.thing or thing in words_of(leaf.name)]
        if told and not leaf.many and leaf.kind != "key" and not made:
            world.linked, world.awaited = True, Reference(told[-1], leaf, "new")
            return OPEN
        if makes:
            value = self._number(leaf, side) if leaf.kind == "integer" else self._new(MAKERS["key"], side, taken)
            after.append(lambda: world.make(leaf.label, value))
            return value
        seen = self._seen(shape, leaf, world, side)
        return self._number(leaf, side) if seen is None and leaf.kind == "integer" and shape.reads else seen

    def _seen(self, shape: Shape, leaf: Leaf, world: World, side: Side) -> JsonValue:
        known = self._found.known(shape, leaf)
        fitting = [value for value in known if self.sides.admits(value, side, known)]
        return self._chance.choice(fitting) if fitting else None

    def _new(self, maker: Callable[[random.Random], T], side: Side, taken: Sequence[JsonValue] = ()) -> T | None:
        for _ in range(200):
            value = maker(self._chance)
            if isinstance(value, str | int) and self.sides.of(value) == side and value not in taken:
                return value
        return None

    def _number(self, leaf: Leaf, side: Side) -> JsonValue:
        low, high = leaf.schema.get("minimum"), leaf.schema.get("maximum")
        if isinstance(low, int | float) or isinstance(high, int | float):
            first = int(low) if isinstance(low, int | float) else 0
            last = int(high) if isinstance(high, int | float) else first + 100
            options: list[JsonValue] = [*range(first, min(last, first + 200) + 1)]
            self.sides.deal(options)
            fitting = [value for value in options if self.sides.admits(value, side, options)]
            return self._chance.choice(fitting) if fitting else None
        return self._new(number, side)

    def _path(
        self, shape: Shape, leaf: Leaf, world: World, side: Side, taken: Sequence[JsonValue], after: list[Callable[[], None]]
    ) -> JsonValue:
        chance, prefix = self._chance, self._found.prefix
        exists = shape.reads or shape.verb in ("update", "delete") or (shape.verb == "move" and leaf.role != "target")
        if leaf.kind == "folder" and exists:
            folders = world.made.get("folder", [])
            world.linked = world.linked or bool(folders)
            return chance.choice(folders) if folders else world.take("folder", chance)
        if exists:
            return world.take("path", chance)
        if leaf.kind == "folder":
            value = self._new(MAKERS["folder"], side, taken)
            after.append(lambda: world.make("folder", f"{prefix}{value}"))
            return None if value is None else f"{prefix}{value}"
        name = self._new(MAKERS["new path"], side, taken)
        if name is None:
            return None
        made = [str(folder) for folder in world.made.get("folder", []) if folder not in (".", WORKDIR)]
        inside = chance.choice(made) if made else ""
        world.linked = world.linked or bool(inside)
        path = f"{inside}/{name}" if inside else f"{prefix}{name}"
        if self.sides.of(path) != side:
            return None
        root = WORKDIR if prefix else "."

        def remember() -> None:
            if shape.verb == "move":
                world.made["path"] = []
            world.make("path", path)
            world.make("folder", inside or root)

        after.append(remember)
        return path

    def _name(
        self, shape: Shape, leaf: Leaf, given: Sequence[tuple[Leaf, JsonValue]], world: World, side: Side, after: list[Callable[[], None]]
    ) -> JsonValue:
        taken = [value for _, value in given]
        made = [value for value in world.made.get("name", []) if value not in taken]
        adds = shape.verb == "update" or bool(leaf.role) or (shape.verb == "add" and "name" in self._created)
        if made and (shape.reads or shape.verb == "delete" or adds):
            world.linked = True
            return self._chance.choice(made)
        if shape.reads or shape.verb in ("delete", "update") or (shape.verb == "add" and not leaf.role and "name" in self._created):
            return self._seen(shape, leaf, world, side)
        if leaf.label in ("title", "subject"):
            maker = MAKERS["errand" if shape.thing in ERRANDS else "title"]
            value = self._new(maker, side, taken)
            after.append(lambda: world.make("name", value))
            return value
        category = next((str(value) for other, value in given if other.kind == "category"), "")
        maker = {"person": person, "company": company}.get(
            category, named if not category and not leaf.role else _titled if category else person
        )
        value = self._new(maker, side, taken)
        after.append(lambda: world.make("name", value))
        return value

    def _sentence(
        self, shape: Shape, leaf: Leaf, given: Sequence[tuple[Leaf, JsonValue]], world: World, side: Side, after: list[Callable[[], None]]
    ) -> JsonValue:
        thing = next((str(value) for other, value in given if other.kind in ("name", "path")), "")
        said = world.said.get(thing, [])
        if shape.verb == "delete" or (shape.verb == "update" and leaf.role == "source"):
            if not said:
                return None
            world.linked = True
            return self._chance.choice(said)
        about_thing = any(other.kind == "name" and other.label not in ("title", "subject") for other in shape.leaves)
        category = next((str(value) for other, value in given if other.kind == "category"), "person")
        if category != "person":
            world.things.add(thing)
        elif thing in world.things:
            category = "thing"
        value = self._new((fact if category == "person" else thing_fact) if about_thing else MAKERS["sentence"], side)
        if value is not None and not shape.reads:
            after.append(lambda: world.said.setdefault(thing, []).append(str(value)))
            after.append(lambda: world.make("sentence", value))
        return value

    def _searched(self, shape: Shape, world: World, chance: random.Random) -> JsonValue:
        """A word that something there has."""
        texts = [*map(str, world.made.get("sentence", [])), *map(str, world.made.get("name", []))]
        if texts:
            world.linked = True
        else:
            texts = [str(value) for value in world.known.get("name", [])]
        found = [word for text in texts for word in re.findall(r"[A-Za-z]{4,}", text)]
        return max(chance.sample(found, min(3, len(found))), key=len) if found else None

    def _statement(self, kind: str, world: World, side: Side, after: list[Callable[[], None]]) -> Statement | None:
        chance = self._chance
        if kind == "sql_create":
            names = {rows.table.name for rows in (*world.tables, *world.new_tables)}
            fitting = [t for t in TABLES if all(self.sides.of(name) == side for name in (t.name, t.text, t.number))]
            tables = [table for table in fitting if table.name not in names]
            if not tables:
                return None
            table = chance.choice(tables)
            after.append(lambda: world.new_tables.append(Rows(table)))
            return creation(table)
        rows = chance.choice(world.new_tables) if world.new_tables else chance.choice(world.tables) if world.tables else None
        if rows is None:
            return None
        world.linked = world.linked or bool(world.new_tables)
        if kind == "sql_read":
            return question(rows, chance)
        if rows.rows and chance.random() < 0.3:
            value = self._new(number, side)
            return update(rows, value, chance) if value is not None else None
        row: Row | None = next(
            (row for row in (new_row(chance) for _ in range(100)) if all(self.sides.of(part) == side for part in row)), None
        )
        if row is None:
            return None
        after.append(lambda: rows.rows.append(row))
        return insertion(rows, *row)

    # ---- the request ------------------------------------------------------------------------------------------------------

    def _phrased(self, calls: Sequence[PlannedCall], side: Side) -> Candidate | None:
        shown: dict[str, str] = {}
        if len(calls) == 1 and self._chance.random() < self._inferred:
            shown = _cities(calls[0])
        if len(calls) == 1:
            wording = self._wording(calls[0], shown, side, joined=False)
            return wording and _candidate(wording.text, calls, wording, "inferred" if shown else "explicit")
        form = "looked up" if any(call.reference for call in calls) else "explicit"
        return self._joined(calls, side, [_pointed(call) for call in calls], form)

    def _joined(self, calls: Sequence[PlannedCall], side: Side, shown: Sequence[dict[str, str]], form: str) -> Candidate | None:
        chosen: list[Wording] = []
        for call, said in zip(calls, shown, strict=True):
            wording = self._wording(call, said, side, joined=True)
            if wording is None:
                return None
            chosen.append(wording)
        number = self._chance.choice([n for n in range(len(JOINS[len(calls) - 2])) if side_of_wording(n) == side])
        frame = " + ".join(f"{wording.frame} {wording.number}" for wording in chosen)
        text = join([wording.text for wording in chosen], number)
        if _NESTED.search(text):
            return None
        return _candidate(text, calls, Wording(frame, number, text, chosen[-1].asks_for), form)

    def _wording(self, call: PlannedCall, shown: dict[str, str], side: Side, *, joined: bool) -> Wording | None:
        options = _of_side(_wordings(call, shown, joined=joined), side)
        fields = self._fields[call.shape.function]
        if options and fields and options[0].frame.endswith(GENERAL):
            asked = self._chance.choice(fields)
            options = _of_side(wordings(call.shape, call.given, shown, joined=joined, asked=asked), side) or options
        return self._chance.choice(options) if options else None

    def _looked_up(self, side: Side) -> Candidate | None:
        """List things, then look up the first or the last of them: its name stands in no request, only in the list."""
        listing = self._chance.choice(self._listings)
        usable = listing.lister in self.readers and listing.reader in self.readers and not _MANY & set(listing.reader.object.split())
        if not usable or not self.sides.admits(listing.item, side):
            return None
        arguments: JsonObject = {}
        put(arguments, listing.leaf.path, listing.item)
        listed = tuple(
            (leaf, at(listing.arguments, leaf.path)) for leaf in listing.lister.leaves if at(listing.arguments, leaf.path) is not None
        )
        calls = (
            PlannedCall(listing.lister, listing.arguments, listed),
            PlannedCall(listing.reader, arguments, ((listing.leaf, listing.item),)),
        )
        slot = slot_of(listing.leaf, [listing.leaf])
        return self._joined(calls, side, [{}, {slot: f"the {listing.at} one"}], "looked up")

    def _listed(self, side: Side) -> Candidate | None:
        """Make a thing, list what there is, and use what stands first or last in the list."""
        lister, user, leaf = self._chance.choice(self._uses)
        if _MANY & set(user.object.split()) or not self.changers:
            return None
        world = self._world(side)
        made = self._call(self._chance.choice(self.changers), world, side)
        world.step, world.linked = 1, False
        listed = self._call(lister, world, side) if made is not None else None
        if made is None or listed is None or not world.linked:
            return None
        arguments: JsonObject = {}
        put(arguments, leaf.path, OPEN)
        reference = Reference(1, leaf, self._chance.choice(("first", "last")))
        return self._phrased([made, listed, PlannedCall(user, arguments, ((leaf, OPEN),), reference=reference)], side)

    def told(self, candidate: Candidate, index: int, results: Sequence[str]) -> Candidate | None:
        """The candidate with the open argument of a call filled in from the results so far; None if they do not tell it."""
        call = candidate.calls[index]
        if call.reference is None:
            return candidate
        source, path = call.reference.call, call.reference.leaf.path
        value = value_in(call.reference, candidate.calls[source].arguments, results[source], self._found.prefix)
        if value is None:
            return None
        arguments = {**call.arguments}
        put(arguments, path, value)
        given = tuple((leaf, value if leaf.path == path else known) for leaf, known in call.given)
        calls = [*candidate.calls]
        calls[index] = replace(call, arguments=arguments, given=given, reference=None)
        return replace(candidate, calls=tuple(calls))


_NESTED = re.compile(r"\b(?:files?|tables?|folders?|key|the|an?) the (?:first|last|new) one")
ERRANDS = frozenset(words("task todo reminder errand chore issue ticket"))


def _pointed(call: PlannedCall) -> dict[str, str]:
    """What is said instead of a value that is still open."""
    reference = call.reference
    return {} if reference is None else {slot_of(reference.leaf, [leaf for leaf, _ in call.given]): reference.said}


def _candidate(text: str, calls: Sequence[PlannedCall], wording: Wording, form: str) -> Candidate | None:
    kind = "single" if len(calls) == 1 else f"chain{len(calls)}"
    if len(text) > LONGEST_REQUEST or any(names_tool(text, call.shape) for call in calls):
        return None
    return Candidate(text, tuple(calls), kind, wording.frame, wording.number, form, wording.asks_for)


def side_of_wording(number: int) -> Side:
    """Every third wording is for the test part."""
    return "test" if number % 3 == 2 else "train"


def _of_side(options: Sequence[Wording], side: Side) -> list[Wording]:
    return [wording for wording in options if side_of_wording(wording.number) == side]


def _wordings(call: PlannedCall, shown: dict[str, str], *, joined: bool) -> list[Wording]:
    if call.statement is None:
        here = {"folder": HERE} if any(value in (".", WORKDIR) for _, value in call.given) else {}
        found = wordings(call.shape, call.given, {**shown, **here}, joined=joined)
        return [wording for wording in found if f"folder {HERE}" not in wording.text]
    frame = call.statement.frame
    templates = frame.does if joined else frame.asks
    found = [Wording(frame.name, number, fill(template, call.statement.slots)) for number, template in enumerate(templates)]
    return [wording for wording in found if not names_tool(wording.text, call.shape)]


def _cities(call: PlannedCall) -> dict[str, str]:
    """What is said instead of zones, if all of them are named after cities that everybody knows."""
    leaves = [leaf for leaf, _ in call.given]
    cities = {slot_of(leaf, leaves): city_of(str(value)) for leaf, value in call.given if leaf.kind == "timezone"}
    return {slot: city for slot, city in cities.items() if city} if all(cities.values()) else {}


_MEDIA = frozenset(words("media image audio video picture pdf binary"))
_MANY = frozenset(words("multiple many several batch bulk"))


def _part(leaf: Leaf) -> str:
    return leaf.kind if leaf.kind == "relation" else leaf.role if leaf.kind == "name" else ""


def _triple(shape: Shape, world: World, chance: random.Random) -> dict[str, JsonValue] | None:
    """What a call that takes a relation away needs: one that was recorded ({} if there is none)."""
    if shape.verb != "delete" or not any(leaf.kind == "relation" for leaf in shape.leaves):
        return None
    if not world.triples:
        return {}
    world.linked = True
    source, relation, target = chance.choice(world.triples)
    return {"source": source, "relation": relation, "target": target}


def _remember_deeds(shape: Shape, given: Sequence[tuple[Leaf, JsonValue]], world: World, after: list[Callable[[], None]]) -> None:
    parts = {_part(leaf): value for leaf, value in given if _part(leaf)}
    if shape.verb != "delete" and parts.keys() >= {"source", "relation", "target"}:
        after.append(lambda: world.triples.append((parts["source"], parts["relation"], parts["target"])))
    if shape.verb == "delete" and len(given) == 1:
        gone = given[0][1]
        after.append(lambda: world.forget(gone))


def _order(leaf: Leaf) -> int:
    """What other values depend on comes first."""
    return {"category": 0, "folder": 1, "path": 1, "name": 2}.get(leaf.kind, 3)


def _titled(chance: random.Random) -> str:
    return f"{MAKERS['text'](chance)} {MAKERS['city'](chance)}".title()


def _known_rows(name: str, content: JsonObject) -> Rows | None:
    """A table that was seen, if it has a text and a number column."""
    columns, rows = content.get("columns"), content.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or not rows:
        return None
    first = rows[0] if isinstance(rows[0], list) else []
    text = next((i for i, cell in enumerate(first) if isinstance(cell, str)), None)
    value = next((i for i, cell in enumerate(first) if isinstance(cell, int) and str(columns[i]).lower() not in ("id", "rowid")), None)
    if text is None or value is None:
        return None
    cells = [(str(row[text]), int(str(row[value]))) for row in rows if isinstance(row, list) and isinstance(row[value], int)]
    unique = [cell for cell in cells if sum(other[0] == cell[0] for other in cells) == 1]
    return Rows(Table(name, str(columns[text]), str(columns[value])), unique[:20])
