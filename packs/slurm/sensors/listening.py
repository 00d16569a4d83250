"""Hears of Slurm's triggers: a small HTTP server, of the standard library alone.

slurmctld starts ``slurm-trigger-notify http://ADDRESS:32000/UUID/CLASS/TYPE NODES``.
Every user of the cluster can see that line, so nothing that comes here is believed:
who is told of it looks for itself. So what is heard is bounded in size, number and time.
"""

import contextlib
import queue
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple

_WORD: Final = re.compile(r"[a-z_]{1,40}")
_NODES: Final = re.compile(r"[A-Za-z0-9_.,\[\]-]{0,65536}")
_TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 65536
_MOST_WAITING: Final = 200


class Heard(NamedTuple):
    """What a trigger said of itself: its class ("node"), its type ("down"), and node list."""

    kind: str
    type: str
    nodes: str


class Listener:
    """Listens for triggers.

    Args:
        address: Where it listens.
        port: Its port; 0 for any.
        uuid: What paths begin with.
    """

    def __init__(self, address: str, port: int, uuid: str) -> None:
        self.heard: queue.Queue[Heard | None] = queue.Queue(_MOST_WAITING)
        """What was heard; None when it ends."""
        heard = self.heard

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                self._take("")

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "0")
                if not length.isascii() or not length.isdigit() or int(length) > _MOST_BYTES:
                    self.send_error(413)
                    return
                self._take(self.rfile.read(int(length)).decode("ascii", "replace").strip())

            def _take(self, nodes: str) -> None:
                parts = self.path.strip("/").split("/")
                is_known = len(parts) == 3 and parts[0] == uuid
                if not is_known or not all(_WORD.fullmatch(part) for part in parts[1:]):
                    self.send_error(404)
                    return
                if not _NODES.fullmatch(nodes):
                    self.send_error(400)
                    return
                try:
                    heard.put_nowait(Heard(parts[1], parts[2], nodes))
                except queue.Full:
                    self.send_error(429)
                    return
                self.send_response(204)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Nothing: whoever can reach the port could fill the log."""

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Listen no more, and wake who waits for what is heard."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_TIMEOUT_S)
        self._server.server_close()
        # Where it is full, who waits has enough to wake up for.
        with contextlib.suppress(queue.Full):
            self.heard.put_nowait(None)
