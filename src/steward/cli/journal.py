"""``steward journal``: state of the journal and its consumers, events, and dead letters.

``status`` and ``list`` show; ``dead`` lists dead letters, ``replay`` retries them, ``forget`` drops
a consumer that no longer exists.
"""

from datetime import UTC, datetime
from typing import Annotated

import typer

from steward.admin.journal import (
    DeadAnswer,
    DeadRequest,
    ForgetAnswer,
    ForgetRequest,
    ListAnswer,
    ListRequest,
    ReplayAnswer,
    ReplayRequest,
    StatusAnswer,
    StatusRequest,
)
from steward.cli import options, output
from steward.cli.groups import CONTEXT
from steward.cli.options import (
    LARGEST_NUMBER,
    Archive,
    Clusters,
    Config,
    Json,
    NoHeader,
    Parsable,
    Socket,
)
from steward.cli.output import format_count, format_time, print_json, print_table
from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.journal import ConsumerStatus, refill_command
from steward.core.layouts import Column
from steward.daemon.registry import get_action

app = typer.Typer(context_settings=CONTEXT, no_args_is_help=True, add_completion=False)

Consumer = Annotated[
    str, typer.Argument(metavar="CONSUMER", help="As 'journal status' names it, or a sink's name.")
]


@app.callback()
def journal() -> None:
    """Look at what Steward has recorded and what waits."""


@app.command()
def status(
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Show how the journal and its consumers stand."""
    style = options.make_style(as_json, parsable, noheader)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    reply: StatusAnswer = call_action(place, get_action("journal.status"), StatusRequest())
    if style.json:
        print_json(reply)
        return
    if not style.parsable:
        kept_verb = "is" if reply.events == 1 else "are"
        kept_text = f"{reply.events} {kept_verb} kept" if reply.events else "none is kept"
        recorded_verb = "was" if reply.head == 1 else "were"
        print(f"{format_count(reply.head, 'event')} {recorded_verb} recorded, {kept_text}.")
    print_table(_CONSUMER_COLUMNS, reply.consumers, style)


def _describe_consumer(consumer: ConsumerStatus) -> str:
    """Describe a consumer: events missed while detached, with the command to refill."""
    if consumer.missed:
        command = refill_command(consumer.name, consumer.missed_from)
        missed_text = format_count(consumer.missed, "event")
        return f"missed {missed_text} while detached: {command}; {consumer.detail}"
    return consumer.detail


_CONSUMER_COLUMNS = [
    Column("Consumer", "name"),
    Column("Position", "position", "count", show="requested"),
    Column("Behind", "behind", "count"),
    Column("SetAside", "dead", "count"),
    Column("State", lambda row, _: "detached" if row.detached else row.state),
    Column("Since", lambda row, _: format_time(datetime.fromtimestamp(row.since, UTC))),
    Column("Detail", lambda row, _: _describe_consumer(row)),
    Column("Rate", lambda row, _: f"{row.rate:.1f}", show="requested", right=True),
    Column("LastError", "error", show="requested"),
    Column("ErrorAt", lambda row, _: _format_moment(row.error_at), show="requested"),
]


def _format_moment(at_s: int) -> str:
    """Format seconds since 1970 as a time; "" for 0."""
    return format_time(datetime.fromtimestamp(at_s, UTC)) if at_s else ""


@app.command("list")
def list_events(
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", "-k", metavar="KIND,…", help="Only these kinds of events."),
    ] = None,
    clusters: Clusters = None,
    after: Annotated[
        int,
        typer.Option(
            "--after",
            min=0,
            max=LARGEST_NUMBER,
            metavar="ID",
            help="Behind this one, not the newest.",
        ),
    ] = 0,
    limit: Annotated[int, typer.Option("--limit", "-L", min=1, help="How many at most.")] = 50,
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """List events, the newest last."""
    style = options.make_style(as_json, parsable, noheader)
    request = ListRequest(
        kinds=options.split_lists(kinds),
        clusters=options.split_lists(clusters),
        after=after,
        limit=limit,
    )
    place = ClientPlace(config=config, socket=socket, archive=archive)
    reply: ListAnswer = call_action(place, get_action("journal.list"), request)
    if style.json:
        print_json(reply)
    else:
        print_table(_EVENT_COLUMNS, reply.events, style)


_EVENT_COLUMNS = [
    Column("ID", "id", "count"),
    Column("Seen", "seen_at", "time"),
    Column("Kind", "kind"),
    Column("Cluster", "cluster"),
    Column("Source", "source"),
    Column("Key", "key"),
]


@app.command()
def dead(
    consumer: Annotated[
        str,
        typer.Argument(
            metavar="CONSUMER", help="Only what was set aside for this one; a sink's name will do."
        ),
    ] = "",
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """List events that a consumer could not put to use, and why."""
    style = options.make_style(as_json, parsable, noheader)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    reply: DeadAnswer = call_action(
        place, get_action("journal.dead"), DeadRequest(consumer=consumer)
    )
    if style.json:
        print_json(reply)
    elif reply.letters or style.parsable:
        print_table(_DEAD_COLUMNS, reply.letters, style)
        output.print_note("'steward journal replay CONSUMER' has them tried again.")
    else:
        output.print_note("Nothing was set aside.")


_DEAD_COLUMNS = [
    Column("Consumer", "consumer"),
    Column("ID", "id", "count"),
    Column("Kind", "kind"),
    Column("Cluster", "cluster", show="requested"),
    Column("Key", "key"),
    Column("Since", "since", "time"),
    Column("Error", "error"),
]


@app.command()
def replay(
    consumer: Consumer,
    event: Annotated[
        int | None,
        typer.Argument(
            min=1, max=LARGEST_NUMBER, metavar="ID", help="Only this event; all if not given."
        ),
    ] = None,
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Have a consumer try again what was set aside for it."""
    place = ClientPlace(config=config, socket=socket, archive=archive)
    request = ReplayRequest(consumer=consumer, id=event)
    reply: ReplayAnswer = call_action(place, get_action("journal.replay"), request)
    if as_json:
        print_json(reply)
    else:
        print(f"{format_count(reply.events, 'event')} will be tried again.")


@app.command()
def forget(
    consumer: Consumer,
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Drop a consumer that is gone for good, so that nothing is kept for it."""
    place = ClientPlace(config=config, socket=socket, archive=archive)
    reply: ForgetAnswer = call_action(
        place, get_action("journal.forget"), ForgetRequest(consumer=consumer)
    )
    if as_json:
        print_json(reply)
    else:
        output.print_note(f"The journal waits for {reply.consumer} no more.")
