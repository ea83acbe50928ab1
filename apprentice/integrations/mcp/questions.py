"""Whether two calls ask the same: an equal result of another question is equal by chance (a count, two tables with equal columns).

Queries ask the same if they have the same conditions on the same tables and select the same, or more, by whatever names; then
their rows are compared by values.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from pydantic import JsonValue

from .masks import masked
from .scenarios import ReferenceCall
from .values import canonical, leaves_of, plain, plain_sql

LONG_ENOUGH = 12
"""Characters; an equal result of at least so many is not equal by chance."""


def answered(call: ReferenceCall, name: str, arguments: JsonValue, result: str) -> bool:
    """Whether a call of the tool `name` asked the reference's question and got its result."""
    if not isinstance(arguments, dict):
        return False
    got, wanted = masked(result, call.volatile), masked(call.result, call.volatile)
    if canonical(got) == canonical(wanted):
        return _same_question(call, name, arguments)
    return name == call.tool and _by_query(call.arguments, arguments) and _has_rows(_rows(wanted), _rows(got))


def _same_question(call: ReferenceCall, name: str, arguments: JsonValue) -> bool:
    """Of the same tool: the reference's arguments, and others that changed nothing. Of another one: its values."""
    wanted, given = dict(leaves_of(plain(call.arguments))), dict(leaves_of(plain(arguments)))
    if name == call.tool:
        return _covers(wanted, given) and all(means_the_same(value, given[path]) for path, value in wanted.items())
    if not wanted:
        return len(call.result) >= LONG_ENOUGH
    return {canonical(value) for value in wanted.values()} <= {canonical(value) for value in given.values()}


def _covers(wanted: dict[tuple[str, ...], JsonValue], given: dict[tuple[str, ...], JsonValue]) -> bool:
    """Whether all that was asked is asked, and nothing more within the same argument."""
    names = {path[0] for path in wanted}
    return wanted.keys() == {path for path in given if path[0] in names}


def means_the_same(one: JsonValue, two: JsonValue) -> bool:
    """Equal; or expressions of the same parts in another order; or queries that ask the same."""
    if canonical(one) == canonical(two):
        return True
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    query = query_of(one)
    if query is not None:
        other = query_of(two)
        return other is not None and query.asks_as(other)
    return sorted(re.findall(r"\w+", one)) == sorted(re.findall(r"\w+", two)) != []


def _by_query(wanted: JsonValue, given: JsonValue) -> bool:
    """Whether the question is a query, and asked in these or other words."""
    one, two = dict(leaves_of(plain(wanted))), dict(leaves_of(plain(given)))
    same = _covers(one, two) and all(means_the_same(value, two[path]) for path, value in one.items())
    return same and any(isinstance(value, str) and query_of(value) is not None for value in one.values())


# ---- queries ------------------------------------------------------------------------------------------------------------------

_PART = re.compile(r"'(?:[^']|'')*'|\d+(?:\.\d+)?|\w+|<=|>=|!=|<>|==|\S")
_SPELLED = {"<>": "!=", "==": "=", "like": "=", "is": "="}
_NOISE = frozenset(("as", "(", ")", ",", ";", ".", "asc", "inner", "lower", "upper", "trim"))
_CLAUSES = frozenset(("where", "group", "order", "having", "limit", "join", "left", "right", "inner", "cross", "on", "union", "natural"))


@dataclass(frozen=True, slots=True)
class Query:
    """A SELECT in parts. `rest`: the words, signs and values from FROM on, in any order."""

    columns: frozenset[str]
    functions: tuple[str, ...]
    """And the values that are selected as they are."""
    rest: tuple[str, ...]

    def asks_as(self, other: Query) -> bool:
        """Whether `other` has the same conditions and selects at least the same."""
        enough = self.columns <= other.columns or "*" in other.columns
        return enough and self.functions == other.functions and self.rest == other.rest


def query_of(text: str) -> Query | None:
    """None if it is no simple SELECT."""
    parts: list[str] = _PART.findall(plain_sql(text).lower())
    if not parts or parts[0] != "select" or parts.count("from") != 1 or parts.count("select") != 1:
        return None
    start = parts.index("from")
    selected, rest = _without_aliases(parts[1:start]), parts[start + 1 :]
    aliases = _table_aliases(rest)
    functions = [part for part, after in zip(selected, [*selected[1:], ""], strict=True) if after == "(" or part[0] in "'-0123456789"]
    if "distinct" in selected[1:]:
        functions.append("distinct")
    starred = [
        part for before, part in zip(["", *selected], selected, strict=False) if part == "*" and before in ("", ",", ".", "distinct")
    ]
    words = [part for part in selected if re.match(r"[^\W\d]", part) and part not in (*functions, "distinct", *aliases)]
    return Query(frozenset((*starred, *words)), tuple(sorted(functions)), _conditions(rest, aliases))


def _without_aliases(parts: list[str]) -> list[str]:
    return [part for before, part in zip(["", *parts], parts, strict=False) if part != "as" and before != "as"]


def _table_aliases(rest: list[str]) -> frozenset[str]:
    """What may stand before a column: the table itself, or the name that it is given here."""
    tables = [index for index, before in enumerate(["from", *rest[:-1]]) if before in ("from", "join")] if rest else []
    found = {rest[index] for index in tables}
    for index in tables:
        after = [part for part in rest[index + 1 : index + 3] if part != "as"][:1]
        found |= {part for part in after if re.match(r"[^\W\d]", part) and part not in _CLAUSES}
    return frozenset(found)


def _conditions(rest: list[str], aliases: frozenset[str]) -> tuple[str, ...]:
    """Without what only bounds the number of rows, without aliases and what stands before a dot."""
    if len(rest) > 2 and rest[-2] == "limit":
        rest = rest[:-2]
    tables = {rest[index] for index, before in enumerate(["from", *rest[:-1]]) if before in ("from", "join")} if rest else set[str]()
    names = [part for part, after in zip(rest, [*rest[1:], ""], strict=True) if after != "." and part not in aliases - tables]
    spelled = (_SPELLED.get(part, part).strip("'") for part in names if part not in _NOISE)
    return tuple(sorted(word for part in spelled for word in part.split()))


# ---- rows ---------------------------------------------------------------------------------------------------------------------


def _rows(result: JsonValue) -> list[Counter[str]] | None:
    """The values of each row, whatever its keys; None if the result is no list."""
    if not isinstance(result, list):
        return None
    return [Counter(canonical(value) for _, value in leaves_of(row)) for row in result]


def _has_rows(wanted: list[Counter[str]] | None, got: list[Counter[str]] | None) -> bool:
    """Whether each row that is wanted is among what was got, and no row more."""
    if wanted is None or got is None or len(wanted) != len(got):
        return False
    left = [*got]
    for row in wanted:
        found = next((other for other in left if row <= other), None)
        if found is None:
            return False
        left.remove(found)
    return True
