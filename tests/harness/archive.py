"""Archive Sites: scripts with their bytes, events, files and index, and their jobs."""

import os
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from harness.events import NOON_NS, NOVEMBER, make_event, script_event
from harness.jobs import open_jobs
from harness.site import ADA, Site
from harness.spool import environment_bytes
from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.contents import make_script_contents
from steward.archive.files import permissions
from steward.archive.files.index import FilesRecords
from steward.archive.files.manifest import decode_facts
from steward.archive.files.owners import resolve_user_name
from steward.archive.files.sink import FilesSink
from steward.archive.settings import IDENTITY_WAIT_S, FilesSinkSettings
from steward.core.access import Caller
from steward.core.config import ArchiveSettings
from steward.core.events import (
    ARCHIVE_PURGE,
    JOB_IDENTITY,
    JOB_SEEN,
    ArchivePurge,
    Event,
    IncomingFile,
    JobFacts,
    JobIdentity,
)
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED
from steward.core.script_stores import IncomingStore, make_incoming_filename
from steward.core.timestamps import to_micros
from steward.slurm.settings import ClusterSettings

DAY = "alpha/ada/2026/03/01"
"""Directory of ada's scripts that were spooled at noon, below the archive's root."""
SCRIPT = b"#!/bin/sh\nhostname\n"
ENVIRONMENT = environment_bytes(b"HOME=/home/ada")
REDACTED_ENVIRONMENT = b"\x03\0\0\0HOME=/home/ada\0TEXT=a=b\nc\xff\0API_TOKEN=" + REDACTED + b"\0"


# ---------------------------------------------------------------- sites and consumers


def open_sink(
    site: Site,
    name: str = "files",
    page_rows: int = 200,
    identity_wait_s: float = IDENTITY_WAIT_S,
) -> FilesSink:
    def resolve(uid: int) -> str:
        return resolve_user_name(uid) if site.user_names is None else site.user_names.get(uid, "")

    clock, stores = site.clock, site.stores
    return FilesSink(
        *(site.settings, name, stores),
        resolve=resolve,
        clock=clock,
        page_rows=page_rows,
        identity_wait_s=identity_wait_s,
    )


def open_catalog(site: Site) -> CatalogConsumer:
    return CatalogConsumer(
        str(site.state / "catalog"), make_script_contents(site.settings, site.stores)
    )


def sink_settings(directory: Path, **sink: Any) -> ArchiveSettings:
    """Return settings of a sink ``files`` in ``directory/archive``; ``sink`` sets other keys."""
    keys = {"path": str(directory / "archive"), **sink}
    return ArchiveSettings(sink={"files": FilesSinkSettings(**keys)})


def make_site(
    directory: Path,
    *,
    slurm: bool = True,
    page_rows: int = 200,
    identity_wait_s: float = IDENTITY_WAIT_S,
    **sink: Any,
) -> Site:
    """Make a Site of a cluster ``alpha`` whose scripts the sink ``files`` archives."""
    clusters = {"alpha": ClusterSettings(slurm=slurm, timezone="UTC")}
    site = Site(directory, clusters=clusters, archive=sink_settings(directory, **sink))
    site.open(partial(open_sink, page_rows=page_rows, identity_wait_s=identity_wait_s))
    return site


def make_library(directory: Path, **sink: Any) -> Site:
    """Make the same Site with jobs.db and a catalog, which the archive's actions need."""
    site = make_site(directory, **sink)
    site.now = NOVEMBER
    sink_of(site).prepare()
    site.open(open_jobs, open_catalog)
    return site


def sink_of(site: Site) -> FilesSink:
    return site.consumer(FilesSink)


def reopen(site: Site, **sink: Any) -> None:
    """Reopen a Site as after a crash; ``sink`` sets keys of the sink."""
    site.reopen(archive=sink_settings(site.directory, **sink))
    sink_of(site).prepare()


# ---------------------------------------------------------------- bytes and events


def store_of(site: Site, name: str = "archive.files") -> IncomingStore:
    if name == "archive.files":
        sink_of(site).prepare()
    return site.stores.get(name)


def trim(site: Site, store: str = "archive.files") -> None:
    """Unlink all incoming bytes, as trimming does once every consumer has applied the events."""
    incoming = site.stores.get(store)
    incoming.unlink([name.filename for name in incoming.iterate_names()])


def write_kept(
    store: IncomingStore, job_id: int, mtime_ns: int, data: bytes, what: str, cluster: str
) -> IncomingFile:
    return store.write(make_incoming_filename(cluster, job_id, mtime_ns, len(data), what), data)


