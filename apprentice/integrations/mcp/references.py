"""Arguments that only the result of an earlier call tells: the id of what was made, the first of what was listed.

A candidate is made before anything has run. Such an argument is left open, and filled in once its earlier calls have been tried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from ...core.records import JsonObject
from .kinds import Leaf, words_of
from .listings import items_of
from .values import leaves_of, parsed

OPEN = "{an earlier result}"
"""Stands in the arguments until the value is known."""
_NUMBER = re.compile(r"(?<![\w.-])\d+(?![\w-]|\.\d)")
_CODE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|\bid\b\W{1,3}([\w-]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reference:
    """`call`: the number of the call whose result tells the value."""

    call: int
    leaf: Leaf
    which: Literal["new", "first", "last"]

    @property
    def said(self) -> str:
        return f"the {self.which} one"


def value_in(reference: Reference, arguments: JsonObject, text: str, prefix: str = "") -> JsonValue:
    """The value in the result of the call with these arguments; None if it is not there."""
    leaf = reference.leaf
    if reference.which == "new":
        found = _identity(leaf, arguments, parsed(text))
    else:
        items = list(items_of(text, arguments, prefix, leaf))
        found = items[0 if reference.which == "first" else -1] if items else None
    if leaf.schema.get("type") in ("integer", "number"):
        return int(str(found)) if re.fullmatch(r"\d{1,15}", str(found)) else None
    return None if found is None else str(found)


def _identity(leaf: Leaf, arguments: JsonObject, result: JsonValue) -> JsonValue:
    """The id that a result tells: under its name, or as the only number or code in a sentence."""
    if isinstance(result, str):
        given = {number for _, value in leaves_of(arguments) for number in _NUMBER.findall(str(value))}
        codes = [match[1] or match[0] for match in _CODE.finditer(result)]
        numbers = [number for number in _NUMBER.findall(result) if number not in given]
        found = codes or numbers
        return found[0] if len(set(found)) == 1 else None
    if isinstance(result, int | float):
        return result
    ids = [(words_of(path[-1]), value) for path, value in leaves_of(result) if path and isinstance(value, str | int)]
    wanted = [value for words, value in ids if words == words_of(leaf.name)] or [value for words, value in ids if words[-1:] == ["id"]]
    return wanted[0] if wanted else None
