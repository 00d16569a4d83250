"""Schema of jobs.db, and loading of everything known about a job id (:class:`JobIdGroup`).

:data:`MIGRATIONS` creates the tables; :func:`load_groups` reads the groups of some job ids with a
few queries. The last part stores and reads gaps that nodes reported and scripts that capture
missed.

Tables: ``job``, ``run`` and ``script``; ``launch`` (steps on nodes), ``accounted`` (imported steps)
and ``line`` (accounting lines made of all), summed up in the tables of
:mod:`steward.jobs.sum_tables`, with the node index of :mod:`steward.jobs.node_runs`; ``gap`` and
``missed`` (lost data); ``due`` (when to resolve a job id again), ``expired`` (before when jobs were
deleted), ``outbox`` and ``cursor``.

Unknown text is NULL, so that it takes no room in an index. Times are µs since the epoch.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from steward.core.databases import JOBS
from steward.core.events import Event, JobScript, MissedJobs
from steward.core.records import JobRecord
from steward.core.sqlite import Connection
from steward.core.storage import CURSOR, OUTBOX, Index, Rows, Table
from steward.core.timestamps import to_micros
from steward.core.usage import NodeGap
from steward.jobs.compression import decompress_json
from steward.jobs.identity import StoredScriptFacts
from steward.jobs.launches import ACCOUNTED, LAUNCHES, LaunchKey, LaunchRow
from steward.jobs.lines import STATE_INDEX, TABLE
from steward.jobs.node_runs import NODES_SCHEMA
from steward.jobs.run_merge import RunFacts
from steward.jobs.sum_tables import SUMMED, SUMS_SCHEMA


def database_path(state_dir: str) -> str:
    """Return the path of jobs.db."""
    return JOBS.locate(state_dir)


class NodeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of data that a node reported (node.gap).

    Attributes:
        cluster: Cluster name.
        node: NodeName.
        why: ``reboot``, ``lost`` or ``garbled``.
        lines: Number of lost lines; 0 if unknown.
        since: Nothing before this time is missing; None if unknown.
        at: Time of the node's report.
    """

    cluster: str
    node: str
    why: str
    lines: int
    since: datetime | None
    at: datetime


class MissedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job whose script left the spool before capture read it.

    Attributes:
        cluster: Cluster name.
        job_id: Raw job id.
        at: Time of the discovery.
    """

    cluster: str
    job_id: int
    at: datetime


class _StoredLoss(NodeLoss, frozen=True, kw_only=True):
    """Loss, with the key of its event."""

    key: str


class _StoredMissedJob(MissedJob, frozen=True, kw_only=True):
    """Missed job, with the key of its event."""

    key: str


class DueJob(msgspec.Struct, frozen=True):
    """Job id to resolve again, and the time to do it, µs since the epoch."""

    cluster: str
    job_id: int
    at: int


class Expiry(msgspec.Struct, frozen=True):
    """Time before which the ended jobs of a cluster were deleted."""

    cluster: str
    before: datetime


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table ``job``; ``record`` is the job's record as compressed JSON."""

    number: int
    cluster: str
    job_id: int
    first_submit: int
    verified: bool
    purged: bool
    ended: bool
    restarts: int
    uid: int | None = None
    user: str | None = None
    account: str | None = None
    partition: str | None = None
    name: str | None = None
    state: str | None = None
    submit: int | None = None
    start: int | None = None
    end_time: int | None = None
    array_job_id: int | None = None
    array_task: str | None = None
    het_job_id: int | None = None
    het_offset: int | None = None
    original_sluid: str | None = None
    script_key: str | None = None
    record: bytes | None = None


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table ``run``: ``told`` is a :class:`PublishedRun`, as JSON.

    ``facts`` is a :class:`RunFacts` as compressed JSON.
    """

    number: int = 0
    cluster: str
    job_id: int
    submit: int
    restarts: int
    job: int
    sluid: str | None
    state: str | None
    start: int | None
    end_time: int | None
    exit_code: int | None
    exit_signal: int | None
    nodelist: str | None
    facts: bytes
    told: bytes | None


class StoredJobScript(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table ``script``: ``said`` is a :class:`PublishedIdentity`, as JSON.

    ``body`` is a :class:`JobScript` as compressed JSON.
    """

    key: str
    cluster: str
    job_id: int
    spool_mtime_ns: int
    job: int | None
    purged: bool
    said: bytes | None = None
    body: bytes


