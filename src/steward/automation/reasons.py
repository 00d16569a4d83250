"""Whose reason a node shows: somebody's by us, slurmctld's own, or somebody else's.

What Steward sets ends in ``(steward: SPEAKER)``. The speaker is a person, or a
rule (``rule node-down``), for which the site speaks and not a person: people may
replace what a rule said, and rules what another rule said.
"""

import re
from typing import Final

from steward.core.errors import UsageError
from steward.slurm.machine_changing import reason_text

_SIGNED: Final = re.compile(r"\(steward: ([^()]*)\)\s*\Z")
_RULE: Final = "rule "
_WAS: Final = "; was: "
_APPENDED: Final = " : "
LONGEST: Final = 400
"""Letters of the longest reason that is given to Slurm."""
_SLURM_OWN: Final = re.compile(
    # As slurmctld writes them itself, alone or with details behind (node_mgr.c, job_mgr.c,
    # ping_nodes.c, power_save.c, and slurmd's req.c through it).
    r"(?:Not responding|Node unexpectedly rebooted|Kill task failed|Prolog error|Epilog error|"
    r"batch job complete failure|Duplicate jobid|ResumeTimeout reached|SlurmdSpoolDir is full|"
    r"Reboot ASAP|[Rr]eboot (?:timed out|complete)|prolog hung|"
    r"Low (?:RealMemory|TmpDisk|CPUs|Cores|socket\*core\*thread count|socket\*core count)|"
    r"gres/\S+ (?:count (?:reported lower than|changed|too low)|core count))"
    r"(?: ?[\[(].*)?\Z|"
    r"(?:Low (?:RealMemory|TmpDisk) \(|gres/\S+ count (?:reported lower|changed|too low))",
    re.DOTALL,
)


def ours(reason: str, speaker: str, old: str = "") -> str:
    """A reason as it is given to Slurm: signed, and with what slurmctld said behind it.

    Args:
        reason: Why, as it was given.
        speaker: Who says so.
        old: What slurmctld itself said before; "" for nothing.

    Raises:
        UsageError: There is no reason.
    """
    text = reason_text(_SIGNED.sub("", reason))
    if not text:
        raise UsageError("say why: reason=…")
    by = reason_text("".join(c for c in speaker if c not in "()"))[:64].strip() or "nobody"
    signature = f" (steward: {by})"
    behind = f"{_WAS}{reason_text(old)}" if old and old not in text else ""
    room = LONGEST - len(signature)
    return (text + behind)[:room].rstrip() + signature


def says(shown: str, reason: str, speaker: str) -> bool:
    """Whether a node shows this reason already, with or without what slurmctld said behind it."""
    wanted = ours(reason, speaker)
    shown = parted(shown)[0]
    text, by = wanted.removesuffix(f" (steward: {signed_by(wanted)})"), signed_by(wanted)
    behind = shown.startswith(f"{text}{_WAS}") and signed_by(shown) == by
    return shown == wanted or behind


def signed_by(reason: str) -> str:
    """Who gave a reason by us; "" where nobody did."""
    found = _SIGNED.search(parted(reason)[0])
    return found[1].strip() if found else ""


def parted(reason: str) -> tuple[str, str]:
    """A reason, and what slurmctld itself put behind it since (`` : Not responding``, 23.11)."""
    text, behind = reason, ""
    while True:
        before, colon, last = text.rpartition(_APPENDED)
        if not colon or _SLURM_OWN.match(last) is None:
            return text, behind
        text, behind = before, f"{last}{_APPENDED}{behind}" if behind else last


def is_ours(reason: str, speaker: str = "") -> bool:
    """Whether a reason was given by us, for somebody whom ``speaker`` may speak over.

    Args:
        reason: What the node shows.
        speaker: Who wants to; "" for anybody.
    """
    by = signed_by(reason)
    return bool(by) and (not speaker or by == speaker or by.startswith(_RULE))


def is_slurms(reason: str, is_slurm_user: bool) -> bool:
    """Whether slurmctld itself gave a reason.

    Args:
        reason: What the node shows.
        is_slurm_user: Whether Slurm says that SlurmUser gave it, as it does of its own.
    """
    return is_slurm_user and not signed_by(reason) and _SLURM_OWN.match(reason) is not None
