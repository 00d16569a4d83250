"""Remote sink: consumer that sends archived scripts to another machine in versioned documents.

:class:`RemoteSink` serves every destination (Elasticsearch, OpenSearch, Kafka). ``apply`` stores
events in a small database (:mod:`.records`, which lists the states of a script); ``tick`` sends
documents in the order of their events and reports refused ones to the journal as dead letters. A
script waits until its job's identity is known, or for ``identity_wait_s`` seconds. Its bytes stay
where they are: until a document is delivered, ``get_oldest_needed`` makes the journal keep the
event and the bytes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from steward.archive.contents import list_script_refs, make_script_contents
from steward.archive.errors import NotArchived
from steward.archive.files.reader import ContentKind
from steward.archive.remote.destination import ArchivedDocument, Destination, RefusedDocument
from steward.archive.remote.records import (
    AWAITS_IDENTITY,
    DUE,
    MAX_DELETED_ROWS,
    REFUSED,
    SENT,
    RemoteRecords,
    RemoteRecordsWriter,
    RemoteRow,
    RemoteScriptRef,
    decode_identity_body,
    decode_script_body,
    encode_body,
)
from steward.archive.settings import IDENTITY_WAIT_S
from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer, Rejected
from steward.core.databases import SINK
from steward.core.errors import Unavailable
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_IDENTITY,
    JOB_SCRIPT,
    Event,
    JobScript,
    ResentScript,
)
from steward.core.script_stores import IncomingStores
from steward.core.timestamps import to_micros

log = logging.getLogger(__name__)

_TICK_S = 5.0
_DUE_BATCH = 1000
_PURGED_FIELDS: Final[dict[str, Any]] = {
    "body": None,
    "identity": None,
    "deleted": True,
    "has_bytes": False,
}
_KEEP_SENT_S = 14 * 86400.0
"""Time that sent documents are remembered, in seconds. A later correction is sent without the
script, which the server has."""
_EXPIRE_INTERVAL_S: Final = 3600.0
"""Interval of requests to expire documents on the server, in seconds."""
_BATCH_BYTES: Final = 8 << 20
"""Bytes read at once: enough for several requests in flight, and little memory for each sink."""


class RemoteSink(DatabaseConsumer):
    """Consumer ``archive.<name>`` for any remote destination.

    Args:
        settings: The whole configuration.
        name: Name of the sink in the configuration.
        stores: Stores of incoming bytes.
        make_destination: Creates the destination when there is something to send; raises
            Unavailable if that fails for now.
        batch_bytes: Approximate size of scripts and environments read at once, in bytes.
        environments: Whether to send environments.
        identity_wait_s: Longest time a script waits for its job's identity, in seconds.

    Raises:
        SqliteUnavailable: The state directory cannot be used now.
    """

    kinds = frozenset({JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_PURGE, ARCHIVE_RESEND})

    def __init__(
        self,
        settings: Settings,
        name: str,
        stores: IncomingStores,
        make_destination: Callable[[], Destination],
        *,
        batch_bytes: int = _BATCH_BYTES,
        environments: bool = True,
        identity_wait_s: float = IDENTITY_WAIT_S,
    ) -> None:
        self.name = f"archive.{name}"
        self._sink_name = name
        self._settings = settings
        self._sink_settings = settings.archive.sink[name]
        self._records = RemoteRecords(SINK.locate(settings.state_dir, name))
        super().__init__(self._records.database)
        self._contents = make_script_contents(settings, stores)
        self._make_destination = make_destination
        self._destination: Destination | None = None
        self._batch_bytes = batch_bytes
        self._environments = environments
        self._identity_wait_s = identity_wait_s
        self._created_ns = self._records.load_creation_ns()
        self._expire_at = 0.0
        self._reported: list[RemoteRow] = []

    def get_oldest_needed(self) -> int | None:
        """Return the oldest event whose bytes are not sent; None if all are."""
        return self._records.get_oldest_event()

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Store the documents to send; :meth:`tick` sends them."""
        rows = self._records.load_rows(list_script_refs(events))
        changed: dict[RemoteScriptRef, RemoteRow] = {}
        for event in events:
            for row in self._list_changes(event, rows):
                rows[row.ref] = changed[row.ref] = row
        RemoteRecordsWriter(self._connection).save(changed.values())
        return ()

    def _list_changes(
        self, event: Event, rows: dict[RemoteScriptRef, RemoteRow]
    ) -> list[RemoteRow]:
        """Return the rows that an event changes."""
        if event.kind == JOB_SCRIPT:
            return self._apply_script(event, rows)
        if event.kind == JOB_IDENTITY:
            return self._apply_identity(event, rows)
        if event.kind == ARCHIVE_RESEND:
            if event.body.sink != self._sink_name:
                return []
            return [self._apply_resend(event, script, rows) for script in event.body.scripts]
        if event.body.sink not in {"", self._sink_name}:
            return []
        return [
            _apply_change(event, (event.cluster, key), rows, **_PURGED_FIELDS)
            for key in event.body.script_keys
        ]

    def _apply_script(
        self, event: Event, rows: dict[RemoteScriptRef, RemoteRow]
    ) -> list[RemoteRow]:
        """Return the changed row of a job.script event."""
        ref = (event.cluster, event.key)
        row = rows.get(ref)
        if row is not None and (row.has_bytes or row.deleted):
            # A replay of a script that was delivered, and perhaps corrected or purged since.
            return []
        body = encode_body(event.body)
        if row is not None and row.identity is not None:
            return [_apply_change(event, ref, rows, body=body)]
        return [_apply_change(event, ref, rows, body=body, state=self._choose_state(event.cluster))]

    def _choose_state(self, cluster: str) -> int:
        """Return whether a new script of a cluster waits for its identity or is due."""
        cluster_settings = self._settings.cluster.get(cluster)
        must_wait = cluster_settings is None or cluster_settings.slurm
        return AWAITS_IDENTITY if must_wait else DUE

    def _apply_identity(
        self, event: Event, rows: dict[RemoteScriptRef, RemoteRow]
    ) -> list[RemoteRow]:
        """Return the changed row of a job.identity event."""
        ref = (event.cluster, event.body.script_key)
        row = rows.get(ref)
        if row is None and ArchivedDocument(cluster="", key=ref[1], version=0).spool_mtime_ns < (
            self._created_ns
        ):
            # Archived before this sink existed: only 'resend' would bring it here.
            return []
        if row is not None and row.deleted:
            return []
        return [_apply_change(event, ref, rows, identity=encode_body(event.body))]

    def _apply_resend(
        self, event: Event, script: ResentScript, rows: dict[RemoteScriptRef, RemoteRow]
    ) -> RemoteRow:
        """Return the changed row of a script in an archive.resend event."""
        return _apply_change(
            event,
            (event.cluster, script.script_key),
            rows,
            body=encode_body(script.script),
            identity=None if script.identity is None else encode_body(script.identity),
            deleted=False,
            has_bytes=False,
        )

    def tick(self, append: Append) -> float:
        """Send one batch of due documents; return seconds until the next call.

        Raises:
            Unavailable: The server, the bytes or the state directory are unavailable.
            Rejected: The server rejects these documents permanently.
        """
        self._mark_reported()
        super().tick(append)
        self._expire_if_due()
        wait_s = self.end_waits(self._identity_wait_s)
        rows = self._limit_batch(self._records.select_due(_DUE_BATCH))
        if rows:
            self._send(rows)
            self._report_refused()
            return 0.0
        self._report_refused()
        return min(wait_s, _TICK_S)

    def end_waits(self, wait_s: float = 0.0) -> float:
        """Mark scripts that have waited this long for an identity to be sent without one.

        Returns:
            Seconds until the next script has waited that long.

        Raises:
            SqliteUnavailable: The state directory cannot be written now.
        """
        oldest_ns = self._records.get_oldest_wait_ns()
        if oldest_ns is None:
            return _TICK_S
        before_ns = time.time_ns() - int(wait_s * 1e9)
        if oldest_ns > before_ns:
            return (oldest_ns - before_ns) / 1e9
        with self._records.writing() as writer:
            writer.end_waits(before_ns)
        return 0.0

    def _limit_batch(self, rows: Sequence[RemoteRow]) -> list[RemoteRow]:
        """Return as many of the first rows as may be read into memory at once."""
        size = 0
        for number, row in enumerate(rows):
            size += _count_row_bytes(row, environments=self._environments)
            if number and size > self._batch_bytes:
                return list(rows[:number])
        return list(rows)

    def _send(self, rows: Sequence[RemoteRow]) -> None:
        """Send documents; store which were sent and which were refused."""
        documents: list[ArchivedDocument] = []
        unreadable: list[RefusedDocument] = []
        for row in rows:
            document = self._make_document(row)
            if self._is_expired(document):
                continue
            try:
                documents.append(self._add_contents(document))
            except NotArchived as error:
                unreadable.append(RefusedDocument(document=document, why=str(error)))
        refusals = [*unreadable, *(self._open_destination().send(documents) if documents else ())]
        reasons = {
            (refusal.document.cluster, refusal.document.key): refusal.why for refusal in refusals
        }
        with self._records.writing() as writer:
            writer.mark_sent([row for row in rows if row.ref not in reasons])
            writer.save(
                msgspec.structs.replace(row, state=REFUSED, error=reasons[row.ref])
                for row in rows
                if row.ref in reasons
            )

    def _is_expired(self, document: ArchivedDocument) -> bool:
        """Return whether retention is over: a document expired on the server must not come back."""
        days = self._sink_settings.retention_days
        oldest_ns = time.time_ns() - int(days * 86400e9)
        return bool(days) and document.spool_mtime_ns < oldest_ns and not document.deleted

    def _make_document(self, row: RemoteRow) -> ArchivedDocument:
        return ArchivedDocument(
            cluster=row.cluster,
            key=row.key,
            version=row.version,
            body=None if row.body is None else decode_script_body(row.body),
            identity=None if row.identity is None else decode_identity_body(row.identity),
            partial=row.body is None and not row.deleted,
            deleted=row.deleted,
            corrects=row.has_bytes,
        )

    def _add_contents(self, document: ArchivedDocument) -> ArchivedDocument:
        """Return the document with its bytes, or a partial one if the server has them."""
        body = document.body
        if body is None:
            return document
        try:
            return msgspec.structs.replace(
                document,
                script=self._read(document, body, "script"),
                environment=self._read(document, body, "environment"),
            )
        except NotArchived:
            if not document.corrects or document.identity is None:
                raise
            return msgspec.structs.replace(document, partial=True)

    def _read(self, document: ArchivedDocument, body: JobScript, kind: ContentKind) -> bytes | None:
        if kind == "environment" and not self._environments:
            return None
        return self._contents.read(document.cluster, document.key, body, kind)

    def _open_destination(self) -> Destination:
        if self._destination is None:
            self._destination = self._make_destination()
        return self._destination

    def _report_refused(self) -> None:
        """Report refused documents to the journal as dead letters.

        Raises:
            Rejected: There are refused documents. At the next call the journal has them.
        """
        self._reported = self._records.select_refused()
        if self._reported:
            first, *more = (Rejected(row.error, _make_refused_event(row)) for row in self._reported)
            raise Rejected(str(first), first.event, more)

    def _mark_reported(self) -> None:
        if self._reported:
            with self._records.writing() as writer:
                writer.mark_reported(self._reported)
            self._reported = []

    def _purge(self) -> bool:
        """Delete old records of sent documents."""
        before_ns = time.time_ns() - int(_KEEP_SENT_S * 1e9)
        with self._records.writing() as writer:
            return writer.delete_old(before_ns) >= MAX_DELETED_ROWS

    def _expire_if_due(self) -> None:
        """Expire documents on the server once an hour, independent of the records here."""
        now = time.monotonic()
        if not self._sink_settings.retention_days or now < self._expire_at:
            return
        self._expire_at = now + _EXPIRE_INTERVAL_S
        cutoff = datetime.now(UTC) - timedelta(days=self._sink_settings.retention_days)
        try:
            self._open_destination().expire(cutoff)
        except Unavailable as error:
            # Archiving must not wait for expiry; if sending fails, too, that is reported.
            log.warning("%s: cannot expire old documents, retrying later: %s", self.name, error)

    def close(self) -> None:
        """Close the connection and the database."""
        if self._destination is not None:
            self._destination.close()
            self._destination = None
        self._contents.close()
        super().close()


