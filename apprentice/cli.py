"""The command `apprentice`: one thin function per command. Errors are one sentence on stderr and exit code 2."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

from .core.errors import ApprenticeError

try:
    import typer
except ImportError:  # the thin client is installed alone
    print("error: the command needs typer and rich: pip install 'apprentice-rl[server]'", file=sys.stderr)
    raise SystemExit(2) from None

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Trains LLM agents on the job.",
    pretty_exceptions_enable=False,
)
runs = typer.Typer(no_args_is_help=True, help="What is recorded in a home: policies, train jobs, trajectories.")
checkpoints = typer.Typer(no_args_is_help=True, help="List, pin and delete published checkpoints of a home.")
app.add_typer(runs, name="runs")
app.add_typer(checkpoints, name="checkpoints")

Home = Annotated[Path, typer.Option(help="Folder with the ledger and the checkpoints.")]
DEFAULT_HOME = Path(".apprentice")


def main() -> None:
    """Entry point. Expected errors never show a traceback."""
    try:
        app()
    except ApprenticeError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@app.command()
def serve(
    home: Home = DEFAULT_HOME,
    host: Annotated[str, typer.Option(help="Address to bind; any but loopback needs APPRENTICE_API_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 7474,
    base_model: Annotated[list[str] | None, typer.Option(help="Load this base model before the server is ready; may be repeated.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: float32 on CPU, bfloat16 on a GPU.")] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(min=256, help="Bound of the KV cache, in tokens.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch; default: all cores.")] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
    ready_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the GRPO server: OpenAI's API in front of trainable models. The API key comes from APPRENTICE_API_KEY."""
    from .core.client.lifeline import announce_ready, end_with_parent

    if parent_pid is not None:
        end_with_parent(parent_pid)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost other processes up to ten times their speed
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _need("torch", "fastapi", "uvicorn", "transformers", "peft")
    import torch

    from .core.server.bases import EngineOptions
    from .core.server.serve import ServerOptions, run_server

    if threads is not None:
        torch.set_num_threads(threads)
    _log_to_stderr()
    engine = EngineOptions(dtype=dtype, device=device, kv_cache_tokens=kv_cache_tokens)
    key = os.environ.pop("APPRENTICE_API_KEY", None)
    options = ServerOptions(home=home, host=host, port=port, api_key=key, base_models=tuple(base_model or ()), engine=engine)

    def ready(bound: int) -> None:
        url = f"http://{host if ':' not in host else f'[{host}]'}:{bound}"
        if ready_file is not None:
            announce_ready(ready_file, url)
        print(
            f"Apprentice serves {url}/v1 (home {home}, key {'required' if key else 'not required on this machine'}). Ctrl-C stops it.",
            flush=True,
        )

    asyncio.run(run_server(options, ready))


@app.command()
def doctor() -> None:
    """Versions, hardware, what will be used, and what is missing with the command that installs it. Exit code 1 if something is."""
    from rich.console import Console
    from rich.table import Table

    from .core.doctor import examine

    findings = examine()
    table = Table("", "what", "found", "to do")
    for finding in findings:
        table.add_row("[green]ok[/]" if finding.ok else "[red]missing[/]", finding.name, finding.value, finding.note)
    Console().print(table)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(1)


@runs.command("list")
def runs_list(home: Home = DEFAULT_HOME) -> None:
    """One row for each policy: step, trajectories, rewards, train jobs."""
    from .core.server.runs import policies_table

    _print(policies_table, home)


@runs.command("show")
def runs_show(
    name: Annotated[str, typer.Argument(help="A policy (project/name) or the id of a trajectory.")], home: Home = DEFAULT_HOME
) -> None:
    """The train jobs of a policy, or one trajectory as a readable transcript."""
    from .core.server.runs import show

    _print(lambda ledger: show(ledger, name), home)


@runs.command("export")
def runs_export(
    out: Annotated[Path, typer.Argument(help="File to write; .parquet or .jsonl.")],
    home: Home = DEFAULT_HOME,
    policy: Annotated[str | None, typer.Option(help="Only this policy (project/name).")] = None,
) -> None:
    """Write every completion with its token ids, log-probabilities and rewards to Parquet or JSONL."""
    from .core.server.export import export_runs

    written = _with_ledger(home, lambda ledger: export_runs(ledger, out, policy=policy))
    print(f"{written} completions written to {out}")


