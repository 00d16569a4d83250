"""Script export and secret scan: the streaming actions ``archive.export`` and ``archive.secrets``.

:class:`NameSet` is a set of names in a temporary SQLite file, so that a million names need little
memory. :func:`export_scripts` yields the script and environment files of the selected jobs, newest
first. :func:`find_script_secrets` yields lines that look like credentials. Both use
:func:`iterate_scripts`, which yields each script once.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Annotated, ClassVar, Final, Self

import msgspec

from steward.archive.context import ArchiveContext, convert_spool_time
from steward.archive.errors import NoMatch
from steward.archive.files.layout import encode_name, encode_user, shorten_component
from steward.archive.files.reader import ContentKind
from steward.archive.requests import (
    DEFAULT_DAYS_NOTE,
    JOB_COLUMNS,
    JobLine,
    JobSelection,
    Progress,
)
from steward.archive.selection import iterate_jobs, make_job_filter, resolve_selection_span
from steward.core.access import Caller
from steward.core.actions import ActionMessage, Answer, action, option
from steward.core.errors import StewardError
from steward.core.layouts import Column, Layout, format_count, format_size
from steward.core.redaction import Redactor, SecretFinding
from steward.core.sqlite import open_scratch, translate_errors
from steward.core.storage import Table
from steward.jobs import Job, JobFilter, Script

log = logging.getLogger(__name__)

_MAX_UNREADABLE = 1000
_REPORT_EVERY = 200
_CACHED_SCRIPTS = 10_000


class _Name(msgspec.Struct, frozen=True):
    """Name in a set."""

    name: str


_NAMES: Final = Table(_Name, "name", key="name")


class NameSet:
    """Set of names on disk, to which names are only added; a context manager."""

    def __init__(self) -> None:
        self._connection = open_scratch(_NAMES.schema)
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: str) -> bool:
        """Return whether a name was added."""
        with translate_errors("a temporary file"):
            cursor = self._connection.execute("SELECT 1 FROM name WHERE name = ?", (name,))
            return bool(cursor.fetchall())

    def add(self, name: str) -> bool:
        """Add a name; return True if it was not in the set.

        Raises:
            SqliteUnavailable: The disk for temporary files is full.
        """
        with translate_errors("a temporary file"):
            cursor = _NAMES.insert(self._connection, _Name(name), "ignore")
        is_new = bool(cursor.rowcount == 1)
        self._count += is_new
        return is_new


class ExportRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.export``: the files of the selected jobs, as a stream."""

    environments: Annotated[bool, option("Also export environments.", "--env/--no-env")] = True
    limit: Annotated[
        int, option("Maximum number of scripts; 0 means all.", "--limit", "-L", ge=0, default="all")
    ] = 0


class ExportFile(ActionMessage, frozen=True, kw_only=True, tag="file", tag_field="item"):
    """Stream item of an export: one file.

    Attributes:
        path: Relative, safe path: ``cluster/user/jobid-….sh``; unique within the export.
        data: Content; base64 in JSON.
        modified: The script's time in the spool.
        job: The job.
        script_key: Key of the job.script event.
        sha256: SHA-256 of the content.
    """

    path: str
    data: bytes
    modified: datetime
    job: JobLine
    script_key: str
    sha256: str


