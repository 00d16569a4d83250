"""The nouns of the archive's requests and answers: which jobs, one job, one script, some bytes.

They are part of every shape in ``answers.py`` and ``bulk_answers.py``, and of
the same promise: fields are only ever added, with defaults.
"""

from datetime import datetime
from typing import Literal

import msgspec

from steward.archive.messages import Content
from steward.core.actions import Answer, Request, Shape
from steward.core.records import JobRecord


class Selection(Request, frozen=True, kw_only=True):
    """Which jobs are meant. Every filter that is given must hold; of its values, any.

    Attributes:
        clusters: Names of clusters; all of them if empty.
        users: User names or uids.
        accounts: Account names.
        partitions: Partition names.
        jobs: Job ids as Slurm writes them: 123, 123_7, 123+1.
        names: Job names; ``*``, ``?`` and ``[…]`` as a shell has them.
        states: Job states, in full or short (FAILED, F).
        since: Submitted at this time or later, as Slurm's commands take times
            (``now-1day``, ``2026-11-21T08:00``); "" for the last seven days, or for
            all time where ``jobs`` is given.
        until: Submitted before this time; "" for now.
        zone: IANA name of the zone that times without one are meant in; "" for the cluster's.
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


class JobLine(Shape, frozen=True, kw_only=True):
    """One job, as a table shows it.

    Attributes:
        cluster: Where it ran.
        job: Its id as Slurm writes it: 123, 123_7, 123_[1-9%2], 123+1.
        job_id: Its raw id.
        kind: ``batch`` (has or had a script), ``interactive`` (salloc, srun), "" if unknown.
        user: Its owner's name at submit; "" where the uid never resolved.
        uid: Its owner; None while Slurm has not said.
        verified: Whether identity came from Slurm; without it only the script's own
            claims are known.
        submit: First submit time; the script's time in the spool where no other is known.
        exit_code: What it returned, 0 to 255.
        exit_signal: The signal that ended it.
        restarts: How often it was requeued.
        script_key: Key of its kept script; "" where none is kept.
        script_bytes: Size of the kept script.
        script_hidden: Why nothing is told of a script: ``private``, the asker may not read
            it, if there is one; ``purged``, there was one; "" otherwise.
        submit_line: The command line of sbatch, salloc or srun, where Slurm gives it and
            the asker may read it.
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


