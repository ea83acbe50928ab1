"""The command `apprentice`: one thin function per command. Errors are one sentence on stderr and exit code 2."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

from .core.doctor import CLI_INSTALL, SERVER_INSTALL
from .core.errors import ApprenticeError, LedgerLocked, UserInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .core.server.ledger import Ledger
    from .core.server.serve import ServerOptions
    from .core.server.stored_checkpoints import StoredCheckpoints

try:
    import typer
    from typer.exceptions import TyperException
except ImportError:  # the thin client is installed alone
    print(f"error: the command needs typer and rich: {CLI_INSTALL}", file=sys.stderr)
    raise SystemExit(2) from None

from .integrations.mcp.commands import app as mcp

T = TypeVar("T")

app = typer.Typer(add_completion=False, rich_markup_mode="rich", help="Trains LLM agents on the job.", pretty_exceptions_enable=False)
runs = typer.Typer(help="What is recorded in a home: policies, train jobs, trajectories.")
checkpoints = typer.Typer(help="List, pin and delete published checkpoints of a home.")
app.add_typer(runs, name="runs")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(mcp, name="mcp")

DEFAULT_HOME = Path(".apprentice")
Home = Annotated[Path, typer.Option(metavar="DIR", help="Folder of ledger and checkpoints.")]
Checkpoint = Annotated[str, typer.Argument(help="project/name@step")]

PIPED_WIDTH = 240
"""Columns of a table that no one sees on a terminal: enough that nothing is folded."""


def main() -> None:
    """Entry point. What goes wrong for a reason that a user can know is one sentence, never a traceback."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="apprentice", standalone_mode=False)
    except UserInputError as error:
        fail(" ".join(str(error).splitlines()))  # what the user named may hold line breaks
    except ApprenticeError as error:
        fail(str(error))
    except TyperException as error:  # a wrong command line
        context = getattr(error, "ctx", None)
        fail(error.format_message().rstrip(".") + (f" (see `{context.command_path} --help`)" if context else ""))
    except ModuleNotFoundError as error:
        if (error.name or "apprentice").startswith("apprentice"):
            raise
        fail(f"this command needs {error.name}: {SERVER_INSTALL}")
    except OSError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@app.command()
def serve(
    home: Home = DEFAULT_HOME,
    host: Annotated[str, typer.Option(metavar="HOST", help="Any but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free port.")] = 7474,
    base_model: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Load it first; may be repeated.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu or cuda; default: a GPU if any.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help="Default: float32; bfloat16 on a GPU.")] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(metavar="N", min=256, help="Bound of the KV cache.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, max=4096, help="CPU threads; default: all cores.")] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
    ready_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the server: OpenAI's API in front of trainable models. Key: APPRENTICE_API_KEY."""
    from .core.client.lifeline import announce_ready, end_with_parent

    if parent_pid is not None:
        end_with_parent(parent_pid)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost other processes up to ten times their speed
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from .core.server.bases import EngineOptions
    from .core.server.serve import ServerOptions

    if threads is not None:
        torch.set_num_threads(threads)
    _log_calmly()
    engine = EngineOptions(dtype=dtype, device=device, kv_cache_tokens=kv_cache_tokens)
    key = os.environ.pop("APPRENTICE_API_KEY", None)
    options = ServerOptions(home=home, host=host, port=port, api_key=key, base_models=tuple(base_model or ()), engine=engine)

    def ready(bound: int) -> None:
        url = f"http://{host if ':' not in host else f'[{host}]'}:{bound}"
        if ready_file is not None:
            announce_ready(ready_file, url)
        rule = "required" if key else "not required on this machine"
        print(f"Apprentice serves {url}/v1 (home {home}, key {rule}). Ctrl-C stops it.", flush=True)

    asyncio.run(_serve_until_signalled(options, ready))


@app.command()
def doctor() -> None:
    """Versions, hardware, what will be used, and what is missing. Exit code 1 if something needed is."""
    from rich.markup import escape
    from rich.table import Table

    from .core.doctor import examine

    findings = examine()
    table = Table("", "what", "found", "to do")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.needed else "[yellow]optional[/]"
        table.add_row(mark, finding.name, escape(finding.value), escape(finding.note))
    _show(table)
    if any(finding.needed and not finding.ok for finding in findings):
        raise typer.Exit(1)


@runs.command("list")
def runs_list(home: Home = DEFAULT_HOME) -> None:
    """One row for each policy: step, trajectories, rewards, train jobs."""
    from .core.server.runs import policies_table

    _show(_read(home, policies_table))


@runs.command("show")
def runs_show(
    name: Annotated[str, typer.Argument(help="A policy (project/name) or the id of a trajectory.")], home: Home = DEFAULT_HOME
) -> None:
    """A policy's train jobs and latest trajectories, or one trajectory as a tree of its calls."""
    from .core.server.runs import show

    _show(_read(home, lambda ledger: show(ledger, name)))


@runs.command("export")
def runs_export(
    out: Annotated[Path, typer.Argument(help="File to write; .parquet or .jsonl.")],
    home: Home = DEFAULT_HOME,
    policy: Annotated[str | None, typer.Option(help="Only this policy (project/name).")] = None,
) -> None:
    """Write every completion with token ids, log-probabilities and rewards to a file."""
    from .core.server.export import export_runs

    def export(ledger: Ledger) -> int:
        if policy is not None:
            ledger.policy(policy)
        return export_runs(ledger, out, policy=policy)

    print(f"{_read(home, export)} completions written to {out}")


@checkpoints.command("list")
def checkpoints_list(
    policy: Annotated[str | None, typer.Argument(help="project/name; default: all.")] = None, home: Home = DEFAULT_HOME
) -> None:
    """Published checkpoints: step, reward, folder of the adapter in plain PEFT format."""
    from .core.server.runs import checkpoints_table

    _show(_read(home, lambda ledger: checkpoints_table(ledger, home, policy)))


@checkpoints.command("pin")
def checkpoints_pin(checkpoint: Checkpoint, home: Home = DEFAULT_HOME) -> None:
    """Keep a checkpoint for ever."""
    _change_checkpoint(home, checkpoint, lambda stored, policy, step: stored.pin(policy, step, True))
    print(f"{checkpoint} is pinned")


@checkpoints.command("unpin")
def checkpoints_unpin(checkpoint: Checkpoint, home: Home = DEFAULT_HOME) -> None:
    """Let retention treat a checkpoint like the others again."""
    _change_checkpoint(home, checkpoint, lambda stored, policy, step: stored.pin(policy, step, False))
    print(f"{checkpoint} is no longer pinned")


@checkpoints.command("delete")
def checkpoints_delete(checkpoint: Checkpoint, home: Home = DEFAULT_HOME) -> None:
    """Delete a checkpoint that is neither pinned nor the latest."""
    _change_checkpoint(home, checkpoint, lambda stored, policy, step: stored.delete(policy, step))
    print(f"{checkpoint} is deleted")


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="project/name, or project/name@step.")],
    rollout: Annotated[str, typer.Option(metavar="NAME", help="module:function of (model, scenario).")],
    scenarios: Annotated[Path, typer.Option(metavar="FILE", help="JSONL: a scenario or input per line.")],
    url: Annotated[str | None, typer.Option(metavar="URL", help="Of a server; default: start one.")] = None,
    home: Home = DEFAULT_HOME,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Rollouts per scenario.")] = 1,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Rollouts at a time.")] = 32,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the evaluation as JSON.")] = None,
) -> None:
    """Mean reward of a rollout over scenarios, with a 95 % interval. Nothing is trained."""
    from .core.client.eval_command import run_evaluation

    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        fail(f"--out goes to a file in a folder that can be written, got {out}")
    found = asyncio.run(run_evaluation(model, rollout, scenarios, url=url, home=home, repeats=repeats, concurrency=concurrency))
    if out is not None:
        out.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    print(f"{model}: {found}")


