"""Tells when scripts appear in an archive: the job's id and the moment, a line each.

Runs until its standard input is closed. The moment is when this process is
told by the kernel, so it is late by what the scheduler takes to run it.
"""

import os
import re
import select
import sys
import time

from inotify_simple import INotify, flags

_MASK = flags.CREATE | flags.MOVED_TO | flags.ONLYDIR
_SCRIPT = re.compile(r"(\d+)-[^/]*\.sh")


def main(root: str) -> None:
    """Watch ``root`` and all directories that appear below it."""
    inotify = INotify(nonblocking=True)
    watched: dict[int, str] = {}
    told: dict[str, int] = {}

    def watch(path: str) -> None:
        watched[inotify.add_watch(path, _MASK)] = path
        # What was made before the watch was there is seen now, and a little late.
        with os.scandir(path) as entries:
            for entry in entries:
                look(path, entry.name)

    def look(path: str, name: str) -> None:
        match = _SCRIPT.fullmatch(name)
        if match:
            told.setdefault(match[1], time.monotonic_ns())
        elif not name.startswith(".") and os.path.isdir(f"{path}/{name}"):
            watch(f"{path}/{name}")

    watch(root)
    poller = select.poll()
    poller.register(inotify.fileno(), select.POLLIN)
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    ended = False
    while not ended:
        ended = any(fd == sys.stdin.fileno() for fd, _ in poller.poll())
        for event in inotify.read(timeout=0):
            look(watched[event.wd], event.name)
    for job_id, seen_ns in told.items():
        print(job_id, seen_ns)


if __name__ == "__main__":
    main(sys.argv[1])
