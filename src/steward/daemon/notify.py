"""Tells systemd how we are (sd_notify): ready, reloading, stopping, alive.

The protocol is the one of systemd's sd_notify(3): a datagram of ``NAME=value``
lines to the socket in ``NOTIFY_SOCKET``. Without it everything here does nothing.
"""

import logging
import os
import socket
import time

log = logging.getLogger(__name__)


class Notifier:
    """The service manager's ear, if it has lent us one."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(microseconds) / 2e6 if microseconds.isdigit() else 0.0
        self._alive_at = 0.0

    def send(self, *lines: str) -> None:
        """Say something; a service manager that does not listen is no reason to stop."""
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.settimeout(1.0)
                out.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("cannot notify the service manager at %s: %s", self._address, error)

    def ready(self) -> None:
        """All parts are running."""
        self.send("READY=1", f"STATUS=running, process {os.getpid()}")

    def reloading(self) -> None:
        """The configuration is being read again; :meth:`ready` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end has begun."""
        self.send("STOPPING=1")

    def alive(self) -> None:
        """Pat the watchdog, when it is due."""
        now = time.monotonic()
        if self._watchdog_s and now >= self._alive_at:
            self._alive_at = now + self._watchdog_s
            self.send("WATCHDOG=1")
