"""How long sacct takes over many jobs with a step each: the whole process, from start to exit.

    python bench/sacct_bench.py [--jobs 200000] [--dir DIR] [--rounds 3]

The same questions are asked as root of jobs.db, as an ordinary user of the
daemon (that needs root to become one), and as root of closed days in Parquet.
Beside each stands the ratio to a process that reads the seven columns of the
usual table out of the same database and prints them, unformatted. Times are
the best of the rounds.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from bars import Bar, check, finish
from scale import scaled
from steward.core.access import ClusterRoles, ClusterRolesFiles
from steward.core.config import Settings
from steward.core.records import UsageLine
from steward.core.sqlite import open_database, transaction
from steward.core.timestamps import from_micros
from steward.core.waits import Stop
from steward.daemon.contexts import make_registry
from steward.daemon.request_service import RequestService
from steward.daemon.socket import SocketServer
from steward.extensions.jobacct_plugins.log.parquet import write_parquet
from steward.jobs import database_path
from steward.jobs.day_sums import add_cluster, track_lines
from steward.jobs.lines import put_lines
from steward.jobs.tables import MIGRATIONS
from steward.slurm.settings import ClusterSettings

BEGIN_US = 1_790_000_000_000_000
EVERY_US = 10_000_000
_ALL = Bar("sacct of 200,000 jobs and steps", "s", 1.5, "plain reading")
_ALLOCATIONS = Bar("sacct -X of 200,000 jobs", "s", 0.6, "plain reading of all")
BATCH = 1000
QUESTIONS = {
    "all": ("-a", "-S", "2026-01-01"),
    "all, -X": ("-a", "-X", "-S", "2026-01-01"),
    "one day": ("-a", "-S", "{day}", "-E", "{next}"),
    "one job": ("-j", "{job}"),
    "one state": ("-a", "-X", "-s", "CA", "-S", "2026-01-01", "-E", "now"),
    "one node": ("-a", "-X", "-N", "node007", "-S", "2026-01-01"),
}
AS_NOBODY = """
import os, sys
import steward.cli.sacct
import steward.accounting.sacct.output, steward.accounting.sacct.fields
os.setuid(65534)
sys.exit(steward.cli.sacct.execute_sacct(sys.argv[2:]))
"""
"""What the command does, but that it gives root's rights up before it asks."""
PLAIN = """
import sys
from pysqlite3 import dbapi2
c = dbapi2.connect(sys.argv[1])
write = sys.stdout.write
for r in c.execute("SELECT label, step, name, partition, account, cpus, state, exit_code, "
                   "exit_signal FROM line ORDER BY cluster, job_id, submit_us"):
    write("|".join(map(str, r)) + "\\n")
"""


def lines(jobs: int) -> Iterator[UsageLine]:
    """A job every ten seconds, of fifty users and twenty accounts, each with its batch step."""
    for number in range(jobs):
        submit_us = BEGIN_US + number * EVERY_US
        is_ok = number % 10 != 0
        of_both: dict[str, Any] = {
            "cluster": "main",
            "job_id": 1000 + number,
            "label": str(1000 + number),
            "first_submit_us": submit_us,
            "submit_us": submit_us,
            "eligible_us": submit_us,
            "start_us": submit_us + 5_000_000,
            "end_us": submit_us + 65_000_000,
            "uid": 1000 + number % 50,
            "user": f"user{number % 50}",
            "account": f"account{number % 20}",
            "partition": "batch",
            "qos": "normal",
            "state": "COMPLETED" if is_ok else "CANCELLED",
            "cancelled_by": None if is_ok else 1000,
            "exit_code": 0,
            "exit_signal": 0,
            "nodes": 1,
            "cpus": 4,
            "nodelist": f"node{number % 200:03}",
            "requested_cpus": 4,
            "requested_nodes": 1,
            "time_limit_s": 3600,
            "tres_requested": "cpu=4,mem=4G,node=1,billing=4",
            "tres_allocated": "cpu=4,mem=4G,node=1,billing=4",
            "user_us": 5_123_456,
            "system_us": 123_456,
        }
        yield UsageLine(
            **of_both,
            name=f"job{number % 1000}",
            submit_line="sbatch -n 4 --mem 4G job.sh",
            work_dir="/home/user/project",
        )
        yield UsageLine(
            **of_both,
            step="batch",
            name="batch",
            tasks=1,
            max_rss_bytes=123_456_789,
            max_rss_node=f"node{number % 200:03}",
            max_rss_task=0,
            ave_rss_bytes=123_456_789,
        )


