"""``steward archive sinks`` and ``resend``: how the sinks stand, and filling them up again."""

from typing import Annotated

import typer

from steward.archive.requests import (
    ResendAnswer,
    ResendRequest,
    SinkLine,
    SinksAnswer,
    SinksRequest,
)
from steward.cli import options, output
from steward.cli.collecting import collected
from steward.cli.options import Place
from steward.cli.text import number, size
from steward.cli.times import show as show_time
from steward.client.asking import action, call


def sinks(
    columns: options.Format = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Show how each sink stands.

    Backlog is how many scripts it has still to archive, Oldest the age of the
    oldest of them, Rate how many events a second it put to use in the last minute.
    """
    style = options.style(as_json, parsable, noheader, columns)
    place = Place(config=config, socket=socket, archive=archive)
    answer: SinksAnswer = call(place, action("archive.sinks"), SinksRequest())
    if style.json:
        output.print_json(answer)
        return
    output.print_table(_COLUMNS, answer.sinks, style)
    for line in answer.sinks:
        if line.refill:
            missed = number(line.missed, "event")
            output.note(f"{line.name} missed {missed} while it was detached: {line.refill}")
        if line.set_aside:
            output.note(f"'steward journal dead archive.{line.name}' lists what was set aside.")


def _age(seconds: float | None) -> str:
    """A duration as Slurm writes elapsed times: ``03:07``, ``1-02:03:04``; "" for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours:02}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _plain_age(line: SinkLine) -> str:
    return "" if line.oldest_s is None else f"{line.oldest_s:.0f}"


_COLUMNS = [
    output.Column("Sink", lambda line: line.name),
    output.Column("Kind", lambda line: line.kind),
    output.Column("State", lambda line: line.state),
    output.Column("Position", lambda line: str(line.position), right=True, usual=False),
    output.Column("Backlog", lambda line: str(line.backlog), right=True),
    output.Column("Behind", lambda line: str(line.behind), right=True, usual=False),
    output.Column("Oldest", lambda line: _age(line.oldest_s), _plain_age, right=True),
    output.Column("Rate", lambda line: f"{line.rate:.1f}", right=True),
    output.Column("SetAside", lambda line: str(line.set_aside), right=True),
    output.Column("Missed", lambda line: str(line.missed), right=True, usual=False),
    output.Column("ErrorAt", lambda line: show_time(line.error_at)),
    output.Column("LastError", lambda line: line.error),
]


def resend(
    sink: Annotated[
        str,
        typer.Option(
            "--sink", metavar="NAME", help="The sink to fill up.", callback=options.not_empty
        ),
    ],
    since: options.Since = "",
    until: options.Until = "",
    jobs: options.Jobs = None,
    users: options.Users = None,
    accounts: options.Accounts = None,
    clusters: options.Clusters = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only what it does not have, as far as is known.")
    ] = False,
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Have a sink archive scripts again.

    Of all jobs, or of those that the options name. What the sink has already
    is not doubled. 'steward archive sinks' shows how far it has come.
    """
    selected = options.selection(clusters, users, accounts, jobs=jobs, since=since, until=until)
    request = ResendRequest(**selected, sink=sink, missing=missing)
    place = Place(config=config, socket=socket, archive=archive)
    _, answer = collected(place, "archive.resend", request, ())
    assert isinstance(answer, ResendAnswer)
    if as_json:
        output.print_json(answer)
        return
    left_out = f"; {answer.present} are there already" if answer.present else ""
    what = f"{number(answer.scripts, 'script')}, {size(answer.total_bytes)} bytes"
    print(f"To be archived again in {answer.sink}: {what}{left_out}.")
    output.note("'steward archive sinks' shows how far it has come.")
