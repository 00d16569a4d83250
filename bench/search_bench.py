"""How long a page of search results takes over many distinct scripts, all in one month.

    python bench/search_bench.py [--scripts 100000] [--dir DIR] [--keep]

The scripts are made up, but varied: modules, paths, seeds and names differ, as
they do on a cluster. Printed are the cost of indexing and, for each kind of
question, the middle and the 99th percentile of a page of 50, newest first.
"""

import argparse
import hashlib
import os
import random
import resource
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scale import scaled
from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.catalog.generations import CatalogGenerations
from steward.archive.catalog.matches import TermMatcher
from steward.archive.catalog.month import ScriptUse
from steward.archive.catalog.search import CatalogSearcher, OwnerFilter, UseFilter
from steward.archive.contents import ScriptContents
from steward.core.events import (
    JOB_IDENTITY,
    JOB_SCRIPT,
    Event,
    IncomingFile,
    JobIdentity,
    JobScript,
)
from steward.core.records import JobRecord
from steward.core.script_stores import IncomingStores

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
MODULES = (
    *("GROMACS", "OpenMPI", "GCC", "Python", "CUDA", "VASP"),
    *("LAMMPS", "R", "Julia", "OpenFOAM", "NAMD", "ORCA"),
)
TEMPLATES = (
    "export {0}={1}",
    "srun ./{0} --input {1}.dat --seed {2}",
    "python3 /home/user{3}/{0}.py {1}",
    "# {0} {1} {0}",
    "for i in $(seq 1 {2}); do echo {0}; done",
)
USERS = 300
RARE_OWNER = 299
"""This user has ten of all scripts, and no other user's words."""


class Bytes(IncomingStores):
    """Scripts in memory, in place of a store."""

    def __init__(self) -> None:
        super().__init__([])
        self.held: dict[str, bytes] = {}

    def read(self, body: JobScript, file: IncomingFile) -> bytes:  # noqa: ARG002 - the store's shape
        """The bytes of a script."""
        return self.held[file.sha256]


def make_script(random_: random.Random, words: list[str], number: int, user: int) -> bytes:
    """One script of ten to fifty lines."""
    lines = [
        "#!/bin/bash -l",
        f"#SBATCH --job-name={random_.choice(words)}-{number}",
        f"#SBATCH -n {random_.randint(1, 128)}",
        f"#SBATCH --partition={random_.choice(['long', 'short', 'gpu', 'debug'])}",
        f"module load {random_.choice(MODULES)}/{random_.randint(2018, 2026)}.{number % 3}",
        f"cd /scratch/user{user}/{random_.choice(words)}/{random_.choice(words)}/run{number}",
    ]
    for _ in range(random_.randint(5, 40)):
        template = random_.choice(TEMPLATES)
        word, other = random_.choice(words), random_.choice(words)
        lines.append(template.format(word, other, random_.randrange(10**6), user))
    if number % 5000 == 7:
        lines.append("echo zyzzyva")
    return "\n".join(lines).encode() + b"\n"


