"""Archive requests and replies: the Structs of ``archive.*``, with the lines that commands print.

Order: the common parts (:class:`JobSelection` of jobs, :class:`JobLine`, :class:`ScriptLine`,
:class:`RunLine`), then a request and a reply for each action; those of export and secrets are in
``export.py``. Streaming actions yield item Structs and end with a reply.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from steward.archive.contents import EncodedContent
from steward.core.actions import ActionMessage, Answer, Request, Zone, argument, described, option
from steward.core.layouts import Column, Layout, format_count, format_size, format_span, read_user
from steward.core.records import JobRecord
from steward.jobs.filters import (
    Accounts,
    Cluster,
    Clusters,
    JobId,
    Jobs,
    Names,
    Partitions,
    Since,
    States,
    Until,
    Users,
)

_Page = Annotated[
    str, described("``next`` of the previous reply to the same request; first page if empty.")
]
MAX_PAGE_ROWS: Final = 10_000
"""Maximum number of jobs in one reply."""
DEFAULT_DAYS_NOTE: Final = "Jobs of the last seven days; use -S for more."
"""Note of a reply with the default time span."""


class JobSelection(Request, frozen=True, kw_only=True):
    """Filters that select jobs. Every given filter must match; within a filter, any value."""

    clusters: Clusters = ()
    users: Users = ()
    accounts: Accounts = ()
    partitions: Partitions = ()
    jobs: Jobs = ()
    names: Names = ()
    states: States = ()
    since: Since = ""
    until: Until = ""
    zone: Zone = ""


class JobLine(ActionMessage, frozen=True, kw_only=True):
    """One job in a table.

    Attributes:
        cluster: Cluster on which it ran.
        job: Job id as Slurm writes it: 123, 123_7, 123_[1-9%2], 123+1.
        job_id: Raw job id.
        kind: ``batch`` (has or had a script), ``interactive`` (salloc, srun), "" if unknown.
        user: Owner's name at submit; "" if the uid never resolved.
        uid: Owner's uid; None until Slurm reports it.
        verified: Whether Slurm confirmed the identity; otherwise only the script's claims are
            known.
        submit: First submit time, or the script's time in the spool if that is unknown.
        exit_code: Exit code, 0 to 255.
        exit_signal: Signal that ended the job.
        restarts: Number of requeues.
        script_key: Key of the archived script; "" if there is none.
        script_bytes: Size of the archived script.
        script_hidden: Why script details are hidden: ``private``, the user may not read the script,
            if there is one; ``erased``, it was erased; "" otherwise.
        submit_line: Command line of sbatch, salloc or srun, if Slurm reports it and the user may
            read it.
    """

    cluster: str
    job: str
    job_id: int
    kind: Literal["batch", "interactive", ""] = ""
    name: str = ""
    user: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    state: str = ""
    verified: bool = False
    submit: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    restarts: int = 0
    script_key: str = ""
    script_bytes: int | None = None
    script_hidden: Literal["private", "erased", ""] = ""
    submit_line: str = ""


class ScriptLine(ActionMessage, frozen=True, kw_only=True):
    """Archived script and environment of a job: sizes, checksums and paths.

    Attributes:
        key: Key of the job.script event.
        job_id: Id of the spool entry: that of an array or of a het job's leader.
        spooled: The script's modification time in the scheduler's spool.
        length: Size of the script in bytes; None if it is not archived.
        sha256: SHA-256 of the script.
        environment_length: Size of the redacted environment in bytes; None if it is not archived.
        environment_sha256: SHA-256 of the redacted environment.
        redacted: Names of redacted variables.
        flags: Anomalies of the spool entry, see :class:`steward.core.events.JobScript`.
        path: Path of the script; shown to operators and its owner only.
        environment_path: Path of the environment; shown likewise.
    """

    key: str
    job_id: int
    spooled: datetime
    length: int | None = None
    sha256: str = ""
    environment_length: int | None = None
    environment_sha256: str = ""
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    path: str = ""
    environment_path: str = ""


class RunLine(ActionMessage, frozen=True, kw_only=True):
    """One run of a job; a requeue starts another."""

    restarts: int = 0
    state: str = ""
    submit: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    nodelist: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None


class JobListRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.list``: jobs, newest first."""

    limit: Annotated[
        int,
        option("Maximum number of jobs.", "--limit", "-L", source="rows", ge=1, le=MAX_PAGE_ROWS),
    ] = 1000
    page: _Page = ""


