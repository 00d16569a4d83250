"""``steward node``: node states now or at a past time, with jobs and events of the nodes."""

from typing import Annotated

import typer

from steward.cli import options, output
from steward.cli.options import CommandCall, reject_empty, with_call_and_columns
from steward.cli.output import (
    find_requested_zone,
    format_count,
    format_time,
    print_json,
    print_table,
)
from steward.core.errors import NotFound
from steward.core.layouts import Column
from steward.reports.event_texts import describe_event
from steward.reports.events import EventItem
from steward.reports.history.requests import (
    HistoryEventsReply,
    HistoryEventsRequest,
    NodeJobsReply,
    NodeJobsRequest,
    NodesReply,
    NodesRequest,
)
from steward.slurm.nodelists import expand_nodelist


@with_call_and_columns
def node(
    call: CommandCall,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="These: n7, n[1-9]; else all.")
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            "--at", metavar="TIME", help="How they were then: now-1day, 2026-11-21T08:00."
        ),
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", "-M", metavar="NAME", help="Of this cluster.")
    ] = "",
    partitions: Annotated[
        list[str] | None,
        typer.Option(
            *("--partition", "-r"),
            metavar="NAME,…",
            help="Only in these partitions.",
            callback=reject_empty,
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            *("--state", "-s"),
            metavar="STATE,…",
            help="Only so: DOWN, DRAIN, IDLE …",
            callback=reject_empty,
        ),
    ] = None,
    jobs: Annotated[
        bool, typer.Option("--jobs", "-j", help="List the jobs that run, or ran, there.")
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", "-e", help="List what happened to them last.")
    ] = False,
) -> None:
    """Show how nodes are, or were at a time, and what ran there.

    What is told of nodes is what the sensor has seen of them.
    """
    zone = find_requested_zone()
    nodelist = ",".join(names or ())
    if jobs:
        for name in names or ():
            _print_jobs(call, NodeJobsRequest(node=name, cluster=cluster, at=at, zone=zone))
        return
    if events:
        clusters = (cluster,) if cluster else ()
        request = HistoryEventsRequest(
            kinds=("node.state",), clusters=clusters, nodes=nodelist, until=at, zone=zone
        )
        _print_events(call, request)
        return
    reply: NodesReply = call.send(
        "history.nodes",
        NodesRequest(
            cluster=cluster,
            nodes=nodelist,
            partitions=options.split_lists(partitions),
            states=options.split_lists(states),
            at=at,
            zone=zone,
        ),
    )
    if reply.sensor and nodelist and not (at or partitions or states):
        _require_seen(nodelist, reply)
    if call.style.json:
        print_json(reply)
        return
    print_table(reply.layout, reply.nodes, call.style, reply)
    for name, since in sorted(reply.silent_since.items()):
        output.print_warning(
            f"slurmctld of cluster {name} does not answer: its nodes are shown as they were at "
            f"{format_time(since)}; see 'steward status'"
        )
    if not reply.sensor:
        output.print_warning(
            "there is no sensor, which alone tells of nodes: set enabled = true in [sensor]"
        )


def _require_seen(nodelist: str, reply: NodesReply) -> None:
    """Fail if the sensor has not seen a node that was named."""
    seen_names = {node.node for node in reply.nodes}
    missing_names = [name for name in expand_nodelist(nodelist) if name not in seen_names]
    if missing_names:
        raise NotFound(f"the sensor has seen no node {', '.join(missing_names[:5])}", missing_names)


def _print_jobs(call: CommandCall, request: NodeJobsRequest) -> None:
    """Print the jobs that run, or ran, on a node."""
    reply: NodeJobsReply = call.send("history.node_jobs", request)
    if call.style.json:
        print_json(reply)
        return
    print_table(reply.layout, reply.jobs, call.style, reply)
    if not call.style.parsable:
        visibility = "" if reply.is_all else " that you may see"
        output.print_note(
            f"{format_count(len(reply.jobs), 'job')}{visibility} at {format_time(reply.until)}."
        )


def _print_events(call: CommandCall, request: HistoryEventsRequest) -> None:
    """Print the last events of nodes, newest last."""
    reply: HistoryEventsReply = call.send("history.events", request)
    if call.style.json:
        print_json(reply)
        return
    newest_last: list[EventItem] = list(reversed(reply.events))
    columns = [
        Column("Time", "at", "time"),
        Column("Cluster", "cluster", show="requested"),
        Column("Node", lambda event, _: describe_event(event).subject),
        Column("What", lambda event, _: describe_event(event).what),
        Column("Why", lambda event, _: describe_event(event).why, max_width=60),
        Column("Failed", lambda event, _: describe_event(event).failed or None, show="requested"),
    ]
    print_table(columns, newest_last, call.style)
