"""Node operations: get, down, drain, resume and update, through ``scontrol update node``.

Each change of a state or a reason first checks whose reason the node shows
(:mod:`steward.automation.node_reasons`); then ``change_nodes`` applies it and reports old and new
state per node. The ``_is_*`` functions check after an interruption whether a change took effect.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from steward.automation.errors import InvalidParameters, OperationForbidden, PartialFailure
from steward.automation.node_reasons import compose_reasons, has_out_state, require_own_reasons
from steward.automation.operation import OperationContext, Parameters, operation
from steward.core.actions import described
from steward.core.errors import StewardError

if TYPE_CHECKING:
    from steward.slurm.cluster_records import NodeRecord


NodeList = Annotated[str, described("Nodes, in any form that Slurm accepts: n1,n[3-5].")]
NodeReason = Annotated[str, described("Reason; Steward appends the name of the caller.")]
_STATES_WITH_REASON: Final = frozenset({"DOWN", "DRAIN", "FAIL"})
"""States that require a reason."""


class NodesGetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.get."""

    nodes: NodeList


class NodesOutParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.down and slurm.node.drain."""

    nodes: NodeList
    reason: NodeReason


class NodesResumeParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.resume."""

    nodes: NodeList


class NodesUpdateParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.update."""

    nodes: NodeList
    infos: Annotated[
        dict[str, Any],
        described(
            "Fields to set, named as in 'scontrol update node': "
            '{"weight": 10, "comment": "on loan"}.'
        ),
    ]


def _is_drained(context: OperationContext, parameters: NodesOutParameters) -> bool | None:
    """Check after an interruption: are all nodes drained?"""
    return _check_all_nodes(context, parameters.nodes, lambda node: "DRAIN" in node.flags)


def _is_down(context: OperationContext, parameters: NodesOutParameters) -> bool | None:
    """Check after an interruption: are all nodes down?"""
    return _check_all_nodes(context, parameters.nodes, lambda node: node.base == "DOWN")


def _is_resumed(context: OperationContext, parameters: NodesResumeParameters) -> bool | None:
    """Check after an interruption: is no node out of service?"""
    return _check_all_nodes(context, parameters.nodes, lambda node: not has_out_state(node))


def _check_all_nodes(
    context: OperationContext, nodes: str, predicate: "Callable[[NodeRecord], bool]"
) -> bool | None:
    """Return whether a predicate holds for all nodes; None if Slurm does not answer."""
    try:
        return all(map(predicate, context.machine.nodes(nodes).values()))
    except StewardError:
        return None


@operation("slurm.node.get", only_reads=True, pack=True)
def get_nodes(context: OperationContext, parameters: NodesGetParameters) -> dict[str, Any]:
    """Show details of nodes.

    Returns:
        Details of each node as Slurm shows them, by its name.
    """
    if not context.access.can_see_nodes(context.caller, context.cluster):
        raise OperationForbidden(
            f"permission denied: only operators may see the nodes of {context.cluster} "
            "(PrivateData)"
        )
    return {name: node.details for name, node in context.machine.nodes(parameters.nodes).items()}


@operation("slurm.node.down", role="administrator", pack=True, check=_is_down)
def set_nodes_down(context: OperationContext, parameters: NodesOutParameters) -> dict[str, Any]:
    """Set nodes down.

    Returns:
        State of each node before and after, its reason, and whether it was changed.
    """
    return _take_out_of_service(context, parameters, "DOWN", lambda node: node.base == "DOWN")


@operation("slurm.node.drain", role="administrator", pack=True, check=_is_drained)
def drain_nodes(context: OperationContext, parameters: NodesOutParameters) -> dict[str, Any]:
    """Drain nodes: running jobs continue, no new ones start.

    Returns:
        State of each node before and after, its reason, and whether it was changed.
    """
    return _take_out_of_service(context, parameters, "DRAIN", lambda node: "DRAIN" in node.flags)


@operation("slurm.node.resume", role="administrator", pack=True, check=_is_resumed)
def resume_nodes(context: OperationContext, parameters: NodesResumeParameters) -> dict[str, Any]:
    """Resume nodes that are drained, down or failing.

    Returns:
        State of each node before and after, its reason, and whether it was changed.
    """
    nodes = context.machine.nodes(parameters.nodes)
    out = {name: node for name, node in nodes.items() if has_out_state(node)}
    require_own_reasons(context, out, "resume it")
    return change_nodes(
        context, nodes, lambda: context.cluster_changes.set_state(list(out), "RESUME"), out
    )


@operation("slurm.node.update", role="administrator", pack=True)
def update_node_fields(
    context: OperationContext, parameters: NodesUpdateParameters
) -> dict[str, Any]:
    """Change fields of nodes.

    A state or reason obeys the rules of the other operations.

    Returns:
        State of each node before and after, its reason, and whether it was changed.
    """
    nodes = context.machine.nodes(parameters.nodes)
    infos = _parse_node_infos(parameters.infos)
    reason = str(infos.pop("Reason", ""))
    state = str(infos.get("State", "")).strip().upper()
    if state in _STATES_WITH_REASON and not reason.strip():
        raise InvalidParameters(f"state {state} requires a reason: add one to infos")
    if "State" in infos and state not in _STATES_WITH_REASON:
        require_own_reasons(
            context,
            {name: node for name, node in nodes.items() if has_out_state(node)},
            "change it",
        )
    if not reason:
        return change_nodes(
            context, nodes, lambda: context.cluster_changes.update_nodes(list(nodes), infos)
        )
    reasons = compose_reasons(context, nodes, reason)
    return change_nodes(
        context,
        nodes,
        lambda: _change_by_reason(
            reasons,
            lambda node_names, why: context.cluster_changes.update_nodes(
                node_names, {**infos, "Reason": why}
            ),
        ),
    )


def _parse_node_infos(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Convert names of fields to Slurm's, or raise InvalidParameters."""
    from steward.slurm import WrongUpdate
    from steward.slurm.cluster_changes import normalize_node_changes

    try:
        return normalize_node_changes(infos)
    except WrongUpdate as error:
        raise InvalidParameters(f"slurm.node.update: {error}") from error


