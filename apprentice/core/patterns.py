"""Regular expressions of JSON Schemas, matched in linear time: the patterns are a stranger's, and the texts a model's.

Python's engine, which jsonschema asks, tries every way to match: a pattern like `^(a+)+$` stops the whole process on a text of
forty characters. Pydantic brings Rust's engine, which cannot; it knows no look-around and no references to groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import JsonValue
from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema


def linear(kind: Any) -> Any:  # Any: jsonschema's validator classes have no common type
    """A validator class like `kind` whose patterns are matched here. Judging raises ValueError at a pattern that is not known here.

    `unevaluatedProperties` beside `patternProperties` is not covered.
    """
    from jsonschema import exceptions, validators

    def pattern(validator: Any, wanted: str, instance: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not matches(wanted, instance):
            yield exceptions.ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, _: Any) -> Iterator[Any]:
        for wanted, schema in patterns.items() if validator.is_type(instance, "object") else ():
            for name, value in instance.items():
                if matches(wanted, name):
                    yield from validator.descend(value, schema, path=name, schema_path=wanted)

    def additional_properties(validator: Any, allowed: Any, instance: Any, schema: dict[str, Any]) -> Iterator[Any]:
        if validator.is_type(instance, "object"):
            named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
            others = {name: value for name, value in instance.items() if name not in named and not any(matches(p, name) for p in patterns)}
            yield from kind.VALIDATORS["additionalProperties"](validator, allowed, others, {})

    own = {"pattern": pattern, "patternProperties": pattern_properties, "additionalProperties": additional_properties}
    known = {name: judge for name, judge in own.items() if name in kind.VALIDATORS}
    return validators.extend(kind, known)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def without_dialect(schema: JsonValue) -> JsonValue:
    """The schema without any `$schema`: at each of them jsonschema would change from the class of `linear` to one of its own."""
    if isinstance(schema, list):
        return [without_dialect(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_dialect(value) for key, value in schema.items() if key != "$schema" or not isinstance(value, str)}


def backtracking(schema: JsonValue) -> Iterator[str]:
    """The patterns in a schema that cannot be matched here."""
    if isinstance(schema, list):
        for item in schema:
            yield from backtracking(item)
    if not isinstance(schema, dict):
        return
    named = schema.get("patternProperties")
    wanted = [schema.get("pattern"), *(named if isinstance(named, dict) else ())]
    for pattern in wanted:
        if isinstance(pattern, str) and not _known(pattern):
            yield pattern
    for value in schema.values():
        yield from backtracking(value)


def _known(pattern: str) -> bool:
    try:
        _compiled(pattern)
    except ValueError:
        return False
    return True


def matches(pattern: str, text: str) -> bool:
    """Whether `text` holds what `pattern` says, anywhere. ValueError for a pattern that only a backtracking engine can match."""
    try:
        _compiled(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True))
    except SchemaError as error:
        raise ValueError(f"the pattern {pattern!r} cannot be matched in linear time") from error
