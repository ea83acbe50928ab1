"""History splicing: an assistant turn that the ledger knows re-enters the prompt as the ids that were sampled.

Re-rendering what a model said and tokenising it again gives other ids than it drew (other spacing in JSON, other splits
of words, dropped reasoning); the trainer would then see contexts that nobody sampled in. So every assistant message is
looked for in the ledger: by lineage, else by tool call id, else by its exact text. Only the messages between are rendered.

A message that says something else than the completion it comes from (cut, repaired, edited) is rendered as the client
sent it: the model must see what the agent decided to show, and the branch says `history_rewritten`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import UnknownTrajectory
from ..records import BranchReason, ChatRequest, Completion, Origin
from .chat import ChatCodec, Rendered
from .chat_messages import read_messages, same_turn
from .splice_memory import Agent, RecordedTurn, Seen, Trace, TrajectoryMemory, chained, digest
from .splice_reasons import explain
from .text_ids import Context, contexts

_TRAJECTORIES = 8192
"""Open trajectories that are remembered; of the others only the ledger knows."""


class ReplyLedger(Protocol):
    """What the splicer needs of the ledger."""

    def find_reply(
        self, trajectory_id: str | None, *, completion_id: str | None = None, tool_call_id: str | None = None, text: str | None = None
    ) -> Sequence[Completion]:
        """Newest first; empty if there is none."""
        ...

    def completions(self, trajectory_id: str) -> Sequence[Completion]:
        """In the order of recording. Raises `UnknownTrajectory`."""
        ...


@dataclass(frozen=True, slots=True)
class SplicedPrompt:
    """The prompt of a call and its place in the trajectory's forest.

    `parent` is the completion of this trajectory whose prompt and tokens are the longest start of `prompt_ids`.
    """

    prompt_ids: list[int]
    parent: str | None
    branch: BranchReason


class Splicer:
    """Renders the prompts of one base model. Safe to call from several threads, also for one trajectory."""

    def __init__(self, codec: ChatCodec, ledger: ReplyLedger) -> None:
        self._codec, self._ledger = codec, ledger
        self._gate = threading.Lock()
        self._memories: OrderedDict[str, TrajectoryMemory] = OrderedDict()
        self._policies: dict[str, bool] = {}

    def prompt(self, trajectory_id: str | None, request: ChatRequest, origin: Origin) -> SplicedPrompt:
        """The prompt of a call. Raises `InvalidRequest` for messages that cannot be rendered."""
        memory = self._memory(trajectory_id)
        read = read_messages(request.messages)
        digests = [digest(message) for message in read]
        search = _Search(self, memory, trajectory_id, origin, chained(digests))
        found = {index: search.candidates(index, message) for index, message in enumerate(read) if message["role"] == "assistant"}
        known = {index: [recorded.turn for recorded in turns] for index, turns in found.items() if turns}
        rendered = self._codec.render_known(
            request.messages, request.tools, request.tool_choice, known, response_format=request.response_format
        )
        if trajectory_id is None:
            return SplicedPrompt(rendered.prompt_ids, None, BranchReason.root)
        chosen = {index: turns[rendered.turns.get(index, (0, 0))[1]] for index, turns in found.items() if turns}
        search.settle(chosen)
        context, turns = _place(rendered, chosen, trajectory_id)
        strangers = len(found) - len(chosen) - len(search.edited)
        agent, trace = Agent.of(origin), Trace.of(read, digests)
        stripped = bool(rendered.thinking_stripped)
        parent, branch = memory.judge(Seen(agent, context, trace, turns, tuple(search.edited), strangers, stripped))
        return SplicedPrompt(rendered.prompt_ids, parent, branch)

    def why(self, trajectory_id: str) -> dict[str, str]:
        """Completion id → one sentence, for every call that does not simply continue the one before. Raises `UnknownTrajectory`."""
        return explain(self._ledger.completions(trajectory_id))

    def recorded(self, completion: Completion) -> RecordedTurn | None:
        """A completion as a turn; None if its ids belong to another tokenizer or there are none."""
        if not completion.token_ids or not completion.request.messages:
            return None
        usable = self._policies.get(completion.policy)
        if usable is None:
            usable = self._policies[completion.policy] = self._codec.reads_as_recorded(completion)
        if not usable:
            return None
        return RecordedTurn(
            completion.id, completion.trajectory_id, Agent.of(completion.origin), completion.message, self._codec.turn_of(completion)
        )

    def find(self, trajectory_id: str | None, **key: str) -> list[Completion]:
        return list(self._ledger.find_reply(trajectory_id, **key))

    def everything(self, trajectory_id: str | None) -> list[Completion]:
        try:
            return list(self._ledger.completions(trajectory_id)) if trajectory_id is not None else []
        except UnknownTrajectory:
            return []

    def _memory(self, trajectory_id: str | None) -> TrajectoryMemory:
        if trajectory_id is None:
            return TrajectoryMemory()
        with self._gate:
            if trajectory_id in self._memories:
                self._memories.move_to_end(trajectory_id)
                return self._memories[trajectory_id]
        memory = self._rebuilt(trajectory_id)
        with self._gate:
            memory = self._memories.setdefault(trajectory_id, memory)
            while len(self._memories) > _TRAJECTORIES:
                self._memories.popitem(last=False)
            return memory

    def _rebuilt(self, trajectory_id: str) -> TrajectoryMemory:
        """From the ledger, after a restart or a long silence."""
        memory = TrajectoryMemory()
        calls: set[str] = set()
        for completion in self.everything(trajectory_id):
            if completion.call_id in calls or not completion.request.messages:
                continue
            calls.add(completion.call_id)
            (context,) = contexts(completion.prompt_ids, [len(completion.prompt_ids)])
            agent = Agent.of(completion.origin)
            memory.issued.setdefault(context, []).append(agent)
            memory.latest[agent] = Trace.of(read_messages(completion.request.messages))
            if completion.parent is not None:
                memory.children.setdefault(completion.parent, context)
        return memory


class _Search:
    """Looks for the completions behind the assistant messages of one request."""

    def __init__(
        self, splicer: Splicer, memory: TrajectoryMemory, trajectory_id: str | None, origin: Origin, places: Sequence[bytes]
    ) -> None:
        self._splicer, self._memory, self._trajectory = splicer, memory, trajectory_id
        self._lineage = origin.lineage
        self._places = places
        self._new: list[int] = []
        self.edited: list[int] = []

    def candidates(self, index: int, message: Mapping[str, Any]) -> list[RecordedTurn]:
        """Turns that message `index` may be, the likeliest first; several only where they read alike."""
        pointed = self._pointed(index, message)
        if pointed is not None:
            if not pointed or same_turn(message, pointed[0].message):
                return pointed
            self.edited.append(index)
            return []
        with self._memory.lock:
            noted = self._memory.places.get(self._places[index])
        if noted is not None:
            return [turn for completion_id in noted if (turn := self._turn(completion_id)) is not None]
        self._new.append(index)
        return self._by_words(message)

    def settle(self, chosen: Mapping[int, RecordedTurn]) -> None:
        """Note which completion each place turned out to be, and which are nobody's."""
        with self._memory.lock:
            for index in self._new:
                self._memory.places[self._places[index]] = (chosen[index].completion_id,) if index in chosen else ()

    def _pointed(self, index: int, message: Mapping[str, Any]) -> list[RecordedTurn] | None:
        """What lineage or a tool call id points at; empty if that cannot be used; None if nothing points anywhere."""
        source = self._lineage.get(index)
        if source is not None and self._load(source):
            turn = self._turn(source)
            return [turn] if turn is not None else []
        for call in message.get("tool_calls", ()):
            owner = self._owner(call["id"])
            if owner is not None:
                turn = self._turn(owner)
                return [turn] if turn is not None else []
        return None

    def _load(self, completion_id: str) -> list[RecordedTurn | None]:
        with self._memory.lock:
            if completion_id in self._memory.turns:
                return [self._memory.turns[completion_id]]
        return [self._remember(completion) for completion in self._splicer.find(None, completion_id=completion_id)]

    def _turn(self, completion_id: str) -> RecordedTurn | None:
        return next(iter(self._load(completion_id)), None)

    def _owner(self, tool_call_id: str) -> str | None:
        if not tool_call_id:
            return None
        with self._memory.lock:
            owner = self._memory.calls.get(tool_call_id)
        if owner is None:
            for completion in self._splicer.find(self._trajectory, tool_call_id=tool_call_id)[:1]:
                self._remember(completion)
                owner = completion.id
        return owner

    def _remember(self, completion: Completion) -> RecordedTurn | None:
        turn = self._splicer.recorded(completion)
        with self._memory.lock:
            self._memory.turns[completion.id] = turn
            for call in completion.message.get("tool_calls") or ():  # type: ignore[union-attr]
                self._memory.calls[call["id"]] = completion.id  # type: ignore[index, call-overload]
        return turn

    def _by_words(self, message: Mapping[str, Any]) -> list[RecordedTurn]:
        """Replies with exactly these words; a tool call whose id was changed is known by its name and arguments."""
        if message.get("tool_calls") or not message["content"]:
            found = self._splicer.everything(self._trajectory)[::-1]
        else:
            found = self._splicer.find(self._trajectory, text=message["content"])
        turns = [self._remember(completion) for completion in found if same_turn(message, completion.message)]
        return [turn for turn in turns if turn is not None]


def _place(
    rendered: Rendered, chosen: Mapping[int, RecordedTurn], trajectory_id: str
) -> tuple[Context, tuple[tuple[int, RecordedTurn, bool], ...]]:
    """The prompt's context, and the recorded turns in order with whether the prompt starts with their prompt and tokens."""
    starts = sorted((start, index) for index, (start, _) in rendered.turns.items())
    *before, whole = contexts(rendered.prompt_ids, [*(start for start, _ in starts), len(rendered.prompt_ids)])
    context_of = {index: context for (_, index), context in zip(starts, before, strict=True)}
    turns = tuple(
        (index, recorded, recorded.trajectory_id == trajectory_id and context_of.get(index) == recorded.turn.context)
        for index, recorded in sorted(chosen.items(), key=lambda pair: pair[0])
    )
    return whole, turns
