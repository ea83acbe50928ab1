"""Whether two calls ask the same: an equal result of another question is equal by chance (a count, two tables with equal columns)."""

from __future__ import annotations

import re

from pydantic import JsonValue

from .scenarios import ReferenceCall
from .values import canonical, leaves_of, plain, tables_of

LONG_ENOUGH = 12
"""Characters; an equal result of at least so many is not equal by chance."""


def same_question(call: ReferenceCall, name: str, arguments: JsonValue) -> bool:
    """Whether a call that got an equal result asked the reference's question."""
    if not isinstance(arguments, dict):
        return False
    wanted, given = dict(leaves_of(plain(call.arguments))), dict(leaves_of(plain(arguments)))
    if name == call.tool:
        return wanted.keys() == given.keys() and all(means_the_same(value, given[path]) for path, value in wanted.items())
    if not wanted:
        return len(call.result) >= LONG_ENOUGH
    return {canonical(value) for value in wanted.values()} <= {canonical(value) for value in given.values()}


def means_the_same(one: JsonValue, two: JsonValue) -> bool:
    """Equal; or expressions of the same parts in another order; or queries of the same tables."""
    if canonical(one) == canonical(two):
        return True
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    tables = tables_of(one)
    return (bool(tables) and tables == tables_of(two)) or sorted(re.findall(r"\w+", one)) == sorted(re.findall(r"\w+", two)) != []
