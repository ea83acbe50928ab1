"""Goes on after its input ended, and ignores SIGTERM: only SIGKILL ends it."""

import signal
import time

from rpc import Server, echo, tool

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Server([tool("echo")], echo).serve()
while True:
    time.sleep(60)
