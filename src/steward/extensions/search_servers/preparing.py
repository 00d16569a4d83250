"""What is done before the first document is sent, and again after every failure.

A server that came back may have lost its data: the first index made without
our template would have a field for every variable's name.
"""

import logging
from typing import Any, Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.extensions.search_servers.client import SearchClient
from steward.extensions.search_servers.mapping import template
from steward.extensions.search_servers.replies import MISSING, read

log = logging.getLogger(__name__)

_FIELDS: Final = "index_templates.index_template.version,index_templates.index_template._meta"


class _Version(msgspec.Struct, frozen=True):
    number: str = ""
    distribution: str = ""


class _Root(msgspec.Struct, frozen=True):
    version: _Version = _Version()


class _Template(msgspec.Struct, frozen=True):
    version: int | None = None
    meta: dict[str, Any] | None = msgspec.field(default=None, name="_meta")


class _Named(msgspec.Struct, frozen=True):
    index_template: _Template = _Template()


class _Templates(msgspec.Struct, frozen=True):
    index_templates: tuple[_Named, ...] = ()


class _Http(msgspec.Struct, frozen=True):
    max_content_length_in_bytes: int = 0


class _Node(msgspec.Struct, frozen=True):
    http: _Http = _Http()


class _Nodes(msgspec.Struct, frozen=True):
    nodes: dict[str, _Node] = {}


def check_product(client: SearchClient) -> str:
    """Look whether it is the server that the settings say; its version.

    Raises:
        ArchiveUnavailable: It is another, or does not answer.
    """
    root = read(client, client.request("GET", "/"), _Root)
    is_opensearch = root.version.distribution == "opensearch"
    if is_opensearch == client.is_elasticsearch:
        other = "opensearch" if is_opensearch else "elasticsearch"
        raise ArchiveUnavailable(
            f'{client.where} is not {client.product}: set kind = "{other}"', client.where
        )
    return str(root.version.number)


def put_template(client: SearchClient) -> bool:
    """Put the index template, unless the server has it; whether it was put.

    Raises:
        ArchiveUnavailable: The server is away, or does not let us.
    """
    settings = client.settings
    path = f"/_index_template/{settings.index}"
    ours = template(settings, is_elasticsearch=client.is_elasticsearch)
    reply = client.request("GET", f"{path}?filter_path={_FIELDS}")
    if reply.status != MISSING:
        found = read(client, reply, _Templates)
        for one in found.index_templates:
            theirs = one.index_template
            meta = theirs.meta or {}
            # A later Steward's is left alone, and so is one that the site made its own.
            if meta.get("by") != "steward" or (theirs.version or 0) > ours["version"]:
                return False
            if theirs.version == ours["version"] and meta == ours["_meta"]:
                return False
    read(client, client.request("PUT", path, msgspec.json.encode(ours)), dict[str, Any])
    log.info("index template %s put on %s", settings.index, client.where)
    return True


def longest_request(client: SearchClient) -> int:
    """The least http.max_content_length of all nodes, in bytes; 0 where we are not told."""
    path = "/_nodes/http?filter_path=nodes.*.http.max_content_length_in_bytes"
    reply = client.request("GET", path)
    if reply.status != 200:
        # It wants a right of its own; without it a 413 tells us.
        return 0
    nodes = read(client, reply, _Nodes).nodes.values()
    return min((node.http.max_content_length_in_bytes for node in nodes), default=0)
