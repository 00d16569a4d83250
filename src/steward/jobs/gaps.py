"""What nodes have said that they lost, and jobs that capture missed, as jobs.db keeps them."""

from datetime import datetime

import msgspec

from steward.core.events import Event, JobsMissed
from steward.core.moments import micros, moment
from steward.core.sqlite import Connection
from steward.core.usage import NodeGap


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
