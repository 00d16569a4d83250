"""Index template of the search sinks: mapping and settings of every monthly index.

:func:`build_template` builds it, with the document's mapping. :func:`check_product` verifies the
kind of server, :func:`put_template` installs the template, :func:`fetch_max_request` reads the
request limit. ``destination`` calls them before the first document and after every failure: a
server that came back may have lost its data, and an index made without the template would get a
field for every variable's name.

The template uses only analyzers and types that both products have built in for years: no license,
no plugin. A script is indexed three times, since no single way to split code into words serves
every question:

- ``script``: words as Unicode has them (``standard``): numbers, ``a_b``, ``file.nc``.
- ``script.words``: text between blanks, as written: ``--mem=4G``, whole paths.
- ``script.letters``: runs of letters: the parts of paths, options and names.

Each cuts words at 255 letters, so that no line of a script exceeds Lucene's limit for a term
(32,766 bytes), which would get it rejected. Fields outside the mapping are stored and not indexed
(``dynamic: false``): a million variable names make no new field.
"""

import hashlib
import logging
from datetime import datetime
from typing import Any, Final, get_args

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.core.records import JobRecord
from steward.extensions.search_servers.client import HTTP_MISSING, SearchClient, decode_reply
from steward.extensions.search_servers.settings import SearchSinkSettings

TEMPLATE_VERSION: Final = 2
"""Version of the template; raised with each change."""

MAX_KEYWORD_LENGTH: Final = 8191
"""Longest indexed keyword, in letters; a longer one is only stored. At 4 bytes each it fits a term.
"""

MAX_RAW_LENGTH: Final = 1024
"""Longest script, in letters, that can be searched for as a whole; that doubles its space."""

_PRIORITY: Final = 500
"""Priority of the shortest template."""
_SHARDS: Final = 1
"""Primary shards of an index: a month of scripts is below the 10 GB at which one gets slow."""

_REFRESH: Final = "30s"
"""Delay until a document can be found. Each refresh makes a segment, which is merged later."""

_KEYWORD: Final = {"type": "keyword", "ignore_above": MAX_KEYWORD_LENGTH}
_SEARCH_ONLY_KEYWORD: Final = {**_KEYWORD, "doc_values": False}
"""Keyword that can be searched for, without doc_values."""
_LONG: Final = {"type": "long"}
_TIME: Final = {"type": "date"}
_BOOLEAN: Final = {"type": "boolean"}
_BINARY: Final = {"type": "binary", "doc_values": False}

_RECORD_FIELDS: Final = {
    field.name: {str: _SEARCH_ONLY_KEYWORD, int: _LONG, datetime: _TIME, bool: _BOOLEAN}[
        (get_args(field.type) or (field.type,))[0]
    ]
    for field in msgspec.structs.fields(JobRecord)
}
_KEYWORD_FIELDS: Final = (
    *("cluster", "key", "script_sha256"),
    *("name", "user", "group", "account", "partition", "qos", "state", "reason"),
    *("reservation", "submit_host", "nodelist"),
)
"""Fields that can be searched for and aggregated."""
_SEARCH_ONLY_FIELDS: Final = (
    *("id", "environment_sha256", "redacted", "flags"),
    *("claimed_name", "claimed_dir", "claimed_host"),
)
"""Fields with a different value for nearly each job, as most texts of a record: searchable, but
without a column (doc_values)."""
_LONG_FIELDS: Final = (
    "version",
    "spool_mtime_ns",
    "spool_job_id",
    "script_bytes",
    "environment_bytes",
)


def build_mapping(settings: SearchSinkSettings, *, is_elasticsearch: bool) -> dict[str, Any]:
    """Build the mapping of a document, as ``documents`` writes it."""
    fields: dict[str, Any] = {**_RECORD_FIELDS, "verified": _BOOLEAN}
    fields |= dict.fromkeys(_KEYWORD_FIELDS, _KEYWORD)
    fields |= dict.fromkeys(_SEARCH_ONLY_FIELDS, _SEARCH_ONLY_KEYWORD)
    fields |= dict.fromkeys(_LONG_FIELDS, _LONG)
    fields |= dict.fromkeys(("spooled", "first_submit"), _TIME)
    fields["script"] = {
        "type": "text",
        "analyzer": "standard",
        "fields": {
            # For exact matches only; equal scripts are found by script_sha256 at less cost.
            "raw": {"type": "keyword", "ignore_above": MAX_RAW_LENGTH, "doc_values": False},
            "words": {
                "type": "text",
                "analyzer": "whitespace",
                "norms": False,
                "index_options": "docs",
            },
            "letters": {
                "type": "text",
                "analyzer": "simple",
                "norms": False,
                "index_options": "docs",
            },
        },
    }
    fields["script_base64"] = _BINARY
    fields["environment_gzip"] = _BINARY
    if settings.environments:
        fields["environment"] = (
            {"type": "flattened", "ignore_above": MAX_KEYWORD_LENGTH, "doc_values": False}
            if is_elasticsearch
            else {"type": "flat_object"}
        )
    return {"dynamic": False, "properties": fields}


