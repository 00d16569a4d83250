"""Waiting that can be ended: every wait of a daemon's process watches its Stop as well."""

import os
import select


class Stop:
    """A flag that any thread or signal handler may raise, and that poll(2) can watch."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._set = False

    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)

    def set(self) -> None:
        """Raise the flag, for good."""
        if not self._set:
            self._set = True
            # Never read again: the pipe stays readable, so every later wait ends at once.
            os.write(self._write_fd, b"!")

    def is_set(self) -> bool:
        """Whether the flag is up."""
        return self._set

    def wait(self, timeout_s: float, *fds: int) -> bool:
        """Wait until one of ``fds`` can be read, the flag is raised, or the time is over.

        Returns:
            Whether one of ``fds`` can be read.
        """
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        for fd in fds:
            poller.register(fd, select.POLLIN)
        return any(fd != self.fd for fd, _ in poller.poll(max(0.0, timeout_s) * 1000))


class Backoff:
    """How long to wait before the next try: doubling from ``first_s`` up to ``most_s`` seconds."""

    def __init__(self, first_s: float = 0.2, most_s: float = 15.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now; longer at each call."""
        now_s, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return now_s

    def reset(self) -> None:
        """It worked: begin anew."""
        self._next_s = self._first_s
