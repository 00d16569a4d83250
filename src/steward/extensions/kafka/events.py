"""Conversion of Kafka messages to events, and the list of recently purged scripts.

:class:`MessageConverter` turns each message of a topic into events, as if its job had been captured
here: a script with its stored bytes, job facts, or a purge. ``source.KafkaSource`` calls it. The
same message always gives the same keys. A message comes from another Steward, or from anybody who
may write to the topic: its job record is a report about the past, environment and record are
redacted again by this site's patterns, and its bytes are stored under names made here. Messages may
arrive in any order: a script is stored once, and not if its purge came first.

:class:`RecentPurges` answers which scripts must not be imported: a purge may come out of a topic
before its script. jobs.db remembers a purge for good, but only once it has consumed the event;
until then the journal alone knows it.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Container, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from steward.capture.spool_entries import ENVIRONMENT_TOO_LARGE, MOST_ENVIRONMENT_BYTES
from steward.core.events import (
    ARCHIVE_PURGE,
    JOB_END,
    JOB_SEEN,
    ArchivePurge,
    Event,
    IncomingFile,
    JobFacts,
    JobScript,
    make_script_event,
)
from steward.core.journal import JournalReader
from steward.core.principals import KAFKA
from steward.core.records import JobRecord
from steward.core.redaction import Redactor
from steward.core.script_stores import IncomingStore, make_incoming_filename
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.extensions.kafka.messages import MessageFile, MessageIdentity, ScriptMessage
from steward.jobs import Jobs, database_path
from steward.slurm.environment import read_environment
from steward.slurm.job_states import FINISHED

KAFKA_SOURCE: Final = "kafka"
"""Source of the events made here."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


ScriptRef = tuple[str, str]
"""Identity of a script: its cluster, and the key of its event."""


class MessageConverter:
    """Converter from Kafka messages to events.

    Args:
        redactor: Removes secrets from environments and records, by this site's patterns.
        is_known: Tells whether the journal has, or had, an event with this cluster and key.
        list_purged: Returns the scripts whose purge is in the journal and may not be in jobs.db
            yet; called before each batch.
        with_environments: Whether environments are archived.
    """

    def __init__(
        self,
        redactor: Redactor,
        is_known: Callable[[str, str], bool],
        list_purged: Callable[[], Container[ScriptRef]],
        *,
        with_environments: bool,
    ) -> None:
        self._redactor = redactor
        self._is_known = is_known
        self._list_purged = list_purged
        self._with_environments = with_environments

    def convert_messages(
        self, messages: Sequence[ScriptMessage], store: Callable[[], IncomingStore]
    ) -> list[list[Event]]:
        """Convert messages to events, and write their bytes to the store, not yet durably.

        The same message gives the same events, with the same keys.

        Args:
            messages: A batch of messages, in the order of arrival.
            store: Returns the store that takes the bytes.

        Returns:
            The events of each message.

        Raises:
            StoreUnavailable: The store cannot be written now.
        """
        latest = self._select_latest(messages)
        return [
            [_purge_event(message)]
            if message.deleted
            else [
                *(
                    [self._build_script_event(message, store())]
                    if latest.get(_script_ref(message)) is message
                    else ()
                ),
                *(
                    ()
                    if message.identity is None
                    else self._build_job_events(message, message.identity)
                ),
            ]
            for message in messages
        ]

    def _select_latest(self, messages: Sequence[ScriptMessage]) -> dict[ScriptRef, ScriptMessage]:
        """Map each script that is to be stored to its message with the highest version."""
        purged = self._list_purged()
        batch_purged = {_script_ref(message) for message in messages if message.deleted}
        latest: dict[ScriptRef, ScriptMessage] = {}
        for message in messages:
            ref = _script_ref(message)
            if message.deleted or not _has_bytes(message) or ref in batch_purged or ref in purged:
                continue
            if ref not in latest or message.version > latest[ref].version:
                latest[ref] = message
        # The bytes of a known script may have been removed from the store, and must not come back.
        return {ref: message for ref, message in latest.items() if not self._is_known(*ref)}

    def _build_script_event(self, message: ScriptMessage, store: IncomingStore) -> Event:
        """Write a message's bytes to the store and build its script event."""

        def keep(data: bytes, what: str) -> IncomingFile:
            cluster, mtime_ns = message.cluster, message.spool_mtime_ns
            name = make_incoming_filename(cluster, message.job_id, mtime_ns, len(data), what)
            return store.write(name, data)

        environment, redacted, flags = self._redact_environment(message)
        # Write the environment first: a complete script then proves that both are there.
        stored_environment = None if environment is None else keep(environment, "env")
        script = _file_content(message.script)
        redact = self._redactor.redact_text
        return make_script_event(
            message.cluster,
            KAFKA_SOURCE,
            JobScript(
                job_id=message.job_id,
                spool_mtime_ns=message.spool_mtime_ns,
                script=None if script is None else keep(script, "script"),
                environment=stored_environment,
                store=store.name,
                claimed_name=redact(message.claims.name),
                claimed_dir=redact(message.claims.directory),
                claimed_host=redact(message.claims.host),
                redacted=redacted,
                flags=flags,
            ),
        )

    def _redact_environment(
        self, message: ScriptMessage
    ) -> tuple[bytes | None, tuple[str, ...], tuple[str, ...]]:
        """Return the redacted environment, the names of redacted variables, and the flags."""
        redacted, flags = message.redacted, message.flags
        file = message.environment
        if file is None or not self._with_environments:
            return None, redacted, flags
        if file.length > MOST_ENVIRONMENT_BYTES:
            return None, redacted, _union(flags, ENVIRONMENT_TOO_LARGE)
        data = _file_content(file)
        if data is None:
            return None, redacted, flags
        # Values that the sender redacted stay so: the mark in their place is no secret.
        environment = read_environment(data, self._redactor)
        return (
            environment.data,
            _union(redacted, *environment.redacted),
            _union(flags, *environment.flags),
        )

    def _build_job_events(self, message: ScriptMessage, identity: MessageIdentity) -> list[Event]:
        """Build the events for the job record in a message."""
        record = self._redactor.redact_record(identity.record)
        if record.submit is None:
            record = msgspec.structs.replace(record, submit=identity.first_submit)
        is_over = identity.why == "ended" or record.state in FINISHED
        events = [_job_facts_event(message, JOB_END if is_over else JOB_SEEN, record)]
        if record.restarts:
            # A requeued job's record has the submit time of its last run.
            events.insert(
                0,
                _job_facts_event(
                    message, JOB_SEEN, _first_run_record(record, identity.first_submit)
                ),
            )
        return events


