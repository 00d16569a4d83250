"""Job states, as Slurm spells them in full and in short (squeue(1), "JOB STATE CODES")."""

from typing import Final

from steward.core.errors import UsageError

SHORT: Final = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}

FINISHED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""Slurm's base states that a run does not leave (slurm.h, ``enum job_states``)."""

NAMES: Final = frozenset({*SHORT.values(), "EXPEDITING"})
"""Every state in full; Slurm 25.11 and later have EXPEDITING, without a short name."""

PENDING: Final = frozenset({"EXPEDITING", "PENDING", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""What squeue(1) shows of a pending run: PENDING, or a flag in its place. sacct(1) has no flags."""

WAITING: Final = PENDING | {"REQUEUED"}
"""States in which a run has not started: its start time is what the scheduler expects."""

RESIZING: Final = "RESIZING"
"""The state of a record of a former size of a job that was resized."""

LOST: Final = "UNKNOWN"
"""The state that we give of a run that was gone before anybody saw it end."""
FORGOTTEN: Final = "SlurmctldForgotIt"
"""The reason that we give of a run whose submission a slurmctld that was killed did not save."""

_BASE: Final = (
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"),
    *("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
)
_REQUEUED: Final = 0x400 | 0x800 | 0x1000 | 0x100000  # REQUEUE, its HOLD, SPECIAL_EXIT, its FED
_RESIZING: Final = 0x2000
_REVOKED: Final = 0x80000


class StateError(UsageError):
    """A text that names no state of a job; ``offender`` is the text."""


def in_full(text: str) -> str:
    """A state in full, from its short or full name in any case.

    Raises:
        StateError: There is no such state.
    """
    state = SHORT.get(text.upper(), text.upper())
    if state not in NAMES:
        known = "PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT"
        raise StateError(f"{text!r} is no state of a job; states are {known} …", text)
    return state


def selected_states(text: str) -> tuple[str, ...]:
    """Return the states that a filter by one state selects: PENDING has several names.

    Raises:
        StateError: There is no such state.
    """
    state = in_full(text)
    return tuple(sorted(PENDING)) if state == "PENDING" else (state,)


def base_state(state: str) -> str:
    """A state without what sacct writes behind it ("CANCELLED by 1000"), in capitals."""
    return state.partition(" ")[0].rstrip("+").upper()


def ended_state(number: int) -> str:
    """The state of a run, or a piece of one, that is over, from Slurm's own number.

    Slurm adds flags to a number of ``enum job_states`` (slurm.h, the same in 22.05 to
    26.05); only those that say how it ended count here.

    Args:
        number: Such as 0x8005, which is FAILED and has processes left to be ended.

    Returns:
        A state in full; RESIZING for a piece, REQUEUED for a run that another one follows
        and that had not come to an end of its own; "" where there is no such number.
    """
    if number & _RESIZING:
        return RESIZING
    base = number & 0xFF
    state = _BASE[base] if base < len(_BASE) else ""
    if state in FINISHED or not state:
        return state
    if number & _REVOKED:
        return "REVOKED"
    return "REQUEUED" if number & _REQUEUED else state
