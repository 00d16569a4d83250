"""States of nodes as Slurm spells them, and what they mean: which is a failure, and which is not.

A state is a base and flags. ``scontrol`` writes ``IDLE+CLOUD+POWERED_DOWN`` and
``DOWN+DRAIN+NOT_RESPONDING``, ``sinfo`` ``down*``, ``drained`` or ``idle~``, JSON a list (of
22.05 a word and a list), and older versions put a sign behind the base (``DOWN*+DRAIN``).
Here all of them become one form.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

State = tuple[str, tuple[str, ...]]
"""Base, and flags in the alphabet's order."""

UNKNOWN: Final = "UNKNOWN"
_FREE: Final = "IDLE"
_USED: Final = ("ALLOCATED", "MIXED")
_COMPLETING: Final = "COMPLETING"
FLAGS_OF_USE: Final = frozenset({_COMPLETING, "PLANNED", "BLOCKED"})
"""Flags that jobs, and the scheduler's plans for them, give a node."""
_LEAVES: Final = frozenset({"DRAIN", "FAIL"})

_BASES: Final = ("DOWN", "ERROR", "FUTURE", "UNKNOWN", "ALLOCATED", "MIXED", "IDLE")
_BASE_WORDS: Final = {
    **{base: base for base in _BASES},
    "ALLOC": "ALLOCATED",
    "MIX": "MIXED",
    "UNK": UNKNOWN,
    "FUTR": "FUTURE",
}
# Of sinfo's words those that stand for a base and a flag at once.
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
_TAKEN: Final = frozenset({"DRAIN", "MAINTENANCE", "REBOOT_REQUESTED", "REBOOT_ISSUED"})
_WORKING: Final = frozenset({"IDLE", "MIXED", "ALLOCATED"})
_FAILED_BASES: Final = frozenset({"DOWN", "ERROR"})
_FAILED_FLAGS: Final = frozenset({"FAIL", "INVALID_REG", "NOT_RESPONDING"})
_GOING: Final = frozenset({"POWER_DOWN", "POWERING_DOWN"})


def parse_node_state(text: str) -> State:
    """A state as a command wrote it.

    Words that this version of Steward does not know are flags: Slurm adds some with
    every release.
    """
    return of_list(text.split("+"))


def of_list(words: Iterable[str]) -> State:
    """A state as JSON has it: base and flags, in any order."""
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
    """The one form of a state: ``DOWN+DRAIN+NOT_RESPONDING``."""
    return "+".join((base, *sorted(flags)))


def is_failing(state: str) -> bool:
    """Whether a node in this state has failed, where nobody meant it to be away.

    One that is drained, in maintenance or rebooted on demand is meant to be. One that
    saves power does not answer, which is no failure; but where it is DOWN beside that, it
    was to boot for a job and did not (``ResumeTimeout reached``).
    """
    base, flags = parse_node_state(state)
    if is_taken(state):
        return False
    return base in _FAILED_BASES or bool(_failed_flags(flags))


def is_taken(state: str) -> bool:
    """Whether somebody meant it to be away: drained, in maintenance, rebooted on demand."""
    return not _TAKEN.isdisjoint(parse_node_state(state)[1])


def is_silent(state: str) -> bool:
    """Whether all that is wrong with a node is that its slurmd does not answer.

    So is one that fails before Slurm takes it to be DOWN, and one that was just resumed
    until its slurmd answers the controller's ping.
    """
    base, flags = parse_node_state(state)
    return base in _WORKING and is_failing(state) and _failed_flags(flags) == {"NOT_RESPONDING"}


def is_drained(state: str) -> bool:
    """Whether somebody, or Slurm, has taken the node from new jobs (DRAIN)."""
    return "DRAIN" in parse_node_state(state)[1]


def is_available(state: str) -> bool:
    """Whether the node takes jobs, now or when it has booted for them."""
    base, flags = parse_node_state(state)
    # One that Slurm does not show while it is off is taken to be well.
    is_up = base in _WORKING or (base == UNKNOWN and "POWERED_DOWN" in flags)
    if not is_up or _failed_flags(flags):
        return False
    return _TAKEN.isdisjoint(flags) and _GOING.isdisjoint(flags)


def saves_power(state: str) -> bool:
    """Whether power saving has the node off, or on its way off or on."""
    return not _SAVES_POWER.isdisjoint(parse_node_state(state)[1])


def _failed_flags(flags: Iterable[str]) -> frozenset[str]:
    failed = _FAILED_FLAGS.intersection(flags)
    return failed if _SAVES_POWER.isdisjoint(flags) else failed - {"NOT_RESPONDING"}


@lru_cache(maxsize=1024)
def without_use(state: str) -> tuple[str, frozenset[str]]:
    """A state without what the jobs on a node make of it.

    Of one that is drained it matters whether there are still any.
    """
    base, flags = parse_node_state(state)
    if base in _USED or base == _FREE:
        is_used = base in _USED or _COMPLETING in flags
        base = _USED[0] if is_used and not _LEAVES.isdisjoint(flags) else _FREE
    return base, frozenset(flags) - FLAGS_OF_USE
