"""`apprentice mcp …`: inspect a server, make scenarios for it, master it, or stand between it and another client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...core.errors import ConfigError

if TYPE_CHECKING:
    from .mastery_report import MasteryReport, Success
    from .spec import McpServer

app = typer.Typer(help="MCP servers as training grounds.")

# Options of a command, in panels of its help.
server_option = partial(typer.Option, rich_help_panel="Server")
scenario_option = partial(typer.Option, rich_help_panel="Scenarios")
training_option = partial(typer.Option, rich_help_panel="Training")

ServerArgument = Annotated[str, typer.Argument(metavar="SERVER", help="A command, a URL, or FILE.json:NAME.")]
Isolation = Annotated[str | None, server_option(metavar="KIND", help="process, session, or shared (stateless).")]
Fixture = Annotated[Path | None, server_option(metavar="DIR", help="Copied into every rollout's {workdir}.")]
Env = Annotated[list[str] | None, server_option("--env", metavar="K=V", help="For the server; may be repeated.")]
Header = Annotated[list[str] | None, server_option("--header", metavar="K:V", help="For a URL; may be repeated.")]
Bearer = Annotated[str | None, server_option(metavar="VAR", help="Environment variable with a bearer token.")]
Allow = Annotated[list[str] | None, server_option(metavar="GLOB", help="Only these tools; may be repeated.")]
Deny = Annotated[list[str] | None, server_option(metavar="GLOB", help="Not these tools; may be repeated.")]
Connect = Annotated[float | None, server_option("--connect-seconds", metavar="S", help="Until it must answer; default: 120.")]
RealData = Annotated[bool, server_option("--real-data", help="May change data outside of {workdir}.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=999_999)]
GeneratorModel = Annotated[str | None, scenario_option(metavar="MODEL", help="Also invents tasks: a URL or a LiteLLM name.")]


def server_of(
    text: str,
    isolation: str | None,
    fixture: Path | None,
    env: list[str] | None,
    header: list[str] | None,
    bearer: str | None,
    allow: list[str] | None,
    deny: list[str] | None,
    connect: float | None,
) -> McpServer:
    """The server that the command line names."""
    from .spec import parse_server

    options: dict[str, Any] = {}  # Any: fields of McpServer, checked by it
    if isolation is not None:
        options["isolation"] = isolation
    if fixture is not None:
        options["fixture"] = str(fixture)
    if env:
        options["env"] = dict(_pair(item, "=", "--env") for item in env)
    if header:
        options["headers"] = dict(_pair(item, ":", "--header") for item in header)
    if bearer is not None:
        options["bearer_env"] = bearer
    if allow:
        options["allow"] = tuple(allow)
    if deny:
        options["deny"] = tuple(deny)
    if connect is not None:
        options["connect_seconds"] = connect
    return parse_server(text, **options)


def _pair(item: str, mark: str, option: str) -> tuple[str, str]:
    name, found, value = item.partition(mark)
    if not found or not name.strip():
        raise ConfigError(f"{option} wants NAME{mark}VALUE, got {item!r}", param=option)
    return name.strip(), value.strip()


@contextmanager
def checked_options() -> Generator[None]:
    """What a settings record says against an option is a sentence that names the option."""
    try:
        yield
    except ValidationError as cause:
        first = cause.errors(include_url=False)[0]
        option = "--" + "-".join(map(str, first["loc"])).replace("_", "-")
        raise ConfigError(f"{option}: {first['msg']}, got {first['input']!r}", param=option) from cause


@app.command()
def inspect(
    server: ServerArgument,
    isolation: Isolation = None,
    fixture: Fixture = None,
    env: Env = None,
    header: Header = None,
    bearer_env: Bearer = None,
    allow: Allow = None,
    deny: Deny = None,
    connect_seconds: Connect = None,
) -> None:
    """Connect once: tools, what they cost in tokens, oddities, repairs, and how to isolate rollouts."""
    from .inspect import inspect_server, show_inspection

    spec = server_of(server, isolation, fixture, env, header, bearer_env, allow, deny, connect_seconds)
    Console().print(show_inspection(asyncio.run(inspect_server(spec, progress=True))))


@app.command()
def scenarios(
    server: ServerArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For both files.")] = Path("scenarios"),
    count: Annotated[int, scenario_option(metavar="N", min=4, help="To train on.")] = 144,
    held_out: Annotated[int, scenario_option(metavar="N", min=2, help="To evaluate on.")] = 48,
    generator: GeneratorModel = None,
    seed: Seed = 0,
    real_data: RealData = False,
    isolation: Isolation = None,
    fixture: Fixture = None,
    env: Env = None,
    header: Header = None,
    bearer_env: Bearer = None,
    allow: Allow = None,
    deny: Deny = None,
    connect_seconds: Connect = None,
) -> None:
    """Make scenarios and keep those that ran twice with the same result."""
    from .environment import SessionPool
    from .generator import generator_of
    from .mastery import make_scenarios
    from .scenarios import write_scenarios

    spec = server_of(server, isolation, fixture, env, header, bearer_env, allow, deny, connect_seconds)
    invent = generator_of(generator) if generator else None

    async def work() -> tuple[int, int]:
        async with SessionPool([spec]) as pool:
            train, test = await make_scenarios(pool, count=count, held_out=held_out, seed=seed, generator=invent, real_data=real_data)
        out.mkdir(parents=True, exist_ok=True)
        write_scenarios(out / "train.jsonl", train)
        write_scenarios(out / "test.jsonl", test)
        return len(train), len(test)

    made = asyncio.run(work())
    print(f"{made[0]} scenarios in {out / 'train.jsonl'}, {made[1]} held out in {out / 'test.jsonl'}")
    say_if_fewer(made, (count, held_out))


def say_if_fewer(made: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Say why, if there are not as many scenarios (to train on, held out) as were asked for."""
    if made[0] < wanted[0] or made[1] < wanted[1]:
        print(
            f"Fewer than the {wanted[0]} and {wanted[1]} that were asked for: no more different tasks were found that ran twice with the "
            "same result. More come from a fixture with data, from more tools, or from a --generator."
        )