def fill(directory: str, scripts: int) -> None:
    """Index the scripts, and print what it cost."""
    random_ = random.Random(1)  # the same scripts every time
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random_.choices(letters, k=random_.randint(3, 10))) for _ in range(20_000)]
    store = Bytes()
    catalog = CatalogConsumer(directory, ScriptContents(store))
    total = position = 0
    spent_s = 0.0
    began = time.perf_counter()
    for first in range(0, scripts, 100):
        events: list[Event] = []
        for number in range(first, min(scripts, first + 100)):
            user = RARE_OWNER if number % (scripts // 10) == 3 else random_.randrange(USERS - 1)
            data = make_script(random_, words, number, user)
            total += len(data)
            position += 2
            events += make_events(store, data, number, user, position)
        cpu_s = time.process_time()
        catalog.apply(events, position, lambda _: None)
        spent_s += time.process_time() - cpu_s
        store.held.clear()
    catalog.close()
    current = CatalogGenerations(directory).get_current()
    size = sum(entry.stat().st_size for entry in Path(current).iterdir())
    print(
        f"{scripts} scripts, {total / 1e6:.0f} MB, indexed in {size / 1e6:.0f} MB: "
        f"{spent_s / scripts * 1e6:.0f} us of CPU a script, "
        f"{time.perf_counter() - began:.0f} s in all (scripts made up included), "
        f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"
    )


def make_events(
    store: Bytes, data: bytes, number: int, user: int, position: int
) -> tuple[Event, Event]:
    """A script's event and its identity's."""
    digest = hashlib.sha256(data).hexdigest()
    store.held[digest] = data
    mtime_ns = (int(START.timestamp()) + 20 * number) * 10**9
    key = f"script:{number}:{mtime_ns}"
    record = JobRecord(job_id=number, uid=10_000 + user, user=f"user{user}", account="physics")
    script = JobScript(
        job_id=number,
        spool_mtime_ns=mtime_ns,
        script=IncomingFile(path="", length=len(data), sha256=digest),
    )
    identity = JobIdentity(script_key=key, job_id=number, first_submit=START, record=record)

    def event(kind: str, key: str, body: object, id_: int) -> Event:
        return Event(
            kind=kind,
            cluster="bench",
            key=key,
            at=START,
            seen_at=START,
            source="bench",
            body=body,
            id=id_,
        )

    return (
        event(JOB_SCRIPT, key, script, position - 1),
        event(JOB_IDENTITY, f"identity:{key}", identity, position),
    )


class Times(msgspec.Struct, frozen=True):
    """Hits of a page and what it took, in ms: the middle, the 99th percentile, the first time."""

    hits: int
    p50: float
    p99: float
    cold: float


def asked(directory: str, terms: list[str], wanted: UseFilter, repeats: int) -> Times:
    """Ask the same many times, newest first, a page of 50."""
    took: list[float] = []
    hits = 0
    for _ in range(repeats):
        # Files are opened anew for each question, as by a process that was just started.
        searcher = CatalogSearcher(directory)
        began = time.perf_counter()
        hits = len(searcher.find_page(TermMatcher(terms), wanted, anybody, limit=50).hits)
        took.append((time.perf_counter() - began) * 1000)
        searcher.close()
    ranked = sorted(took)
    p99 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
    return Times(hits=hits, p50=ranked[len(ranked) // 2], p99=p99, cold=took[0])


def ask(directory: str, repeats: int) -> None:
    """Time each kind of question."""
    rare_owner = UseFilter(owner=OwnerFilter(10_000 + RARE_OWNER, f"user{RARE_OWNER}"))
    owner = UseFilter(owner=OwnerFilter(10_017, "user17"))
    questions: list[tuple[str, list[str], UseFilter]] = [
        ("a rare word", ["zyzzyva"], UseFilter()),
        ("a common word", ["module"], UseFilter()),
        ("a word of one in twelve", ["gromacs"], UseFilter()),
        ("two characters, common", ["sh"], UseFilter()),
        ("two characters, less so", ["7/"], UseFilter()),
        ("two characters, nowhere", ["~~"], UseFilter()),
        ("one character, common", ["q"], UseFilter()),
        ("one character, nowhere", ["@"], UseFilter()),
        ("part of a path", ["/scratch/user77/"], UseFilter()),
        ("a module and its version", ["module load GROMACS/2023"], UseFilter()),
        ("a common and a rare word", ["#!/bin/bash", "zyzzyva"], UseFilter()),
        ("a line that is not there", ["#SBATCH --partition=shout"], UseFilter()),
        ("common, owner of few", ["module load"], rare_owner),
        ("common, none of the owner's", ["/scratch/user7/"], rare_owner),
        ("common, owner of many", ["module load"], owner),
        ("two characters, none of owner's", ["~~"], owner),
    ]
    print(f"{'question':34} {'hits':>5} {'p50 ms':>8} {'p99 ms':>8} {'cold ms':>8}")
    for name, terms, wanted in questions:
        times = asked(directory, terms, wanted, repeats)
        print(f"{name:34} {times.hits:5} {times.p50:8.1f} {times.p99:8.1f} {times.cold:8.1f}")
    searcher = CatalogSearcher(directory)
    for terms in (["gromacs"], ["module load"]):
        began = time.perf_counter()
        count = searcher.count(TermMatcher(terms), UseFilter(), anybody)
        print(f"exact count of {terms[0]!r}: {count} in {time.perf_counter() - began:.2f} s")
    searcher.close()


def anybody(use: ScriptUse) -> bool:  # noqa: ARG001 - an access decision's shape
    """Everybody may know of everything."""
    return True


def main() -> None:
    """Fill a catalog and ask it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=scaled(100_000, 100))
    parser.add_argument("--repeats", type=int, default=scaled(100, 2))
    parser.add_argument("--dir", default=os.environ.get("BENCH_DIR") or "/dev/shm")
    parser.add_argument("--keep", action="store_true", help="leave the catalog where it is")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="steward-search-", dir=options.dir)
    try:
        fill(directory, options.scripts)
        ask(directory, options.repeats)
    finally:
        if options.keep:
            print(f"left in {directory}")
        else:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
