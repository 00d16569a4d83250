"""Trigger helper: the program that slurmctld runs for Steward's triggers, to wake the sensor.

This file is copied to the hosts of slurmctld and runs on its own, with the system's Python and the
standard library only. It sends cluster, event and node list over a Unix socket, authenticated by a
secret; the sensor then polls to see what happened. It ends within a minute in every case, because
slurmctld would let a hanging program run for five.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import sys
import syslog
import time

RUN_LIMIT_S = 45
"""Maximum run time in seconds, enforced by the kernel's alarm."""
ATTEMPT_TIMEOUT_S = 5.0
"""Time limit of an attempt, in seconds."""
PAUSES_S = (0.2, 1.0, 3.0, 8.0)
"""Pauses between attempts, in seconds: a restarting Steward is back within seconds."""
MAX_SECRET_BYTES = 4096
"""Bytes read of the secret."""
MAX_REPLY_BYTES = 4096
"""Bytes read of the reply."""
MAX_NODES_LENGTH = 2000
"""Maximum length of the node list sent, in characters."""

_PEERCRED = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


class HelperRefused(Exception):
    """Error: a further attempt is useless."""


def read_secret(path: str) -> str:
    """Read the secret that authenticates this program."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
            raise HelperRefused(f"{path} must be a file of mode 0600: run 'chmod 0600 {path}'")
        return os.read(fd, MAX_SECRET_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def send_message(path: str, message: bytes) -> None:
    """Send the request once and wait for the reply."""
    import json

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ATTEMPT_TIMEOUT_S)
        connection.connect(path)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        if _PEERCRED.unpack(peer)[1] not in (0, os.geteuid()):
            raise HelperRefused(f"{path} belongs to another user, so the secret is not sent there")
        connection.sendall(message)
        with connection.makefile("rb") as replies:
            reply = replies.readline(MAX_REPLY_BYTES)
    try:
        error = json.loads(reply).get("error", "")
    except (ValueError, AttributeError, RecursionError) as malformed:
        raise OSError("no reply") from malformed
    if error:
        raise HelperRefused(f"Steward rejected the report: {error}")


def send_wakeup(socket_path: str, secret_path: str, cluster: str, event: str, nodes: str) -> None:
    """Send the message until it is accepted or further attempts are useless."""
    import json

    request = {
        "v": 1,
        "action": "sensor.wake",
        "args": {"cluster": cluster, "event": event, "nodes": nodes[:MAX_NODES_LENGTH]},
        "auth": read_secret(secret_path),
    }
    line = json.dumps(request).encode("ascii") + b"\n"
    for pause_s in (*PAUSES_S, None):
        try:
            send_message(socket_path, line)
        except OSError as error:
            if pause_s is None:
                raise HelperRefused(f"cannot reach the sensor at {socket_path}: {error}") from error
            time.sleep(pause_s)
        else:
            return


def main(arguments: list[str]) -> str:
    """Run the helper; return the error, "" if none.

    The arguments are ``--socket PATH --secret PATH CLUSTER EVENT NODES``; slurmctld adds the last.
    """
    # Programs inherit slurmctld's signal mask, which blocks the alarm among others.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.alarm(RUN_LIMIT_S)
    if len(arguments) < 6 or arguments[0] != "--socket" or arguments[2] != "--secret":
        return "invalid arguments: slurmctld starts this program, with arguments that Steward sets"
    try:
        send_wakeup(arguments[1], arguments[3], arguments[4], arguments[5], " ".join(arguments[6:]))
    except (OSError, HelperRefused) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    failed = main(sys.argv[1:])
    if failed:
        # Nobody sees the output of a program that slurmctld starts.
        syslog.syslog(syslog.LOG_WARNING, "steward-trigger: " + failed)
    sys.exit(1 if failed else 0)
