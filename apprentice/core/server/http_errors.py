"""Every failure as one JSON body in OpenAI's error form. Nothing reaches a client as HTML, a traceback or FastAPI's own form."""

from __future__ import annotations

import logging
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, JsonValue
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ..errors import ApprenticeError, InvalidRequest, NotFound, PayloadTooLarge, QueueFull
from .attended import CLIENT_GONE
from .json_body import shown

log = logging.getLogger("apprentice.server")

RETRY_AFTER_SECONDS = 1


class ErrorDetail(BaseModel):
    message: str
    """One sentence: what was expected, where, what came."""
    type: str
    code: str
    """One of the codes of `apprentice.core.errors`."""
    param: str | None = None
    details: dict[str, JsonValue] | None = None


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer with these error statuses, besides those that every route has."""
    words = {
        400: "Malformed, unknown or unsupported input; `param` names it.",
        401: "Missing or wrong API key.",
        404: "Not known here.",
        409: "In conflict with what is recorded.",
        413: "The body is over the limit.",
        429: "The admission queue is at its bound; retry after the time in `retry-after`.",
        503: "The machinery failed, not the request; safe to retry.",
        504: "A wait hit its stated limit.",
        507: "The disk of the ledger is full; nothing was recorded.",
    }
    known: dict[int | str, str] = {status: words[status] for status in sorted({400, 401, *statuses})}
    known["default"] = "Any other failure, in the same form."
    return {status: {"model": ErrorBody, "description": text} for status, text in known.items()}


def error_response(error: ApprenticeError, status: int | None = None, headers: dict[str, str] | None = None) -> Response:
    extra = dict(headers or {})
    if isinstance(error, QueueFull):
        extra["retry-after"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, PayloadTooLarge):
        extra["connection"] = "close"  # the rest of the body is not read
    return Response(to_json(error.to_wire()), status or error.status, extra, "application/json")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApprenticeError, _on_apprentice_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_apprentice_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApprenticeError)
    if error.status >= 500:
        log.error("%s %s failed: %s", request.method, request.url.path, error)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(refusal(error.errors(), error.body))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    if error.status_code == 404:
        return error_response(NotFound(f"there is nothing at {path}; the routes are listed at /docs"))
    if error.status_code == 405:
        wrong = InvalidRequest(f"{request.method} is not allowed at {path}", param="method")
        return error_response(wrong, 405, dict(error.headers or {}))
    return error_response(InvalidRequest(str(error.detail)), error.status_code, dict(error.headers or {}))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """The client left while its body was read; this is for the count of requests only."""
    return Response(status_code=CLIENT_GONE)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    log.exception("%s %s failed unexpectedly", request.method, request.url.path, exc_info=error)
    return error_response(unexpected(error))


def unexpected(error: Exception) -> ApprenticeError:
    """What the client hears of an error that nobody foresaw."""
    return ApprenticeError(f"the server failed unexpectedly ({type(error).__name__}); its log holds the cause")


def refusal(errors: Any, body: object) -> InvalidRequest:
    """The most specific of pydantic's errors as one sentence that names the field and shows what came."""
    worst = max(errors, key=lambda error: len(error["loc"]))
    place, *path = worst["loc"]
    param = _field(path, body) if place == "body" else ".".join(map(str, path))
    kind, message = worst["type"], str(worst["msg"])
    if kind == "missing":
        return InvalidRequest(f"`{param or place}` is required, but it is missing", param=param or place)
    if kind == "extra_forbidden":
        return InvalidRequest(f"`{param}` is not a known parameter here", param=param)
    if kind == "value_error":
        return InvalidRequest(f"`{param or place}`: {message.removeprefix('Value error, ')}", param=param or place)
    sentence = message.removeprefix("Input should ").removeprefix("Input ")
    verb = "should " if message.startswith("Input should") else ""
    return InvalidRequest(f"`{param or place}` {verb}{sentence}, but {shown(worst.get('input'))} came", param=param or place)


def _field(path: list[int | str], body: object) -> str:
    """`messages[0].content` from pydantic's location, without the names of union members that it contains."""
    name, current = "", body
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(step, int) and isinstance(current, list):
            items = cast("list[object]", current)
            name, current = f"{name}[{step}]", items[step] if step < len(items) else None
        elif isinstance(step, str) and isinstance(current, dict):
            fields = cast("dict[str, object]", current)
            if step in fields or last:
                name, current = f"{name}.{step}" if name else step, fields.get(step)
    return name
