"""Stop flag and back-off: waits in daemon processes that a stop request ends at once.

``Stop`` is the flag that every wait of a daemon process watches beside its own descriptors;
``Backoff`` gives the delays between retries.
"""

import os
import select


class Stop:
    """A stop flag that any thread or signal handler may set, and that poll(2) can watch."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._set = False

    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)

    def set(self) -> None:
        """Set the flag; it is never cleared."""
        if not self._set:
            self._set = True
            # Never read: the pipe stays readable, so every later wait ends at once.
            os.write(self._write_fd, b"!")

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._set

    def wait(self, timeout_s: float, *fds: int) -> bool:
        """Wait until one of ``fds`` is readable, the flag is set, or ``timeout_s`` is over.

        Returns:
            Whether one of ``fds`` is readable.
        """
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        for fd in fds:
            poller.register(fd, select.POLLIN)
        return any(fd != self.fd for fd, _ in poller.poll(max(0.0, timeout_s) * 1000))


class Backoff:
    """Delays between retries, doubling from ``first_s`` up to ``max_s`` seconds."""

    def __init__(self, first_s: float = 0.2, max_s: float = 15.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return the seconds to wait now, and double the next delay."""
        now_s, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        return now_s

    def reset(self) -> None:
        """Start at the first delay again, after a success."""
        self._next_s = self._first_s
