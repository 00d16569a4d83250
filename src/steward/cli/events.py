"""``steward events``: what happens, as it happens: nodes that go down, daemons, rules."""

import time
from typing import Annotated, Any

import msgspec
import typer

from steward.bank_facts import BankThreshold
from steward.cli import options, output
from steward.cli.client import action, call
from steward.cli.lazy import CONTEXT
from steward.cli.options import Place
from steward.cli.times import show as show_time
from steward.cli.times import zone_to_ask_in
from steward.errors import Unavailable
from steward.events import BODIES, ControllerState, JobFacts
from steward.journal.telling import EventsAnswer, EventsRequest, EventTold
from steward.state_facts import NodeState, PartitionState, ReservationState, RuleExecution

_EVERY_S = 1.0
_PATIENCE_S = 30.0

app = typer.Typer(context_settings=CONTEXT, add_completion=False)

Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", "-k", metavar="KIND,…", help="Only these kinds.", callback=options.not_empty
    ),
]
Nodes = Annotated[
    str,
    typer.Option(
        "--nodelist", "-w", metavar="NODES", help="Only these nodes.", callback=options.not_empty
    ),
]
Clusters = Annotated[
    list[str] | None,
    typer.Option(
        "--clusters", "-M", metavar="NAME,…", help="Only these.", callback=options.not_empty
    ),
]
Failed = Annotated[bool, typer.Option("--failed", help="Only nodes that failed.")]
Since = Annotated[
    str,
    typer.Option(
        "--starttime", "--since", "-S", metavar="TIME", help="Since: now-1day, 2026-11-21T08:00."
    ),
]
Until = Annotated[
    str, typer.Option("--endtime", "--until", "-E", metavar="TIME", help="Until this time.")
]


@app.callback(invoke_without_command=True)
def events(
    context: typer.Context,
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Show what happens: nodes that go down, daemons, rules.

    Without a command the newest are listed.
    """
    if context.invoked_subcommand is None:
        _list(EventsRequest(), Place(config=config, socket=socket), options.style(as_json))


@app.command("list")
def list_events(
    kinds: Kinds = None,
    clusters: Clusters = None,
    nodes: Nodes = "",
    failed: Failed = False,
    since: Since = "",
    until: Until = "",
    limit: Annotated[
        int, typer.Option("--limit", "-L", min=1, help="How many at most: the newest.")
    ] = 50,
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    columns: options.Format = "",
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """List what happened, the newest last."""
    request = EventsRequest(
        kinds=options.split(kinds),
        clusters=options.split(clusters),
        nodes=nodes,
        failed=failed,
        since=since,
        until=until,
        zone=zone_to_ask_in(),
        limit=limit,
    )
    style = options.style(as_json, parsable, noheader, columns)
    _list(request, Place(config=config, socket=socket), style)


def _list(request: EventsRequest, place: Place, style: output.Style) -> None:
    answer: EventsAnswer = call(place, action("events.list"), request)
    if style.json:
        output.print_json(answer)
    else:
        output.print_table(_COLUMNS, answer.events, style)


@app.command()
def tail(
    kinds: Kinds = None,
    clusters: Clusters = None,
    nodes: Nodes = "",
    failed: Failed = False,
    lines: Annotated[
        int, typer.Option("--lines", "-L", min=0, help="How many of the past come first.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Go on as more happens.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, an event a line, for programs.")
    ] = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Show what happens as it happens, until Ctrl-C."""
    place = Place(config=config, socket=socket)
    request = EventsRequest(
        kinds=options.split(kinds),
        clusters=options.split(clusters),
        nodes=nodes,
        failed=failed,
        limit=max(1, lines),
    )
    answer: EventsAnswer = call(place, action("events.list"), request)
    _print(answer.events if lines else (), as_json=as_json)
    while follow:
        time.sleep(_EVERY_S)
        answer = _more(place, _behind(request, answer.position))
        _print(answer.events, as_json=as_json)


def _behind(request: EventsRequest, position: int) -> EventsRequest:
    return EventsRequest(
        kinds=request.kinds,
        clusters=request.clusters,
        nodes=request.nodes,
        failed=request.failed,
        after=position,
        limit=1000,
    )


def _more(place: Place, request: EventsRequest) -> EventsAnswer:
    """The next events; a daemon that is being started anew is waited for.

    Raises:
        Unavailable: It was away for too long.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            answer: EventsAnswer = call(place, action("events.list"), request)
        except Unavailable:
            if time.monotonic() >= until:
                raise
            time.sleep(_EVERY_S)
        else:
            return answer


def _print(told: tuple[EventTold, ...], *, as_json: bool) -> None:
    for event in told:
        if as_json:
            output.write(msgspec.json.encode(event) + b"\n")
        else:
            words = (show_time(event.at), event.cluster, _subject(event), _what(event), _why(event))
            print(output.printable("  ".join(word for word in words if word)), flush=True)


def _body(event: EventTold) -> Any:
    """The body as what it is; one that came over the socket is plain values yet."""
    kind = BODIES.get(event.kind)
    if kind is None or isinstance(event.body, kind):
        return event.body
    return msgspec.convert(event.body, kind)


def _subject(event: EventTold) -> str:
    body = _body(event)
    if isinstance(body, NodeState):
        return body.node
    if isinstance(body, PartitionState):
        return f"partition {body.partition}"
    if isinstance(body, ReservationState):
        return f"reservation {body.reservation}"
    if isinstance(body, ControllerState):
        return body.daemon
    if isinstance(body, BankThreshold):
        return f"account {body.account}"
    if isinstance(body, RuleExecution):
        return f"rule {body.rule}"
    if isinstance(body, JobFacts):
        return f"job {body.record.job_id}"
    return event.kind


def _what(event: EventTold) -> str:
    body = _body(event)
    if isinstance(body, NodeState | PartitionState | ReservationState):
        is_same = body.old_state in ("", body.state)
        return body.state if is_same else f"{body.old_state} -> {body.state}"
    if isinstance(body, ControllerState):
        return "restarted" if body.restarted else ("up" if body.up else "down")
    if isinstance(body, BankThreshold):
        return f"{body.value}% used" if body.kind == "used" else f"ends in {body.value} days"
    if isinstance(body, RuleExecution):
        return f"{body.action} {body.status}"
    return str(body.record.state) if isinstance(body, JobFacts) else ""


def _why(event: EventTold) -> str:
    body = _body(event)
    if isinstance(body, NodeState):
        who = f" [{body.reason_user}]" if body.reason_user else ""
        return f"{body.reason}{who}" if body.reason else ""
    if isinstance(body, RuleExecution | ControllerState):
        return body.message
    return ""


_COLUMNS = [
    output.Column("ID", lambda event: str(event.id), right=True, usual=False),
    output.Column("Time", lambda event: show_time(event.at)),
    output.Column("Cluster", lambda event: event.cluster),
    output.Column("Kind", lambda event: event.kind, usual=False),
    output.Column("Subject", _subject),
    output.Column("What", _what),
    output.Column("Why", _why, widest=60),
    output.Column("Source", lambda event: getattr(_body(event), "source", event.source)),
    output.Column(
        "Failed", lambda event: "yes" if getattr(_body(event), "failed", False) else "", usual=False
    ),
]
"""What a table has of each event."""
