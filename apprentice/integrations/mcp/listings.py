"""What calls made while exploring showed: fields that can be asked for by name, and lists whose items can be looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import JsonValue

from ...core.records import JsonObject
from .explore import Exploration
from .facts import DULL
from .kinds import Leaf, Shape, singular, words_of
from .values import leaves_of, parsed

_MARKED = re.compile(r"^\[FILE\] (.+?)(?:\s{2,}.*)?$")
_NAMES = ("name", "title", "path", "id")


@dataclass(frozen=True, slots=True)
class Listing:
    """A call that listed things, and how another tool looks one of them up. `at`: `first` or `last`."""

    lister: Shape
    arguments: JsonObject = field(hash=False)
    reader: Shape
    leaf: Leaf
    item: str
    at: str


def fields_of(found: Exploration, shape: Shape) -> list[str]:
    """Names of short values in the results of a tool that a person would ask for; [] if its results are lists or texts."""
    names: list[str] = []
    for reply in found.calls:
        value = parsed(reply.full_text or reply.text) if reply.ok and reply.function == shape.function else None
        if not isinstance(value, dict):
            continue
        given = {str(leaf) for _, leaf in leaves_of(reply.arguments)}
        for name, leaf in value.items():
            spoken = words_of(name)
            telling = isinstance(leaf, str | int | float) and not isinstance(leaf, bool) and len(str(leaf)) <= 60
            if telling and spoken and len(spoken) <= 3 and name.lower() not in DULL and str(leaf) not in given and name not in names:
                names.append(name)
    return names


def listings_of(found: Exploration) -> list[Listing]:
    """Every way to look up the first or last of things that some call has listed."""
    made: list[Listing] = []
    for reply in found.calls:
        lister = found.shape(reply.function)
        if not reply.ok or lister is None or lister.verb not in ("list", "search") or not isinstance(reply.arguments, dict):
            continue
        items = list(dict.fromkeys(_items(found, reply.full_text or reply.text, reply.arguments)))
        if len(items) < 2:
            continue
        thing = singular((lister.object.split() or [""])[-1])
        for reader in found.shapes:
            leaf = reader.required[0] if len(reader.required) == 1 else None
            if leaf is not None and reader.reads and reader is not lister and _fits(leaf, thing):
                made += [
                    Listing(lister, reply.arguments, reader, leaf, items[0], "first"),
                    Listing(lister, reply.arguments, reader, leaf, items[-1], "last"),
                ]
    return made


def _items(found: Exploration, text: str, arguments: JsonObject) -> Iterator[str]:
    value: JsonValue = parsed(text)
    if isinstance(value, str):
        base = next((str(leaf) for _, leaf in leaves_of(arguments)), ".")
        for line in value.splitlines():
            if match := _MARKED.match(line.strip()):
                yield found.prefix + match[1] if base.strip("./") in ("", "{workdir}") else f"{base}/{match[1]}"
        return
    for path, leaf in leaves_of(value):
        names = [part for part in path if not part.startswith("[")]
        if isinstance(leaf, str) and len(leaf) <= 80 and len(names) <= 1 and (not names or names[0].lower() in _NAMES):
            yield leaf


def _fits(leaf: Leaf, thing: str) -> bool:
    """Whether a parameter takes such things: files for paths, tables for table names, a thing's name or id."""
    if leaf.kind == "path":
        return thing in ("file", "directory", "folder", "path")
    return thing in words_of(leaf.name) or leaf.kind == thing
