"""How an N-turn rollout grows: bytes in the ledger and tokens to train, for N = 4, 8, 16, 32.

Every turn sends the whole conversation again, so a recorder that keeps whole prompts and a trainer that runs them grow
with N squared. The ledger stores what is new against the parent, and the forest holds a shared token once. The fitted
slope of log(size) over log(N) is printed for both (1 is linear, 2 quadratic), beside that of the plain rows. A rollout
starts with a 50-token question; a turn is 48 sampled tokens and a 60-token tool result. The goal is below 1.15.

The last line is one JSON object: {"exponent", "exponent_bytes", "exponent_tokens", "exponent_rows"}.
"""

from __future__ import annotations

import json
import math
import random
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

from apprentice.core.records import ChatRequest, Completion, JsonObject, Origin, SamplingParams, Trajectory, new_id
from apprentice.core.server.ledger import Ledger
from apprentice.core.training.forest import Forest, TokenSample

TURNS = (4, 8, 16, 32)
POLICY = "bench/growth"
QUESTION_TOKENS, SAMPLED_TOKENS, RESULT_TOKENS, VOCABULARY = 50, 48, 60, 49_152
WORDS = ("mail", "folder", "sender", "subject", "urgent", "archive", "reply", "draft", "label", "inbox", "thread", "search")


def tool(name: str) -> JsonObject:
    properties: JsonObject = {field: {"type": "string", "description": f"The {field} of the mail."} for field in ("id", "folder")}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def record_rollout(ledger: Ledger, turns: int, rng: random.Random) -> str:
    """One tool-calling rollout as the gateway records it, with lineage; returns its trajectory id."""
    trajectory = ledger.open_trajectory(Trajectory(policy=POLICY))
    tools = tuple(tool(name) for name in ("read_mail", "move_mail", "search_mail"))
    messages: tuple[JsonObject, ...] = ({"role": "system", "content": "You sort mail."}, {"role": "user", "content": words(rng, 20)})
    prompt, parent, lineage = ids(rng, QUESTION_TOKENS), None, dict[int, str]()
    for _ in range(turns):
        call: JsonObject = {"name": "move_mail", "arguments": json.dumps({"id": rng.randrange(10**6), "folder": words(rng, 2)})}
        call_id = new_id("call")
        reply: JsonObject = {
            "role": "assistant",
            "content": words(rng, 20),
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        }
        logprobs = tuple(-rng.expovariate(1.0) for _ in range(SAMPLED_TOKENS))
        completion = Completion.model_validate(
            {
                "trajectory_id": trajectory.id,
                "policy": POLICY,
                "policy_version": 0,
                "prompt_ids": prompt,
                "token_ids": ids(rng, SAMPLED_TOKENS),
                "logprobs": logprobs,
                "sampling_logprobs": logprobs,
                "sampling": SamplingParams(seed=rng.randrange(2**31)),
                "request": ChatRequest(messages=messages, tools=tools),
                "message": reply,
                "finish_reason": "tool_calls",
                "origin": Origin(node="agent", lineage=dict(lineage)),
                "parent": parent,
            }
        )
        ledger.append_completions([completion])
        lineage[len(messages)] = parent = completion.id
        messages = (*messages, reply, {"role": "tool", "tool_call_id": call_id, "content": words(rng, 40)})
        prompt = (*prompt, *completion.token_ids, *ids(rng, RESULT_TOKENS))
    return trajectory.id


def ledger_bytes(turns: int, rollouts: int = 8) -> float:
    """Bytes of used pages per rollout, the empty ledger's taken off; many rollouts, so that the page size averages out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        Ledger.open(path).close()
        empty = used_bytes(path)
        with Ledger.open(path) as ledger:
            for number in range(rollouts):
                record_rollout(ledger, turns, random.Random(number))
        return (used_bytes(path) - empty) / rollouts


def used_bytes(path: Path) -> int:
    connection = sqlite3.connect(path)
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size"))
    connection.close()
    return (pages - free) * size


def trained_tokens(turns: int) -> tuple[int, int]:
    """Tokens that the model runs over for one recorded rollout: as a forest, and as one row per call."""
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "runs.db") as ledger:
        calls = ledger.completions(record_rollout(ledger, turns, random.Random(0)))
    samples = [TokenSample(c.id, c.prompt_ids, c.token_ids, c.logprobs, c.sampling_logprobs, (1.0,) * len(c.token_ids)) for c in calls]
    return Forest.build(samples).tokens, sum(len(call.prompt_ids) + len(call.token_ids) for call in calls)


def exponent(sizes: Sequence[float]) -> float:
    """Least-squares slope of log(size) over log(N)."""
    xs, ys = [math.log(n) for n in TURNS], [math.log(size) for size in sizes]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def main() -> None:
    sizes = [ledger_bytes(turns) for turns in TURNS]
    tokens = [trained_tokens(turns) for turns in TURNS]
    print(f"{'turns':>6} {'ledger bytes':>13} {'a turn':>8} {'forest tokens':>14} {'row tokens':>11}")
    for turns, size, (forest, rows) in zip(TURNS, sizes, tokens, strict=True):
        print(f"{turns:>6} {size:>13,.0f} {size / turns:>8,.0f} {forest:>14,} {rows:>11,}")
    by_bytes, by_tokens, by_rows = exponent(sizes), exponent([f for f, _ in tokens]), exponent([r for _, r in tokens])
    print(f"fitted exponents: ledger bytes {by_bytes:.3f}, forest tokens {by_tokens:.3f} (goal: below 1.15); plain rows {by_rows:.3f}")
    found = {"exponent": max(by_bytes, by_tokens), "exponent_bytes": by_bytes, "exponent_tokens": by_tokens, "exponent_rows": by_rows}
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
