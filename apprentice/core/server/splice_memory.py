"""What the splicer remembers of one open trajectory, so that a turn costs the ledger one look-up and not one per call.

Everything here can be rebuilt from the ledger, except which prompts were issued and never answered. Knows no templates.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from ..records import BranchReason, Origin
from .chat import SampledTurn
from .text_ids import Context


class Agent(NamedTuple):
    """Who calls, as far as a row of a conversation goes."""

    agent: str | None
    node: str | None
    namespace: str | None
    source: str | None

    @classmethod
    def of(cls, origin: Origin) -> Agent:
        return cls(origin.agent, origin.node, origin.namespace, origin.source)

    @property
    def named(self) -> bool:
        return any(part is not None for part in self)

    def __str__(self) -> str:
        return "/".join(part for part in self if part) or "an unnamed agent"


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A reply of the ledger, ready to re-enter a prompt."""

    completion_id: str
    trajectory_id: str | None
    agent: Agent
    message: Mapping[str, Any]
    turn: SampledTurn


@dataclass(frozen=True, slots=True)
class Trace:
    """The messages of a request by digest: the system messages apart, because they are what truncation leaves alone."""

    system: bytes
    rest: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], digests: Sequence[bytes] | None = None) -> Trace:
        digests = [digest(message) for message in messages] if digests is None else digests
        paired = list(zip(messages, digests, strict=True))
        system = b"".join(found for message, found in paired if message["role"] == "system")
        return cls(system, tuple(found for message, found in paired if message["role"] != "system"))

    def drops_front_of(self, earlier: Trace) -> bool:
        """Whether this is the earlier conversation (and perhaps more) without its first messages."""
        for start in range(1, len(earlier.rest)):
            kept = earlier.rest[start:]
            if self.rest[: len(kept)] == kept:
                return True
        return False


def digest(message: Mapping[str, Any]) -> bytes:
    return blake2b(json.dumps(message, sort_keys=True).encode(), digest_size=16).digest()


def chained(digests: Sequence[bytes]) -> list[bytes]:
    """For every message a digest of the conversation up to and with it."""
    chain = blake2b(digest_size=16)
    found: list[bytes] = []
    for part in digests:
        chain.update(part)
        found.append(chain.copy().digest())
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a call when its prompt is ready."""

    agent: Agent
    context: Context
    """Of the whole prompt."""
    trace: Trace
    turns: tuple[tuple[int, RecordedTurn, bool], ...]
    """(message index, recorded turn, whether the prompt up to and with it is exactly that completion's prompt and tokens)."""
    edited: tuple[int, ...] = ()
    """Assistant messages that come from a completion and say something else."""
    strangers: int = 0
    """Assistant messages that nobody sampled here."""
    stripped: bool = False
    """The template left out the reasoning of a turn."""


@dataclass(slots=True)
class TrajectoryMemory:
    """Guarded by `lock`, which is held for look-ups and notes only, never while rendering."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    turns: dict[str, RecordedTurn | None] = field(default_factory=dict[str, "RecordedTurn | None"])
    """By completion id; None: its ids cannot be used here."""
    calls: dict[str, str] = field(default_factory=dict[str, str])
    """Tool call id → completion id."""
    places: dict[bytes, tuple[str, ...]] = field(default_factory=dict[bytes, "tuple[str, ...]"])
    """Digest of a conversation that ends in an assistant message → the completions it may come from; empty: nobody's."""
    issued: dict[Context, list[Agent]] = field(default_factory=dict[Context, "list[Agent]"])
    children: dict[str, Context] = field(default_factory=dict[str, Context])
    """Completion id → the first prompt that continued it."""
    latest: dict[Agent, Trace] = field(default_factory=dict["Agent", Trace])

    def judge(self, seen: Seen) -> tuple[str | None, BranchReason]:
        """Parent and branch of a call, noted so that later calls can be compared with it."""
        with self.lock:
            at, parent = max(((index, turn) for index, turn, whole in seen.turns if whole), default=(-1, None), key=lambda pair: pair[0])
            parent_id = parent.completion_id if parent is not None else None
            reason = self._reason(seen, at, parent_id)
            self.issued.setdefault(seen.context, []).append(seen.agent)
            if parent_id is not None:
                self.children.setdefault(parent_id, seen.context)
            self.latest[seen.agent] = seen.trace
            return parent_id, reason

    def _reason(self, seen: Seen, at: int, parent: str | None) -> BranchReason:
        before = self.issued.get(seen.context)
        if before is not None:
            return BranchReason.retry if seen.agent in before else BranchReason.sibling
        later_own = any(index > at and turn.agent == seen.agent for index, turn, _ in seen.turns)
        edited = any(index > at for index in seen.edited)
        if parent is not None and not later_own and not edited:
            return BranchReason.continues if parent not in self.children else BranchReason.sibling
        if seen.stripped:
            return BranchReason.thinking_stripped
        if not self.latest:
            return BranchReason.root
        last = seen.turns[-1][1] if seen.turns else None
        own_before = seen.agent in self.latest
        if (last is not None and last.agent != seen.agent) or (seen.agent.named and not own_before):
            return BranchReason.other_agent
        if any(seen.trace.drops_front_of(trace) for trace in self.latest.values()):
            return BranchReason.truncation
        return BranchReason.history_rewritten if seen.turns or seen.edited or seen.strangers else self._fresh(seen)

    def _fresh(self, seen: Seen) -> BranchReason:
        """A conversation without assistant turns: a new one, unless it opens like an earlier one of the same agent."""
        earlier = self.latest.get(seen.agent)
        alike = earlier is not None and bool(earlier.rest) and earlier.rest[:1] == seen.trace.rest[:1]
        return BranchReason.history_rewritten if alike else BranchReason.root
