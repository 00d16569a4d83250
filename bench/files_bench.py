"""What filing a job costs: user CPU and wall time a job, by layout, on tmpfs or BENCH_DIR.

Run: ``python bench/files_bench.py [jobs]``. The bytes lie in the store already;
measured is what the files sink does with batches of its own size.
"""

import hashlib
import os
import resource
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from typing import Any, Literal

from scale import scaled
from steward.archive.files.sink import FilesSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import Event, IncomingFile, JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.core.script_stores import make_incoming_filename, make_stores
from steward.slurm.settings import ClusterSettings

SCRIPT = b"#!/bin/sh\n#SBATCH -n 4\nmodule load gromacs\nsrun gmx mdrun\n" * 10
ENVIRONMENT = b"\x02\0\0\0" + b"HOME=/home/ada\0PATH=/usr/bin:/bin\0" * 40
FIRST = time.time_ns() - 10**12


def main(jobs: int) -> None:
    """Measure the layouts and print a line for each."""
    directory = os.environ.get("BENCH_DIR") or "/dev/shm"
    print(f"{jobs} jobs on {directory}")
    compress: Literal["none", "zstd"]
    for label, layout, slurm, is_loop, compress in (
        ("unverified (no identity)", "default", False, False, "none"),
        ("sarchive", "sarchive", False, False, "none"),
        ("sliced", "sliced", False, False, "none"),
        ("default, identity follows", "default", True, False, "none"),
        ("the same, all scripts alike", "default", True, True, "none"),
        ("the same, all differ, zstd", "default", True, False, "zstd"),
    ):
        where = tempfile.mkdtemp(prefix="steward-bench-", dir=directory)
        try:
            sink = FilesSinkSettings(path=f"{where}/tree", layout=layout, compress=compress)
            _measure(where, jobs, label, sink, slurm=slurm, is_loop=is_loop)
        finally:
            shutil.rmtree(where)


def _measure(
    where: str, jobs: int, label: str, of: FilesSinkSettings, *, slurm: bool, is_loop: bool
) -> None:
    os.mkdir(f"{where}/state")
    settings = Settings(
        state_dir=f"{where}/state",
        cluster={"alpha": ClusterSettings(slurm=slurm)},
        archive=ArchiveSettings(sink={"files": of}),
    )
    sink = FilesSink(settings, "files", make_stores(settings))
    sink.prepare()
    store = f"{where}/tree/.incoming"
    os.mkdir(store, 0o700)
    events = [_script(store, number, is_loop=is_loop) for number in range(jobs)]
    if slurm:
        events += [_identity(event, number) for number, event in enumerate(events)]
    before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for start in range(0, len(events), 500):
        sink.apply(events[start : start + 500], start + 500, lambda _: None)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF)
    sink.close()
    user = (after.ru_utime - before.ru_utime) / jobs * 1e6
    system = (after.ru_stime - before.ru_stime) / jobs * 1e6
    print(
        f"{label:28} {user:7.1f} us user  {system:7.1f} us system  "
        f"{wall / jobs * 1e6:7.1f} us wall  per job"
    )


def _script(store: str, number: int, *, is_loop: bool) -> Event:
    job_id, mtime_ns = 100000 + number, FIRST + number * 1000
    kept = []
    mark = b"" if is_loop else b"# %d" % number
    for data, what in ((SCRIPT + mark, "script"), (ENVIRONMENT + mark, "env")):
        name = make_incoming_filename("alpha", job_id, mtime_ns, len(data), what)
        with open(f"{store}/{name}", "wb") as file:
            file.write(data)
        os.chmod(f"{store}/{name}", 0o600)
        kept.append(
            IncomingFile(path=name, length=len(data), sha256=hashlib.sha256(data).hexdigest())
        )
    body = JobScript(
        job_id=job_id,
        spool_mtime_ns=mtime_ns,
        script=kept[0],
        environment=kept[1],
        store="archive.files",
        claimed_name="mdrun",
        claimed_dir="/home/ada/work",
        claimed_host="login1",
    )
    return _event("job.script", f"script:{job_id}:{mtime_ns}", body)


def _identity(script: Event, number: int) -> Event:
    uid = 5000 + number % 20
    record = JobRecord(job_id=script.body.job_id, name="mdrun", uid=uid, user=f"user{uid}")
    body = JobIdentity(
        script_key=script.key,
        job_id=script.body.job_id,
        first_submit=datetime.now(UTC),
        record=record,
    )
    return _event("job.identity", f"identity:{script.key}", body)


def _event(kind: str, key: str, body: Any) -> Event:
    now = datetime.now(UTC)
    return Event(
        kind=kind, cluster="alpha", key=key, at=now, seen_at=now, source="spool", body=body
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else scaled(5000, 500))
