"""A small model learns a job: an ordinary OpenAI-client agent that answers date questions with three Python tools.

Nothing in the agent below knows about training: it is the tool loop that anyone would write. SmolLM2-135M cannot do the
job at first. It is shown a few demonstrations (warm-up), then improves by GRPO on its own attempts; the reward comes
from executing the tools, without labels, keys or accounts. Held-out questions use dates, numbers and wordings that
training never shows.

    python examples/calendar_agent.py [--home DIR] [--steps N]

Running it again with the same --home goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from apprentice import (
    Budget,
    Demonstration,
    LocalBackend,
    LoopResult,
    Scenario,
    SftConfig,
    TrainableModel,
    TrainConfig,
    TrainingLoop,
    TrajectoryGroup,
    TrajectoryScope,
)

# The agent's tools: plain Python.


def add_days(date: str, days: int) -> str:
    """The date some days after a date; a negative number goes back."""
    return (_parse(date) + timedelta(days=days)).isoformat()


def days_between(start: str, end: str) -> str:
    """How many days lie between two dates."""
    return str((_parse(end) - _parse(start)).days)


def weekday(date: str) -> str:
    """The day of the week of a date."""
    return _parse(date).strftime("%A")


def _parse(text: str) -> date:
    return date.fromisoformat(text)


TOOLS: dict[str, Callable[..., str]] = {"add_days": add_days, "days_between": days_between, "weekday": weekday}
DATE, NUMBER = {"type": "string"}, {"type": "integer"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "add_days": {"date": DATE, "days": NUMBER},
    "days_between": {"start": DATE, "end": DATE},
    "weekday": {"date": DATE},
}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.__doc__,
            "parameters": {"type": "object", "properties": PARAMETERS[name], "required": list(PARAMETERS[name])},
        },
    }
    for name, tool in TOOLS.items()
]
SYSTEM = "You answer questions about dates. Use the tools."
MAX_TURNS = 3


def call_tool(name: str, arguments: str) -> tuple[str, bool]:
    """What the agent is told, and whether the call worked."""
    try:
        return TOOLS[name](**json.loads(arguments)), True
    except KeyError:
        return f"error: there is no tool {name}", False
    except (TypeError, ValueError, OverflowError) as error:
        return f"error: {error}", False


async def agent(client: Any, model: str, question: str) -> tuple[str, list[tuple[str, str]]]:
    """The ordinary tool loop. Returns the final answer and the (tool, result) pairs of the calls that worked."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    worked: list[tuple[str, str]] = []
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=SCHEMAS, max_tokens=64)
        message = reply.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            return message.content or "", worked
        for call in message.tool_calls:
            result, ok = call_tool(call.function.name, call.function.arguments)
            if ok:
                worked.append((call.function.name, result))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "", worked


# The questions. `metadata` says which call answers one; its result is computed by running it.

WORDINGS: dict[str, dict[str, list[str]]] = {
    "train": {
        "after": ["What date is {days} days after {date}?", "It is {date}. Which date will it be in {days} days?"],
        "before": ["What date is {days} days before {date}?", "It is {date}. Which date was it {days} days ago?"],
        "between": ["How many days are there from {start} to {end}?", "How many days lie between {start} and {end}?"],
        "weekday": ["What day of the week is {date}?", "Which weekday was {date}?"],
    },
    "test": {
        "after": ["Tell me the date {days} days after {date}."],
        "before": ["Tell me the date {days} days before {date}."],
        "between": ["Count the days from {start} to {end}."],
        "weekday": ["On which day of the week does {date} fall?"],
    },
}


def make_scenarios(split: str, count: int, seed: int) -> list[Scenario]:
    """Training dates lie in 2020-2025 and training steps are even; held-out dates in 2026-2029, steps odd."""
    chance = random.Random(seed)
    kinds = list(WORDINGS[split])
    scenarios: list[Scenario] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        start = date(2020, 1, 1) + timedelta(days=chance.randrange(2190)) if split == "train" else date(2026, 1, 1)
        if split == "test":
            start += timedelta(days=chance.randrange(1400))
        days = 2 * chance.randrange(1, 45) + (split == "test")
        end = start + timedelta(days=days)
        arguments: dict[str, Any]
        if kind == "between":
            tool, arguments = "days_between", {"start": start.isoformat(), "end": end.isoformat()}
        elif kind == "weekday":
            tool, arguments = "weekday", {"date": start.isoformat()}
        else:
            tool, arguments = "add_days", {"date": start.isoformat(), "days": days if kind == "after" else -days}
        wording = chance.choice(WORDINGS[split][kind])
        question = wording.format(date=start, start=start, end=end, days=days)
        expected = TOOLS[tool](**arguments)
        metadata = {"tool": tool, "arguments": arguments, "expected": expected}
        scenarios.append(Scenario(id=f"{split}-{seed}-{number:03d}-{kind}", input=question, metadata=metadata))
    return scenarios