async def _serve_until_signalled(options: ServerOptions, on_ready: Callable[[int], None]) -> None:
    """Serve; SIGINT and SIGTERM end it in good order, also while base models are loading, and exit code 0 says so."""
    import signal

    from .core.server.serve import run_server

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    serving = False

    def stop(_: int, frame: FrameType | None) -> None:
        if not serving:  # once it serves, uvicorn acts on signals, and raises them again here when it has ended
            loop.call_soon_threadsafe(task.cancel)

    def ready(port: int) -> None:
        nonlocal serving
        serving = True
        on_ready(port)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        await run_server(options, ready)
    except asyncio.CancelledError:
        if serving:
            raise


def _log_calmly() -> None:
    """The server's log on stderr: what it does, without the progress bars and the chatter of the libraries under it."""
    import logging
    import warnings

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT still asks for it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "uvicorn", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _ledger_of(home: Path) -> Path:
    path = home / "ledger.sqlite"
    if not path.is_file():
        fail(f"there is no ledger in {home}; --home must name the folder that a server was started with")
    return path


def _read(home: Path, work: Callable[[Ledger], T]) -> T:
    """`work(ledger)` on the home's ledger, read only, beside a running server."""
    from .core.server.ledger import Ledger

    with Ledger.open(_ledger_of(home), read_only=True) as ledger:
        return work(ledger)


def _change_checkpoint(home: Path, checkpoint: str, change: Callable[[StoredCheckpoints, str, int], object]) -> None:
    """`change(stored, policy, step)` as the only writer of the ledger: a running server must do it itself."""
    from .core.client.model import parse_policy
    from .core.server.ledger import Ledger
    from .core.server.stored_checkpoints import StoredCheckpoints
    from .core.training.checkpoints import CheckpointStore

    policy, step = parse_policy(checkpoint)
    if step is None:
        fail(f"a checkpoint is named project/name@step, got '{checkpoint}'")
    try:
        ledger = Ledger.open(_ledger_of(home))
    except LedgerLocked as error:
        fail(f"{error}, or let it change its checkpoints itself (`model.pin_checkpoint`, `model.delete_checkpoint`)")
    with ledger:
        ledger.policy(policy)
        change(StoredCheckpoints(CheckpointStore(home / "checkpoints"), ledger), policy, step)


def _show(what: RenderableType) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(what)
