"""Corrections of documents whose bytes are not at hand any more: the server has them.

Neither product's update takes a version from outside, and both would count it
on by one, past which an older repeat could come. So a document is read, its
identity replaced, and it is written in its new version, which is sound because
a sink is the one writer of its documents.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.document import Document, Refusal
from steward.extensions.search_servers.bulk import Operation, index, shut
from steward.extensions.search_servers.client import SearchClient
from steward.extensions.search_servers.encoding import corrected, is_past
from steward.extensions.search_servers.reading import Doc, documents

_AT_ONCE: Final = 500
_SIZES: Final = "version,script_bytes,environment_bytes"


class _Size(msgspec.Struct, frozen=True):
    version: int = 0
    script_bytes: int = 0
    environment_bytes: int = 0


def corrections(
    client: SearchClient, wanted: Sequence[tuple[Document, str]], most_bytes: int
) -> Iterator[Operation | Refusal]:
    """How to correct documents.

    Args:
        client: The server.
        wanted: Documents, no two with the same id, each with the name of its index.
        most_bytes: How much to have in memory at once, in bytes.

    Raises:
        ArchiveUnavailable: The server is away.
    """
    for first in range(0, len(wanted), _AT_ONCE):
        some = wanted[first : first + _AT_ONCE]
        found = documents(client, some, f"_source_includes={_SIZES}")
        here: list[tuple[Document, str, int]] = []
        for (document, name), doc in zip(some, found, strict=True):
            if not doc.found:
                yield _unread(client, document, doc)
                continue
            size = msgspec.json.decode(doc.source, type=_Size)
            if size.version <= document.version:
                here.append((document, name, 3 * size.script_bytes + 3 * size.environment_bytes))
        yield from _corrected(client, here, most_bytes)


def _corrected(
    client: SearchClient, here: Sequence[tuple[Document, str, int]], most_bytes: int
) -> Iterator[Operation | Refusal]:
    some: list[tuple[Document, str]] = []
    size = 0
    for document, name, bytes_ in here:
        if some and size + bytes_ > most_bytes:
            yield from _read(client, some)
            some, size = [], 0
        some.append((document, name))
        size += bytes_
    if some:
        yield from _read(client, some)


def _read(
    client: SearchClient, some: Sequence[tuple[Document, str]]
) -> Iterator[Operation | Refusal]:
    found = documents(client, some, "_source=true")
    for (document, name), doc in zip(some, found, strict=True):
        if not doc.found:
            yield _unread(client, document, doc)
        else:
            yield index(document, name, corrected(bytes(doc.source), document))


def _unread(client: SearchClient, document: Document, doc: Doc) -> Refusal:
    if not doc.is_shut:
        return _missing(document)
    if is_past(document):
        return shut(client, document, str(doc.error))
    raise ArchiveUnavailable(
        f"{client.where} has the present month's index closed ({doc.error}): nothing can be "
        "corrected there until it is opened",
        client.where,
    )


def _missing(document: Document) -> Refusal:
    return Refusal(
        document=document,
        why=(
            "the server does not have what is to be corrected: "
            "'steward archive resend' sends it whole"
        ),
    )
