"""What Steward changes in Slurm: jobs are held, released and cancelled, and told why.

The reason goes into the job's admin comment, which its user sees and cannot
change, in brackets behind what that holds. (No scontrol of 22.05 to 26.05 can set
the system comment.) Of scrontab's jobs nothing can be changed: they are
cancelled, with which Slurm disables their line of the crontab.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Final

from steward.core.records import JobRecord
from steward.slurm.commands import Commands
from steward.slurm.errors import ScrontabJob, SlurmError, UnknownJob
from steward.slurm.nodelists import expand, fold
from steward.slurm.settings import ClusterSettings

_NAME: Final = re.compile(r"\d{1,10}(?:_\d{1,10}|_\[[\d,:-]{1,4096}\]|\+\d{1,10})?")
_LONGEST: Final = 400
_LONGEST_COMMENT: Final = 8192
_ONE: Final = ("-a", "-t", "all", "--local", "-h")
_OURS: Final = re.compile(r" ?\[steward: ([^\]]*)\]")
_OF_SCRONTAB: Final = re.compile(r"Cannot (?:modify|cancel) scrontab jobs", re.IGNORECASE)
_GONE: Final = re.compile(
    r"Invalid job id|already completing|Job/step already|has already finished|"
    r"Job is no longer pending|not pending|Requested operation is presently disabled|"
    r"Unexpected message received for job",
    re.IGNORECASE,
)


class Changing:
    """Changes jobs of one cluster, as SlurmUser or an operator.

    Args:
        cluster: Its name in the configuration.
        settings: How its commands are found and started.
    """

    def __init__(self, cluster: str, settings: ClusterSettings) -> None:
        self._commands = Commands(cluster, settings)

    def hold(self, job: str, why: str = "", *, by_user: bool = False) -> bool:
        """Keep a pending job from starting; its user cannot release it.

        Args:
            job: Its name, see :func:`name_of`.
            why: The reason, for its user; what is said there stays if empty.
            by_user: Whether it is held as its user would, who then can release it.

        Returns:
            Whether it is held; not if it started or ended meanwhile.

        Raises:
            ScrontabJob: It is one of scrontab, which cannot be held.
            SlurmError: Slurm does not answer, or does not let us.
        """
        is_held = self._done("uhold" if by_user else "hold", job)
        return is_held and (not why or self.comment(job, why))

    def release(self, job: str, *, is_told: bool = True) -> bool:
        """Let a job start that :meth:`hold` kept from it.

        Args:
            job: Its name.
            is_told: Whether there is a reason to be taken away.

        Raises:
            SlurmError: As above.
        """
        return self._done("release", job) and (not is_told or self.comment(job, ""))

    def requeue(self, job: str, *, hold: bool = False) -> bool:
        """End a batch job's run, and let it wait for another.

        Args:
            job: Its name.
            hold: Whether it is then held.

        Raises:
            SlurmError: It is none that can be requeued, or as above.
        """
        return self._done("requeuehold" if hold else "requeue", job)

    def exclude(self, job: str, nodes: Sequence[str]) -> bool:
        """Keep a pending job from further nodes, beside those that it would not have before.

        Raises:
            SlurmError: As above.
        """
        out = self._commands.run("squeue", *_ONE, "-j", _squeues(job), "-o", "%x")
        shown = out.decode("utf-8", "backslashreplace").split()
        before = [] if not shown or shown[0] in ("(null)", "N/A") else expand(shown[0])
        return self._done("update", f"JobId={job}", f"ExcNodeList={fold([*before, *nodes])}")

    def suspend(self, job: str) -> bool:
        """Stop a running job's processes where they are.

        Raises:
            SlurmError: It does not run, or as above.
        """
        return self._done("suspend", job)

    def resume(self, job: str) -> bool:
        """Let a suspended job's processes go on.

        Raises:
            SlurmError: It is not suspended, or as above.
        """
        return self._done("resume", job)

    def cancel(self, job: str, why: str = "") -> bool:
        """End a job, whether it runs or waits.

        Args:
            job: Its name.
            why: The reason, for its user; what is said there stays if empty.

        Returns:
            Whether it is over; scancel says nothing of a job that was so before, or unknown.

        Raises:
            SlurmError: As above.
        """
        with contextlib.suppress(ScrontabJob):  # its user sees the disabled line of the crontab
            if why:
                self.comment(job, why)
        try:
            return self._run("scancel", _checked(job))
        except ScrontabJob:
            # Since 23.02 this is asked for; before, there was no such option.
            return self._run("scancel", "--cron", _checked(job))

    def comment(self, job: str, text: str) -> bool:
        """Set what the system says of a job; its user sees it in ``scontrol show job``.

        Raises:
            SlurmError: As above.
        """
        name, said = f"JobId={_checked(job)}", _tidy(text)
        try:
            before = self._admin_comment(job)
        except UnknownJob:
            return False
        kept = _OURS.sub("", before).rstrip()
        after = f"{kept} [{said}]".lstrip() if said else kept
        return after == before or self._done("update", name, f"AdminComment={after}")

    def _admin_comment(self, job: str) -> str:
        out = self._commands.run(
            *("squeue", *_ONE, "-j", _squeues(job), "-O", f"admin_comment:{_LONGEST_COMMENT}")
        )
        # Of an array the tasks that wait come as one row, and have one comment.
        shown = next(iter(out.decode("utf-8", "backslashreplace").splitlines()), "").rstrip()
        return "" if shown == "(null)" else shown

    def _done(self, *words: str) -> bool:
        if words[0] != "update":
            words = (words[0], _checked(words[1]))
        return self._run("scontrol", *words)

    def _run(self, *words: str) -> bool:
        """Run a command on a job; whether that was still there to be changed."""
        try:
            self._commands.run(*words)
        except UnknownJob:
            return False
        except SlurmError as error:
            if _GONE.search(error.said):
                return False
            if _OF_SCRONTAB.search(error.said):
                raise ScrontabJob(str(error), error.command, error.said) from error
            raise
        return True


def name_of(record: JobRecord) -> str:
    """What Slurm's commands call a job: an array's task by its index, all else by its raw id.

    An array's last task has the array's own raw id, which would name all of them.
    """
    if record.array_job_id and record.array_task.isdigit():
        return f"{record.array_job_id}_{record.array_task}"
    return str(record.job_id)


def read_comment(admin_comment: str) -> str:
    """Read what :meth:`Changing.comment` wrote into an admin comment; "" for nothing."""
    ours = _OURS.search(admin_comment)
    return ours[1] if ours else ""


def _checked(job: str) -> str:
    if _NAME.fullmatch(job) is None:
        raise ValueError(f"{job!r} is no job's name")
    return job


def _squeues(job: str) -> str:
    """A job as squeue takes it, which knows no several tasks."""
    return _checked(job).partition("_[")[0]


def _tidy(text: str) -> str:
    """A reason as one short line, without what ``scontrol`` would read as more than a text."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() and c not in "\"'\\[]" else " " for c in line)[:_LONGEST]