def build_template(settings: SearchSinkSettings, *, is_elasticsearch: bool) -> dict[str, Any]:
    """Build the composable index template, named like the sink's ``index``."""
    body: dict[str, Any] = {
        "index_patterns": [f"{settings.index}-*"],
        # Where two sinks' index names start alike, the longer one's template wins.
        "priority": _PRIORITY + len(settings.index),
        "template": {
            "settings": {
                "index": {
                    "number_of_shards": _SHARDS,
                    # A copy of each shard if the server has a second node.
                    "auto_expand_replicas": "0-1",
                    "codec": "best_compression",
                    "refresh_interval": _REFRESH,
                }
            },
            "mappings": build_mapping(settings, is_elasticsearch=is_elasticsearch),
            "aliases": {settings.index: {}},
        },
    }
    made_from = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
    return {**body, "version": TEMPLATE_VERSION, "_meta": {"by": "steward", "made_from": made_from}}


log = logging.getLogger(__name__)

_TEMPLATE_FIELDS: Final = (
    "index_templates.index_template.version,index_templates.index_template._meta"
)


class _Version(msgspec.Struct, frozen=True):
    number: str = ""
    distribution: str = ""


class _Root(msgspec.Struct, frozen=True):
    version: _Version = _Version()


class _Template(msgspec.Struct, frozen=True):
    version: int | None = None
    meta: dict[str, Any] | None = msgspec.field(default=None, name="_meta")


class _NamedTemplate(msgspec.Struct, frozen=True):
    index_template: _Template = _Template()


class _Templates(msgspec.Struct, frozen=True):
    index_templates: tuple[_NamedTemplate, ...] = ()


class _Http(msgspec.Struct, frozen=True):
    max_content_length_in_bytes: int = 0


class _Node(msgspec.Struct, frozen=True):
    http: _Http = _Http()


class _Nodes(msgspec.Struct, frozen=True):
    nodes: dict[str, _Node] = {}


def check_product(client: SearchClient) -> str:
    """Check that the server is the product of the settings; return its version.

    Raises:
        ArchiveUnavailable: It is another product, or does not answer.
    """
    root = decode_reply(client, client.request("GET", "/"), _Root)
    is_opensearch = root.version.distribution == "opensearch"
    if is_opensearch == client.is_elasticsearch:
        other_product = "opensearch" if is_opensearch else "elasticsearch"
        raise ArchiveUnavailable(
            f'{client.where} is not {client.product}: set kind = "{other_product}"', client.where
        )
    return str(root.version.number)


def put_template(client: SearchClient) -> bool:
    """Install the index template where it differs; return True if it was installed.

    Raises:
        ArchiveUnavailable: The server is away, or permission is missing.
    """
    settings = client.settings
    path = f"/_index_template/{settings.index}"
    template = build_template(settings, is_elasticsearch=client.is_elasticsearch)
    reply = client.request("GET", f"{path}?filter_path={_TEMPLATE_FIELDS}")
    if reply.status != HTTP_MISSING:
        installed = decode_reply(client, reply, _Templates)
        for entry in installed.index_templates:
            current = entry.index_template
            meta = current.meta or {}
            # Keep a later Steward's template, and one that the site maintains itself.
            if meta.get("by") != "steward" or (current.version or 0) > template["version"]:
                return False
            if current.version == template["version"] and meta == template["_meta"]:
                return False
    decode_reply(client, client.request("PUT", path, msgspec.json.encode(template)), dict[str, Any])
    log.info("installed index template %s on %s", settings.index, client.where)
    return True


def fetch_max_request(client: SearchClient) -> int:
    """Return the smallest http.max_content_length of all nodes, in bytes; 0 where unknown."""
    path = "/_nodes/http?filter_path=nodes.*.http.max_content_length_in_bytes"
    reply = client.request("GET", path)
    if reply.status != 200:
        # This requires a permission of its own; without it, a 413 shows the limit.
        return 0
    nodes = decode_reply(client, reply, _Nodes).nodes.values()
    return min((node.http.max_content_length_in_bytes for node in nodes), default=0)
