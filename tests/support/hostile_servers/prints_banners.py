"""Prints for people on stdout, at the start and before every answer."""

from rpc import Server, echo, tool

print("*** Welcome to BannerServer 3000! ***\nListening...", flush=True)
server = Server([tool("echo")], echo)
answer = server.answer


def chatty(message):
    print(f"[info] handling {message['method']}", flush=True)
    answer(message)


server.answer = chatty
server.serve()
