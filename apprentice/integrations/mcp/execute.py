"""Candidates are executed twice, each time on fresh sessions, and kept only if both runs went well and came to the same.

Candidates that only read share an environment per run (nothing they do can be seen by another, and that is checked
afterwards); all others have one of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import JsonValue

from ...core.records import JsonObject
from .compose import Candidate
from .environment import McpEnvironment, SessionPool, processors
from .masks import entries_of, masked, volatile_between
from .reply import ToolReply
from .values import canonical, leaves_of, parsed

CALL_SECONDS = 30.0
LONGEST_RESULT = 2_000
"""Characters; longer results are no good for short tasks."""
_NOTHING = re.compile(r"^\W*(?:no|none|nothing|0)\b.{0,40}$|^\W*$", re.IGNORECASE)


@dataclass(slots=True)
class Run:
    replies: list[ToolReply]
    state: JsonObject
    moment: datetime


@dataclass(slots=True)
class Executed:
    """A candidate that ran twice the same way. `volatile`: call by call what moves."""

    candidate: Candidate
    run: Run
    volatile: list[list[str]]
    state: JsonObject | None
    why: str = ""
    """Why it is not kept; "" if it is."""
    notes: list[str] = field(default_factory=list[str])


async def execute(
    pool: SessionPool, candidates: Sequence[Candidate], fresh: JsonObject, *, concurrency: int | None = None
) -> list[Executed]:
    """Both runs of all candidates, in order. Raises only what `pool.environment()` raises."""
    reading = [candidate for candidate in candidates if candidate.reads]
    changing = [candidate for candidate in candidates if not candidate.reads]
    gate = asyncio.Semaphore(concurrency or max(2, processors()))

    async def alone(candidate: Candidate) -> Executed:
        async with gate:
            first = await _one(pool, candidate)
            second = await _one(pool, candidate) if all(reply.ok for reply in first.replies) else None
        return judged(candidate, first, second, fresh)

    shared = await _together(pool, reading, fresh) if reading else []
    again = [item.candidate for item in shared if item.why == "state"]
    done = await asyncio.gather(*map(alone, [*changing, *again]), return_exceptions=True)
    singles: list[Executed] = []
    for item in done:
        if isinstance(item, BaseException):
            raise item
        singles.append(item)
    found = [*(item for item in shared if item.why != "state"), *singles]
    order = {id(candidate): index for index, candidate in enumerate(candidates)}
    return sorted(found, key=lambda item: order[id(item.candidate)])


async def _one(pool: SessionPool, candidate: Candidate) -> Run:
    async with pool.environment() as env:
        return await _run(env, candidate, await_state=True)


async def _run(env: McpEnvironment, candidate: Candidate, *, await_state: bool) -> Run:
    replies: list[ToolReply] = []
    moment = datetime.now(UTC)
    for call in candidate.calls:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                reply = await env.call(call.shape.function, call.arguments)
        except TimeoutError:
            reply = ToolReply(call.shape.tool.server, call.shape.tool.name, call.arguments, "timeout", "", function=call.shape.function)
        replies.append(reply)
        if not reply.ok:
            break
    return Run(replies, await env.state() if await_state else {}, moment)


async def _together(pool: SessionPool, candidates: Sequence[Candidate], fresh: JsonObject) -> list[Executed]:
    runs: list[list[Run]] = []
    clean = True
    for _ in range(2):
        async with pool.environment() as env:
            runs.append([await _run(env, candidate, await_state=False) for candidate in candidates])
            clean = clean and changed_entries(fresh, await env.state(), []) == {}
    found = [judged(candidate, a, b, {}) for candidate, a, b in zip(candidates, *runs, strict=True)]
    if not clean:
        for item in found:
            item.why = item.why or "state"
    return found


def judged(candidate: Candidate, first: Run, second: Run | None, fresh: JsonObject) -> Executed:
    done = Executed(candidate, first, [], None)
    if second is None or not all(reply.ok for reply in (*first.replies, *second.replies)) or len(first.replies) < len(candidate.calls):
        done.why = next(
            (f"{reply.outcome}: {reply.text[:200]}" for reply in (*first.replies, *(second.replies if second else [])) if not reply.ok),
            "failed",
        )
        return done
    for call, a, b in zip(candidate.calls, first.replies, second.replies, strict=True):
        given = [str(leaf) for _, leaf in leaves_of(call.arguments)]
        moves = volatile_between(a.text, b.text, first.moment, given)
        if moves is None or canonical(masked(a.text, moves)) != canonical(masked(b.text, moves)):
            done.why = "the two runs differ"
            return done
        done.volatile.append(moves)
    last = candidate.calls[-1].shape
    if len(first.replies[-1].text) > LONGEST_RESULT or (last.reads and empty(first.replies[-1].text)):
        done.why = "the result is empty or long"
        return done
    if len(candidate.calls) > 1 and last.reads and not last.required and not _shows(first.replies[-1].text, candidate):
        done.why = "the last result shows nothing of what was made"
        return done
    ignored = sorted(changed_entries(first.state, second.state, []))
    changed = changed_entries(fresh, first.state, ignored)
    if changed:
        done.state = {"changed": changed, "rest": digest_of_rest(first.state, [*changed, *ignored]), "ignored": [*ignored]}
    elif not last.reads and first.state and len(candidate.calls) == 1 and not candidate.reads and fresh:
        done.notes.append("changes nothing that can be seen")
    return done


def _shows(text: str, candidate: Candidate) -> bool:
    made = [str(leaf) for call in candidate.calls[:-1] for _, leaf in leaves_of(call.arguments)]
    made += [call.statement.slots["table"] for call in candidate.calls if call.statement is not None]
    return any(value and value in text for value in made)


def empty(text: str) -> bool:
    """Whether a result has nothing in it."""
    value = parsed(text)
    if isinstance(value, str):
        return bool(_NOTHING.fullmatch(value.strip()))
    return all(leaf in ("", None, [], {}) for _, leaf in leaves_of(value))


def changed_entries(before: JsonObject, after: JsonObject, ignored: Sequence[str]) -> dict[str, JsonValue]:
    """Entries of a state that are new or different; None for those that are gone."""
    old, new = entries_of(before), entries_of(after)
    return {key: new.get(key) for key in sorted({*old, *new}) if key not in ignored and old.get(key) != new.get(key)}


def digest_of_rest(state: JsonObject, known: Sequence[str]) -> str:
    rest = {key: value for key, value in entries_of(state).items() if key not in known}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()[:16]
