"""A gate that is none: takes connections and says nothing, or what nobody can make sense of."""

import contextlib
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class Impostor:
    """Listens where the gate would.

    Args:
        path: Of the socket.
        says: What it answers each time; None to take the connection and stay silent.
    """

    def __init__(self, path: Path, says: bytes | None) -> None:
        self.asked = 0
        self._says = says
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        os.chmod(path, 0o777)
        self._socket.listen(128)
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
        for taken in self._taken:
            taken.close()

    def _serve(self) -> None:
        while True:
            try:
                taken, _ = self._socket.accept()
            except OSError:
                return  # it is over
            self.asked += 1
            self._taken.append(taken)
            if self._says is not None:
                with contextlib.suppress(OSError):  # the other side has had enough
                    taken.settimeout(5)
                    taken.recv(65536)
                    taken.sendall(self._says)
                    taken.close()
