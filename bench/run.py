"""``make bench``: spool storms against ``steward archive watch``, beside ``cp -a`` of the tree.

Played on tmpfs, or in the directory that BENCH_DIR names (on tmpfs fsync is
free). Every storm is written by a process of its own, on the same machine: it
takes its share of the processors. Figures are medians, with their range, of
several repetitions.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

import storm
from bars import Bar, check, finish
from scale import scaled
from steward.core.redaction import REDACTED
from steward.core.script_stores import ARCHIVE_DIRECTORY, make_incoming_filename
from watching import Activity, Watch

BURST_JOBS = scaled(20_000, 20)
STREAM_RATE, STREAM_S = 300, scaled(10)
RATES, RATE_S = (1, 10, 100, 300, 1000), scaled(4)
WAITING_FILES = scaled(200_000, 20)
SHORT_RATE, SHORT_S, SHORT_LIFE_S = 1000, scaled(10), 0.005
_PATIENCE_S = 120.0
_IDLE = Bar("archive watch, idle: memory (PSS) of all processes", "MB", 60)
_BURST = Bar("20,000 jobs at once: in journal and archive", "s", 3.3, "cp -a of the tree")
_BURST_CPU = Bar("20,000 jobs at once: user CPU time of a job", "us", 150)
_STREAM_P99 = Bar("300 jobs a second: from close to file, p99", "ms", 20)
_STREAM_CPU = Bar("300 jobs a second for 10 s: CPU time", "s", 1.5, "writing the spool")
_WAITING_P99 = Bar("beside 200,000 waiting files: p99", "ms", 20, "without waiting files")
_SHORT = Bar("1,000 jobs a second, 5 ms each: archived", "%", 99.9, is_least=True)
_NOT_THE_ARCHIVE = frozenset({"catalog"})
"""Parts that are outside the burst's figures: the index for search follows at its leisure."""


class Told(msgspec.Struct):
    """What a storm's own process wrote down, in ns of CLOCK_MONOTONIC."""

    began_ns: int
    ended_ns: int
    cpu_s: float
    closed_ns: dict[int, int]