WIDEST_TEXT: Final = 40
"""Most characters shown of texts that users write; a long name would widen every line."""


def describe_job_state(job: JobLine, _: object = None) -> str:
    """Return a job's state; "(unverified)" if Slurm has not shown the job."""
    return job.state or ("" if job.verified else "(unverified)")


def format_exit_code(job: JobLine, _: object = None) -> str:
    """Return exit code and signal as sacct prints them; "" before the job ends."""
    if job.exit_code is None and job.exit_signal is None:
        return ""
    return f"{job.exit_code or 0}:{job.exit_signal or 0}"


def _read_script_size(job: JobLine, _: object) -> int | str:
    """Return the size of the archived script, or why there is none."""
    if job.script_key:
        return "kept" if job.script_bytes is None else job.script_bytes
    if job.script_hidden:
        return job.script_hidden
    if job.kind == "interactive":
        return f"none: {job.submit_line}" if job.submit_line else "none: interactive"
    return "none"


class JobListReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.list``, newest first.

    Attributes:
        jobs: The jobs.
        since: Start of the time span; None for all time.
        until: End of the time span; None for now.
        default_days: 7 if ``since`` is the default, else 0.
        next: Token of the next page; "" if there is none.
        zones: IANA name of the time zone of each cluster that the request covers; "" for the
            system's.
    """

    jobs: tuple[JobLine, ...]
    since: datetime | None = None
    until: datetime | None = None
    default_days: int = 0
    next: str = ""
    zones: dict[str, str] = msgspec.field(default_factory=dict)
    layout: ClassVar[Layout] = (
        Column("Cluster", "cluster", show=lambda reply: len(reply.zones) > 1),
        Column("JobID", "job", right=True),
        Column("JobName", "name", max_width=WIDEST_TEXT),
        Column("User", read_user),
        Column("Account", "account", show="requested"),
        Column("Partition", "partition"),
        Column("State", describe_job_state),
        Column("ExitCode", format_exit_code, show="requested"),
        Column("Submit", "submit", "time"),
        Column("Start", "start", "time", show="requested"),
        Column("End", "end", "time", show="requested"),
        Column("Restarts", "restarts", "count", show="requested"),
        Column(
            "Script",
            _read_script_size,
            "bytes",
            max_width=WIDEST_TEXT,
            right=False,
            exact="script_bytes",
        ),
        Column("Kind", "kind", show="requested"),
        Column("Verified", "verified", show="requested"),
        Column("SubmitLine", "submit_line", show="requested"),
    )
    page_fields: ClassVar[tuple[str, ...]] = ("next",)

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        last_week = "No jobs in the last seven days; use -S for more."
        return last_week if self.default_days else "No job matches."

    def list_notes(self) -> Iterable[str]:
        """Return the default time span if it applies."""
        if self.jobs and self.default_days:
            yield DEFAULT_DAYS_NOTE


class ShowRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.show``: one job and its script."""

    job: JobId
    cluster: Cluster = ""
    sbatch: Annotated[
        bool, option("Print a shell script that submits the job to Slurm again.", "--sbatch")
    ] = False


class ShowReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.show``.

    Attributes:
        job: The job; the newest one if its id was reused.
        record: Latest job record.
        runs: Runs, oldest first.
        script: The archived script; None if there is none.
        content: Content of the script.
        script_of: Job id that owns the script, if it differs from the job's: the array of a task,
            or the leader of a het component.
        others: Other jobs with the same id, newest first.
        sbatch: Shell script that resubmits the job; "" if not requested.
        zone: IANA name of the cluster's time zone; "" for the system's.
    """

    job: JobLine
    record: JobRecord | None = None
    runs: tuple[RunLine, ...] = ()
    script: ScriptLine | None = None
    content: EncodedContent | None = None
    script_of: str = ""
    others: tuple[JobLine, ...] = ()
    sbatch: str = ""
    zone: str = ""


class EnvironmentRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.env``: the environment of a job at submit."""

    job: JobId
    cluster: Cluster = ""
    names: Annotated[
        tuple[str, ...],
        argument(
            "Only these variables; * and ? match as in a shell.",
            "NAME…",
            default="all",
            has_commas=True,
        ),
    ] = ()


class EnvironmentVariable(ActionMessage, frozen=True, kw_only=True):
    """One environment variable.

    Attributes:
        name: Text before the first ``=``; undecodable bytes become escapes.
        value: Text after it.
        redacted: Whether the value is the redaction mark.
    """

    name: str
    value: EncodedContent
    redacted: bool = False


class EnvironmentReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.env``, redacted.

    Attributes:
        job: The job.
        variables: Variables, in the order of the spool file.
        redacted: Names of all redacted variables, requested or not.
        flags: Anomalies: ``environment-short``, ``environment-count``.
    """

    job: JobLine
    variables: tuple[EnvironmentVariable, ...] = ()
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class DiffRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.diff``: compare the scripts of two jobs."""

    left: Annotated[str, argument("Id of the first job.", "JOB")]
    right: Annotated[str, argument("Id of the second job.", "JOB")]
    cluster: Cluster = ""
    context: Annotated[
        int,
        option("Number of context lines.", "--unified", "-U", metavar="LINES", ge=0),
    ] = 3
    environments: Annotated[bool, option("Also compare the environments.", "--env")] = False


class DiffReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.diff``.

    Attributes:
        left: The first job.
        right: The second job.
        identical: Whether there is no difference.
        diff: Unified diff; empty if there is no difference.
    """

    left: JobLine
    right: JobLine
    identical: bool
    diff: EncodedContent
    failure_code: ClassVar[int] = 2

    @property
    def exit_code(self) -> int:
        """Exit code as of diff(1): 1 if there is a difference."""
        return 0 if self.identical else 1

    def list_notes(self) -> Iterable[str]:
        """Return that there is no difference."""
        if self.identical:
            yield f"The scripts of {self.left.job} and {self.right.job} are the same."


class SearchRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.search``: jobs by the text of their scripts."""

    terms: Annotated[
        tuple[str, ...],
        argument(
            "Texts, verbatim, blanks included; a script must contain all of them.",
            "TEXT…",
            has_commas=True,
        ),
    ]
    case: Annotated[bool, option("Distinguish upper and lower case.", "--case")] = False
    words: Annotated[bool, option("Match whole words only, as grep -w.", "--word", "-w")] = False
    count: Annotated[
        bool,
        option(
            "Also count all hits. Slower: the search reads every matching script.",
            "--count",
        ),
    ] = False
    limit: Annotated[
        int,
        option("Maximum number of hits.", "--limit", "-L", ge=1, le=MAX_PAGE_ROWS),
    ] = 50
    lines: Annotated[
        int, described("Maximum number of matching lines per script.", ge=0, le=1000)
    ] = 3
    page: _Page = ""
    sink: Annotated[
        str,
        option(
            "Sink to search instead of the catalog, by name or kind (elasticsearch, opensearch).",
            "--in",
            metavar="SINK",
        ),
    ] = ""


class HitLine(ActionMessage, frozen=True, kw_only=True):
    """Line of a script that contains a term.

    Attributes:
        number: Line number, from 1.
        text: The line, shortened around the first hit if it is long; undecodable bytes become
            U+FFFD.
        spans: Positions of terms in ``text``: start and end, in characters.
    """

    number: int
    text: str
    spans: tuple[tuple[int, int], ...] = ()


