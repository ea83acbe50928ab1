"""One trajectory as a readable tree: a node per conversation, the turns in it, and why each branch is one.

Calls are numbered in the order in which they were recorded. What agents, tools and models wrote is untrusted: it is shown
with its control characters spelled out, so that it cannot steer a terminal. Knows no HTTP, no models and no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from ..records import BranchReason, Completion, ToolEvent, Trajectory
from .splice_reasons import explain

ROLE_STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def transcript(trajectory: Trajectory, fates: Sequence[str] = ()) -> RenderableType:
    """The trajectory with its messages, branches, rewards and tool outcomes; `fates` are sentences about its train jobs."""
    return _Transcript(trajectory).tree(fates)


class _Transcript:
    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._calls = trajectory.completions
        self._numbers = {completion.id: f"#{at}" for at, completion in enumerate(self._calls, 1)}
        self._by_id = {completion.id: completion for completion in self._calls}
        self._why = explain(self._calls)
        self._following = self._chains()
        self._events: dict[str | None, list[ToolEvent]] = {}
        for event in trajectory.tool_events:
            self._events.setdefault(event.tool_call_id, []).append(event)

    def tree(self, fates: Sequence[str]) -> Tree:
        tree = Tree(self._head(fates), guide_style="dim")
        heads = [completion for completion in self._calls if completion.id not in self._following.values()]
        nodes: dict[str, Tree] = {}
        for head in heads:  # in recorded order, so the parent of a branch has its node already
            above = nodes.get(head.parent or "", tree)
            node = above.add(Text(f"{self._numbers[head.id]}  {self._reason(head)}", style="bold"))
            completion: Completion | None = head
            while completion is not None:
                nodes[completion.id] = node
                self._turn(node, completion)
                completion = self._by_id.get(self._following.get(completion.id, ""))
        for event in (event for events in self._events.values() for event in events):
            tree.add(_outcome(event))
        return tree

    def _chains(self) -> dict[str, str]:
        """Completion id → the one that simply continues it."""
        following: dict[str, str] = {}
        for completion in self._calls:
            plain = completion.branch is BranchReason.continues and completion.choice == 0
            if plain and completion.parent in self._numbers and completion.parent not in following:
                following[completion.parent] = completion.id
        return following

    def _reason(self, head: Completion) -> str:
        sentence = self._why.get(head.id, f"It continues {head.parent}.")
        return re.sub(r"[\w-]+", lambda word: self._numbers.get(word[0], word[0]), sentence)

    def _head(self, fates: Sequence[str]) -> Text:
        shown = self._trajectory
        facts = {"policy": shown.policy, "scenario": shown.scenario_id, "group": shown.group_id}
        lines = [f"{shown.id}  {shown.status.value}, {_reward(shown.reward)}, {len(self._calls)} calls"]
        lines.append("  ".join(f"{name} {value}" for name, value in facts.items() if value))
        if shown.metrics:
            lines.append("  ".join(f"{name} {value:.4g}" for name, value in shown.metrics.items()))
        if shown.metadata:
            lines.append(_json(shown.metadata))
        text = Text(_plain("\n".join(lines)))
        text.stylize("bold", 0, len(shown.id))
        if shown.error:
            text.append(f"\n{_plain(shown.error)}", style="red")
        for fate in fates:
            text.append(f"\n{_plain(fate)}", style="dim")
        return text

    def _turn(self, node: Tree, completion: Completion) -> None:
        known, whose = self._known(completion)
        if known and whose is not None and completion.id not in self._following.values():
            node.add(Text(f"… {known} messages as in {self._numbers[whose]}", style="dim"))
        for message in completion.request.messages[known:]:
            node.add(_message(message))
        node.add(self._reply(completion))
        for call in _tool_calls(completion.message):
            for event in self._events.pop(str(call.get("id")), []):
                node.add(_outcome(event))

    def _known(self, completion: Completion) -> tuple[int, str | None]:
        """How many messages at the start were shown before, and with which call: its parent, else the most alike one before."""
        before = self._calls[: int(self._numbers[completion.id][1:]) - 1]
        candidates: Iterable[Completion] = [one for one in before if one.id == completion.parent] or before
        best, whose = 0, None
        for one in candidates:
            if (shared := _shared(one, completion)) > best:
                best, whose = shared, one.id
        return best, whose

    def _reply(self, completion: Completion) -> Text:
        text = _message(completion.message)
        version = "base model" if completion.policy_version is None else f"step {completion.policy_version}"
        details = [self._numbers[completion.id], version, f"{len(completion.token_ids)} tokens", completion.finish_reason.value]
        reward = self._trajectory.completion_rewards.get(completion.id, completion.reward)
        if reward is not None:
            details.append(_reward(reward))
        if completion.policy != self._trajectory.policy:
            details.append(f"by {completion.policy}")
        text.append(_plain(f"  ({', '.join(details)})"), style="dim")
        if completion.parse_error:
            text.append(f"  {_plain(completion.parse_error)}", style="red")
        return text


def _shared(earlier: Completion, later: Completion) -> int:
    """Messages at the start of `later` that are those of `earlier`, its reply included however the client spelled it."""
    old, new = earlier.request.messages, later.request.messages
    equal = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new)))
    answered = equal == len(old) < len(new) and new[equal].get("role") == "assistant" and later.parent == earlier.id
    return equal + answered


def _message(message: Mapping[str, Any]) -> Text:  # Any: JSON as the caller sent it
    role = str(message.get("role", "?"))
    text = Text()
    text.append(_plain(role), style=ROLE_STYLES.get(role, "bold"))
    if name := message.get("name"):
        text.append(_plain(f" {name}"), style="dim")
    content = message.get("content")
    parts = [_plain(str(message["reasoning_content"]))] if message.get("reasoning_content") else []
    if content:
        parts.append(_plain(content if isinstance(content, str) else _json(content)))
    for part in parts:
        text.append(f" {part}")
    for call in _tool_calls(message):
        function = call.get("function")
        asked = f"{function.get('name')}({function.get('arguments')})" if isinstance(function, dict) else _json(call)
        text.append(_plain(f" → {asked}"), style="yellow")
    return text


def _tool_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:  # Any: JSON as the caller sent it
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list | tuple) else []


def _outcome(event: ToolEvent) -> Text:
    failed = "" if event.outcome == "ok" else f": {event.result}"
    return Text(_plain(f"tool {event.name}: {event.outcome}, {event.seconds:.2f} s{failed}"), style="dim" if not failed else "red")


def _reward(reward: float | None) -> str:
    return "no reward" if reward is None else f"reward {reward:.4g}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(text: str) -> str:
    """The text with whatever a terminal would obey, or could not print, spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
