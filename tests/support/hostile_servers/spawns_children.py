"""Leaves a child behind that outlives it.

With the argument `detached`, one in a session of its own that ignores SIGTERM; with `hidden`, one that was also forked twice, so that
nobody here is its parent, and has an empty environment.
"""

import subprocess
import sys

from rpc import Server, note, text, tool

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
HIDDEN = f"""
import subprocess, sys
nothing = subprocess.DEVNULL
argv = [sys.executable, "-c", {STUBBORN!r}]
child = subprocess.Popen(argv, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing, env={{}})
print(child.pid)
"""


def spawned(how: list[str]) -> int:
    if how == ["hidden"]:
        return int(subprocess.run([sys.executable, "-c", HIDDEN], env={}, start_new_session=True, capture_output=True, check=True).stdout)
    if how == ["detached"]:
        return subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True, stdout=subprocess.DEVNULL).pid
    return subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL).pid


def call(name, arguments):
    child = spawned(sys.argv[1:])
    note(str(child))
    return text(str(child))


Server([tool("spawn")], call).serve()