@checkpoints.command("list")
def checkpoints_list(
    policy: Annotated[str | None, typer.Argument(help="project/name; default: all.")] = None, home: Home = DEFAULT_HOME
) -> None:
    """Published checkpoints: step, metrics, folder of the adapter in plain PEFT format."""
    from .core.server.runs import checkpoints_table

    _print(lambda ledger: checkpoints_table(ledger, home, policy), home)


@checkpoints.command("pin")
def checkpoints_pin(checkpoint: Annotated[str, typer.Argument(help="project/name@step")], home: Home = DEFAULT_HOME) -> None:
    """Keep a checkpoint for ever."""
    _change_checkpoint(home, checkpoint, lambda view, policy, step: view.pin(policy, step, True), "pinned")


@checkpoints.command("unpin")
def checkpoints_unpin(checkpoint: Annotated[str, typer.Argument(help="project/name@step")], home: Home = DEFAULT_HOME) -> None:
    """Let retention treat a checkpoint like the others again."""
    _change_checkpoint(home, checkpoint, lambda view, policy, step: view.pin(policy, step, False), "unpinned")


@checkpoints.command("delete")
def checkpoints_delete(checkpoint: Annotated[str, typer.Argument(help="project/name@step")], home: Home = DEFAULT_HOME) -> None:
    """Delete a checkpoint that is neither pinned nor the latest."""
    _change_checkpoint(home, checkpoint, lambda view, policy, step: view.delete(policy, step), "deleted")


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="project/name, or project/name@step for one version.")],
    rollout: Annotated[str, typer.Option(help="module:function; called as rollout(model, scenario), returns the trajectory.")],
    scenarios: Annotated[Path, typer.Option(help="JSONL file; each line a scenario or any JSON value as its input.")],
    url: Annotated[str | None, typer.Option(help="A running server (key from APPRENTICE_API_KEY); default: start one on --home.")] = None,
    home: Home = DEFAULT_HOME,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts per scenario.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1)] = 32,
    out: Annotated[Path | None, typer.Option(help="Write the evaluation as JSON.")] = None,
) -> None:
    """Mean reward of a rollout function over scenarios, with a 95 % interval. Nothing is trained."""
    from .core.client.eval_command import run_evaluation

    found = asyncio.run(run_evaluation(model, rollout, scenarios, url=url, home=home, repeats=repeats, concurrency=concurrency))
    if out is not None:
        out.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    print(f"{model}: {found}")


def _need(*modules: str) -> None:
    import importlib.util

    from .core.doctor import SERVER_INSTALL

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"this command needs {', '.join(missing)}: {SERVER_INSTALL}")


def _log_to_stderr() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "uvicorn.access", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _with_ledger(home: Path, work: Callable[[Any], Any]) -> Any:
    """`work(ledger)` on the home's ledger, read only, beside a running server."""
    from .core.server.ledger import Ledger

    path = home / "ledger.sqlite"
    if not path.exists():
        fail(f"there is no ledger in {home}; --home must name the folder that a server was started with")
    with Ledger.open(path, read_only=True) as ledger:
        return work(ledger)


def _print(make: Callable[[Any], Any], home: Path) -> None:
    from rich.console import Console

    Console().print(_with_ledger(home, make))


def _change_checkpoint(home: Path, checkpoint: str, change: Callable[[Any, str, int], Any], done: str) -> None:
    """Through the ledger's writer lock: a running server must do it itself (`/api/checkpoints`), and is named in the error."""
    from .core.server.ledger import Ledger
    from .core.server.registry import StoredCheckpoints
    from .core.training.checkpoints import CheckpointStore

    policy, _, step = checkpoint.rpartition("@")
    if not policy or not step.isdecimal():
        fail(f"a checkpoint is named project/name@step, got '{checkpoint}'")
    if not (home / "ledger.sqlite").exists():
        fail(f"there is no ledger in {home}; --home must name the folder that a server was started with")
    with Ledger.open(home / "ledger.sqlite") as ledger:
        change(StoredCheckpoints(CheckpointStore(home / "checkpoints"), ledger), policy, int(step))
    print(f"{checkpoint} {done}")
