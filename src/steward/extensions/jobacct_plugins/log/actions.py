"""Actions on the job log: dump its records, and purge old accounting data."""

import time
from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo
from typing import Annotated, Final

import msgspec

from steward.accounting.context import AccountingContext
from steward.accounting.errors import AccountingUsage
from steward.core.access import Caller
from steward.core.actions import Answer, HostZone, Request, action, option
from steward.core.errors import PermissionRefused, StewardError
from steward.core.events import ACCOUNTING_EXPIRE, Event
from steward.core.layouts import format_count, format_size
from steward.core.sqlite import SqliteMissing
from steward.core.usage import AccountingExpiry
from steward.extensions.jobacct_plugins.log.files import LogCalendar, list_log_days
from steward.extensions.jobacct_plugins.log.reader import raw_records
from steward.extensions.jobacct_plugins.registry import LOG_TYPE, parse_plugin_types
from steward.jobs.line_sources import locate_job_log
from steward.slurm.times import load_zone, parse_time

_CHUNK_BYTES: Final = 256 * 1024
"""Size of a chunk of a dump, in bytes."""
_MAX_EXAMPLES: Final = 20
"""Most examples of invalid lines in an answer."""


class LogOperatorsOnly(PermissionRefused):
    """The caller is not an operator."""


class PurgeError(StewardError):
    """Accounting data cannot be purged from this process."""


class DumpRequest(Request, frozen=True, kw_only=True):
    """Request of accounting.dump: the records of the job log, unchanged."""

    since: Annotated[
        str,
        option(
            "Start of the period: now-1day, 2026-11-21T08:00.",
            *("--starttime", "-S"),
            metavar="TIME",
        ),
    ] = ""
    until: Annotated[
        str,
        option("End of the period, exclusive.", "--endtime", "-E", metavar="TIME", default="now"),
    ] = ""
    zone: HostZone = ""


class DumpChunk(msgspec.Struct, frozen=True, tag="records"):
    """Chunk of records, one on each line."""

    text: str


