"""Search documents: JSON from which script and environment can be restored byte for byte.

:func:`build_source` builds a document, :func:`apply_correction` applies a later identity,
:func:`extract_script` and :func:`extract_environment` restore the bytes. :func:`fetch_documents`
and :func:`fetch_versions` fetch stored documents by id, in their present state: unlike a search,
not as of the last refresh.

A UTF-8 script is stored as text in ``script``. Of any other, ``script`` has U+FFFD in place of
undecodable bytes, and ``script_base64`` holds the bytes. ``environment`` is for searching, within
limits that keep a server from rejecting it; the full redacted environment is ``environment_gzip``.
"""

import base64
import gzip
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import ArchivedDocument
from steward.core.events import JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.extensions.search_servers.client import SearchClient, ServerError, decode_reply
from steward.slurm.environment import split_entries

MAX_NAME_BYTES: Final = 255
"""Longest name of a searchable variable, in bytes."""
MAX_VALUE_BYTES: Final = 4096
"""Searchable part of a variable's value, in bytes."""
MAX_VARIABLES: Final = 5000
"""Most searchable variables of a document."""
_MAX_ENVIRONMENT_BYTES: Final = 1 << 20
"""Most bytes of searchable variables of a document."""
_GZIP_LEVEL: Final = 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

IDENTITY_FIELDS: Final = (
    *JobRecord.__struct_fields__,
    *("first_submit", "verified", "version"),
)
"""Fields that a later correction replaces."""

DocumentSource = dict[str, Any]
"""Fields of a document."""

_encoder = msgspec.json.Encoder()


def document_month(document: ArchivedDocument) -> str:
    """Return the month, in UTC, of the script's time in the spool: ``2026.11``.

    Raises:
        OverflowError: No calendar has such a month.
    """
    seconds = document.spool_mtime_ns // 10**9
    return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y.%m").rjust(7, "0")


def is_past_month(document: ArchivedDocument) -> bool:
    """Return True if the document's month is over, so its index gets no new documents."""
    return document_month(document) < datetime.now(UTC).strftime("%Y.%m")


