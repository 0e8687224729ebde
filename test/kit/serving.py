"""HTTP servers of tests: quiet, and ended with the test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """No line in the log for each request."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Answer in a thread; the URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(20)
