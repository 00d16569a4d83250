"""Reload of the daemon's configuration: the supervisor's listener and the client's request.

The supervisor listens on a Unix socket beside the daemon's own, ``SOCKET.reload``
(`ReloadListener`), for root and Steward's user. It answers a request (`request_reload`) when the
workers of the new configuration run, or when it is rejected.
"""

import logging
from typing import Final

import msgspec

from steward.core.errors import StewardError, UsageError
from steward.core.rpc import send_request
from steward.core.rpc_server import RpcCall, RpcListener

log = logging.getLogger(__name__)

_ACTION: Final = "daemon.reload"


class ReloadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a reload request.

    Attributes:
        waiting: Workers of the new configuration that did not become ready in time.
    """

    waiting: tuple[str, ...] = ()


class ReloadListener:
    """Listener of the supervisor: collects reload requests until it answers them together."""

    def __init__(self) -> None:
        self._path = ""
        self._listener: RpcListener | None = None
        self._calls: list[RpcCall] = []

    @property
    def fds(self) -> tuple[int, ...]:
        """Return descriptors that become readable when a request arrives."""
        return () if self._listener is None else (self._listener.fd,)

    def open(self, path: str) -> None:
        """Listen beside a daemon's socket; if that fails, only SIGHUP reloads.

        Args:
            path: The daemon's socket; "" for none.
        """
        if path == self._path:
            return
        self._close_listener()
        if not path:
            return
        socket_path = f"{path}.reload"
        try:
            self._listener = RpcListener(socket_path)
        except OSError as error:
            log.warning(
                "cannot listen on %s, so 'steward reload' fails: %s", socket_path, error.strerror
            )
            return
        self._path = path

    def accept(self) -> bool:
        """Accept requests; return True if a reload was requested."""
        calls = [] if self._listener is None else self._listener.receive()
        for call in calls:
            if call.message.action == _ACTION:
                self._calls.append(call)
            else:
                call.reject(UsageError(f"the supervisor has no action {call.message.action!r}"))
        return bool(self._calls)

    def answer(self, reply: ReloadReply) -> None:
        """Answer all accepted requests."""
        for call in self._calls:
            call.reply(reply)
        self._calls.clear()

    def reject(self, reason: str) -> None:
        """Reject all accepted requests."""
        for call in self._calls:
            call.reject(StewardError(f"{reason}; the daemon keeps its present configuration"))
        self._calls.clear()

    def close_in_child(self) -> None:
        """Close the supervisor's connections in a forked process."""
        for call in self._calls:
            call.close()
        if self._listener is not None:
            self._listener.close_in_child()

    def close(self) -> None:
        """Stop listening; drop unanswered requests."""
        for call in self._calls:
            call.close()
        self._calls.clear()
        self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._path, self._listener = "", None


def request_reload(path: str, timeout_s: float) -> ReloadReply:
    """Ask a daemon to reload its configuration, and return its reply.

    Args:
        path: The daemon's socket.
        timeout_s: Longest time to wait for the answer, in seconds.

    Raises:
        RpcUnavailable: No daemon answers.
        StewardError: The daemon rejected the configuration and keeps the present one.
    """
    return send_request(f"{path}.reload", _ACTION, {}, ReloadReply, timeout_s=timeout_s)
