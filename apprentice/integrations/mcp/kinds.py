"""What a tool does and what its parameters are: guessed from names, types, formats, enumerations, annotations and descriptions.

Nothing here knows a server. A tool becomes a verb, an object and leaves: the places in its arguments where a value goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, cast

from pydantic import JsonValue

from ...core.records import JsonObject
from .schemas import parameters_of
from .tools import McpTool

Verb = Literal["get", "list", "search", "convert", "compute", "create", "write", "add", "update", "move", "delete", "send", "other"]
Role = Literal["source", "target", ""]

_VERBS: dict[Verb, str] = {
    "list": "list ls enumerate browse all",
    "search": "search find lookup query grep match filter discover",
    "convert": "convert translate transform exchange format parse encode decode",
    "compute": "calculate compute evaluate solve eval math sum multiply divide subtract count average",
    "create": "create make new generate init initialize register open_account mkdir touch start",
    "write": "write save put store set upload overwrite assign",
    "add": "add append insert push log record attach remember note",
    "update": "update edit modify replace patch change increment toggle enable disable complete finish close archive resolve approve "
    "reject reopen pause resume activate deactivate",
    "move": "move rename copy mv cp transfer",
    "delete": "delete remove drop clear purge destroy erase forget reset truncate kill cancel unlink",
    "send": "send post notify publish submit trigger run execute invoke call email",
    "get": "get read show fetch view open retrieve describe inspect display load cat stat info current what explain echo ping check is has",
}
VERB_OF: dict[str, Verb] = {word: verb for verb, words in _VERBS.items() for word in words.split()}
READING: frozenset[Verb] = frozenset({"get", "list", "search", "convert", "compute"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words_of(name: str) -> list[str]:
    """`get_fileInfo` → get, file, info."""
    return [word.lower() for word in _WORD.findall(name)]


def singular(word: str) -> str:
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("sses", "shes", "ches", "xes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def plural(word: str) -> str:
    if singular(word) != word:
        return word
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "sh", "ch", "x")) else "s")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One place for a value: `path` leads to it in the arguments (`[]` is an item of a list)."""

    path: tuple[str, ...]
    kind: str
    schema: JsonObject = field(hash=False)
    required: bool
    role: Role = ""

    @property
    def name(self) -> str:
        return next((part for part in reversed(self.path) if part != "[]"), "")

    @property
    def label(self) -> str:
        """The name as words, without `source`/`target`."""
        return " ".join(words_of(self.name))

    @property
    def identifies(self) -> bool:
        """Whether it takes the id of a thing: such a value is told by the server, not thought up."""
        return self.kind == "id" or (self.kind == "integer" and words_of(self.name)[-1:] == ["id"])

    @property
    def many(self) -> bool:
        return self.path[-1:] == ("[]",)

    @property
    def options(self) -> list[JsonValue]:
        enum = self.schema.get("enum")
        return enum if isinstance(enum, list) else [self.schema["const"]] if "const" in self.schema else []


@dataclass(frozen=True, slots=True)
class Shape:
    """A tool as scenarios see it."""

    function: str
    tool: McpTool
    verb: Verb
    object: str
    """What it is about, as words: "current time", "text file"."""
    leaves: tuple[Leaf, ...]
    reads: bool
    """Whether it changes nothing, as far as hints and names tell."""

    @property
    def thing(self) -> str:
        """The noun for one of what it is about; "" if its name has none."""
        return singular((self.object.split() or [""])[-1])

    @property
    def required(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.required)


def shape_of(function: str, tool: McpTool) -> Shape:
    words = words_of(tool.name)
    verb, objects = _verb_and_object(words, tool.description)
    schema = parameters_of(cast("JsonValue", tool.input_schema))
    leaves = tuple(_leaves(schema, (), True, tool, objects))
    return Shape(function, tool, verb, " ".join(objects), leaves, reads=_reads(tool, words, verb, leaves))


