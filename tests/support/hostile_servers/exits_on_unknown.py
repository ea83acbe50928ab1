"""Dies of a method that it does not know, such as the probe of a newer protocol."""

from rpc import Server, echo, tool

server = Server([tool("echo")], echo)
answer = server.answer


def strict(message):
    if message["method"] not in server.methods:
        raise SystemExit(f"unknown method {message['method']}")
    answer(message)


server.answer = strict
server.serve()
