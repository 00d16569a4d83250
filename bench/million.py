"""What a year's archive takes: bytes, inodes, databases, and the time of a search.

    python bench/million.py [--jobs 100000] [--dir DIR]

The jobs are made up: 300 users of very different diligence, a million jobs a year,
seven of ten with a script and an environment that no other job has, three of ten
from loops that submit the same a hundred times. They are filed by the files sink as
each of three settings has it, measured, and removed; then they are indexed and
searched. Per million is said what grows with the number of jobs.
"""

import argparse
import hashlib
import os
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from scale import scaled
from search_bench import START, Bytes, asked, make_script
from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.catalog.generations import CatalogGenerations
from steward.archive.catalog.search import OwnerFilter, UseFilter
from steward.archive.contents import ScriptContents
from steward.archive.files.sink import FilesSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import Event, IncomingFile, JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.core.script_stores import make_incoming_filename, make_stores
from steward.slurm.settings import ClusterSettings

USERS = 300
A_YEAR = 1_000_000
DAY_NS = 86400 * 10**9
LOOP = 100
LOOPED = 0.3
BATCH = 250


class Made(msgspec.Struct, frozen=True):
    """One job: its id, user, time in the spool, script and environment."""

    job_id: int
    user: int
    mtime_ns: int
    script: bytes
    environment: bytes


class Found(msgspec.Struct):
    """What lies in a tree: names, inodes, bytes in files, bytes in blocks, of that manifests."""

    names: int = 0
    inodes: int = 0
    directories: int = 0
    length: int = 0
    blocks: int = 0
    manifests: int = 0