def _verb_and_object(words: list[str], description: str) -> tuple[Verb, list[str]]:
    for index, word in enumerate(words):
        if word in VERB_OF and (index == 0 or len(words) > 1):
            rest = words[:index] + words[index + 1 :]
            return VERB_OF[word], rest
    first = words_of(description)[:1]
    spoken = VERB_OF.get(first[0]) or VERB_OF.get(singular(first[0])) if first else None
    return spoken or "other", words


def harmful(tool: McpTool) -> bool:
    """Never to be called while exploring."""
    verbs = {VERB_OF.get(word) for word in words_of(tool.name)}
    return (tool.destructive is True and tool.read_only is not True) or bool(verbs & {"delete"}) or _says_sql_write(tool)


def _says_sql_write(tool: McpTool) -> bool:
    return any(word in words_of(tool.name) for word in ("write", "execute", "exec")) and "sql" in tool.description.lower()


def _reads(tool: McpTool, words: list[str], verb: Verb, leaves: tuple[Leaf, ...]) -> bool:
    """By the server's hint; else by the verb in front (`read_note` reads, although a note can be a verb too)."""
    if tool.read_only is not None:
        return tool.read_only
    if harmful(tool) or any(leaf.kind in ("sql_write", "sql_create") for leaf in leaves):
        return False
    if any(leaf.kind == "sql_read" for leaf in leaves):
        return True
    first = {VERB_OF[word] for word in words[:1] if word in VERB_OF}
    also = {VERB_OF[after] for word, after in pairwise(words) if word in ("and", "or") and after in VERB_OF}
    verbs = (first or {VERB_OF[word] for word in words if word in VERB_OF} or {verb}) | also
    return bool(verbs) and verbs <= READING


def _leaves(schema: JsonObject, path: tuple[str, ...], required: bool, tool: McpTool, objects: list[str]) -> Iterator[Leaf]:
    if len(path) > 6:
        return
    schema = _plain(schema)
    kind = _type(schema)
    properties = schema.get("properties")
    if (kind == "object" or not path) and isinstance(properties, dict):
        wanted = schema.get("required")
        needed = wanted if isinstance(wanted, list) else []
        for name, child in properties.items():
            if isinstance(child, dict):
                yield from _leaves(child, (*path, name), required and name in needed, tool, objects)
        return
    items = schema.get("items")
    if kind == "array":
        yield from _leaves(items if isinstance(items, dict) else {"type": "string"}, (*path, "[]"), required, tool, objects)
        return
    leaf = Leaf(path, kind, schema, required)
    yield Leaf(path, kind_of(leaf, tool, objects), schema, required, role_of(leaf.name))


def _plain(schema: JsonObject) -> JsonObject:
    """The first alternative that is not null, with what stands beside the alternatives."""
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        if isinstance(choices, list):
            real = [choice for choice in choices if isinstance(choice, dict) and choice.get("type") != "null"]
            if real:
                return {**{k: v for k, v in schema.items() if k != key}, **_plain(real[0])}
    return schema


def _type(schema: JsonObject) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((item for item in kind if item != "null"), None)
    if isinstance(kind, str):
        return kind
    return "object" if "properties" in schema else "array" if "items" in schema else "string"


_SOURCE = {"source", "from", "src", "start", "origin", "old", "input", "base"}
_TARGET = {"target", "to", "destination", "dest", "dst", "end", "new", "output"}


def role_of(name: str) -> Role:
    words = set(words_of(name))
    return "source" if words & _SOURCE else "target" if words & _TARGET else ""


