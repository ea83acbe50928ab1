"""Request bodies: read within a bound, parsed strictly, refused with one sentence.

Strict JSON: UTF-8 only, no NaN or Infinity, no lone surrogates, no numbers beyond a float's range. Knows no route.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from ..errors import InvalidRequest, PayloadTooLarge

_MAYBE_INFINITE = re.compile(rb"[0-9.][eE]\+?[0-9]{3}|[0-9]{200}")
"""What a number beyond a float's range must hold: an exponent of three digits, or, with a shorter one, very many digits."""


def parse_json(body: bytes) -> Any:
    """The value that `body` spells. `InvalidRequest` says where it stops being JSON."""
    try:
        value: Any = from_json(body, allow_inf_nan=False)
    except ValueError as cause:
        what = "it holds NaN or Infinity" if _is_json_but_for_nan(body) else "it is not"
        raise InvalidRequest(f"the body must be valid JSON in UTF-8, but {what}: {cause}", param="body") from None
    if _MAYBE_INFINITE.search(body) and not _all_finite(value):
        raise InvalidRequest("the body holds a number beyond the range of a 64-bit float", param="body")
    return value


def _is_json_but_for_nan(body: bytes) -> bool:
    try:
        from_json(body, allow_inf_nan=True)
    except ValueError:
        return False
    return True


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. `PayloadTooLarge` as soon as more than `limit` bytes are announced or have come."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, f"{announced} bytes were announced")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit, f"more than {limit} bytes came")
        parts.append(part)
    return b"".join(parts)


class JsonRequest(Request):
    """A request whose body has been read and parsed already."""

    has_body = False

    def take(self, body: bytes) -> None:
        self._body = body
        if not body:
            return
        self.has_body = True
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise InvalidRequest(f"the body must come with content-type application/json, but {kind or 'none'} came", param="content-type")
        self._json = parse_json(body)

    async def json(self) -> Any:
        return self._json


class JsonRoute(APIRoute):
    """A FastAPI route that reads its body through `read_body` and `parse_json`. The bound is `app.state.max_body_bytes`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            strict = JsonRequest(request.scope, request.receive)
            if request.method not in ("GET", "HEAD"):
                strict.take(await read_body(request, request.app.state.max_body_bytes))
            return await answer(strict)

        return handler


class DirectRoute(APIRoute):
    """A route for a hot path: its endpoint takes a pydantic `body` and the `request`, and is called without FastAPI's injection.

    The description of the route is FastAPI's all the same. Other parameters of the endpoint or its router are only described.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        model: TypeAdapter[BaseModel] = TypeAdapter(get_type_hints(self.endpoint)["body"])

        async def handler(request: Request) -> Response:
            strict = JsonRequest(request.scope, request.receive)
            strict.take(await read_body(request, request.app.state.max_body_bytes))
            if not strict.has_body:
                raise InvalidRequest("a JSON body is required, but it is missing", param="body")
            value = await strict.json()
            try:
                body = model.validate_python(value)
            except ValidationError as cause:
                raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in cause.errors()], body=value) from None
            return await self.endpoint(body=body, request=strict)

        return handler


def _too_large(limit: int, came: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"a body may have at most {limit} bytes, but {came}", param="body", details={"limit_bytes": limit})


def _all_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_all_finite, cast("dict[str, object]", value).values()))
    return not isinstance(value, list) or all(map(_all_finite, cast("list[object]", value)))


def shown(value: object, limit: int = 80) -> str:
    """`value` as JSON for an error message, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=True, default=lambda other: f"<{type(other).__name__}>")
    return text if len(text) <= limit else f"{text[:limit]}…"
