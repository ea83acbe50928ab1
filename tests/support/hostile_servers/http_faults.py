"""An HTTP server that is no MCP server: `/401`, `/403`, `/404`, `/500` answer with that status, `/html` with a page, `/hang` never,
`/json` with other JSON, `/empty` with nothing.

with http_faults() as url: …  (runs in a thread of the test)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BODIES = {"/json": ("application/json", b'{"message": "Welcome to the API"}'), "/empty": ("application/json", b"")}


class _Handler(BaseHTTPRequestHandler):
    released: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/hang":
            self.released.wait(60)
            return
        status = int(self.path[1:]) if self.path[1:].isdigit() else 200
        kind, body = _BODIES.get(self.path, ("text/html", b"<html><body>Welcome to the web</body></html>"))
        if status == 204:
            body = b""
        self.send_response(status)
        if status != 204:
            self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if status == 401:
            self.send_header("www-authenticate", 'Bearer realm="mcp"')
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_DELETE = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def http_faults() -> Iterator[str]:
    released = threading.Event()
    handler = type("Handler", (_Handler,), {"released": released})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join()
