"""Node reasons in Slurm: sign Steward's, recognize slurmctld's, protect everybody else's.

Every reason that Steward sets ends in ``(steward: SPEAKER)``. The speaker is a person or a rule
(``rule node-down``). A rule speaks for the site: people may replace a rule's reason, and so may
other rules. Reasons of other people need ``--force``.

First come functions on reason texts (``ours``, ``says``, ``signed_by``, ``is_ours``), then
functions on node records, which operations call (``reasons_for``, ``need_ours``).
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from steward.automation.errors import NotYours
from steward.automation.operation import Doing
from steward.core.errors import UsageError
from steward.core.printable import safe
from steward.slurm.cluster_changes import reason_text

if TYPE_CHECKING:
    from steward.slurm.cluster_records import NodeRecord


_SIGNED: Final = re.compile(r"\(steward: ([^()]*)\)\s*\Z")
"""Signature at the end of a reason set by Steward."""
_RULE: Final = "rule "
"""Start of a speaker's name that is a rule."""
_WAS: Final = "; was: "
"""Separator before slurmctld's previous reason."""
_APPENDED: Final = " : "
"""Separator before what slurmctld appends to a reason."""
LONGEST: Final = 400
"""Maximum length of a reason given to Slurm, in characters."""
_SLURM_OWN: Final = re.compile(
    # Texts that slurmctld writes itself, alone or followed by details (node_mgr.c, job_mgr.c,
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
    """Sign a reason for Slurm and append what slurmctld had said before.

    Args:
        reason: Reason as the caller gave it.
        speaker: Person or rule that signs it.
        old: slurmctld's own previous reason; "" if none.

    Raises:
        UsageError: The reason is empty.
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
    """Return whether a node already shows this reason, with or without slurmctld's own text."""
    wanted = ours(reason, speaker)
    shown = parted(shown)[0]
    text, by = wanted.removesuffix(f" (steward: {signed_by(wanted)})"), signed_by(wanted)
    behind = shown.startswith(f"{text}{_WAS}") and signed_by(shown) == by
    return shown == wanted or behind


def signed_by(reason: str) -> str:
    """Return who signed a reason through Steward; "" if nobody did."""
    found = _SIGNED.search(parted(reason)[0])
    return found[1].strip() if found else ""


def parted(reason: str) -> tuple[str, str]:
    """Split a reason from what slurmctld itself appended (`` : Not responding``, Slurm 23.11)."""
    text, behind = reason, ""
    while True:
        before, colon, last = text.rpartition(_APPENDED)
        if not colon or _SLURM_OWN.match(last) is None:
            return text, behind
        text, behind = before, f"{last}{_APPENDED}{behind}" if behind else last


def is_ours(reason: str, speaker: str = "") -> bool:
    """Return whether a reason was set by Steward and ``speaker`` may replace it.

    Args:
        reason: Reason that the node shows.
        speaker: Person or rule that wants to replace it; "" for anybody.
    """
    by = signed_by(reason)
    return bool(by) and (not speaker or by == speaker or by.startswith(_RULE))


def is_slurms(reason: str, is_slurm_user: bool) -> bool:
    """Return whether slurmctld itself set a reason.

    Args:
        reason: Reason that the node shows.
        is_slurm_user: Whether Slurm reports SlurmUser as its author, as it does for its own
            reasons.
    """
    return is_slurm_user and not signed_by(reason) and _SLURM_OWN.match(reason) is not None


_OUT_OF_SERVICE: Final = frozenset({"DOWN", "ERROR"})
"""Node states that are out of service."""
_OUT_FLAGS: Final = frozenset({"DRAIN", "FAIL"})
"""Node flags that mean out of service."""
_LEAVES_SINCE: Final = (23, 2, 0)
"""First Slurm version in which a resume leaves the reason behind."""
_LEAVES_UNTIL: Final = (26, 5, 0)
"""First Slurm version in which it no longer does."""


def is_out(node: "NodeRecord") -> bool:
    """Return whether a node is out of service, that is whether a resume would change it."""
    return node.base in _OUT_OF_SERVICE or bool(_OUT_FLAGS & set(node.flags))


def reasons_for(doing: Doing, nodes: "Mapping[str, NodeRecord]", reason: str) -> dict[str, str]:
    """Compute the reason that each node is to get.

    Args:
        doing: Context of the operation: speaker and ``force``.
        nodes: Nodes in their present state.
        reason: Reason as the caller gave it.

    Returns:
        By node; with what slurmctld itself, or nobody, had said behind it.

    Raises:
        NotYours: A node shows somebody else's reason.
    """
    need_ours(doing, nodes, "change the reason")
    slurm_user = _slurm_user(doing, nodes)
    found: dict[str, str] = {}
    for name, node in nodes.items():
        if is_out(node) and says(node.reason, reason, doing.speaker):
            found[name] = node.reason
            continue
        is_nobodys = _is_slurms(node, slurm_user) or _is_left(doing, node)
        behind = node.reason if is_nobodys and not signed_by(node.reason) else ""
        behind = behind or parted(node.reason)[1]
        found[name] = ours(reason, doing.speaker, behind)
    return found


def need_ours(doing: Doing, nodes: "Mapping[str, NodeRecord]", what: str) -> None:
    """Raise NotYours if any of the nodes shows somebody else's reason.

    Args:
        doing: Context of the operation: speaker and ``force``.
        nodes: Nodes in their present state.
        what: What the operation does, for the message: ``resume``.

    Raises:
        NotYours: A node shows somebody else's reason.
    """
    if doing.force:
        return
    slurm_user = _slurm_user(doing, nodes)
    theirs = [node for node in nodes.values() if not _is_free(doing, node, slurm_user)]
    if not theirs:
        return
    first = theirs[0]
    by = f" by {first.reason_user}" if first.reason_user else ""
    more = f", and {len(theirs) - 1} more are others'" if len(theirs) > 1 else ""
    raise NotYours(
        f"{first.name} shows the reason {safe(first.reason)!r}{by}{more}: "
        f"--force does {what} all the same; nothing was changed",
        tuple(node.name for node in theirs),
    )


def _is_free(doing: Doing, node: "NodeRecord", slurm_user: str) -> bool:
    """Return whether the caller may replace a node's reason."""
    # Drained or down without a reason: Slurm permits that to SlurmUser only.
    return (
        not node.reason
        or is_ours(node.reason, doing.speaker)
        or _is_slurms(node, slurm_user)
        or _is_left(doing, node)
    )


def _is_slurms(node: "NodeRecord", slurm_user: str) -> bool:
    """Return whether slurmctld itself set a node's reason."""
    return is_slurms(node.reason, node.reason_user == slurm_user)


def _is_left(doing: Doing, node: "NodeRecord") -> bool:
    """Return whether a resume left this reason behind (Slurm 23.02 up to, not including, 26.05)."""
    if not node.reason or is_out(node):
        return False
    return _LEAVES_SINCE <= doing.slurm.version() < _LEAVES_UNTIL


def _slurm_user(doing: Doing, nodes: "Mapping[str, NodeRecord]") -> str:
    """Return SlurmUser's name; "" if no node shows a reason, which saves the query."""
    if not any(node.reason for node in nodes.values()):
        return ""
    return doing.slurm.config().get("SlurmUser", "").partition("(")[0]
