"""A small training run, as user code would write it; run as a script it is the process that tests kill.

python loop_script.py URL POLICY_NAME RUN_DIR
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from apprentice import Budget, RemoteBackend, Scenario, TrainableModel, TrainingLoop
from apprentice.core.client.loop import Observer
from apprentice.core.client.transport import RetryPolicy

SCENARIOS = [f"task {number}" for number in range(5)]
HELD_OUT = ["held-out 1", "held-out 2"]
WARMUP = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}]


def make_loop(model: TrainableModel, run_dir: Path, *, observer: Observer | None = None, **changes: Any) -> TrainingLoop:
    """Two steps of two groups of three; each rollout makes one call; the reward is the member's number."""

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            body = {"model": model.inference_name, "messages": [{"role": "user", "content": str(scenario.input)}]}
            content = json.dumps(body).encode()
            await model.transport.request("POST", "/v1/chat/completions", content=content, headers=t.headers)
            t.reward = float(t.id.rpartition("-m")[2].partition("-")[0])
        return t

    settings: dict[str, Any] = {
        "budget": Budget(steps=2),
        "eval_scenarios": HELD_OUT,
        "eval_every": 1,
        "group_size": 3,
        "groups_per_step": 2,
        "warmup": WARMUP,
        "progress": False,
        **changes,
    }
    return TrainingLoop(model, rollout, SCENARIOS, run_dir=run_dir, observer=observer, **settings)


async def main(url: str, name: str, run_dir: Path) -> None:
    model = TrainableModel("mail", name, "tiny")
    await model.register(RemoteBackend(url, retry=RetryPolicy(first_seconds=0.01, longest_seconds=0.02)))
    await make_loop(model, run_dir).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
