"""A training run whose rollouts write down, on disk, every completion that they were given; tests kill it.

    python -m support.journal_script URL API_KEY BASE_FOLDER RUN_DIR STEPS

Each line of RUN_DIR/journal.jsonl is flushed to the disk before the rollout goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from apprentice import Budget, RemoteBackend, Scenario, TrainableModel, TrainConfig, TrainingLoop
from apprentice.core.client.transport import RetryPolicy
from apprentice.core.config import AdapterConfig

CALLS = 2
GROUPS, SIZE = 2, 3


def note(run_dir: Path, **line: Any) -> None:
    """One line, whole, at the end of the journal, on the disk when this returns."""
    descriptor = os.open(run_dir / "journal.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_loop(model: TrainableModel, run_dir: Path, steps: int) -> TrainingLoop:
    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            messages: list[Any] = [{"role": "user", "content": str(scenario.input)}]
            for turn in range(CALLS):
                body = {"model": model.inference_name, "messages": messages, "max_tokens": 6}
                content = json.dumps(body).encode()
                path = f"/t/{t.id}/v1/chat/completions"
                reply = json.loads(await model.transport.request("POST", path, content=content, idempotent=False))
                choice = reply["choices"][0]
                note(run_dir, trajectory=t.id, turn=turn, completion=choice["provenance_id"])
                messages += [{"role": "assistant", "content": choice["message"]["content"] or ""}, {"role": "user", "content": "and?"}]
            t.reward = float(t.id.rpartition("-m")[2].partition("-")[0])
        return t

    return TrainingLoop(
        model,
        rollout,
        [f"task {number}" for number in range(5)],
        run_dir=run_dir,
        budget=Budget(steps=steps),
        group_size=SIZE,
        groups_per_step=GROUPS,
        config=TrainConfig(learning_rate=1e-3),
        max_failures=0,  # a rollout that a killed server spoilt ends this process; the next one makes it again
        progress=False,
        observer=lambda what, state: note(run_dir, arrow=what, step=state.step),
    )


async def main(url: str, key: str, base: str, run_dir: Path, steps: int) -> None:
    model = TrainableModel("test", "agent", base, AdapterConfig(rank=4))
    await model.register(RemoteBackend(url, key, retry=RetryPolicy(attempts=3, first_seconds=0.01, longest_seconds=0.02)))
    await make_loop(model, run_dir, steps).run()


if __name__ == "__main__":
    url, key, base, run_dir, steps = sys.argv[1:]
    asyncio.run(main(url, key, base, Path(run_dir), int(steps)))
