"""Completions made by hand for the tests of the ledger and of the export."""

from __future__ import annotations

from typing import Any

from apprentice.core.records import ChatRequest, Completion, FinishReason, SamplingParams, Trajectory
from apprentice.core.server.ledger import Ledger

POLICY = "mail/agent-001"


def opened(ledger: Ledger, **fields: Any) -> str:
    """The id of a new trajectory."""
    return ledger.open_trajectory(Trajectory(policy=POLICY, **fields)).id


def reread(ledger: Ledger) -> Ledger:
    """A reader of the same file that has nothing in memory."""
    return Ledger.open(ledger.path, read_only=True)


def completion(
    trajectory_id: str | None, prompt: tuple[int, ...] = (1, 2, 3), drawn: tuple[int, ...] = (7, 8), **fields: Any
) -> Completion:
    logprobs = tuple(-0.1 * (n + 1) for n in range(len(drawn)))
    defaults: dict[str, Any] = {
        "policy": POLICY,
        "policy_version": 0,
        "logprobs": logprobs,
        "sampling_logprobs": logprobs,
        "sampling": SamplingParams(),
        "request": ChatRequest(messages=({"role": "user", "content": "hello"},)),
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": FinishReason.stop,
    }
    return Completion(trajectory_id=trajectory_id, prompt_ids=prompt, token_ids=drawn, **{**defaults, **fields})


def conversation(trajectory_id: str | None, turns: int, **fields: Any) -> list[Completion]:
    """A tool-calling rollout: each turn's prompt is the one before, what was drawn, and a tool result."""
    made: list[Completion] = []
    prompt: tuple[int, ...] = tuple(range(100, 160))
    messages: tuple[Any, ...] = ({"role": "system", "content": "You sort mail."}, {"role": "user", "content": "Sort it."})
    tools = ({"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}},)
    for turn in range(turns):
        drawn = tuple(range(1000 + 10 * turn, 1008 + 10 * turn))
        call = {"id": f"call-{trajectory_id}-{turn}", "type": "function", "function": {"name": "move", "arguments": f'{{"to": {turn}}}'}}
        reply: dict[str, Any] = {"role": "assistant", "content": f"turn {turn}", "tool_calls": [call]}
        parent = made[-1].id if made else None
        made.append(
            completion(
                trajectory_id,
                prompt,
                drawn,
                **{"parent": parent, "request": ChatRequest(messages=messages, tools=tools), "message": reply, **fields},
            )
        )
        prompt = (*prompt, *drawn, *range(2000 + turn, 2012 + turn))
        messages = (*messages, reply, {"role": "tool", "tool_call_id": call["id"], "content": f"moved to {turn}"})
    return made


def recorded(ledger: Ledger, turns: int = 3, **fields: Any) -> list[Completion]:
    """A conversation recorded in a new trajectory of `ledger`, one append per turn."""
    trajectory = ledger.open_trajectory(Trajectory(policy=POLICY))
    made = conversation(trajectory.id, turns, **fields)
    for one in made:
        ledger.append_completions([one])
    return made
