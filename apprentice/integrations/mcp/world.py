"""What exists at a point of a task, and which values belong to which part of the scenarios."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from .references import Reference
from .sql_phrases import Rows
from .values import canonical

Side = Literal["train", "test"]


class Sides:
    """Which part a value belongs to: the same one wherever it occurs. About `share` of all values are for the test part."""

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share
        self._fixed: dict[str, Side] = {}

    def of(self, value: JsonValue) -> Side:
        key = canonical(value).lower()
        if key in self._fixed:
            return self._fixed[key]
        digest = int.from_bytes(hashlib.sha256(f"{self._seed} {key}".encode()).digest()[:4]) / 2**32
        return "test" if digest < self._share else "train"

    def deal(self, values: Sequence[JsonValue]) -> None:
        """See to it that both parts have some of a small set of values. Sets of at most three are not dealt."""
        if len(values) <= 3:
            return
        order = sorted(values, key=lambda value: hashlib.sha256(f"{self._seed} {canonical(value)}".encode()).digest())
        wanted = max(1, round(len(order) * self._share))
        for index, value in enumerate(order):
            self._fixed.setdefault(canonical(value).lower(), "test" if index < wanted else "train")

    def deal_groups(self, groups: Sequence[Sequence[JsonValue]]) -> None:
        """See to it that both parts have some of the groups; the values of a group stay together."""
        order = sorted(groups, key=lambda group: hashlib.sha256(f"{self._seed} {canonical([*group])}".encode()).digest())
        wanted = max(1, round(len(order) * self._share))
        for index, group in enumerate(order):
            for value in group:
                self._fixed.setdefault(canonical(value).lower(), "test" if index < wanted else "train")

    def admits(self, value: JsonValue, side: Side, pool: Sequence[JsonValue] = ()) -> bool:
        return 0 < len(pool) <= 3 or self.of(value) == side


@dataclass(slots=True)
class World:
    """Things by kind. `made` holds those that earlier calls of this task have made or found."""

    known: dict[str, list[JsonValue]] = field(default_factory=dict[str, list[JsonValue]])
    made: dict[str, list[JsonValue]] = field(default_factory=dict[str, list[JsonValue]])
    tables: list[Rows] = field(default_factory=list[Rows])
    new_tables: list[Rows] = field(default_factory=list[Rows])
    triples: list[tuple[JsonValue, JsonValue, JsonValue]] = field(default_factory=list[tuple[JsonValue, JsonValue, JsonValue]])
    """(source, relation, target), as recorded."""
    said: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """What was noted about a thing."""
    things: set[str] = field(default_factory=set[str])
    """Names that are no person's."""
    results: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Calls of the task that made something, whose result may tell its id: (number of the call, noun)."""
    step: int = 0
    """The number of the call being made."""
    awaited: Reference | None = None
    """The value of the call being made that only an earlier result will tell."""
    linked: bool = False
    """Whether the call being made uses something that was made."""

    def make(self, kind: str, value: JsonValue) -> None:
        self.made.setdefault(kind, []).append(value)

    def forget(self, thing: JsonValue) -> None:
        """It was deleted, and what was said about it is gone with it."""
        said = self.said.pop(str(thing), [])
        for things in (*self.made.values(), *self.known.values()):
            things[:] = [value for value in things if value != thing and value not in said]

    def take(self, kind: str, chance: random.Random) -> JsonValue:
        """A thing that exists; rather one that was made. None if there is none."""
        made, known = self.made.get(kind, []), self.known.get(kind, [])
        if made:
            self.linked = True
            return chance.choice(made)
        return chance.choice(known) if known else None
