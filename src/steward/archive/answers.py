"""The shapes of what the archive can be asked about jobs and of what it answers.

These Structs are what goes over the socket and what ``--json`` prints, so they
are a promise to other people's programs: fields are only ever added, with
defaults. A change of meaning raises the answer's ``version``. Times are UTC in
ISO 8601 with an offset, sizes bytes, durations seconds.
"""

from datetime import datetime

import msgspec

from steward.archive.messages import Content
from steward.archive.shapes import JobLine, RunLine, ScriptLine, Selection
from steward.core.actions import Answer, Request, Shape
from steward.core.records import JobRecord

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
