"""What the journal lets go of: events that every consumer has passed, with their kept bytes."""

import logging

from steward.core.errors import Unavailable
from steward.core.events import JobScript, utc_now
from steward.core.incoming import StoreError, Stores
from steward.core.journal.reading import refill_command
from steward.core.journal.store import Journal

log = logging.getLogger(__name__)

_BATCH = 1000
_REMEMBER_S = 90 * 86400
"""How long the key of a removed event is known, in seconds."""
SINK = "archive."
"""What the names of sinks begin with."""
CATALOGUE = "catalogue"


def remove_old(journal: Journal, stores: Stores, *, keep_s: float) -> bool:
    """Remove one batch of passed events and one of keys that nothing repeats any more.

    Args:
        journal: The journal.
        stores: Where kept bytes lie.
        keep_s: How long an event stays that every consumer has passed, in seconds.

    Returns:
        Whether there may be more to remove now.

    Raises:
        Unavailable: The journal cannot be written now.
    """
    is_full = trim(journal, stores, keep_s=keep_s) == _BATCH
    return journal.forget_remembered(int(utc_now().timestamp()) - _REMEMBER_S) or is_full


def trim(journal: Journal, stores: Stores, *, keep_s: float, dead: bool = False) -> int:
    """Remove one batch of events older than ``keep_s`` seconds that every consumer has passed.

    A script that was set aside stays, with its bytes, until it was replayed or purged;
    with ``dead`` it goes like all others.

    Bytes go first: an event whose bytes are gone harms nobody who has passed it,
    bytes without an event would be taken for a crash's leavings.

    Returns:
        How many events were removed.

    Raises:
        Unavailable: The journal cannot be written now.
    """
    now = utc_now().timestamp()
    # What claims to be seen later than now came from a clock that was ahead, here or on
    # another host: how old it is nobody can tell, and it must not stay for years.
    old = [
        event
        for event in journal.trimmable(_BATCH, dead=dead)
        if not now - keep_s < event.seen_at.timestamp() <= now
    ]
    if not old:
        return 0
    for event in old:
        if isinstance(event.body, JobScript):
            _unlink(stores, event.body)
    journal.trim(old)
    return len(old)


def _unlink(stores: Stores, body: JobScript) -> None:
    kept = [k.path for k in (body.script, body.environment) if k]
    try:
        stores.get(body.store).unlink(kept)
    except Unavailable as error:
        # The next start removes bytes whose event is known and gone; others must not wait.
        log.warning("the bytes of job %d are left for now: %s", body.job_id, error)
    except StoreError as error:
        # Its sink was taken out of the configuration. Nothing can be removed there any more,
        # and the journal must go on for all others.
        log.warning("the bytes of job %d are left where they are: %s", body.job_id, error)


def bound(journal: Journal, stores: Stores, *, max_bytes: int) -> bool:
    """Hold journal and kept bytes below ``max_bytes``, one step a call.

    First goes what is only kept for a while, and what was set aside, where a sink of
    files has it. Then a consumer that is behind is
    detached, if what it misses can be had again: the catalogue is made anew from
    the archive, and a sink is refilled from one of files that is ahead of it. What
    no such sink has is never let go of: then the log says what stands in the way.

    Returns:
        Whether there may be more to do: call again soon.

    Raises:
        Unavailable: The journal cannot be written now.
    """
    size = journal.size_bytes() + sum(store.kept_bytes() for store in stores)
    if size <= max_bytes:
        return False
    # Only of sinks of files bytes can be had again, and each of them has a store.
    files = frozenset(store.name for store in stores)
    is_filed = any(name in files for name in journal.attached())
    if trim(journal, stores, keep_s=0.0, dead=is_filed):
        return True
    behind = journal.attached_behind()
    for name, position in behind:
        if _can_be_had_again(name, position, journal.attached(), files):
            log.error(
                "the journal holds %d bytes, more than max_bytes: consumer %s is detached; "
                "mend what stops it (steward journal status), then '%s' makes up for what it "
                "missed",
                size,
                name,
                refill_command(name),
            )
            journal.detach(name)
            return True
    if behind:
        log.error(
            "the journal holds %d bytes, more than max_bytes, and consumer %s needs them: "
            "mend what stops it (steward journal status), or give the disk room",
            size,
            behind[0][0],
        )
    return False


def _can_be_had_again(
    name: str, position: int, attached: dict[str, int], files: frozenset[str]
) -> bool:
    if name == CATALOGUE:
        return True
    return name.startswith(SINK) and any(
        other != name and other in files and at > position for other, at in attached.items()
    )
