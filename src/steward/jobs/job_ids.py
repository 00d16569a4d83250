"""Job names and ids: parse what users type, and format names as Slurm prints them.

Forms: ``123`` (a job, an array, or an array task's raw id), ``123_7`` (an array task), ``123+1``
(a het component) and a SLUID, which Slurm 26.05 prints as ``s`` and 13 digits of Crockford's base
32. Torque's users write ``123[7]``, ``123[]`` for an array, and the server's name after a dot.
"""

import re

import msgspec

from steward.core.errors import UsageError
from steward.core.records import JobRecord

MAX_JOB_ID = 2**32 - 1
"""Highest job number that a scheduler assigns or a user may type."""
MAX_RAW_ID = 2**53 - 1
"""Highest raw id, the largest integer JSON carries; capture invents ids if a scheduler has none."""
_NUMBERED = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,10})|\+([0-9]{1,10}))?")
_TORQUE = re.compile(
    r"([0-9]{1,10})(?:\[([0-9]{1,10})?\])?"
    # "123.batch" is a step of Slurm's, not a server name.
    r"(?:\.(?!(?:batch|extern|interactive)\Z)[A-Za-z][A-Za-z0-9.-]{0,252})?"
)
_SLUID = re.compile(r"[sS]([0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{13})")
_PART = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")


class JobNameError(UsageError):
    """Text that is not a job name; ``offender`` is the text."""


class JobName(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed job name.

    Attributes:
        job_id: Number before any sign; 0 for a SLUID.
        task: Array task index, or None.
        offset: Het component, or None.
        sluid: The SLUID; "" for a number.
    """

    job_id: int = 0
    task: int | None = None
    offset: int | None = None
    sluid: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether only a number was given, which means all parts of an array or het job."""
        return not self.sluid and self.task is None and self.offset is None


def parse_job_name(text: str) -> JobName:
    """Parse a job name.

    Raises:
        JobNameError: The text matches neither Slurm's nor Torque's forms.
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
        f"invalid job id {text!r}: give 123, 123_7 (an array task), 123+1 (a het component), "
        "a SLUID, or for Torque 123[7] or 123.server",
        text,
    )


def format_job_name(record: JobRecord) -> str:
    """Format the name that Slurm prints for a job."""
    if record.array_job_id and record.array_task:
        if record.array_task.isdecimal():
            return f"{record.array_job_id}_{record.array_task}"
        return f"{record.array_job_id}_[{record.array_task}]"
    if record.het_job_id:
        return f"{record.het_job_id}+{record.het_offset}"
    return str(record.job_id)
