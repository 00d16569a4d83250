"""Wakes Steward's sensor: what slurmctld starts for each of Steward's triggers.

This file is copied to the hosts of slurmctld and runs there by itself, with the
system's Python and nothing but its standard library. It says that something
happened, never what is so: who is woken looks for himself. It ends within
a minute whatever it meets: slurmctld would let one that hangs be for five.
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

WHOLE_S = 45
"""After so many seconds it is ended, by the kernel."""
TRY_S = 5.0
PAUSES_S = (0.2, 1.0, 3.0, 8.0)
"""Between one try and the next: a Steward that is started anew is back within seconds."""
LONGEST_SECRET = 4096
LONGEST_NODES = 2000

_PEERCRED = struct.Struct("3i")


class Refused(Exception):
    """There is no use in another try."""


def read_secret(path: str) -> str:
    """What this program proves itself with."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
            raise Refused(f"{path} is open to others: give it the mode 0600")
        return os.read(fd, LONGEST_SECRET).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def wake(path: str, message: bytes) -> None:
    """Say it once, and wait for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TRY_S)
        connection.connect(path)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        if _PEERCRED.unpack(peer)[1] not in (0, os.geteuid()):
            raise Refused(f"{path} is somebody else's: the secret is not told there")
        connection.sendall(message)
        with connection.makefile("rb") as answers:
            answer = answers.readline(16)
    if answer == b"no\n":
        raise Refused("Steward does not take it: is the secret the one of its secret_file?")
    if answer != b"ok\n":
        raise OSError("no answer")


def run(socket_path: str, secret_path: str, cluster: str, event: str, nodes: str) -> None:
    """Say it until somebody has heard it, or it is clear that nobody will."""
    import json

    message = {
        "version": 1,
        "secret": read_secret(secret_path),
        "cluster": cluster,
        "event": event,
        "nodes": nodes[:LONGEST_NODES],
    }
    line = json.dumps(message).encode("ascii") + b"\n"
    for pause_s in (*PAUSES_S, None):
        try:
            wake(socket_path, line)
        except OSError as error:
            if pause_s is None:
                raise Refused(f"nobody listens at {socket_path}: {error}") from error
            time.sleep(pause_s)
        else:
            return


def main(words: list[str]) -> str:
    """What went wrong; "" for nothing.

    The words are ``--socket PATH --secret PATH CLUSTER EVENT NODES``; the last is slurmctld's
    addition.
    """
    # slurmctld's signal mask is handed on to what it starts, and an alarm is among what it blocks.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.alarm(WHOLE_S)
    if len(words) < 6 or words[0] != "--socket" or words[2] != "--secret":
        return "it is started by slurmctld, with words that Steward sets"
    try:
        run(words[1], words[3], words[4], words[5], " ".join(words[6:]))
    except (OSError, Refused) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    failed = main(sys.argv[1:])
    if failed:
        # Of what slurmctld starts nobody sees the output.
        syslog.syslog(syslog.LOG_WARNING, "steward-trigger: " + failed)
    sys.exit(1 if failed else 0)