class Table:
    """Figures by their name, printed at the end."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._units: dict[str, str] = {}
        self._bars: dict[str, tuple[Bar, str]] = {}

    def add(
        self, name: str, value: float, unit: str, bar: Bar | None = None, baseline: str = ""
    ) -> None:
        """Add one more repetition of a figure; ``baseline`` is the name of another line."""
        self._values.setdefault(name, []).append(value)
        self._units[name] = unit
        if bar is not None:
            self._bars[name] = (bar, baseline)

    def show(self) -> None:
        """Print all of them, and compare their medians with the bars."""
        print(f"\n{'':60} {'median':>9} {'from':>9} {'to':>9}")
        medians = {name: statistics.median(values) for name, values in self._values.items()}
        for name, values in self._values.items():
            low, high = min(values), max(values)
            print(f"{name:60} {medians[name]:9.3f} {low:9.3f} {high:9.3f} {self._units[name]}")
        for name, (bar, baseline) in self._bars.items():
            check(bar, medians[name], medians.get(baseline))


@contextmanager
def fresh_directory() -> Iterator[Path]:
    """An empty directory where the bench is played, removed afterwards."""
    base = os.environ.get("BENCH_DIR") or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
    where = Path(tempfile.mkdtemp(prefix="steward-bench-", dir=base))
    try:
        yield where
    finally:
        shutil.rmtree(where)


def play(where: Path, spool: Path, *arguments: str) -> Callable[[], Told]:
    """Start a storm in a process of its own; what is returned waits for its end."""
    times = where / "times.json"
    player = subprocess.Popen(
        [sys.executable, storm.__file__, str(spool), f"--times={times}", *arguments]
    )

    def finish() -> Told:
        if player.wait(_PATIENCE_S):
            raise SystemExit("the storm could not be played")
        return msgspec.json.decode(times.read_bytes(), type=Told)

    return finish


def copied(source: Path, target: Path) -> float:
    """Seconds that ``cp -a`` and a sync of what it wrote take."""
    began = time.monotonic()
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)
    return time.monotonic() - began


def burst(table: Table) -> None:
    """So many jobs at once, complete in journal and archive, against ``cp -a``."""
    with fresh_directory() as where:
        with Watch(where) as watch:
            watch.wait_idle()
            table.add("idle: PSS of all processes", watch.pss_bytes() / 1e6, "MB", _IDLE)
            before = watch.cpu()
            finish = play(where, watch.spool, f"--jobs={BURST_JOBS}")
            complete = watch.wait_archived(BURST_JOBS, _PATIENCE_S)
            ended = time.monotonic()
            spent = _difference(before, watch.cpu())
            told = finish()
            took_s = ended - told.began_ns / 1e9
            storm_s = (told.ended_ns - told.began_ns) / 1e9
            watch.wait_idle()
            catalog_s = time.monotonic() - told.began_ns / 1e9 - 1.0
        if not complete or len(watch.archived()) != BURST_JOBS:
            print(f"the burst was not complete after {_PATIENCE_S:.0f} s")
        copy_s = copied(watch.spool, where / "copy")
        shutil.rmtree(where / "copy")
        shutil.rmtree(watch.spool)
        watch.spool.mkdir()
        beside_s = _copied_beside(where, watch.spool)
    copy = "  cp -a of the finished tree"
    table.add(f"burst of {BURST_JOBS}: complete", took_s, "s", _BURST, copy)
    table.add(copy, copy_s, "s")
    table.add("  ratio to that", took_s / copy_s, "x")
    table.add("  writing the spool, while Steward runs", storm_s, "s")
    table.add("  writing the spool, then cp -a, without Steward", beside_s, "s")
    table.add("  ratio to those two", took_s / beside_s, "x")
    user_s = sum(cost[0] for name, cost in spent.items() if name not in _NOT_THE_ARCHIVE)
    system_s = sum(cost[1] for name, cost in spent.items() if name not in _NOT_THE_ARCHIVE)
    table.add("  user CPU a job", user_s / BURST_JOBS * 1e6, "us", _BURST_CPU)
    table.add("  system CPU a job", system_s / BURST_JOBS * 1e6, "us")
    for name in sorted(spent):
        cost = spent[name][0] / BURST_JOBS * 1e6
        if cost >= 1.0:
            table.add(f"    user CPU a job: {name}", cost, "us")
    table.add("  searchable after (at most)", catalog_s, "s")


def _copied_beside(where: Path, spool: Path) -> float:
    """Seconds of a storm that nobody watches and of a copy of it: the least that could be done."""
    told = play(where, spool, f"--jobs={BURST_JOBS}")()
    return (told.ended_ns - told.began_ns) / 1e9 + copied(spool, where / "copy")


def _difference(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    return {
        name: (user - before.get(name, (0.0, 0.0))[0], system - before.get(name, (0.0, 0.0))[1])
        for name, (user, system) in after.items()
    }


def stream(table: Table, waiting: int = 0) -> None:
    """A steady stream: from the close of a script to its file in the archive."""
    jobs = STREAM_RATE * STREAM_S
    with fresh_directory() as where, Watch(where) as watch:
        incoming = watch.archive / ARCHIVE_DIRECTORY
        incoming.mkdir(mode=0o700, exist_ok=True)
        for number in range(waiting):
            name = make_incoming_filename("c9", number, 1, 0, "script")
            (incoming / name).touch()
        watch.wait_idle()
        before = watch.activity()
        with watch.observed() as seen:
            told = play(where, watch.spool, f"--jobs={jobs}", f"--rate={STREAM_RATE}")()
            watch.wait_archived(jobs, _PATIENCE_S)
        after = watch.activity()
        latencies = sorted(
            (seen_ns - told.closed_ns[job_id]) / 1e6 for job_id, seen_ns in seen.items()
        )
    alone = name = f"{STREAM_RATE} a second for {STREAM_S} s"
    if waiting:
        name += f", {waiting} files waiting"
    table.add(f"{name}: archived", len(latencies) / jobs * 100, "%")
    for percent in (50, 99, 100):
        value = latencies[min(len(latencies) - 1, len(latencies) * percent // 100)]
        bar = (_WAITING_P99 if waiting else _STREAM_P99) if percent == 99 else None
        baseline = f"{alone}: to file, p99" if waiting else ""
        table.add(f"{name}: to file, p{percent}", value, "ms", bar, baseline)
    _add_activity(table, name, before, after)
    storm_cpu = f"{name}: CPU of the storm"
    table.add(storm_cpu, told.cpu_s, "s")
    cpu_s = sum(_rise(before.cpu, after.cpu).values())
    table.add(f"{name}: CPU of all", cpu_s, "s", None if waiting else _STREAM_CPU, storm_cpu)


def rates(table: Table) -> None:
    """Streams from one job a second to a thousand: what each process and database does."""
    first = 1
    with fresh_directory() as where, Watch(where) as watch:
        for rate in RATES:
            jobs = rate * RATE_S
            watch.wait_idle()
            before = watch.activity()
            play(where, watch.spool, f"--first={first}", f"--jobs={jobs}", f"--rate={rate}")()
            first += jobs
            watch.wait_archived(first - 1, _PATIENCE_S)
            # What gathers is written, and each process waits again.
            time.sleep(1.0)
            after = watch.activity()
            name = f"{rate} a second for {RATE_S} s"
            _add_activity(table, name, before, after)
            cpu_s = sum(_rise(before.cpu, after.cpu).values())
            table.add(f"{name}: CPU of all a job", cpu_s / jobs * 1e6, "us")


def _add_activity(table: Table, name: str, before: Activity, after: Activity) -> None:
    """Add the figures of each process and each database that did something."""
    wakes = _rise(before.wakes, after.wakes)
    for process, cpu_s in sorted(_rise(before.cpu, after.cpu).items()):
        if cpu_s or wakes.get(process):
            table.add(f"{name}: CPU of {process}", cpu_s, "s")
            table.add(f"{name}: wake-ups of {process}", wakes.get(process, 0), "")
    for database, count in sorted(_rise(before.transactions, after.transactions).items()):
        if count:
            table.add(f"{name}: transactions on {database}", count, "")


def _rise(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def stream_beside_waiting(table: Table) -> None:
    """The stream while files wait for a sink that is away."""
    stream(table, WAITING_FILES)


def short_lives(table: Table) -> None:
    """Jobs that leave the spool a few milliseconds after they came."""
    jobs = SHORT_RATE * SHORT_S
    with fresh_directory() as where, Watch(where) as watch:
        watch.wait_idle()
        finish = play(
            where,
            watch.spool,
            f"--jobs={jobs}",
            f"--rate={SHORT_RATE}",
            f"--live={SHORT_LIFE_S}",
        )
        told = finish()
        # Missed jobs never come: what is on its way has a moment.
        watch.wait_archived(jobs, 3.0)
        kept = sum(is_whole(job_id, files) for job_id, files in watch.archived().items())
    played_s = (told.ended_ns - told.began_ns) / 1e9
    table.add(
        f"{SHORT_RATE} a second, {SHORT_LIFE_S * 1e3:.0f} ms each: kept",
        kept / jobs * 100,
        "%",
        _SHORT,
    )
    table.add("  jobs a second that the storm reached", jobs / played_s, "/s")


def is_whole(job_id: int, files: dict[str, Path]) -> bool:
    """Whether a job's archived files are what its storm wrote, less the secret."""
    return (
        set(files) == {"sh", "env"}
        and files["sh"].read_bytes() == storm.script_of(job_id)
        and files["env"].read_bytes() == storm.environment_of(job_id, REDACTED)
    )


PARTS: dict[str, Callable[[Table], None]] = {
    "burst": burst,
    "stream": stream,
    "rates": rates,
    "waiting": stream_beside_waiting,
    "short": short_lives,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Play what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--repeat", type=int, default=scaled(3))
    options = parser.parse_args(arguments)
    table = Table()
    with fresh_directory() as where:
        print(f"on {_file_system(where)}, {os.cpu_count()} processors, {options.repeat} times")
    for number in range(options.repeat):
        for name in options.parts or PARTS:
            print(f"  {name}, {number + 1} of {options.repeat}", flush=True)
            PARTS[name](table)
    table.show()
    finish()


def _file_system(path: Path) -> str:
    told = subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    )
    return f"{told.stdout.strip()} ({path.parent})"


if __name__ == "__main__":
    main()
