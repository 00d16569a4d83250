"""``steward accounting dump``, ``expire`` and ``plugins``: the job log, and what runs beside it."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from steward.cli import options, output
from steward.cli.options import Place
from steward.cli.text import number, safe_lines, size
from steward.cli.times import show as show_time
from steward.cli.times import zone_to_ask_in
from steward.client.asking import action, call, stream
from steward.extensions.jobacct_plugins import (
    DumpAnswer,
    DumpRequest,
    ExpireAnswer,
    ExpireRequest,
    PluginLine,
    PluginsAnswer,
    PluginsRequest,
)


def dump(
    since: Annotated[
        str,
        typer.Option(
            "--starttime",
            "-S",
            metavar="TIME",
            help="What happened since: now-1day, 2026-11-21.",
            callback=options.not_empty,
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            "--endtime",
            "-E",
            metavar="TIME",
            help="What happened before.",
            callback=options.not_empty,
        ),
    ] = "",
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Write the job log out, record by record.

    One JSON object a line, as docs/accounting.md describes them. Lines of the
    log that are no records are left out, and the exit code is 1 then.
    """
    request = DumpRequest(since=since, until=until, zone=zone_to_ask_in())
    place = Place(config=config, socket=socket)
    answer: DumpAnswer | None = None
    for item in stream(place, action("accounting.dump"), request):
        if isinstance(item, DumpAnswer):
            answer = item
        elif output.is_terminal():
            print(safe_lines(item.text), end="")
        else:
            output.write(item.text.encode())
    assert answer is not None, "a stream ends with its answer"
    for example in answer.examples:
        output.warn(f"no record: {example}")
    if answer.passed_over:
        output.warn(f"{number(answer.passed_over, 'line')} of the log are no records")
        raise typer.Exit(1)


def expire(
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="TIME",
            help="Jobs that ended before this: now-365days, 2025-01-01.",
            callback=options.not_empty,
        ),
    ],
    keep_log: Annotated[
        bool,
        typer.Option("--keep-log", help="Only make jobs.db smaller: sacct finds them in the log."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it: without this it is only said what would go.")
    ] = False,
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Forget the books of old jobs.

    Days of the job log go that are over by then, and the jobs in jobs.db that
    ended before. Scripts that are archived stay: 'steward archive purge' removes
    those.
    """
    request = ExpireRequest(before=before, keep_log=keep_log, yes=yes, zone=zone_to_ask_in())
    place = Place(config=config, socket=socket)
    answer: ExpireAnswer = call(place, action("accounting.expire"), request)
    if as_json:
        output.print_json(answer)
    length = sum(day.length for day in answer.days)
    what = f"{number(answer.jobs, 'job')} of jobs.db"
    if not keep_log:
        what += f" and {number(len(answer.days), 'day')} of the job log, {size(length)} bytes"
    if not answer.done:
        output.warn(f"nothing was removed: --yes removes {what}")
    elif not as_json:
        print(f"Forgotten: {what}, from before {show_time(answer.before)}.")


def plugins(
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Show the accounting plugins and what went wrong in them."""
    style = options.style(as_json, parsable, noheader)
    place = Place(config=config, socket=socket)
    answer: PluginsAnswer = call(place, action("accounting.plugins"), PluginsRequest())
    if style.json:
        output.print_json(answer)
    else:
        output.print_table(_COLUMNS, answer.plugins, style)


def _use(line: PluginLine) -> str:
    if line.refusal:
        return "refused"
    return "yes" if line.used else "no"


def _last_error(line: PluginLine) -> str:
    if line.refusal:
        return line.refusal
    if not line.failures:
        return ""
    last = line.failures[0]
    when = show_time(datetime.fromtimestamp(last.last_s, UTC))
    return f"{when} {last.hook}: {last.kind}: {last.text}"


_COLUMNS = [
    output.Column("Type", lambda line: line.type),
    output.Column("Used", _use),
    output.Column("Package", lambda line: line.package),
    output.Column("Class", lambda line: line.where, usual=False),
    output.Column("Errors", lambda line: str(sum(f.count for f in line.failures)), right=True),
    output.Column("LastError", _last_error),
]
