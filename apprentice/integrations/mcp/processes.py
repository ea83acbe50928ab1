"""The processes and private folders of this process's sessions, and the watchdog that removes them if we cannot.

While any session or pool is open there is one watchdog (`reaper.py`) and one folder for all private folders. When the last one
closes both are gone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import reaper


@dataclass(slots=True)
class _Ground:
    """What one process has while sessions are open."""

    owner: str
    root: Path
    watchdog: subprocess.Popen[bytes]
    leases: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, line: str) -> None:
        assert self.watchdog.stdin is not None
        with self.lock, suppress(OSError):  # somebody killed the watchdog: closing still cleans up
            self.watchdog.stdin.write(f"{line}\n".encode())
            self.watchdog.stdin.flush()


class Lease:
    """Holds the watchdog and the folder; the last lease to be released ends them."""

    def __init__(self) -> None:
        self._ground: _Ground | None = _acquire()

    @property
    def ground(self) -> _Ground:
        assert self._ground is not None, "a lease that is still held"
        return self._ground

    async def release(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """`release`, in a thread that may wait."""
        ground, self._ground = self._ground, None
        if ground is not None and _last(ground):
            _end(ground)


_grounds: dict[int, _Ground] = {}
_lock = threading.Lock()


def _acquire() -> _Ground:
    with _lock:
        pid = os.getpid()
        for other in [key for key in _grounds if key != pid]:
            del _grounds[other]  # a fork's copy of its parent's
        ground = _grounds.get(pid)
        if ground is None:
            owner = secrets.token_hex(8)
            root = Path(tempfile.mkdtemp(prefix="apprentice-mcp-")).resolve()
            argv = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), owner, str(root), str(pid)]
            watchdog = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            ground = _grounds[pid] = _Ground(owner, root, watchdog)
        ground.leases += 1
        return ground


def _last(ground: _Ground) -> bool:
    with _lock:
        ground.leases -= 1
        if ground.leases:
            return False
        _grounds.pop(os.getpid(), None)
        return True


def _end(ground: _Ground) -> None:
    """Close the pipe; the watchdog finds nothing, removes the folder and ends."""
    assert ground.watchdog.stdin is not None
    with suppress(OSError):
        ground.watchdog.stdin.close()
    try:
        ground.watchdog.wait(10)
    except subprocess.TimeoutExpired:
        ground.watchdog.kill()
        ground.watchdog.wait()
    shutil.rmtree(ground.root, ignore_errors=True)


class Place:
    """What one session has on this machine: a folder for its log and its work, and the mark on its processes."""

    def __init__(self, lease: Lease) -> None:
        self._ground = lease.ground
        self.id = secrets.token_hex(6)
        self.folder = self._ground.root / self.id
        self.workdir = self.folder / "work"
        self.temporary = self.folder / "tmp"
        """The server's TMPDIR: what it forgets there goes with the session."""
        self.log = self.folder / "stderr.log"
        self._groups: dict[int, int] = {}
        self.workdir.mkdir(parents=True)
        self.temporary.mkdir()

    @property
    def marks(self) -> dict[str, str]:
        """Environment of the server's process."""
        return {reaper.OWNER: self._ground.owner, reaper.SESSION: self.id}

    def started(self, pid: int) -> None:
        """A process that leads a session and group of its own."""
        self._groups[pid] = reaper.start_time(pid)
        self._ground.tell(f"+{pid} {self._groups[pid]}")

    def kill(self) -> bool:
        """SIGKILL everything that this session's processes left; False if something survived."""
        dead = reaper.kill(f"{reaper.SESSION}={self.id}", self._groups)
        for group in self._groups:
            self._ground.tell(f"-{group}")
        self._groups.clear()
        return dead

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():  # a server made a folder in it read-only
            for root, folders, _ in os.walk(self.folder):
                for name in folders:
                    with suppress(OSError):
                        os.chmod(os.path.join(root, name), 0o700)
            shutil.rmtree(self.folder, ignore_errors=True)
