"""A made-up cluster of a quarter of a year: its jobs, scripts, money and nodes' states, as events.

They are put into the journal; a real daemon then makes its books of them.
"""

import hashlib
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from search_bench import make_script
from steward.access import Standing
from steward.archive.files.sink import FilesSink
from steward.bank.ledger import Account, By, open_ledger
from steward.bank.money import MICRO
from steward.bank.records import Rate
from steward.config import ClusterSettings, Settings
from steward.events import (
    JOB_END,
    JOB_SCRIPT,
    JOB_SEEN,
    NODE_STATE,
    Event,
    JobFacts,
    JobScript,
    Kept,
    script_key,
    utc_now,
)
from steward.incoming import Store, kept_filename, stores_of
from steward.journal.store import Journal, rows_of
from steward.records import JobRecord
from steward.standings import Standings
from steward.state_facts import NodeState

CLUSTER = "main"
FIRST_JOB = 1000
USERS, ACCOUNTS, NODES = 60, 12, 500
READER = "nobody"
"""Looks after every account; a user that every system has."""
DAYS = 90
_BATCH = 500
_NAMES = ("mdrun", "train", "relax", "align", "render", "fold")
_STATES = ("COMPLETED",) * 16 + ("FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY")


def fill(settings: Settings, jobs: int) -> None:
    """Put everything into a state directory that no daemon runs on.

    Args:
        settings: The daemon's.
        jobs: How many jobs.
    """
    Path(settings.state_dir).mkdir(mode=0o711, exist_ok=True)
    Standings(settings.state_dir).put(CLUSTER, Standing())
    _open_bank(settings)
    stores = stores_of(settings)
    FilesSink(settings, "files", stores).prepare()
    store = stores.get("archive.files")
    store.prepare()
    journal = Journal(settings.state_dir)
    batch: list[Event] = []
    for event in _events(jobs, store):
        batch.append(event)
        if len(batch) >= _BATCH:
            store.sync()
            journal.append(rows_of(batch))
            batch.clear()
    store.sync()
    journal.append(rows_of(batch))
    journal.close()


def _events(jobs: int, store: Store) -> Iterator[Event]:
    random_ = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random_.choices(letters, k=random_.randint(3, 10))) for _ in range(20_000)]
    now = utc_now().replace(microsecond=0)
    begin = now - timedelta(days=DAYS)
    yield from _nodes(begin, now, random_)
    for number in range(jobs):
        submit = begin + (now - begin) * number / jobs
        record = _record(number, submit.replace(microsecond=0), now, random_)
        script = make_script(random_, words, number, number % USERS)
        yield _script(record, script, store)
        yield _facts(JOB_SEEN, record, record.submit or now)
        if record.end is not None:
            yield _facts(JOB_END, record, record.end)


def _record(number: int, submit: datetime, now: datetime, random_: random.Random) -> JobRecord:
    user, account = number % USERS, number % ACCOUNTS
    start = submit + timedelta(seconds=random_.choice((5, 60, 900, 7200)))
    end = start + timedelta(seconds=random_.choice((30, 600, 3600, 20_000)))
    cpus = random_.choice((1, 4, 16, 64))
    state = random_.choice(_STATES)
    if end > now:
        state = "RUNNING" if start < now else "PENDING"
    tres = f"cpu={cpus},mem={cpus * 2}G,node=1,billing={cpus}"
    return JobRecord(
        job_id=FIRST_JOB + number,
        name=_NAMES[number % len(_NAMES)],
        uid=20_000 + user,
        user=f"user{user:02}",
        account=f"account{account:02}",
        partition=("batch", "gpu", "debug")[number % 3],
        qos="normal",
        state=state,
        batch=True,
        submit=submit,
        eligible=submit,
        start=start if state != "PENDING" else None,
        end=end if end <= now else None,
        time_limit_s=86_400,
        nodes=1,
        cpus=cpus,
        tasks=cpus,
        tres_requested=tres,
        tres_allocated=tres if state != "PENDING" else "",
        nodelist=f"n{number % NODES:03}" if state != "PENDING" else "",
        exit_code=1 if state == "FAILED" else 0,
        submit_line="sbatch job.sh",
        work_dir=f"/scratch/user{user:02}",
    )


def _facts(kind: str, record: JobRecord, at: datetime) -> Event:
    return Event(
        kind=kind,
        cluster=CLUSTER,
        key=f"{kind}:{record.job_id}",
        at=at,
        seen_at=at,
        source="bench",
        body=JobFacts(record=record, whole=True),
    )


def _script(record: JobRecord, script: bytes, store: Store) -> Event:
    assert record.submit is not None
    mtime_ns = int(record.submit.timestamp()) * 10**9
    kept = []
    for what, data in (("script", script), ("env", b"\2\0\0\0HOME=/home/u\0PATH=/usr/bin\0")):
        name = kept_filename(CLUSTER, record.job_id, mtime_ns, len(data), what)
        store.write(name, data)
        digest = hashlib.sha256(data).hexdigest()
        kept.append(Kept(path=name, length=len(data), sha256=digest))
    return Event(
        kind=JOB_SCRIPT,
        cluster=CLUSTER,
        key=script_key(record.job_id, mtime_ns),
        at=record.submit,
        seen_at=record.submit,
        source="bench",
        body=JobScript(
            job_id=record.job_id,
            spool_mtime_ns=mtime_ns,
            script=kept[0],
            environment=kept[1],
            store="archive.files",
        ),
    )


def _nodes(begin: datetime, now: datetime, random_: random.Random) -> Iterator[Event]:
    for number in range(NODES):
        at, state = begin, "IDLE"
        for turn in range(8):
            new = state if turn == 0 else random_.choice(("IDLE", "IDLE+DRAIN", "DOWN"))
            reason = "" if new == "IDLE" else "bad DIMM"
            body = NodeState(
                node=f"n{number:03}",
                state=new,
                old_state="" if turn == 0 else state,
                reason=reason,
                source="reconcile",
                partitions=("batch",),
                cpus=64,
                memory_bytes=256 << 30,
            )
            yield Event(
                kind=NODE_STATE,
                cluster=CLUSTER,
                key=f"node.state:n{number:03}:{turn}",
                at=at,
                seen_at=at,
                source="bench",
                body=body,
            )
            state = new
            at += (now - begin) / 10


def _open_bank(settings: Settings) -> None:
    by = By(who="bench", why="made up")
    ledger = open_ledger(settings)
    since = utc_now() - timedelta(days=DAYS + 1)
    with ledger.transaction() as t:
        t.rates.add(Rate(cluster=CLUSTER, weights={"cpu": MICRO}, valid_from=since), by)
        for number in range(ACCOUNTS):
            name = f"account{number:02}"
            t.accounts.create(Account(name=name, owners=(READER,)), by)
            t.allocations.create(
                name,
                10**9 * MICRO,
                by,
                begin=since,
                end=utc_now() + timedelta(days=DAYS),
            )
    ledger.close()


def settings_in(home: Path, **changes: Any) -> Settings:
    """The settings of a daemon whose files are all below a directory."""
    (home / "spool").mkdir(exist_ok=True)
    settings = Settings(
        state_dir=str(home / "state"),
        socket=str(home / "steward.sock"),
        cluster={CLUSTER: ClusterSettings(slurm=False, spool=str(home / "spool"), timezone="UTC")},
    )
    return msgspec.structs.replace(settings, **changes)
