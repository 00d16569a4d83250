"""Kafka message format: one JSON message per archived script, schema ``steward.job/1``.

:func:`encode_script_message` writes a :class:`ScriptMessage`, :func:`decode_script_message` reads
and checks one, and :func:`make_json_schema` returns its JSON Schema. :func:`encode_sarchive` writes
SArchive's older format.

The schema's name ends with its version. Within a version, fields are only added, with defaults;
readers ignore unknown fields. A topic may hold anything, so :func:`decode_script_message` checks
every field.
"""

import base64
import hashlib
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from steward.archive.contents import EncodedContent, MessagePart
from steward.core.errors import StewardError
from steward.core.events import JobIdentity, JobScript, make_script_key
from steward.core.records import JobRecord
from steward.slurm.environment import split_entries

SCHEMA: Final = "steward.job/1"
MAX_SCRIPT_MESSAGE_BYTES: Final = 64 * 1024**2
"""Size limit of a message that is read, in bytes."""

_MAX_JOB_ID: Final = 2**32 - 1
_MAX_INTEGER: Final = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""
_MAX_TEXT_BYTES: Final = 128 * 1024
"""Size limit of a text in a job record, in bytes: Linux's MAX_ARG_STRLEN, the limit of one argument
or variable and so of an option of sbatch. A longer submit line is cut when it is sent."""
_MAX_ITEMS: Final = 1000
_MAX_CLAIM: Final = 4096
_FIRST_YEAR, _LAST_YEAR = 1970, 2262


class MessageError(StewardError):
    """Error: bytes are not a valid message."""


class MessageFile(MessagePart, frozen=True, kw_only=True):
    """Script or environment in a message.

    Attributes:
        length: Size in bytes.
        sha256: Hex digest of the bytes.
        content: The bytes; null if only size and checksum are sent.
    """

    length: Annotated[int, msgspec.Meta(ge=0, le=MAX_SCRIPT_MESSAGE_BYTES)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
    content: EncodedContent | None = None


class MessageIdentity(MessagePart, frozen=True, kw_only=True):
    """Identity of the job according to Slurm.

    Attributes:
        first_submit: First submit time; with cluster and job id, the job's identity.
        record: Latest job record, see ``steward.core.records.JobRecord``.
        why: Reason of the change: ``bound``, ``renamed`` (the uid has a name now), ``ended`` or
            ``updated``.
    """

    first_submit: datetime
    record: JobRecord
    why: Annotated[str, msgspec.Meta(max_length=64)] = "bound"


class MessageClaims(MessagePart, frozen=True, kw_only=True):
    """Claims of the environment about the job: hints, never an identity.

    Attributes:
        name: Job name.
        directory: Submit directory.
        host: Submit host.
    """

    name: Annotated[str, msgspec.Meta(max_length=_MAX_CLAIM)] = ""
    directory: Annotated[str, msgspec.Meta(max_length=_MAX_CLAIM)] = ""
    host: Annotated[str, msgspec.Meta(max_length=_MAX_CLAIM)] = ""


class ScriptMessage(MessagePart, frozen=True, kw_only=True):
    """One archived script in one version.

    Attributes:
        schema: Name and version of this schema.
        id: Unique id: ``CLUSTER/JOBID:TIME``, TIME as in ``key``.
        version: Of two messages with the same id, the higher version is valid. Steward uses the
            time of the change, in microseconds since the epoch.
        cluster: The cluster's name.
        job_id: Id in the scheduler's spool: that of an array or of a het job's leader.
        key: ``script:JOBID:TIME``, TIME the script's time in the spool, ns since the epoch.
        spooled: That time, to the microsecond.
        verified: Whether Slurm confirmed the owner, so that there is an ``identity``.
        identity: Identity of the job; null until Slurm confirms it.
        script: The script, byte for byte; null if there is none.
        environment: The environment in Slurm's spool format (a count of four bytes, then entries
            that end with NUL), redacted; null if there is none.
        redacted: Names of redacted variables.
        flags: Anomalies of the spool entry.
        claims: Claims of the environment about the job.
        partial: Only ``identity`` changed: a lower version has the bytes.
        deleted: The script was erased: readers must delete all of it.
    """

    schema: Literal["steward.job/1"]
    id: str
    version: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INTEGER)]
    cluster: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(?!\n)$")]
    job_id: Annotated[int, msgspec.Meta(ge=1, le=_MAX_JOB_ID)]
    key: str
    spooled: datetime
    verified: bool
    identity: MessageIdentity | None = None
    script: MessageFile | None = None
    environment: MessageFile | None = None
    redacted: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MAX_ITEMS)] = ()
    flags: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MAX_ITEMS)] = ()
    claims: MessageClaims = MessageClaims()
    partial: bool = False
    deleted: bool = False

    @property
    def spool_mtime_ns(self) -> int:
        """Return the script's time in the spool, ns since the epoch."""
        return int(self.key.rpartition(":")[2])