def script(
    site: Site,
    job_id: int,
    data: bytes = SCRIPT,
    *,
    environment: bytes | None = ENVIRONMENT,
    mtime_ns: int = NOON_NS,
    name: str = "claim",
    store: str = "archive.files",
    cluster: str = "alpha",
    **body: Any,
) -> Event:
    """Write a script's bytes to the store and return its job.script; ``body`` sets other fields."""
    incoming = store_of(site, store)
    kept: dict[str, Any] = {
        which: None if text is None else write_kept(incoming, job_id, mtime_ns, text, end, cluster)
        for which, end, text in (("script", "script", data), ("environment", "env", environment))
    }
    incoming.sync()
    return script_event(
        job_id, mtime_ns=mtime_ns, cluster=cluster, store=store, claimed_name=name, **kept, **body
    )


def identity(
    script: Event,
    uid: int | None = 4001,
    user: str = "ada",
    *,
    name: str = "run",
    why: str = "bound",
    **record: Any,
) -> Event:
    """Return a job.identity that assigns a script to a job of this user."""
    job_id = script.body.job_id
    body = JobIdentity(
        script_key=script.key,
        job_id=job_id,
        first_submit=datetime.fromtimestamp(script.body.spool_mtime_ns / 1e9, UTC),
        record=JobRecord(job_id=job_id, name=name, uid=uid, user=user, **record),
        why=why,
    )
    key = f"identity:{script.key}:{why}:{uid}:{user}"
    return make_event(JOB_IDENTITY, key, body, cluster=script.cluster)


def purge(*scripts: Event, sink: str = "", asked_by: str = "root") -> Event:
    """Return an archive.purge of these scripts."""
    keys = tuple(script.key for script in scripts)
    body = ArchivePurge(script_keys=keys, sink=sink, asked_by=asked_by)
    return make_event(
        ARCHIVE_PURGE, f"purge:{sink}:{'+'.join(keys)}", body, cluster=scripts[0].cluster
    )


def seen(
    job_id: int, when: datetime, *, cluster: str = "alpha", who: Caller = ADA, **record: Any
) -> Event:
    """Return the job.seen of a job that ada or ``who`` submitted at a time."""
    defaults = {
        "name": "run",
        "uid": who.uid,
        "user": who.user,
        "account": "physics",
        "state": "COMPLETED",
        "submit": when,
    }
    facts = JobFacts(record=JobRecord(**{"job_id": job_id, **defaults, **record}))
    return make_event(JOB_SEEN, f"seen:{job_id}:{when}", facts, when, cluster=cluster)


def add_job(
    site: Site,
    job_id: int,
    data: bytes | None = SCRIPT,
    *,
    who: Caller = ADA,
    ago: timedelta = timedelta(hours=1),
    environment: bytes | None = REDACTED_ENVIRONMENT,
    feed: bool = True,
    **record: Any,
) -> str:
    """Append a job's script and its job.seen; return the script's key, "" without a script."""
    submit = site.now - ago
    key = ""
    if data is not None:
        spooled = script_at(site, job_id, data, submit, environment)
        site.append([spooled])
        key = spooled.key
    defaults = {
        "partition": "long",
        "batch": data is not None or bool(record.get("array_job_id")),
        "submit_line": f"sbatch secret-of-{who.user}.sh",
    }
    site.append([seen(job_id, submit, who=who, **{**defaults, **record})])
    if feed:
        site.feed()
    return key


def script_at(
    site: Site, job_id: int, data: bytes, submit: datetime, environment: bytes | None = None
) -> Event:
    """Return the job.script of a job submitted at a time, with the names of redacted variables."""
    redacted = () if environment is None else ("API_TOKEN",)
    fields: dict[str, Any] = {"environment": environment, "name": "run", "redacted": redacted}
    return script(site, job_id, data, mtime_ns=to_micros(submit) * 1000 + 17_000, **fields)


# ---------------------------------------------------------------- archived files and rows


def root_of(site: Site, sink: str = "files") -> Path:
    return Path(site.settings.sink_path(sink))


def files(site: Site, sink: str = "files") -> dict[str, bytes]:
    """Return bytes by path below the root, for every archived file but manifests."""
    root = root_of(site, sink)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
        and not path.relative_to(root).parts[0].startswith(".")
        and path.name != "MANIFEST.jsonl"
    }


def rows(site: Site, sql: str, sink: str = "files") -> list[Any]:
    """Return the rows of an SQL query of a sink's database."""
    with closing(FilesRecords(site.settings, sink, read_only=True)) as records:
        return records.query(sql)


def has_acls(site: Site) -> bool:
    """Return whether the archive's file system supports POSIX ACLs."""
    sink_of(site).prepare()
    fd = os.open(root_of(site), os.O_RDONLY)
    try:
        return permissions.supports_acls(fd)
    finally:
        os.close(fd)


def manifest(site: Site, directory: str) -> list[tuple[str, str]]:
    data = (root_of(site) / directory / "MANIFEST.jsonl").read_bytes()
    return [(fact.fact, fact.key) for fact in decode_facts(data)]


def list_open_files(directory: Path) -> list[str]:
    """Return the files and directories from ``directory`` down that this process has open."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in paths if Path(path).is_relative_to(directory))