class SearchHit(ActionMessage, frozen=True, kw_only=True):
    """Job whose script contains all terms.

    Attributes:
        job: The job.
        lines: The first matching lines.
        more_lines: Number of further matching lines.
    """

    job: JobLine
    lines: tuple[HitLine, ...] = ()
    more_lines: int = 0


class SearchReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.search``, newest first.

    Attributes:
        hits: The hits.
        count: Number of all hits that the user may see; None if not requested.
        next: Token of the next page; "" if there is none.
        complete: False if the search stopped at its time limit: continue with ``next``.
        lag: Number of events that the catalog or the sink is behind; None if unknown.
        zones: IANA name of the time zone of each cluster that the request covers; "" for the
            system's.
    """

    hits: tuple[SearchHit, ...]
    count: int | None = None
    next: str = ""
    complete: bool = True
    lag: int | None = None
    zones: dict[str, str] = msgspec.field(default_factory=dict)
    layout: ClassVar[Layout] = (
        Column("Cluster", lambda hit, _: hit.job.cluster),
        Column("JobID", lambda hit, _: hit.job.job),
        Column("JobName", lambda hit, _: hit.job.name),
        Column("User", lambda hit, _: read_user(hit.job)),
        Column("Submit", lambda hit, _: hit.job.submit, "time"),
        Column("Line", lambda hit, _: str(hit.lines[0].number) if hit.lines else ""),
        Column("Text", lambda hit, _: hit.lines[0].text if hit.lines else ""),
    )
    page_fields: ClassVar[tuple[str, ...]] = ("next", "complete")

    def list_notes(self) -> Iterable[str]:
        """Return the number of hits, and whether index or search is incomplete."""
        if self.count is not None:
            yield f"{self.count} in all."
        elif not self.hits:
            yield "No script matches."
        if self.lag:
            yield f"{format_count(self.lag, 'event')} not indexed yet; try again in a moment."
        if not self.complete:
            yield "The search stopped at its time limit; narrow it with -u, -S or --limit."


class Progress(ActionMessage, frozen=True, kw_only=True, tag="progress", tag_field="item"):
    """Stream item of a long action: its progress.

    Attributes:
        done: Number of items done.
        total: Number of all items; None if unknown.
        what: Kind of item ("scripts").
    """

    done: int
    total: int | None = None
    what: str = "scripts"


class VerifyRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.verify``: recompute every checksum."""

    sink: Annotated[
        str, option("Only files of this sink.", "--sink", metavar="NAME", default="all sinks")
    ] = ""


class ProblemLine(ActionMessage, frozen=True, kw_only=True, tag="problem", tag_field="item"):
    """Stream item of a verification: one missing, changed, unknown or unreadable file.

    Attributes:
        sink: Name of the sink.
        problem: ``missing``, ``changed``, ``unknown`` (not in the database) or ``unreadable``.
        path: The file, relative to the sink's root.
        script_key: Key of the job.script event, if known.
        detail: Further details, one line.
    """

    sink: str
    problem: str
    path: str
    script_key: str = ""
    detail: str = ""