def make(state: Path, jobs: int, *, closed: bool) -> Settings:
    """A state directory: all in jobs.db, or all in the job log's closed days."""
    state.mkdir(mode=0o711)
    settings = Settings(
        state_dir=str(state),
        run_dir=str(state),
        cluster={"main": ClusterSettings(spool=str(state), timezone="UTC")},
    )
    (state / "steward.toml").write_text(
        f'state_dir = "{state}"\nrun_dir = "{state}"\n'
        f'[cluster.main]\nspool = "{state}/spool"\ntimezone = "UTC"\n'
    )
    ClusterRolesFiles(str(state)).put("main", ClusterRoles())
    connection = open_database(database_path(str(state)), MIGRATIONS, synchronous="OFF")
    with transaction(connection):
        if closed:
            before = BEGIN_US + (jobs + 10) * EVERY_US
            connection.execute("INSERT INTO expired VALUES ('main', ?)", (before,))
        else:
            add_cluster(connection, "main", "UTC")
            rest = lines(jobs)
            while batch := list(islice(rest, BATCH)):
                with track_lines(connection, "main", {line.job_id for line in batch}):
                    put_lines(connection, batch)
    connection.close()
    if closed:
        (state / "joblog").mkdir()
        for day, of_day in groupby(lines(jobs), lambda line: from_micros(line.end_us).date()):
            write_parquet(of_day, str(state / "joblog" / f"{day}.parquet"))
    return settings


class Cost(msgspec.Struct):
    """What a command took: seconds by the clock and of CPU, at best, and bytes that it printed."""

    seconds: float
    cpu_s: float
    printed: int = 0


def best(command: list[str], rounds: int) -> Cost:
    """The least that a command took."""
    times = []
    printed = 0
    for _ in range(rounds):
        begun, used = time.perf_counter(), cpu_s()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]}
        ) as process:
            out = process.stdout
            assert out is not None, "it is a pipe"
            printed = 0
            while piece := out.read(1 << 16):
                printed += len(piece)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        times.append((time.perf_counter() - begun, cpu_s() - used))
    return Cost(min(wall for wall, _ in times), min(cpu for _, cpu in times), printed)


def cpu_s() -> float:
    """CPU seconds of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_mib(command: list[str]) -> float:
    """The peak resident memory of a command, in MiB."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=-3, check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    words = [sys.executable, "-c", code, *command]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return int(out) / 1024


def ask(what: str, asker: list[str], words: dict[str, str], rounds: int) -> dict[str, Cost]:
    """Ask all questions in one way, and print what they took."""
    found = {}
    for question, typed in QUESTIONS.items():
        cost = best([*asker, *(word.format(**words) for word in typed)], rounds)
        found[question] = cost
        print(
            f"{what:20} {question:10} {cost.seconds:7.3f} s {cost.cpu_s:7.3f} s CPU "
            f"{cost.printed / 1e6:8.2f} MB",
            flush=True,
        )
    return found


def main() -> None:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=scaled(200_000, 1000))
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--rounds", type=int, default=scaled(3))
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="sacct-bench-", dir=args.dir))
    try:
        root.chmod(0o711)
        measure(root, args.jobs, args.rounds)
        finish()
    finally:
        shutil.rmtree(root)


def measure(root: Path, jobs: int, rounds: int) -> None:
    """Measure in a directory of its own."""
    day = from_micros(BEGIN_US + jobs // 2 * EVERY_US).date()
    following = from_micros(BEGIN_US + jobs // 2 * EVERY_US + 86_400_000_000).date()
    words = {"day": str(day), "next": str(following), "job": str(1000 + jobs // 2)}
    steward = [str(Path(sys.executable).parent / "steward"), "sacct"]
    kept = make(root / "kept", jobs, closed=False)
    plain = best([sys.executable, "-c", PLAIN, database_path(kept.state_dir)], rounds)
    print(f"{'plain reading':20} {'all':10} {plain.seconds:7.3f} s {plain.cpu_s:7.3f} s CPU")
    reader = [*steward, "--config", str(root / "kept" / "steward.toml")]
    here = ask("root, jobs.db", reader, words, rounds)
    print(f"peak memory of all: {peak_mib([*reader, *QUESTIONS['all']]):.1f} MiB")
    print(f"CPU of all, to plain reading: {here['all'].cpu_s / plain.cpu_s:.2f}")
    check(_ALL, here["all"].seconds, plain.seconds)
    check(_ALLOCATIONS, here["all, -X"].seconds, plain.seconds)
    if os.geteuid() == 0:
        server = get_context("fork").Process(target=serve, args=(kept,))
        server.start()
        try:
            while not os.path.exists(kept.socket):
                time.sleep(0.05)
            asker = [sys.executable, "-c", AS_NOBODY, "sacct", "--socket", kept.socket]
            asked = ask("user, daemon", asker, words, rounds)
            ratios = (
                f"{question} {cost.seconds / here[question].seconds:.2f}"
                for question, cost in asked.items()
            )
            print(f"user to root, by the clock: {', '.join(ratios)}")
        finally:
            server.kill()
            server.join()
    shutil.rmtree(root / "kept")
    make(root / "closed", jobs, closed=True)
    reader = [*steward, "--config", str(root / "closed" / "steward.toml")]
    ask("root, Parquet", reader, words, rounds)
    print(f"peak memory of all: {peak_mib([*reader, *QUESTIONS['all']]):.1f} MiB")


def serve(settings: Settings) -> None:
    """Answer as the daemon does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    SocketServer(settings.socket, RequestService(make_registry(settings))).run(Stop(), lambda: None)


if __name__ == "__main__":
    main()