def demonstration(scenario: Scenario) -> Demonstration:
    """How the job is done right: one call, then the answer."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": scenario.metadata["tool"], "arguments": json.dumps(scenario.metadata["arguments"])},
    }
    return Demonstration.model_validate(
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": scenario.input},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": scenario.metadata["expected"]},
                {"role": "assistant", "content": f"The answer is {scenario.metadata['expected']}."},
            ],
            "tools": SCHEMAS,
        }
    )


def grade(scenario: Scenario, answer: str, worked: list[tuple[str, str]]) -> tuple[float, bool]:
    """The executed check: 0.2 for a call that works, 0.2 for the right tool, 0.3 for the right result, 0.3 for saying it."""
    tool, expected = scenario.metadata["tool"], str(scenario.metadata["expected"])
    right_result = (tool, expected) in worked
    told = right_result and expected in answer
    reward = 0.2 * bool(worked) + 0.2 * any(name == tool for name, _ in worked) + 0.3 * right_result + 0.3 * told
    return reward, told


def success_only(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Held-out runs are judged without the partial credit: 1 if the right call was made and its result told, else 0."""
    return [
        group.model_copy(update={"trajectories": tuple(t.with_reward(t.metrics["success"]) for t in group.trajectories)})
        for group in groups
    ]


async def learn(home: Path, base_model: str, steps: int, demonstrations: int, held_out: int) -> tuple[LoopResult, str]:
    model = TrainableModel("demo", "calendar", base_model=base_model)
    async with LocalBackend(home) as backend:
        await model.register(backend)
        client = model.openai_client()

        async def rollout(scenario: Scenario) -> TrajectoryScope:
            async with model.trajectory(scenario) as t:
                answer, worked = await agent(client, model.inference_name, str(scenario.input))
                t.reward, success = grade(scenario, answer, worked)
                t.metrics["success"] = float(success)
            return t

        loop = TrainingLoop(
            model,
            rollout,
            make_scenarios("train", 64, seed=1),
            eval_scenarios=make_scenarios("test", held_out, seed=2),
            eval_reward=success_only,
            eval_every=steps,
            warmup=[demonstration(scenario) for scenario in make_scenarios("train", demonstrations, seed=3)],
            warmup_config=SftConfig(learning_rate=1e-3, batch_size=8),
            config=TrainConfig(learning_rate=2e-4),
            group_size=8,
            groups_per_step=4,
            budget=Budget(steps=steps),
            run_dir=home / "run",
        )
        result = await loop.run()
        checkpoint = await model.checkpoint(result.policy_step)
        await client.close()
    return result, checkpoint.path


def show(result: LoopResult, adapter: str) -> bool:
    """The table at the end; True if the intervals before and after do not overlap."""
    names = ["before", "after the warm-up", "after GRPO"]
    table = Table("held-out success", "mean", "95 % interval", "questions", title="A small model learns to use three tools")
    for name, point in zip(names, result.evaluations, strict=False):
        found = point.evaluation
        table.add_row(name, f"{found.mean:.0%}", f"{found.ci95[0]:.0%} to {found.ci95[1]:.0%}", str(found.n))
    console = Console()
    console.print(table)
    console.print(f"The adapter, in plain PEFT format: {adapter}\nThe report, with curves and transcripts: {result.report}", soft_wrap=True)
    first, last = result.evaluations[0].evaluation, result.evaluations[-1].evaluation
    apart = last.ci95[0] > first.ci95[1]
    console.print("The gain is significant." if apart else "No significant gain: the intervals before and after overlap.")
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path(".apprentice/demo"), help="ledger, checkpoints and report")
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=5, help="GRPO steps")
    parser.add_argument("--demonstrations", type=int, default=64, help="for the warm-up, eight a step")
    parser.add_argument("--held-out", type=int, default=48, help="questions of the evaluation")
    args = parser.parse_args()
    result, adapter = asyncio.run(learn(args.home, args.base_model, args.steps, args.demonstrations, args.held_out))
    sys.exit(0 if show(result, adapter) else 1)


if __name__ == "__main__":
    main()
