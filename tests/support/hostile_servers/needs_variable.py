"""Needs WEATHER_API_KEY, and says so on stderr."""

import os
import sys

from rpc import Server, echo, tool

if not os.environ.get("WEATHER_API_KEY"):
    print("Error: WEATHER_API_KEY environment variable is required", file=sys.stderr)
    raise SystemExit(1)
Server([tool("echo")], echo).serve()
