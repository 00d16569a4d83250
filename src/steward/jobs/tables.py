"""The tables of jobs.db, and how what is known of one job id is read from them.

Text that is not known is NULL, so that it costs no room in an index. Times are
microseconds since the epoch.
"""

import zlib
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import Event, JobScript, JobsMissed
from steward.core.records import JobRecord
from steward.core.sqlite import Connection
from steward.core.timestamps import micros, moment
from steward.core.usage import NodeGap
from steward.jobs.identity import KeptScript
from steward.jobs.launches import LaunchKey, LaunchRow
from steward.jobs.lines import TABLE
from steward.jobs.run_merge import RunFacts


def database_path(state_dir: str) -> str:
    """Where jobs.db lies."""
    return f"{state_dir}/jobs.db"


MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL);
    INSERT INTO cursor VALUES (0);

    CREATE TABLE job (
        number INTEGER PRIMARY KEY,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        first_submit INTEGER NOT NULL,
        verified INTEGER NOT NULL,
        purged INTEGER NOT NULL,
        ended INTEGER NOT NULL,
        restarts INTEGER NOT NULL,
        uid INTEGER,
        user TEXT,
        account TEXT,
        partition TEXT,
        name TEXT,
        state TEXT,
        submit INTEGER,
        start INTEGER,
        end_time INTEGER,
        array_job_id INTEGER,
        array_task TEXT,
        het_job_id INTEGER,
        het_offset INTEGER,
        original_sluid TEXT,
        script_key TEXT,
        record BLOB
    );
    CREATE INDEX job_by_id ON job (job_id, cluster, first_submit);
    CREATE INDEX job_by_submit ON job (first_submit, job_id);
    CREATE INDEX job_by_uid ON job (uid, first_submit, job_id) WHERE uid IS NOT NULL;
    CREATE INDEX job_by_user ON job (user, first_submit, job_id) WHERE user IS NOT NULL;
    CREATE INDEX job_by_account ON job (account, first_submit, job_id) WHERE account IS NOT NULL;
    CREATE INDEX job_by_array ON job (array_job_id, first_submit) WHERE array_job_id IS NOT NULL;
    CREATE INDEX job_by_het ON job (het_job_id, first_submit) WHERE het_job_id IS NOT NULL;
    CREATE INDEX job_unfinished ON job (cluster) WHERE ended = 0 AND verified = 1;
    CREATE INDEX job_by_sluid ON job (original_sluid) WHERE original_sluid IS NOT NULL;

    CREATE TABLE run (
        number INTEGER PRIMARY KEY,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        submit INTEGER NOT NULL,
        restarts INTEGER NOT NULL,
        job INTEGER NOT NULL,
        sluid TEXT,
        state TEXT,
        start INTEGER,
        end_time INTEGER,
        exit_code INTEGER,
        exit_signal INTEGER,
        nodelist TEXT,
        facts BLOB NOT NULL,
        UNIQUE (cluster, job_id, submit, restarts)
    );
    CREATE INDEX run_by_sluid ON run (sluid) WHERE sluid IS NOT NULL;

    CREATE TABLE script (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        spool_mtime_ns INTEGER NOT NULL,
        job INTEGER,
        purged INTEGER NOT NULL,
        said BLOB,
        body BLOB NOT NULL,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE INDEX script_by_id ON script (cluster, job_id, spool_mtime_ns);
    CREATE INDEX script_purged ON script (cluster, job_id) WHERE purged = 1;
    """,
    f"""
    ALTER TABLE run ADD COLUMN told BLOB;
    CREATE INDEX run_untold ON run (cluster, job_id) WHERE told IS NULL;

    CREATE TABLE launch (
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        step TEXT NOT NULL,
        node TEXT NOT NULL,
        launched INTEGER NOT NULL,
        submit INTEGER,
        restarts INTEGER,
        piece INTEGER NOT NULL,
        ended INTEGER NOT NULL,
        seen_at INTEGER NOT NULL,
        said TEXT,
        summed BLOB,
        facts BLOB NOT NULL,
        UNIQUE (cluster, job_id, step, node, launched)
    );
    CREATE INDEX launch_unattributed ON launch (launched) WHERE submit IS NULL;
    CREATE INDEX launch_unended ON launch (launched) WHERE ended = 0;

    CREATE TABLE accounted (
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        submit INTEGER NOT NULL,
        step TEXT NOT NULL,
        line BLOB NOT NULL,
        PRIMARY KEY (cluster, job_id, submit, step)
    ) WITHOUT ROWID;

    CREATE TABLE gap (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        node TEXT NOT NULL,
        why TEXT NOT NULL,
        lines INTEGER NOT NULL,
        since INTEGER,
        at INTEGER NOT NULL,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE INDEX gap_by_time ON gap (at);

    CREATE TABLE due (
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        at INTEGER NOT NULL,
        PRIMARY KEY (cluster, job_id)
    ) WITHOUT ROWID;
    CREATE INDEX due_by_time ON due (at);

    CREATE TABLE expired (
        cluster TEXT NOT NULL PRIMARY KEY,
        before INTEGER NOT NULL
    ) WITHOUT ROWID;

    CREATE TABLE outbox (number INTEGER PRIMARY KEY, events BLOB NOT NULL);
    {TABLE}
    """,
    """
    CREATE INDEX job_by_state
        ON job (state, first_submit, job_id, number, cluster, uid, user, account, partition);
    CREATE INDEX job_by_name ON job (name, first_submit, job_id);
    CREATE INDEX job_by_end ON job (end_time, job_id) WHERE ended = 1;
    CREATE INDEX job_by_task ON job (array_job_id, cluster, state) WHERE array_job_id IS NOT NULL;
    """,
    """
    CREATE TABLE missed (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        at INTEGER NOT NULL,
        PRIMARY KEY (key, cluster, job_id)
    ) WITHOUT ROWID;
    CREATE INDEX missed_by_time ON missed (cluster, at);
    """,
)


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What the last job.identity event of a script said, to tell what is news.

    Attributes:
        first_submit_us: First submit time, µs since the epoch.
        uid: The job's uid.
        user: The name that it resolved to at submit.
        end_us: When the job ended (µs; -1 if nobody said); None if it has not.
        lasting: Digest of the facts that do not change while the job runs.
        chain: Digest of all that was said so far: it makes the event's key.
    """

    first_submit_us: int
    uid: int | None
    user: str
    end_us: int | None
    lasting: str
    chain: str


class Told(msgspec.Struct, array_like=True):
    """What was said of a run, to tell what is news.

    Attributes:
        basis: Digest of what its steps' lines depend on; NO_RUN and EXPIRED of what has none.
        has_steps: Whether there are lines of steps below its own.
        start: When it began (µs), the node list and the TRES, as was said; None for nothing.
        is_guess: Whether that start was only the first launch of a step.
        end: Digest of what was said of its end; "" for nothing.
        pieces: The same of its pieces, by when each ended (µs).
        suspended_us: The latest suspension, or its end, that was said.
        over_us: When it was first found to be over (µs); 0 while it is not.
        chain: Digest of all corrections so far: it makes the next one's key.
    """

    basis: str = ""
    has_steps: bool = False
    start: tuple[int, str, str] | None = None
    is_guess: bool = False
    end: str = ""
    pieces: dict[int, str] = msgspec.field(default_factory=dict)
    suspended_us: int = 0
    over_us: int = 0
    chain: str = ""


NO_RUN: Final = "-"
EXPIRED: Final = "x"
"""Stand for the basis of what turned out to be no run, and of a run whose lines are forgotten."""


OF_NO_JOB: Final = 0
"""Stands for the job of a run that slurmctld forgot as if it had never been submitted."""


class ScriptRow(KeptScript):
    """A script of the group; ``body`` is the job.script event's body as JSON."""

    body: bytes = b""
    job: int | None = None
    said: Said | None = None
    is_dirty: bool = False


class Group(msgspec.Struct):
    """All that is known of one job id on one cluster.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id.
        numbers: Rows of the jobs that had this id.
        runs: Facts of the runs, by submit time (µs) and restart count.
        run_jobs: The rows that the runs belonged to when they were read.
        scripts: The scripts by key.
        dirty_runs: Runs that have changed.
        told: What was said of the runs.
        launches: Launches of the steps that are looked at, or all.
        suspensions: Runs that were suspended or resumed: which, when (µs), the record.
        is_whole: Whether all is to be made anew, whatever has changed.
        is_due: Whether it was looked at because it was time to.
    """

    cluster: str
    job_id: int
    numbers: set[int] = msgspec.field(default_factory=set)
    runs: dict[tuple[int, int], RunFacts] = msgspec.field(default_factory=dict)
    run_jobs: dict[tuple[int, int], int] = msgspec.field(default_factory=dict)
    scripts: dict[str, ScriptRow] = msgspec.field(default_factory=dict)
    dirty_runs: set[tuple[int, int]] = msgspec.field(default_factory=set)
    told: dict[tuple[int, int], Told] = msgspec.field(default_factory=dict)
    launches: dict[LaunchKey, LaunchRow] = msgspec.field(default_factory=dict)
    suspensions: list[tuple[tuple[int, int], int, JobRecord]] = msgspec.field(default_factory=list)
    is_whole: bool = False
    is_due: bool = False


_encode = msgspec.json.Encoder().encode
_decode_facts = msgspec.json.Decoder(RunFacts).decode
_decode_told = msgspec.json.Decoder(Told).decode
_decode_said = msgspec.json.Decoder(Said).decode
_decode_body = msgspec.json.Decoder(JobScript).decode


def pack(run: RunFacts) -> bytes:
    """What is stored of a run: JSON, squeezed once it ended, for then there will be many."""
    data = _encode(run)
    return data if run.ending is None else zlib.compress(data, 1)


def unpack(stored: bytes) -> RunFacts:
    """What :func:`pack` stored."""
    return _decode_facts(stored if stored.startswith(b"[") else zlib.decompress(stored))


def known(connection: Connection, cluster: str, job_ids: Iterable[int]) -> set[int]:
    """Those of the ids of which something is known already."""
    values = {"cluster": cluster, "ids": _encode(list(job_ids)).decode()}
    rows = connection.execute(
        "SELECT job_id FROM job WHERE cluster = :cluster "
        "AND job_id IN (SELECT value FROM json_each(:ids)) UNION ALL "
        "SELECT job_id FROM script WHERE cluster = :cluster AND purged = 1 "
        "AND job_id IN (SELECT value FROM json_each(:ids))",
        values,
    )
    return {job_id for (job_id,) in rows}


def load(connection: Connection, cluster: str, job_ids: Iterable[int]) -> dict[int, Group]:
    """What is known of these ids, with a handful of queries however many they are."""
    groups = {job_id: Group(cluster, job_id) for job_id in job_ids}
    within = (cluster, _encode(list(groups)).decode())
    for job_id, number in connection.execute(
        "SELECT job_id, number FROM job WHERE cluster = ? "
        "AND job_id IN (SELECT value FROM json_each(?))",
        within,
    ):
        groups[job_id].numbers.add(number)
    for job_id, job, facts, told in connection.execute(
        "SELECT job_id, job, facts, told FROM run WHERE cluster = ? "
        "AND job_id IN (SELECT value FROM json_each(?))",
        within,
    ):
        run = unpack(facts)
        key = (run.submit_us, run.restarts)
        groups[job_id].runs[key] = run
        groups[job_id].run_jobs[key] = job
        if told is not None:
            groups[job_id].told[key] = _decode_told(told)
    for job_id, key, mtime_ns, job, purged, said, body in connection.execute(
        "SELECT job_id, key, spool_mtime_ns, job, purged, said, body FROM script "
        "WHERE cluster = ? AND job_id IN (SELECT value FROM json_each(?))",
        within,
    ):
        groups[job_id].scripts[key] = ScriptRow(
            key, mtime_ns, bool(purged), body, job, _decode_said(said) if said else None
        )
    return groups


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """One node.gap.

    Attributes:
        cluster: The cluster's name.
        node: NodeName.
        why: ``reboot``, ``lost`` or ``garbled``.
        lines: How many lines, 0 where nobody can know.
        since: Nothing is missing from before; None where unknown.
        at: When the node said so.
    """

    cluster: str
    node: str
    why: str
    lines: int
    since: datetime | None
    at: datetime


def put_gap(connection: Connection, event: Event) -> None:
    """Keep one, inside a transaction."""
    gap: NodeGap = event.body
    since = None if gap.since is None else micros(gap.since)
    connection.execute(
        "INSERT OR IGNORE INTO gap (key, cluster, node, why, lines, since, at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (event.key, event.cluster, gap.node, gap.why, gap.lines, since, micros(event.at)),
    )


class MissedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose script was lost, for it left the spool before it was read.

    Attributes:
        cluster: The cluster's name.
        job_id: Its raw id.
        at: When that was found.
    """

    cluster: str
    job_id: int
    at: datetime


def put_missed(connection: Connection, event: Event) -> None:
    """Keep the jobs of one job.missed, inside a transaction."""
    body: JobsMissed = event.body
    connection.executemany(
        "INSERT OR IGNORE INTO missed (key, cluster, job_id, at) VALUES (?, ?, ?, ?)",
        [(event.key, event.cluster, job_id, micros(event.at)) for job_id in body.job_ids],
    )


def missed(
    connection: Connection, since: datetime, until: datetime, cluster: str, limit: int
) -> list[MissedJob]:
    """Those of a time, oldest first."""
    rows = connection.execute(
        "SELECT cluster, job_id, at FROM missed WHERE cluster = ? AND at >= ? AND at < ? "
        "ORDER BY at, job_id LIMIT ?",
        (cluster, micros(since), micros(until), limit),
    )
    return [
        MissedJob(cluster=cluster, job_id=job_id, at=moment(at_us))
        for cluster, job_id, at_us in rows
    ]


def count_missed(connection: Connection, cluster: str) -> int:
    """How many jobs of a cluster capture missed, as long as jobs.db remembers."""
    (count,) = connection.execute(
        "SELECT count(*) FROM missed WHERE cluster = ?", (cluster,)
    ).fetchone()
    return int(count)


def gaps(
    connection: Connection, since: datetime | None, until: datetime | None, cluster: str
) -> list[Gap]:
    """Those that were told in a time, oldest first."""
    rows = connection.execute(
        "SELECT cluster, node, why, lines, since, at FROM gap "
        "WHERE (:cluster = '' OR cluster = :cluster) AND at >= :since AND at < :until "
        "ORDER BY at, cluster, node",
        {
            "cluster": cluster,
            "since": -(2**62) if since is None else micros(since),
            "until": 2**62 if until is None else micros(until),
        },
    )
    return [
        Gap(
            cluster=cluster,
            node=node,
            why=why,
            lines=lines,
            since=None if since_us is None else moment(since_us),
            at=moment(at_us),
        )
        for cluster, node, why, lines, since_us, at_us in rows
    ]
