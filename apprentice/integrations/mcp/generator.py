"""A language model that invents tasks, by name: an OpenAI-compatible URL, or any LiteLLM model."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from ...core.errors import ConfigError, InfrastructureError
from ...core.records import JsonObject

Generator = Callable[[list[JsonObject]], Awaitable[str]]
KEY_VARIABLE = "APPRENTICE_GENERATOR_KEY"


def generator_of(name: str, *, temperature: float = 0.9, max_tokens: int = 1024) -> Generator:
    """`http://host/v1?model=NAME` (key: APPRENTICE_GENERATOR_KEY), or a LiteLLM name, whose key is in its usual variable.

    Raises ConfigError for a URL without a model, or where LiteLLM is not installed.
    """
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    return _of_url(name, options) if name.startswith(("http://", "https://")) else _of_litellm(name, options)


def _of_url(url: str, options: dict[str, Any]) -> Generator:
    parts = urlsplit(url)
    model = dict(parse_qsl(parts.query)).get("model")
    if not model:
        raise ConfigError(f"a generator's URL names its model, as in {url.split('?')[0]}?model=NAME", param="generator")
    base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))

    async def ask(messages: list[JsonObject]) -> str:
        from openai import AsyncOpenAI, OpenAIError

        client = AsyncOpenAI(base_url=base, api_key=os.environ.get(KEY_VARIABLE) or "no-key")
        create = cast("Callable[..., Awaitable[Any]]", client.chat.completions.create)
        try:
            reply = await create(model=model, messages=messages, **options)
        except OpenAIError as cause:
            raise InfrastructureError(f"the generator at {base} did not answer: {cause}") from cause
        finally:
            await client.close()
        return reply.choices[0].message.content or ""

    return ask


def _of_litellm(name: str, options: dict[str, Any]) -> Generator:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network when it is imported
    try:
        import litellm  # pyright: ignore[reportMissingImports]
    except ImportError as cause:
        raise ConfigError(
            f"the generator '{name}' needs LiteLLM: pip install litellm; or name an OpenAI-compatible URL, http://host/v1?model=NAME",
            param="generator",
        ) from cause
    complete = cast("Callable[..., Awaitable[Any]]", litellm.acompletion)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]

    async def ask(messages: list[JsonObject]) -> str:
        try:
            reply = await complete(model=name, messages=messages, **options)
        except Exception as cause:  # LiteLLM raises its providers' own classes
            raise InfrastructureError(f"the generator {name} did not answer: {cause}") from cause
        return reply.choices[0].message.content or ""

    return ask
