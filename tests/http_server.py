"""An HTTP server in this process: quiet about clients that leave, and ended with all its threads."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing it waits for them: what they print or change would be another test's

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Quiet(BaseHTTPRequestHandler):
    """A handler that logs no requests.

    A subclass also names `BaseHTTPRequestHandler`, by which ruff accepts the names of its methods.
    """

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, headers: Mapping[str, str], body: bytes, sent: int | None = None) -> None:
        """Answer a request; of the body, only `sent` bytes if given, and none to HEAD."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on a free port of the loopback interface."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
