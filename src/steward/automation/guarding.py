"""Which nodes may be changed: nobody's reason is overwritten, and nobody's drain ended, unasked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from steward.automation.errors import NotYours
from steward.automation.operation import Doing
from steward.automation.reasons import is_ours, is_slurms, ours, says
from steward.printable import safe

if TYPE_CHECKING:
    from steward.slurm.machine_rows import NodeRecord


def reasons_for(doing: Doing, nodes: "Mapping[str, NodeRecord]", reason: str) -> dict[str, str]:
    """The reason that each node is to be given.

    Args:
        doing: For whom it is, and whether others' reasons are overridden.
        nodes: The nodes as they are.
        reason: Why, as it was given.

    Returns:
        By node; with what slurmctld itself had said behind it.

    Raises:
        NotYours: One of them has somebody else's reason.
    """
    need_ours(doing, nodes, "change the reason")
    slurm_user = _slurm_user(doing, nodes)
    return {
        name: node.reason
        if says(node.reason, reason, doing.speaker)
        else ours(reason, doing.speaker, _told_by_slurm(node, slurm_user))
        for name, node in nodes.items()
    }


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
    if not node.reason:
        # Drained or down without a word, which Slurm lets only its own user do.
        return True
    return is_ours(node.reason, doing.speaker) or bool(_told_by_slurm(node, slurm_user))


def _told_by_slurm(node: "NodeRecord", slurm_user: str) -> str:
    """What slurmctld itself said of a node; "" where somebody else did."""
    return node.reason if is_slurms(node.reason, node.reason_user == slurm_user) else ""


def _slurm_user(doing: Doing, nodes: "Mapping[str, NodeRecord]") -> str:
    """SlurmUser's name, asked for where it matters."""
    if not any(node.reason for node in nodes.values()):
        return ""
    return doing.slurm.config().get("SlurmUser", "").partition("(")[0]
