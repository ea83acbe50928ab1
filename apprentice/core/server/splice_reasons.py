"""Why a trajectory branches, in sentences, from its recorded calls alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import BranchReason, ChatRequest, Completion


def explain(completions: Sequence[Completion]) -> dict[str, str]:
    """Completion id → why it does not simply continue the call before, in the order of recording."""
    sentences: dict[str, str] = {}
    for at, completion in enumerate(completions):
        earlier = completions[:at]
        if completion.choice > 0:
            sentences[completion.id] = f"It is choice {completion.choice} of the request {completion.call_id}."
        elif completion.branch is not BranchReason.continues:
            sentences[completion.id] = _sentence(completion, earlier)
    return sentences


def _sentence(completion: Completion, earlier: Sequence[Completion]) -> str:
    twin = next((c for c in earlier if c.prompt_ids == completion.prompt_ids), None)
    last = next((c for c in reversed(earlier) if _agent(c) == _agent(completion)), earlier[-1] if earlier else None)
    match completion.branch:
        case BranchReason.root:
            return "It begins a conversation: no turn of an earlier call is in its prompt."
        case BranchReason.retry:
            return f"It repeats the call of {twin.id}: same caller, same prompt." if twin else "It repeats a call that was never answered."
        case BranchReason.sibling if twin is not None:
            return f"It draws again from the prompt of {twin.id}, for another caller ({_agent(completion)})."
        case BranchReason.sibling:
            return f"It continues {completion.parent}, which another call had continued otherwise before."
        case BranchReason.other_agent:
            return f"Another agent calls: {_agent(completion)}, whose prompt does not begin like that of the calls before."
        case BranchReason.thinking_stripped:
            return "The model's chat template leaves the reasoning of earlier turns out of the prompt."
        case BranchReason.truncation:
            return f"The first messages of the conversation were dropped{_since(completion, last)}."
        case _:
            return f"The conversation was rewritten{_since(completion, last)}."


def _since(completion: Completion, last: Completion | None) -> str:
    if last is None:
        return ""
    return f" since {last.id}: {difference(last.request, completion.request)}"


def _agent(completion: Completion) -> str:
    origin = completion.origin
    return "/".join(part for part in (origin.agent, origin.node, origin.namespace, origin.source) if part) or "an unnamed agent"


def difference(earlier: ChatRequest, later: ChatRequest) -> str:
    """The first thing in which a later request departs from an earlier one."""
    if earlier.tools != later.tools:
        return "the tools differ"
    for at, (old, new) in enumerate(zip(earlier.messages, later.messages, strict=False)):
        if old != new:
            return f"message {at} ({new.get('role')}) reads otherwise"
    if len(later.messages) < len(earlier.messages):
        return f"{len(earlier.messages) - len(later.messages)} messages at the end are gone"
    if len(later.messages) == len(earlier.messages):
        return "only the way of asking differs (tool_choice or response_format)"
    at = len(earlier.messages)
    return f"message {at} ({later.messages[at].get('role')}) is not the reply that was given"