class ScriptLine(Shape, frozen=True, kw_only=True):
    """What is kept of a job's script and environment.

    Attributes:
        key: Key of the job.script event.
        job_id: The spool entry's id: an array's or a het job's leader.
        spooled: The script's modification time in the scheduler's spool.
        length: Of the script in bytes; None where it is not kept.
        sha256: Of the script.
        environment_length: Of the environment in bytes, redacted; None where it is not kept.
        environment_sha256: Of the redacted environment.
        redacted: Names of the variables whose values were redacted.
        flags: What was odd about the spool entry, see :class:`steward.core.events.JobScript`.
        path: Where the script lies; only operators and its owner are told.
        environment_path: Where the environment lies, likewise.
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


class RunLine(Shape, frozen=True, kw_only=True):
    """One run of a job: a requeue makes another."""

    restarts: int = 0
    state: str = ""
    submit: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    nodelist: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None


# ---------------------------------------------------------------- list


class ListRequest(Selection, frozen=True, kw_only=True):
    """archive.list: jobs, newest first.

    Attributes:
        limit: How many at most.
        page: ``next`` of the answer before, with the same filters; "" for the first page.
    """

    limit: int = 1000
    page: str = ""


class ListAnswer(Answer, frozen=True, kw_only=True):
    """Jobs, newest first.

    Attributes:
        jobs: The jobs.
        since: The beginning of the time looked at; None for all time.
        until: Its end; None for now.
        default_days: 7 where ``since`` was not asked for but is the default, else 0.
        next: Give this as ``page`` for what follows; "" where nothing does.
        zones: For each cluster the IANA name of its time zone; "" for the system's.
    """

    jobs: tuple[JobLine, ...]
    since: datetime | None = None
    until: datetime | None = None
    default_days: int = 0
    next: str = ""
    zones: dict[str, str] = msgspec.field(default_factory=dict)


# ---------------------------------------------------------------- show, env, diff


class ShowRequest(Request, frozen=True, kw_only=True):
    """archive.show: one job and its script.

    Attributes:
        job: Its id as Slurm writes it.
        cluster: Its cluster; "" where only one has such a job.
        sbatch: Whether to add what would submit it again.
    """

    job: str
    cluster: str = ""
    sbatch: bool = False


class ShowAnswer(Answer, frozen=True, kw_only=True):
    """One job and its script.

    Attributes:
        job: The job; of a re-used id the newest.
        record: The latest that Slurm showed of it.
        runs: Its runs, oldest first.
        script: What is kept of its script; None where nothing is.
        content: The script itself.
        script_of: The id that the script belongs to, where it is another than the job's
            own: of an array task its array, of a het component its leader.
        others: Other jobs that have had the same id, newest first.
        sbatch: A shell script that submits it again; "" where it was not asked for.
        zone: IANA name of the cluster's time zone; "" for the system's.
    """

    job: JobLine
    record: JobRecord | None = None
    runs: tuple[RunLine, ...] = ()
    script: ScriptLine | None = None
    content: Content | None = None
    script_of: str = ""
    others: tuple[JobLine, ...] = ()
    sbatch: str = ""
    zone: str = ""


class EnvRequest(Request, frozen=True, kw_only=True):
    """archive.env: the environment that a job was submitted with.

    Attributes:
        job: The job's id as Slurm writes it.
        cluster: Its cluster; "" where only one has such a job.
        names: Only these variables; ``*`` and ``?`` as a shell has them; all if empty.
    """

    job: str
    cluster: str = ""
    names: tuple[str, ...] = ()


class Variable(Shape, frozen=True, kw_only=True):
    """One variable of an environment.

    Attributes:
        name: What stands before the first ``=``; undecodable bytes as an escape.
        value: What stands behind it.
        redacted: Whether the value is not the job's own but says that it was redacted.
    """

    name: str
    value: Content
    redacted: bool = False


class EnvAnswer(Answer, frozen=True, kw_only=True):
    """The environment that a job was submitted with, redacted.

    Attributes:
        job: The job.
        variables: In the order in which the scheduler kept them.
        redacted: Names of all variables that were redacted, asked for or not.
        flags: What was odd: ``environment-short``, ``environment-count``.
    """

    job: JobLine
    variables: tuple[Variable, ...] = ()
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class DiffRequest(Request, frozen=True, kw_only=True):
    """archive.diff: what differs between two jobs' scripts.

    Attributes:
        left: A job's id.
        right: Another's.
        cluster: The cluster of both; "" where only one has such jobs.
        context: How many equal lines to show around a difference.
        environments: Compare the environments too.
    """

    left: str
    right: str
    cluster: str = ""
    context: int = 3
    environments: bool = False


class DiffAnswer(Answer, frozen=True, kw_only=True):
    """What differs between two jobs' scripts.

    Attributes:
        left: The first job.
        right: The second.
        identical: Whether nothing differs.
        diff: A unified diff, empty where nothing differs.
    """

    left: JobLine
    right: JobLine
    identical: bool
    diff: Content


# ---------------------------------------------------------------- search


class SearchRequest(Selection, frozen=True, kw_only=True):
    """archive.search: scripts by what is in them.

    Attributes:
        terms: Texts that must all occur, each as it is written, blanks included.
        case: Whether upper and lower case differ.
        words: Whether a term must stand as whole words.
        count: Whether to count all hits, which looks at every one of them.
        limit: How many hits at most.
        lines: How many matching lines to show of each script.
        page: ``next`` of the answer before, with the same request; "" for the first page.
        sink: The sink to search in, by name or kind; "" for the catalogue.
        since: As for :class:`Selection`, but "" means all time.
    """

    terms: tuple[str, ...]
    case: bool = False
    words: bool = False
    count: bool = False
    limit: int = 50
    lines: int = 3
    page: str = ""
    sink: str = ""


class HitLine(Shape, frozen=True, kw_only=True):
    """A line of a script in which a term stands.

    Attributes:
        number: Of the line, from 1.
        text: The line, shortened around the first hit if it is long; undecodable bytes
            as U+FFFD.
        spans: Where terms stand in ``text``: beginning and end, in characters.
    """

    number: int
    text: str
    spans: tuple[tuple[int, int], ...] = ()


class Hit(Shape, frozen=True, kw_only=True):
    """A job in whose script all terms stand.

    Attributes:
        job: The job.
        lines: The first lines with a hit.
        more_lines: How many further lines have one.
    """

    job: JobLine
    lines: tuple[HitLine, ...] = ()
    more_lines: int = 0


class SearchAnswer(Answer, frozen=True, kw_only=True):
    """Jobs in whose scripts all terms stand, newest first.

    Attributes:
        hits: The jobs.
        count: How many there are in all that the asker may see; None if not asked for.
        next: Give this as ``page`` for what follows; "" where nothing does.
        complete: False where looking took too long and stopped: ``next`` goes on.
        behind: How many events the catalogue, or the sink, has still to look at; None if
            that is not known.
        zones: For each cluster the IANA name of its time zone; "" for the system's.
    """

    hits: tuple[Hit, ...]
    count: int | None = None
    next: str = ""
    complete: bool = True
    behind: int | None = None
    zones: dict[str, str] = msgspec.field(default_factory=dict)


# ---------------------------------------------------------------- export


class ExportRequest(Selection, frozen=True, kw_only=True):
    """archive.export: the files of the selected jobs, as a stream.

    Attributes:
        environments: Whether environments are exported too.
        limit: How many jobs at most; 0 for all.
    """

    environments: bool = True
    limit: int = 0


class ExportFile(Shape, frozen=True, kw_only=True, tag="file", tag_field="item"):
    """One file of an export.

    Attributes:
        path: Relative, safe: ``cluster/user/jobid-….sh``; unique within the export.
        data: Its bytes; base64 in JSON.
        modified: The script's time in the spool.
        job: Whose it is.
        script_key: Key of the job.script event.
        sha256: Of the bytes.
    """

    path: str
    data: bytes
    modified: datetime
    job: JobLine
    script_key: str
    sha256: str


class ExportAnswer(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """The end of an export.

    Attributes:
        jobs: How many jobs were exported.
        files: How many files.
        total_bytes: Their size together.
        unreadable: Jobs whose bytes could not be read, and why.
    """

    jobs: int
    files: int
    total_bytes: int
    unreadable: tuple[str, ...] = ()


# ---------------------------------------------------------------- verify, reindex


class Progress(Shape, frozen=True, kw_only=True, tag="progress", tag_field="item"):
    """How far long work has come.

    Attributes:
        done: How many are done.
        total: Of how many; None where that is not known.
        what: Of what ("scripts").
    """

    done: int
    total: int | None = None
    what: str = "scripts"


class VerifyRequest(Request, frozen=True, kw_only=True):
    """archive.verify: recompute every checksum.

    Attributes:
        sink: Name of the sink; "" for every sink of files.
    """

    sink: str = ""


class ProblemLine(Shape, frozen=True, kw_only=True, tag="problem", tag_field="item"):
    """A file that is not as it was kept.

    Attributes:
        sink: Name of the sink.
        problem: ``missing``, ``changed``, ``unknown`` (nobody knows of the file) or
            ``unreadable``.
        path: The file, relative to the sink's root.
        script_key: Of the job.script event, where it is known.
        detail: One line more.
    """

    sink: str
    problem: str
    path: str
    script_key: str = ""
    detail: str = ""


class VerifyAnswer(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """The end of a verification.

    Attributes:
        files: How many files were read.
        total_bytes: Their size together.
        problems: How many are not as they were kept.
    """

    files: int
    total_bytes: int
    problems: int


class ReindexRequest(Request, frozen=True, kw_only=True):
    """archive.reindex: make the catalogue again from the files alone.

    Attributes:
        sink: The sink whose files are read; "" for the first one of files.
    """

    sink: str = ""


class ReindexAnswer(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """The end of a reindexing.

    Attributes:
        scripts: How many scripts are in the catalogue now.
        distinct: How many different ones, counted by month.
        months: The months that they are from ("2026-11").
        unreadable: How many could not be read and are not in it.
    """

    scripts: int
    distinct: int
    months: tuple[str, ...]
    unreadable: int = 0


# ---------------------------------------------------------------- purge, secrets


class PurgeRequest(Selection, frozen=True, kw_only=True):
    """archive.purge: forget scripts and environments in every sink and in the catalogue.

    At least one of ``jobs`` and ``users`` must be given; ``since`` "" means all time.

    Attributes:
        sink: The one sink to remove from; "" for every sink, catalogue and jobs.db.
        reason: Kept with the order to purge.
        yes: Do it; without it the answer says what would be done.
    """

    sink: str = ""
    reason: str = ""
    yes: bool = False


class PurgeLine(Shape, frozen=True, kw_only=True):
    """One script that is, or would be, purged."""

    job: JobLine
    script: ScriptLine


class PurgeAnswer(Answer, frozen=True, kw_only=True):
    """What is, or would be, purged.

    Attributes:
        done: Whether it was ordered; False for a dry run.
        scripts: The scripts. Jobs of one script (an array's tasks) are named once.
        total_bytes: Size of scripts and environments together.
        sinks: The sinks that they leave, in time also those that are away now.
    """

    done: bool
    scripts: tuple[PurgeLine, ...] = ()
    total_bytes: int = 0
    sinks: tuple[str, ...] = ()


class SecretsRequest(Selection, frozen=True, kw_only=True):
    """archive.secrets: scripts that look to hold a credential.

    Attributes:
        limit: How many scripts to look at, newest first; 0 for all that are selected.
    """

    limit: int = 0


class SecretLine(Shape, frozen=True, kw_only=True, tag="secret", tag_field="item"):
    """A place in a script that looks like a credential; the credential is not told.

    Attributes:
        job: Whose script it is.
        line: Number of the line, from 1.
        kind: What it looks like, by the name of the pattern.
    """

    job: JobLine
    line: int
    kind: str


class SecretsAnswer(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """The end of a look for credentials.

    Attributes:
        scripts: How many scripts were looked at.
        suspicious: How many of them look to hold one.
        since: The beginning of the time looked at; None for all time.
        default_days: 7 where ``since`` was not asked for but is the default, else 0.
        unreadable: How many could not be read, and so were not looked at.
    """

    scripts: int
    suspicious: int
    since: datetime | None = None
    default_days: int = 0
    unreadable: int = 0


State = Literal["running", "waiting", "detached", "new", "removed"]
"""How a sink is, see :class:`SinkLine`."""


class SinksRequest(Request, frozen=True, kw_only=True):
    """archive.sinks: how each sink stands."""


class SinkLine(Shape, frozen=True, kw_only=True):
    """How a sink stands.

    Attributes:
        name: Its name.
        kind: ``files``, ``elasticsearch``, ``opensearch`` or ``kafka``; "" where it is
            configured no more.
        state: ``running``; ``waiting``, something that it needs is away; ``detached``, the
            journal waits for it no more; ``new``, it has not run yet; ``removed``, it is
            configured no more but the journal waits for it (``steward journal forget``).
        detail: Why it waits.
        position: The last event that the journal need not keep for it.
        backlog: How many scripts it has still to archive, for the first time or again.
        behind: How many events it has still to put to use: corrections and purges, too.
        oldest_s: Age of the oldest of these, in seconds; None for none.
        error: What went wrong last, also where it went on since.
        error_at: When that was.
        rate: How many events a second it put to use over the last minute; each script of an
            order to send or to purge counts.
        set_aside: How many events were set aside for it.
        missed: How many events it missed while it was detached.
        refill: The command that makes up for them; "" where it missed none.
    """

    name: str
    kind: str
    state: State
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


class SinksAnswer(Answer, frozen=True, kw_only=True):
    """How each sink stands, those that are configured first."""

    sinks: tuple[SinkLine, ...] = ()


class ResendRequest(Selection, frozen=True, kw_only=True):
    """archive.resend: have a sink archive scripts again; ``since`` "" means all time.

    Attributes:
        sink: The sink's name.
        missing: Only what it does not have, as far as that is known here. Of a sink on
            another machine only what it was sent in the last days is known.
    """

    sink: str
    missing: bool = False


class ResendAnswer(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """The end of an order to archive scripts again: the sink does it in its own time.

    Attributes:
        sink: The sink's name.
        scripts: How many scripts it will archive again.
        total_bytes: Size of scripts and environments together.
        present: How many were left out because it has them.
    """

    sink: str
    scripts: int
    total_bytes: int
    present: int = 0
