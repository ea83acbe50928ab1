"""`response_format`: the schema is checked before sampling, the reply after it. Knows JSON Schema, nothing of models."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InvalidRequest
from ..patterns import backtracking, linear, without_dialect
from ..records import JsonObject

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


def check_format(wanted: JsonObject | None) -> None:
    """`InvalidRequest` for a `json_schema` that is no JSON Schema."""
    schema: Any = schema_of(wanted)
    if schema is None:
        return
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        unknown = [*backtracking(schema)]
    except (SchemaError, re.error, RecursionError) as cause:
        reason = getattr(cause, "message", str(cause))
        raise InvalidRequest(
            f"`response_format.json_schema.schema` is not a valid JSON Schema: {reason}", param="response_format.json_schema.schema"
        ) from None
    if unknown:
        raise InvalidRequest(
            f"`response_format.json_schema.schema` has the pattern {unknown[0]!r}; look-around and references to groups are not supported",
            param="response_format.json_schema.schema",
        )


def schema_of(wanted: JsonObject | None) -> Any:
    if wanted is None or wanted["type"] != "json_schema":
        return None
    described: Any = wanted["json_schema"]
    return described["schema"]


def misfit(text: str, wanted: JsonObject | None) -> str | None:
    """What is wrong with a reply's text, as one sentence; None if it is what was asked for."""
    if wanted is None:
        return None
    try:
        value: Any = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError) as cause:
        return f"the reply is not the JSON that response_format asks for: {cause}"
    schema = schema_of(wanted)
    if schema is None:
        return None if isinstance(value, dict) else f"the reply must be a JSON object, but is a {type(value).__name__}"
    return _schema_misfit(value, schema)


def _schema_misfit(value: Any, schema: Any) -> str | None:
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_validator(schema).iter_errors(value))
    except Exception as cause:  # noqa: BLE001 - any schema meets any reply: references, patterns, numbers that no float holds
        return f"the reply cannot be checked, since the schema of response_format cannot be applied: {cause}"
    return None if error is None else f"the reply does not fit the schema of response_format at {error.json_path}: {error.message}"


def _validator(schema: Any) -> Draft202012Validator:
    """With an empty registry: a `$ref` to another document is never fetched."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return linear(Draft202012Validator)(without_dialect(schema), registry=Registry())


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
