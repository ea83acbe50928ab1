"""Dies while a tool call is running."""

import os
import sys

from rpc import Server, echo, tool


def call(name, arguments):
    if name == "exit":
        print("the disk is on fire", file=sys.stderr, flush=True)
        os._exit(7)
    return echo(name, arguments)


Server([tool("exit"), tool("echo")], call).serve()