@app.command()
def master(
    server: ServerArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The same folder resumes.")] = Path("mastery"),
    url: Annotated[str | None, typer.Option(metavar="URL", help="Of an Apprentice server; default: start one.")] = None,
    seed: Seed = 0,
    scenario_count: Annotated[int, scenario_option("--scenarios", metavar="N", min=4, help="To train on.")] = 144,
    held_out: Annotated[int, scenario_option(metavar="N", min=2, help="To evaluate on.")] = 48,
    generator: GeneratorModel = None,
    base_model: Annotated[str, training_option(metavar="NAME")] = "smollm2-135m",
    demonstrations: Annotated[int, training_option(metavar="N", min=0, help="Reference runs shown first.")] = 96,
    epochs: Annotated[int | None, training_option(metavar="N", min=1, help="Default: 1; 2 for five tools or more.")] = None,
    batch_size: Annotated[int, training_option(metavar="N", min=1, help="Demonstrations at a time.")] = 4,
    steps: Annotated[int, training_option(metavar="N", min=1, help="Of GRPO.")] = 8,
    group_size: Annotated[int, training_option(metavar="N", min=2, help="Attempts at a scenario.")] = 8,
    groups_per_step: Annotated[int, training_option(metavar="N", min=1, help="Scenarios in a step.")] = 4,
    learning_rate: Annotated[float, training_option(metavar="X", min=0, help="Of GRPO.")] = 4e-4,
    target: Annotated[float | None, training_option(metavar="SHARE", help="Stop at this success.")] = None,
    memory_gib: Annotated[float | None, training_option(metavar="GIB", help="For activations; more is faster.")] = None,
    real_data: RealData = False,
    isolation: Isolation = None,
    fixture: Fixture = None,
    env: Env = None,
    header: Header = None,
    bearer_env: Bearer = None,
    allow: Allow = None,
    deny: Deny = None,
    connect_seconds: Connect = None,
) -> None:
    """Train a model until it uses the server well. No data, no labels, no key. The same command resumes."""
    from ...core.client.model import configured
    from .generator import generator_of
    from .mastery import DEFAULT_TRAINING, DEFAULT_WARMUP, MasterySettings
    from .mastery import master as run_master

    spec = server_of(server, isolation, fixture, env, header, bearer_env, allow, deny, connect_seconds)
    memory = spare_memory_gib() if memory_gib is None and url is None else memory_gib
    with checked_options():
        settings = MasterySettings(
            base_model=base_model,
            steps=steps,
            scenarios=scenario_count,
            held_out=held_out,
            demonstrations=demonstrations,
            epochs=epochs,
            group_size=group_size,
            groups_per_step=groups_per_step,
            target=target,
            seed=seed,
            name=spec.name,
            warmup=configured(DEFAULT_WARMUP, {"batch_size": batch_size, "activation_memory_gib": memory}),
            train=configured(DEFAULT_TRAINING, {"learning_rate": learning_rate, "activation_memory_gib": memory}),
        )
    invent = generator_of(generator) if generator else None
    report = asyncio.run(run_master([spec], settings, out, url=url, generator=invent, real_data=real_data))
    show_report(report, out)
    say_if_fewer((report.train_scenarios, report.test_scenarios), (scenario_count, held_out))
    if not report.gained:
        raise typer.Exit(1)


