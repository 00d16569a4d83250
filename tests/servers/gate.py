"""Scripted gate on a real Unix socket, for slurmctld's plugin."""

import json
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Question = dict[str, Any]
Answers = Callable[[Question, socket.socket], bytes | None]


def says(**members: Any) -> Answers:
    """Send the same answer to every peer."""
    data = json.dumps({"v": 1, "ok": True, **members}).encode() + b"\n"
    return lambda _question, _sock: data


ADMITS = says()


def hangs(_question: Question, sock: socket.socket) -> bytes | None:
    """Read requests without an answer; close when the peer does."""
    sock.settimeout(30)
    sock.recv(1)
    return None


class AskedGate:
    """Receives and stores questions; a test can change its answers at any time.

    Args:
        path: Path of the socket.
        answers: Returns the bytes of an answer, or sends some itself and returns None.
    """

    def __init__(self, path: Path, answers: Answers = ADMITS) -> None:
        self.path = path
        self.answers = answers
        self.asked: list[Question] = []
        self.connections = 0
        self._lock = threading.Lock()
        self._end_read, self._end_write = os.pipe()
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        os.close(self._end_read)
        os.close(self._end_write)

    def start(self, backlog: int = 1024) -> None:
        """Start listening."""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self.path))
        self.path.chmod(0o777)
        self._listening.listen(backlog)
        self._thread = threading.Thread(target=self._serve, args=(self._listening,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and remove the socket."""
        if self._thread is None or self._listening is None:
            return
        os.write(self._end_write, b"x")
        self._thread.join(30)
        os.read(self._end_read, 1)
        self._listening.close()
        self._thread = None
        self.path.unlink(missing_ok=True)

    def _serve(self, listening: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([listening.fileno(), self._end_read], [], [])
            if self._end_read in ready:
                return
            connection, _ = listening.accept()
            with self._lock:
                self.connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock:
            try:
                with sock.makefile("rb") as stream:
                    line = stream.readline(1 << 20)
                    question = json.loads(line)
                    with self._lock:
                        self.asked.append(question)
                    data = self.answers(question, sock)
                    if data:
                        sock.sendall(data)
            except (OSError, ValueError):
                return  # the other side has gone, or has not asked: tests look at `asked`


class FullGate:
    """Gate that accepts no connection, because its queue is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socks: list[socket.socket] = []

    def __enter__(self) -> Self:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self.path))
        self.path.chmod(0o777)
        listening.listen(0)
        self._socks = [listening]
        for _ in range(8):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            self._socks.append(sock)
            try:
                sock.connect(str(self.path))
            except BlockingIOError:
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sock in self._socks:
            sock.close()
        self.path.unlink(missing_ok=True)
