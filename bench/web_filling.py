"""A made-up cluster of a quarter of a year: its jobs, scripts, money and nodes' states.

They are put into the journal as events, and into the ledger; a real daemon then makes its
books of them.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

import web_money
import web_nodes
from search_bench import make_script
from steward.archive.files.sink import FilesSink
from steward.core.access import ClusterRoles, ClusterRolesFiles
from steward.core.config import Settings
from steward.core.events import (
    JOB_END,
    JOB_SCRIPT,
    JOB_SEEN,
    Event,
    IncomingFile,
    JobFacts,
    JobScript,
    make_script_key,
    utc_now,
)
from steward.core.journal.store import Journal, encode_rows
from steward.core.poll_status import PollStatus, PollStatusFiles
from steward.core.records import JobRecord
from steward.core.script_stores import IncomingStore, make_incoming_filename, make_stores
from steward.slurm.settings import ClusterSettings

CLUSTER = "main"
FIRST_JOB = 1000
USERS = 60
READER = "nobody"
"""Looks after every account; a user that every system has."""
DAYS = 90
_BATCH = 500
_NAMES = ("mdrun", "train", "relax", "align", "render", "fold")
_SECONDS = (30, 600, 3600, 20_000, 70_000, 160_000)
_WIDTHS = (1, 1, 1, 1, 2, 4, 16, 64)
"""How long jobs run, and on how many nodes: a few hundred run at any time, on thousands."""
_STATES = ("COMPLETED",) * 16 + ("FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY")


def fill(settings: Settings, jobs: int) -> None:
    """Put everything into a state directory that no daemon runs on.

    Args:
        settings: The daemon's.
        jobs: How many jobs.
    """
    Path(settings.state_dir).mkdir(mode=0o711, exist_ok=True)
    random_ = random.Random(1)
    now = utc_now().replace(microsecond=0)
    begin = now - timedelta(days=DAYS)
    records = [
        _record(number, begin + (now - begin) * number / jobs, now, random_)
        for number in range(jobs)
    ]
    running = sum(1 for one in records if one.end is None)
    ClusterRolesFiles(settings.state_dir).put(CLUSTER, ClusterRoles())
    poll = PollStatus(
        at=now,
        current_at=now,
        up=True,
        version="24.11.5",
        cost_s=0.2,
        jobs=running,
        interval_s=5.0,
    )
    PollStatusFiles(settings.state_dir).put(CLUSTER, poll)
    web_money.fill(
        *(settings, CLUSTER, records),
        owner=READER,
        begin=begin - timedelta(days=1),
        end=now + timedelta(days=DAYS),
    )
    _tell(settings, web_nodes.events(CLUSTER, begin, now, random_), records, random_)


def _tell(
    settings: Settings, states: list[Event], records: list[JobRecord], random_: random.Random
) -> None:
    """Append all to the journal, with the scripts that its events point to."""
    stores = make_stores(settings)
    FilesSink(settings, "files", stores).prepare()
    store = stores.get("archive.files")
    store.prepare()
    journal = Journal(settings.state_dir)
    batch: list[Event] = []
    for event in itertools.chain(states, _of_jobs(records, store, random_)):
        batch.append(event)
        if len(batch) >= _BATCH:
            store.sync()
            journal.append(encode_rows(batch))
            batch.clear()
    store.sync()
    journal.append(encode_rows(batch))
    journal.close()


def _of_jobs(
    records: list[JobRecord], store: IncomingStore, random_: random.Random
) -> Iterator[Event]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random_.choices(letters, k=random_.randint(3, 10))) for _ in range(20_000)]
    for number, record in enumerate(records):
        script = make_script(random_, words, number, number % USERS)
        yield _script(record, script, store)
        assert record.submit is not None
        yield _facts(JOB_SEEN, record, record.submit)
        if record.end is not None:
            yield _facts(JOB_END, record, record.end)


def _record(number: int, submit: datetime, now: datetime, random_: random.Random) -> JobRecord:
    user = number % USERS
    submit = submit.replace(microsecond=0)
    start = submit + timedelta(seconds=random_.choice((5, 60, 900, 7200)))
    end = start + timedelta(seconds=random_.choice(_SECONDS))
    cpus = random_.choice((1, 4, 16, 64))
    state = random_.choice(_STATES)
    if end > now:
        state = "RUNNING" if start < now else "PENDING"
    partition = web_nodes.PARTITIONS[number % 2]
    nodes = random_.choice(_WIDTHS)
    first = random_.randrange(web_nodes.NODES - nodes)
    last = web_nodes.name(first + nodes - 1)[1:]
    nodelist = web_nodes.name(first) if nodes == 1 else f"n[{first:04}-{last}]"
    cpus *= nodes
    tres = f"cpu={cpus},mem={cpus * 2}G,node={nodes},billing={cpus}"
    return JobRecord(
        job_id=FIRST_JOB + number,
        name=_NAMES[number % len(_NAMES)],
        uid=20_000 + user,
        user=f"user{user:02}",
        account=web_money.account(user + number // USERS % 3),
        partition=partition,
        qos="normal",
        state=state,
        batch=True,
        submit=submit,
        eligible=submit,
        start=start if state != "PENDING" else None,
        end=end if end <= now else None,
        time_limit_s=172_800,
        nodes=nodes,
        cpus=cpus,
        tasks=cpus,
        tres_requested=tres,
        tres_allocated=tres if state != "PENDING" else "",
        nodelist=nodelist if state != "PENDING" else "",
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


def _script(record: JobRecord, script: bytes, store: IncomingStore) -> Event:
    assert record.submit is not None
    mtime_ns = int(record.submit.timestamp()) * 10**9
    kept = []
    for what, data in (("script", script), ("env", b"\2\0\0\0HOME=/home/u\0PATH=/usr/bin\0")):
        name = make_incoming_filename(CLUSTER, record.job_id, mtime_ns, len(data), what)
        store.write(name, data)
        digest = hashlib.sha256(data).hexdigest()
        kept.append(IncomingFile(path=name, length=len(data), sha256=digest))
    return Event(
        kind=JOB_SCRIPT,
        cluster=CLUSTER,
        key=make_script_key(record.job_id, mtime_ns),
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


def settings_in(home: Path, **changes: Any) -> Settings:
    """The settings of a daemon whose files are all below a directory."""
    (home / "spool").mkdir(exist_ok=True)
    settings = Settings(
        state_dir=str(home / "state"),
        run_dir=str(home),
        cluster={CLUSTER: ClusterSettings(slurm=False, spool=str(home / "spool"), timezone="UTC")},
    )
    return msgspec.structs.replace(settings, **changes)
