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


def sign_reason(reason: str, speaker: str, previous: str = "") -> str:
    """Sign a reason for Slurm and append slurmctld's own previous reason.

    Args:
        reason: Reason as the caller gave it.
        speaker: Person or rule that signs it.
        previous: slurmctld's own previous reason; "" if none.

    Raises:
        UsageError: The reason is empty.
    """
    text = clean_reason(_SIGNATURE_PATTERN.sub("", reason))
    if not text:
        raise UsageError("no reason given: add reason=…")
    signer = clean_reason("".join(c for c in speaker if c not in "()"))[:64].strip() or "nobody"
    signature = f" (steward: {signer})"
    suffix = (
        f"{_PREVIOUS_SEPARATOR}{clean_reason(previous)}"
        if previous and previous not in text
        else ""
    )
    max_text_length = MAX_REASON_LENGTH - len(signature)
    return (text + suffix)[:max_text_length].rstrip() + signature


def shows_reason(current: str, reason: str, speaker: str) -> bool:
    """Return whether a node already shows this reason, with or without slurmctld's own text."""
    signed = sign_reason(reason, speaker)
    current = split_slurm_suffix(current)[0]
    text, signer = signed.removesuffix(f" (steward: {read_signer(signed)})"), read_signer(signed)
    has_suffix = (
        current.startswith(f"{text}{_PREVIOUS_SEPARATOR}") and read_signer(current) == signer
    )
    return current == signed or has_suffix


def read_signer(reason: str) -> str:
    """Return who signed a reason through Steward; "" if nobody did."""
    match = _SIGNATURE_PATTERN.search(split_slurm_suffix(reason)[0])
    return match[1].strip() if match else ""


def split_slurm_suffix(reason: str) -> tuple[str, str]:
    """Split a reason from what slurmctld itself appended (`` : Not responding``, Slurm 23.11)."""
    text, suffix = reason, ""
    while True:
        before, colon, appended = text.rpartition(_APPENDED_SEPARATOR)
        if not colon or _SLURMCTLD_REASON_PATTERN.match(appended) is None:
            return text, suffix
        text, suffix = before, f"{appended}{_APPENDED_SEPARATOR}{suffix}" if suffix else appended


def is_replaceable_by(reason: str, speaker: str = "") -> bool:
    """Return whether a reason was set by Steward and ``speaker`` may replace it.

    Args:
        reason: Reason that the node shows.
        speaker: Person or rule that wants to replace it; "" for anybody.
    """
    signer = read_signer(reason)
    return bool(signer) and (
        not speaker or signer == speaker or signer.startswith(_RULE_SPEAKER_PREFIX)
    )


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
    context: OperationContext, nodes: "Mapping[str, NodeRecord]", reason: str
) -> dict[str, str]:
    """Compute the reason that each node is to get.

    Args:
        context: Context of the operation: speaker and ``force``.
        nodes: Nodes in their present state.
        reason: Reason as the caller gave it.

    Returns:
        Signed reason by node, followed by a previous reason that slurmctld set or that belongs to
        nobody.

    Raises:
        OperationForbidden: A node shows somebody else's reason.
    """
    require_own_reasons(context, nodes, "change the reason")
    slurm_user = _look_up_slurm_user(context, nodes)
    reasons: dict[str, str] = {}
    for name, node in nodes.items():
        if has_out_state(node) and shows_reason(node.reason, reason, context.speaker):
            reasons[name] = node.reason
            continue
        is_unowned = _is_reason_by_slurmctld(node, slurm_user) or _is_stale_reason(context, node)
        suffix = node.reason if is_unowned and not read_signer(node.reason) else ""
        suffix = suffix or split_slurm_suffix(node.reason)[1]
        reasons[name] = sign_reason(reason, context.speaker, suffix)
    return reasons


def require_own_reasons(
    context: OperationContext, nodes: "Mapping[str, NodeRecord]", purpose: str
) -> None:
    """Raise OperationForbidden if any of the nodes shows somebody else's reason.

    Args:
        context: Context of the operation: speaker and ``force``.
        nodes: Nodes in their present state.
        purpose: What the operation does, for the message: ``resume``.

    Raises:
        OperationForbidden: A node shows somebody else's reason.
    """
    if context.force:
        return
    slurm_user = _look_up_slurm_user(context, nodes)
    foreign = [
        node for node in nodes.values() if not _can_replace_reason(context, node, slurm_user)
    ]
    if not foreign:
        return
    first = foreign[0]
    author = f" by {first.reason_user}" if first.reason_user else ""
    others = f"; {len(foreign) - 1} more have reasons of others" if len(foreign) > 1 else ""
    raise OperationForbidden(
        f"node {first.name} has the reason {escape_line(first.reason)!r}{author}{others}: "
        f"nothing changed. Add --force to {purpose} anyway",
        tuple(node.name for node in foreign),
    )


def _can_replace_reason(context: OperationContext, node: "NodeRecord", slurm_user: str) -> bool:
    """Return whether the caller may replace a node's reason."""
    # Drained or down without a reason: Slurm permits that to SlurmUser only.
    return (
        not node.reason
        or is_replaceable_by(node.reason, context.speaker)
        or _is_reason_by_slurmctld(node, slurm_user)
        or _is_stale_reason(context, node)
    )


def _is_reason_by_slurmctld(node: "NodeRecord", slurm_user: str) -> bool:
    """Return whether slurmctld itself set a node's reason."""
    return is_set_by_slurmctld(node.reason, node.reason_user == slurm_user)


def _is_stale_reason(context: OperationContext, node: "NodeRecord") -> bool:
    """Return whether a resume left this reason behind (Slurm 23.02 up to, not including, 26.05)."""
    if not node.reason or has_out_state(node):
        return False
    return _STALE_REASON_SINCE <= context.slurm.version() < _STALE_REASON_UNTIL


def _look_up_slurm_user(context: OperationContext, nodes: "Mapping[str, NodeRecord]") -> str:
    """Return SlurmUser's name; "" if no node shows a reason, which saves the query."""
    if not any(node.reason for node in nodes.values()):
        return ""
    return context.slurm.config().get("SlurmUser", "").partition("(")[0]