class VerifyReply(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """Final reply of ``archive.verify``.

    Attributes:
        files: Number of files read.
        total_bytes: Total size of the files.
        problems: Number of problems.
    """

    files: int
    total_bytes: int
    problems: int
    layouts: ClassVar[Mapping[str, Layout]] = {
        "problems": (
            Column("Problem", "problem"),
            Column("Sink", "sink", show="requested"),
            Column("Path", "path"),
            Column("Detail", "detail"),
        )
    }

    @property
    def exit_code(self) -> int:
        """Exit code 1 if there is a problem."""
        return 1 if self.problems else 0

    def list_notes(self) -> Iterable[str]:
        """Return the number of files, their size and the number of problems."""
        outcome = f"{format_count(self.problems, 'problem')}." if self.problems else "no problems."
        yield (
            f"{format_count(self.files, 'file')}, {format_size(self.total_bytes)} bytes: {outcome}"
        )


class ReindexRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.reindex``: rebuild the catalog from files only."""

    sink: Annotated[
        str,
        option("Files sink to read.", "--sink", metavar="NAME", default="the first files sink"),
    ] = ""


class ReindexReply(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """Final reply of ``archive.reindex``.

    Attributes:
        scripts: Number of scripts in the new catalog.
        distinct: Number of distinct scripts, counted by month.
        months: Months with scripts ("2026-11").
        unreadable: Number of unreadable scripts, which are missing from the catalog.
    """

    scripts: int
    distinct: int
    months: tuple[str, ...]
    unreadable: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code 1 if the catalog lacks a script."""
        return 1 if self.unreadable else 0

    def list_lines(self) -> Iterable[str]:
        """Return the number of scripts."""
        scripts = format_count(self.scripts, "script")
        yield f"Indexed {scripts}, {self.distinct} of them distinct."

    def list_warnings(self) -> Iterable[str]:
        """Return the number of scripts that the catalog lacks."""
        if self.unreadable:
            yield f"cannot read {format_count(self.unreadable, 'script')}: no complete catalog"


class EraseRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.erase``: remove scripts and environments from sinks and the catalog."""

    sink: Annotated[
        str,
        option(
            "Erase from this sink only.",
            "--sink",
            metavar="NAME",
            default="every sink, the catalog and jobs.db",
        ),
    ] = ""
    reason: Annotated[
        str, option("Reason, recorded in the journal.", "--reason", metavar="TEXT")
    ] = ""
    yes: Annotated[bool, option("Erase the scripts. Otherwise only list them.", "--yes")] = False


class ErasedScript(ActionMessage, frozen=True, kw_only=True):
    """One script that is or would be erased."""

    job: JobLine
    script: ScriptLine


JOB_COLUMNS: Final[Layout] = (
    Column("Cluster", lambda line, _: line.job.cluster, show="requested"),
    Column("JobID", lambda line, _: line.job.job, right=True),
    Column("JobName", lambda line, _: line.job.name, max_width=WIDEST_TEXT),
    Column("User", lambda line, _: read_user(line.job)),
)
"""Columns of rows about a job: the row's attribute ``job``."""


class EraseReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.erase``: the scripts that are or would be erased.

    Attributes:
        done: Whether the removal was ordered; False for a dry run.
        scripts: The scripts. A script shared by jobs (an array's tasks) is listed once.
        total_bytes: Total size of scripts and environments.
        sinks: Sinks that will remove them; unavailable ones do so later.
    """

    done: bool
    scripts: tuple[ErasedScript, ...] = ()
    total_bytes: int = 0
    sinks: tuple[str, ...] = ()
    layout: ClassVar[Layout] = (
        *JOB_COLUMNS,
        Column("Bytes", lambda line, _: line.script.length or 0, "count"),
        Column("Path", lambda line, _: line.script.path),
    )

    @property
    def exit_code(self) -> int:
        """1 if no script matches."""
        return 0 if self.scripts else 1

    @property
    def summary(self) -> str:
        """Number of scripts, their size, and the sinks."""
        scripts = format_count(len(self.scripts), "script")
        sinks = f", from {', '.join(self.sinks)}" if self.sinks else ""
        return f"{scripts}, {format_size(self.total_bytes)} bytes{sinks}"

    def list_lines(self) -> Iterable[str]:
        """Return the summary of the removal."""
        return (f"Erased: {self.summary}.",) if self.done and self.scripts else ()

    def list_warnings(self) -> Iterable[str]:
        """Return that nothing was removed, also in a pipe, so that a dry run is recognized."""
        if not self.scripts:
            yield "no archived script matches: nothing erased"
        elif not self.done:
            yield f"nothing erased yet: --yes erases {self.summary}"


SinkState = Literal["running", "waiting", "detached", "new", "removed"]
"""State of a sink, see :class:`SinkLine`."""


class SinksRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.sinks``: state and backlog of each sink."""


class SinkLine(ActionMessage, frozen=True, kw_only=True):
    """State and backlog of a sink.

    Attributes:
        name: Sink name.
        kind: ``files``, ``elasticsearch``, ``opensearch`` or ``kafka``; "" if it is no longer
            configured.
        state: ``running``; ``waiting``, something it needs is unavailable; ``detached``, the
            journal no longer waits for it; ``new``, it has not run yet; ``removed``, no longer
            configured although the journal waits for it (``steward journal forget``).
        detail: Reason for waiting.
        position: Position up to which the journal may drop events.
        backlog: Number of scripts to archive, for the first time or again.
        lag: Number of events to apply, corrections and purges included.
        oldest_s: Age of the oldest of these, in seconds; None if there are none.
        error: Last error, even if the sink has recovered.
        error_at: Time of that error.
        rate: Events applied per second over the last minute; each script of a resend or purge
            counts.
        dead_letters: Number of dead letters.
        missed: Number of events missed while detached.
        refill: Command that makes up for the missed events; "" if there are none.
    """

    name: str
    kind: str
    state: SinkState
    detail: str = ""
    position: int = 0
    backlog: int = 0
    lag: int = 0
    oldest_s: float | None = None
    error: str = ""
    error_at: datetime | None = None
    rate: float = 0.0
    dead_letters: int = 0
    missed: int = 0
    refill: str = ""


def _format_age(seconds: float | None) -> str:
    """Format a duration as Slurm writes elapsed times: ``03:07``, ``1-02:03:04``; "" for None."""
    return "" if seconds is None else format_span(int(seconds)).removeprefix("00:")


class SinksReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.sinks``, configured sinks first."""

    sinks: tuple[SinkLine, ...] = ()
    layout: ClassVar[Layout] = (
        Column("Sink", "name"),
        Column("Kind", "kind"),
        Column("State", "state", "state"),
        Column("Position", "position", "count", show="requested"),
        Column("Backlog", "backlog", "count"),
        Column("Lag", "lag", "count", show="requested"),
        Column(
            "Oldest",
            lambda line, _: _format_age(line.oldest_s),
            title="Age of the oldest",
            right=True,
            exact=lambda line, _: None if line.oldest_s is None else f"{line.oldest_s:.0f}",
        ),
        Column("Rate", "rate", "decimal", title="Events per second"),
        Column("DeadLetters", "dead_letters", "count", title="Dead letters"),
        Column("Missed", "missed", "count", show="requested"),
        Column("ErrorAt", "error_at", "time", title="Time of the last error"),
        Column("LastError", "error", "prose", title="Last error"),
    )

    def list_notes(self) -> Iterable[str]:
        """Return the commands that make up for missed events and list dead letters."""
        for line in self.sinks:
            if line.refill:
                missed = format_count(line.missed, "event")
                yield f"{line.name} missed {missed} while it was detached: {line.refill}"
            if line.dead_letters:
                yield f"'steward journal dead archive.{line.name}' lists its dead letters."


class ResendRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.resend``: archive scripts again."""

    sink: Annotated[str, option("Sink to archive the scripts in.", "--sink", metavar="NAME")]
    missing: Annotated[
        bool,
        option(
            "Only scripts that the sink lacks. For remote sinks, Steward knows this only for "
            "the last two weeks.",
            "--missing",
        ),
    ] = False


class ResendReply(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """Final reply of ``archive.resend``; the sink archives the scripts later.

    Attributes:
        sink: Sink name.
        scripts: Number of scripts to archive again.
        total_bytes: Total size of scripts and environments.
        present: Number of scripts left out because the sink has them.
    """

    sink: str
    scripts: int
    total_bytes: int
    present: int = 0

    def list_lines(self) -> Iterable[str]:
        """Return the number of scripts and their size."""
        present = f"; it has {self.present} already" if self.present else ""
        scripts, size = format_count(self.scripts, "script"), format_size(self.total_bytes)
        yield f"Sink {self.sink} archives {scripts} again, {size} bytes{present}."

    def list_notes(self) -> Iterable[str]:
        """Return the command that shows the sink's progress."""
        yield "'steward archive sinks' shows the progress."
