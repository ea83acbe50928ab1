"""OpenAI clients bound to the ambient trajectory. The openai package costs over a second to import, so it is, only here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import httpx

from ..errors import ConfigError
from .scope import TRAJECTORY_HEADER, current_trajectory
from .transport import BorrowedTransport, Transport, environment_proxy, is_loopback, ssl_context

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

CALL_TIMEOUT = httpx.Timeout(600.0, connect=10.0, pool=None)
"""Silence that one call may have, in seconds; starts when the call has a connection."""
CALL_RETRIES = 4
"""The openai client's own retries of lost connections, 429 and 5xx."""
SYNC_CONNECTIONS = 128


class Callee(Protocol):
    """What a client needs from its model."""

    @property
    def policy(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def transport(self) -> Transport: ...


def async_openai(model: Callee, **options: Any) -> AsyncOpenAI:  # Any: handed on to AsyncOpenAI
    """An AsyncOpenAI over the model's own connections."""
    openai = _openai()

    async def attribute(request: httpx.Request) -> None:
        _attribute(request, model.policy)

    http = httpx.AsyncClient(
        transport=BorrowedTransport(model.transport.pool), event_hooks={"request": [attribute]}, timeout=CALL_TIMEOUT, trust_env=False
    )
    return openai.AsyncOpenAI(**_settings(model, http, options))


def sync_openai(model: Callee, **options: Any) -> OpenAI:  # Any: handed on to OpenAI
    """An OpenAI client with connections of its own."""
    openai = _openai()
    url = model.transport.url

    def attribute(request: httpx.Request) -> None:
        _attribute(request, model.policy)

    http = httpx.Client(
        verify=ssl_context(url),
        proxy=None if is_loopback(url) else environment_proxy(url),
        limits=httpx.Limits(max_connections=SYNC_CONNECTIONS, max_keepalive_connections=SYNC_CONNECTIONS),
        event_hooks={"request": [attribute]},
        timeout=CALL_TIMEOUT,
        trust_env=False,
    )
    return openai.OpenAI(**_settings(model, http, options))


def _attribute(request: httpx.Request, policy: str) -> None:
    scope = current_trajectory(policy)
    if scope is not None and TRAJECTORY_HEADER not in request.headers:
        request.headers[TRAJECTORY_HEADER] = scope.id


def _settings(model: Callee, http: httpx.Client | httpx.AsyncClient, options: dict[str, Any]) -> dict[str, Any]:
    if "http_client" in options:
        raise ConfigError("http_client cannot be replaced: it carries the trajectory; make your own client with base_url=scope.base_url")
    defaults = {"base_url": model.base_url, "api_key": model.api_key, "max_retries": CALL_RETRIES, "timeout": CALL_TIMEOUT}
    return {**defaults, **options, "http_client": http}


def _openai() -> Any:  # Any: the optional package, imported on demand
    try:
        import openai
    except ModuleNotFoundError as cause:
        raise ConfigError("openai_client() needs the openai package: pip install 'apprentice-rl[openai]'") from cause
    return openai