class DumpAnswer(Answer, frozen=True, kw_only=True, tag="dumped"):
    """End of a dump.

    Attributes:
        records: Number of records.
        skipped: Number of lines that are not records.
        examples: Some of these lines: file, line number and reason.
    """

    records: int = 0
    skipped: int = 0
    examples: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if lines were left out."""
        return 1 if self.skipped else 0

    def list_warnings(self) -> Iterable[str]:
        """Return the lines that are not records."""
        yield from (f"not a record: {example}" for example in self.examples)
        if self.skipped:
            yield f"{format_count(self.skipped, 'line')} of the log are not records"


class PurgeRequest(Request, frozen=True, kw_only=True):
    """Request of accounting.purge: remove accounting data of jobs that ended before a time."""

    before: Annotated[
        str,
        option(
            "Remove jobs and days of the log that ended before this: now-365days, 2025-01-01.",
            "--before",
            metavar="TIME",
        ),
    ]
    keep_log: Annotated[
        bool,
        option("Remove jobs only from jobs.db; sacct still finds them in the log.", "--keep-log"),
    ] = False
    yes: Annotated[
        bool, option("Remove the data. Without it, the command only reports the amount.", "--yes")
    ] = False
    zone: HostZone = ""


class PurgedDay(msgspec.Struct, frozen=True, kw_only=True):
    """Day of the log to remove.

    Attributes:
        day: The day.
        length: Size of its files, bytes.
    """

    day: str
    length: int


class PurgeAnswer(Answer, frozen=True, kw_only=True):
    """Accounting data that is or would be purged.

    Attributes:
        done: Whether the removal was ordered.
        before: The time.
        days: Days of the log.
        jobs: Number of jobs of jobs.db.
    """

    done: bool
    before: datetime
    days: tuple[PurgedDay, ...] = ()
    jobs: int = 0

    def summarize(self) -> str:
        """Return the numbers of jobs and days to remove."""
        summary = f"{format_count(self.jobs, 'job')} of jobs.db"
        if not self.days:
            return summary
        size = format_size(sum(day.length for day in self.days))
        return f"{summary} and {format_count(len(self.days), 'day')} of the job log, {size} bytes"

    def list_warnings(self) -> Iterable[str]:
        """Return that nothing was removed."""
        if not self.done:
            yield f"nothing removed yet: --yes removes {self.summarize()}"


@action(
    "accounting.dump",
    scope="admin",
    role="operator",
    command="accounting dump",
    only_reads=True,
)
def dump_log(
    context: AccountingContext, asker: Caller, request: DumpRequest
) -> Iterator[DumpChunk | DumpAnswer]:
    """Print the records of the job log.

    Each line is a JSON object, see docs/accounting.md. The command skips lines that
    are not records, and then exits with 1.

    Raises:
        LogOperatorsOnly: The caller is not an operator.
    """
    _require_operator(context, asker, "read the job log")
    zone = load_zone(request.zone)
    since = parse_time(request.since, context.now(), zone) if request.since else None
    until = parse_time(request.until, context.now(), zone) if request.until else None
    return _dump_records(context, since, until)


def _dump_records(
    context: AccountingContext, since: datetime | None, until: datetime | None
) -> Iterator[DumpChunk | DumpAnswer]:
    """Yield chunks of records of a time range, then the totals."""
    calendar = LogCalendar(context.settings.cluster)
    examples: list[str] = []
    record_count = skipped = 0

    def record_skipped(path: str, line_number: int, reason: str) -> None:
        nonlocal skipped
        skipped += 1
        if len(examples) < _MAX_EXAMPLES:
            examples.append(f"{path}:{line_number}: {reason}")

    for day in list_log_days(locate_job_log(context.settings)):
        if since is not None and calendar.get_day_end(day.day) <= since:
            continue
        chunk: list[bytes] = []
        size = 0
        for line in raw_records(day.records, since, until, record_skipped):
            record_count += 1
            size += len(line)
            chunk.append(line)
            if size >= _CHUNK_BYTES:
                yield _build_chunk(chunk)
                chunk, size = [], 0
        if chunk:
            yield _build_chunk(chunk)
    yield DumpAnswer(records=record_count, skipped=skipped, examples=tuple(examples))


def _build_chunk(lines: list[bytes]) -> DumpChunk:
    return DumpChunk(b"".join(lines).decode("utf-8", "replace"))


@action(
    "accounting.purge",
    scope="admin",
    role="operator",
    command="accounting purge",
    writes=True,
)
def purge_accounting(
    context: AccountingContext, asker: Caller, request: PurgeRequest
) -> PurgeAnswer:
    """Remove accounting data of old jobs.

    Steward removes jobs from jobs.db and days of the job log if they ended before the given
    time. It keeps archived scripts: 'steward archive erase' removes those.

    Raises:
        LogOperatorsOnly: The caller is not an operator.
        AccountingUsage: The time is not past; or, with ``keep_log``, sacct cannot read the jobs
            from the log.
        PurgeError: Only the daemon can do it.
    """
    _require_operator(context, asker, "remove accounting data")
    before = _parse_before(context, request, load_zone(request.zone))
    calendar = LogCalendar(context.settings.cluster)
    days = () if request.keep_log else list_log_days(locate_job_log(context.settings))
    purged = tuple(
        PurgedDay(day=day.day, length=day.length)
        for day in days
        if calendar.get_day_end(day.day) <= before
    )
    try:
        jobs = context.jobs.count_expirable_jobs(before)
    except SqliteMissing:
        jobs = 0  # before the first start there are none
    if request.yes:
        if context.order is None:
            raise PurgeError(
                "cannot remove accounting data without the daemon: start 'steward serve', "
                "and run the command there"
            )
        context.order(
            [
                _make_purge_event(context, asker, request, cluster, before)
                for cluster in context.clusters
            ]
        )
    return PurgeAnswer(done=request.yes, before=before, days=purged, jobs=jobs)


def _parse_before(context: AccountingContext, request: PurgeRequest, zone: tzinfo) -> datetime:
    """Parse the request's time, and check that it is past and sacct can still read the log."""
    before = parse_time(request.before, context.now(), zone)
    if before > context.now():
        raise AccountingUsage("`before` is in the future: give a past time", request.before)
    settings = context.settings.accounting
    if not request.keep_log:
        return before
    if LOG_TYPE not in parse_plugin_types(settings.type):
        raise AccountingUsage("no job log is configured: leave out `keep_log`")
    if (context.now() - before).days <= settings.close_after_days:
        raise AccountingUsage(
            "sacct reads closed days of the job log only, and days are closed after "
            f"{settings.close_after_days} days: give an earlier time",
            request.before,
        )
    return before


def _make_purge_event(
    context: AccountingContext,
    asker: Caller,
    request: PurgeRequest,
    cluster: str,
    before: datetime,
) -> Event:
    """Make the event that orders the purge on one cluster."""
    now = context.now()
    return Event(
        kind=ACCOUNTING_EXPIRE,
        cluster=cluster,
        key=f"purge:{time.time_ns()}",
        at=now,
        seen_at=now,
        source="purge",
        body=AccountingExpiry(before=before, asked_by=asker.signature, keep_log=request.keep_log),
    )


def _require_operator(context: AccountingContext, asker: Caller, task: str) -> None:
    """Raise LogOperatorsOnly unless the caller is an operator."""
    if not context.is_operator(asker):
        raise LogOperatorsOnly(f"permission denied: only operators may {task}", asker)