def build_source(document: ArchivedDocument) -> DocumentSource:
    """Build a document's fields, for :func:`encode_source`; unknown fields are left out."""
    source: DocumentSource = {
        "id": document.id,
        "cluster": document.cluster,
        "key": document.key,
        "spooled": _EPOCH + timedelta(microseconds=document.spool_mtime_ns // 1000),
        "spool_mtime_ns": document.spool_mtime_ns,
        "spool_job_id": document.job_id,
    }
    if document.body is not None:
        source |= _script_event_fields(document.body)
    if document.script is not None:
        source |= _script_fields(document.script)
    if document.environment is not None:
        source |= _environment_fields(document.environment)
    return source | build_identity_fields(document)


def build_identity_fields(document: ArchivedDocument) -> DocumentSource:
    """Build the fields known of the job, and their version."""
    identity = document.identity
    if identity is None:
        return {"version": document.version, "verified": False, "job_id": document.job_id}
    return {
        **_record_fields(identity),
        "first_submit": identity.first_submit,
        "verified": identity.record.uid is not None,
        "version": document.version,
    }


def apply_correction(stored: bytes, document: ArchivedDocument) -> bytes:
    """Replace the identity in a stored document by a later one.

    Raises:
        msgspec.DecodeError: The stored document is no JSON object.
    """
    source = msgspec.json.decode(stored, type=dict[str, msgspec.Raw])
    for name in IDENTITY_FIELDS:
        source.pop(name, None)
    return encode_source({**source, **build_identity_fields(document)})


def encode_source(source: Mapping[str, Any]) -> bytes:
    """Encode a document as JSON; lone surrogates, which UTF-8 cannot hold, become escapes."""
    try:
        return _encoder.encode(source)
    except UnicodeEncodeError:
        return _encoder.encode(_escape_surrogates(source))


def extract_script(source: Mapping[str, Any]) -> bytes | None:
    """Extract the exact script from a decoded document; None where it holds none.

    Raises:
        ValueError: Its base64 is invalid.
    """
    if "script_base64" in source:
        return base64.b64decode(source["script_base64"], validate=True)
    text = source.get("script")
    return text.encode() if isinstance(text, str) else None


def extract_environment(source: Mapping[str, Any]) -> bytes | None:
    """Extract the exact environment from a decoded document; None where it holds none.

    Raises:
        ValueError: Its base64 is invalid.
        OSError: Its gzip data is invalid.
    """
    packed = source.get("environment_gzip")
    if not isinstance(packed, str):
        return None
    return gzip.decompress(base64.b64decode(packed, validate=True))


def _script_event_fields(body: JobScript) -> DocumentSource:
    """Build the fields from a script event: sums, lengths, claims, flags."""
    fields: DocumentSource = {}
    if body.script is not None:
        fields["script_sha256"] = body.script.sha256
        fields["script_bytes"] = body.script.length
    if body.environment is not None:
        fields["environment_sha256"] = body.environment.sha256
        fields["environment_bytes"] = body.environment.length
    for name in ("claimed_name", "claimed_dir", "claimed_host", "redacted", "flags"):
        if getattr(body, name):
            fields[name] = getattr(body, name)
    return fields


def _script_fields(data: bytes) -> DocumentSource:
    """Build the fields of a script."""
    checksum_fields = {"script_bytes": len(data), "script_sha256": hashlib.sha256(data).hexdigest()}
    try:
        return {"script": data.decode(), **checksum_fields}
    except UnicodeDecodeError:
        return {"script": data.decode("utf-8", "replace"), "script_base64": data, **checksum_fields}


def _environment_fields(data: bytes) -> DocumentSource:
    """Build the fields of an environment."""
    return {
        "environment": dict(_searchable_variables(data)),
        "environment_gzip": gzip.compress(data, _GZIP_LEVEL, mtime=0),
        "environment_bytes": len(data),
        "environment_sha256": hashlib.sha256(data).hexdigest(),
    }


def _searchable_variables(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield variables to search for: usual names only, long values cut."""
    size = 0
    for count, (name, value) in enumerate(split_entries(data)):
        if count == MAX_VARIABLES:
            return
        if value is None or not _is_usual(name):
            continue
        text = value[:MAX_VALUE_BYTES].decode("utf-8", "ignore" if _is_cut(value) else "replace")
        size += len(name) + len(text)
        if size > _MAX_ENVIRONMENT_BYTES:
            return
        yield name.decode("ascii"), text


_NAME_CHARACTERS: Final = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_%()-"
)


def _is_usual(name: bytes) -> bool:
    """Return True for a name that a shell would export: servers interpret dots and blanks."""
    return 0 < len(name) <= MAX_NAME_BYTES and _NAME_CHARACTERS.issuperset(name)


def _is_cut(value: bytes) -> bool:
    return len(value) > MAX_VALUE_BYTES


def _record_fields(identity: JobIdentity) -> DocumentSource:
    """Build the fields of a job record; unknown ones are left out."""
    record: DocumentSource = {
        name: value
        for name, value in msgspec.structs.asdict(identity.record).items()
        if value is not None and value != ""
    }
    # Slurm writes zero for "no array" and "no het job".
    for name in ("array_job_id", "het_job_id", "het_offset"):
        if not record[name]:
            del record[name]
    return record


def _escape_surrogates(value: Any) -> Any:
    """Replace lone surrogates by escapes in all texts of a value."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_escape_surrogates(name): _escape_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_surrogates(item) for item in value]
    return value


IndexedDocument = tuple[ArchivedDocument, str]
"""Document, and the name of its index."""


class StoredDocument(msgspec.Struct, frozen=True):
    """Document as the server has it."""

    id: str = msgspec.field(default="", name="_id")
    found: bool = False
    version: int = msgspec.field(default=0, name="_version")
    source: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"{}"), name="_source")
    error: ServerError | None = None

    @property
    def is_shut(self) -> bool:
        """Whether a person has closed its index or blocked reading."""
        return self.error is not None and self.error.is_shut


class _StoredDocuments(msgspec.Struct, frozen=True):
    docs: tuple[StoredDocument, ...] = ()


def fetch_documents(
    client: SearchClient, documents: Sequence[IndexedDocument], source_filter: str
) -> list[StoredDocument]:
    """Fetch documents from the server, in their order.

    Args:
        client: The server.
        documents: Documents to fetch, with the names of their indices.
        source_filter: Query parameter that selects parts of the source.

    Raises:
        ArchiveUnavailable: The server is away, or cannot read one of them now.
    """
    query = {"docs": [{"_index": index, "_id": document.id} for document, index in documents]}
    parts = "docs._id,docs.found,docs._version,docs._source,docs.error.type,docs.error.reason"
    target = f"/_mget?{source_filter}&filter_path={parts}"
    reply = client.request("POST", target, msgspec.json.encode(query))
    by_id = {stored.id: stored for stored in decode_reply(client, reply, _StoredDocuments).docs}
    stored_documents = [by_id.get(document.id, StoredDocument()) for document, _ in documents]
    for stored in stored_documents:
        if stored.error is not None and not stored.is_shut and stored.error.type != _NO_INDEX:
            raise ArchiveUnavailable(
                f"{client.where} cannot read a document now ({stored.error})", client.where
            )
    return stored_documents


def fetch_versions(client: SearchClient, documents: Sequence[IndexedDocument]) -> list[int | None]:
    """Fetch the stored versions of documents; None for one that is missing.

    Raises:
        ArchiveUnavailable: The server is away.
    """
    stored_documents = fetch_documents(client, documents, "_source=false")
    return [stored.version if stored.found else None for stored in stored_documents]


_NO_INDEX = "index_not_found_exception"