JOBS_TABLE: Final = Table(
    *(StoredJob, "job"),
    key="number",
    indexes={
        "by_id": Index("job_id, cluster, first_submit"),
        "by_submit": Index("first_submit, job_id"),
        "by_uid": Index("uid, first_submit, job_id", where="uid IS NOT NULL"),
        "by_user": Index("user, first_submit, job_id", where="user IS NOT NULL"),
        "by_account": Index("account, first_submit, job_id", where="account IS NOT NULL"),
        "by_array": Index("array_job_id, first_submit", where="array_job_id IS NOT NULL"),
        "by_het": Index("het_job_id, first_submit", where="het_job_id IS NOT NULL"),
        "unfinished": Index("cluster", where="ended = 0 AND verified = 1"),
        "by_sluid": Index("original_sluid", where="original_sluid IS NOT NULL"),
    },
)
RUNS: Final = Table(
    *(StoredRun, "run"),
    key="number",
    unique="cluster, job_id, submit, restarts",
    indexes={"by_sluid": Index("sluid", where="sluid IS NOT NULL")},
    later=("told",),
)
SCRIPTS: Final = Table(
    *(StoredJobScript, "script"),
    key="key, cluster",
    indexes={
        "by_id": Index("cluster, job_id, spool_mtime_ns"),
        "purged": Index("cluster, job_id", where="purged = 1"),
    },
)
_LOSSES: Final = Rows(NodeLoss)
_MISSED_JOBS: Final = Rows(MissedJob)
_STORED_LOSSES: Final = Table(
    _StoredLoss, "gap", key="key, cluster", indexes={"by_time": Index("at")}
)
_STORED_MISSED_JOBS: Final = Table(
    *(_StoredMissedJob, "missed"),
    key="key, cluster, job_id",
    indexes={"by_time": Index("cluster, at")},
)
DUE_JOBS: Final = Table(DueJob, "due", key="cluster, job_id", indexes={"by_time": Index("at")})
EXPIRIES: Final = Table(Expiry, "expired", key="cluster")
MIGRATIONS: Final = (
    f"""
    {CURSOR.schema}
    {JOBS_TABLE.schema}
    {RUNS.schema}
    {SCRIPTS.schema}
    """,
    f"""
    {"".join(RUNS.additions)}
    CREATE INDEX run_untold ON run (cluster, job_id) WHERE told IS NULL;
    {LAUNCHES.schema}
    {ACCOUNTED.schema}
    {_STORED_LOSSES.schema}
    {DUE_JOBS.schema}
    {EXPIRIES.schema}
    {OUTBOX.schema}
    {TABLE}
    """,
    """
    CREATE INDEX job_by_state
        ON job (state, first_submit, job_id, number, cluster, uid, user, account, partition);
    CREATE INDEX job_by_name ON job (name, first_submit, job_id);
    CREATE INDEX job_by_end ON job (end_time, job_id) WHERE ended = 1;
    CREATE INDEX job_by_task ON job (array_job_id, cluster, state) WHERE array_job_id IS NOT NULL;
    """,
    _STORED_MISSED_JOBS.schema,
    SUMMED.schema,
    STATE_INDEX,
    NODES_SCHEMA,
    SUMMED.additions[0],
    SUMS_SCHEMA,
)


class PublishedIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Content of the last job.identity event of a script, to detect changes.

    Attributes:
        first_submit_us: First submit time, µs since the epoch.
        uid: The job's uid.
        user: The user name at submit time.
        end_us: End of the job (µs; -1 if the time is unknown); None if it has not ended.
        lasting: Digest of the fields that do not change while the job runs.
        chain: Digest of all identities published so far; part of the event's key.
    """

    first_submit_us: int
    uid: int | None
    user: str
    end_us: int | None
    lasting: str
    chain: str


class PublishedRun(msgspec.Struct, array_like=True):
    """Published events and lines of a run, to detect changes.

    Attributes:
        lines_digest: Digest of what its step lines depend on; NO_RUN or EXPIRED without lines.
        has_steps: Whether it has lines of steps.
        start: Published start (µs), node list and TRES; None if not published.
        is_guess: Whether that start was only the first launch of a step.
        end: Digest of the published end; "" if not published.
        pieces: Digests of its published pieces, by end (µs).
        suspended_us: Time of the last published suspension or resumption.
        over_us: When it was first found to be over (µs); 0 if it is not.
        chain: Digest of all corrections so far; part of the next one's key.
    """

    lines_digest: str = ""
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
"""Values of ``PublishedRun.lines_digest``: the entry is not a run; the lines are deleted."""


NO_JOB: Final = 0
"""Job number of a run that slurmctld forgot as if it had never been submitted."""


class ScriptRow(StoredScriptFacts):
    """Row of the table ``script``; ``body`` is a :class:`JobScript` as JSON, or as stored."""

    body: bytes = b""
    job: int | None = None
    published: PublishedIdentity | None = None
    is_dirty: bool = False


class JobIdGroup(msgspec.Struct):
    """Everything known about one job id of one cluster.

    Attributes:
        cluster: Cluster name.
        job_id: The raw id.
        stored_jobs: Rows of the jobs that had this id when loaded, by number.
        runs: Runs by submit time (µs) and restart count.
        stored_runs: Their rows when loaded, without number, with the facts as JSON.
        scripts: The scripts by key.
        dirty_runs: Runs that may have changed.
        published_runs: Published state of each run, by its key.
        launches: Launches of the steps to update, or all launches.
        suspensions: Suspended or resumed runs: key, time (µs), record.
        needs_rebuild: Whether everything must be rebuilt.
        is_due: Whether it was loaded because its waiting time was over.
    """

    cluster: str
    job_id: int
    stored_jobs: dict[int, StoredJob] = msgspec.field(default_factory=dict)
    runs: dict[tuple[int, int], RunFacts] = msgspec.field(default_factory=dict)
    stored_runs: dict[tuple[int, int], StoredRun] = msgspec.field(default_factory=dict)
    scripts: dict[str, ScriptRow] = msgspec.field(default_factory=dict)
    dirty_runs: set[tuple[int, int]] = msgspec.field(default_factory=set)
    published_runs: dict[tuple[int, int], PublishedRun] = msgspec.field(default_factory=dict)
    launches: dict[LaunchKey, LaunchRow] = msgspec.field(default_factory=dict)
    suspensions: list[tuple[tuple[int, int], int, JobRecord]] = msgspec.field(default_factory=list)
    needs_rebuild: bool = False
    is_due: bool = False


_encode = msgspec.json.Encoder().encode
_decode_facts = msgspec.json.Decoder(RunFacts).decode
_decode_told = msgspec.json.Decoder(PublishedRun).decode
_decode_said = msgspec.json.Decoder(PublishedIdentity).decode
_decode_body = msgspec.json.Decoder(JobScript).decode


def unpack_run(stored: bytes) -> RunFacts:
    """Decode the facts of a run's row, compressed or not."""
    return _decode_facts(decompress_json(stored))


def find_known_ids(connection: Connection, cluster: str, job_ids: Iterable[int]) -> set[int]:
    """Return those ids about which something is stored."""
    values = {"cluster": cluster, "ids": _encode(list(job_ids)).decode()}
    rows = connection.execute(
        "SELECT job_id FROM job WHERE cluster = :cluster "
        "AND job_id IN (SELECT value FROM json_each(:ids)) UNION ALL "
        "SELECT job_id FROM script WHERE cluster = :cluster AND purged = 1 "
        "AND job_id IN (SELECT value FROM json_each(:ids))",
        values,
    )
    return {job_id for (job_id,) in rows}


