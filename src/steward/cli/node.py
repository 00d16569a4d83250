"""``steward node``: node states now or at a past time, with jobs and events of the nodes."""

from typing import Annotated

import typer

from steward.cli import options, output
from steward.cli.options import Asked, asking_columns, not_empty
from steward.cli.output import (
    Column,
    number,
    print_json,
    print_table,
    show_time,
    size,
    zone_to_ask_in,
)
from steward.core.errors import Missing
from steward.reports.event_texts import words
from steward.reports.events import EventTold
from steward.reports.history.requests import (
    EventsAnswer,
    EventsRequest,
    JobThen,
    NodeJobsAnswer,
    NodeJobsRequest,
    NodesAnswer,
    NodesRequest,
    NodeThen,
)
from steward.slurm.nodelists import expand


@asking_columns
def node(
    asked: Asked,
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
            callback=not_empty,
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            *("--state", "-s"),
            metavar="STATE,…",
            help="Only so: DOWN, DRAIN, IDLE …",
            callback=not_empty,
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
    zone = zone_to_ask_in()
    wanted = ",".join(names or ())
    if jobs:
        for one in names or ():
            _print_jobs(asked, NodeJobsRequest(node=one, cluster=cluster, at=at, zone=zone))
        return
    if events:
        clusters = (cluster,) if cluster else ()
        request = EventsRequest(
            kinds=("node.state",), clusters=clusters, nodes=wanted, until=at, zone=zone
        )
        _print_events(asked, request)
        return
    answer: NodesAnswer = asked.call(
        "history.nodes",
        NodesRequest(
            cluster=cluster,
            nodes=wanted,
            partitions=options.split(partitions),
            states=options.split(states),
            at=at,
            zone=zone,
        ),
    )
    if answer.sensor and wanted and not (at or partitions or states):
        _need_seen(wanted, answer)
    if asked.style.json:
        print_json(answer)
        return
    print_table(_nodes(answer), answer.nodes, asked.style)
    for one, since in sorted(answer.silent_since.items()):
        output.warn(
            f"slurmctld of cluster {one} does not answer: its nodes are shown as they were at "
            f"{show_time(since)}; see 'steward status'"
        )
    if not answer.sensor:
        output.warn(
            "there is no sensor, which alone tells of nodes: set enabled = true in [sensor]"
        )


def _need_seen(wanted: str, answer: NodesAnswer) -> None:
    """Fail if the sensor has not seen a node that was named."""
    seen = {one.node for one in answer.nodes}
    missing = [name for name in expand(wanted) if name not in seen]
    if missing:
        raise Missing(f"the sensor has seen no node {', '.join(missing[:5])}", missing)


def _nodes(answer: NodesAnswer) -> list[Column]:
    """Define the table of nodes."""
    clusters = {one.cluster for one in answer.nodes}

    def since(one: NodeThen) -> str:
        # If the sensor did not see the change, this is when it first saw the state.
        return f"{'' if one.since_is_known else '<'}{show_time(one.since)}"

    return [
        Column("Cluster", lambda one: one.cluster, usual=len(clusters) > 1),
        Column("Node", lambda one: one.node),
        Column("State", lambda one: one.state),
        Column("Since", since, lambda one: show_time(one.since)),
        Column("Reason", lambda one: one.reason, widest=40),
        Column("By", lambda one: one.reason_user),
        Column("ReasonTime", lambda one: show_time(one.reason_at), usual=False),
        Column("Partitions", lambda one: ",".join(one.partitions), widest=30),
        Column("CPUs", lambda one: str(one.cpus or ""), right=True),
        Column("Memory", lambda one: size(one.memory_bytes or None), None, right=True),
        Column("GPUs", lambda one: str(one.gpus or ""), right=True),
    ]


def _print_jobs(asked: Asked, request: NodeJobsRequest) -> None:
    """Print the jobs that run, or ran, on a node."""
    answer: NodeJobsAnswer = asked.call("history.node_jobs", request)
    if asked.style.json:
        print_json(answer)
        return
    columns: list[Column] = [
        Column("JobID", _label),
        Column("User", lambda one: one.user or str(one.uid or "")),
        Column("Account", lambda one: one.account),
        Column("Name", lambda one: one.name, widest=24),
        Column("Partition", lambda one: one.partition),
        Column("State", lambda one: one.state),
        Column("Start", lambda one: show_time(one.start)),
        Column("End", lambda one: show_time(one.end)),
        Column("CPUs", lambda one: str(one.cpus), right=True),
        Column("NodeList", lambda one: one.nodelist, widest=30),
    ]
    print_table(columns, answer.jobs, asked.style)
    if not asked.style.parsable:
        whose = "" if answer.is_all else " that you may see"
        output.note(f"{number(len(answer.jobs), 'job')}{whose} at {show_time(answer.until)}.")


def _label(one: JobThen) -> str:
    return one.label


def _print_events(asked: Asked, request: EventsRequest) -> None:
    """Print the last events of nodes, newest last."""
    answer: EventsAnswer = asked.call("history.events", request)
    if asked.style.json:
        print_json(answer)
        return
    newest_last: list[EventTold] = list(reversed(answer.events))
    columns = [
        Column("Time", lambda one: show_time(one.at)),
        Column("Cluster", lambda one: one.cluster, usual=False),
        Column("Node", lambda one: words(one).subject),
        Column("What", lambda one: words(one).what),
        Column("Why", lambda one: words(one).why, widest=60),
        Column("Failed", lambda one: "yes" if words(one).failed else "", usual=False),
    ]
    print_table(columns, newest_last, asked.style)
