"""Ends what a trainer leaves behind, however it ends: servers, their children, private folders. Standard library only.

Run as a script it is the watchdog: a process beside the trainer that holds the other end of a pipe. When the pipe closes (or the
trainer is gone although a forked child still holds it), it kills everything that carries the trainer's mark and removes the
trainer's folder. Each server is started with the mark in its environment, so that children which left its process group,
or were orphaned, are found as well; children with an emptied environment are found by session, group and parent, which is the
server's launcher (`launcher.py`) where all others are gone.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

OWNER = "APPRENTICE_MCP_OWNER"
"""Environment variable of every server process: which trainer started it."""
SESSION = "APPRENTICE_MCP_SESSION"
"""Environment variable of every server process: which session it belongs to."""
ROUNDS = 50
_NONE: Mapping[int, int] = {}


def members(mark: str, groups: Mapping[int, int] = _NONE) -> set[int]:
    """Living processes that carry `mark` (`NAME=value`) in their environment, are in one of the sessions or groups, or descend from such.

    `groups` maps the process that leads a group (and session) to its start time: a number that the system gave to another
    process since is none of ours.
    """
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # no /proc on this system: groups are all there is
        return {group for group in groups if _group_alive(group)}
    stats = {pid: stat for pid in pids if (stat := _stat(pid)) is not None}
    ours = {group for group, start in groups.items() if group not in stats or stats[group][3] == start}
    parents = {pid: stat[0] for pid, stat in stats.items()}
    needle = mark.encode()
    found = {pid for pid, stat in stats.items() if stat[1] in ours or stat[2] in ours or needle in _environment(pid)}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= more
        grown = bool(more)
    return found - {os.getpid()}


def start_time(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 if that cannot be known."""
    stat = _stat(pid)
    return stat[3] if stat else 0


def _stat(pid: int) -> tuple[int, int, int, int] | None:
    """(parent, group, session, start time) of a process that is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill(mark: str, groups: Mapping[int, int] = _NONE) -> bool:
    """SIGKILL all `members` until there are none; False if some could not be killed."""
    for round_ in range(ROUNDS):
        alive = members(mark, groups)
        if not alive:
            return True
        for group in groups.keys() & alive:
            _signal(os.killpg, group)
        for pid in alive:
            _signal(os.kill, pid)
        time.sleep(0.001 * min(round_ + 1, 20))
    return not members(mark, groups)


def _signal(send: Callable[[int, int], None], number: int) -> None:
    with suppress(OSError):
        send(number, signal.SIGKILL)


def watch(owner: str, root: str, parent: int) -> None:
    """Read lines `+GROUP START` and `-GROUP` until the pipe closes or the parent is gone; then clean up."""
    groups: dict[int, int] = {}
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number, _, start = line[1:].partition(b" ")
            if line[:1] == b"+":
                groups[int(number)] = int(start)
            else:
                groups.pop(int(number), None)
    kill(f"{OWNER}={owner}", groups)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # it ends with the pipe, after its work
    watch(sys.argv[1], sys.argv[2], int(sys.argv[3]))
