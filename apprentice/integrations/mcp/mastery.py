"""The mastery run: a model learns to use MCP servers, from nothing but their names.

connect and inspect → scenarios, executed → before → warm-up on the reference runs → GRPO on its own attempts, rewarded by
executing them → held-out evaluation → report. Every stage leaves its result in the run's folder, so the same command goes on
after any interruption:

    <out>/config.json        the settings, written once there are scenarios; another run needs another folder
    <out>/scenarios/         train.jsonl and test.jsonl: plain files, to read, edit and reuse
    <out>/run/               the training loop's state, metrics.jsonl, its own report
    <out>/home/              ledger, checkpoints, the server's log (unless a server's URL was given)
    <out>/adapter/           the best adapter, in plain PEFT format
    <out>/report.json, report.html

The loop, the report and the server are core's; this module only hands them their parts.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat, ValidationError

from ...core.client.backends import Backend, LocalBackend, RemoteBackend
from ...core.client.curriculum import Curriculum
from ...core.client.evaluate import EVALUATION
from ...core.client.loop import LoopResult, TrainingLoop
from ...core.client.model import TrainableModel
from ...core.client.progress import Progress, progress_of
from ...core.client.run_state import Budget, EarlyStop, alone_in
from ...core.client.scope import TrajectoryScope
from ...core.config import SftConfig, TrainConfig
from ...core.errors import ConfigError
from ...core.records import JsonObject, Name, Record, Scenario, TrajectoryGroup
from .agent import SYSTEM, McpAgent, system_messages
from .checks import CheckWeights, demonstration, grade
from .environment import SessionPool
from .explore import ExploreOptions, explore, protect
from .generator import Generator
from .mastery_report import MasteryReport, write_mastery_report
from .scenarios import notes_of, read_scenarios, split, write_scenarios
from .spec import McpServer
from .synthesize import synthesize

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SUCCESS = "success"
"""The rollout metric: 1 if the check was passed whole, else 0."""
Count = Annotated[int, Field(ge=1)]
CONFIG = "config.json"
MANY_TOOLS = 5
FREE = ("steps", "target", "eval_every")
"""Settings that a resumed run may change: how long it goes on."""


DEFAULT_WARMUP = SftConfig(learning_rate=1e-3, batch_size=4)
DEFAULT_TRAINING = TrainConfig(learning_rate=4e-4, steps_per_generation=2)
"""Not `scale_rewards="batch"`: where nearly all succeed, one failure would weigh many times as much and undo what was learned."""


class MasterySettings(Record):
    """What a run does. Saved with it; a resumed run must have the same, except for more `steps`."""

    base_model: str = "smollm2-135m"
    project: Name = "mcp"
    name: Name = "agent"
    system: str = SYSTEM
    scenarios: Annotated[int, Field(ge=4)] = 144
    """Candidates kept for training."""
    held_out: Annotated[int, Field(ge=2)] = 48
    """Scenarios of the evaluation, at most."""
    demonstrations: Annotated[int, Field(ge=0)] = 96
    """Reference runs shown before GRPO; 0: none."""
    epochs: Count | None = None
    """How often they are shown; None: once, twice where they use many tools."""
    steps: Count = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    groups_per_step: Count = 4
    max_turns: Count = 4
    max_tokens: Count = 96
    """Of one reply."""
    eval_temperature: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    target: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """Stop once an evaluation reaches this success."""
    eval_every: Count | None = None
    """GRPO steps between evaluations; None: at the end only."""
    weights: CheckWeights = CheckWeights()
    warmup: SftConfig = DEFAULT_WARMUP
    train: TrainConfig = DEFAULT_TRAINING
    concurrency: Count = 32
    seed: int = 0


async def master(
    servers: Sequence[McpServer],
    settings: MasterySettings,
    out: Path,
    *,
    url: str | None = None,
    generator: Generator | None = None,
    real_data: bool = False,
    progress: bool | Progress = True,
) -> MasteryReport:
    """Run to the end, from the start or from where the last run in `out` stopped.

    `url`: of a running Apprentice server (None: one is started, with its home in `out`). `generator`: a model that invents
    further tasks. `real_data`: tools may change data that are not private to a rollout; else see `explore.protect`.
    Raises ConfigError (also where another run works in `out`), ToolServerError, and what training raises.
    """
    display = progress_of(progress)
    with alone_in(out):
        settings = _resumed(out, settings, servers)
        async with SessionPool(servers) as pool, _backend(out, url) as backend:
            async with pool.environment() as env:
                if not real_data:
                    protect(pool.servers, env.toolset.tools)
                tools, instructions = env.tools, env.instructions
            model = TrainableModel(settings.project, settings.name, base_model=settings.base_model, seed=settings.seed)
            await model.register(backend)  # so early because it may be refused, and making scenarios takes a while
            train, test = await _scenarios(out, pool, settings, generator, real_data, display)
            _keep_settings(out, settings, servers)
            system = "\n\n".join(str(message["content"]) for message in system_messages(settings.system, instructions))
            shown = _shown(train, settings)
            async with model.openai_client() as client:
                loop = TrainingLoop(
                    model,
                    _rollout(model, client, pool, settings),
                    train,
                    eval_scenarios=test,
                    eval_reward=success_only,
                    eval_every=settings.eval_every or settings.steps,
                    warmup=[demonstration(scenario, system, tools) for scenario in shown],
                    warmup_config=settings.warmup.model_copy(update={"epochs": settings.epochs or epochs_for(shown)}),
                    config=settings.train,
                    group_size=settings.group_size,
                    groups_per_step=settings.groups_per_step,
                    budget=Budget(steps=settings.steps),
                    early_stop=EarlyStop(target=settings.target),
                    curriculum=Curriculum(SUCCESS, sort_of, attempts=2),
                    run_dir=out / "run",
                    seed=settings.seed,
                    concurrency=settings.concurrency,
                    progress=display,
                )
                result = await loop.run()
            await _take_adapter(model, result, out / "adapter")
            return await write_mastery_report(out, model, result, servers, settings.model_dump(mode="json"), train, test)


def _rollout(
    model: TrainableModel, client: AsyncOpenAI, pool: SessionPool, settings: MasterySettings
) -> Callable[[Scenario], Awaitable[TrajectoryScope]]:
    """One attempt at a scenario, on fresh sessions, with its reward."""
    agent = McpAgent(client, model.inference_name, system=settings.system, max_turns=settings.max_turns, max_tokens=settings.max_tokens)

    async def rollout(scenario: Scenario) -> TrajectoryScope:
        async with pool.environment() as env, model.trajectory(scenario) as t:
            evaluating = t.metadata.get("purpose") == EVALUATION
            sampling = {"temperature": settings.eval_temperature} if evaluating else {}
            run = await agent.run(str(scenario.input), env, t, **sampling)
            found = await grade(scenario, env, run.replies, run.answer, settings.weights)
            t.reward = found.reward
            t.metrics[SUCCESS] = float(found.success)
            for part, value in found.parts.items():
                t.metrics[f"check/{part}"] = value
        return t

    return rollout


def sort_of(scenario: Scenario) -> str:
    """Scenarios with the same tools in the same order are about as hard."""
    return " ".join(call.tool for call in notes_of(scenario).calls)


def success_only(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Held-out runs are judged without partial credit."""
    return [
        group.model_copy(update={"trajectories": tuple(t.with_reward(t.metrics[SUCCESS]) for t in group.trajectories)}) for group in groups
    ]