class MessageSource(Protocol):
    """Input of a message, as ``archive.remote.destination.ArchivedDocument`` provides it."""

    @property
    def id(self) -> str:
        """Return the id of the message."""

    @property
    def cluster(self) -> str:
        """Return the cluster's name."""

    @property
    def key(self) -> str:
        """Return the key of the job.script event."""

    @property
    def job_id(self) -> int:
        """Return the id in the spool entry's name."""

    @property
    def spool_mtime_ns(self) -> int:
        """Return the script's time in the spool, ns since the epoch."""

    @property
    def version(self) -> int:
        """Return the version, which grows with every change."""

    @property
    def body(self) -> JobScript | None:
        """Return the body of the job.script event; None if it is no longer known."""

    @property
    def identity(self) -> JobIdentity | None:
        """Return the latest identity."""

    @property
    def script(self) -> bytes | None:
        """Return the script's bytes."""

    @property
    def environment(self) -> bytes | None:
        """Return the redacted environment's bytes."""

    @property
    def partial(self) -> bool:
        """Return whether the bytes are no longer available."""

    @property
    def deleted(self) -> bool:
        """Return whether the script was erased."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ScriptMessage)


def encode_script_message(source: MessageSource) -> bytes:
    """Encode a script's message as JSON; of an erased script only the deletion."""
    message = ScriptMessage(
        schema=SCHEMA,
        id=source.id,
        version=source.version,
        cluster=source.cluster,
        job_id=source.job_id,
        key=source.key,
        spooled=_get_spool_time(source),
        verified=source.identity is not None and not source.deleted,
        partial=source.partial and not source.deleted,
        deleted=source.deleted,
    )
    if not source.deleted:
        message = _add_contents(message, source)
    return _encoder.encode(message)


def _add_contents(message: ScriptMessage, source: MessageSource) -> ScriptMessage:
    """Add identity, script, environment and claims to a message."""
    body, identity = source.body, source.identity
    message_identity = None
    if identity is not None:
        record = _cut_texts(identity.record)
        message_identity = MessageIdentity(
            first_submit=identity.first_submit, record=record, why=identity.why
        )
    files = (body.script, body.environment) if body else (None, None)
    script, environment = (
        MessageFile(
            length=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            content=EncodedContent.from_bytes_shortest(data),
        )
        if data is not None
        else MessageFile(length=file.length, sha256=file.sha256)
        if file is not None
        else None
        for data, file in zip((source.script, source.environment), files, strict=True)
    )
    message = msgspec.structs.replace(
        message, identity=message_identity, script=script, environment=environment
    )
    if body is None:
        return message
    return msgspec.structs.replace(
        message,
        redacted=body.redacted,
        flags=body.flags,
        claims=MessageClaims(
            name=body.claimed_name[:_MAX_CLAIM],
            directory=body.claimed_dir[:_MAX_CLAIM],
            host=body.claimed_host[:_MAX_CLAIM],
        ),
    )


def _cut_texts(record: JobRecord) -> JobRecord:
    """Cut the texts of a record to the size limit of messages."""
    shortened = {
        field: text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore")
        for field in JobRecord.__struct_fields__
        if isinstance(text := getattr(record, field), str) and _is_long(text)
    }
    return msgspec.structs.replace(record, **shortened) if shortened else record


def _is_long(text: str) -> bool:
    """Return whether a text exceeds the size limit."""
    # A character has at most four bytes in UTF-8.
    return len(text) > _MAX_TEXT_BYTES // 4 and len(text.encode()) > _MAX_TEXT_BYTES


def _get_spool_time(source: MessageSource) -> datetime:
    seconds, nanoseconds = divmod(source.spool_mtime_ns, 10**9)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanoseconds // 1000)


