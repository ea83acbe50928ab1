"""Leaves a child behind that outlives it; with the argument `detached`, one in a session of its own that ignores SIGTERM."""

import subprocess
import sys

from rpc import Server, note, text, tool


def call(name, arguments):
    if sys.argv[1:] == ["detached"]:
        script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
        child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.DEVNULL)
    else:
        child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
    note(str(child.pid))
    return text(str(child.pid))


Server([tool("spawn")], call).serve()
