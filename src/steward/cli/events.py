"""``steward events``: list events and history, or follow new events as they happen.

Polls the daemon once a second and waits up to 30 s while it restarts.
"""

import time
from typing import Annotated

import msgspec
import typer

from steward.cli import options, output
from steward.cli.groups import CONTEXT
from steward.cli.options import Asked, asking_columns, asking_json, not_empty, with_options
from steward.cli.output import Column, print_json, print_table, show_time, zone_to_ask_in
from steward.core.errors import Unavailable
from steward.reports.event_texts import words
from steward.reports.events import EventsAnswer, EventsRequest, EventTold
from steward.reports.history.requests import EventsAnswer as PastAnswer
from steward.reports.history.requests import EventsRequest as PastRequest

_EVERY_S = 1.0
"""Interval between polls of ``tail``, in seconds."""
_PATIENCE_S = 30.0
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


def _about(
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", "-k", metavar="KIND,…", help="Only these kinds.", callback=not_empty
        ),
    ] = None,
    clusters: Annotated[
        list[str] | None,
        typer.Option("--clusters", "-M", metavar="NAME,…", help="Only these.", callback=not_empty),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            *("--nodelist", "-w"),
            metavar="NODES",
            help="Only these nodes.",
            callback=not_empty,
        ),
    ] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only nodes that failed.")] = False,
) -> EventsRequest:
    """Read the options that filter events."""
    return EventsRequest(
        kinds=options.split(kinds), clusters=options.split(clusters), nodes=nodes, failed=failed
    )


@app.callback(invoke_without_command=True)
@asking_json
def events(asked: Asked, context: typer.Context) -> None:
    """Show what happens: nodes that go down, daemons, rules.

    Without a command the newest are listed.
    """
    if context.invoked_subcommand is None:
        _list(EventsRequest(), asked)


@app.command("list")
@asking_columns
@with_options(_about)
def list_events(
    about: EventsRequest,
    asked: Asked,
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
        about, since=since, until=until, zone=zone_to_ask_in(), limit=limit
    )
    if history:
        _list_history(request, asked)
    else:
        _list(request, asked)


def _list_history(request: EventsRequest, asked: Asked) -> None:
    """Print past events from the history."""
    fields = msgspec.structs.asdict(request)
    del fields["after"]
    answer: PastAnswer = asked.call("history.events", PastRequest(**fields))
    if asked.style.json:
        print_json(answer)
    else:
        print_table(_COLUMNS, answer.events[::-1], asked.style)


def _list(request: EventsRequest, asked: Asked) -> None:
    """Print the newest events of the journal."""
    answer: EventsAnswer = asked.call("events.list", request)
    if asked.style.json:
        print_json(answer)
    else:
        print_table(_COLUMNS, answer.events, asked.style)


@app.command()
@asking_json
@with_options(_about)
def tail(
    about: EventsRequest,
    asked: Asked,
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
    first = msgspec.structs.replace(about, limit=max(1, lines))
    answer: EventsAnswer = asked.call("events.list", first)
    _print(answer.events if lines else (), as_json=asked.style.json)
    while follow:
        time.sleep(_EVERY_S)
        behind = msgspec.structs.replace(about, after=answer.position, limit=1000)
        answer = _more(asked, behind)
        _print(answer.events, as_json=asked.style.json)


def _more(asked: Asked, request: EventsRequest) -> EventsAnswer:
    """Return the next events, waiting for a daemon that restarts.

    Raises:
        Unavailable: The daemon was away for more than 30 s.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            answer: EventsAnswer = asked.call("events.list", request)
        except Unavailable:
            if time.monotonic() >= until:
                raise
            time.sleep(_EVERY_S)
        else:
            return answer


def _print(told: tuple[EventTold, ...], *, as_json: bool) -> None:
    """Print events as they arrive, a line each."""
    for event in told:
        if as_json:
            output.write(msgspec.json.encode(event) + b"\n")
        else:
            told_of = words(event)
            parts = (show_time(event.at), event.cluster, told_of.subject, told_of.what, told_of.why)
            print(output.printable("  ".join(filter(None, parts))), flush=True)


_COLUMNS = [
    Column("ID", lambda event: str(event.id), right=True, usual=False),
    Column("Time", lambda event: show_time(event.at)),
    Column("Cluster", lambda event: event.cluster),
    Column("Kind", lambda event: event.kind, usual=False),
    Column("Subject", lambda event: words(event).subject),
    Column("What", lambda event: words(event).what),
    Column("Why", lambda event: words(event).why, widest=60),
    Column("Source", lambda event: words(event).source),
    Column("Failed", lambda event: "yes" if words(event).failed else "", usual=False),
]
"""Columns of the table of events."""
