"""From a request to a call: the model is resolved, the trajectory opened, the prompt rendered or spliced, every bound checked.

Knows no HTTP and no form of replies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import Conflict, ContextOverflow, InvalidRequest, TrajectoryStateError, UnknownTrajectory
from ..records import ChatRequest, JsonObject, Origin, Trajectory, TrajectoryStatus, new_id
from .admission import Admission
from .calls import Call, Sampler
from .gateway_schema import ChatBody, CompletionBody, SamplingBody
from .limits import Limits
from .metrics import Metrics
from .registry_protocol import Registry, Served
from .response_format import check_format, misfit
from .token_text import TokenText

if TYPE_CHECKING:
    from .ledger import Ledger
    from .reply_stream import ReplyStream

log = logging.getLogger("apprentice.server")
T = TypeVar("T")

TRAJECTORY_HEADER = "x-apprentice-trajectory"
KNOWN_TRAJECTORIES = 100_000
SHORT_BODY = 16 * 1024
"""Rendering this much takes less than a millisecond; handing it to a thread and back takes as long."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says about itself besides its body."""

    trajectory_id: str | None
    origin: Origin
    body_bytes: int
    """Size of the request: a short one is rendered where it is, a long one in a thread."""


class Gateway:
    """State behind the `/v1` routes."""

    def __init__(self, registry: Registry, ledger: Ledger, limits: Limits, metrics: Metrics) -> None:
        self.registry, self.limits, self.metrics = registry, limits, metrics
        self.started_at = int(time.time())
        self.unattributed = 0
        self._ledger = ledger
        queue = partial(Admission, limits.running_per_engine, limits.waiting_per_engine, limits.queue_seconds)
        self.sampler = Sampler(ledger, queue, metrics.recorded)
        self._renderers = ThreadPoolExecutor(limits.renderers, "render")
        self._open: dict[str, None] = {}
        self._texts: dict[int, TokenText] = {}

    async def chat_call(self, body: ChatBody, caller: Caller) -> Call:
        request = body.request()
        check_format(request.response_format)
        served = await self.registry.resolve(body.model)

        def prompt() -> Any:
            self._enter(caller, served)
            return served.splicer.prompt(caller.trajectory_id, request, caller.origin)

        spliced = await self._rendered(caller, prompt)
        tokens = max_tokens(body.asked_tokens, len(spliced.prompt_ids), served.context_length, self.limits.default_max_tokens)
        sampling = body.sampling(tokens, body.top_logprobs or 0)
        return self._call(
            served,
            caller,
            body,
            tuple(spliced.prompt_ids),
            request=request,
            sampling=sampling,
            read=partial(served.codec.stream, request.tools, tool_choice=request.tool_choice, stop=sampling.stop),
            check=partial(lacking, body, request),
            parent=spliced.parent,
            branch=spliced.branch,
        )

    async def text_call(self, body: CompletionBody, caller: Caller) -> Call:
        served = await self.registry.resolve(body.model)

        def prompt() -> tuple[int, ...]:
            self._enter(caller, served)
            return tuple(served.codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt)

        ids = await self._rendered(caller, prompt)
        check_vocabulary(ids, len(tokenizer_of(served)))
        tokens = max_tokens(body.asked_tokens, len(ids), served.context_length, self.limits.default_max_tokens)
        sampling = body.sampling(tokens, body.logprobs or 0)
        return self._call(
            served,
            caller,
            body,
            ids,
            request=ChatRequest(messages=()),
            sampling=sampling,
            read=partial(plain_reader, tokenizer_of(served), sampling.stop),
            check=lambda message: None,
        )

    def _call(self, served: Served, caller: Caller, body: SamplingBody, ids: tuple[int, ...], **parts: Any) -> Call:
        choices = body.n or 1
        return Call(
            served=served,
            prompt_ids=ids,
            choices=choices,
            trajectory_id=caller.trajectory_id,
            origin=caller.origin,
            completion_ids=tuple(new_id("cmp") for _ in range(choices)),
            **parts,
        )

    def text_of(self, served: Served) -> TokenText:
        found = self._texts.get(id(served.codec))
        if found is None:
            found = self._texts[id(served.codec)] = TokenText(tokenizer_of(served))
        return found

    def forget(self, trajectory_id: str) -> None:
        """The trajectory may have ended: the next call asks the ledger."""
        self._open.pop(trajectory_id, None)

    def close(self) -> None:
        self._renderers.shutdown(wait=True)

    async def _rendered(self, caller: Caller, work: Callable[[], T]) -> T:
        """The result of `work`, which waits for the ledger if the trajectory is new here."""
        if caller.body_bytes <= SHORT_BODY and (caller.trajectory_id is None or caller.trajectory_id in self._open):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._renderers, work)

    def _enter(self, caller: Caller, served: Served) -> None:
        """Make sure that the call's trajectory is open; an unknown one is opened for the policy that is called."""
        trajectory_id = caller.trajectory_id
        if trajectory_id is None:
            self._count_unattributed()
            return
        if trajectory_id in self._open:
            return
        try:
            status = self._ledger.trajectory(trajectory_id, tokens=False).status
        except UnknownTrajectory:
            status = self._open_now(trajectory_id, served)
        if status is not TrajectoryStatus.open:
            raise TrajectoryStateError(f"trajectory {trajectory_id} is {status.value} and takes no more calls", param=TRAJECTORY_HEADER)
        if len(self._open) >= KNOWN_TRAJECTORIES:
            self._open.clear()
        self._open[trajectory_id] = None

    def _open_now(self, trajectory_id: str, served: Served) -> TrajectoryStatus:
        try:
            return self._ledger.open_trajectory(Trajectory(id=trajectory_id, policy=served.alias)).status
        except Conflict:  # opened in between, with more than an id
            return self._ledger.trajectory(trajectory_id, tokens=False).status

    def _count_unattributed(self) -> None:
        self.unattributed += 1
        self.metrics.unattributed.inc()
        if self.unattributed == 1:
            log.warning(
                "a call came without a trajectory id: it is served and recorded, but it can never be trained on. Set the base URL to "
                "/t/TRAJECTORY/v1 or the header %s. Such calls are counted in /health and /metrics from now on",
                TRAJECTORY_HEADER,
            )


