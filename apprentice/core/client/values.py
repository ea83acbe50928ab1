"""What user code hands to the client, checked where it comes in. No I/O."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import UserDict
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from pydantic import TypeAdapter, ValidationError

from ..errors import ApprenticeError, InfrastructureError, InvalidRequest
from ..records import JsonObject, Scenario


def finite(value: SupportsFloat, what: str) -> float:
    """The number as float; InvalidRequest if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{what} must be a finite number, got {shown(value)}", param=what)
    return number


def shown(value: object, limit: int = 80) -> str:
    """A value in a message: its `repr`, cut."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}…"


def check_text(text: str, what: str) -> None:
    """InvalidRequest for a lone surrogate, which no UTF-8 can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise InvalidRequest(f"{what} holds a lone surrogate, which is no Unicode text", param=what) from cause


class Numbers(UserDict[str, float]):
    """A dict of finite numbers; anything else is refused when it is set."""

    def __init__(self, what: str) -> None:
        self._what = what
        super().__init__()

    def __setitem__(self, key: str, item: SupportsFloat) -> None:
        check_text(key, f"the name in {self._what}[{key!r}]")
        super().__setitem__(key, finite(item, f"{self._what}[{key!r}]"))


def sentence(error: BaseException) -> str:
    """An exception as one line of text that survives UTF-8."""
    text = " ".join(str(error).split()) or "no message"
    line = text if isinstance(error, ApprenticeError) else f"{type(error).__name__}: {text}"
    return line.encode("utf-8", "replace").decode()[:2000]


def json_object(value: Mapping[str, Any], what: str) -> JsonObject:
    """The mapping, if it is JSON; InvalidRequest otherwise."""
    try:
        found = TypeAdapter(JsonObject).validate_python(dict(value))
        check_text(json.dumps(found, ensure_ascii=False), what)
        return found
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(map(str, first["loc"])) or what
        raise InvalidRequest(f"{what} must be a JSON object, but {where}: {first['msg']}", param=what) from cause


def as_scenario(value: object) -> Scenario | None:
    """A Scenario as it is; any other JSON value becomes the input of one. None stays None."""
    if value is None or isinstance(value, Scenario):
        return value
    return as_scenarios([value])[0]


def as_scenarios(values: Iterable[object]) -> list[Scenario]:
    """Scenarios as they are; other JSON values become scenarios whose id is made of their content, so it is the same in every process."""
    scenarios: list[Scenario] = []
    for index, value in enumerate(values):
        if isinstance(value, Scenario):
            scenarios.append(value)
            continue
        try:
            anonymous = Scenario(id="scn", input=value)  # pyright: ignore[reportArgumentType]  (validated right here)
        except ValidationError as cause:
            raise InvalidRequest(
                f"scenario {index} must be a Scenario or a JSON value, got {type(value).__name__}", param="scenarios"
            ) from cause
        check_text(json.dumps(anonymous.input, ensure_ascii=False), f"scenario {index}")
        digest = hashlib.sha256(anonymous.model_dump_json().encode()).hexdigest()[:16]
        scenarios.append(anonymous.model_copy(update={"id": f"scn-{digest}"}))
    return scenarios


def is_infrastructure(error: BaseException) -> bool:
    """True if the machinery failed, not the rollout: our InfrastructureError, or what the openai client makes of one."""
    if isinstance(error, InfrastructureError):
        return True
    if not re.match(r"openai(\.|$)", type(error).__module__):
        return False
    status: object = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status == 429 or status >= 500
    return any(base.__name__ == "APIConnectionError" for base in type(error).__mro__)
