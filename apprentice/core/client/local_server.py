"""The server as a child process: started, waited for, watched and stopped. One per home and process.

The key goes through the environment only, never through the command line, where every user of the machine could read it.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

from ..errors import ServerStartError, ServerUnavailable
from .lifeline import read_ready

SERVER_PACKAGES = ("fastapi", "peft", "torch", "transformers", "trl", "typer", "uvicorn")
STALL_SECONDS = 180.0
"""A start fails if for so long neither the log nor the child's processor time has grown."""
STOP_SECONDS = 20.0
TAIL_LINES = 15


class LocalServer:
    """A running `apprentice serve`. `users` counts the backends that share it."""

    def __init__(self, home: Path, serve_args: tuple[str, ...]) -> None:
        self.home = home
        self.serve_args = serve_args
        self.api_key = secrets.token_urlsafe(32)
        self.log = home / "server.log"
        self.users = 0
        self._owner = os.getpid()
        self._ready_file = home / f"ready-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._stopped = False
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._process = self._spawn()
        except (OSError, ValueError) as cause:  # no folder, no log file, no process; or a name that cannot be one
            raise ServerStartError(f"the server for {str(home)!r} could not be started: {cause}") from cause
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "apprentice", "serve", "--host", "127.0.0.1", "--port", "0", "--home", str(self.home)]
        command += ["--parent-pid", str(os.getpid()), "--ready-file", str(self._ready_file), *self.serve_args]
        environment = {**os.environ, "APPRENTICE_API_KEY": self.api_key, "PYTHONUNBUFFERED": "1"}
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches this process alone, which then stops the server in good order.
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)

    def _wait_until_ready(self) -> str:
        progress, moved = self._progress(), time.monotonic()
        while (ready := read_ready(self._ready_file)) is None:
            code = self._process.poll()
            if code is not None:
                raise self._start_error(code)
            now = self._progress()
            if now != progress:
                progress, moved = now, time.monotonic()
            elif time.monotonic() - moved > STALL_SECONDS:
                raise ServerStartError(
                    f"the server shows no sign of life since {STALL_SECONDS:g} s while starting; {self.log} ends with:\n{self.tail()}"
                )
            time.sleep(0.05)
        self._ready_file.unlink(missing_ok=True)
        return ready.url

    def _start_error(self, code: int) -> ServerStartError:
        """In the server's own sentence, if it ended with one."""
        tail = self.tail()
        _, found, refusal = tail.rpartition("error: ") if code == 2 else ("", "", "")
        if found and "\n" not in refusal:
            return ServerStartError(f"the server for {self.home} did not start: {refusal}")
        return ServerStartError(f"the server ended with exit code {code} while starting; {self.log} ends with:\n{tail}")

    def _progress(self) -> tuple[int, bytes]:
        """Something that changes while the child works: its log's size and its processor time (where /proc tells it)."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            busy = b" ".join(fields[11:13])
        except OSError:
            busy = b""
        return self.log.stat().st_size, busy

    def tail(self) -> str:
        """The last lines that this start wrote to the log."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - 8192))
            text = log.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:]) or "(nothing)"

    def cause_of_death(self) -> ServerUnavailable | None:
        """Why there is no answer, if the process is gone; None while it runs."""
        if self.alive:
            return None
        code = self._process.returncode
        how = "was stopped" if self._stopped else "ended" if code is None else f"ended with exit code {code}"
        return ServerUnavailable(f"the server of {self.home} {how}; {self.log} ends with:\n{self.tail()}")

    @property
    def alive(self) -> bool:
        if os.getpid() == self._owner:
            return self._process.poll() is None
        try:  # a forked copy of the process that started it cannot wait for it, only look
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self) -> None:
        """Ask it to end, then insist. Does nothing in a forked copy of the process that started it."""
        if os.getpid() != self._owner:
            return
        self._stopped = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._ready_file.unlink(missing_ok=True)


_servers: dict[Path, LocalServer] = {}
_lock = threading.Lock()


def local_server(home: Path, serve_args: tuple[str, ...] = ()) -> LocalServer:
    """This process's server for `home`, started if there is none. Blocks until it accepts connections; ServerStartError otherwise."""
    with _lock:
        server = _servers.get(home.resolve())
        if server is not None and server.alive:
            if server.serve_args != serve_args:
                raise ServerStartError(
                    f"a server for {home} already runs with options {list(server.serve_args)}, now asked for {list(serve_args)}"
                )
        else:
            check_installed()
            server = _servers[home.resolve()] = LocalServer(home, serve_args)
        server.users += 1
        return server


def release(server: LocalServer) -> None:
    """One user less; the last one stops it."""
    with _lock:
        server.users -= 1
        if server.users <= 0:
            server.stop()
            if _servers.get(server.home.resolve()) is server:
                del _servers[server.home.resolve()]


@atexit.register
def stop_all() -> None:
    """Stop every server that this process started."""
    for server in list(_servers.values()):
        server.stop()


def check_installed() -> None:
    """ServerStartError with the command that helps, if the packages of the `server` extra are missing."""
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerStartError(
            f"LocalBackend runs the server here and needs {', '.join(missing)}: pip install 'apprentice-rl[server]' "
            "(or use RemoteBackend(url) for a server elsewhere)"
        )
