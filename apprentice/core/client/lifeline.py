"""A child process that ends with its parent, however the parent ends; and the file by which it says that it is ready.

For the server's process (`apprentice serve --parent-pid … --ready-file …`) and for the backend that started it.
PR_SET_PDEATHSIG is not used: Linux sends it when the parent's *thread* that made the child ends, which for a thread
pool is long before the parent does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from pathlib import Path

from pydantic import ValidationError

from ..records import Record

POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0


class Ready(Record):
    """What a server writes once it accepts connections."""

    url: str
    pid: int


def announce_ready(path: Path, url: str) -> None:
    """Write the ready file so that a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(Ready(url=url, pid=os.getpid()).model_dump_json(), encoding="utf-8")
    temporary.replace(path)


def read_ready(path: Path) -> Ready | None:
    """The announcement, or None while there is none."""
    try:
        return Ready.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def end_with_parent(parent_pid: int, grace: float = GRACE_SECONDS) -> threading.Thread:
    """Watch `parent_pid` from a daemon thread; when it is gone this process gets SIGTERM, and after `grace` seconds ends at once."""

    def watch() -> None:
        _wait_until_gone(parent_pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    thread = threading.Thread(target=watch, name="apprentice-lifeline", daemon=True)
    thread.start()
    return thread


def _wait_until_gone(pid: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:  # a kernel or sandbox without pidfd: watch by polling
            pass
        else:
            try:
                select.select([descriptor], [], [])
            finally:
                os.close(descriptor)
            return
    direct = os.getppid() == pid
    while _alive(pid, direct):
        time.sleep(POLL_SECONDS)


def _alive(pid: int, direct: bool) -> bool:
    if direct and os.getppid() != pid:
        return False  # adopted by another: the parent is gone, even if its number is in use again
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
