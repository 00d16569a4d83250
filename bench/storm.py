"""Plays slurmctld: writes jobs into a spool as it does, as fast or as slowly as it is told.

Run as a program it is the other side of a measurement, so that its CPU time is
not the watcher's. What a job's script and environment hold follows from its
id alone: whoever looks at an archive later can tell what should be in it.
"""

import argparse
import json
import os
import struct
import time
from collections import deque
from pathlib import Path

_USERS = 50
_SCRIPT_BODY = b"".join(
    b"srun --exclusive -n 1 ./simulate --input data/part%03d.in --seed %d > log.%03d &\n"
    % (part, part * 7919, part)
    for part in range(22)
)
_MODULES = b"".join(
    b"EBROOT%02d=/opt/software/easybuild/2026a/package-%02d/4.%d.2-foss-2026a\0" % (n, n, n)
    for n in range(62)
)


def script_of(job_id: int) -> bytes:
    """The script of a job, about 2 kB; no two jobs have the same."""
    return (
        b"#!/bin/bash\n#SBATCH --job-name=storm-%d\n#SBATCH --ntasks=4\n#SBATCH --time=01:00:00\n"
        b"module load foss/2026a simulator/%d\n%swait\n" % (job_id, job_id % 97, _SCRIPT_BODY)
    )


def secret_of(job_id: int) -> bytes:
    """A value that the environment of a job holds and that must be in no file of Steward's."""
    return b"hush-%d-%x-not-for-disk" % (job_id, job_id * 2654435761 % 2**32)


def environment_of(job_id: int, secret: bytes | None = None) -> bytes:
    """The environment file of a job, about 6 kB in 80 variables, as slurmctld writes it.

    Args:
        job_id: The job.
        secret: Put in place of its secret value.
    """
    user = b"user%02d" % (job_id % _USERS)
    secret = secret_of(job_id) if secret is None else secret
    block = (
        b"SHELL=/bin/bash\0HOME=/home/%(user)s\0USER=%(user)s\0LOGNAME=%(user)s\0"
        b"MAIL=/var/mail/%(user)s\0LANG=en_GB.UTF-8\0TERM=xterm-256color\0"
        b"PATH=/home/%(user)s/bin:/opt/software/bin:/usr/local/bin:/usr/bin:/bin\0"
        b"LD_LIBRARY_PATH=/opt/software/lib64:/opt/software/lib\0"
        b"BASH_FUNC_module%%%%=() {  eval `/usr/bin/modulecmd bash $*`\n}\0"
        b"%(modules)s"
        b"SERVICE_TOKEN=%(secret)s\0"
        b"SLURM_JOB_NAME=storm-%(job)d\0SLURM_SUBMIT_DIR=/home/%(user)s/run%(job)d\0"
        b"SLURM_SUBMIT_HOST=login1\0SLURM_PRIO_PROCESS=0\0SLURM_UMASK=0022\0"
    ) % {b"user": user, b"modules": _MODULES, b"secret": secret, b"job": job_id}
    return struct.pack("=I", block.count(b"\0")) + block


def write_job(spool: str, job_id: int) -> int:
    """Write one job in slurmctld's order; returns when its script was closed (monotonic ns)."""
    directory = f"{spool}/hash.{job_id % 10}/job.{job_id}"
    script, environment = script_of(job_id), environment_of(job_id)
    try:
        os.mkdir(directory, 0o700)
    except FileNotFoundError:
        os.mkdir(os.path.dirname(directory), 0o700)
        os.mkdir(directory, 0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = os.open(f"{directory}/environment", flags, 0o600)
    os.write(fd, environment)
    os.close(fd)
    fd = os.open(f"{directory}/script", flags, 0o600)
    os.write(fd, script + b"\0")
    closed_ns = time.monotonic_ns()
    os.close(fd)
    return closed_ns


def remove_job(spool: str, job_id: int) -> None:
    """Remove a job as slurmctld does when it forgets it."""
    directory = f"{spool}/hash.{job_id % 10}/job.{job_id}"
    os.unlink(f"{directory}/environment")
    os.unlink(f"{directory}/script")
    os.rmdir(directory)


def storm(
    spool: str,
    first: int,
    jobs: int,
    *,
    rate: float = 0.0,
    live_s: float = 0.0,
    burst: int = 1,
) -> dict[int, int]:
    """Write ``jobs`` jobs with ids from ``first``.

    Args:
        spool: The directory.
        first: The lowest id.
        jobs: How many.
        rate: Jobs a second; 0 for as fast as can be.
        live_s: Seconds after which each is removed again; 0 for never.
        burst: How many are written at once; the rate stays the same.

    Returns:
        When each was closed, in ns of CLOCK_MONOTONIC.
    """
    closed: dict[int, int] = {}
    alive: deque[tuple[float, int]] = deque()
    began = time.monotonic()
    for number in range(jobs):
        due = began + number // burst * burst / rate if rate else 0.0
        _remove_until(spool, alive, due)
        wait_s = due - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        job_id = first + number
        closed[job_id] = write_job(spool, job_id)
        if live_s:
            alive.append((time.monotonic() + live_s, job_id))
    _remove_until(spool, alive, float("inf"))
    return closed


def _remove_until(spool: str, alive: deque[tuple[float, int]], until: float) -> None:
    """Remove jobs whose time is over, waiting for those that end before ``until``."""
    while alive and (alive[0][0] <= until or alive[0][0] <= time.monotonic()):
        ends, job_id = alive.popleft()
        wait_s = ends - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        remove_job(spool, job_id)


def main() -> None:
    """Read the arguments, play, and write down when each script was closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spool")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.0, help="jobs a second, 0 for no limit")
    parser.add_argument("--live", type=float, default=0.0, help="seconds until it is removed")
    parser.add_argument("--burst", type=int, default=1, help="jobs written at once")
    parser.add_argument("--times", default="", help="file for when each script was closed")
    options = parser.parse_args()
    began_ns = time.monotonic_ns()
    closed = storm(
        options.spool,
        options.first,
        options.jobs,
        rate=options.rate,
        live_s=options.live,
        burst=options.burst,
    )
    if options.times:
        told = {"began_ns": began_ns, "ended_ns": time.monotonic_ns(), "closed_ns": closed}
        Path(options.times).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