def max_tokens(asked: int | None, prompt: int, context: int, default: int) -> int:
    """How many tokens may be drawn. `ContextOverflow` names both numbers."""
    wanted = asked or 1
    if prompt + wanted > context:
        raise ContextOverflow(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt + wanted} tokens "
            f"({prompt} in the prompt, {wanted} for the completion). Please shorten the prompt or ask for fewer tokens.",
            param="messages" if asked is None or prompt >= context else "max_tokens",
            details={"context_length": context, "prompt_tokens": prompt, "completion_tokens": wanted},
        )
    return asked or min(context - prompt, default)


def tokenizer_of(served: Served) -> Any:
    """The Hugging Face tokenizer (untyped upstream) that the codec works with."""
    return served.codec.tokenizer


def plain_reader(tokenizer: Any, stop: Sequence[str]) -> ReplyStream:
    """Text as it is, without tool calls and reasoning; special tokens vanish."""
    from .reply_stream import Detokenizer, ReplyReader, ReplyStream, StopCutter

    return ReplyStream(Detokenizer(tokenizer, frozenset(tokenizer.all_special_ids)), StopCutter(stop), ReplyReader(None, None))


def check_vocabulary(ids: tuple[int, ...], size: int) -> None:
    if not ids:
        raise InvalidRequest("`prompt` must spell at least one token, but it spells none", param="prompt")
    if max(ids) >= size:
        raise InvalidRequest(f"`prompt` must hold token ids below {size}, but {max(ids)} came", param="prompt")


def lacking(body: ChatBody, request: ChatRequest, message: JsonObject) -> str | None:
    """What a reply lacks of what the request asked for (the codec itself checks `tool_choice`)."""
    found: Any = message.get("tool_calls") or []
    names: list[str] = [call["function"]["name"] for call in found]
    if body.parallel_tool_calls is False and len(names) > 1:
        return f"parallel_tool_calls is false, but the reply makes {len(names)} calls"
    return None if names else misfit(str(message.get("content") or ""), request.response_format)
