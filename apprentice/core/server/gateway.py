"""The `/v1` routes: OpenAI's API in front of the policies, every call recorded. The same routes exist under `/t/{trajectory}/v1`.

Knows HTTP and the form of replies. What happens to a call in between is in gateway_calls (rendering) and calls (sampling).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from ..errors import InvalidRequest
from ..records import NAME_PATTERN, Origin
from .attended import CLIENT_GONE, ClientGone, EventStream, attended
from .calls import Call, Finished
from .gateway_calls import TRAJECTORY_HEADER, Caller, Gateway
from .gateway_reply import (
    ChatCompletion,
    Json,
    ModelEntry,
    ModelList,
    TextCompletion,
    chat_choice,
    chat_logprobs,
    text_choice,
    text_logprobs,
    usage,
)
from .gateway_schema import ChatBody, CompletionBody
from .gateway_stream import Wishes, events
from .http_errors import documented
from .json_body import DirectRoute, parse_json

ORIGIN_HEADER = "x-apprentice-origin"
_NAME = re.compile(NAME_PATTERN)
_CALL_ERRORS = documented(404, 409, 413, 429, 503, 504, 507)
_STREAM = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The reply; with `stream` as events."}}


def gateway_routers(gateway: Gateway) -> tuple[APIRouter, ...]:
    """`/v1/…` and `/t/{trajectory}/v1/…`. Made twice rather than nested: each level of routers costs every request time."""
    in_trajectory = [Depends(_trajectory_in_path)]
    return *_routes(gateway, "/v1"), *_routes(gateway, "/t/{trajectory}/v1", in_trajectory)


def _routes(gateway: Gateway, prefix: str, dependencies: Sequence[Any] = ()) -> tuple[APIRouter, APIRouter]:
    calls = APIRouter(prefix=prefix, route_class=DirectRoute, tags=["OpenAI API"], dependencies=dependencies)

    @calls.post("/chat/completions", response_model=ChatCompletion, responses={**_STREAM, **_CALL_ERRORS})
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """A reply of the model to a conversation. History that was sampled here re-enters as the tokens that were sampled."""
        caller = caller_of(request)
        call = await gateway.chat_call(body, caller)
        text = gateway.text_of(call.served)
        wishes = Wishes("chat", body.model, bool(body.logprobs), bool(body.return_token_ids), body.wants_usage, text)
        return await _answer(gateway, request, call, wishes, bool(body.stream))

    @calls.post("/completions", response_model=TextCompletion, responses={**_STREAM, **_CALL_ERRORS})
    async def completions(body: CompletionBody, request: Request) -> Response:
        """A continuation of a prompt given as text or, exactly, as token ids."""
        caller = caller_of(request)
        call = await gateway.text_call(body, caller)
        text = gateway.text_of(call.served)
        wishes = Wishes("text", body.model, body.logprobs is not None, bool(body.return_token_ids), body.wants_usage, text)
        return await _answer(gateway, request, call, wishes, bool(body.stream))

    routes = APIRouter(prefix=prefix, tags=["OpenAI API"], dependencies=dependencies)

    @routes.get("/models", response_model=ModelList, responses=documented())
    async def models() -> ModelList:
        """Every name that `model` may have: the policies (newest version) and the base models."""
        policies = [_policy_entry(gateway, info.policy, info.base_model, info.step) for info in gateway.registry.models()]
        bases = [ModelEntry(id=name, created=gateway.started_at, owned_by="base") for name in gateway.registry.base_models()]
        return ModelList(data=policies + bases)

    @routes.get("/models/{model:path}", response_model=ModelEntry, responses=documented(404))
    async def model(model: str) -> ModelEntry:
        """One of them, or a version of a policy as `project/name@step`."""
        served = await gateway.registry.resolve(model)
        if served.version is None:
            return ModelEntry(id=model, created=gateway.started_at, owned_by="base")
        base = next((info.base_model for info in gateway.registry.models() if info.policy == served.alias), None)
        return _policy_entry(gateway, model, base, served.version)

    return calls, routes


async def _trajectory_in_path(trajectory: Annotated[str, Path(pattern=NAME_PATTERN)]) -> None:
    """The trajectory to which calls under this URL belong; an unknown one is opened by its first call."""


def _policy_entry(gateway: Gateway, name: str, base: str | None, step: int) -> ModelEntry:
    return ModelEntry(id=name, created=gateway.started_at, owned_by="apprentice", base_model=base, step=step)


async def _answer(gateway: Gateway, request: Request, call: Call, wishes: Wishes, stream: bool) -> Response:
    headers = {
        "x-apprentice-policy-version": "" if call.served.version is None else str(call.served.version),
        "x-apprentice-completions": ",".join(call.completion_ids),
    }
    if stream:
        return EventStream(events(call, gateway.sampler.stream(call), wishes), headers)
    try:
        finished = await attended(request.receive, gateway.sampler.complete(call))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    return Response(to_json(_reply(call, finished, wishes)), 200, headers, "application/json")


def _reply(call: Call, finished: list[Finished], wishes: Wishes) -> Json:
    sampled = sum(len(choice.completion.token_ids) for choice in finished)
    body: Json = {
        "id": call.id,
        "object": "chat.completion" if wishes.kind == "chat" else "text_completion",
        "created": int(call.created_at),
        "model": wishes.model,
        "choices": [_choice(choice, wishes) for choice in finished],
        "usage": usage(len(call.prompt_ids), sampled),
        "policy_version": call.served.version,
    }
    if wishes.token_ids:
        body["prompt_token_ids"] = call.prompt_ids
    return body


def _choice(finished: Finished, wishes: Wishes) -> Json:
    completion = finished.completion
    show_choice, show_logprobs = (chat_choice, chat_logprobs) if wishes.kind == "chat" else (text_choice, text_logprobs)
    logprobs = show_logprobs(wishes.text, completion.token_ids, completion.logprobs, finished.tops) if wishes.logprobs else None
    return show_choice(completion, logprobs, wishes.token_ids)


def caller_of(request: Request) -> Caller:
    """Trajectory from the path or the header, origin from its header. Both are checked."""
    in_path, header = request.path_params.get("trajectory"), request.headers.get(TRAJECTORY_HEADER)
    if in_path is not None and header is not None and in_path != header:
        raise InvalidRequest(f"the path names trajectory {in_path} and the header {TRAJECTORY_HEADER} {header}", param=TRAJECTORY_HEADER)
    trajectory_id = header if in_path is None else in_path
    if trajectory_id is not None and not _NAME.fullmatch(trajectory_id):
        raise InvalidRequest(f"a trajectory id must match {NAME_PATTERN}, but {trajectory_id!r} came", param=TRAJECTORY_HEADER)
    raw = request.headers.get(ORIGIN_HEADER)
    return Caller(trajectory_id, Origin() if raw is None else _origin(raw), int(request.headers.get("content-length", sys.maxsize)))


def _origin(raw: str) -> Origin:
    try:
        return Origin.model_validate(parse_json(raw.encode("latin-1")))
    except ValidationError as cause:
        first = cause.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except InvalidRequest as cause:
        reason = cause.message
    raise InvalidRequest(f"the header {ORIGIN_HEADER} must be an Origin in ASCII JSON, but it is not: {reason}", param=ORIGIN_HEADER)
