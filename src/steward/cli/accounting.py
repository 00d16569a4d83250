"""``steward accounting``: report gaps, import records, dump or expire the job log, list plugins.

The module holds the commands and their table columns. ``gaps``, ``dump``, ``expire`` and
``plugins`` call actions of the daemon; ``import`` runs in this process and writes to the records
itself.
"""

import os
from datetime import UTC, datetime
from typing import Annotated

import typer

from steward.accounting.gaps import LIMIT, SILENT_S, GapsAnswer, GapsRequest
from steward.cli import options, output
from steward.cli.options import (
    Archive,
    Clusters,
    Config,
    Format,
    Json,
    NoHeader,
    Parsable,
    Socket,
    reject_empty,
)
from steward.cli.output import (
    ProgressLine,
    find_requested_zone,
    format_count,
    format_size,
    format_time,
    is_terminal,
    print_json,
    print_table,
    to_local_time,
)
from steward.client.calls import call_action, stream_action
from steward.client.places import ClientPlace, require_settings
from steward.core.errors import UsageError
from steward.core.layouts import Column
from steward.core.printable import escape_lines
from steward.daemon.registry import get_action
from steward.extensions.jobacct_plugins import (
    DumpAnswer,
    DumpRequest,
    ExpireAnswer,
    ExpireRequest,
    PluginInfo,
    PluginsAnswer,
    PluginsRequest,
)


def gaps(
    clusters: Clusters = None,
    since: Annotated[
        str,
        typer.Option(
            "--starttime",
            "--since",
            "-S",
            metavar="TIME",
            help="Since: now-1day, 2026-11-21T08:00; the last seven days if not given.",
            callback=reject_empty,
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            "--endtime",
            "--until",
            "-E",
            metavar="TIME",
            help="Until.",
            callback=reject_empty,
        ),
    ] = "",
    silent: Annotated[
        float,
        typer.Option("--silent", min=1, metavar="SECONDS", help="How long a node may be silent."),
    ] = SILENT_S,
    limit: Annotated[
        int, typer.Option("--limit", "-l", min=1, max=10_000, help="How many at most.")
    ] = LIMIT,
    fail: Annotated[
        bool, typer.Option("--fail", help="End with exit code 1 if there is anything.")
    ] = False,
    columns: Format = "",
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Tell what is missing or doubtful: lost facts, silent nodes, nobody's CPU time."""
    place = ClientPlace(config=config, socket=socket, archive=archive)
    style = options.make_style(as_json, parsable, noheader, columns)
    request = GapsRequest(
        clusters=options.split_lists(clusters),
        since=since,
        until=until,
        zone=find_requested_zone(),
        silent_s=silent,
        limit=limit,
    )
    reply: GapsAnswer = call_action(place, get_action("accounting.gaps"), request)
    if style.json:
        print_json(reply)
    else:
        if reply.findings or style.parsable or not style.has_header:
            print_table(reply.layout, reply.findings, style, reply)
        else:
            print("Nothing is missing.")
    if reply.more:
        output.print_warning(
            f"there is more than {format_count(limit, 'finding')}: see --limit, -S and -E"
        )
    if fail and reply.findings:
        raise typer.Exit(1)


def import_(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="sacct|FILE",
            help="sacct asks slurmdbd; a FILE is what `sacct -P` wrote, or a job log.",
        ),
    ],
    since: Annotated[
        str,
        typer.Option("-S", "--starttime", metavar="TIME", help="From then on; sacct needs it."),
    ] = "",
    until: Annotated[
        str, typer.Option("-E", "--endtime", metavar="TIME", help="Until then; now if not given.")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option("--cluster", "-M", metavar="NAME", help="The cluster whose jobs they were."),
    ] = "",
    as_json: Json = False,
    config: Config = "",
) -> None:
    """Take over another's books: slurmdbd's, a file of sacct's, a job log.

    slurmdbd is asked for a day at a time. What is cut short goes on where it
    was, and doing it twice does no harm: a job that Steward saw itself is that
    job, and Steward's own figures go before.
    """
    settings = require_settings(ClientPlace(config=config))
    cluster = cluster or _require_one_cluster(tuple(settings.cluster))
    begin, end = _parse_local_time(since), _parse_local_time(until)
    from steward.daemon.imports import import_history, import_records_file

    with ProgressLine() as progress:
        if source == "sacct":
            if begin is None:
                raise UsageError("say since when: steward accounting import --from sacct -S TIME")
            now = datetime.now(UTC)
            result = import_history(settings, cluster, begin, end or now, progress.show)
        else:
            path = os.path.abspath(source)
            result = import_records_file(settings, cluster, path, (begin, end), progress.show)
    if as_json:
        print_json(result)
        return
    if result.went_on:
        output.print_note(f"went on where it was cut short: {result.went_on}")
    summary = f"{format_count(result.jobs, 'run')} of jobs and {format_count(result.steps, 'step')}"
    print(f"Took over {summary}; those that were known are in the books once.")
    if result.unfinished:
        output.print_note(
            f"{format_count(result.unfinished, 'job')} not over yet: left to the snapshots"
        )
    if result.passed_over:
        output.print_warning(
            f"{format_count(result.passed_over, 'row')} passed over: no rows of jobs or steps"
        )


