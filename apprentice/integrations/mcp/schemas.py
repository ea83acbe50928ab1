"""JSON schemas of tools: made plain for a model's prompt, and asked (as they came) whether arguments fit.

Servers send what they like: references, recursive types, defaults of the wrong type, no type at all, draft-07 and 2020-12,
or no schema. Nothing here raises for a schema, however wrong, nor reads anything from outside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pydantic import JsonValue

from ...core.records import JsonObject

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

MAX_NODES = 4_000
"""Schemas inside one tool's schema after inlining; a schema that would grow beyond it is cut to its types."""
MAX_DEPTH = 40
MAX_SENTENCE = 300

_DROPPED = {"$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "title"}
_MAPS = {"properties", "patternProperties", "dependentSchemas"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SINGLE = {
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
}
_TYPES: dict[str, Callable[[JsonValue], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())),
    "number": lambda value: not isinstance(value, bool) and isinstance(value, int | float),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def parameters_of(schema: JsonValue) -> JsonObject:
    """`schema` as OpenAI-style function parameters: an object with properties, references inlined, nothing but what a model can use."""
    root: JsonObject = schema if isinstance(schema, dict) else {}
    cleaned = _Cleaner(root).schema(root, (), 0)
    properties = cleaned.get("properties")
    return {**cleaned, "type": "object", "properties": properties if isinstance(properties, dict) else {}}


class _Cleaner:
    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._nodes = 0

    def schema(self, node: JsonObject, stack: tuple[str, ...], depth: int) -> JsonObject:
        """`node` with references inlined; `stack` holds the references being inlined, so that none is inlined inside itself."""
        self._nodes += 1
        reference = node.get("$ref")
        if isinstance(reference, str):
            siblings: JsonObject = {key: value for key, value in node.items() if key != "$ref"}
            target = _lookup(self._root, reference)
            if reference in stack or self._spent(depth):
                return self.schema({**_outline(target), **siblings}, stack, depth)
            if "$ref" in target:
                return {**self.schema(target, (*stack, reference), depth + 1), **self.schema(siblings, stack, depth)}
            return self.schema({**target, **siblings}, (*stack, reference), depth + 1)
        if self._spent(depth):
            return _outline(node)
        kept: JsonObject = {key: self._value(key, value, stack, depth + 1) for key, value in node.items() if key not in _DROPPED}
        if "default" in kept and not _fits(kept["default"], kept):
            del kept["default"]
        if "required" in kept and not isinstance(kept["required"], list):  # a draft-03 boolean
            del kept["required"]
        return kept

    def _spent(self, depth: int) -> bool:
        return self._nodes > MAX_NODES or depth > MAX_DEPTH

    def _value(self, keyword: str, value: JsonValue, stack: tuple[str, ...], depth: int) -> JsonValue:
        if keyword in _MAPS and isinstance(value, dict):
            return {name: self._any(child, stack, depth) for name, child in value.items()}
        if (keyword in _LISTS or keyword == "items") and isinstance(value, list):
            return [self._any(child, stack, depth) for child in value]
        if keyword in _SINGLE:
            return self.schema(value, stack, depth) if isinstance(value, dict) else value
        return value

    def _any(self, child: JsonValue, stack: tuple[str, ...], depth: int) -> JsonValue:
        if child is False:
            return {"not": {}}
        return self.schema(child, stack, depth) if isinstance(child, dict) else {}


def _lookup(root: JsonObject, reference: str) -> JsonObject:
    """What a `#/…` reference points to; `{}` (anything) if it points to nothing or out of the schema."""
    if not reference.startswith("#"):
        return {}
    found: JsonValue = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return {}
    return found if isinstance(found, dict) else {}


def _outline(schema: JsonObject) -> JsonObject:
    return {key: schema[key] for key in ("type", "description", "enum") if key in schema}


def _fits(value: JsonValue, schema: JsonObject) -> bool:
    """Whether a default is of the schema's own type and values; only what can be told without a validator."""
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    tests = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
    if tests and not any(test(value) for test in tests):
        return False
    values = schema.get("enum")
    if isinstance(values, list) and value not in values:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options and not any(_fits(value, option) for option in options if isinstance(option, dict)):
            return False
    return True


def violations(schema: JsonValue, arguments: JsonValue) -> list[str]:
    """What is wrong with `arguments` by the server's own `schema`, one sentence each; nothing if the schema itself is wrong."""
    if not isinstance(arguments, dict):
        return [f"the arguments must be an object, got {_kind(arguments)}"]
    if not isinstance(schema, dict) or _fault(text := _as_text(schema)) is not None:
        return []
    return _ask(text, arguments)[0]


def schema_fault(schema: JsonValue) -> str | None:
    """Why `schema` cannot be asked about arguments, as one sentence; None if it can."""
    if not isinstance(schema, dict):
        return f"the input schema must be an object, got {_kind(schema)}"
    return _fault(_as_text(schema))


def _as_text(schema: JsonObject) -> str:
    """The key under which a schema is known: checking one takes longer than most tool calls."""
    return json.dumps({**schema, "type": "object"})


@lru_cache(maxsize=256)
def _fault(text: str) -> str | None:
    return _ask(text, {})[1]


def _ask(text: str, arguments: JsonObject) -> tuple[list[str], str | None]:
    """The violations, and why the schema could not be asked."""
    from jsonschema.exceptions import SchemaError, UnknownType
    from referencing.exceptions import Unresolvable

    try:
        errors = sorted(_validator(text).iter_errors(arguments), key=lambda error: [str(part) for part in error.absolute_path])
        return [_sentence(error) for error in errors], None
    except SchemaError as error:
        return [], f"the input schema is not valid: {_short(error.message)}"
    except Unresolvable as error:
        return [], f"the input schema refers to something outside itself: {_short(str(error))}"
    # A schema is the server's: keywords of a wrong type, broken patterns and endless recursion surface as these.
    except (UnknownType, RecursionError, TypeError, ValueError, AttributeError, LookupError) as error:
        return [], f"the input schema cannot be used: {type(error).__name__}: {_short(str(error))}"


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:  # Any: jsonschema's validator classes have no common type
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # pyright: ignore[reportMissingTypeStubs]

    from ...core.patterns import linear, without_dialect

    if '"unevaluatedProperties"' in text and '"patternProperties"' in text:
        raise ValueError("patternProperties are not judged beside unevaluatedProperties")
    schema = json.loads(text)
    kind: Any = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    return linear(kind)(without_dialect(schema), registry=REGISTRY)  # the default registry would fetch a `$ref` to a URL


def _sentence(error: ValidationError) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    where = f"argument {path!r}: " if path else ""
    if error.validator == "required" and not path:
        return "a required argument is missing: " + _short(error.message)
    return where + _short(error.message)


def _short(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= MAX_SENTENCE else f"{text[: MAX_SENTENCE - 1]}…"


def _kind(value: JsonValue) -> str:
    return next((name for name, test in _TYPES.items() if test(value)), type(value).__name__)
