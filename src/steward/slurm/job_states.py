"""Job states of Slurm: full and short names, groups of states, and parsing.

Short names are those of squeue(1), "JOB STATE CODES". The sets :data:`FINISHED`, :data:`PENDING`
and :data:`WAITING` classify states; the state :data:`LOST` and the reason :data:`FORGOTTEN` are
Steward's own.
"""

from typing import Final

from steward.core.errors import UsageError

SHORT_STATES: Final = {
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
"""Final base states of a run (slurm.h, ``enum job_states``)."""

STATE_NAMES: Final = frozenset({*SHORT_STATES.values(), "EXPEDITING"})
"""Every state by its full name. EXPEDITING (Slurm 25.11 and later) has no short name."""

PENDING: Final = frozenset({"EXPEDITING", "PENDING", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States that squeue(1) shows for a pending run: PENDING or a flag. sacct(1) shows no flags."""

WAITING: Final = PENDING | {"REQUEUED"}
"""States of a run that has not started; its start time is only the scheduler's estimate."""

RESIZING: Final = "RESIZING"
"""State of the record that describes a resized job before the resize."""

LOST: Final = "UNKNOWN"
"""Steward's state for a run that disappeared before anybody saw it end."""
FORGOTTEN: Final = "SlurmctldForgotIt"
"""Steward's reason for a run whose submission a killed slurmctld had not saved."""

_BASE: Final = (
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"),
    *("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
)
_REQUEUED: Final = 0x400 | 0x800 | 0x1000 | 0x100000  # REQUEUE, its HOLD, SPECIAL_EXIT, its FED
_RESIZING: Final = 0x2000
_REVOKED: Final = 0x80000


class StateError(UsageError):
    """Text that names no job state; ``offender`` is the text."""


def expand_state(text: str) -> str:
    """Return a state's full name, given its short or full name in any case.

    Raises:
        StateError: The state does not exist.
    """
    state = SHORT_STATES.get(text.upper(), text.upper())
    if state not in STATE_NAMES:
        known = "PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT"
        raise StateError(f"unknown job state {text!r}: use {known} …", text)
    return state


def expand_state_filter(text: str) -> tuple[str, ...]:
    """Return the states that a filter by one state selects; PENDING selects several.

    Raises:
        StateError: The state does not exist.
    """
    state = expand_state(text)
    return tuple(sorted(PENDING)) if state == "PENDING" else (state,)


def strip_state_suffix(state: str) -> str:
    """Return a state without sacct's suffix ("CANCELLED by 1000"), in capitals."""
    return state.partition(" ")[0].rstrip("+").upper()


def decode_ended_state(number: int) -> str:
    """Return the state of an ended run, or of a piece of a resized one, from Slurm's number.

    Slurm adds flags to a number of ``enum job_states`` (slurm.h, the same in 22.05 to 26.05). Only
    flags that say how the run ended matter here.

    Args:
        number: For example 0x8005: FAILED, with processes still to be ended.

    Returns:
        The state's full name; RESIZING for a piece; REQUEUED for a run without an end of its own
        that another run follows; "" if the number is unknown.
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