def _require_one_cluster(clusters: tuple[str, ...]) -> str:
    """Return the only configured cluster, or fail if there are several."""
    if len(clusters) == 1:
        return clusters[0]
    raise UsageError(f"say which with --cluster: {', '.join(clusters)}")


def _parse_local_time(text: str) -> datetime | None:
    """Parse a time in this host's zone; "" gives None."""
    from steward.slurm.times import parse_time

    now = datetime.now(UTC)
    return parse_time(text, now, to_local_time(now).tzinfo or UTC) if text else None


def dump(
    since: Annotated[
        str,
        typer.Option(
            "--starttime",
            "-S",
            metavar="TIME",
            help="What happened since: now-1day, 2026-11-21.",
            callback=reject_empty,
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            "--endtime",
            "-E",
            metavar="TIME",
            help="What happened before.",
            callback=reject_empty,
        ),
    ] = "",
    config: Config = "",
    socket: Socket = "",
) -> None:
    """Write the job log out, record by record.

    One JSON object a line, as docs/accounting.md describes them. Lines of the
    log that are no records are left out, and the exit code is 1 then.
    """
    request = DumpRequest(since=since, until=until, zone=find_requested_zone())
    place = ClientPlace(config=config, socket=socket)
    reply: DumpAnswer | None = None
    for item in stream_action(place, get_action("accounting.dump"), request):
        if isinstance(item, DumpAnswer):
            reply = item
        elif is_terminal():
            print(escape_lines(item.text), end="")
        else:
            output.write_bytes(item.text.encode())
    assert reply is not None, "a stream ends with its answer"
    for example in reply.examples:
        output.print_warning(f"no record: {example}")
    if reply.passed_over:
        output.print_warning(f"{format_count(reply.passed_over, 'line')} of the log are no records")
        raise typer.Exit(1)


def expire(
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="TIME",
            help="Jobs that ended before this: now-365days, 2025-01-01.",
            callback=reject_empty,
        ),
    ],
    keep_log: Annotated[
        bool,
        typer.Option("--keep-log", help="Only make jobs.db smaller: sacct finds them in the log."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it: without this it is only said what would go.")
    ] = False,
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
) -> None:
    """Forget the books of old jobs.

    Days of the job log go that are over by then, and the jobs in jobs.db that
    ended before. Scripts that are archived stay: 'steward archive purge' removes
    those.
    """
    request = ExpireRequest(before=before, keep_log=keep_log, yes=yes, zone=find_requested_zone())
    place = ClientPlace(config=config, socket=socket)
    reply: ExpireAnswer = call_action(place, get_action("accounting.expire"), request)
    if as_json:
        print_json(reply)
    total_bytes = sum(day.length for day in reply.days)
    summary = f"{format_count(reply.jobs, 'job')} of jobs.db"
    if not keep_log:
        summary += (
            f" and {format_count(len(reply.days), 'day')} of the job log, "
            f"{format_size(total_bytes)} bytes"
        )
    if not reply.done:
        output.print_warning(f"nothing was removed: --yes removes {summary}")
    elif not as_json:
        print(f"Forgotten: {summary}, from before {format_time(reply.before)}.")


def plugins(
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
) -> None:
    """Show the accounting plugins and what went wrong in them."""
    style = options.make_style(as_json, parsable, noheader)
    place = ClientPlace(config=config, socket=socket)
    reply: PluginsAnswer = call_action(place, get_action("accounting.plugins"), PluginsRequest())
    if style.json:
        print_json(reply)
    else:
        print_table(_PLUGIN_COLUMNS, reply.plugins, style)


def _format_use(plugin: PluginInfo) -> str:
    """Return whether a plugin is used, or was rejected."""
    if plugin.refusal:
        return "refused"
    return "yes" if plugin.used else "no"


def _format_last_error(plugin: PluginInfo) -> str:
    """Format the last failure of a plugin, or the reason of its rejection."""
    if plugin.refusal:
        return plugin.refusal
    if not plugin.failures:
        return ""
    failure = plugin.failures[0]
    failed_at = format_time(datetime.fromtimestamp(failure.last_s, UTC))
    return f"{failed_at} {failure.hook}: {failure.kind}: {failure.text}"


_PLUGIN_COLUMNS = [
    Column("Type", "type"),
    Column("Used", lambda row, _: _format_use(row)),
    Column("Package", "package"),
    Column("Class", "where", show="requested"),
    Column("Errors", lambda line, _: sum(f.count for f in line.failures), "count"),
    Column("LastError", lambda row, _: _format_last_error(row)),
]
