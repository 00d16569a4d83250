"""Job table columns and job facts for ``steward archive``, in Slurm's words.

:func:`list_job_columns` defines the table, :func:`list_job_facts` the lines above a script; the
other functions format single fields of a ``JobLine`` (a job in a reply of the archive).
"""

from collections.abc import Callable, Mapping

from steward.archive.requests import JobLine
from steward.cli.output import Column, format_size, format_time

WIDEST_TEXT = 40
"""Most characters shown of texts that users write; a long name would widen every line."""


def list_job_columns(zones: Mapping[str, str], *, has_several_clusters: bool) -> list[Column]:
    """Return all columns of a table of jobs.

    Args:
        zones: Time zone of each cluster, for its times.
        has_several_clusters: Whether to show people the cluster column.
    """

    def time(field: str) -> Callable[[JobLine], str]:
        return lambda job: format_time(getattr(job, field), zones.get(job.cluster, ""))

    return [
        Column("Cluster", lambda job: job.cluster, is_default=has_several_clusters),
        Column("JobID", lambda job: job.job, right=True),
        Column("JobName", lambda job: job.name, max_width=WIDEST_TEXT),
        Column("User", format_user),
        Column("Account", lambda job: job.account, is_default=False),
        Column("Partition", lambda job: job.partition),
        Column("State", format_state),
        Column("ExitCode", format_exit_code, is_default=False),
        Column("Submit", time("submit")),
        Column("Start", time("start"), is_default=False),
        Column("End", time("end"), is_default=False),
        Column("Restarts", lambda job: str(job.restarts), right=True, is_default=False),
        Column(
            "Script",
            format_script,
            lambda job: _format_number(job.script_bytes),
            max_width=WIDEST_TEXT,
        ),
        Column("Kind", lambda job: job.kind, is_default=False),
        Column("Verified", lambda job: "yes" if job.verified else "no", is_default=False),
        Column("SubmitLine", lambda job: job.submit_line, is_default=False),
    ]


def format_user(job: JobLine) -> str:
    """Return a job's owner: the user name, or the uid if it never resolved."""
    if job.user:
        return job.user
    return "" if job.uid is None else str(job.uid)


def format_state(job: JobLine) -> str:
    """Return a job's state; "(unverified)" if Slurm has not shown the job."""
    return job.state or ("" if job.verified else "(unverified)")


def format_exit_code(job: JobLine) -> str:
    """Return exit code and signal as sacct prints them; "" before the job ends."""
    if job.exit_code is None and job.exit_signal is None:
        return ""
    return f"{job.exit_code or 0}:{job.exit_signal or 0}"


def format_script(job: JobLine) -> str:
    """Return the size of the archived script, or why there is none."""
    if job.script_key:
        return format_size(job.script_bytes) or "kept"
    if job.script_hidden:
        return job.script_hidden
    if job.kind == "interactive":
        return f"none: {job.submit_line}" if job.submit_line else "none: interactive"
    return "none"


def list_job_facts(job: JobLine, zone: str) -> list[tuple[str, str]]:
    """Return the facts shown above a job's script, as names and values."""
    times = [(name, format_time(getattr(job, name.lower()), zone)) for name in _TIMES]
    return [
        ("Job", f"{job.job} on {job.cluster}"),
        ("Name", job.name),
        ("User", format_user(job)),
        ("Account", job.account),
        ("Partition", job.partition),
        ("State", f"{format_state(job)} {_format_failure(job)}".strip()),
        *times,
        ("Restarts", str(job.restarts) if job.restarts else ""),
    ]


_TIMES = ("Submit", "Start", "End")


def _format_failure(job: JobLine) -> str:
    """Format a non-zero exit code; "" for success."""
    code = format_exit_code(job)
    return f"(exit code {code})" if code not in ("", "0:0") else ""


def _format_number(value: int | None) -> str:
    return "" if value is None else str(value)
