"""HTTP server on loopback that answers by a test's handler."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from servers.server import HOST

_LOOK_S = 0.01


class Quiet:
    """Handler that logs no requests."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Serve on a free port within the block.

    Args:
        handler: Answers each request, in a separate thread.
    """
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(_LOOK_S,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