def _job_facts_event(message: ScriptMessage, kind: str, record: JobRecord) -> Event:
    """Build an event from a job record."""
    record_json = msgspec.json.encode(record)
    digest = hashlib.blake2b(record_json, digest_size=12).hexdigest()
    return Event(
        kind=kind,
        cluster=message.cluster,
        key=f"kafka:{message.key}:{message.version}:{digest}",
        # The job certainly had its id by that time.
        at=message.spooled,
        # The version as time: the highest version wins, in whatever order messages arrive.
        seen_at=_EPOCH + timedelta(microseconds=message.version),
        source=KAFKA_SOURCE,
        body=JobFacts(record=record, whole=True),
    )


def _first_run_record(record: JobRecord, first_submit: datetime) -> JobRecord:
    """Derive the record of a job's first run: the fields that are equal in all runs."""
    return msgspec.structs.replace(
        record,
        restarts=0,
        submit=first_submit,
        sluid=record.original_sluid,
        state="",
        reason="",
        eligible=None,
        start=None,
        end=None,
        nodelist="",
        tres_allocated="",
        exit_code=None,
        exit_signal=None,
    )


def _purge_event(message: ScriptMessage) -> Event:
    """Build the event that purges a script."""
    KAFKA.require("archive.erase")
    now = datetime.now(UTC)
    return Event(
        kind=ARCHIVE_PURGE,
        cluster=message.cluster,
        key=f"purge:kafka:{message.key}:{message.version}",
        at=now,
        seen_at=now,
        source=KAFKA_SOURCE,
        body=ArchivePurge(
            script_keys=(message.key,), asked_by=KAFKA.name, reason="erased by the sending Steward"
        ),
    )


def _script_ref(message: ScriptMessage) -> ScriptRef:
    return message.cluster, message.key


def _has_bytes(message: ScriptMessage) -> bool:
    files = (message.script, message.environment)
    return any(file is not None and file.content is not None for file in files)


def _file_content(file: MessageFile | None) -> bytes | None:
    return None if file is None or file.content is None else file.content.data


def _union(values: tuple[str, ...], *additions: str) -> tuple[str, ...]:
    """Join tuples without duplicates."""
    return tuple(dict.fromkeys((*values, *additions)))


log = logging.getLogger(__name__)

_READ_EVENTS: Final = 500
"""Most events read from the journal at once."""
_MAX_REMEMBERED: Final = 100_000
"""Most scripts to remember, about 15 MB; by then jobs.db has long consumed the oldest."""


class RecentPurges:
    """Scripts named by purge events of the journal that jobs.db may not have consumed yet.

    Args:
        state_dir: Directory of jobs.db, which may not exist yet.
        reader: The journal.
    """

    def __init__(self, state_dir: str, reader: JournalReader) -> None:
        self._path = database_path(state_dir)
        self._reader = reader
        self._position: int | None = None
        self._purged: dict[ScriptRef, None] = {}

    def read_purges(self) -> Collection[ScriptRef]:
        """Read new purge events; return the recently purged scripts.

        Raises:
            SqliteUnavailable: The journal cannot be read now.
        """
        if self._position is None:
            self._position = self._read_jobs_cursor()
        upto = -1
        while upto != self._position:
            upto = self._position
            events, self._position = self._reader.read(upto, {ARCHIVE_PURGE}, _READ_EVENTS)
            for event in events:
                if isinstance(event.body, ArchivePurge) and not event.body.sink:
                    for key in event.body.script_keys:
                        self._purged[event.cluster, key] = None
        while len(self._purged) > _MAX_REMEMBERED:
            del self._purged[next(iter(self._purged))]
        return self._purged

    def _read_jobs_cursor(self) -> int:
        """Return the journal position that jobs.db has consumed."""
        try:
            jobs = Jobs(self._path)
        except (SqliteUnavailable, SqliteError) as error:
            # jobs.db does not exist yet or is unavailable: then every purge in the journal counts.
            log.debug("cannot look up the position of jobs.db: %s", error)
            return 0
        try:
            return jobs.cursor()
        except (SqliteUnavailable, SqliteError) as error:
            log.debug("cannot read the position of jobs.db: %s", error)
            return 0
        finally:
            jobs.close()
