"""Archive context: finds jobs and script bytes for archive actions, and checks permissions.

:class:`ArchiveContext` opens jobs.db, sinks and the catalog on first use, read-only. Actions get
jobs and bytes only through it, so that a user sees only what the permissions allow. It also builds
the rows of replies (:class:`JobLine`, :class:`ScriptLine`, :class:`RunLine`).
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from steward.archive.catalog.month import convert_microseconds
from steward.archive.catalog.search import CatalogSearcher
from steward.archive.contents import ArchiveReader
from steward.archive.errors import ArchiveError, ArchiveUnavailable, NotArchived
from steward.archive.files.reader import ContentKind, FilesReader, PlacedScript
from steward.archive.remote.destination import SinkSearcher, make_sink_searcher
from steward.archive.requests import JobLine, RunLine, ScriptLine
from steward.core.access import Access, Caller, VisibleJobs
from steward.core.config import Settings
from steward.core.databases import JOBS
from steward.core.errors import NotFound, PermissionRefused, Unavailable, UsageError
from steward.core.events import Event, utc_now
from steward.core.script_stores import StoreError, make_stores
from steward.jobs import Job, Jobs, Run, Script
from steward.jobs.queries import list_clusters

log = logging.getLogger(__name__)

AppendEvents = Callable[[Sequence[Event]], None]
"""Function that appends events to the journal and returns when they are durable."""


class JobNotFound(NotFound):
    """Error: no job of this name that the user may see."""


class JobNotReadable(PermissionRefused):
    """Error: the job belongs to another user."""


class ArchiveContext:
    """Context of the archive actions. Not thread-safe: use one instance per thread.

    Args:
        settings: The whole configuration.
        access: Decides who may see what.
        append: Appends events; without it purge and resend are impossible.
        mark_refilled: Tells the journal that a consumer, by name, gets again the events that it
            missed of jobs submitted since a time (seconds since the epoch).
        now: Returns the current time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        append: AppendEvents | None = None,
        mark_refilled: Callable[[str, int], None] | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.access = access
        self.order = append
        self.mark_refilled = mark_refilled
        self.now = now
        self.searcher = CatalogSearcher(os.path.join(settings.state_dir, "catalog"))
        self._sink_searchers: dict[str, SinkSearcher] = {}
        self._jobs: Jobs | None = None
        self._cluster_names: Sequence[str] | None = None
        self._readers: dict[str, ArchiveReader] = {
            name: FilesReader(settings, name) for name in settings.files_sinks()
        }
        self._stores = make_stores(settings)

    @property
    def jobs(self) -> Jobs:
        """Open jobs.db on first use.

        Raises:
            SqliteUnavailable: The database does not exist yet.
        """
        if self._jobs is None:
            self._jobs = Jobs(JOBS.locate(self.settings.state_dir))
        return self._jobs

    def get_sink_searcher(self, sink: str) -> SinkSearcher:
        """Return the searcher of a sink whose name ``resolve_searchable_sink`` returned."""
        if sink not in self._sink_searchers:
            self._sink_searchers[sink] = make_sink_searcher(self.settings, sink)
        return self._sink_searchers[sink]

    def get_time_zone(self, cluster: str) -> str:
        """Return the IANA name of a cluster's time zone; "" for the system's."""
        cluster_settings = self.settings.cluster.get(cluster)
        return cluster_settings.timezone if cluster_settings else ""

    def get_scheduler(self, cluster: str) -> str:
        """Return a cluster's scheduler; ``slurm`` if the cluster is not configured here."""
        cluster_settings = self.settings.cluster.get(cluster)
        return cluster_settings.scheduler if cluster_settings else "slurm"

    def add_submit_line(self, job: Job) -> Job:
        """Return the job with its submit line, from slurmdbd if slurmctld never showed it."""
        cluster_settings = self.settings.cluster.get(job.cluster)
        if (
            job.record.submit_line
            or cluster_settings is None
            or not cluster_settings.slurm
            or cluster_settings.remote
        ):
            return job
        from steward.core.redaction import make_redactor
        from steward.slurm import Slurm, SlurmError

        try:
            line = Slurm(job.cluster, cluster_settings).read_submit_line(job.record)
            record = msgspec.structs.replace(job.record, submit_line=line)
            return msgspec.structs.replace(
                job, record=make_redactor(self.settings).redact_record(record)
            )
        except (SlurmError, OSError) as error:
            log.info("cannot read the submit line of job %s: %s", job.label, error)
            return job

    def read_environment(self, script: Script) -> bytes:
        """Return the archived environment of a script; b"" if there is none.

        Raises:
            ArchiveUnavailable: It cannot be read now.
            ArchiveError: Its checksum does not match.
        """
        try:
            return self.read_content(script, "environment")
        except NotArchived:
            return b""

    def get_time_zones(self, clusters: Sequence[str]) -> dict[str, str]:
        """Return the IANA name of each cluster's time zone."""
        return {cluster: self.get_time_zone(cluster) for cluster in dict.fromkeys(clusters)}

    def is_operator(self, caller: Caller) -> bool:
        """Return whether the user is an operator of every cluster."""
        return all(self.access.is_operator(caller, name) for name in self.list_clusters())

    def get_visible_jobs(
        self, caller: Caller, *, scripts: bool = False
    ) -> dict[str, VisibleJobs] | None:
        """Return the visible job records, or scripts, by cluster; None for all."""
        if self.is_operator(caller):
            # Includes clusters that were removed from the configuration.
            return None
        decide = self.access.get_script_scope if scripts else self.access.get_job_scope
        return {name: decide(caller, name) for name in self.list_clusters()}

    def can_see(self, caller: Caller, job: Job) -> bool:
        """Return whether the user may see a job's record."""
        record = job.record
        return self.access.can_see_job(caller, job.cluster, record.uid, record.account)

    def can_read(self, caller: Caller, job: Job) -> bool:
        """Return whether the user may read a job's script, environment and submit line."""
        return self.access.can_read_script(
            caller,
            job.cluster,
            uid=job.record.uid,
            user_at_submit=job.record.user,
            account=job.record.account,
        )

    def list_clusters(self) -> Sequence[str]:
        """Return all clusters that may have jobs."""
        if self._cluster_names is None:
            self._cluster_names = list_clusters(self.settings)
        return self._cluster_names

    def find(self, caller: Caller, name: str, cluster: str = "") -> tuple[Job, list[Job]]:
        """Find the job that a text names, and other jobs of that id that the user may see.

        Raises:
            JobNameError: The text is not a job id.
            JobNotFound: There is no such job, or the user may not see it.
            JobNotReadable: The job belongs to another user.
            UsageError: Several clusters have such a job.
        """
        visible = [job for job in self.jobs.find(name, cluster) if self.can_see(caller, job)]
        readable = [job for job in visible if self.can_read(caller, job)]
        if not visible:
            on_cluster = f" on cluster {cluster}" if cluster else ""
            raise JobNotFound(f"unknown job {name}{on_cluster}", name)
        if not readable and not any(job.verified for job in visible):
            raise JobNotReadable(
                f"permission denied: the owner of job {name} is not known yet, so only "
                "operators may read its script",
                name,
            )
        if not readable:
            raise JobNotReadable(
                f"permission denied: job {name} belongs to another user",
                name,
            )
        clusters = sorted({job.cluster for job in readable})
        if len(clusters) > 1:
            raise UsageError(
                f"job {name} exists on the clusters {', '.join(clusters)}: name one with `cluster`",
                name,
            )
        job = readable[0]
        others = [other for other in visible if other.number != job.number]
        return job, [other for other in others if other.cluster == job.cluster]

    def make_job_line(self, caller: Caller, job: Job, script: Script | None = None) -> JobLine:
        """Make the reply row of a job; private fields stay empty if the user may not read them."""
        record = job.record
        is_private = not self.can_read(caller, job)
        script_file = script.body.script if script is not None else None
        return JobLine(
            cluster=job.cluster,
            job=job.label,
            job_id=job.job_id,
            kind=_get_job_kind(job),
            name=record.name,
            user=record.user,
            uid=record.uid,
            account=record.account,
            partition=record.partition,
            state=record.state,
            verified=job.verified,
            submit=job.first_submit,
            start=record.start,
            end=record.end,
            exit_code=record.exit_code,
            exit_signal=record.exit_signal,
            restarts=record.restarts,
            script_key="" if is_private else job.script_key,
            script_bytes=script_file.length if script_file is not None and not is_private else None,
            script_hidden=_get_hidden_reason(job, is_private),
            submit_line="" if is_private else record.submit_line,
        )

    def make_script_line(self, script: Script, sink: str = "") -> ScriptLine:
        """Make the reply row of an archived script; the caller has checked :meth:`can_read`.

        Args:
            script: The script.
            sink: Show paths in this sink; "" for the first that has the script.
        """
        body = script.body
        placed = self._find_placed(script, sink)
        script_file = placed.script if placed else None
        environment = placed.environment if placed else None
        return ScriptLine(
            key=script.key,
            job_id=body.job_id,
            spooled=convert_spool_time(body.spool_mtime_ns),
            length=body.script.length if body.script else None,
            sha256=body.script.sha256 if body.script else "",
            environment_length=body.environment.length if body.environment else None,
            environment_sha256=body.environment.sha256 if body.environment else "",
            redacted=body.redacted,
            flags=body.flags,
            path=script_file.path if script_file else "",
            environment_path=environment.path if environment else "",
        )

    def read_content(self, script: Script, kind: ContentKind) -> bytes:
        """Return the bytes of a script or environment, after checking their SHA-256.

        The caller has checked :meth:`can_read`.

        Raises:
            NotArchived: The bytes are not archived.
            ArchiveUnavailable: They cannot be read now.
            ArchiveError: Their checksum does not match.
        """
        stored_file = script.body.script if kind == "script" else script.body.environment
        if stored_file is None:
            raise NotArchived(f"job {script.body.job_id} has no archived {kind}", script.key)
        data = self._read(script, kind)
        if hashlib.sha256(data).hexdigest() != stored_file.sha256:
            raise ArchiveError(
                f"the {kind} of job {script.body.job_id} is damaged or was changed: its SHA-256 "
                "does not match. 'steward archive verify' lists such files",
                script.key,
            )
        return data

    def _read(self, script: Script, kind: ContentKind) -> bytes:
        """Read bytes from the first sink that has them, else from the incoming store."""
        failure: Unavailable | None = None
        for reader in self._readers.values():
            try:
                return reader.read(script.key, kind, script.cluster)
            except NotArchived:
                continue
            except Unavailable as error:
                failure = error
        body = script.body
        stored_file = body.script if kind == "script" else body.environment
        assert stored_file is not None, "no stored file"
        try:
            # Not archived yet: sinks are a moment behind jobs.db.
            return self._stores.read(body, stored_file)
        except (FileNotFoundError, StoreError) as error:
            if failure is not None:
                raise ArchiveUnavailable(str(failure), script.key) from failure
            raise NotArchived(
                f"the {kind} of job {body.job_id} is no longer in any archive", script.key
            ) from error

    def _find_placed(self, script: Script, sink: str) -> PlacedScript | None:
        """Return where a sink stores a script; None if no sink has filed it."""
        for name, reader in self._readers.items():
            if sink and name != sink:
                continue
            try:
                placed = reader.locate(script.key, script.cluster)
            except Unavailable as error:
                # A path is shown only if known now; the bytes are read from another sink.
                log.debug("cannot query archive %s: %s", name, error)
                continue
            if placed is not None and placed.state != "waiting":
                return placed
        return None

    def close(self) -> None:
        """Close all files."""
        self.searcher.close()
        for searcher in self._sink_searchers.values():
            searcher.close()
        for reader in self._readers.values():
            reader.close()
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def make_run_line(run: Run) -> RunLine:
    """Make the reply row of a run."""
    record = run.record
    return RunLine(
        restarts=run.restarts,
        state=record.state,
        submit=run.submit,
        start=record.start,
        end=record.end,
        nodelist=record.nodelist,
        exit_code=record.exit_code,
        exit_signal=record.exit_signal,
    )


def convert_spool_time(nanoseconds: int) -> datetime:
    """Convert a spool time, ns since the epoch, to a datetime."""
    return convert_microseconds(nanoseconds // 1000)


def _get_hidden_reason(job: Job, is_private: bool) -> Literal["private", "erased", ""]:
    """Return why script details are hidden: private, purged, or ""."""
    if is_private:
        # Whether the script was purged is as private as the script.
        return "" if _get_job_kind(job) == "interactive" else "private"
    return "erased" if job.purged and not job.script_key else ""


def _get_job_kind(job: Job) -> Literal["batch", "interactive", ""]:
    """Return whether a job is batch or interactive; "" if unknown."""
    if job.script_key or job.record.batch:
        return "batch"
    return "interactive" if job.record.batch is False else ""
