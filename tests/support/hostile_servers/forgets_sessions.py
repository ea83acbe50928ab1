"""A streamable-HTTP server that forgets its sessions when told to, and refuses them as some server does.

with forgets_sessions(404, "Session not found") as server: server.url, server.sessions, server.forget()

Tools: `echo`; `drop` closes the connection in the middle of the call; `refuse` answers with status 400 and no word of sessions.
It speaks the handshake protocol, in a thread of the test.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [{"name": name, "description": name, "inputSchema": {"type": "object", "properties": {}}} for name in ("echo", "drop", "refuse")]


class Forgetful:
    def __init__(self, status: int, words: str) -> None:
        self.status, self.words = status, words
        self.url = ""
        self.sessions: list[str] = []
        """All that were ever begun."""
        self.known: set[str] = set()

    def forget(self) -> None:
        self.known.clear()

    def begin(self) -> str:
        self.sessions.append(f"session-{len(self.sessions)}")
        self.known.add(self.sessions[-1])
        return self.sessions[-1]


class _Handler(BaseHTTPRequestHandler):
    state: Forgetful
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
        method, params, named = message.get("method"), message.get("params") or {}, self.headers.get("mcp-session-id")
        if method == "server/discover":
            self._error(message, 200, -32601, "Method not found")
        elif method == "initialize":
            info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "forgetful", "version": "1"}}
            self._send(200, {"jsonrpc": "2.0", "id": message["id"], "result": info}, self.state.begin())
        elif named not in self.state.known:
            self._error(message, self.state.status, -32001, self.state.words)
        elif "id" not in message:
            self._send(202, None)
        elif params.get("name") == "drop":
            self.close_connection = True
        elif params.get("name") == "refuse":
            self._send(400, {"detail": "no such thing"})
        else:
            content = {"content": [{"type": "text", "text": f"in {named}"}]}
            results = {"tools/list": {"tools": TOOLS}, "tools/call": content, "ping": {}}
            self._send(200, {"jsonrpc": "2.0", "id": message["id"], "result": results[method]})

    def do_GET(self) -> None:
        self._send(405, None)

    do_DELETE = do_GET

    def _error(self, message: Any, status: int, code: int, words: str) -> None:
        self._send(status, {"jsonrpc": "2.0", "id": message.get("id"), "error": {"code": code, "message": words}})

    def _send(self, status: int, body: Any, session: str | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if session is not None:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def forgets_sessions(status: int = 404, words: str = "Session not found") -> Iterator[Forgetful]:
    state = Forgetful(status, words)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