def _apply_change(
    event: Event,
    ref: RemoteScriptRef,
    rows: dict[RemoteScriptRef, RemoteRow],
    *,
    state: int = DUE,
    **changes: Any,
) -> RemoteRow:
    """Return the row with the changes of an event: a higher version, due for sending."""
    row = rows.get(ref)
    if row is None:
        row = RemoteRow(*ref, state=SENT, version=0, event=0, since_ns=0)
    # Grows even if this database was lost, and stays equal if the event is repeated.
    seen_us = to_micros(event.seen_at)
    return msgspec.structs.replace(
        row,
        state=state,
        version=max(row.version + 1, seen_us),
        event=min(row.event or event.id, event.id),
        since_ns=time.time_ns(),
        error="",
        **changes,
    )


def _count_row_bytes(row: RemoteRow, *, environments: bool) -> int:
    """Return the size of a document's files."""
    if row.body is None:
        return 0
    body = decode_script_body(row.body)
    size = body.script.length if body.script else 0
    return size + (body.environment.length if environments and body.environment else 0)


def _make_refused_event(row: RemoteRow) -> Event:
    """Make an event of a refused row, with the fields that a dead letter needs."""
    now = datetime.now(UTC)
    return Event(
        kind=JOB_SCRIPT,
        cluster=row.cluster,
        key=row.key,
        at=now,
        seen_at=now,
        source="archive",
        body=None,
        id=row.event,
    )
