"""How jobs are named: as Slurm does, and as nobody else's text may pretend to.

``123`` (a job, an array, or an array task's raw id), ``123_7`` (an array task),
``123+1`` (a het component) and a SLUID, which Slurm 26.05 prints as ``s`` and
13 digits of Crockford's base 32. Torque's users write ``123[7]``, ``123[]`` for an
array, and the server's name behind a dot.
"""

import re

import msgspec

from steward.core.errors import UsageError
from steward.core.records import JobRecord

MAX_JOB_ID = 2**32 - 1
"""The highest number that a person may give, and that a scheduler counts jobs with."""
MAX_RAW_ID = 2**53 - 1
"""The highest raw id: capture makes ids up where a scheduler has none. JSON carries it."""
_NUMBERED = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,10})|\+([0-9]{1,10}))?")
_TORQUE = re.compile(
    r"([0-9]{1,10})(?:\[([0-9]{1,10})?\])?"
    # A step of Slurm's is no server.
    r"(?:\.(?!(?:batch|extern|interactive)\Z)[A-Za-z][A-Za-z0-9.-]{0,252})?"
)
_SLUID = re.compile(r"[sS]([0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{13})")
_PART = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")


class JobNameError(UsageError):
    """A text that names no job; ``offender`` is the text."""


class JobName(msgspec.Struct, frozen=True, kw_only=True):
    """What a job was called.

    Attributes:
        job_id: The number before any sign; 0 for a SLUID.
        task: Array task index; None if none was given.
        offset: Het component; None if none was given.
        sluid: The SLUID, "" for a number.
    """

    job_id: int = 0
    task: int | None = None
    offset: int | None = None
    sluid: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether a number alone was given, which means all parts of an array or het job."""
        return not self.sluid and self.task is None and self.offset is None


def parse(text: str) -> JobName:
    """What job ``text`` names.

    Raises:
        JobNameError: It is not written as Slurm or Torque writes a job.
    """
    stripped = text.strip()
    sluid = _SLUID.fullmatch(stripped)
    if sluid:
        return JobName(sluid="s" + sluid[1].upper())
    match = _NUMBERED.fullmatch(stripped) or _TORQUE.fullmatch(stripped)
    if match:
        numbers = [None if group is None else int(group) for group in match.groups()]
        job_id, task, offset = (*numbers, None)[:3]
        if job_id and all(number is None or number <= MAX_JOB_ID for number in numbers):
            return JobName(job_id=job_id, task=task, offset=offset)
    raise JobNameError(
        f"{text!r} names no job: give 123, 123_7 (an array task), 123+1 (a het component), "
        "a SLUID, or as Torque does 123[7] or 123.server",
        text,
    )


def display(record: JobRecord) -> str:
    """The name that Slurm prints for a job."""
    if record.array_job_id and record.array_task:
        if record.array_task.isdecimal():
            return f"{record.array_job_id}_{record.array_task}"
        return f"{record.array_job_id}_[{record.array_task}]"
    if record.het_job_id:
        return f"{record.het_job_id}+{record.het_offset}"
    return str(record.job_id)
