"""Job changes in Slurm: hold, release, requeue, suspend, resume, cancel and comment on jobs.

:class:`JobChanges` runs scontrol and scancel for one cluster. Its methods return False if the job
started, ended or disappeared meanwhile.

The reason goes into the job's admin comment, in brackets after its other content. Users can read
but not change it. (No scontrol of 22.05 to 26.05 can set the system comment.) scrontab's jobs
cannot be changed; they are cancelled, and Slurm then disables their crontab line.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Final

from steward.core.records import JobRecord
from steward.slurm.commands import COMMAND_TIMEOUT_S, CommandRunner
from steward.slurm.errors import ScrontabJob, SlurmError, UnknownJob
from steward.slurm.nodelists import expand_nodelist, fold_nodelist
from steward.slurm.settings import ClusterSettings

_NAME: Final = re.compile(r"\d{1,10}(?:_\d{1,10}|_\[[\d,:-]{1,4096}\]|\+\d{1,10})?")
_MAX_REASON_CHARS: Final = 400
_MAX_COMMENT_BYTES: Final = 8192
_SQUEUE_OPTIONS: Final = ("-a", "-t", "all", "--local", "-h")
_OWN_PART: Final = re.compile(r" ?\[steward: ([^\]]*)\]")
_OF_SCRONTAB: Final = re.compile(r"Cannot (?:modify|cancel) scrontab jobs", re.IGNORECASE)
_TOO_LATE: Final = re.compile(
    r"Invalid job id|already completing|Job/step already|has already finished|"
    r"Job is no longer pending|not pending|Requested operation is presently disabled|"
    r"Unexpected message received for job",
    re.IGNORECASE,
)


class JobChanges:
    """Client that changes jobs of one cluster. Needs SlurmUser or an operator.

    Args:
        cluster: Cluster name in Steward's configuration.
        settings: Where Slurm's commands are and how to run them.
        timeout_s: Time-out of each command, in seconds.
    """

    def __init__(
        self, cluster: str, settings: ClusterSettings, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._commands = CommandRunner(cluster, settings, timeout_s)

    def hold(self, job: str, reason: str = "", *, by_user: bool = False) -> bool:
        """Hold a pending job, so that it does not start and its user cannot release it.

        Args:
            job: Job name, see :func:`format_job_target`.
            reason: Reason shown to the user; "" keeps the present one.
            by_user: Hold it as its user would, who then can release it.

        Returns:
            True if it is held, False if it started or ended meanwhile.

        Raises:
            ScrontabJob: The job belongs to scrontab and cannot be held.
            SlurmError: Slurm does not answer, or denies permission.
        """
        is_held = self._change("uhold" if by_user else "hold", job)
        return is_held and (not reason or self.comment(job, reason))

    def release(self, job: str, *, clear_reason: bool = True) -> bool:
        """Release a job held by :meth:`hold`.

        Args:
            job: Job name.
            clear_reason: Also remove the reason from the admin comment.

        Raises:
            SlurmError: As above.
        """
        return self._change("release", job) and (not clear_reason or self.comment(job, ""))

    def requeue(self, job: str, *, hold: bool = False) -> bool:
        """Requeue a batch job: end its run and make it pending again.

        Args:
            job: Job name.
            hold: Hold it afterwards.

        Raises:
            SlurmError: The job cannot be requeued, or as above.
        """
        return self._change("requeuehold" if hold else "requeue", job)

    def exclude_nodes(self, job: str, nodes: Sequence[str]) -> bool:
        """Exclude nodes from a pending job, in addition to those it already excludes.

        Raises:
            SlurmError: As above.
        """
        out = self._commands.run("squeue", *_SQUEUE_OPTIONS, "-j", _strip_tasks(job), "-o", "%x")
        columns = out.decode("utf-8", "backslashreplace").split()
        excluded = (
            [] if not columns or columns[0] in ("(null)", "N/A") else expand_nodelist(columns[0])
        )
        return self._change(
            "update", f"JobId={job}", f"ExcNodeList={fold_nodelist([*excluded, *nodes])}"
        )

    def suspend(self, job: str) -> bool:
        """Suspend a running job.

        Raises:
            SlurmError: The job is not running, or as above.
        """
        return self._change("suspend", job)

    def resume(self, job: str) -> bool:
        """Resume a suspended job.

        Raises:
            SlurmError: The job is not suspended, or as above.
        """
        return self._change("resume", job)

    def cancel(self, job: str, reason: str = "") -> bool:
        """Cancel a pending or running job.

        Args:
            job: Job name.
            reason: Reason shown to the user; "" keeps the present one.

        Returns:
            True if it is over; scancel reports no error for an ended or unknown job.

        Raises:
            SlurmError: As above.
        """
        with contextlib.suppress(ScrontabJob):  # scancel then disables its crontab line
            if reason:
                self.comment(job, reason)
        try:
            return self._run("scancel", _validate_job_target(job))
        except ScrontabJob:
            # Slurm 23.02 and later require --cron; earlier versions lack the option.
            return self._run("scancel", "--cron", _validate_job_target(job))

    def comment(self, job: str, text: str) -> bool:
        """Set Steward's part of the admin comment, shown by ``scontrol show job``; "" removes it.

        Raises:
            SlurmError: As above.
        """
        target, own_part = f"JobId={_validate_job_target(job)}", _clean_comment(text)
        try:
            old_comment = self._read_admin_comment(job)
        except UnknownJob:
            return False
        other_part = _OWN_PART.sub("", old_comment).rstrip()
        new_comment = f"{other_part} [{own_part}]".lstrip() if own_part else other_part
        return new_comment == old_comment or self._change(
            "update", target, f"AdminComment={new_comment}"
        )

    def _read_admin_comment(self, job: str) -> str:
        """Return the admin comment of a job from squeue."""
        out = self._commands.run(
            *(
                "squeue",
                *_SQUEUE_OPTIONS,
                "-j",
                _strip_tasks(job),
                "-O",
                f"admin_comment:{_MAX_COMMENT_BYTES}",
            )
        )
        # Pending tasks of an array come as one row, with one comment.
        comment = next(iter(out.decode("utf-8", "backslashreplace").splitlines()), "").rstrip()
        return "" if comment == "(null)" else comment

    def _change(self, *arguments: str) -> bool:
        """Run scontrol on a job; return False if the job could no longer be changed."""
        if arguments[0] != "update":
            arguments = (arguments[0], _validate_job_target(arguments[1]))
        return self._run("scontrol", *arguments)

    def _run(self, *command: str) -> bool:
        """Run a command on a job; return False if the job could no longer be changed."""
        try:
            self._commands.run(*command)
        except UnknownJob:
            return False
        except SlurmError as error:
            if _TOO_LATE.search(error.output):
                return False
            if _OF_SCRONTAB.search(error.output):
                raise ScrontabJob(str(error), error.command, error.output) from error
            raise
        return True


def format_job_target(record: JobRecord) -> str:
    """Return the name of a job for Slurm's commands: 12_3 for an array task, else the raw id.

    An array's last task has the array's own raw id, which would name all tasks.
    """
    if record.array_job_id and record.array_task.isdigit():
        return f"{record.array_job_id}_{record.array_task}"
    return str(record.job_id)


def read_comment(admin_comment: str) -> str:
    """Return Steward's part of an admin comment, as :meth:`JobChanges.comment` wrote it.

    "" if none.
    """
    match = _OWN_PART.search(admin_comment)
    return match[1] if match else ""


def _validate_job_target(job: str) -> str:
    """Return a job name if it is well-formed, else raise ValueError."""
    if _NAME.fullmatch(job) is None:
        raise ValueError(f"invalid job id {job!r}: write 123, 123_7 or 123+1")
    return job


def _strip_tasks(job: str) -> str:
    """Return a job name for squeue, which takes no list of tasks."""
    return _validate_job_target(job).partition("_[")[0]


def _clean_comment(text: str) -> str:
    """Return a reason as one short line without characters that ``scontrol`` interprets."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() and c not in "\"'\\[]" else " " for c in line)[
        :_MAX_REASON_CHARS
    ]
