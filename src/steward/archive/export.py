"""Script export and secret scan: the streaming actions ``archive.export`` and ``archive.secrets``.

:class:`NameSet` is a set of names in a temporary SQLite file, so that a million names need little
memory. :func:`export_scripts` yields the script and environment files of the selected jobs, newest
first. :func:`find_script_secrets` yields lines that look like credentials. Both use
:func:`iterate_scripts`, which yields each script once.
"""

import hashlib
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

import msgspec

from steward.archive.context import ArchiveContext, convert_spool_time
from steward.archive.files.layout import encode_name, encode_user, shorten_component
from steward.archive.files.reader import ContentKind
from steward.archive.requests import (
    ExportFile,
    ExportReply,
    ExportRequest,
    JobSelection,
    Progress,
    SecretLine,
    SecretsReply,
    SecretsRequest,
)
from steward.archive.selection import iterate_jobs, make_job_filter, resolve_selection_span
from steward.core.access import Caller
from steward.core.actions import action
from steward.core.errors import StewardError, UsageError
from steward.core.redaction import Redactor, SecretFinding
from steward.core.sqlite import open_scratch, translate_errors
from steward.core.storage import Table
from steward.jobs import Job, JobFilter, Script


class _Name(msgspec.Struct, frozen=True):
    """Name of a set."""

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


log = logging.getLogger(__name__)

_MAX_UNREADABLE = 1000
_REPORT_EVERY = 200
_CACHED_SCRIPTS = 10_000


@action(
    "archive.export",
    scope="scripts",
    help="Give out the scripts of jobs as files.",
)
def export_scripts(
    context: ArchiveContext, caller: Caller, request: ExportRequest
) -> Iterator[ExportFile | ExportReply]:
    """Stream the files of the selected jobs whose scripts the user may read, newest first."""
    if request.limit < 0:
        raise UsageError("a limit is from 1, or 0 for all", request.limit)
    job_filter = _make_readable_filter(context, caller, request)
    return _stream_files(context, caller, request, job_filter)


@action(
    "archive.secrets",
    scope="scripts",
    help="List scripts that look to hold a secret.",
)
def find_script_secrets(
    context: ArchiveContext, caller: Caller, request: SecretsRequest
) -> Iterator[SecretLine | Progress | SecretsReply]:
    """Stream lines that look like credentials, in scripts that the user may read, newest first."""
    if request.limit < 0:
        raise UsageError("a limit is from 1, or 0 for all", request.limit)
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
                log.warning("not looked at: %s", error)
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
