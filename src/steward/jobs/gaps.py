"""What nodes have said that they lost, kept in jobs.db for whoever asks what is missing."""

from datetime import datetime

import msgspec

from steward.events import Event
from steward.moments import micros, moment
from steward.sqlite import Connection
from steward.usage import NodeGap


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
