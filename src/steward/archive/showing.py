"""The actions on one job or two: show, env, diff."""

import difflib
import fnmatch
import re

from steward.archive.answers import (
    DiffAnswer,
    DiffRequest,
    EnvAnswer,
    EnvRequest,
    ShowAnswer,
    ShowRequest,
    Variable,
)
from steward.archive.errors import NotArchived
from steward.archive.library import Library, run_line
from steward.archive.messages import Content
from steward.archive.resubmitting import submit_again
from steward.core.access import Asker
from steward.core.errors import UsageError
from steward.core.redaction import REDACTED
from steward.jobs import Job, Script, parse
from steward.slurm.environment import entries_of

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_MOST_CONTEXT = 1000


def show(library: Library, asker: Asker, request: ShowRequest) -> ShowAnswer:
    """One job and its script.

    Raises:
        NoSuchJob, NotYours: See :meth:`Library.find`.
        NotArchived: What would submit it again was asked for, and no script is kept.
        UsageError: It was asked for, and the job is not Slurm's.
    """
    with library.jobs.snapshot():
        job, others = library.find(asker, request.job, request.cluster)
        script = library.jobs.script_of(job)
        runs = library.jobs.runs_of(job)
        tasks = _tasks_meant(library, job, request.job)
    has_bytes = script is not None and script.body.script is not None
    data = library.content(script, "script") if script is not None and has_bytes else None
    if request.sbatch and data is None:
        raise _without_script(job)
    if request.sbatch and library.scheduler(job.cluster) != "slurm":
        raise UsageError(
            f"job {job.label} of cluster {job.cluster} is not Slurm's, so no sbatch submits it "
            f"again: 'steward archive show {job.label} --script' prints its script",
            job,
        )
    sbatch = ""
    if request.sbatch and data is not None and script is not None:
        environment = library.environment(script)
        sbatch = submit_again(library.with_submit_line(job), data, tasks, environment)
    return ShowAnswer(
        job=library.line(asker, job, script),
        record=job.record,
        runs=tuple(run_line(run) for run in runs),
        script=library.script_line(script) if script is not None else None,
        content=Content.of(data) if data is not None else None,
        script_of=_script_of(job, script),
        others=tuple(library.line(asker, other) for other in others),
        sbatch=sbatch,
        zone=library.zone(job.cluster),
    )


def env(library: Library, asker: Asker, request: EnvRequest) -> EnvAnswer:
    """The environment that a job was submitted with, redacted.

    Raises:
        NoSuchJob, NotYours: See :meth:`Library.find`.
        NotArchived: None is kept.
    """
    job, script = _with_script(library, asker, request.job, request.cluster)
    data = library.content(script, "environment")
    variables = []
    for name, value in entries_of(data):
        text = name.decode("utf-8", "backslashreplace")
        if request.names and not any(fnmatch.fnmatchcase(text, want) for want in request.names):
            continue
        shown = Content.of(value or b"")
        variables.append(Variable(name=text, value=shown, redacted=value == REDACTED))
    return EnvAnswer(
        job=library.line(asker, job, script),
        variables=tuple(variables),
        redacted=script.body.redacted,
        flags=script.body.flags,
    )


def diff(library: Library, asker: Asker, request: DiffRequest) -> DiffAnswer:
    """What differs between two jobs' scripts.

    Raises:
        NoSuchJob, NotYours: See :meth:`Library.find`.
        NotArchived: One of them has no script.
    """
    left, left_script = _with_script(library, asker, request.left, request.cluster)
    right, right_script = _with_script(library, asker, request.right, request.cluster)
    names = (request.left.strip().encode(), request.right.strip().encode())
    context = max(0, min(request.context, _MOST_CONTEXT))
    pieces = [
        _unified(
            library.content(left_script, "script"),
            library.content(right_script, "script"),
            names,
            context,
        )
    ]
    if request.environments:
        pieces.append(
            _unified(
                _sorted_variables(library.content(left_script, "environment")),
                _sorted_variables(library.content(right_script, "environment")),
                (names[0] + b" environment", names[1] + b" environment"),
                context,
            )
        )
    text = b"".join(pieces)
    return DiffAnswer(
        left=library.line(asker, left, left_script),
        right=library.line(asker, right, right_script),
        identical=not text,
        diff=Content.of(text),
    )


def _with_script(library: Library, asker: Asker, text: str, cluster: str) -> tuple[Job, Script]:
    with library.jobs.snapshot():
        job, _ = library.find(asker, text, cluster)
        script = library.jobs.script_of(job)
    if script is None:
        raise _without_script(job)
    return job, script


def _without_script(job: Job) -> NotArchived:
    if job.purged:
        return NotArchived(f"the script of job {job.label} was purged", job)
    if job.record.batch is False:
        return NotArchived(f"job {job.label} is interactive and has no script", job)
    return NotArchived(f"no script of job {job.label} is kept", job)


def _script_of(job: Job, script: Script | None) -> str:
    if script is None or script.body.job_id == job.job_id:
        return ""
    return str(script.body.job_id)


def _tasks_meant(library: Library, job: Job, text: str) -> tuple[str, ...]:
    """Of an array that was named as a whole its tasks; else the one task, if it is one."""
    record = job.record
    if not record.array_job_id:
        return ()
    if job.job_id != record.array_job_id or parse(text).task is not None:
        return (record.array_task,)
    parts = [part for part in library.jobs.parts_of(job) if part.record.array_job_id]
    return (record.array_task, *(part.record.array_task for part in parts))


def _sorted_variables(environment: bytes) -> bytes:
    lines = sorted(name + b"=" + (value or b"") for name, value in entries_of(environment))
    return b"\n".join(lines) + b"\n" if lines else b""


def _unified(left: bytes, right: bytes, names: tuple[bytes, bytes], context: int) -> bytes:
    """A unified diff of two texts; b"" where they are equal."""
    if left == right:
        return b""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        _LINE.findall(left),
        _LINE.findall(right),
        fromfile=names[0],
        tofile=names[1],
        n=context,
    )
    no_end = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + no_end for line in lines)
