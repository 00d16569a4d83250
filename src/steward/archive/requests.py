"""Archive requests and replies: the Structs of ``archive.*``, from list and search to purge.

Order: the common parts (:class:`JobSelection` of jobs, :class:`JobLine`, :class:`ScriptLine`,
:class:`RunLine`), then a request and a reply for each action. Streaming actions yield item Structs
and end with a reply. Fields are only ever added, with defaults, so that older clients keep working.
"""

from datetime import datetime
from typing import ClassVar, Final, Literal

import msgspec

from steward.archive.contents import EncodedContent
from steward.core.actions import ActionMessage, Answer, Request
from steward.core.layouts import Column, Layout, read_user
from steward.core.records import JobRecord


class JobSelection(Request, frozen=True, kw_only=True):
    """Filters that select jobs. Every given filter must match; within a filter, any value.

    Attributes:
        clusters: Cluster names. Default: all.
        users: User names or uids.
        accounts: Account names.
        partitions: Partition names.
        jobs: Job ids as Slurm writes them: 123, 123_7, 123+1.
        names: Job names; ``*``, ``?`` and ``[…]`` as in a shell.
        states: Job states, long or short (FAILED, F).
        since: Earliest submit time, in the syntax of Slurm's commands (``now-1day``,
            ``2026-11-21T08:00``). Default: the last seven days, or all time if ``jobs`` is given.
        until: Latest submit time, exclusive. Default: now.
        zone: IANA name of the zone of times without one. Default: the cluster's.
    """

    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    zone: str = ""


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
            if there is one; ``purged``, it was purged; "" otherwise.
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
    script_hidden: Literal["private", "purged", ""] = ""
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


# ---------------------------------------------------------------- list


class JobListRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.list``: jobs, newest first.

    Attributes:
        limit: Maximum number of jobs.
        page: ``next`` of the previous reply, with the same filters; "" for the first page.
    """

    limit: int = 1000
    page: str = ""


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
        zones: IANA name of each cluster's time zone; "" for the system's.
    """

    jobs: tuple[JobLine, ...]
    since: datetime | None = None
    until: datetime | None = None
    default_days: int = 0
    next: str = ""
    zones: dict[str, str] = msgspec.field(default_factory=dict)
    layout: ClassVar[Layout] = (
        Column("Cluster", "cluster", show="several"),
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


# ---------------------------------------------------------------- show, env, diff


class ShowRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.show``: one job and its script.

    Attributes:
        job: Job id as Slurm writes it.
        cluster: Cluster name; "" if only one cluster has such a job.
        sbatch: Whether to add a shell script that resubmits the job.
    """

    job: str
    cluster: str = ""
    sbatch: bool = False


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
    """Request of ``archive.env``: the environment of a job at submit.

    Attributes:
        job: Job id as Slurm writes it.
        cluster: Cluster name; "" if only one cluster has such a job.
        names: Variable names, with ``*`` and ``?`` as in a shell. Default: all.
    """

    job: str
    cluster: str = ""
    names: tuple[str, ...] = ()


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
    """Request of ``archive.diff``: compare the scripts of two jobs.

    Attributes:
        left: Id of the first job.
        right: Id of the second job.
        cluster: Cluster of both; "" if only one cluster has such jobs.
        context: Number of equal lines around a difference.
        environments: Whether to compare environments, too.
    """

    left: str
    right: str
    cluster: str = ""
    context: int = 3
    environments: bool = False


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


# ---------------------------------------------------------------- search


class SearchRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.search``: jobs by the text of their scripts.

    Attributes:
        terms: Texts that must all occur, verbatim, blanks included.
        case: Whether the search is case-sensitive.
        words: Whether a term must match whole words.
        count: Whether to count all hits, which reads every matching script.
        limit: Maximum number of hits.
        lines: Maximum number of matching lines per script.
        page: ``next`` of the previous reply, with the same request; "" for the first page.
        sink: Sink to search, by name or kind; "" for the catalog.
        since: As in :class:`JobSelection`, but the default is all time.
    """

    terms: tuple[str, ...]
    case: bool = False
    words: bool = False
    count: bool = False
    limit: int = 50
    lines: int = 3
    page: str = ""
    sink: str = ""


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
        behind: Number of events that the catalog or the sink is behind; None if unknown.
        zones: IANA name of each cluster's time zone; "" for the system's.
    """

    hits: tuple[SearchHit, ...]
    count: int | None = None
    next: str = ""
    complete: bool = True
    behind: int | None = None
    zones: dict[str, str] = msgspec.field(default_factory=dict)


# ---------------------------------------------------------------- export


class ExportRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.export``: the files of the selected jobs, as a stream.

    Attributes:
        environments: Whether to export environments, too.
        limit: Maximum number of jobs; 0 for all.
    """

    environments: bool = True
    limit: int = 0


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


# ---------------------------------------------------------------- verify, reindex


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
    """Request of ``archive.verify``: recompute every checksum.

    Attributes:
        sink: Sink name. Default: every files sink.
    """

    sink: str = ""


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


class ReindexRequest(Request, frozen=True, kw_only=True):
    """Request of ``archive.reindex``: rebuild the catalog from files only.

    Attributes:
        sink: Sink whose files are read. Default: the first files sink.
    """

    sink: str = ""


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


# ---------------------------------------------------------------- purge, secrets


class PurgeRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.purge``: remove scripts and environments from sinks and the catalog.

    ``jobs`` or ``users`` is required; the default of ``since`` is all time.

    Attributes:
        sink: Single sink to purge. Default: every sink, the catalog and jobs.db.
        reason: Reason, stored in the event.
        yes: Whether to purge; otherwise the reply lists what would be purged.
    """

    sink: str = ""
    reason: str = ""
    yes: bool = False


class PurgeLine(ActionMessage, frozen=True, kw_only=True):
    """One script that is or would be purged."""

    job: JobLine
    script: ScriptLine


class PurgeReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.purge``: the scripts that are or would be purged.

    Attributes:
        done: Whether the purge was ordered; False for a dry run.
        scripts: The scripts. A script shared by jobs (an array's tasks) is listed once.
        total_bytes: Total size of scripts and environments.
        sinks: Sinks that will remove them; unavailable ones do so later.
    """

    done: bool
    scripts: tuple[PurgeLine, ...] = ()
    total_bytes: int = 0
    sinks: tuple[str, ...] = ()


class SecretsRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.secrets``: find credentials in scripts.

    Attributes:
        limit: Maximum number of scripts to scan, newest first; 0 for all selected.
    """

    limit: int = 0


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
        behind: Number of events to apply, corrections and purges included.
        oldest_s: Age of the oldest of these, in seconds; None if there are none.
        error: Last error, even if the sink has recovered.
        error_at: Time of that error.
        rate: Events applied per second over the last minute; each script of a resend or purge
            counts.
        set_aside: Number of dead letters.
        missed: Number of events missed while detached.
        refill: Command that makes up for the missed events; "" if there are none.
    """

    name: str
    kind: str
    state: SinkState
    detail: str = ""
    position: int = 0
    backlog: int = 0
    behind: int = 0
    oldest_s: float | None = None
    error: str = ""
    error_at: datetime | None = None
    rate: float = 0.0
    set_aside: int = 0
    missed: int = 0
    refill: str = ""


class SinksReply(Answer, frozen=True, kw_only=True):
    """Reply of ``archive.sinks``, configured sinks first."""

    sinks: tuple[SinkLine, ...] = ()


class ResendRequest(JobSelection, frozen=True, kw_only=True):
    """Request of ``archive.resend``: archive scripts again; the default of ``since`` is all time.

    Attributes:
        sink: Sink name.
        missing: Only scripts that the sink lacks, as far as is known here. Of a remote sink, only
            the scripts sent in the last days are known.
    """

    sink: str
    missing: bool = False


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