def make_jobs(jobs: int) -> Iterator[Made]:
    """The same jobs every time, in the order of time."""
    random_ = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random_.choices(letters, k=random_.randint(3, 10))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(USERS)]
    first_ns = int(START.timestamp()) * 10**9
    loops: dict[int, tuple[bytes, bytes, int]] = {}
    for number in range(jobs):
        user = random_.choices(range(USERS), weights)[0]
        is_loop = random_.random() < LOOPED
        script, environment, left = loops.get(user, (b"", b"", 0)) if is_loop else (b"", b"", 0)
        if not left:
            script = make_script(random_, words, number, user)
            environment = make_environment(random_, words, number, user)
            left = LOOP
        if is_loop:
            loops[user] = (script, environment, left - 1)
        mtime_ns = first_ns + number * (365 * DAY_NS // A_YEAR)
        yield Made(100_000 + number, user, mtime_ns, script, environment)


def make_environment(random_: random.Random, words: list[str], number: int, user: int) -> bytes:
    """80 variables, 5 kB: most of them as all of the user's jobs have them."""
    own = random.Random(user)
    entries = [
        f"{own.choice(words).upper()}_{index}=/opt/{'/'.join(own.choices(words, k=8))}"
        for index in range(78)
    ]
    entries.append(f"SLURM_SUBMIT_DIR=/scratch/user{user}/{random_.choice(words)}/run{number}")
    entries.append(f"PWD=/scratch/user{user}/{random_.choice(words)}/run{number}")
    body = "\0".join(entries).encode() + b"\0"
    return len(entries).to_bytes(4, "little") + body


def events_of(
    made: Made, kept: tuple[IncomingFile, IncomingFile], number: int
) -> tuple[Event, Event]:
    """A job's script event and its identity's."""
    key = f"script:{made.job_id}:{made.mtime_ns}"
    at = datetime.fromtimestamp(made.mtime_ns / 1e9, UTC)
    script = JobScript(
        job_id=made.job_id,
        spool_mtime_ns=made.mtime_ns,
        script=kept[0],
        environment=kept[1],
        store="archive.files",
        claimed_name="mdrun",
        claimed_dir=f"/scratch/user{made.user}",
        claimed_host="login1",
    )
    record = JobRecord(
        job_id=made.job_id,
        name="mdrun",
        uid=10_000 + made.user,
        user=f"user{made.user}",
        account=f"project{made.user % 60}",
        partition="long",
        submit=at,
        work_dir=f"/scratch/user{made.user}/run{number}",
        submit_line="sbatch run.sh",
    )
    identity = JobIdentity(script_key=key, job_id=made.job_id, first_submit=at, record=record)

    def event(kind: str, key: str, body: Any, id_: int) -> Event:
        return Event(
            kind=kind,
            cluster="alpha",
            key=key,
            at=at,
            seen_at=at,
            source="bench",
            body=body,
            id=id_,
        )

    return (
        event("job.script", key, script, 2 * number + 1),
        event("job.identity", f"identity:{key}", identity, 2 * number + 2),
    )


def kept_of(made: Made) -> tuple[IncomingFile, IncomingFile]:
    """Under which names a job's bytes are kept."""
    found = []
    for data, what in ((made.script, "script"), (made.environment, "env")):
        name = make_incoming_filename("alpha", made.job_id, made.mtime_ns, len(data), what)
        found.append(
            IncomingFile(path=name, length=len(data), sha256=hashlib.sha256(data).hexdigest())
        )
    return found[0], found[1]


def batches(jobs: int) -> Iterator[tuple[list[Made], list[Event]]]:
    """The jobs and their events, as many as the sink takes at once."""
    made: list[Made] = []
    events: list[Event] = []
    for number, one in enumerate(make_jobs(jobs)):
        made.append(one)
        events += events_of(one, kept_of(one), number)
        if len(made) == BATCH:
            yield made, events
            made, events = [], []
    if made:
        yield made, events


def fill(where: str, jobs: int, *, shares: bool, compress: Any) -> float:
    """File all jobs; CPU seconds of the sink."""
    os.mkdir(f"{where}/state")
    of = FilesSinkSettings(path=f"{where}/tree", compress=compress)
    settings = Settings(
        state_dir=f"{where}/state",
        cluster={"alpha": ClusterSettings(timezone="UTC")},
        archive=ArchiveSettings(sink={"files": of}),
    )
    stores = make_stores(settings)
    sink = FilesSink(settings, "files", stores)
    # What it was before identical files were shared: no setting, for nobody should want it.
    sink._layout.can_share_files = shares
    sink.prepare()
    store = stores.get("archive.files")
    spent_s = 0.0
    position = 0
    for made, events in batches(jobs):
        kept = [event.body for event in events[::2]]
        for one, body in zip(made, kept, strict=True):
            store.write(body.script.path, one.script)
            store.write(body.environment.path, one.environment)
        store.sync()
        position += len(events)
        began_s = time.process_time()
        sink.apply(events, position, lambda _: None)
        spent_s += time.process_time() - began_s
        store.unlink([name for body in kept for name in (body.script.path, body.environment.path)])
    sink.close()
    return spent_s


def measure(root: str) -> Found:
    """What lies in the tree."""
    found = Found()
    met: set[int] = set()
    for base, _, names in os.walk(root):
        found.directories += 1
        for name in (".", *names):
            status = os.stat(os.path.join(base, name))
            is_file = stat.S_ISREG(status.st_mode)
            found.names += is_file
            if status.st_ino in met:
                continue
            if status.st_nlink > 1 and is_file:
                met.add(status.st_ino)
            found.inodes += 1
            found.blocks += status.st_blocks * 512
            if is_file:
                found.length += status.st_size
                found.manifests += status.st_size if name == "MANIFEST.jsonl" else 0
    return found


def size_of(directory: str) -> int:
    """Bytes of the files in a directory."""
    return sum(entry.stat().st_size for entry in Path(directory).iterdir() if entry.is_file())


def index(directory: str, jobs: int) -> None:
    """Index all scripts, and print what it took."""
    store = Bytes()
    catalog = CatalogConsumer(directory, ScriptContents(store))
    spent_s = 0.0
    position = 0
    for made, events in batches(jobs):
        for one, event in zip(made, events[::2], strict=True):
            store.held[event.body.script.sha256] = one.script
        position += len(events)
        began_s = time.process_time()
        catalog.apply(events, position, lambda _: None)
        spent_s += time.process_time() - began_s
        store.held.clear()
    catalog.close()
    size = size_of(CatalogGenerations(directory).get_current())
    print(
        f"catalog: {size / jobs * A_YEAR / 1e9:.2f} GB per million jobs, "
        f"{spent_s / jobs * 1e6:.0f} us of CPU a job"
    )


def ask(directory: str, repeats: int) -> None:
    """Time each kind of question, newest first, a page of 50."""
    own = UseFilter(owner=OwnerFilter(10_017, "user17"))
    questions: list[tuple[str, list[str], UseFilter]] = [
        ("a rare word", ["zyzzyva"], UseFilter()),
        ("a common word", ["module"], UseFilter()),
        ("part of a path", ["/scratch/user77/"], UseFilter()),
        ("a module and its version", ["module load GROMACS/2023"], UseFilter()),
        ("a line that is not there", ["#SBATCH --partition=shout"], UseFilter()),
        ("one's own, common", ["module load"], own),
        ("one's own, nowhere", ["/scratch/user7/"], own),
    ]
    print(f"{'question':26} {'hits':>5} {'p50 ms':>8} {'p99 ms':>8}")
    for name, terms, wanted in questions:
        times = asked(directory, terms, wanted, repeats)
        print(f"{name:26} {times.hits:5} {times.p50:8.1f} {times.p99:8.1f}")


def main() -> None:
    """Fill, measure and search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=scaled(100_000, 500))
    parser.add_argument("--repeats", type=int, default=scaled(100, 2))
    parser.add_argument("--dir", default=os.environ.get("BENCH_DIR") or "/dev/shm")
    options = parser.parse_args()
    jobs, times = options.jobs, A_YEAR / options.jobs
    print(f"{jobs} jobs on {options.dir}; per million jobs:")
    columns = (
        "plain GB",
        "blocks GB",
        "inodes",
        "names",
        "manifests GB",
        "database GB",
        "us a job",
    )
    print(f"{'':22}" + "".join(f"{column:>13}" for column in columns))
    for label, shares, compress in (
        ("each its own", False, "none"),
        ("shared (the default)", True, "none"),
        ("shared, zstd", True, "zstd"),
    ):
        where = tempfile.mkdtemp(prefix="steward-million-", dir=options.dir)
        try:
            spent_s = fill(where, jobs, shares=shares, compress=compress)
            found = measure(f"{where}/tree")
            database = size_of(f"{where}/state")
        finally:
            shutil.rmtree(where)
        print(
            f"{label:22}{found.length * times / 1e9:13.2f}{found.blocks * times / 1e9:13.2f}"
            f"{found.inodes * times:13,.0f}{found.names * times:13,.0f}"
            f"{found.manifests * times / 1e9:13.2f}{database * times / 1e9:13.2f}"
            f"{spent_s / jobs * 1e6:13.0f}",
            flush=True,
        )
    where = tempfile.mkdtemp(prefix="steward-million-", dir=options.dir)
    try:
        index(where, jobs)
        ask(where, options.repeats)
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
