"""Helpers of the search server tests: documents as a sink sends them, and a sink's settings."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

import msgspec

from servers.search import SearchServer
from steward.archive.remote.destination import ArchivedDocument
from steward.core.events import IncomingFile, JobIdentity, JobScript, make_script_key
from steward.core.records import JobRecord
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
)

NOON: Final = int(datetime(2026, 3, 5, 12, 0, tzinfo=UTC).timestamp()) * 10**9
DAY: Final = 86400 * 10**9
ENVIRONMENT: Final = b"\x02\0\0\0HOME=/home/ada\0PATH=/usr/bin:/bin\0"

_names: Iterator[int] = count(1)


def sink_on(
    server: SearchServer, **changes: Any
) -> ElasticsearchSinkSettings | OpenSearchSinkSettings:
    """Return a sink on this server, with a unique index name."""
    kind: type[ElasticsearchSinkSettings | OpenSearchSinkSettings] = (
        ElasticsearchSinkSettings
        if server.name.startswith("elasticsearch")
        else OpenSearchSinkSettings
    )
    sink = kind(urls=(server.url,), index=f"test{next(_names)}")
    return msgspec.structs.replace(sink, **changes)


def document(
    job_id: int,
    script: bytes = b"#!/bin/sh\nhostname\n",
    *,
    version: int = 1,
    at: int = NOON,
    uid: int | None = 4001,
    user: str = "ada",
    environment: bytes | None = ENVIRONMENT,
    cluster: str = "alpha",
    **record: Any,
) -> ArchivedDocument:
    """Return the whole document of a job."""
    key = make_script_key(job_id, at)
    digest = hashlib.sha256(script).hexdigest()
    return ArchivedDocument(
        cluster=cluster,
        key=key,
        version=version,
        body=JobScript(
            job_id=job_id,
            spool_mtime_ns=at,
            script=IncomingFile(path="s", length=len(script), sha256=digest),
        ),
        identity=JobIdentity(
            script_key=key,
            job_id=job_id,
            first_submit=datetime.fromtimestamp(at / 1e9, UTC),
            record=JobRecord(
                job_id=job_id,
                uid=uid,
                user=user,
                submit=datetime.fromtimestamp(at / 1e9, UTC),
                **record,
            ),
        ),
        script=script,
        environment=environment,
    )


def correction(of: ArchivedDocument, version: int, **record: Any) -> ArchivedDocument:
    """Return a correction of a job whose bytes are no longer stored."""
    assert of.identity is not None
    changed = msgspec.structs.replace(of.identity.record, **record)
    return msgspec.structs.replace(
        of,
        version=version,
        body=None,
        identity=msgspec.structs.replace(of.identity, record=changed),
        script=None,
        environment=None,
        partial=True,
    )


def deletion(of: ArchivedDocument, version: int) -> ArchivedDocument:
    """Return the document as purged."""
    return ArchivedDocument(cluster=of.cluster, key=of.key, version=version, deleted=True)