class ExportReply(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """Final reply of ``archive.export``.

    Attributes:
        jobs: Number of exported jobs.
        files: Number of files.
        total_bytes: Total size of the files.
        unreadable: Jobs whose files could not be read, with the reason.
    """

    jobs: int
    files: int
    total_bytes: int
    unreadable: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code 1 if a file was left out."""
        return 1 if self.unreadable else 0

    def list_notes(self) -> Iterable[str]:
        """Return the number of files and their size."""
        files, jobs = format_count(self.files, "file"), format_count(self.jobs, "job")
        yield f"{files} of {jobs}, {format_size(self.total_bytes)} bytes."

    def list_warnings(self) -> Iterable[str]:
        """Return the jobs whose files were left out."""
        return (f"not exported: {line}" for line in self.unreadable)


class SecretsRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.secrets``: find credentials in scripts."""

    limit: Annotated[
        int,
        option("Maximum number of scripts; 0 means all.", "--limit", "-L", ge=0, default="all"),
    ] = 0


class SecretLine(ActionMessage, frozen=True, kw_only=True, tag="secret", tag_field="item"):
    """Stream item of a secret scan: a line that looks like a credential, without its text.

    Attributes:
        job: Job that ran the script.
        line: Line number, from 1.
        kind: Name of the pattern that matched.
    """

    job: JobLine
    line: int
    kind: str


class SecretsReply(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """Final reply of ``archive.secrets``.

    Attributes:
        scripts: Number of scripts scanned.
        suspicious: Number of scripts with a match.
        since: Start of the time span; None for all time.
        default_days: 7 if ``since`` is the default, else 0.
        unreadable: Number of scripts that could not be read and were not scanned.
    """

    scripts: int
    suspicious: int
    since: datetime | None = None
    default_days: int = 0
    unreadable: int = 0
    layouts: ClassVar[Mapping[str, Layout]] = {
        "secrets": (*JOB_COLUMNS, Column("Line", "line", "count"), Column("Kind", "kind"))
    }

    @property
    def exit_code(self) -> int:
        """Exit code 1 if a script was not scanned."""
        return 1 if self.unreadable else 0

    def list_notes(self) -> Iterable[str]:
        """Return the default time span if it applies, and the number of scripts."""
        if self.default_days:
            yield DEFAULT_DAYS_NOTE
        scripts = format_count(self.scripts, "script")
        yield f"{self.suspicious} of {scripts} may contain a secret."

    def list_warnings(self) -> Iterable[str]:
        """Return the number of scripts that were not scanned."""
        if self.unreadable:
            yield f"cannot read {format_count(self.unreadable, 'script')}"


@action(
    "archive.export",
    scope="scripts",
    command="archive export",
)
def export_scripts(
    context: ArchiveContext, caller: Caller, request: ExportRequest
) -> Iterator[ExportFile | ExportReply]:
    """Export scripts of jobs to a directory or a tar.

    Without -S or -j, the command exports the jobs of the last seven days. The file
    MANIFEST.jsonl lists owners and checksums of the files. If -j or -u matches no
    script, the command writes nothing and exits with 1.

    Raises:
        NoMatch: No script of the named jobs or users is archived; raised in place of the answer.
    """
    job_filter = _make_readable_filter(context, caller, request)
    return _stream_files(context, caller, request, job_filter)


@action(
    "archive.secrets",
    scope="scripts",
    role="operator",
    command="archive secrets",
    rows="secrets",
)
def find_script_secrets(
    context: ArchiveContext, caller: Caller, request: SecretsRequest
) -> Iterator[SecretLine | Progress | SecretsReply]:
    """List script lines that look like credentials, without their text.

    Without -S or -j, the command scans the scripts of the last seven days. Ask the
    owner to remove and change the credential.
    """
    job_filter = _make_readable_filter(context, caller, request)
    return _stream_secrets(context, caller, request, job_filter)


def iterate_scripts(
    context: ArchiveContext,
    caller: Caller,
    job_filter: JobFilter,
    limit: int = 0,
    *,
    include_unused: bool = False,
) -> Iterator[tuple[Job, Script]]:
    """Yield each readable script of the selected jobs once, with the newest of its jobs.

    ``limit`` is the maximum number of scripts, 0 for all. With ``include_unused``, also yield
    scripts archived under a job's own id that the job did not run.
    """
    with NameSet() as seen:
        for job in iterate_jobs(context, job_filter):
            if not context.can_read(caller, job):
                continue
            scripts = context.jobs.list_scripts(job) if include_unused else []
            if job.script_key and _format_script_ref(job.cluster, job.script_key) not in seen:
                own_script = context.jobs.find_script(job)
                scripts += [own_script] if own_script is not None else []
            for script in scripts:
                if seen.add(_format_script_ref(script.cluster, script.key)):
                    yield job, script
            if limit and len(seen) >= limit:
                return


def _format_script_ref(cluster: str, key: str) -> str:
    # A cluster's name contains no blank.
    return f"{cluster} {key}"


def _make_readable_filter(
    context: ArchiveContext, caller: Caller, request: JobSelection
) -> JobFilter:
    """Build the job filter; errors in a request are raised before the stream begins."""
    span = resolve_selection_span(context, request)
    return make_job_filter(request, span, context.get_visible_jobs(caller, scripts=True))


def _stream_files(
    context: ArchiveContext, caller: Caller, request: ExportRequest, job_filter: JobFilter
) -> Iterator[ExportFile | ExportReply]:
    unreadable: list[str] = []
    jobs = files = total_bytes = 0
    with NameSet() as used:
        for job, script in iterate_scripts(context, caller, job_filter, request.limit):
            jobs += 1
            stem = _make_unique_stem(_make_file_stem(job, script), used)
            for kind, suffix in _list_wanted_files(script, request.environments):
                try:
                    data = context.read_content(script, kind)
                except StewardError as error:
                    if len(unreadable) < _MAX_UNREADABLE:
                        unreadable.append(str(error))
                    continue
                files += 1
                total_bytes += len(data)
                yield ExportFile(
                    path=stem + suffix,
                    data=data,
                    modified=convert_spool_time(script.body.spool_mtime_ns),
                    job=context.make_job_line(caller, job, script),
                    script_key=script.key,
                    sha256=hashlib.sha256(data).hexdigest(),
                )
    if not jobs and (request.jobs or request.users):
        # An empty export might go unnoticed.
        raise NoMatch("no archived script matches: nothing exported")
    yield ExportReply(jobs=jobs, files=files, total_bytes=total_bytes, unreadable=tuple(unreadable))


def _list_wanted_files(script: Script, environments: bool) -> Iterator[tuple[ContentKind, str]]:
    """Yield the files to export of a script: which, and the file suffix."""
    if script.body.script is not None:
        yield "script", ".sh"
    if environments and script.body.environment is not None:
        yield "environment", ".env"


def _make_file_stem(job: Job, script: Script) -> str:
    """Return the export path of a script, without suffix: cluster/user/jobid-name."""
    record = job.record
    user = encode_user(record.user) or (str(record.uid) if record.uid is not None else "unknown")
    name = f"{script.body.job_id}-{encode_name(record.name)}".rstrip("-")
    return f"{encode_name(job.cluster)}/{user}/{shorten_component(name)}"


def _make_unique_stem(stem: str, used: NameSet) -> str:
    """Append a number to a file stem that is in use already, because a job id was reused."""
    candidate, number = stem, 1
    while not used.add(candidate):
        number += 1
        candidate = f"{stem}~{number}"
    return candidate


def _stream_secrets(
    context: ArchiveContext, caller: Caller, request: SecretsRequest, job_filter: JobFilter
) -> Iterator[SecretLine | Progress | SecretsReply]:
    redactor = Redactor(context.settings.redact)
    findings: dict[str, tuple[SecretFinding, ...]] = {}
    scripts = suspicious = unreadable = 0
    for job, script in iterate_scripts(context, caller, job_filter, request.limit):
        if script.body.script is None:
            continue
        digest = script.body.script.sha256
        if digest not in findings:
            if len(findings) >= _CACHED_SCRIPTS:
                findings.clear()
            try:
                data = context.read_content(script, "script")
            except StewardError as error:
                log.warning("cannot search the script of job %s for secrets: %s", job.label, error)
                unreadable += 1
                continue
            findings[digest] = tuple(redactor.find_secrets(data))
        scripts += 1
        if scripts % _REPORT_EVERY == 0:
            yield Progress(done=scripts)
        suspicious += bool(findings[digest])
        for finding in findings[digest]:
            yield SecretLine(
                job=context.make_job_line(caller, job, script), line=finding.line, kind=finding.what
            )
    span = resolve_selection_span(context, request)
    yield SecretsReply(
        scripts=scripts,
        suspicious=suspicious,
        unreadable=unreadable,
        since=span.since,
        default_days=span.default_days,
    )
