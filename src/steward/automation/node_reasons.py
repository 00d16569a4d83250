"""Whose reason a node shows: somebody's by us, slurmctld's own, or somebody else's.

What Steward sets ends in ``(steward: SPEAKER)``. The speaker is a person, or a
rule (``rule node-down``), for which the site speaks and not a person: people may
replace what a rule said, and rules what another rule said.
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


_OUT_OF_SERVICE: Final = frozenset({"DOWN", "ERROR"})
_OUT_FLAGS: Final = frozenset({"DRAIN", "FAIL"})
_LEAVES_SINCE: Final = (23, 2, 0)
_LEAVES_UNTIL: Final = (26, 5, 0)


def is_out(node: "NodeRecord") -> bool:
    """Whether a node is out of service, so that a resume would end that."""
    return node.base in _OUT_OF_SERVICE or bool(_OUT_FLAGS & set(node.flags))


def reasons_for(doing: Doing, nodes: "Mapping[str, NodeRecord]", reason: str) -> dict[str, str]:
    """The reason that each node is to be given.

    Args:
        doing: For whom it is, and whether others' reasons are overridden.
        nodes: The nodes as they are.
        reason: Why, as it was given.

    Returns:
        By node; with what slurmctld itself, or nobody, had said behind it.

    Raises:
        NotYours: One of them has somebody else's reason.
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
    """Refuse to touch nodes that somebody else gave a reason for.

    Args:
        doing: For whom it is, and whether others' reasons are overridden.
        nodes: The nodes as they are.
        what: What is to be done to them: ``resume``.

    Raises:
        NotYours: One of them is somebody else's.
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
    # Drained or down without a word: Slurm lets only its own user do that.
    return (
        not node.reason
        or is_ours(node.reason, doing.speaker)
        or _is_slurms(node, slurm_user)
        or _is_left(doing, node)
    )


def _is_slurms(node: "NodeRecord", slurm_user: str) -> bool:
    """Whether slurmctld itself gave a node's reason."""
    return is_slurms(node.reason, node.reason_user == slurm_user)


def _is_left(doing: Doing, node: "NodeRecord") -> bool:
    """Whether a node's reason is one that a resume has left behind."""
    if not node.reason or is_out(node):
        return False
    return _LEAVES_SINCE <= doing.slurm.version() < _LEAVES_UNTIL


def _slurm_user(doing: Doing, nodes: "Mapping[str, NodeRecord]") -> str:
    """SlurmUser's name, asked for where it matters."""
    if not any(node.reason for node in nodes.values()):
        return ""
    return doing.slurm.config().get("SlurmUser", "").partition("(")[0]
