"""``steward events``: list events and history, or follow new events as they happen.

Polls the daemon once a second and waits up to 30 s while it restarts.
"""

import time
from typing import Annotated

import click
import msgspec
from msgspec.structs import replace

from steward.cli import output
from steward.cli.commands import print_reply, with_request
from steward.cli.options import CommandCall, with_json_call, with_table_call
from steward.cli.output import Style, format_time, print_json
from steward.cli.parameters import Group, Option
from steward.core.errors import Unavailable
from steward.reports.event_texts import describe_event
from steward.reports.events import MAX_EVENTS, EventItem, EventsReply, EventsRequest
from steward.reports.history.requests import HistoryEventsReply, HistoryEventsRequest

_FOLLOW_INTERVAL_S = 1.0
"""Interval between polls of ``tail``, in seconds."""
_LONGEST_OUTAGE_S = 30.0
"""Longest wait for a daemon that restarts, in seconds."""


@with_json_call
def events(call: CommandCall, context: click.Context) -> None:
    """List or follow events: node failures, daemon restarts, rule executions.

    Without a subcommand, 'steward events' lists the newest events.
    """
    if context.invoked_subcommand is None:
        reply: EventsReply = call.send("events.list", EventsRequest())
        _print_events(reply, call.style)


app = Group(function=events, invoke_without_command=True)


@app.subcommand("list")
@with_table_call
@with_request("events.list")
def list_events(
    request: EventsRequest,
    call: CommandCall,
    history: Annotated[
        bool,
        Option(
            "--history",
            help=(
                "Read the state history, which covers years. The journal keeps only recent events."
            ),
        ),
    ] = False,
) -> None:
    """List past events, newest last.

    With --history, it lists events of states, thresholds and rules, but not of jobs.
    """
    if history:
        fields = msgspec.structs.asdict(request)
        del fields["after"]
        past: HistoryEventsReply = call.send("history.events", HistoryEventsRequest(**fields))
        # JSON is the reply as it is; a table has the newest event at its end.
        shown = past if call.style.json else replace(past, events=past.events[::-1])
        _print_events(shown, call.style)
    else:
        reply: EventsReply = call.send("events.list", request)
        _print_events(reply, call.style)


def _print_events(reply: EventsReply | HistoryEventsReply, style: Style) -> None:
    """Print the events of a reply as a table."""
    if style.json:
        print_json(reply)
    else:
        print_reply(reply, style, "events")


@app.subcommand()
@with_json_call
@with_request("events.list", "kinds", "clusters", "nodes", "failed")
def tail(
    request: EventsRequest,
    call: CommandCall,
    lines: Annotated[
        int,
        Option(
            "--lines", "-L", min=0, max=MAX_EVENTS, help="Number of past events to print first."
        ),
    ] = 10,
    follow: Annotated[
        bool, Option("--follow/--no-follow", "-f", help="Follow: keep printing new events.")
    ] = True,
) -> None:
    """Follow events until Ctrl-C.

    With --json, it prints one event per line.
    """
    first_request = msgspec.structs.replace(request, limit=max(1, lines))
    reply: EventsReply = call.send("events.list", first_request)
    _print_live(reply.events if lines else (), as_json=call.style.json)
    while follow:
        time.sleep(_FOLLOW_INTERVAL_S)
        next_request = msgspec.structs.replace(request, after=reply.position, limit=1000)
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
