"""The local backend with a real `apprentice serve` on a tiny model: start, share, stop, and never outlive the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.small_registry import eventually

from apprentice import LocalBackend, TrainableModel
from apprentice.core.client import local_server
from apprentice.core.client.lifeline import announce_ready, end_with_parent, read_ready
from apprentice.core.errors import ConfigError, ServerStartError, ServerUnavailable
from apprentice.core.server.ledger import Ledger

SMALL: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_tokens": 2048}


def gone(pid: int) -> bool:
    """True once the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def written_by(server: local_server.LocalServer) -> str:
    """What other users of the machine could read: the command line, and the log."""
    return Path(f"/proc/{server.pid}/cmdline").read_text() + server.log.read_text()


def in_a_fork(check: Callable[[], bool]) -> bool:
    """What `check` says in a forked copy of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


async def test_a_model_registers_is_called_and_the_server_ends_with_its_last_backend(tmp_path: Path, tiny_llama_folder: Path) -> None:
    async with LocalBackend(tmp_path, **SMALL) as backend, LocalBackend(tmp_path, **SMALL) as second:
        model = TrainableModel("mail", "agent", str(tiny_llama_folder))
        info = await model.register(backend)
        assert (info.policy, info.step) == ("mail/agent", 0)
        async with model.trajectory() as t:
            client = model.openai_client()
            await client.chat.completions.create(model=model.inference_name, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        (completion,) = (await model.fetch(t)).completions
        assert len(completion.token_ids) <= 4
        assert (await second.connect()).url == (await backend.connect()).url
        (server,) = local_server._servers.values()
        assert server.api_key not in written_by(server)
        with pytest.raises(ServerStartError, match="already runs with options"):
            await LocalBackend(tmp_path, device="cpu").connect()
        await second.close()
        assert server.alive
        assert in_a_fork(lambda: server.alive and server.cause_of_death() is None), "a fork of this process uses the same server"
        server_process = server._process
        os.kill(server.pid, signal.SIGKILL)
        server_process.wait()
        with pytest.raises(ServerUnavailable, match=r"ended with exit code -9; .*server.log ends with"):
            await model.get_step()
    assert not local_server._servers


def test_the_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time; from apprentice import LocalBackend; from apprentice.core.client import local_server\n"
        f"backend = LocalBackend({str(tmp_path)!r}, device='cpu', threads=1, kv_cache_tokens=2048)\n"
        "asyncio.run(backend.connect())\n"
        "print(next(iter(local_server._servers.values())).pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        server_pid = int(parent.stdout.readline())
        assert not gone(server_pid)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: gone(server_pid), 60)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        Ledger.open(tmp_path / "ledger.sqlite"),
        pytest.raises(ServerStartError, match=r"did not start: the ledger .* is in use by process \d+: [^\n]*$"),
    ):
        asyncio.run(LocalBackend(tmp_path).connect())
    assert not local_server._servers
    assert not list(tmp_path.glob("ready-*"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "SERVER_PACKAGES", ("httpx", "no_such_package"))
    with pytest.raises(ServerStartError, match=r"needs no_such_package: pip install 'apprentice-rl\[server\]'"):
        local_server.check_installed()


def test_a_backend_that_is_not_connected_has_no_address(tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match="is not started"):
        LocalBackend(tmp_path).url  # noqa: B018


def test_a_ready_file_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    assert read_ready(path) is None
    path.write_text('{"url": "http://127')
    assert read_ready(path) is None
    announce_ready(path, "http://127.0.0.1:1")
    ready = read_ready(path)
    assert ready is not None
    assert (ready.url, ready.pid) == ("http://127.0.0.1:1", os.getpid())


@pytest.mark.parametrize("pidfd", [True, False])
@pytest.mark.parametrize("stubborn", [True, False])
def test_a_process_ends_when_the_watched_one_does(pidfd: bool, stubborn: bool) -> None:
    watched = subprocess.Popen(["sleep", "600"])
    script = (
        "import os, signal, sys, time\n"
        + ("" if pidfd else "del os.pidfd_open\n")
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else "")
        + "from apprentice.core.client.lifeline import end_with_parent\n"
        f"end_with_parent({watched.pid}, grace=0.2)\nprint('watching', flush=True)\ntime.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "watching\n"
        watched.kill()
        watched.wait()
        assert child.wait(60) == (1 if stubborn else -signal.SIGTERM)
    finally:
        child.kill()


def test_the_lifeline_does_not_end_a_process_whose_parent_lives() -> None:
    assert end_with_parent(os.getpid()).is_alive()
    assert asyncio.run(asyncio.sleep(0, True))


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
async def test_a_home_that_cannot_be_a_folder_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerStartError, match="could not be started") as refused:
        await LocalBackend(tmp_path / name).connect()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a\0b", "~nobody-of-this-name/x"])
def test_a_home_that_is_no_path_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the home of a server"):
        LocalBackend(name)
