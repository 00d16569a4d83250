"""CPU time of an accounting import: rows of sacct to the journal, to jobs.db and the job log.

    python bench/imports_bench.py [--jobs 20000] [--dir DIR] [--profile PART]

The rows are those of jobs of 200 users, each with a batch and an extern step, as a scripted sacct
prints them. One process reads them and appends events; then the jobs consumer and the job log apply
the events, and a second import of the same rows follows. Journal bytes exclude free pages.
"""

import argparse
import cProfile
import os
import pstats
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from bars import Bar, check, finish
from scale import scaled
from steward.accounting.imports import ImportEventMaker, get_positions_path, import_days
from steward.core.config import Settings
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.redaction import make_redactor
from steward.extensions.jobacct_plugins.log.consumer import LogConsumer
from steward.jobs import database_path
from steward.jobs.consumer import JobsConsumer
from steward.slurm.commands import CommandRunner
from steward.slurm.sacct import FIELDS, SacctHistory
from steward.slurm.settings import ClusterSettings
from steward.slurm.users import NameResolver

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
JOBS_A_DAY = 10_000
_CPU = Bar("import from slurmdbd: CPU time of a job or step", "ms", 0.3)
_JOURNAL = Bar("import from slurmdbd: journal of a job", "B", 200)
_JOBS_DB = Bar("jobs.db of a job with two steps", "B", 2000)


def make_rows(job: int, rng: random.Random) -> list[dict[str, str]]:
    """Make the rows of one job and its two steps."""
    user = f"user{rng.randrange(200)}"
    submit = BEGIN + timedelta(seconds=job * 86400 / JOBS_A_DAY)
    start = submit + timedelta(seconds=rng.randrange(3600))
    seconds = rng.randrange(20, 20_000)
    end = start + timedelta(seconds=seconds)
    cpus = rng.choice([1, 2, 4, 16, 32])
    state, code = ("COMPLETED", "0:0") if job % 10 else ("FAILED", "1:0")
    tres = f"billing={cpus},cpu={cpus},mem={cpus * 4096}M,node=1"
    node = f"node{rng.randrange(400):04d}"
    times = {
        "Submit": f"{submit:%Y-%m-%dT%H:%M:%S}",
        "Eligible": f"{submit:%Y-%m-%dT%H:%M:%S}",
        "Start": f"{start:%Y-%m-%dT%H:%M:%S}",
        "End": f"{end:%Y-%m-%dT%H:%M:%S}",
    }
    both = {
        **times,
        "State": state,
        "ExitCode": code,
        "Suspended": "00:00:00",
        "NNodes": "1",
        "NCPUS": str(cpus),
        "NodeList": node,
        "AllocTRES": tres,
        "DBIndex": str(job),
    }
    home = f"/home/{user}/project{rng.randrange(9)}"
    rows = [
        {
            **both,
            "JobIDRaw": str(job),
            "JobID": str(job),
            "UID": str(2000 + int(user[4:])),
            "GID": "2000",
            "DerivedExitCode": code,
            "TimelimitRaw": "1440",
            "ReqCPUS": str(cpus),
            "ReqNodes": "1",
            "ReqTRES": tres,
            "Restarts": "0",
            "User": user,
            "Group": "users",
            "Account": f"account{int(user[4:]) % 40}",
            "Partition": rng.choice(["long", "short", "gpu"]),
            "QOS": "normal",
            "Priority": str(rng.randrange(100_000)),
            "Flags": "SchedMain,StartRecieved",
            "JobName": f"run-{rng.randrange(1000)}",
            "WorkDir": home,
            "StdIn": "/dev/null",
            "StdOut": f"{home}/slurm-%j.out",
            "StdErr": f"{home}/slurm-%j.out",
            "SubmitLine": f"sbatch -c {cpus} --mem-per-cpu=4G run-{rng.randrange(1000)}.sh",
        }
    ]
    for step in ("batch", "extern"):
        rss, read = rng.randrange(10**10), rng.randrange(10**10)
        usage = f"cpu=00:10:00,energy=0,fs/disk={read},mem={rss},pages=0,vmem={rss + 1000}"
        rows.append(
            {
                **both,
                "JobIDRaw": f"{job}.{step}",
                "JobID": f"{job}.{step}",
                "NTasks": "1",
                "UserCPU": f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}",
                "SystemCPU": f"00:{rng.randrange(60):02d}.{rng.randrange(1000):03d}",
                "MinCPU": "00:10:00",
                "MinCPUNode": node,
                "MinCPUTask": "0",
                "AveCPU": "00:10:00",
                "MaxRSSNode": node,
                "MaxRSSTask": "0",
                "AveRSS": str(rss),
                "MaxPagesNode": node,
                "MaxPagesTask": "0",
                "AvePages": "0",
                "MaxDiskReadNode": node,
                "MaxDiskReadTask": "0",
                "MaxDiskWriteNode": node,
                "MaxDiskWriteTask": "0",
                "TRESUsageInMax": usage,
                "TRESUsageInTot": usage,
                "TRESUsageInAve": usage,
                "TRESUsageOutMax": f"energy=0,fs/disk={read // 7}",
                "TRESUsageOutTot": f"energy=0,fs/disk={read // 7}",
                "TRESUsageOutAve": f"energy=0,fs/disk={read // 7}",
                "JobName": step,
            }
        )
    return rows


