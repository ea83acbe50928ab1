"""What calls made while exploring showed: fields that can be asked for by name, and lists whose items can be looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from ...core.records import JsonObject
from .explore import Exploration
from .facts import DULL
from .kinds import Leaf, Shape, words_of
from .values import leaves_of, parsed

_MARKED = re.compile(r"^\[FILE\] (.+?)(?:\s{2,}.*)?$")
_NUMBERED = re.compile(r"^\W*(?:id\W*)?(\d{1,9})\b", re.IGNORECASE)
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
        if (
            not reply.ok
            or lister is None
            or not lister.thing
            or lister.verb not in ("list", "search")
            or not isinstance(reply.arguments, dict)
        ):
            continue
        items = list(dict.fromkeys(items_of(reply.full_text or reply.text, reply.arguments, found.prefix)))
        if len(items) < 2:
            continue
        for reader in found.shapes:
            leaf = reader.required[0] if len(reader.required) == 1 else None
            if leaf is not None and reader.reads and reader is not lister and _fits(leaf, reader, lister):
                made += [
                    Listing(lister, reply.arguments, reader, leaf, items[0], "first"),
                    Listing(lister, reply.arguments, reader, leaf, items[-1], "last"),
                ]
    return made


def uses_of(shapes: Sequence[Shape], changers: Sequence[Shape]) -> list[tuple[Shape, Shape, Leaf]]:
    """(what lists, what takes one of the listed things, where): for tasks that use what their own list shows."""
    found: list[tuple[Shape, Shape, Leaf]] = []
    for lister in shapes:
        if lister.reads and lister.thing and lister.verb in ("list", "search"):
            for user in shapes:
                leaf = user.required[0] if len(user.required) == 1 else None
                usable = user.reads or (user in changers and user.verb in ("update", "delete"))
                if leaf is not None and usable and user is not lister and _fits(leaf, user, lister):
                    found.append((lister, user, leaf))
    return found


def items_of(text: str, arguments: JsonObject, prefix: str = "", leaf: Leaf | None = None) -> Iterator[str]:
    """The things in a list, as the tools that take them want them: names, titles and whole paths; ids for a leaf that takes ids."""
    value: JsonValue = parsed(text)
    ids = leaf is not None and leaf.identifies
    if isinstance(value, str):
        base = next((str(given) for _, given in leaves_of(arguments)), ".")
        for line in value.splitlines():
            if ids:
                if match := _NUMBERED.match(line):
                    yield match[1]
            elif match := _MARKED.match(line.strip()):
                yield prefix + match[1] if base.strip("./") in ("", "{workdir}") else f"{base}/{match[1]}"
        return
    container = None
    for path, item in leaves_of(value):
        names = [part for part in path if not part.startswith("[")]
        if len(names) > 2 or isinstance(item, bool) or not isinstance(item, str | int if ids else str) or not 0 < len(str(item)) <= 80:
            continue
        place = names[0] if len(names) == 2 else ""
        if (names[-1:] and words_of(names[-1])[-1:] == ["id"]) if ids else (not names or names[-1].lower() in _NAMES):
            container = place if container is None else container
            if place == container:
                yield str(item)


def _fits(leaf: Leaf, user: Shape, lister: Shape) -> bool:
    """Whether a parameter takes such things: files for paths, tables for table names, a thing's name or id."""
    thing = lister.thing
    if leaf.kind == "path":
        return thing in ("file", "directory", "folder", "path")
    return thing in words_of(leaf.name) or leaf.kind == thing or ((leaf.identifies or leaf.kind == "name") and thing == user.thing)