_FORMATS = {"date-time": "datetime", "date": "date", "time": "time", "uri": "url", "url": "url", "email": "email", "uuid": "id"}
_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"time ?zone|\btz\b|\biana\b", "timezone"),
    (r"\b(?:datetime|timestamp)\b", "datetime"),
    (r"\bdate\b|\bday\b", "date"),
    (r"\btime\b", "time"),
    (r"\b(?:url|uri|link|website|endpoint)s?\b", "url"),
    (r"\be ?mail\b", "email"),
    (r"\b(?:directory|folder|dir)s?\b", "folder"),
    (r"\b(?:file ?path|path|file ?name|file)s?\b", "path"),
    (r"\b(?:expression|formula|equation)\b", "expression"),
    (r"\btables?\b(?: name)?", "table"),
    (r"\b(?:currency)\b", "currency"),
    (r"\b(?:lang|language|locale)\b", "language"),
    (r"\bcountry\b", "country"),
    (r"\b(?:city|location|place|town)\b", "city"),
    (r"\bcolou?r\b", "color"),
    (r"\b(?:query|search|keyword|term|needle)s?\b", "search"),
    (r"\brelation(?:ship)?(?: type)?\b", "relation"),
    (r"\b(?:type|category|class|group|tag|label|status)s?\b", "category"),
    (r"\b(?:id|uuid|token|hash)s?\b", "id"),
    (r"\bkeys?\b", "key"),
    (r"\b(?:person|user|author|owner|assignee|username)\b", "name"),
    (r"\b(?:name|title|subject)s?\b", "name"),
    (
        r"\b(?:content|text|body|message|note|observation|insight|description|comment|sentence|summary|memo|reason|fact|contents|notes|observations|messages|insights|facts)\b",
        "sentence",
    ),
)
_PLACE = re.compile(r"\b(?:directory|folder)\b")


def kind_of(leaf: Leaf, tool: McpTool, objects: list[str]) -> str:
    """The kind of a leaf; its `kind` so far is its JSON type."""
    if leaf.options:
        return "enum"
    if leaf.kind in ("boolean", "integer", "number", "null"):
        return leaf.kind
    stated = _FORMATS.get(str(leaf.schema.get("format")))
    if stated:
        return stated
    described = str(leaf.schema.get("description") or "").lower()
    name = leaf.label
    sql = _sql_kind(name, described, tool)
    if sql:
        return sql
    if "iana" in described or re.search(r"time ?zone", name):
        return "timezone"
    if "hh:mm" in described:
        return "time"
    if "yyyy-mm-dd" in described:
        return "date"
    about = " ".join(objects) + " " + tool.description.lower()[:200]
    files = bool(re.search(r"\b(?:file|directory|directories|folder|path)s?\b", about))
    if re.search(r"\bpatterns?\b|\bglob\b", name):
        return "glob" if files else "search"
    if files and words_of(leaf.name)[:1] and role_of(leaf.name) and not name.endswith("type") and not _text_edit(leaf):
        return "path"
    for pattern, kind in _BY_NAME:
        if re.search(pattern, name):
            seeks = any(VERB_OF.get(word) == "search" for word in words_of(tool.name))
            if kind == "path" and (seeks or _PLACE.search(" ".join(objects))):
                return "folder"
            return kind
    return _nested_kind(leaf, objects)


def _text_edit(leaf: Leaf) -> bool:
    return bool({"text", "string", "value", "content"} & set(words_of(leaf.name)))


def _nested_kind(leaf: Leaf, objects: list[str]) -> str:
    """`from` and `to` inside an item are names of things; anything else is a few words."""
    if role_of(leaf.name) and _text_edit(leaf):
        return "sentence"
    return "name" if role_of(leaf.name) or leaf.name in ("entity", "node", "item") else "text"


def _sql_kind(name: str, described: str, tool: McpTool) -> str | None:
    about = f"{described} {tool.description.lower()}"
    if name not in ("query", "sql", "statement", "sql query") or not re.search(r"\bsql\b|\bselect\b", about):
        return None
    if "create table" in about:
        return "sql_create"
    if re.search(r"\b(?:insert|update|delete)\b", about):
        return "sql_write"
    return "sql_read"