async def make_scenarios(
    pool: SessionPool,
    *,
    count: int,
    held_out: int,
    seed: int = 0,
    generator: Generator | None = None,
    real_data: bool = False,
    progress: bool | Progress = True,
) -> tuple[list[Scenario], list[Scenario]]:
    """Explore, synthesize, execute, split: (train, test).

    A server with tools that may change data which are not private to a rollout is refused with ConfigError unless `real_data`:
    a configuration that was written for daily use points at what its owner works with.
    """
    display = progress_of(progress)
    exploration = await explore(pool, ExploreOptions(real_data=real_data), progress=display)
    found = await synthesize(pool, exploration, count=count + held_out, held_out=held_out, seed=seed, generator=generator, progress=display)
    train, test = split(found, held_out=held_out, seed=seed)
    if not train or not test:
        raise ConfigError(
            f"only {len(found)} scenarios could be made and executed on {', '.join(server.name for server in pool.servers)}, too few for "
            "training and a held-out part; allow more tools, give a fixture with data to work on, or write a scenario file"
        )
    return train[:count], test[:held_out]


async def _scenarios(
    out: Path, pool: SessionPool, settings: MasterySettings, generator: Generator | None, real_data: bool, progress: Progress
) -> tuple[list[Scenario], list[Scenario]]:
    """Those in the folder, or new ones, written there. The test file is written last: with it the stage is done."""
    folder = out / "scenarios"
    if not (folder / "test.jsonl").exists():
        train, test = await make_scenarios(
            pool,
            count=settings.scenarios,
            held_out=settings.held_out,
            seed=settings.seed,
            generator=generator,
            real_data=real_data,
            progress=progress,
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_scenarios(folder / "train.jsonl", train)
        write_scenarios(folder / "test.jsonl", test)
    return read_scenarios(folder / "train.jsonl"), read_scenarios(folder / "test.jsonl")


def epochs_for(shown: Sequence[Scenario]) -> int:
    """Passes over the demonstrations: what tells one tool from another is learned later, the more of them there are."""
    return 2 if len({call.tool for scenario in shown for call in notes_of(scenario).calls}) >= MANY_TOOLS else 1


def _shown(train: Sequence[Scenario], settings: MasterySettings) -> list[Scenario]:
    """The scenarios whose reference runs are demonstrated, drawn from all kinds."""
    return random.Random(settings.seed).sample(list(train), min(settings.demonstrations, len(train)))


@asynccontextmanager
async def _backend(out: Path, url: str | None) -> AsyncGenerator[Backend]:
    """The server. If no run began, nothing stays of the home that was made for it: another attempt may be for another model."""
    home, config = out / "home", out / CONFIG
    fresh = not home.exists()
    backend: Backend = RemoteBackend(url) if url else LocalBackend(home)
    try:
        yield backend
    finally:
        await backend.close()
        if fresh and not config.exists():
            shutil.rmtree(home, ignore_errors=True)


def _resumed(out: Path, settings: MasterySettings, servers: Sequence[McpServer]) -> MasterySettings:
    """What the run in `out` has to do; a folder without config.json holds none. ConfigError if that is another one. A resumed run
    has the memory it had, because a train job that was submitted is found again by being equal.
    """
    path = out / CONFIG
    if not path.exists():
        return settings
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        saved = MasterySettings.model_validate(before["settings"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as cause:
        raise ConfigError(
            f"{path} is not the configuration of a mastery run that this version can resume; choose another folder"
        ) from cause
    now, then = _comparable(settings), _comparable(saved)
    changed = sorted(name for name in now if now[name] != then[name])
    if before.get("servers") != [server.public() for server in servers]:
        changed.insert(0, "servers")
    if changed:
        raise ConfigError(
            f"{out} holds a run with other settings ({', '.join(changed)}); give the same ones to resume it, or choose another folder"
        )
    return saved.model_copy(update={name: getattr(settings, name) for name in FREE})


def _keep_settings(out: Path, settings: MasterySettings, servers: Sequence[McpServer]) -> None:
    """Write config.json: from here on the folder holds a run."""
    body: JsonObject = {"servers": [server.public() for server in servers], "settings": settings.model_dump(mode="json")}
    (out / CONFIG).write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _comparable(settings: MasterySettings) -> JsonObject:
    """What makes it the same run: all but how long it goes on, and how much memory it may take."""
    free: Any = dict.fromkeys(FREE, True)
    return settings.model_dump(mode="json", exclude={**free, "warmup": {"activation_memory_gib"}, "train": {"activation_memory_gib"}})


async def _take_adapter(model: TrainableModel, result: LoopResult, target: Path) -> None:
    """Copy the adapter that is worth taking beside the report, if its folder can be seen from here."""
    if result.adapter_step is not None:
        _copy_whole(Path((await model.checkpoint(result.adapter_step)).path), target)


def _copy_whole(source: Path, target: Path) -> None:
    if source.is_dir():
        fresh = target.with_name(target.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(source, fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
