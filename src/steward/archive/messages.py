"""What a Kafka topic holds of a job: one JSON message a script, documented and versioned.

The schema's name ends with its version. Within one version fields are only
added, with defaults; who reads passes over fields that it does not know. A topic
may hold anything, so what is read from it is checked to the last field.
"""

import base64
import hashlib
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from steward.core.errors import StewardError
from steward.core.events import JobIdentity, JobScript, script_key
from steward.core.records import JobRecord
from steward.slurm.environment import entries_of

SCHEMA: Final = "steward.job/1"
LARGEST_BYTES: Final = 64 * 1024**2
"""No message beyond this is read."""

_MOST_JOB_ID: Final = 2**32 - 1
_MOST: Final = 2**53 - 1
"""The largest number that every reader of JSON holds exactly."""
_MOST_TEXT: Final = 128 * 1024
"""Bytes of a text in a job's record: Linux's MAX_ARG_STRLEN, beyond which no single argument or
variable, and so no option of sbatch, can be. A submit line of many such is cut when it is sent."""
_MOST_ITEMS: Final = 1000
_MOST_CLAIM: Final = 4096
_FIRST_YEAR, _LAST_YEAR = 1970, 2262
_CONTROLS: Final = bytes(range(32))


class MessageError(StewardError):
    """Bytes that are no message of ours."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts of a message have in common: keyword-only, immutable."""


class Content(Part, frozen=True, kw_only=True):
    """Bytes, exactly, in a form that JSON can hold.

    Attributes:
        encoding: ``utf-8``: ``text`` is the bytes decoded so; ``base64``: ``text`` is their
            base64, for they are not valid UTF-8, or shorter so.
        text: The bytes in that encoding.
    """

    text: str
    encoding: Literal["utf-8", "base64"] = "utf-8"

    @classmethod
    def of(cls, data: bytes) -> "Content":
        """The content that stands for these bytes."""
        try:
            return cls(text=data.decode())
        except UnicodeDecodeError:
            return cls(text=base64.b64encode(data).decode("ascii"), encoding="base64")

    @classmethod
    def shortest(cls, data: bytes) -> "Content":
        """As :meth:`of`, but never longer than base64: JSON writes a control character as six."""
        controls = len(data) - len(data.translate(None, _CONTROLS))
        if 5 * controls > len(data) // 3:
            return cls(text=base64.b64encode(data).decode("ascii"), encoding="base64")
        return cls.of(data)

    @property
    def data(self) -> bytes:
        """The bytes."""
        return base64.b64decode(self.text) if self.encoding == "base64" else self.text.encode()


class MessageFile(Part, frozen=True, kw_only=True):
    """A script or an environment.

    Attributes:
        length: Size in bytes.
        sha256: Hex digest of the bytes.
        content: The bytes; null where only what they were is told.
    """

    length: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_BYTES)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
    content: Content | None = None


class Whose(Part, frozen=True, kw_only=True):
    """What Slurm said of the job.

    Attributes:
        first_submit: First submit time: with cluster and job id, the job's identity.
        record: The latest that is known of the job, see ``steward.core.records.JobRecord``.
        why: What the news was: ``bound``, ``renamed`` (the uid has a name now), ``ended``
            or ``updated``.
    """

    first_submit: datetime
    record: JobRecord
    why: Annotated[str, msgspec.Meta(max_length=64)] = "bound"


class Claims(Part, frozen=True, kw_only=True):
    """What the environment claims of the job: hints, never an identity.

    Attributes:
        name: Job name.
        directory: Submit directory.
        host: Submit host.
    """

    name: Annotated[str, msgspec.Meta(max_length=_MOST_CLAIM)] = ""
    directory: Annotated[str, msgspec.Meta(max_length=_MOST_CLAIM)] = ""
    host: Annotated[str, msgspec.Meta(max_length=_MOST_CLAIM)] = ""


