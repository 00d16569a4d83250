"""What the archive's actions work with: jobs.db, kept bytes, catalogue, and who may see what.

Everything is opened when it is first needed, read-only. An action never asks
for a job or for bytes past this class, so that nobody is shown what is not
theirs.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from steward.archive.catalog.month import moment
from steward.archive.catalog.search import Searcher
from steward.archive.contents import Reader
from steward.archive.errors import ArchiveError, ArchiveUnavailable, NotArchived
from steward.archive.files.reader import FilesReader, Placed, Which
from steward.archive.remote.destination import SinkSearcher, searcher_of
from steward.archive.requests import JobLine, RunLine, ScriptLine
from steward.core.access import Access, Asker, Scope
from steward.core.config import Settings
from steward.core.errors import Missing, Refused, Unavailable, UsageError
from steward.core.events import Event, utc_now
from steward.core.incoming import StoreError, stores_of
from steward.jobs import Job, Jobs, Run, Script
from steward.jobs.queries import clusters_of

log = logging.getLogger(__name__)

Order = Callable[[Sequence[Event]], None]
"""Appends events to the journal; returns when they are durable."""


class NoSuchJob(Missing):
    """No job that the asker may see was called so."""


class NotYours(Refused):
    """The job is somebody else's."""


class Library:
    """The context of the archive's actions; to be used by one thread at a time.

    Args:
        settings: The whole configuration.
        access: The decisions.
        order: Appends events; without it nothing can be purged here.
        refilled: Tells the journal that a consumer, by its name, gets again what it missed of
            jobs submitted since a time (seconds since the epoch).
        now: The clock.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        order: Order | None = None,
        refilled: Callable[[str, int], None] | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.access = access
        self.order = order
        self.refilled = refilled
        self.now = now
        self.searcher = Searcher(os.path.join(settings.state_dir, "catalogue"))
        self._elsewhere: dict[str, SinkSearcher] = {}
        self._jobs: Jobs | None = None
        self._known: Sequence[str] | None = None
        self._readers: dict[str, Reader] = {
            name: FilesReader(settings, name) for name in settings.files_sinks()
        }
        self._stores = stores_of(settings)

    @property
    def jobs(self) -> Jobs:
        """jobs.db.

        Raises:
            SqliteUnavailable: There is none yet.
        """
        if self._jobs is None:
            self._jobs = Jobs(os.path.join(self.settings.state_dir, "jobs.db"))
        return self._jobs

    def searcher_in(self, sink: str) -> SinkSearcher:
        """Return the searcher of a sink whose name ``sink_called`` returned."""
        if sink not in self._elsewhere:
            self._elsewhere[sink] = searcher_of(self.settings, sink)
        return self._elsewhere[sink]

    def zone(self, cluster: str) -> str:
        """IANA name of a cluster's zone; "" for the system's."""
        known = self.settings.cluster.get(cluster)
        return known.timezone if known else ""

    def scheduler(self, cluster: str) -> str:
        """What runs a cluster's jobs; ``slurm`` for a cluster that is not configured here."""
        known = self.settings.cluster.get(cluster)
        return known.scheduler if known else "slurm"

    def with_submit_line(self, job: Job) -> Job:
        """The job with its submit line: slurmdbd has it where slurmctld never showed it."""
        known = self.settings.cluster.get(job.cluster)
        if job.record.submit_line or known is None or not known.slurm or known.remote:
            return job
        from steward.core.redaction import redactor_of
        from steward.slurm import Slurm, SlurmError

        try:
            line = Slurm(job.cluster, known).submit_line(job.record)
            record = msgspec.structs.replace(job.record, submit_line=line)
            return msgspec.structs.replace(job, record=redactor_of(self.settings).record(record))
        except (SlurmError, OSError) as error:
            log.info("the submit line of job %s cannot be read now: %s", job.label, error)
            return job

    def environment(self, script: Script) -> bytes:
        """The environment that was kept with a script; b"" where none is kept.

        Raises:
            ArchiveUnavailable: It cannot be read now.
            ArchiveError: It is not what was kept.
        """
        try:
            return self.content(script, "environment")
        except NotArchived:
            return b""

    def zones(self, clusters: Sequence[str]) -> dict[str, str]:
        """For each of these clusters the IANA name of its zone."""
        return {cluster: self.zone(cluster) for cluster in dict.fromkeys(clusters)}

    def is_operator(self, asker: Asker) -> bool:
        """Whether the asker is an operator of every cluster."""
        return all(self.access.is_operator(asker, name) for name in self._clusters())

    def scopes(self, asker: Asker, *, scripts: bool = False) -> dict[str, Scope] | None:
        """Whose job records, or scripts, the asker may see, by cluster; None for everything."""
        if self.is_operator(asker):
            # Clusters that were taken out of the configuration are theirs, too.
            return None
        decide = self.access.script_scope if scripts else self.access.scope
        return {name: decide(asker, name) for name in self._clusters()}

    def may_see(self, asker: Asker, job: Job) -> bool:
        """Whether the asker may see a job's record."""
        record = job.record
        return self.access.may_see_job(asker, job.cluster, record.uid, record.account)

    def may_read(self, asker: Asker, job: Job) -> bool:
        """Whether the asker may read a job's script, environment and private text."""
        return self.access.may_read_script(
            asker,
            job.cluster,
            uid=job.record.uid,
            user_at_submit=job.record.user,
            account=job.record.account,
        )

    def _clusters(self) -> Sequence[str]:
        if self._known is None:
            self._known = clusters_of(self.settings)
        return self._known

    def find(self, asker: Asker, text: str, cluster: str = "") -> tuple[Job, list[Job]]:
        """The job that a text means, and others of that id that the asker may see.

        Raises:
            JobNameError: The text names no job.
            NoSuchJob: There is no such job, or none that the asker may know of.
            NotYours: There is, but it is somebody else's.
            UsageError: Several clusters have such a job.
        """
        seen = [job for job in self.jobs.find(text, cluster) if self.may_see(asker, job)]
        readable = [job for job in seen if self.may_read(asker, job)]
        if not seen:
            where = f" on cluster {cluster}" if cluster else ""
            raise NoSuchJob(f"no job {text} is known{where}", text)
        if not readable and not any(job.verified for job in seen):
            raise NotYours(
                f"Slurm has not said yet whose job {text} is: until then only operators "
                "may read its script",
                text,
            )
        if not readable:
            raise NotYours(
                f"job {text} is not yours: its script and environment are its owner's "
                "and the operators'",
                text,
            )
        clusters = sorted({job.cluster for job in readable})
        if len(clusters) > 1:
            raise UsageError(
                f"clusters {', '.join(clusters)} each have a job {text}: name one with --cluster",
                text,
            )
        job = readable[0]
        others = [other for other in seen if other.number != job.number]
        return job, [other for other in others if other.cluster == job.cluster]

    def line(self, asker: Asker, job: Job, script: Script | None = None) -> JobLine:
        """A job as a table shows it to the asker."""
        record = job.record
        is_private = not self.may_read(asker, job)
        kept = script.body.script if script is not None else None
        return JobLine(
            cluster=job.cluster,
            job=job.label,
            job_id=job.job_id,
            kind=_kind(job),
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
            script_bytes=kept.length if kept is not None and not is_private else None,
            script_hidden=_hidden(job, is_private),
            submit_line="" if is_private else record.submit_line,
        )

    def script_line(self, script: Script, sink: str = "") -> ScriptLine:
        """What is kept of a job's script; the caller has asked :meth:`may_read`.

        Args:
            script: The script.
            sink: Paths are those in this sink; "" for the first one that has it.
        """
        body = script.body
        placed = self._placed(script, sink)
        here = placed.script if placed else None
        environment = placed.environment if placed else None
        return ScriptLine(
            key=script.key,
            job_id=body.job_id,
            spooled=spooled(body.spool_mtime_ns),
            length=body.script.length if body.script else None,
            sha256=body.script.sha256 if body.script else "",
            environment_length=body.environment.length if body.environment else None,
            environment_sha256=body.environment.sha256 if body.environment else "",
            redacted=body.redacted,
            flags=body.flags,
            path=here.path if here else "",
            environment_path=environment.path if environment else "",
        )

    def content(self, script: Script, which: Which) -> bytes:
        """The bytes of a script or of its environment, proved by their checksum.

        The caller has asked :meth:`may_read`.

        Raises:
            NotArchived: They are not kept.
            ArchiveUnavailable: They cannot be read now.
            ArchiveError: They are not what was kept.
        """
        kept = script.body.script if which == "script" else script.body.environment
        if kept is None:
            raise NotArchived(f"no {which} of job {script.body.job_id} is kept", script.key)
        data = self._read(script, which)
        if hashlib.sha256(data).hexdigest() != kept.sha256:
            raise ArchiveError(
                f"the {which} of job {script.body.job_id} was changed after it was kept: "
                "'steward archive verify' says which files are",
                script.key,
            )
        return data

    def _read(self, script: Script, which: Which) -> bytes:
        away: Unavailable | None = None
        for reader in self._readers.values():
            try:
                return reader.read(script.key, which, script.cluster)
            except NotArchived:
                continue
            except Unavailable as error:
                away = error
        body = script.body
        kept = body.script if which == "script" else body.environment
        assert kept is not None, "the caller has looked"
        try:
            # Not filed yet: the sinks come a moment after jobs.db.
            return self._stores.read(body, kept)
        except (FileNotFoundError, StoreError) as error:
            if away is not None:
                raise ArchiveUnavailable(str(away), script.key) from away
            raise NotArchived(
                f"the {which} of job {body.job_id} is in no archive any more", script.key
            ) from error

    def _placed(self, script: Script, sink: str) -> Placed | None:
        for name, reader in self._readers.items():
            if sink and name != sink:
                continue
            try:
                placed = reader.locate(script.key, script.cluster)
            except Unavailable as error:
                # Where it lies is told where it is known; the bytes are asked for elsewhere.
                log.debug("archive %s cannot be asked: %s", name, error)
                continue
            if placed is not None and placed.state != "waiting":
                return placed
        return None

    def close(self) -> None:
        """Let go of all files."""
        self.searcher.close()
        for elsewhere in self._elsewhere.values():
            elsewhere.close()
        for reader in self._readers.values():
            reader.close()
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def run_line(run: Run) -> RunLine:
    """A run as it is told."""
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


def spooled(nanoseconds: int) -> datetime:
    """A time in the spool, from nanoseconds since the epoch."""
    return moment(nanoseconds // 1000)


def _hidden(job: Job, is_private: bool) -> Literal["private", "purged", ""]:
    if is_private:
        # Whether it was purged is its owner's to know, too.
        return "" if _kind(job) == "interactive" else "private"
    return "purged" if job.purged and not job.script_key else ""


def _kind(job: Job) -> Literal["batch", "interactive", ""]:
    if job.script_key or job.record.batch:
        return "batch"
    return "interactive" if job.record.batch is False else ""