def spare_memory_gib() -> float | None:
    """What training may take for speed on this machine: a quarter of what is free, if that is plenty; None leaves the default."""
    import psutil

    quarter = psutil.virtual_memory().available / 2**30 / 4
    return float(min(round(quarter), 6)) if quarter >= 1.5 else None


def show_report(report: MasteryReport, out: Path) -> None:
    """The table at the end."""
    console = Console()
    table = Table(
        "held-out success", "mean", "95 % interval", "tasks", title=f"{escape(report.base_model)} learns {', '.join(report.servers)}"
    )
    rows: list[tuple[str, Success | None]] = [
        ("before", report.before),
        ("after the warm-up", report.warmup),
        ("after GRPO", report.after),
    ]
    for name, found in rows:
        if found is not None:
            table.add_row(name, f"{found.success:.0%}", f"{found.ci95[0]:.0%} to {found.ci95[1]:.0%}", str(found.n))
    console.print(table)
    tools = Table("tool", *(["before", "after"]))
    for tool, row in report.per_tool.items():
        tools.add_row(
            escape(tool), *(f"{row[name].success:.0%} (n = {row[name].n})" if name in row else "" for name in ("before", "after"))
        )
    console.print(tools)
    origin = f" ({report.adapter_origin})" if report.adapter_origin else ""
    console.print(f"The adapter{origin}, in plain PEFT format: {escape(report.adapter or 'on the server')}", soft_wrap=True)
    console.print(f"The report, with curves and transcripts: {escape(str(out / 'report.html'))}", soft_wrap=True)
    console.print("The gain is significant." if report.gained else "No significant gain: the intervals before and after overlap.")


@app.command()
def proxy(
    server: ServerArgument,
    port: Annotated[int | None, typer.Option(metavar="N", min=0, max=65535, help="Serve HTTP on loopback; default: stdio.")] = None,
    isolation: Isolation = None,
    fixture: Fixture = None,
    env: Env = None,
    header: Header = None,
    bearer_env: Bearer = None,
    allow: Allow = None,
    deny: Deny = None,
    connect_seconds: Connect = None,
) -> None:
    """Be that server to any MCP host, and record every tool call.

    APPRENTICE_URL: of a running server. APPRENTICE_POLICY: a model registered
    there; each session opens a trajectory of it. Or APPRENTICE_TRAJECTORY: the
    id of one that is open.
    """
    from .proxy import run_proxy

    spec = server_of(server, isolation, fixture, env, header, bearer_env, allow, deny, connect_seconds)
    asyncio.run(run_proxy(spec, port=port, environment=dict(os.environ)))
