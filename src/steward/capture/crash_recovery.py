"""Crash recovery of captured scripts: emits events for stored files that no event names.

A process that is killed between writing a script to a store and appending its event leaves such a
file. Its spool entry may be gone by the next start, so the file's own name carries cluster, job id
and modification time. ``recover_lost_scripts`` runs at the start of capture; it also deletes files
whose event was trimmed, and incomplete files older than a day.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable

from steward.core.events import Event, IncomingFile, JobScript, make_script_event
from steward.core.redaction import REDACTED
from steward.core.script_stores import IncomingName, IncomingStore, StoreUnavailable
from steward.slurm.environment import COUNT_BYTES, limit_names, read_claims, split_entries

log = logging.getLogger(__name__)

_STALE_S = 86400.0
"""Age after which an incomplete file is deleted, in seconds."""


def recover_lost_scripts(
    store: IncomingStore,
    cluster: str,
    is_captured: Callable[[int, int], bool],
    is_needed: Callable[[int, int], bool],
    is_ours: Callable[[int], bool],
) -> list[Event]:
    """Return events for complete scripts in a store that the journal has never recorded.

    Args:
        store: Store to search.
        cluster: Cluster whose scripts are wanted.
        is_captured: Returns whether the script of a job id with this mtime (ns) was ever in the
            journal.
        is_needed: Returns whether the journal still has its event, and so needs its bytes.
        is_ours: Returns whether a job id belongs to the calling process; another process may be
            writing its file just now.

    Raises:
        StoreUnavailable: The store cannot be read now.
    """
    names_by_script: dict[tuple[int, int], dict[str, IncomingName]] = {}
    for name in store.iterate_names():
        if name.cluster == cluster and is_ours(name.job_id):
            names_by_script.setdefault((name.job_id, name.spool_mtime_ns), {})[name.what] = name
    events = []
    for (job_id, mtime_ns), names in names_by_script.items():
        if is_captured(job_id, mtime_ns):
            if not is_needed(job_id, mtime_ns):
                # Its event was trimmed, and the crash came before its bytes were deleted.
                store.unlink(name.filename for name in names.values())
            continue
        event = _recover_event(store, cluster, job_id, mtime_ns, names)
        if event is not None:
            events.append(event)
    if events:
        log.info("recovered %d scripts without an event in %s", len(events), store.directory)
    return events


def _recover_event(
    store: IncomingStore, cluster: str, job_id: int, mtime_ns: int, names: dict[str, IncomingName]
) -> Event | None:
    """Build the job.script event of stored files; None if the script is missing or incomplete."""
    script = _verify_stored(store, names.get("script"))
    if script is None:
        # Incomplete: either the spool still has the script, or it is lost.
        _drop_stale(store, names)
        return None
    environment = _verify_stored(store, names.get("env"))
    redacted: tuple[str, ...] = ()
    claims: dict[str, str] = {}
    if environment is not None:
        data = store.read(environment)
        claims = read_claims(data[COUNT_BYTES:])
        redacted = limit_names(
            name.decode("utf-8", "backslashreplace")
            for name, value in split_entries(data)
            if value == REDACTED
        )
    return make_script_event(
        cluster,
        "recovered",
        JobScript(
            job_id=job_id,
            spool_mtime_ns=mtime_ns,
            script=script,
            environment=environment,
            store=store.name,
            claimed_name=claims.get("name", ""),
            claimed_dir=claims.get("directory", ""),
            claimed_host=claims.get("host", ""),
            redacted=redacted,
        ),
    )


def _verify_stored(store: IncomingStore, name: IncomingName | None) -> IncomingFile | None:
    """Read a stored file and return its digest; None if it is incomplete."""
    if name is None:
        return None
    stored = IncomingFile(path=name.filename, length=name.length, sha256="")
    data = store.read(stored)
    if len(data) != name.length:
        return None
    return IncomingFile(
        path=name.filename, length=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def _drop_stale(store: IncomingStore, names: dict[str, IncomingName]) -> None:
    """Delete files that are incomplete and old."""
    for name in names.values():
        path = os.path.join(store.directory, name.filename)
        try:
            age_s = time.time() - os.stat(path).st_mtime
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreUnavailable(f"cannot read {path}: {error.strerror}", path) from error
        if age_s > _STALE_S:
            store.unlink([name.filename])