def load_groups(
    connection: Connection, cluster: str, job_ids: Iterable[int]
) -> dict[int, JobIdGroup]:
    """Load the groups of these ids, with a few queries however many they are."""
    groups = {job_id: JobIdGroup(cluster, job_id) for job_id in job_ids}
    bound_values = (cluster, _encode(list(groups)).decode())
    of_ids = "WHERE cluster = ? AND job_id IN (SELECT value FROM json_each(?))"
    for job in map(
        JOBS_TABLE.decode,
        connection.execute(f"SELECT {JOBS_TABLE.select_list} FROM job {of_ids}", bound_values),  # noqa: S608 -- our own names
    ):
        groups[job.job_id].stored_jobs[job.number] = job
    for row in map(
        RUNS.decode,
        connection.execute(f"SELECT {RUNS.select_list} FROM run {of_ids}", bound_values),  # noqa: S608 -- likewise
    ):
        facts = decompress_json(row.facts)
        run = unpack_run(facts)
        key = (run.submit_us, run.restarts)
        group = groups[row.job_id]
        group.runs[key] = run
        group.stored_runs[key] = msgspec.structs.replace(row, number=0, facts=facts)
        if row.told is not None:
            group.published_runs[key] = _decode_told(row.told)
    for job_id, key, mtime_ns, job, purged, identity, body in connection.execute(
        f"SELECT job_id, key, spool_mtime_ns, job, purged, said, body FROM script {of_ids}",  # noqa: S608 -- likewise
        bound_values,
    ):
        groups[job_id].scripts[key] = ScriptRow(
            key, mtime_ns, bool(purged), body, job, _decode_said(identity) if identity else None
        )
    return groups


def put_gap(connection: Connection, event: Event) -> None:
    """Store a node.gap event, inside a transaction."""
    gap: NodeGap = event.body
    loss = _StoredLoss(
        key=event.key,
        cluster=event.cluster,
        node=gap.node,
        why=gap.why,
        lines=gap.lines,
        since=gap.since,
        at=event.at,
    )
    _STORED_LOSSES.insert(connection, loss, "ignore")


def put_missed(connection: Connection, event: Event) -> None:
    """Store the jobs of a job.missed event, inside a transaction."""
    body: MissedJobs = event.body
    jobs = [
        _StoredMissedJob(key=event.key, cluster=event.cluster, job_id=job_id, at=event.at)
        for job_id in body.job_ids
    ]
    _STORED_MISSED_JOBS.insert_all(connection, jobs, "ignore")


def list_missed(
    connection: Connection, since: datetime, until: datetime, cluster: str, limit: int
) -> list[MissedJob]:
    """Return missed jobs of a period, oldest first."""
    rows = connection.execute(
        f"SELECT {_MISSED_JOBS.select_list} FROM missed "  # noqa: S608 -- our own names
        "WHERE cluster = ? AND at >= ? AND at < ? ORDER BY at, job_id LIMIT ?",
        (cluster, to_micros(since), to_micros(until), limit),
    )
    return _MISSED_JOBS.decode_all(rows)


def count_missed(connection: Connection, cluster: str) -> int:
    """Count the jobs of a cluster that capture missed and jobs.db still remembers."""
    (count,) = connection.execute(
        "SELECT count(*) FROM missed WHERE cluster = ?", (cluster,)
    ).fetchone()
    return int(count)


def list_gaps(
    connection: Connection, since: datetime | None, until: datetime | None, cluster: str
) -> list[NodeLoss]:
    """Return the gaps that nodes reported in a period, oldest first."""
    rows = connection.execute(
        f"SELECT {_LOSSES.select_list} FROM gap "  # noqa: S608 -- our own names
        "WHERE (:cluster = '' OR cluster = :cluster) AND at >= :since AND at < :until "
        "ORDER BY at, cluster, node",
        {
            "cluster": cluster,
            "since": -(2**62) if since is None else to_micros(since),
            "until": 2**62 if until is None else to_micros(until),
        },
    )
    return _LOSSES.decode_all(rows)