class Message(Part, frozen=True, kw_only=True):
    """One archived script as it stands at this version.

    Attributes:
        schema: Name and version of this schema.
        id: What tells it from every other: ``CLUSTER/JOBID:TIME``, TIME as in ``key``.
        version: Of two messages with the same id the one with the higher version counts.
            Steward's are the time of the news in it, in microseconds since the epoch.
        cluster: The cluster's name.
        job_id: The id in the scheduler's spool: an array's or a het job's leader.
        key: ``script:JOBID:TIME``, TIME the script's time in the spool, ns since the epoch.
        spooled: That time, to the microsecond.
        verified: Whether Slurm has said whose it is: whether there is an ``identity``.
        identity: Whose it is; null while Slurm has not said.
        script: The script, byte for byte; null where there is none.
        environment: The environment in Slurm's spool format (a count of four bytes, then
            entries that end with NUL), without secrets; null where there is none.
        redacted: Names of the variables whose values were taken out.
        flags: What was odd about the spool entry.
        claims: What the environment claims of the job.
        partial: Only ``identity`` is news: the bytes came with a lower version.
        deleted: It was purged: nothing of it may stay.
    """

    schema: Literal["steward.job/1"]
    id: str
    version: Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
    cluster: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(?!\n)$")]
    job_id: Annotated[int, msgspec.Meta(ge=1, le=_MOST_JOB_ID)]
    key: str
    spooled: datetime
    verified: bool
    identity: Whose | None = None
    script: MessageFile | None = None
    environment: MessageFile | None = None
    redacted: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST_ITEMS)] = ()
    flags: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST_ITEMS)] = ()
    claims: Claims = Claims()
    partial: bool = False
    deleted: bool = False

    @property
    def spool_mtime_ns(self) -> int:
        """The script's time in the spool, ns since the epoch."""
        return int(self.key.rpartition(":")[2])


