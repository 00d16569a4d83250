"""Node reasons in Slurm: sign Steward's, recognize slurmctld's, protect everybody else's.

Every reason that Steward sets ends in ``(steward: SPEAKER)``. The speaker is a person or a rule
(``rule node-down``). A rule speaks for the site: people may replace a rule's reason, and so may
other rules. No reason of anybody else is overwritten, and no drain ended, without ``--force``.

Slurm 22.05 and 26.05 clear a node's reason when it is resumed; the releases between keep it. With
those, the reason of a node in service is left over and belongs to nobody.

First come functions on reason texts (``sign_reason``, ``shows_reason``, ``read_signer``,
``is_replaceable_by``, ``is_set_by_slurmctld``), then functions on node records, which operations
call (``has_out_state``, ``compose_reasons``, ``require_own_reasons``).
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from steward.automation.errors import OperationForbidden
from steward.automation.operation import OperationContext
from steward.core.errors import UsageError
from steward.core.printable import escape_line
from steward.slurm.cluster_changes import clean_reason

if TYPE_CHECKING:
    from steward.slurm.cluster_records import NodeRecord


_SIGNATURE_PATTERN: Final = re.compile(r"\(steward: ([^()]*)\)\s*\Z")
"""Signature at the end of a reason set by Steward."""
_RULE_SPEAKER_PREFIX: Final = "rule "
"""Start of a speaker's name that is a rule."""
_PREVIOUS_SEPARATOR: Final = "; was: "
"""Separator before slurmctld's previous reason."""
_APPENDED_SEPARATOR: Final = " : "
"""Separator before what slurmctld appends to a reason."""
MAX_REASON_LENGTH: Final = 400
"""Maximum length of a reason given to Slurm, in characters."""
_SLURMCTLD_REASON_PATTERN: Final = re.compile(
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


def sign_reason(reason: str, speaker: str, old: str = "") -> str:
    """Sign a reason for Slurm and append slurmctld's own previous reason.

    Args:
        reason: Reason as the caller gave it.
        speaker: Person or rule that signs it.
        old: slurmctld's own previous reason; "" if none.

    Raises:
        UsageError: The reason is empty.
    """
    text = clean_reason(_SIGNATURE_PATTERN.sub("", reason))
    if not text:
        raise UsageError("say why: reason=…")
    by = clean_reason("".join(c for c in speaker if c not in "()"))[:64].strip() or "nobody"
    signature = f" (steward: {by})"
    behind = f"{_PREVIOUS_SEPARATOR}{clean_reason(old)}" if old and old not in text else ""
    room = MAX_REASON_LENGTH - len(signature)
    return (text + behind)[:room].rstrip() + signature


def shows_reason(shown: str, reason: str, speaker: str) -> bool:
    """Return whether a node already shows this reason, with or without slurmctld's own text."""
    wanted = sign_reason(reason, speaker)
    shown = split_slurm_suffix(shown)[0]
    text, by = wanted.removesuffix(f" (steward: {read_signer(wanted)})"), read_signer(wanted)
    behind = shown.startswith(f"{text}{_PREVIOUS_SEPARATOR}") and read_signer(shown) == by
    return shown == wanted or behind


def read_signer(reason: str) -> str:
    """Return who signed a reason through Steward; "" if nobody did."""
    found = _SIGNATURE_PATTERN.search(split_slurm_suffix(reason)[0])
    return found[1].strip() if found else ""


def split_slurm_suffix(reason: str) -> tuple[str, str]:
    """Split a reason from what slurmctld itself appended (`` : Not responding``, Slurm 23.11)."""
    text, behind = reason, ""
    while True:
        before, colon, last = text.rpartition(_APPENDED_SEPARATOR)
        if not colon or _SLURMCTLD_REASON_PATTERN.match(last) is None:
            return text, behind
        text, behind = before, f"{last}{_APPENDED_SEPARATOR}{behind}" if behind else last


def is_replaceable_by(reason: str, speaker: str = "") -> bool:
    """Return whether a reason was set by Steward and ``speaker`` may replace it.

    Args:
        reason: Reason that the node shows.
        speaker: Person or rule that wants to replace it; "" for anybody.
    """
    by = read_signer(reason)
    return bool(by) and (not speaker or by == speaker or by.startswith(_RULE_SPEAKER_PREFIX))


def is_set_by_slurmctld(reason: str, is_slurm_user: bool) -> bool:
    """Return whether slurmctld itself set a reason.

    Args:
        reason: Reason that the node shows.
        is_slurm_user: Whether Slurm reports SlurmUser as its author, as it does for its own
            reasons.
    """
    return (
        is_slurm_user
        and not read_signer(reason)
        and _SLURMCTLD_REASON_PATTERN.match(reason) is not None
    )


_OUT_OF_SERVICE: Final = frozenset({"DOWN", "ERROR"})
"""Node states that are out of service."""
_OUT_FLAGS: Final = frozenset({"DRAIN", "FAIL"})
"""Node flags that mean out of service."""
_STALE_REASON_SINCE: Final = (23, 2, 0)
"""First Slurm version in which a resume leaves the reason behind."""
_STALE_REASON_UNTIL: Final = (26, 5, 0)
"""First Slurm version in which it no longer does."""


def has_out_state(node: "NodeRecord") -> bool:
    """Return whether a node is out of service, that is whether a resume would change it."""
    return node.base in _OUT_OF_SERVICE or bool(_OUT_FLAGS & set(node.flags))


def compose_reasons(
    doing: OperationContext, nodes: "Mapping[str, NodeRecord]", reason: str
) -> dict[str, str]:
    """Compute the reason that each node is to get.

    Args:
        doing: Context of the operation: speaker and ``force``.
        nodes: Nodes in their present state.
        reason: Reason as the caller gave it.

    Returns:
        Signed reason by node, followed by a previous reason that slurmctld set or that belongs to
        nobody.

    Raises:
        OperationForbidden: A node shows somebody else's reason.
    """
    require_own_reasons(doing, nodes, "change the reason")
    slurm_user = _look_up_slurm_user(doing, nodes)
    found: dict[str, str] = {}
    for name, node in nodes.items():
        if has_out_state(node) and shows_reason(node.reason, reason, doing.speaker):
            found[name] = node.reason
            continue
        is_nobodys = _is_reason_by_slurmctld(node, slurm_user) or _is_stale_reason(doing, node)
        behind = node.reason if is_nobodys and not read_signer(node.reason) else ""
        behind = behind or split_slurm_suffix(node.reason)[1]
        found[name] = sign_reason(reason, doing.speaker, behind)
    return found


def require_own_reasons(
    doing: OperationContext, nodes: "Mapping[str, NodeRecord]", what: str
) -> None:
    """Raise OperationForbidden if any of the nodes shows somebody else's reason.

    Args:
        doing: Context of the operation: speaker and ``force``.
        nodes: Nodes in their present state.
        what: What the operation does, for the message: ``resume``.

    Raises:
        OperationForbidden: A node shows somebody else's reason.
    """
    if doing.force:
        return
    slurm_user = _look_up_slurm_user(doing, nodes)
    theirs = [node for node in nodes.values() if not _can_replace_reason(doing, node, slurm_user)]
    if not theirs:
        return
    first = theirs[0]
    by = f" by {first.reason_user}" if first.reason_user else ""
    more = f", and {len(theirs) - 1} more are others'" if len(theirs) > 1 else ""
    raise OperationForbidden(
        f"{first.name} shows the reason {escape_line(first.reason)!r}{by}{more}: "
        f"--force does {what} all the same; nothing was changed",
        tuple(node.name for node in theirs),
    )


def _can_replace_reason(doing: OperationContext, node: "NodeRecord", slurm_user: str) -> bool:
    """Return whether the caller may replace a node's reason."""
    # Drained or down without a reason: Slurm permits that to SlurmUser only.
    return (
        not node.reason
        or is_replaceable_by(node.reason, doing.speaker)
        or _is_reason_by_slurmctld(node, slurm_user)
        or _is_stale_reason(doing, node)
    )


def _is_reason_by_slurmctld(node: "NodeRecord", slurm_user: str) -> bool:
    """Return whether slurmctld itself set a node's reason."""
    return is_set_by_slurmctld(node.reason, node.reason_user == slurm_user)


def _is_stale_reason(doing: OperationContext, node: "NodeRecord") -> bool:
    """Return whether a resume left this reason behind (Slurm 23.02 up to, not including, 26.05)."""
    if not node.reason or has_out_state(node):
        return False
    return _STALE_REASON_SINCE <= doing.slurm.version() < _STALE_REASON_UNTIL


def _look_up_slurm_user(doing: OperationContext, nodes: "Mapping[str, NodeRecord]") -> str:
    """Return SlurmUser's name; "" if no node shows a reason, which saves the query."""
    if not any(node.reason for node in nodes.values()):
        return ""
    return doing.slurm.config().get("SlurmUser", "").partition("(")[0]
