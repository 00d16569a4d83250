"""Which nodes may be changed: nobody's reason is overwritten, and nobody's drain ended, unasked.

Slurm 22.05 and 26.05 take a node's reason away when it is resumed, the releases between
leave it: there the reason of a node in service is what remained, and nobody's.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from steward.automation.errors import NotYours
from steward.automation.operation import Doing
from steward.automation.reasons import is_ours, is_slurms, ours, parted, says, signed_by
from steward.core.printable import safe

if TYPE_CHECKING:
    from steward.slurm.machine_rows import NodeRecord

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