def decode_script_message(data: bytes) -> ScriptMessage:
    """Decode and check a message.

    Raises:
        MessageError: The bytes are invalid or contradictory; the error names the field.
    """
    if len(data) > MAX_SCRIPT_MESSAGE_BYTES:
        raise MessageError(
            f"message of {len(data)} bytes is too large: the maximum is {MAX_SCRIPT_MESSAGE_BYTES}"
        )
    try:
        message = _decoder.decode(data)
        _check_message(message)
    except MessageError:
        raise
    except msgspec.ValidationError as error:
        # The error names the field and may repeat untrusted text: limit its length.
        raise MessageError(f"not a valid {SCHEMA}: {str(error)[:200]}") from error
    except (ValueError, RecursionError) as error:
        # Not JSON, not UTF-8, not base64, or nested too deeply.
        raise MessageError(f"not a valid {SCHEMA}: {type(error).__name__}") from error
    return message


def _check_message(message: ScriptMessage) -> None:
    """Raise MessageError for contradictions that the types do not exclude."""
    mtime = message.key.rpartition(":")[2]
    _require(mtime.isascii() and mtime.isdigit() and len(mtime) <= 19, "key")
    mtime_ns = int(mtime)
    _require(mtime_ns < 2**63 and message.key == make_script_key(message.job_id, mtime_ns), "key")
    _require(message.id == f"{message.cluster}/{message.job_id}:{mtime_ns}", "id")
    _check_time(message.spooled, "spooled")
    _require(message.verified == (message.identity is not None), "verified")
    for name in ("script", "environment"):
        file: MessageFile | None = getattr(message, name)
        if file is not None and file.content is not None:
            _check_file(file, file.content, name)
    for text in (*message.redacted, *message.flags):
        _require(len(text) <= _MAX_ITEMS, "redacted or flags")
    if message.identity is not None:
        _check_time(message.identity.first_submit, "identity.first_submit")
        _check_record(message.identity.record, message.job_id)


def _check_file(file: MessageFile, content: EncodedContent, name: str) -> None:
    """Check length and checksum of a file's content."""
    if content.encoding == "base64":
        data = base64.b64decode(content.text, validate=True)
    else:
        data = content.text.encode()
    _require(len(data) == file.length, f"{name}.length")
    _require(hashlib.sha256(data).hexdigest() == file.sha256, f"{name}.sha256")


def _check_record(record: JobRecord, job_id: int) -> None:
    """Check a job record: job id, times, texts and numbers within their limits."""
    _require(record.job_id == job_id, "identity.record.job_id")
    for field in JobRecord.__struct_fields__:
        value: Any = getattr(record, field)
        field_path = f"identity.record.{field}"
        if isinstance(value, datetime):
            _check_time(value, field_path)
        elif isinstance(value, str):
            _require(not _is_long(value), field_path)
        elif value is not None:
            # A time limit is in seconds; Slurm's own number is in minutes.
            maximum = _MAX_INTEGER if field == "time_limit_s" else _MAX_JOB_ID
            _require(0 <= value <= maximum, field_path)


def _check_time(moment: datetime, field: str) -> None:
    _require(moment.tzinfo is not None, field)
    # Nanoseconds in 63 bits reach to 2262.
    _require(_FIRST_YEAR <= moment.year <= _LAST_YEAR, field)
    _require(moment >= datetime(_FIRST_YEAR, 1, 1, tzinfo=UTC), field)


def _require(condition: bool, field: str) -> None:
    """Raise MessageError for a field unless the condition holds."""
    if not condition:
        raise MessageError(f"not a valid {SCHEMA}: invalid field '{field}'", field)


def make_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a message."""
    schema = msgspec.json.schema(ScriptMessage)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **schema}


class SArchiveMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message as SArchive sends it: ``JobMessage`` in its src/archive/kafka.rs.

    Attributes:
        id: The job's id.
        timestamp: RFC 3339, UTC; here the script's time in the spool, so that a repeated message is
            identical.
        cluster: The cluster's name.
        script: The script; bytes that are not UTF-8 become U+FFFD.
        environment: Values by name, likewise; null if there is none.
    """

    id: str
    timestamp: datetime
    cluster: str
    script: str
    environment: dict[str, str] | None = None


def encode_sarchive(source: MessageSource) -> bytes | None:
    """Encode a script's message in SArchive's format; None if there is no script to send.

    The format is text only, so it loses bytes that are not UTF-8, and it cannot express the owner
    or a purge.
    """
    if source.script is None or source.partial or source.deleted:
        return None
    environment = None
    if source.environment is not None:
        environment = {
            _decode_text(name): _decode_text(value or b"")
            for name, value in split_entries(source.environment)
        }
    return _encoder.encode(
        SArchiveMessage(
            id=str(source.job_id),
            timestamp=_get_spool_time(source),
            cluster=source.cluster,
            script=_decode_text(source.script),
            environment=environment,
        )
    )


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
