"""A server of the tests' own, on a free port of loopback for the time of a block."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_POLL_SECONDS = 0.02  # how long an end waits


class Handler(BaseHTTPRequestHandler):
    """Answers in one piece and logs nothing."""

    def reply(self, status: int, text: str) -> None:
        """Answer a request."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing on stderr."""


@contextmanager
def serving(
    handler: Callable[..., BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None, **state: Any
) -> Iterator[tuple[ThreadingHTTPServer, str]]:
    """Serve with ``handler``; yield the server, which has the attributes of ``state`` for it, and its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    for name, value in state.items():
        setattr(server, name, value)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield server, f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