def _take_out_of_service(
    context: OperationContext,
    parameters: NodesOutParameters,
    state: Literal["DOWN", "DRAIN"],
    is_done: "Callable[[NodeRecord], bool]",
) -> dict[str, Any]:
    """Set nodes down or drain them, except those that are so already, with the same reason."""
    nodes = context.machine.nodes(parameters.nodes)
    reasons = compose_reasons(context, nodes, parameters.reason)
    remaining = {
        name: node
        for name, node in nodes.items()
        if not (is_done(node) and node.reason == reasons[name])
    }
    return change_nodes(
        context,
        nodes,
        lambda: _change_by_reason(
            {name: reasons[name] for name in remaining},
            lambda node_names, why: context.cluster_changes.set_state(node_names, state, why),
        ),
        remaining,
    )


def change_nodes(
    context: OperationContext,
    before: "Mapping[str, NodeRecord]",
    change: Callable[[], Mapping[str, str]],
    selected: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Apply a change to nodes and return each node's state before and after.

    Args:
        context: Context of the operation.
        before: Nodes before the change, by name.
        change: Function that does it and returns Slurm's error per node, "" for none.
        selected: Nodes that need the change; None for all.

    Raises:
        PartialFailure: Slurm rejected the change for some nodes.
    """
    names = list(before if selected is None else selected)
    if context.dry_run:
        return {
            name: _describe_node_change(
                node.state, node.state, node.reason, changed=False, would_change=name in names
            )
            for name, node in before.items()
        }
    errors: Mapping[str, str] = {}
    if names:
        context.begin()
        errors = change()
    after = context.machine.nodes(",".join(before))
    result = {
        name: _describe_node_change(
            node.state,
            after[name].state,
            after[name].reason,
            changed=name in names and not errors.get(name),
            message=errors.get(name, ""),
        )
        for name, node in before.items()
    }
    failed = [name for name in names if errors.get(name)]
    if failed:
        more = f" ({len(failed)} of {len(names)})" if len(names) > 1 else ""
        raise PartialFailure(f"{failed[0]}: {errors[failed[0]]}{more}", result)
    return result


def _describe_node_change(
    old: str, new: str, reason: str, *, changed: bool, would_change: bool = False, message: str = ""
) -> dict[str, Any]:
    """Describe one node's change for the result."""
    outcome: dict[str, Any] = {"state": new, "old_state": old, "reason": reason, "changed": changed}
    if would_change:
        outcome["would_change"] = True
    if message:
        outcome["message"] = message
    return outcome


def _change_by_reason(
    reasons: Mapping[str, str], change: Callable[[list[str], str], Mapping[str, str]]
) -> dict[str, str]:
    """Change nodes in one call per distinct reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_by_reason.setdefault(reason, []).append(name)
    errors: dict[str, str] = {}
    for reason, names in names_by_reason.items():
        errors.update(change(names, reason))
    return errors