class Sacct(CommandRunner):
    """Scripted sacct: prints the jobs of a day."""

    def __init__(self, jobs: int) -> None:
        super().__init__("main", ClusterSettings())
        self._jobs = jobs
        self.seconds = 0.0

    def run(self, *_arguments: str, **_: Any) -> bytes:
        """Return the field names."""
        return " ".join(FIELDS).encode()

    def run_into(self, file: BinaryIO, *arguments: str, **_: Any) -> None:
        """Write the rows of a day."""
        began = time.process_time()
        separator = arguments[arguments.index("--delimiter") + 1]
        day = datetime.fromisoformat(arguments[arguments.index("-S") + 1]).replace(tzinfo=UTC)
        first = (day - BEGIN).days * JOBS_A_DAY
        rng = random.Random(first)
        for job in range(first, min(self._jobs, first + JOBS_A_DAY)):
            for row in make_rows(job + 1, rng):
                line = separator.join(row.get(name, "") for name in FIELDS)
                file.write(f"{line}\n".encode())
        self.seconds += time.process_time() - began


class Import:
    """One state directory, and imports of the same jobs into it."""

    def __init__(self, directory: str, jobs: int) -> None:
        self.settings = Settings(state_dir=directory, cluster={"main": ClusterSettings()})
        self._jobs = jobs
        self._journal = Journal(directory)
        self.rows = 0

    def _append(self, events: Any) -> None:
        self._journal.append(encode_rows(events))

    def read(self) -> float:
        """Import the rows; return CPU seconds without those of the scripted sacct."""
        sacct = Sacct(self._jobs)
        maker = ImportEventMaker("main", make_redactor(self.settings).redact_record)
        until = BEGIN + timedelta(days=-(-self._jobs // JOBS_A_DAY))
        began = time.process_time()
        result = import_days(
            *(SacctHistory(sacct, "main"), "main", BEGIN, until, maker, NameResolver()),
            self._append,
            get_positions_path(self.settings.state_dir),
            lambda *_: None,
            count_observed=lambda *_: 0,
        )
        self.rows = result.jobs + result.steps
        return time.process_time() - began - sacct.seconds

    def apply(self, consumer: JobsConsumer | LogConsumer) -> float:
        """Apply the events to jobs.db or the job log; return CPU seconds."""
        reader = JournalReader(self.settings.state_dir)
        began = time.process_time()
        position = consumer.cursor()
        while True:
            events, upto = reader.read(position, consumer.kinds, consumer.batch_events)
            if upto <= position:
                break
            if events:
                consumer.apply(events, upto, self._append)
                consumer.tick(self._append)
            position = upto
        seconds = time.process_time() - began
        consumer.close()
        reader.close()
        return seconds

    def count_bytes(self) -> int:
        """Return the size of the journal, in bytes."""
        return self._journal.size_bytes()

    def count_jobs_bytes(self) -> int:
        """Return the size of jobs.db, in bytes."""
        return os.path.getsize(database_path(self.settings.state_dir))


def measure(name: str, step: Callable[[], float], rows: Callable[[], int], profiled: str) -> float:
    """Run one step, print its CPU time, and return it in ms a row."""
    profile = cProfile.Profile() if profiled == name else None
    with profile or nullcontext():
        seconds = step()
    print(f"{name:14} {seconds:8.2f} s CPU  {seconds / rows() * 1000:6.3f} ms a row")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    return seconds / rows() * 1000


def main() -> None:
    """Measure a first and a repeated import."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=scaled(20_000))
    parser.add_argument("--dir", default=os.environ.get("BENCH_DIR", "/dev/shm"))
    parser.add_argument("--profile", default="")
    arguments = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="imports-", dir=arguments.dir)
    try:
        one = Import(directory, arguments.jobs)
        for suffix in ("", " again"):
            cpu_ms = measure(f"read{suffix}", one.read, lambda: one.rows, arguments.profile)
            for name, kind in (("jobs.db", JobsConsumer), ("job log", LogConsumer)):
                consumer = kind(one.settings)
                apply = partial(one.apply, consumer)
                applied_ms = measure(f"{name}{suffix}", apply, lambda: one.rows, arguments.profile)
                cpu_ms += applied_ms if kind is JobsConsumer else 0.0
            size = one.count_bytes()
            print(f"journal        {size} bytes  {size / arguments.jobs:.0f} a job")
            jobs_size = one.count_jobs_bytes()
            print(f"jobs.db        {jobs_size} bytes  {jobs_size / arguments.jobs:.0f} a job")
            if not suffix:
                check(_CPU, cpu_ms)
                check(_JOURNAL, size / arguments.jobs)
                check(_JOBS_DB, jobs_size / arguments.jobs)
    finally:
        shutil.rmtree(Path(directory))
    finish()


if __name__ == "__main__":
    main()
