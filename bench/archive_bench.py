"""Time and memory of ``archive verify``, ``reindex`` and ``list`` over many scripts.

    python bench/archive_bench.py [--scripts 100000] [--dir DIR] [--steward COMMAND]

``days`` is an archive of 300 users, a directory for each day of a user; ``one`` has all scripts of
one user and one day, so that a single directory holds every file. Each command runs as root's or
Steward's user runs it, in a process of its own. find(1) with sha256sum(1) reads the same files.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

import million
from scale import scaled
from steward.archive.files.sink import FilesSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import Event, JobFacts
from steward.core.script_stores import make_stores
from steward.jobs.consumer import JobsConsumer
from steward.slurm.settings import ClusterSettings

HELPER = """
import os, sys, time
began = time.perf_counter()
null = os.open(os.devnull, os.O_WRONLY)
actions = [(os.POSIX_SPAWN_DUP2, null, 1)]
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions)
_, status, usage = os.wait4(pid, 0)
wall_s = time.perf_counter() - began
cpu_s = usage.ru_utime + usage.ru_stime
print([os.waitstatus_to_exitcode(status), wall_s, cpu_s, usage.ru_maxrss])
"""
"""Program that runs a command: a process's peak includes the memory of the process it came from."""

CONFIG = """state_dir = "{0}/state"
[cluster.alpha]
timezone = "UTC"
[archive.sink.files]
kind = "files"
path = "{0}/tree"
"""


def fill(where: str, scripts: int) -> None:
    """Archive the scripts, and record their jobs."""
    os.mkdir(f"{where}/state", 0o700)
    Path(f"{where}/steward.toml").write_text(CONFIG.format(where))
    settings = Settings(
        state_dir=f"{where}/state",
        cluster={"alpha": ClusterSettings(timezone="UTC")},
        archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=f"{where}/tree")}),
    )
    stores = make_stores(settings)
    sink, jobs = FilesSink(settings, "files", stores), JobsConsumer(settings)
    sink.prepare()
    store = stores.get("archive.files")
    position = 0
    for made, events in million.batches(scripts):
        bodies = [event.body for event in events[::2]]
        for one, body in zip(made, bodies, strict=True):
            store.write(body.script.path, one.script)
            store.write(body.environment.path, one.environment)
        store.sync()
        position += len(events)
        sink.apply(events, position, lambda _: None)
        jobs.apply([*events[::2], *map(make_end, events[1::2])], position, lambda _: None)
        store.unlink(
            [name for body in bodies for name in (body.script.path, body.environment.path)]
        )
    sink.close()
    jobs.close()


def make_end(identity: Event) -> Event:
    """The end of the job of an identity event."""
    record = msgspec.structs.replace(
        identity.body.record, state="COMPLETED", start=identity.at, end=identity.at, exit_code=0
    )
    return msgspec.structs.replace(
        identity,
        kind="job.end",
        key=f"end:{record.job_id}",
        body=JobFacts(record=record, whole=False),
    )


def measure(label: str, command: Sequence[str]) -> None:
    """Run a command and print its time and the peak of its resident memory."""
    helper = [sys.executable, "-S", "-E", "-c", HELPER, *command]
    done = subprocess.run(helper, stdout=subprocess.PIPE, check=True)
    exit_code, wall_s, cpu_s, peak_kib = msgspec.json.decode(done.stdout)
    note = f"  exit code {exit_code}" if exit_code else ""
    print(
        f"{label:28} {wall_s:6.1f} s  {cpu_s:6.1f} s CPU  {peak_kib / 1024:6.0f} MB{note}",
        flush=True,
    )


def play(base: str | None, shape: str, scripts: int, steward: Sequence[str]) -> None:
    """Fill an archive of a shape, then run every command on it."""
    million.USERS, million.DAY_NS = (1, 60 * 10**9) if shape == "one" else (300, 86400 * 10**9)
    with tempfile.TemporaryDirectory(prefix="steward-archive-", dir=base) as where:
        fill(where, scripts)
        print(f"{scripts} scripts, {shape}:")
        place = ("--config", f"{where}/steward.toml")
        measure("archive verify", (*steward, "archive", "verify", *place))
        measure("archive reindex", (*steward, "archive", "reindex", *place))
        listing = (*steward, "archive", "list", "-S", "2020-01-01", *place)
        for words in ((), ("-P",), ("--csv",), ("--json",)):
            measure(f"archive list {' '.join(words)}", (*listing, *words))
        hashes = f"find {where}/tree -type f -print0 | xargs -0 sha256sum"
        measure("find, sha256sum", ("sh", "-c", hashes))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scripts", type=int, default=scaled(100_000, 200))
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument(
        "--steward", default=f"{sys.executable} -m steward", help="Command to measure."
    )
    parser.add_argument("--shape", choices=("days", "one"), help="Default: both.")
    options = parser.parse_args()
    for shape in (options.shape,) if options.shape else ("days", "one"):
        play(options.dir, shape, options.scripts, shlex.split(options.steward))


if __name__ == "__main__":
    main()
