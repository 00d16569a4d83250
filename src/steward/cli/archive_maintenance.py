"""``steward archive`` maintenance: export, verify, secrets, purge, reindex, sinks and resend.

:func:`collect_items` reads the stream of a long action, shows its progress and returns items and
reply; the commands print them as tables or JSON. ``export_target.py`` writes exported files.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from steward.archive.requests import (
    WIDEST_TEXT,
    ExportReply,
    ExportRequest,
    ProblemLine,
    Progress,
    PurgeReply,
    PurgeRequest,
    ReindexReply,
    ReindexRequest,
    ResendReply,
    ResendRequest,
    SecretLine,
    SecretsReply,
    SecretsRequest,
    SinkLine,
    SinksReply,
    SinksRequest,
    VerifyReply,
    VerifyRequest,
)
from steward.cli import options, output
from steward.cli.export_target import open_target
from steward.cli.options import (
    Accounts,
    Archive,
    Clusters,
    Config,
    Format,
    Jobs,
    Json,
    Names,
    NoHeader,
    Parsable,
    Partitions,
    Since,
    Socket,
    States,
    Until,
    Users,
    reject_empty,
)
from steward.cli.output import (
    ProgressLine,
    format_count,
    format_size,
    is_terminal,
    print_json,
    print_table,
)
from steward.client.calls import call_action, stream_action
from steward.client.places import ClientPlace
from steward.core.errors import StewardError, UsageError
from steward.core.layouts import Column, read_user
from steward.daemon.registry import get_action


def collect_items(
    place: ClientPlace, action_name: str, request: Any, item_type: type[Any] | tuple[()]
) -> tuple[list[Any], Any]:
    """Return the items of one type and the reply of a stream, showing progress meanwhile.

    Args:
        place: Where to ask: daemon or local archive.
        action_name: Name of the action.
        request: A value of the action's request type.
        item_type: Type of the items to return; () for none.
    """
    action = get_action(action_name)
    items: list[Any] = []
    reply = None
    with ProgressLine() as progress:
        for item in _show_progress(stream_action(place, action, request), progress):
            if isinstance(item, action.answer):
                reply = item
            elif isinstance(item, item_type):
                items.append(item)
    return items, reply


def _show_progress(items: Iterator[Any], progress: ProgressLine) -> Iterator[Any]:
    """Yield the items of a stream except progress, which goes to the progress line."""
    for item in items:
        if isinstance(item, Progress):
            progress.show(item.done, item.total, item.what)
        else:
            yield item


SinkOption = Annotated[
    str,
    typer.Option("--sink", metavar="NAME", help="Only this sink's files.", callback=reject_empty),
]


class NoMatch(StewardError):
    """Error: no archived script matches the jobs or users named on the command line."""


def export(
    target: Annotated[
        str, typer.Argument(metavar="DIR|FILE.tar|-", help="Where to: '-' is a tar on stdout.")
    ],
    wanted: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="dir, tar, tar.gz, tar.xz or tar.zst; else as the name ends.",
        ),
    ] = "",
    environments: Annotated[
        bool, typer.Option("--env/--no-env", help="Write environments, too.")
    ] = True,
    users: Users = None,
    accounts: Accounts = None,
    jobs: Jobs = None,
    names: Names = None,
    states: States = None,
    partitions: Partitions = None,
    clusters: Clusters = None,
    since: Since = "",
    until: Until = "",
    limit: Annotated[int, typer.Option("--limit", "-L", min=0, help="How many jobs at most.")] = 0,
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Write scripts of jobs to a directory or tar.

    Without -S or -j these are the jobs of the last seven days. A MANIFEST.jsonl
    beside the files says whose they are, with their checksums. The exit code is
    1, and nothing is written, where -j or -u name what is not there.
    """
    destination = open_target(target, wanted)
    if target == "-" and is_terminal():
        raise UsageError("a tar would mess up the terminal: send it to a file or a pipe")
    if target == "-" and as_json:
        raise UsageError("--json and a tar on stdout exclude each other: name a directory or file")
    selection = options.select_jobs(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    request = ExportRequest(**selection, environments=environments, limit=limit)
    items = stream_action(
        ClientPlace(config=config, socket=socket, archive=archive),
        get_action("archive.export"),
        request,
    )
    first_item = next(items)
    if isinstance(first_item, ExportReply) and not first_item.jobs and (jobs or users):
        # Fail if -j or -u matches no script: the caller might not notice otherwise.
        raise NoMatch("no script of such a job is here to be exported: nothing was written")
    reply: ExportReply | None = None
    with ProgressLine() as progress, destination:
        for item in itertools.chain((first_item,), items):
            if isinstance(item, ExportReply):
                reply = item
            else:
                destination.add(item)
                progress.step("files")
    assert reply is not None, "a stream ends with its answer"
    for line in reply.unreadable:
        output.print_warning(f"not exported: {line}")
    if as_json:
        print_json(reply)
    else:
        output.print_note(
            f"{format_count(reply.files, 'file')} of {format_count(reply.jobs, 'job')}, "
            f"{format_size(reply.total_bytes)} bytes."
        )
    if reply.unreadable:
        raise typer.Exit(1)


def verify(
    sink: SinkOption = "",
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Recompute every checksum.

    Says which files are missing, changed or nobody's; the exit code is 1 where any is.
    """
    style = options.make_style(as_json, parsable, noheader)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    problems, reply = collect_items(place, "archive.verify", VerifyRequest(sink=sink), ProblemLine)
    assert isinstance(reply, VerifyReply)
    if style.json:
        print_json({"version": reply.version, "problems": problems, "summary": reply})
    else:
        if problems or style.parsable:
            print_table(_PROBLEM_COLUMNS, problems, style)
        output.print_note(
            f"{format_count(reply.files, 'file')}, {format_size(reply.total_bytes)} bytes: "
            + (f"{format_count(reply.problems, 'problem')}." if reply.problems else "all as kept.")
        )
    if reply.problems:
        raise typer.Exit(1)


_PROBLEM_COLUMNS = [
    Column("Problem", "problem"),
    Column("Sink", "sink", show="requested"),
    Column("Path", "path"),
    Column("Detail", "detail"),
]


def secrets(
    users: Users = None,
    accounts: Accounts = None,
    jobs: Jobs = None,
    names: Names = None,
    states: States = None,
    partitions: Partitions = None,
    clusters: Clusters = None,
    since: Since = "",
    until: Until = "",
    limit: Annotated[
        int, typer.Option("--limit", "-L", min=0, help="How many scripts to look at; 0 for all.")
    ] = 0,
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """List scripts that look to hold a secret.

    Says where, never what: the owner can take it out and change it.
    """
    style = options.make_style(as_json, parsable, noheader)
    selection = options.select_jobs(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    place = ClientPlace(config=config, socket=socket, archive=archive)
    request = SecretsRequest(**selection, limit=limit)
    secret_lines, reply = collect_items(place, "archive.secrets", request, SecretLine)
    assert isinstance(reply, SecretsReply)
    if style.json:
        print_json({"version": reply.version, "secrets": secret_lines, "summary": reply})
    else:
        if secret_lines or style.parsable:
            print_table(_SECRET_COLUMNS, secret_lines, style)
        if reply.default_days:
            output.print_note("The last seven days; -S for more.")
        output.print_note(
            f"{reply.suspicious} of {format_count(reply.scripts, 'script')} look to hold a secret."
        )
    if reply.unreadable:
        output.print_warning(f"{format_count(reply.unreadable, 'script')} could not be read")
        raise typer.Exit(1)


_JOB_COLUMNS = [
    Column("Cluster", lambda line, _: line.job.cluster, show="requested"),
    Column("JobID", lambda line, _: line.job.job, right=True),
    Column("JobName", lambda line, _: line.job.name, max_width=WIDEST_TEXT),
    Column("User", lambda line, _: read_user(line.job)),
]
_SECRET_COLUMNS = [
    *_JOB_COLUMNS,
    Column("Line", "line", "count"),
    Column("Kind", "kind"),
]


def purge(
    jobs: Jobs = None,
    users: Users = None,
    since: Since = "",
    until: Until = "",
    clusters: Clusters = None,
    names: Names = None,
    sink: SinkOption = "",
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept with the order to purge.")
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it: without this it is only said what would go.")
    ] = False,
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Remove scripts for good, everywhere.

    Names jobs (-j) or users (-u). Scripts and environments go from every sink
    and from the catalogue; that the jobs ran is not forgotten. The exit code is
    1 where no script is meant.
    """
    style = options.make_style(as_json, parsable, noheader)
    selection = options.select_jobs(
        clusters, users, jobs=jobs, names=names, since=since, until=until
    )
    request = PurgeRequest(**selection, sink=sink, reason=reason, yes=yes)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    reply: PurgeReply = call_action(place, get_action("archive.purge"), request)
    if style.json:
        print_json(reply)
    elif reply.scripts or style.parsable:
        print_table(_PURGE_COLUMNS, reply.scripts, style)
    summary = (
        f"{format_count(len(reply.scripts), 'script')}, {format_size(reply.total_bytes)} bytes"
    )
    summary += f", from {', '.join(reply.sinks)}" if reply.sinks else ""
    if not reply.scripts:
        output.print_warning("no script is meant by that, nothing is to be removed")
        raise typer.Exit(1)
    # On stderr even in a pipe, so that nobody mistakes a dry run for the purge.
    if not reply.done:
        output.print_warning(f"nothing was removed: --yes removes {summary}")
    elif style.json or style.parsable:
        output.print_note(f"Purged: {summary}.")
    else:
        print(f"Purged: {summary}.")


_PURGE_COLUMNS = [
    *_JOB_COLUMNS,
    Column("Bytes", lambda line, _: line.script.length or 0, "count"),
    Column("Path", lambda line, _: line.script.path),
]


def reindex(
    sink: Annotated[
        str, typer.Option("--sink", metavar="NAME", help="The sink whose files are read.")
    ] = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Rebuild the catalogue from files.

    Search goes on with the old one until the new one is complete.
    """
    place = ClientPlace(config=config, socket=socket, archive=archive)
    _, reply = collect_items(place, "archive.reindex", ReindexRequest(sink=sink), ())
    assert isinstance(reply, ReindexReply)
    if as_json:
        print_json(reply)
        return
    print(f"Indexed {format_count(reply.scripts, 'script')}, {reply.distinct} of them distinct.")
    if reply.unreadable:
        output.print_warning(f"{reply.unreadable} could not be read and are not in it")
        raise typer.Exit(1)


def sinks(
    columns: Format = "",
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Show how each sink stands.

    Backlog is how many scripts it has still to archive, Oldest the age of the
    oldest of them, Rate how many events a second it put to use in the last minute.
    """
    style = options.make_style(as_json, parsable, noheader, columns)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    reply: SinksReply = call_action(place, get_action("archive.sinks"), SinksRequest())
    if style.json:
        print_json(reply)
        return
    print_table(_SINK_COLUMNS, reply.sinks, style)
    for line in reply.sinks:
        if line.refill:
            missed = format_count(line.missed, "event")
            output.print_note(f"{line.name} missed {missed} while it was detached: {line.refill}")
        if line.set_aside:
            output.print_note(
                f"'steward journal dead archive.{line.name}' lists what was set aside."
            )


def _format_age(seconds: float | None) -> str:
    """Format a duration as Slurm writes elapsed times: ``03:07``, ``1-02:03:04``; "" for None."""
    if seconds is None:
        return ""
    minutes, seconds_part = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{seconds_part:02}"
    return (
        f"{hours:02}:{minutes:02}:{seconds_part:02}" if hours else f"{minutes:02}:{seconds_part:02}"
    )


def _format_plain_age(line: SinkLine) -> str:
    """Format the age of a sink's oldest pending script in seconds, for programs."""
    return "" if line.oldest_s is None else f"{line.oldest_s:.0f}"


_SINK_COLUMNS = [
    Column("Sink", "name"),
    Column("Kind", "kind"),
    Column("State", "state"),
    Column("Position", "position", "count", show="requested"),
    Column("Backlog", "backlog", "count"),
    Column("Behind", "behind", "count", show="requested"),
    Column(
        "Oldest",
        lambda line, _: _format_age(line.oldest_s),
        right=True,
        exact=lambda row, _: _format_plain_age(row),
    ),
    Column("Rate", lambda line, _: f"{line.rate:.1f}", right=True),
    Column("SetAside", "set_aside", "count"),
    Column("Missed", "missed", "count", show="requested"),
    Column("ErrorAt", "error_at", "time"),
    Column("LastError", "error"),
]


def resend(
    sink: Annotated[
        str,
        typer.Option("--sink", metavar="NAME", help="The sink to fill up.", callback=reject_empty),
    ],
    since: Since = "",
    until: Until = "",
    jobs: Jobs = None,
    users: Users = None,
    accounts: Accounts = None,
    clusters: Clusters = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only what it does not have, as far as is known.")
    ] = False,
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Have a sink archive scripts again.

    Of all jobs, or of those that the options name. What the sink has already
    is not doubled. 'steward archive sinks' shows how far it has come.
    """
    selection = options.select_jobs(clusters, users, accounts, jobs=jobs, since=since, until=until)
    request = ResendRequest(**selection, sink=sink, missing=missing)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    _, reply = collect_items(place, "archive.resend", request, ())
    assert isinstance(reply, ResendReply)
    if as_json:
        print_json(reply)
        return
    present_note = f"; {reply.present} are there already" if reply.present else ""
    summary = f"{format_count(reply.scripts, 'script')}, {format_size(reply.total_bytes)} bytes"
    print(f"To be archived again in {reply.sink}: {summary}{present_note}.")
    output.print_note("'steward archive sinks' shows how far it has come.")
