"""Runs one server, and is the parent of whatever it leaves behind. Standard library only.

As the reaper of its descendants (PR_SET_CHILD_SUBREAPER) it inherits every process that the server or its children abandon, also one
that was forked twice, leads a session of its own and has emptied its environment. So all of a server's processes are its
descendants: it ends those that outlive the server, and whoever ends the launcher finds them below it. Linux only; elsewhere servers
are started directly.

It is called as `launcher.py PIPE PROGRAM ARGUMENT…`. PIPE is a number of a file: closed once the server runs, and given the errno
if it cannot. It ends as the server did.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent to the group, they are for the server; the launcher ends after it."""
DEFAULTS = (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ)
"""What the server must find as it would without a launcher; the last two are ignored by every Python."""


def run(pipe: int, argv: list[str]) -> int:
    """The server's wait status; its descendants are gone."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(pipe, False)
    try:
        server = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=DEFAULTS)
    except OSError as error:
        os.write(pipe, str(error.errno).encode())
        os._exit(127)
    for file in (pipe, 0, 1):  # else their other ends could not see that the server closed them
        os.close(file)
    while True:
        child, status = os.wait()
        if child == server:
            break
    end_children()
    return status


def end_children() -> None:
    """SIGKILL until there are none: the children of one that was killed are ours next."""
    while True:
        for child in children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def children() -> list[int]:
    me = os.getpid()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == me:
                    found.append(int(name))
    return found


def end_as(status: int) -> None:
    """End with the same exit code, or by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    end_as(run(int(sys.argv[1]), sys.argv[2:]))
