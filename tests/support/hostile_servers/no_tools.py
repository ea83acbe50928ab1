"""Has no tools."""

from rpc import Server, echo

Server([], echo).serve()
