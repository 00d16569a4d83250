"""Reading documents by their ids, as they stand: not as of the last refresh."""

from collections.abc import Sequence

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.document import Document
from steward.extensions.search_servers.client import SearchClient
from steward.extensions.search_servers.replies import Cause, read

Named = tuple[Document, str]
"""A document and the name of its index."""


class Doc(msgspec.Struct, frozen=True):
    """What a server has of a document."""

    id: str = msgspec.field(default="", name="_id")
    found: bool = False
    version: int = msgspec.field(default=0, name="_version")
    source: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"{}"), name="_source")
    error: Cause | None = None

    @property
    def is_shut(self) -> bool:
        """Whether a person keeps its index from being read."""
        return self.error is not None and self.error.is_shut


class _Docs(msgspec.Struct, frozen=True):
    docs: tuple[Doc, ...] = ()


def documents(client: SearchClient, wanted: Sequence[Named], how: str) -> list[Doc]:
    """What the server has of these documents, in their order.

    Args:
        client: The server.
        wanted: Which.
        how: Which parts of the source, as a query's parameter.

    Raises:
        ArchiveUnavailable: The server is away, or cannot say of one of them now.
    """
    asked = {"docs": [{"_index": name, "_id": document.id} for document, name in wanted]}
    parts = "docs._id,docs.found,docs._version,docs._source,docs.error.type,docs.error.reason"
    target = f"/_mget?{how}&filter_path={parts}"
    reply = client.request("POST", target, msgspec.json.encode(asked))
    by_id = {doc.id: doc for doc in read(client, reply, _Docs).docs}
    found = [by_id.get(document.id, Doc()) for document, _ in wanted]
    for doc in found:
        if doc.error is not None and not doc.is_shut and doc.error.type != _NO_INDEX:
            raise ArchiveUnavailable(
                f"{client.where} cannot read a document now ({doc.error})", client.where
            )
    return found


def versions(client: SearchClient, wanted: Sequence[Named]) -> list[int | None]:
    """The versions that the server has of these documents; None for what is not there.

    Raises:
        ArchiveUnavailable: The server is away.
    """
    found = documents(client, wanted, "_source=false")
    return [doc.version if doc.found else None for doc in found]


_NO_INDEX = "index_not_found_exception"
