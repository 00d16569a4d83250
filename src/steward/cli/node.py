"""``steward node``: node states now or at a past time, with jobs and events of the nodes."""

from typing import Annotated

from msgspec.structs import replace

from steward.cli import output
from steward.cli.commands import print_reply, with_request
from steward.cli.options import CommandCall, with_table_call
from steward.cli.output import format_time, print_json
from steward.cli.parameters import Argument, Option
from steward.core.errors import NotFound
from steward.reports.event_texts import NODE_EVENT_LAYOUT
from steward.reports.history.requests import (
    HistoryEventsReply,
    HistoryEventsRequest,
    NodeJobsReply,
    NodeJobsRequest,
    NodesReply,
    NodesRequest,
)
from steward.slurm.nodelists import expand_nodelist


@with_table_call
@with_request("history.nodes")
def node(
    request: NodesRequest,
    call: CommandCall,
    names: Annotated[
        list[str] | None,
        Argument(metavar="NODE", help="Only these nodes: n7, n[1-9]. Default: all."),
    ] = None,
    jobs: Annotated[
        bool, Option("--jobs", "-j", help="List the jobs that run or ran on the nodes.")
    ] = False,
    events: Annotated[
        bool, Option("--events", "-e", help="List the last events of the nodes.")
    ] = False,
) -> None:
    """Show node states, now or at a past time, with the jobs they ran.

    States are those that the sensor observed.
    """
    nodelist, cluster, zone = ",".join(names or ()), request.cluster, request.zone
    if jobs:
        for name in names or ():
            _print_jobs(call, NodeJobsRequest(node=name, cluster=cluster, at=request.at, zone=zone))
    elif events:
        clusters = (cluster,) if cluster else ()
        events_request = HistoryEventsRequest(
            kinds=("node.state",), clusters=clusters, nodes=nodelist, until=request.at, zone=zone
        )
        _print_events(call, events_request)
    else:
        _print_nodes(call, replace(request, nodes=nodelist))


def _print_nodes(call: CommandCall, request: NodesRequest) -> None:
    """Print nodes, now or at a past time."""
    reply: NodesReply = call.send("history.nodes", request)
    if reply.sensor and not (request.at or request.partitions or request.states):
        _require_seen(request.nodes, reply)
    if call.style.json:
        print_json(reply)
        return
    print_reply(reply, call.style, "nodes")
    for name, since in sorted(reply.silent_since.items()):
        output.print_warning(
            f"slurmctld of cluster {name} does not answer: node states are those of "
            f"{format_time(since)}; see 'steward status'"
        )
    if not reply.sensor:
        output.print_warning(
            "node states are unknown without a sensor: set 'enabled = true' in [sensor]"
        )


def _require_seen(nodelist: str, reply: NodesReply) -> None:
    """Fail if the sensor has not seen a node that was named."""
    seen_names = {node.node for node in reply.nodes}
    names = expand_nodelist(nodelist) if nodelist else ()
    missing_names = [name for name in names if name not in seen_names]
    if missing_names:
        raise NotFound(
            (
                f"unknown node {', '.join(missing_names[:5])}: the sensor has not seen it; "
                "'steward node' lists the known ones"
            ),
            missing_names,
        )


def _print_jobs(call: CommandCall, request: NodeJobsRequest) -> None:
    """Print the jobs that run, or ran, on a node."""
    reply: NodeJobsReply = call.send("history.node_jobs", request)
    if call.style.json:
        print_json(reply)
        return
    print_reply(reply, call.style, "jobs")
    if len(reply.jobs) < reply.total:
        output.print_warning(
            f"only the {len(reply.jobs)} runs that started last are shown, of {reply.total}: "
            "the API lists more, with 'limit'"
        )


def _print_events(call: CommandCall, request: HistoryEventsRequest) -> None:
    """Print the last events of nodes, newest last."""
    reply: HistoryEventsReply = call.send("history.events", request)
    if call.style.json:
        print_json(reply)
        return
    oldest_first = replace(reply, events=reply.events[::-1])
    print_reply(oldest_first, call.style, "events", columns=NODE_EVENT_LAYOUT)