class Parts(Protocol):
    """What a message is made of: ``steward.archive.remote.destination.Document`` is one."""

    @property
    def id(self) -> str:
        """As the message has it."""

    @property
    def cluster(self) -> str:
        """The cluster's name."""

    @property
    def key(self) -> str:
        """Key of the job.script event."""

    @property
    def job_id(self) -> int:
        """The id in the spool entry's name."""

    @property
    def spool_mtime_ns(self) -> int:
        """The script's time in the spool, ns since the epoch."""

    @property
    def version(self) -> int:
        """Grows with every change."""

    @property
    def body(self) -> JobScript | None:
        """What the event said; None where that is not known any more."""

    @property
    def identity(self) -> JobIdentity | None:
        """Whose it is, as last said."""

    @property
    def script(self) -> bytes | None:
        """The script's bytes."""

    @property
    def environment(self) -> bytes | None:
        """The environment's bytes, redacted."""

    @property
    def partial(self) -> bool:
        """Whether the bytes are not at hand any more."""

    @property
    def deleted(self) -> bool:
        """Whether it was purged."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


def encode(parts: Parts) -> bytes:
    """The message (JSON) that tells a script as it stands; of a purged one only that it is."""
    message = Message(
        schema=SCHEMA,
        id=parts.id,
        version=parts.version,
        cluster=parts.cluster,
        job_id=parts.job_id,
        key=parts.key,
        spooled=_spooled(parts),
        verified=parts.identity is not None and not parts.deleted,
        partial=parts.partial and not parts.deleted,
        deleted=parts.deleted,
    )
    if not parts.deleted:
        message = _with_contents(message, parts)
    return _encoder.encode(message)


def _with_contents(message: Message, parts: Parts) -> Message:
    body, identity = parts.body, parts.identity
    whose = None
    if identity is not None:
        record = _cut(identity.record)
        whose = Whose(first_submit=identity.first_submit, record=record, why=identity.why)
    kept = (body.script, body.environment) if body else (None, None)
    script, environment = (
        MessageFile(
            length=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            content=Content.shortest(data),
        )
        if data is not None
        else MessageFile(length=known.length, sha256=known.sha256)
        if known is not None
        else None
        for data, known in zip((parts.script, parts.environment), kept, strict=True)
    )
    message = msgspec.structs.replace(
        message, identity=whose, script=script, environment=environment
    )
    if body is None:
        return message
    return msgspec.structs.replace(
        message,
        redacted=body.redacted,
        flags=body.flags,
        claims=Claims(
            name=body.claimed_name[:_MOST_CLAIM],
            directory=body.claimed_dir[:_MOST_CLAIM],
            host=body.claimed_host[:_MOST_CLAIM],
        ),
    )


def _cut(record: JobRecord) -> JobRecord:
    """The record with no text that is longer than a message may have."""
    cut = {
        field: text.encode()[:_MOST_TEXT].decode(errors="ignore")
        for field in JobRecord.__struct_fields__
        if isinstance(text := getattr(record, field), str) and _is_long(text)
    }
    return msgspec.structs.replace(record, **cut) if cut else record


def _is_long(text: str) -> bool:
    # No character of UTF-8 has more than four bytes.
    return len(text) > _MOST_TEXT // 4 and len(text.encode()) > _MOST_TEXT


def _spooled(parts: Parts) -> datetime:
    seconds, nanoseconds = divmod(parts.spool_mtime_ns, 10**9)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanoseconds // 1000)


def decode(data: bytes) -> Message:
    """The message that these bytes are, if it holds together.

    Raises:
        MessageError: They are none, or it contradicts itself; the error says where.
    """
    if len(data) > LARGEST_BYTES:
        raise MessageError(f"it has {len(data)} bytes, more than {LARGEST_BYTES}")
    try:
        message = _decoder.decode(data)
        _check(message)
    except MessageError:
        raise
    except msgspec.ValidationError as error:
        # It names the field, and may repeat some of what a stranger wrote there.
        raise MessageError(f"it is no {SCHEMA}: {str(error)[:200]}") from error
    except (ValueError, RecursionError) as error:
        # No JSON, no UTF-8, no base64, or nested without end.
        raise MessageError(f"it is no {SCHEMA}: {type(error).__name__}") from error
    return message


def _check(message: Message) -> None:
    """Refuse what the types let pass."""
    mtime = message.key.rpartition(":")[2]
    _must(mtime.isascii() and mtime.isdigit() and len(mtime) <= 19, "key")
    mtime_ns = int(mtime)
    _must(mtime_ns < 2**63 and message.key == script_key(message.job_id, mtime_ns), "key")
    _must(message.id == f"{message.cluster}/{message.job_id}:{mtime_ns}", "id")
    _time(message.spooled, "spooled")
    _must(message.verified == (message.identity is not None), "verified")
    for name in ("script", "environment"):
        file: MessageFile | None = getattr(message, name)
        if file is not None and file.content is not None:
            _file(file, file.content, name)
    for text in (*message.redacted, *message.flags):
        _must(len(text) <= _MOST_ITEMS, "redacted or flags")
    if message.identity is not None:
        _time(message.identity.first_submit, "identity.first_submit")
        _record(message.identity.record, message.job_id)


def _file(file: MessageFile, content: Content, name: str) -> None:
    if content.encoding == "base64":
        data = base64.b64decode(content.text, validate=True)
    else:
        data = content.text.encode()
    _must(len(data) == file.length, f"{name}.length")
    _must(hashlib.sha256(data).hexdigest() == file.sha256, f"{name}.sha256")


def _record(record: JobRecord, job_id: int) -> None:
    _must(record.job_id == job_id, "identity.record.job_id")
    for field in JobRecord.__struct_fields__:
        value: Any = getattr(record, field)
        where = f"identity.record.{field}"
        if isinstance(value, datetime):
            _time(value, where)
        elif isinstance(value, str):
            _must(not _is_long(value), where)
        elif value is not None:
            # A time limit is in seconds, Slurm's own number in minutes.
            most = _MOST if field == "time_limit_s" else _MOST_JOB_ID
            _must(0 <= value <= most, where)


def _time(moment: datetime, where: str) -> None:
    _must(moment.tzinfo is not None, where)
    # 2262 is as far as nanoseconds in 63 bits reach.
    _must(_FIRST_YEAR <= moment.year <= _LAST_YEAR, where)
    _must(moment >= datetime(_FIRST_YEAR, 1, 1, tzinfo=UTC), where)


def _must(holds: bool, where: str) -> None:
    if not holds:
        raise MessageError(f"it is no {SCHEMA}: '{where}' does not hold", where)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a message."""
    schema = msgspec.json.schema(Message)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **schema}


class SArchiveMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What SArchive sends to Kafka: ``JobMessage`` in its src/archive/kafka.rs.

    Attributes:
        id: The job's id.
        timestamp: RFC 3339, UTC; here the script's time in the spool, so that a message that
            is sent twice is the same.
        cluster: The cluster's name.
        script: The script; what is not UTF-8 is U+FFFD.
        environment: Values by name, likewise; null where there is none.
    """

    id: str
    timestamp: datetime
    cluster: str
    script: str
    environment: dict[str, str] | None = None


def encode_sarchive(parts: Parts) -> bytes | None:
    """The message as SArchive sends it; None where there is no script to be told.

    It is text alone, so it is not exact, and it cannot say whose a job is, nor that it
    was purged.
    """
    if parts.script is None or parts.partial or parts.deleted:
        return None
    environment = None
    if parts.environment is not None:
        environment = {
            _text(name): _text(value or b"") for name, value in entries_of(parts.environment)
        }
    return _encoder.encode(
        SArchiveMessage(
            id=str(parts.job_id),
            timestamp=_spooled(parts),
            cluster=parts.cluster,
            script=_text(parts.script),
            environment=environment,
        )
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
