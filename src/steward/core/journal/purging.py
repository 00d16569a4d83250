"""What a purge does to dead letters: none may hold, or bring back, a script that was purged.

Consumers forget a script in the order of events, but a dead letter stands beside
that order and may be tried again at any time. It is dropped when it is to be tried
again, or when the purge itself is trimmed, whichever comes first.
"""

from collections.abc import Iterable

import msgspec

from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_IDENTITY,
    JOB_SCRIPT,
    ArchivePurge,
    ArchiveResend,
    Event,
    JobIdentity,
    JobScript,
    encode,
)
from steward.core.journal.reading import event_of
from steward.core.sqlite import Connection


def drop_purged(connection: Connection, purges: Iterable[Event]) -> None:
    """Drop the dead letters about scripts that were purged after they came.

    Args:
        connection: The journal, inside a transaction.
        purges: Events; those that are no orders to purge are passed over.
    """
    for purge in purges:
        if isinstance(purge.body, ArchivePurge):
            _drop(connection, purge, purge.body)


def purges_after_the_dead(connection: Connection) -> list[Event]:
    """The orders to purge that came after the oldest dead letter and are still here."""
    rows = connection.execute(
        "SELECT id, kind, cluster, key, data FROM event "
        "WHERE id > (SELECT min(id) FROM dead) AND kind = ?",
        (ARCHIVE_PURGE,),
    )
    return [event_of(row) for row in rows]


def _drop(connection: Connection, purge: Event, body: ArchivePurge) -> None:
    purged = frozenset(body.script_keys)
    consumer = f"archive.{body.sink}" if body.sink else ""
    rows = connection.execute(
        "SELECT consumer, id, kind, cluster, key, data FROM dead "
        "WHERE id < ?1 AND cluster = ?2 AND (?3 = '' OR consumer = ?3) AND kind IN (?4, ?5, ?6)",
        (purge.id, purge.cluster, consumer, JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_RESEND),
    ).fetchall()
    for name, *row in rows:
        letter = event_of(tuple(row))
        left = _without(letter, purged)
        if left is None:
            connection.execute("DELETE FROM dead WHERE consumer = ? AND id = ?", (name, letter.id))
        elif left is not letter:
            connection.execute(
                "UPDATE dead SET data = ? WHERE consumer = ? AND id = ?",
                (encode(left), name, letter.id),
            )


def _without(letter: Event, purged: frozenset[str]) -> Event | None:
    """What is left of a dead letter; None for nothing."""
    body = letter.body
    if isinstance(body, JobScript):
        return None if letter.key in purged else letter
    if isinstance(body, JobIdentity):
        return None if body.script_key in purged else letter
    if not isinstance(body, ArchiveResend):
        return letter
    scripts = tuple(one for one in body.scripts if one.script_key not in purged)
    if len(scripts) == len(body.scripts):
        return letter
    if not scripts:
        return None
    return msgspec.structs.replace(letter, body=msgspec.structs.replace(body, scripts=scripts))
