"""How long reports of a month and a year take, with day sums and without, and what sums cost.

    python bench/reports_bench.py [--jobs 200000] [--dir DIR] [--rounds 3]

The jobs are spread over a year. Each report is asked of the same database: first with its day sums,
then without them, so that it reads every line. Both must have the same rows. Then the consumer of
jobs.db applies the events of other jobs with and without sums: the difference is the CPU time that
sums take of each job. Times are the best of the rounds.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from bars import Bar, check, finish
from scale import scaled
from steward.core.access import Caller, ClusterRoles, ClusterRolesFiles
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.records import JobRecord, UsageLine
from steward.core.sqlite import Connection, open_database, transaction
from steward.core.timestamps import to_micros
from steward.daemon.contexts import make_registry
from steward.jobs import JobsConsumer, database_path
from steward.jobs.day_sums import add_cluster, track_lines
from steward.jobs.lines import put_lines
from steward.jobs.sum_tables import TABLES, round_wait
from steward.jobs.tables import MIGRATIONS
from steward.slurm.settings import ClusterSettings

BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
YEAR_S = 365 * 86_400
BATCH = 500
_MONTH = Bar("report of a month", "s", 0.2, "from lines")
_YEAR = Bar("report of a year", "s", 0.5, "from lines")
ROOT = Caller(uid=0, user="root")
YEAR = {"since": "2025-01-01", "until": "2026-01-01"}
PERIODS = {
    "month": {"since": "2025-06-01", "until": "2025-07-01"},
    "30 days": {"since": "2025-06-01T15:20:00", "until": "2025-07-01"},
    "year": YEAR,
    "year by month": {**YEAR, "by": "month"},
}
REPORTS = ("cluster", "accounts", "users", "partitions", "waits", "jobs", "waste")


def make_lines(count: int) -> Iterator[UsageLine]:
    """Make ended runs: 300 users in 40 accounts, from minutes to three days long."""
    draw = random.Random(7)
    for number in range(count):
        start = BEGIN + timedelta(seconds=number * YEAR_S // count)
        user = min(int(draw.expovariate(1 / 60)), 299)
        length_s = min(1 + int(draw.expovariate(1 / 7200)), 3 * 86_400)
        yield UsageLine(
            cluster="main",
            job_id=1000 + number,
            label=str(1000 + number),
            first_submit_us=to_micros(start) - 60_000_000,
            submit_us=to_micros(start) - 60_000_000,
            eligible_us=to_micros(start) - 60_000_000,
            start_us=to_micros(start),
            end_us=to_micros(start + timedelta(seconds=length_s)),
            uid=2000 + user,
            user=f"user{user}",
            account=f"account{user % 40}",
            partition=("short", "short", "short", "long", "gpu")[draw.randrange(5)],
            qos=("normal", "normal", "high")[draw.randrange(3)],
            state="COMPLETED" if draw.randrange(10) else "FAILED",
            nodes=1,
            cpus=4,
            requested_cpus=4,
            nodelist=f"node{number % 200:03}",
            tres_allocated="cpu=4,mem=4G,node=1,billing=4",
            name=f"job{number % 1000}",
            submit_line="sbatch -n 4 --mem 4G job.sh",
            work_dir="/home/user/project",
        )


def fill(connection: Connection, count: int) -> None:
    """Write the lines and their sums."""
    with transaction(connection):
        add_cluster(connection, "main", "UTC")
        lines: list[UsageLine] = []
        for line in make_lines(count):
            lines.append(line)
            if len(lines) == BATCH:
                write_lines(connection, lines)
                lines = []
        write_lines(connection, lines)


def write_lines(connection: Connection, lines: Sequence[UsageLine]) -> None:
    """Write lines of runs, and add them to the sums."""
    with track_lines(connection, "main", [line.job_id for line in lines]):
        put_lines(connection, lines)


def measure_report(
    registry: Registry, name: str, request: dict[str, str], rounds: int
) -> tuple[float, float, Any]:
    """Return the least seconds and CPU seconds of a report, and its reply."""
    costs = []
    reply: Any = None
    for _ in range(rounds):
        begun, used = time.perf_counter(), time.process_time()
        reply = registry.call(name, ROOT, registry.decode(name, request))
        costs.append((time.perf_counter() - begun, time.process_time() - used))
    return min(wall for wall, _ in costs), min(cpu for _, cpu in costs), reply


def round_waits(row: Any) -> Any:
    """Return the row of a report with its waits as in sums, which are their own rounding."""
    names = ("median_s", "p90_s", "longest_s")
    waits = {name: getattr(row, name, None) for name in names}
    return msgspec.structs.replace(
        row, **{name: round_wait(wait) for name, wait in waits.items() if wait is not None}
    )


def make_events(first: int, count: int) -> Iterator[Event]:
    """Make the events of jobs from submission to end, a batch of each kind in turn."""
    for begin in range(first, first + count, BATCH):
        for kind, state in ((JOB_SEEN, "PENDING"), (JOB_STATE, "RUNNING"), (JOB_END, "COMPLETED")):
            for line in range(begin, begin + BATCH):
                start = BEGIN + timedelta(seconds=line * 30)
                record = JobRecord(
                    job_id=line,
                    uid=2000 + line % 300,
                    user=f"user{line % 300}",
                    account=f"account{line % 40}",
                    partition="short",
                    qos="normal",
                    state=state,
                    submit=start,
                    eligible=start,
                    start=None if kind == JOB_SEEN else start,
                    end=start + timedelta(hours=2) if kind == JOB_END else None,
                    cpus=4,
                    nodes=1,
                    tres_allocated="" if kind == JOB_SEEN else "cpu=4,mem=4G,node=1",
                )
                yield Event(
                    kind=kind,
                    cluster="main",
                    key=f"{kind}:{line}",
                    at=start,
                    seen_at=start,
                    source="snapshot",
                    body=JobFacts(record=record, whole=True),
                )


def measure_consumer(directory: Path, count: int) -> float:
    """Return the CPU time that the consumer takes of each job, in µs."""
    directory.mkdir()
    consumer = JobsConsumer(Settings(state_dir=str(directory)))
    with closing(consumer):
        events = list(make_events(1, count))
        begun = time.process_time()
        for start in range(0, len(events), BATCH):
            consumer.apply(events[start : start + BATCH], start + BATCH, lambda _: None)
        return (time.process_time() - begun) / count * 1e6


def measure_sums(root: Path, rounds: int) -> None:
    """Print the CPU time of the consumer with and without sums, in turn."""
    count = BATCH * scaled(20, 1)
    without: Callable[..., Any] = lambda *_: nullcontext()  # noqa: E731 -- a replacement
    costs: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for has_sums in (True, False):
            with (
                nullcontext()
                if has_sums
                else mock.patch("steward.jobs.accounting_update.track_lines", without)
            ):
                directory = root / f"consumer{number}{has_sums}"
                costs[has_sums].append(measure_consumer(directory, count))
    with_us, without_us = min(costs[True]), min(costs[False])
    print(f"consumer, CPU of a job: with sums {with_us:.0f} µs, without {without_us:.0f} µs")


def measure_disk(connection: Connection) -> tuple[int, int]:
    """Return the bytes of the sums and of the whole database."""

    def read(name: str) -> int:
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])

    free = read("freelist_count")
    connection.execute("BEGIN")
    for table in TABLES:
        connection.execute(f"DELETE FROM {table.name}")
    pages = read("freelist_count") - free
    connection.execute("ROLLBACK")
    return pages * read("page_size"), read("page_count") * read("page_size")


def measure(root: Path, jobs: int, rounds: int) -> None:
    """Measure in a directory of its own."""
    cluster = {"main": ClusterSettings(spool=str(root), timezone="UTC")}
    settings = Settings(state_dir=str(root), run_dir=str(root), cluster=cluster)
    ClusterRolesFiles(str(root)).put("main", ClusterRoles())
    path = database_path(settings.state_dir)
    with closing(open_database(path, MIGRATIONS, synchronous="OFF")) as connection:
        fill(connection, jobs)
        summed, total = measure_disk(connection)
        print(f"{jobs} jobs: sums {summed / 1e6:.1f} MB of {total / 1e6:.0f} MB")
        registry = make_registry(settings)
        replies: dict[tuple[str, str], Any] = {}
        times: dict[tuple[str, str], float] = {}
        for way in ("sums", "lines"):
            if way == "lines":
                connection.execute("DELETE FROM summed")
            for report in REPORTS:
                for period, request in PERIODS.items():
                    wall_s, cpu_s, reply = measure_report(
                        registry, f"reports.{report}", request, rounds
                    )
                    if reply.is_summed != (way == "sums"):
                        raise SystemExit(f"{report}, {period}: not from {way}")
                    rows = [round_waits(row) for row in reply.rows]
                    if replies.setdefault((report, period), rows) != rows:
                        raise SystemExit(f"{report}, {period}: sums and lines differ")
                    print(f"{report:9} {period:14} {way:6} {wall_s:7.3f} s {cpu_s:7.3f} s CPU")
                    times[way, period] = max(wall_s, times.get((way, period), 0.0))
        for bar, period in ((_MONTH, "month"), (_YEAR, "year")):
            check(bar, times["sums", period], times["lines", period])
    measure_sums(root, rounds)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=scaled(200_000, 1000))
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--rounds", type=int, default=scaled(3))
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="reports-bench-", dir=args.dir))
    try:
        measure(root, args.jobs, args.rounds)
        finish()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
