"""``steward events``: list events and history, or follow new events as they happen.

Polls the daemon once a second and waits up to 30 s while it restarts.
"""

import time
from typing import Annotated

import msgspec
import typer

from steward.cli import options, output
from steward.cli.groups import CONTEXT
from steward.cli.options import (
    CommandCall,
    reject_empty,
    with_call_and_columns,
    with_json_call,
    with_options,
)
from steward.cli.output import find_requested_zone, format_time, print_json, print_table
from steward.core.errors import Unavailable
from steward.core.layouts import Column
from steward.reports.event_texts import describe_event
from steward.reports.events import EventItem, EventsReply, EventsRequest
from steward.reports.history.requests import HistoryEventsReply, HistoryEventsRequest

_FOLLOW_INTERVAL_S = 1.0
"""Interval between polls of ``tail``, in seconds."""
_LONGEST_OUTAGE_S = 30.0
"""Longest wait for a daemon that restarts, in seconds."""

app = typer.Typer(context_settings=CONTEXT, add_completion=False)

Since = Annotated[
    str,
    typer.Option(
        "--starttime", "--since", "-S", metavar="TIME", help="Since: now-1day, 2026-11-21T08:00."
    ),
]
Until = Annotated[
    str, typer.Option("--endtime", "--until", "-E", metavar="TIME", help="Until this time.")
]


def _read_filter_options(
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", "-k", metavar="KIND,…", help="Only these kinds.", callback=reject_empty
        ),
    ] = None,
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            "--clusters", "-M", metavar="NAME,…", help="Only these.", callback=reject_empty
        ),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            *("--nodelist", "-w"),
            metavar="NODES",
            help="Only these nodes.",
            callback=reject_empty,
        ),
    ] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only nodes that failed.")] = False,
) -> EventsRequest:
    """Read the options that filter events."""
    return EventsRequest(
        kinds=options.split_lists(kinds),
        clusters=options.split_lists(clusters),
        nodes=nodes,
        failed=failed,
    )


@app.callback(invoke_without_command=True)
@with_json_call
def events(call: CommandCall, context: typer.Context) -> None:
    """Show what happens: nodes that go down, daemons, rules.

    Without a command the newest are listed.
    """
    if context.invoked_subcommand is None:
        _print_newest(EventsRequest(), call)


@app.command("list")
@with_call_and_columns
@with_options(_read_filter_options)
def list_events(
    event_filter: EventsRequest,
    call: CommandCall,
    since: Since = "",
    until: Until = "",
    limit: Annotated[
        int, typer.Option("--limit", "-L", min=1, help="How many at most: the newest.")
    ] = 50,
    history: Annotated[
        bool,
        typer.Option("--history", help="Of years, not of the hours that the journal keeps."),
    ] = False,
) -> None:
    """List what happened, the newest last.

    The history has states, thresholds and rules, and none of jobs.
    """
    request = msgspec.structs.replace(
        event_filter, since=since, until=until, zone=find_requested_zone(), limit=limit
    )
    if history:
        _print_history(request, call)
    else:
        _print_newest(request, call)


def _print_history(request: EventsRequest, call: CommandCall) -> None:
    """Print past events from the history."""
    fields = msgspec.structs.asdict(request)
    del fields["after"]
    reply: HistoryEventsReply = call.send("history.events", HistoryEventsRequest(**fields))
    if call.style.json:
        print_json(reply)
    else:
        print_table(_EVENTS_COLUMNS, reply.events[::-1], call.style)


def _print_newest(request: EventsRequest, call: CommandCall) -> None:
    """Print the newest events of the journal."""
    reply: EventsReply = call.send("events.list", request)
    if call.style.json:
        print_json(reply)
    else:
        print_table(_EVENTS_COLUMNS, reply.events, call.style)


@app.command()
@with_json_call
@with_options(_read_filter_options)
def tail(
    event_filter: EventsRequest,
    call: CommandCall,
    lines: Annotated[
        int, typer.Option("--lines", "-L", min=0, help="How many of the past come first.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Go on as more happens.")
    ] = True,
) -> None:
    """Show what happens as it happens, until Ctrl-C.

    With --json an event is a line.
    """
    first_request = msgspec.structs.replace(event_filter, limit=max(1, lines))
    reply: EventsReply = call.send("events.list", first_request)
    _print_live(reply.events if lines else (), as_json=call.style.json)
    while follow:
        time.sleep(_FOLLOW_INTERVAL_S)
        next_request = msgspec.structs.replace(event_filter, after=reply.position, limit=1000)
        reply = _fetch_more(call, next_request)
        _print_live(reply.events, as_json=call.style.json)


def _fetch_more(call: CommandCall, request: EventsRequest) -> EventsReply:
    """Return the next events, waiting for a daemon that restarts.

    Raises:
        Unavailable: The daemon was away for more than 30 s.
    """
    deadline = time.monotonic() + _LONGEST_OUTAGE_S
    while True:
        try:
            reply: EventsReply = call.send("events.list", request)
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_FOLLOW_INTERVAL_S)
        else:
            return reply


def _print_live(events: tuple[EventItem, ...], *, as_json: bool) -> None:
    """Print events as they arrive, a line each."""
    for event in events:
        if as_json:
            output.write_bytes(msgspec.json.encode(event) + b"\n")
        else:
            description = describe_event(event)
            parts = (
                format_time(event.at),
                event.cluster,
                description.subject,
                description.what,
                description.why,
            )
            print(output.escape_unprintable("  ".join(filter(None, parts))), flush=True)


_EVENTS_COLUMNS = [
    Column("ID", "id", "count", show="requested"),
    Column("Time", "at", "time"),
    Column("Cluster", "cluster"),
    Column("Kind", "kind", show="requested"),
    Column("Subject", lambda event, _: describe_event(event).subject),
    Column("What", lambda event, _: describe_event(event).what),
    Column("Why", lambda event, _: describe_event(event).why, max_width=60),
    Column("Source", lambda event, _: describe_event(event).source),
    Column("Failed", lambda event, _: describe_event(event).failed or None, show="requested"),
]
"""Columns of the table of events."""
