"""The shapes of the archive's long work: export, verify, reindex, purge, secrets.

The same promise as in ``answers.py``. Most of it comes as a stream: items, each
with its kind under ``item``, and one answer at the end.
"""

from datetime import datetime

from steward.archive.shapes import JobLine, ScriptLine, Selection
from steward.core.actions import Answer, Request, Shape

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
