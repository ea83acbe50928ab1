"""The command line as its users meet it: help, tables, the tree of a trajectory, and one sentence for whatever goes wrong."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.mcp_servers import hostile
from support.recordings import POLICY, completion

from apprentice.cli import main
from apprentice.core.client.lifeline import read_ready
from apprentice.core.client.run_state import alone_in
from apprentice.core.records import BranchReason, ChatRequest, Completion, Fate, ToolEvent, TrainResult, TrainStatus, Trajectory
from apprentice.core.server.ledger import Ledger
from apprentice.core.server.stored_checkpoints import checkpoint_info
from apprentice.core.training.checkpoints import CheckpointState, CheckpointStore
from apprentice.core.wire import FinishTrajectory, RegisterModel, TrainJob
from apprentice.integrations.mcp.commands import say_if_fewer, show_report
from apprentice.integrations.mcp.mastery_report import MasteryReport, Success

Run = Callable[..., tuple[int, str, str]]
COMMANDS = (
    "",
    "serve",
    "doctor",
    "eval",
    "runs",
    "runs list",
    "runs show",
    "runs export",
    "checkpoints",
    "checkpoints list",
    "checkpoints pin",
    "checkpoints unpin",
    "checkpoints delete",
)
HEAVY = ("torch", "transformers", "peft", "trl", "fastapi", "uvicorn", "polars", "numpy", "safetensors", "openai")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("runs", "list")` → (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["apprentice", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def publish(store: CheckpointStore, ledger: Ledger, step: int) -> None:
    def write(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text("{}")

    state = CheckpointState(step=step, job_id=f"job-{step}", metrics={"reward/mean": step / 8})
    ledger.put_checkpoint(checkpoint_info(store.publish(POLICY, step, write, state), latest=True))


def calls(trajectory: str) -> list[Completion]:
    """A root with a tool call, its continuation, a second choice, and a rewritten history."""
    system, user = {"role": "system", "content": "You sort mail."}, {"role": "user", "content": "Sort \x1b[31mit[/]."}
    call = {"id": "call-1", "type": "function", "function": {"name": "move", "arguments": '{"to": "work"}'}}
    asked: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    moved = {"role": "tool", "tool_call_id": "call-1", "content": "moved to work"}
    first = completion(trajectory, request=ChatRequest(messages=(system, user)), message=asked, branch=BranchReason.root)
    shared: dict[str, Any] = {
        "parent": first.id,
        "branch": BranchReason.continues,
        "request": ChatRequest(messages=(system, user, asked, moved)),
        "call_id": "call-two",
    }
    prompt = (1, 2, 3, 7, 8, 9)
    second = completion(trajectory, prompt, message={"role": "assistant", "content": "All sorted."}, **shared)
    other = completion(trajectory, prompt, (5,), message={"role": "assistant", "content": "Done?"}, choice=1, **shared)
    again = ChatRequest(messages=(system, {"role": "user", "content": "Sort it again."}))
    rewritten = completion(trajectory, (1, 2, 4), request=again, branch=BranchReason.history_rewritten, parse_error="no closing tag")
    return [first, second, other, rewritten]


@pytest.fixture(scope="module")
def small_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with three checkpoints, a job that trained, and the trajectory `trj-1` with four calls."""
    home = tmp_path_factory.mktemp("home")
    store = CheckpointStore(home / "checkpoints")
    with Ledger.open(home / "ledger.sqlite") as ledger:
        ledger.put_policy(RegisterModel(project="mail", name="agent-001", base_model="tiny [red]model"))
        for step in (0, 1, 2):
            publish(store, ledger, step)
        ledger.open_trajectory(Trajectory(id="trj-1", policy=POLICY, scenario_id="scn-7", group_id="grp-7"))
        made = calls("trj-1")
        ledger.append_completions(made)
        ledger.append_tool_event(
            ToolEvent(trajectory_id="trj-1", tool_call_id="call-1", name="move", outcome="timeout", result="too slow", seconds=2.5)
        )
        ledger.finish_trajectory("trj-1", FinishTrajectory(reward=0.75, completion_rewards={made[1].id: 0.5}, metrics={"moves": 1.0}))
        ledger.append_completions([completion(None)])
        job = TrainJob(id="job-1", policy=POLICY, kind="grpo", state="queued", phase="queued", created_at=1.0, updated_at=1.0)
        ledger.create_job(job, b"{}")
        result = TrainResult(
            job_id="job-1",
            policy=POLICY,
            status=TrainStatus.trained,
            previous_step=1,
            step=2,
            fates={"trj-1": Fate.trained},
            metrics={"reward/mean": 0.75},
        )
        ledger.update_job("job-1", state="trained", phase="done", result=result)
    return home


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_one_screen(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: apprentice {command}".strip() in out
    assert len(out.splitlines()) <= 24, out


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        ("master", ["Arguments", "Options", "Scenarios", "Training", "Server"]),
        ("scenarios", ["Arguments", "Options", "Scenarios", "Server"]),
        ("inspect", ["Arguments", "Options", "Server"]),
        ("proxy", ["Arguments", "Options", "Server"]),
    ],
)
def test_help_of_commands_with_many_options_has_them_in_panels_one_line_each(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, panels: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("mcp", command, "--help")
    assert re.findall(r"^╭─ (\w+) ─", out, re.MULTILINE) == panels
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [row for row in rows if not row.startswith(("│ --", "│ *"))] == []


def test_the_bare_command_shows_its_help(run: Run) -> None:
    assert run()[:2] == run("--help")[:2]


def test_help_and_reading_commands_import_nothing_heavy(small_home: Path) -> None:
    """They work where the heavy packages are absent: importing one fails in this process."""
    script = f"""
import contextlib, sys
sys.modules.update(dict.fromkeys({HEAVY!r}))
from apprentice.cli import main
for line in ("--help", "runs list", "runs show trj-1", "runs show mail/agent-001", "checkpoints list"):
    sys.argv = ["apprentice", *line.split(), *(["--home", {str(small_home)!r}] if line != "--help" else [])]
    with contextlib.suppress(SystemExit):
        main()
    print("done", line)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.count("done ") == 5


@pytest.mark.parametrize(("command", "package"), [("runs export out.parquet", "polars"), ("serve", "torch")])
def test_a_command_whose_packages_are_absent_names_the_install_command(small_home: Path, command: str, package: str) -> None:
    line = ["apprentice", *command.split(), "--home", str(small_home)]
    script = f"import sys; sys.modules[{package!r}] = None; sys.argv = {line!r}; from apprentice.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: this command needs {package}: pip install 'apprentice-rl[server]'\n"


def test_the_thin_client_alone_names_the_install_command() -> None:
    script = "import sys; sys.modules['typer'] = None; import apprentice.__main__"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: the command needs typer and rich: pip install 'apprentice-rl[cli]'\n"


# Reading


def test_runs_list_has_a_row_for_each_policy_and_counts_lost_calls(run: Run, small_home: Path) -> None:
    code, out, _ = run("runs", "list", "--home", str(small_home))
    assert code == 0
    row = next(line for line in out.splitlines() if POLICY in line)
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["tiny [red]model", "2", "1", "0", "0", "0.75", "trained 1"]
    assert "1 calls named no trajectory" in out


def test_runs_show_of_a_policy_lists_jobs_and_the_trajectories_to_look_at(run: Run, small_home: Path) -> None:
    code, out, _ = run("runs", "show", POLICY, "--home", str(small_home))
    assert code == 0
    assert "1 → 2" in out
    assert next(line for line in out.splitlines() if "trj-1" in line).split("│")[3:6] == [" scn-7    ", " grp-7 ", " finished "]


def test_runs_show_of_a_trajectory_is_a_tree_with_reasons_rewards_and_fates(run: Run, small_home: Path) -> None:
    code, out, _ = run("runs", "show", "trj-1", "--home", str(small_home))
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines == [
        "trj-1  finished, reward 0.75, 4 calls",
        "policy mail/agent-001  scenario scn-7  group grp-7",
        "moves 1",
        "trained by train job job-1 (step 2)",
        "├── #1  It begins a conversation: no turn of an earlier call is in its prompt.",
        "│   ├── system You sort mail.",
        r"│   ├── user Sort \x1b[31mit[/].",
        '│   ├── assistant → move({"to": "work"})  (#1, step 0, 2 tokens, stop)',
        "│   ├── tool move: timeout, 2.50 s: too slow",
        "│   ├── tool moved to work",
        "│   ├── assistant All sorted.  (#2, step 0, 2 tokens, stop, reward 0.5)",
        "│   └── #3  It is choice 1 of the request call-two.",
        "│       ├── … 3 messages as in #1",
        "│       ├── tool moved to work",
        "│       └── assistant Done?  (#3, step 0, 1 tokens, stop)",
        "└── #4  The conversation was rewritten since #3: message 1 (user) reads otherwise.",
        "    ├── … 1 messages as in #1",
        "    ├── user Sort it again.",
        "    └── assistant hi  (#4, step 0, 2 tokens, stop)  no closing tag",
    ]


def test_a_transcript_shows_messages_of_any_shape(run: Run, tmp_path: Path) -> None:
    messages: tuple[Any, ...] = (
        {"content": [{"type": "text", "text": "parts"}], "name": "ann", "role": "user"},
        {"role": "assistant", "content": None, "tool_calls": "none", "reasoning_content": "hm"},
        {"role": 3, "content": {"deep": []}, "tool_calls": [{"id": [1], "function": "f"}, 5, {"function": {"name": "g"}}]},
        {},
    )
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_trajectory(Trajectory(id="trj-1", policy=POLICY))
        odd = ChatRequest(messages=messages)
        ledger.append_completions([completion("trj-1", request=odd, message={"tool_calls": [{"id": {}}]}, policy="tiny")])
        ledger.append_completions([completion("trj-1", request=ChatRequest(messages=()), message={"content": "\u202eevil\x07"})])
    code, out, err = run("runs", "show", "trj-1", "--home", str(tmp_path))
    assert (code, err) == (0, "")
    for expected in (
        'user ann [{"type": "text", "text": "parts"}]',
        "assistant hm",
        '3 {"deep": []} → {"id": [1], "function": "f"} → g(None)',
    ):
        assert expected in out
    assert "by tiny" in out
    assert r"\u202eevil\x07" in out


def test_reading_commands_work_beside_the_process_that_writes(run: Run, small_home: Path) -> None:
    with Ledger.open(small_home / "ledger.sqlite"):
        assert run("runs", "list", "--home", str(small_home))[0] == 0
        assert run("runs", "show", "trj-1", "--home", str(small_home))[0] == 0
        assert run("checkpoints", "list", "--home", str(small_home))[0] == 0


def test_export_writes_all_completions_or_those_of_a_policy(run: Run, small_home: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    assert run("runs", "export", str(out), "--home", str(small_home))[:2] == (0, f"5 completions written to {out}\n")
    assert len(out.read_text().splitlines()) == 5
    code, _, err = run("runs", "export", str(out), "--policy", "mail/nobody", "--home", str(small_home))
    assert code == 2
    assert "mail/nobody" in err


def test_checkpoints_are_listed_pinned_and_deleted(run: Run, small_home: Path) -> None:
    def marks() -> dict[str, str]:
        out = run("checkpoints", "list", POLICY, "--home", str(small_home))[1]
        rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
        return {row[1].rpartition("@")[2]: row[4] for row in rows}

    assert marks() == {"0": "", "1": "", "2": "latest"}
    home = ("--home", str(small_home))
    assert run("checkpoints", "pin", f"{POLICY}@0", *home) == (0, f"{POLICY}@0 is pinned\n", "")
    assert marks()["0"] == "pinned"
    assert "is pinned; unpin it before deleting it" in run("checkpoints", "delete", f"{POLICY}@0", *home)[2]
    assert run("checkpoints", "unpin", f"{POLICY}@0", *home)[0] == 0
    assert run("checkpoints", "delete", f"{POLICY}@0", *home) == (0, f"{POLICY}@0 is deleted\n", "")
    assert "is the latest of its policy" in run("checkpoints", "delete", f"{POLICY}@2", *home)[2]
    assert marks() == {"1": "", "2": "latest"}


# Errors


def sentence(result: tuple[int, str, str]) -> str:
    """The one sentence of a refused command."""
    code, out, err = result
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", "No such command 'nonsense' (see `apprentice --help`)"),
        ("runs", "Missing command (see `apprentice runs --help`)"),
        ("runs show", "Missing argument 'name' (see `apprentice runs show --help`)"),
        ("serve --wrong", "No such option"),
        ("serve --port many", "'--port'"),
        ("serve --port 65536", "65535"),
        ("runs list --home nowhere", "there is no ledger in nowhere"),
        ("checkpoints delete mail/agent@1 --home nowhere", "there is no ledger in nowhere"),
        ("runs show trj-nobody --home HOME", "trj-nobody"),
        ("runs show mail/nobody --home HOME", "mail/nobody"),
        ("runs show ../../etc/passwd --home HOME", "../../etc/passwd"),
        ("checkpoints list mail/nobody --home HOME", "mail/nobody"),
        ("checkpoints list ../.. --home HOME", "../.."),
        ("checkpoints pin mail/agent-001@77 --home HOME", "no checkpoint of step 77"),
        ("checkpoints pin mail/agent-001 --home HOME", "project/name@step"),
        ("checkpoints pin mail/agent-001@-1 --home HOME", "project/name@step"),
        ("checkpoints delete ../mail/agent-001@1 --home HOME", "project/name"),
        ("checkpoints delete mail/..@1 --home HOME", "project/name"),
        ("runs export out.csv --home HOME", "parquet or jsonl"),
        ("runs export nowhere/out.jsonl --home HOME", "existing folder"),
        ("eval mail/agent --rollout m:f", "Missing option '--scenarios'"),
        ("mcp master true --target 50", "--target: Input should be less than or equal to 1, got 50.0"),
        ("mcp master true --target nan", "--target: Input should be a finite number"),
        ("mcp master true --learning-rate inf", "'learning_rate': Input should be a finite number"),
        ("mcp master true --learning-rate 0", "'learning_rate': Input should be greater than 0"),
        ("mcp master true --memory-gib 0", "'activation_memory_gib': Input should be greater than 0"),
        ("mcp master true --memory-gib nan", "'activation_memory_gib': Input should be a finite number"),
        ("mcp master true --seed -1", "'--seed'"),
        ("mcp inspect true --connect-seconds nan", "'connect_seconds' is wrong"),
        ("mcp inspect localhost:3000/mcp", "write http://localhost:3000/mcp"),
        ("mcp scenarios true --seed 99999999999999999999", "'--seed'"),
    ],
)
def test_a_wrong_command_is_one_sentence(
    run: Run, small_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in sentence(run(*line.replace("HOME", str(small_home)).split()))
    assert list(tmp_path.iterdir()) == []


def test_inspect_says_what_it_waits_for(run: Run) -> None:
    code, out, err = run("mcp", "inspect", shlex.join(hostile("never_answers")), "--connect-seconds", "0.2")
    assert (code, out) == (2, "")
    assert err.startswith("Waiting for never_answers, at most 0.2 s\n")
    assert "error: the server 'never_answers' did not answer the MCP handshake within 0.2 s" in err


def test_a_second_run_in_a_folder_is_refused_before_anything_is_done(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ("mcp", "master", "no-such-command", "--out", str(out))
    with alone_in(out):
        assert sentence(run(*line)).startswith(f"another run is working in this folder: {out}")
    assert not out.exists()
    assert "there is no command 'no-such-command'" in sentence(run(*line))
    assert not out.exists()


@pytest.mark.parametrize(("made", "told"), [((9, 2), True), ((10, 1), True), ((10, 2), False)])
def test_fewer_scenarios_than_asked_for_are_told(made: tuple[int, int], told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    say_if_fewer(made, (10, 2))
    assert ("Fewer than the 10 and 2 that were asked for" in capsys.readouterr().out) == told


def test_the_end_of_a_mastery_run_shows_paths_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    one = Success(success=0.5, ci95=(0.0, 1.0), n=2)
    report = MasteryReport(
        servers=("time",),
        policy="mcp/time",
        base_model="tiny",
        before=one,
        warmup=None,
        after=one,
        per_tool={},
        per_difficulty={},
        seconds=1.0,
        steps=1,
        train_scenarios=1,
        test_scenarios=2,
        stopped="",
        adapter="x [bold]y[/bold]/adapter",
        settings={},
    )
    show_report(report, Path("x [bold]y[/bold]"))
    out = capsys.readouterr().out
    assert "x [bold]y[/bold]/adapter" in out
    assert "x [bold]y[/bold]/report.html" in out


@pytest.mark.parametrize("kind", ["newer", "damaged", "foreign", "folder"])
def test_a_ledger_that_cannot_be_read_is_one_sentence(run: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ledger.sqlite"
    if kind == "newer":
        Ledger.open(path).close()
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
        expected = "upgrade Apprentice"
    elif kind == "damaged":
        path.write_bytes(b"not a database at all" * 100)
        expected = "damaged or no ledger"
    elif kind == "foreign":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE other (a)")
        expected = "another program"
    else:
        path.mkdir()
        expected = "there is no ledger"
    for command in ("runs list", "checkpoints list", "checkpoints pin a/b@1", "runs export out.jsonl"):
        assert expected in sentence(run(*command.split(), "--home", str(tmp_path)))


def test_changing_a_checkpoint_of_a_running_server_is_refused_with_the_way_to_do_it(run: Run, small_home: Path) -> None:
    with Ledger.open(small_home / "ledger.sqlite"):
        message = sentence(run("checkpoints", "pin", f"{POLICY}@1", "--home", str(small_home)))
    assert f"in use by process {os.getpid()}" in message
    assert "model.pin_checkpoint" in message


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        (["--port", "TAKEN"], None, "Address already in use"),
        ([], "short", "at least 16 characters, but it has 5"),
        (["--host", "0.0.0.0"], None, "needs an API key"),
        (["--host", "203.0.113.7"], "a-key-long-enough", "cannot listen on 203.0.113.7"),
        (["--host", "a\nb"], None, "a server bound to a b can be reached"),
        (["--threads", "99999999999999"], None, "--threads"),
        (["--device", "abacus"], None, "device must be 'cpu' or 'cuda', got 'abacus'"),
        (["--device", "meta"], None, "device must be 'cpu' or 'cuda', got 'meta'"),
        (["--dtype", "float12"], None, "dtype must be one of float32"),
    ],
)
def test_serve_refuses_at_once_what_it_cannot_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_port: int, options: list[str], key: str | None, expected: str
) -> None:
    monkeypatch.setenv("APPRENTICE_API_KEY", key) if key else monkeypatch.delenv("APPRENTICE_API_KEY", raising=False)
    home = tmp_path / "home"
    given = [option.replace("TAKEN", str(taken_port)) for option in options]
    port = [] if "--port" in given else ["--port", "0"]
    assert expected in sentence(run("serve", "--home", str(home), "--base-model", "no-such-model", *port, *given))
    assert not home.exists()


def test_serve_refuses_an_unknown_base_model_and_a_ledger_in_use(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_home: Path
) -> None:
    monkeypatch.delenv("APPRENTICE_API_KEY", raising=False)
    assert "no-such-model" in sentence(run("serve", "--port", "0", "--home", str(tmp_path), "--base-model", "no-such-model"))
    with Ledger.open(small_home / "ledger.sqlite"):
        assert "in use by process" in sentence(run("serve", "--port", "0", "--home", str(small_home)))
    file = tmp_path / "file"
    file.write_text("")
    assert "could not be made" in sentence(run("serve", "--port", "0", "--home", str(file / "home")))


def test_an_interrupt_ends_with_130_and_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("apprentice.core.doctor.examine", interrupted)
    code, _, err = run("doctor")
    assert code == 130
    assert "Traceback" not in err


# Serving


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_one_line_logs_calmly_and_stops_with_0(tmp_path: Path, tiny_llama_folder: Path, number: signal.Signals) -> None:
    key, ready_file = "a-key-for-tests-only", tmp_path / "ready.json"
    command = [sys.executable, "-m", "apprentice", "serve", "--home", str(tmp_path / "home"), "--port", "0", "--threads", "1"]
    command += ["--base-model", str(tiny_llama_folder), "--kv-cache-tokens", "2048", "--ready-file", str(ready_file)]
    environment = {**os.environ, "APPRENTICE_API_KEY": key}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            ready = read_ready(ready_file)
            assert ready is not None
            assert line == f"Apprentice serves {ready.url}/v1 (home {tmp_path / 'home'}, key required). Ctrl-C stops it.\n"
            with httpx.Client(base_url=ready.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
                body = {"project": "mail", "name": "agent", "base_model": str(tiny_llama_folder)}
                assert client.post("/api/models", json=body).status_code == 200
                client.post("/api/trajectories", json={"id": "trj-1", "policy": "mail/agent"}).raise_for_status()
                chat = {"model": "mail/agent", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                assert client.post("/t/trj-1/v1/chat/completions", json=chat).status_code == 200
            server.send_signal(number)
            out, log = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, out) == (0, ""), log
    for unwanted in ("Loading weights", "Warning", "Traceback", key, "WARNING", "ERROR"):
        assert unwanted not in log
    assert len(log.splitlines()) < 12, log


def test_serve_stops_with_0_while_it_is_still_loading(tmp_path: Path, tiny_llama_folder: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "apprentice", "serve", "--home", str(home), "--port", "0", "--base-model", str(tiny_llama_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            assert server.stderr is not None
            assert "loading base model" in server.stderr.readline()
            server.send_signal(signal.SIGTERM)
            out, log = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, out) == (0, ""), log
    assert "Traceback" not in log


# Doctor


def test_doctor_says_what_will_be_used_as_the_engine_does(run: Run, tiny_llama_folder: Path) -> None:
    import torch

    from apprentice.core.engines.embedded import EmbeddedEngine
    from apprentice.core.training.base_models import resolve_base
    from apprentice.core.training.policy import HostedModel

    code, out, _ = run("doctor")
    assert code == 0
    rows = {cells[2].strip(): cells[3].strip() for line in out.splitlines() if len(cells := line.split("│")) > 3}
    assert rows["torch"] == torch.__version__
    engine = EmbeddedEngine(HostedModel.load(resolve_base(str(tiny_llama_folder))))
    info = engine.info()
    assert rows["dtype"].startswith(info.dtype)
    if info.device == "cpu":
        assert rows["device"].startswith("the CPU")
        assert f"{info.kv_cache_tokens:,} tokens" in rows["KV cache"]


def test_doctor_names_the_command_for_what_is_missing_and_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in ("peft", "openai") else real(name, *more))
    code, out, _ = run("doctor")
    assert code == 1
    rows = {cells[2].strip(): [cell.strip() for cell in cells] for line in out.splitlines() if len(cells := line.split("│")) > 3}
    assert rows["peft"][1:5] == ["missing", "peft", "missing", "pip install 'apprentice-rl[server]'"]
    assert rows["openai"][1:5] == ["optional", "openai", "missing", "pip install 'apprentice-rl[openai]'"]
