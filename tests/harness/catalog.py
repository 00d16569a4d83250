"""Catalog Sites: indexed scripts and searches of them."""

import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness import archive
from harness.events import NOVEMBER
from harness.site import Site
from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.catalog.matches import TermMatcher
from steward.archive.catalog.month import ScriptUse
from steward.archive.catalog.search import CatalogSearcher, ScriptHit, UseFilter
from steward.core.config import ArchiveSettings
from steward.core.events import Event
from steward.core.script_stores import STATE_STORE, IncomingStore
from steward.core.timestamps import to_micros


def make_site(directory: Path) -> Site:
    """Make a Site of a cluster ``one`` with a catalog and no sinks."""
    site = Site(directory, clusters=("one",), archive=ArchiveSettings(sink={}))
    site.open(archive.open_catalog)
    return site


def directory_of(site: Site) -> Path:
    return site.state / "catalog"


def catalog_of(site: Site) -> CatalogConsumer:
    return site.consumer(CatalogConsumer)


def searcher_of(site: Site) -> CatalogSearcher:
    searcher: CatalogSearcher = site.context("archive").searcher
    return searcher


def store_of(site: Site) -> IncomingStore:
    return site.stores.get(STATE_STORE)


def script(
    site: Site,
    job_id: int,
    data: bytes,
    at: datetime = NOVEMBER,
    cluster: str = "one",
    name: str = "job",
) -> Event:
    """Write a script's bytes to the store and return its job.script."""
    fields: dict[str, Any] = {"environment": None, "store": STATE_STORE}
    mtime_ns = to_micros(at) * 1000
    return archive.script(
        site, job_id, data, mtime_ns=mtime_ns, cluster=cluster, name=name, **fields
    )


def identity(script: Event, uid: int, user: str, account: str = "physics") -> Event:
    """Return a job.identity that assigns a script to a job of this user and of the claimed name."""
    return archive.identity(script, uid, user, name=script.body.claimed_name, account=account)


def keep(site: Site, job_id: int, text: str | bytes, uid: int = 1001, user: str = "ada") -> None:
    """Index one script with its identity; jobs with higher ids are later."""
    data = text if isinstance(text, bytes) else text.encode()
    spooled = script(site, job_id, data, NOVEMBER + timedelta(seconds=job_id))
    site.feed(spooled, identity(spooled, uid, user))


def anybody(use: ScriptUse) -> bool:
    return True


def hits(site: Site, *terms: str, case: bool = False, words: bool = False) -> list[ScriptHit]:
    matcher = TermMatcher(terms, case=case, words=words)
    return searcher_of(site).find_page(matcher, UseFilter(), anybody, limit=1000).hits


def found(site: Site, *terms: str, case: bool = False, words: bool = False) -> list[int]:
    """Return the ids of jobs whose scripts match."""
    return [hit.use.job_id for hit in hits(site, *terms, case=case, words=words)]


def everything_below(directory: Path) -> bytes:
    """Return the bytes of all files, to check that they lack a secret."""
    return b"".join(
        Path(folder, name).read_bytes() for folder, _, names in os.walk(directory) for name in names
    )
