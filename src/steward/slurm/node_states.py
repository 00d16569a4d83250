"""Node states of Slurm: parse every spelling into one form, tell failed nodes from healthy ones.

A state is a base and flags. ``scontrol`` writes ``IDLE+CLOUD+POWERED_DOWN`` and
``DOWN+DRAIN+NOT_RESPONDING``; ``sinfo`` writes ``down*``, ``drained`` or ``idle~``; JSON has a
list (22.05: a word and a list); older versions put a sign after the base (``DOWN*+DRAIN``).
:func:`parse_node_state` reads all of them, :func:`format_node_state` writes the one form used
here.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

NodeStateParts = tuple[str, tuple[str, ...]]
"""Base state, and flags sorted by name."""

UNKNOWN: Final = "UNKNOWN"
_IDLE_BASE: Final = "IDLE"
_USED: Final = ("ALLOCATED", "MIXED")
_COMPLETING: Final = "COMPLETING"
FLAGS_OF_USE: Final = frozenset({_COMPLETING, "PLANNED", "BLOCKED"})
"""Flags that come from jobs on the node, or from the scheduler's plans for them."""
_LEAVES: Final = frozenset({"DRAIN", "FAIL"})

_BASES: Final = ("DOWN", "ERROR", "FUTURE", "UNKNOWN", "ALLOCATED", "MIXED", "IDLE")
_BASE_WORDS: Final = {
    **{base: base for base in _BASES},
    "ALLOC": "ALLOCATED",
    "MIX": "MIXED",
    "UNK": UNKNOWN,
    "FUTR": "FUTURE",
}
# Words of sinfo that mean a base and a flag together.
_BOTH: Final = {
    "DRAINED": ("IDLE", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "DRNG": ("ALLOCATED", "DRAIN"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "FAILG": ("ALLOCATED", "FAIL"),
    "COMP": ("ALLOCATED", "COMPLETING"),
}
_FLAG_WORDS: Final = {
    "NO_RESPOND": "NOT_RESPONDING",
    "MAINT": "MAINTENANCE",
    "RES": "RESERVED",
    "RESV": "RESERVED",
    "INVAL": "INVALID_REG",
    "INVALID": "INVALID_REG",
    "REBOOT": "REBOOT_REQUESTED",
    "POWERING": "POWERING_UP",
    "POW_DN": "POWERING_DOWN",
    "POW_UP": "POWERING_UP",
    "PLND": "PLANNED",
    "BLOCK": "BLOCKED",
    "DRAIN": "DRAIN",
}
_SIGNS: Final = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
_WORD: Final = re.compile(r"([A-Z][A-Z0-9_]*)([*~#!%$@^-]*)")

_SAVES_POWER: Final = frozenset(
    {"POWER_DOWN", "POWERED_DOWN", "POWERING_DOWN", "POWER_UP", "POWERING_UP"}
)
_OUT_OF_SERVICE_FLAGS: Final = frozenset(
    {"DRAIN", "MAINTENANCE", "REBOOT_REQUESTED", "REBOOT_ISSUED"}
)
_WORKING: Final = frozenset({"IDLE", "MIXED", "ALLOCATED"})
_FAILED_BASES: Final = frozenset({"DOWN", "ERROR"})
_FAILED_FLAGS: Final = frozenset({"FAIL", "INVALID_REG", "NOT_RESPONDING"})
_GOING: Final = frozenset({"POWER_DOWN", "POWERING_DOWN"})


def parse_node_state(text: str) -> NodeStateParts:
    """Parse a node state as a command wrote it.

    Unknown words count as flags, because every Slurm release adds some.
    """
    return parse_state_words(text.split("+"))


def parse_state_words(words: Iterable[str]) -> NodeStateParts:
    """Parse a node state from words in any order, as in JSON."""
    bases: list[str] = []
    implied: list[str] = []
    flags: set[str] = set()
    for word in words:
        match = _WORD.fullmatch(word.strip().upper())
        if match is None:
            continue
        name = match[1]
        flags.update(_SIGNS[sign] for sign in match[2])
        if name in _BASE_WORDS:
            bases.append(_BASE_WORDS[name])
        elif name in _BOTH:
            implied.append(_BOTH[name][0])
            flags.add(_BOTH[name][1])
        else:
            flags.add(_FLAG_WORDS.get(name, name))
    base = next(iter([*bases, *implied]), UNKNOWN)
    return base, tuple(sorted(flags))


def format_node_state(base: str, flags: Iterable[str]) -> str:
    """Format a node state: ``DOWN+DRAIN+NOT_RESPONDING``."""
    return "+".join((base, *sorted(flags)))


def is_failing(state: str) -> bool:
    """Return True if a node in this state failed without anybody having taken it out of service.

    A drained node, one in maintenance and one in a requested reboot are out of service on purpose.
    A power-saving node that does not answer has not failed; but if it is also DOWN, it should have
    booted for a job and did not (``ResumeTimeout reached``).
    """
    base, flags = parse_node_state(state)
    if is_out_of_service(state):
        return False
    return base in _FAILED_BASES or bool(_select_failed_flags(flags))


def is_out_of_service(state: str) -> bool:
    """Return True if the node is out of service on purpose.

    Drained, in maintenance or rebooting.
    """
    return not _OUT_OF_SERVICE_FLAGS.isdisjoint(parse_node_state(state)[1])


def is_not_responding(state: str) -> bool:
    """Return True if the only problem of a node is that its slurmd does not answer.

    This holds for a failing node before Slurm marks it DOWN, and for a resumed node until its
    slurmd answers the controller's ping.
    """
    base, flags = parse_node_state(state)
    return (
        base in _WORKING and is_failing(state) and _select_failed_flags(flags) == {"NOT_RESPONDING"}
    )


def is_drained(state: str) -> bool:
    """Return True if an administrator or Slurm set the node to DRAIN."""
    return "DRAIN" in parse_node_state(state)[1]


def is_available(state: str) -> bool:
    """Return True if the node accepts jobs, now or after booting for them."""
    base, flags = parse_node_state(state)
    # A powered-down node that Slurm hides is assumed to be healthy.
    is_up = base in _WORKING or (base == UNKNOWN and "POWERED_DOWN" in flags)
    if not is_up or _select_failed_flags(flags):
        return False
    return _OUT_OF_SERVICE_FLAGS.isdisjoint(flags) and _GOING.isdisjoint(flags)


def saves_power(state: str) -> bool:
    """Return True if power saving has the node off, or is switching it off or on."""
    return not _SAVES_POWER.isdisjoint(parse_node_state(state)[1])


def _select_failed_flags(flags: Iterable[str]) -> frozenset[str]:
    """Return the flags that mean failure; a power-saving node may be unresponsive."""
    failed = _FAILED_FLAGS.intersection(flags)
    return failed if _SAVES_POWER.isdisjoint(flags) else failed - {"NOT_RESPONDING"}


@lru_cache(maxsize=1024)
def strip_use_flags(state: str) -> tuple[str, frozenset[str]]:
    """Return a state without what the node's jobs contribute to it.

    For a drained or failing node it still shows whether jobs remain.
    """
    base, flags = parse_node_state(state)
    if base in _USED or base == _IDLE_BASE:
        is_used = base in _USED or _COMPLETING in flags
        base = _USED[0] if is_used and not _LEAVES.isdisjoint(flags) else _IDLE_BASE
    return base, frozenset(flags) - FLAGS_OF_USE
