"""``steward archive`` maintenance: export, verify, secrets, purge, reindex, sinks and resend.

:func:`collected` reads the stream of a long action, shows its progress and returns items and reply;
the commands print them as tables or JSON. ``export_target.py`` writes exported files.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from steward.archive.requests import (
    ExportAnswer,
    ExportRequest,
    JobLine,
    ProblemLine,
    Progress,
    PurgeAnswer,
    PurgeLine,
    PurgeRequest,
    ReindexAnswer,
    ReindexRequest,
    ResendAnswer,
    ResendRequest,
    SecretLine,
    SecretsAnswer,
    SecretsRequest,
    SinkLine,
    SinksAnswer,
    SinksRequest,
    VerifyAnswer,
    VerifyRequest,
)
from steward.cli import options, output
from steward.cli.export_target import target_of
from steward.cli.job_table import WIDEST, user
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
    not_empty,
)
from steward.cli.output import (
    Bar,
    Column,
    is_terminal,
    number,
    print_json,
    print_table,
    show_time,
    size,
)
from steward.client.calls import call, stream
from steward.client.places import Place
from steward.core.errors import StewardError, UsageError
from steward.daemon.registry import action


def collected(
    place: Place, name: str, request: Any, kind: type[Any] | tuple[()]
) -> tuple[list[Any], Any]:
    """Return the items of one type and the reply of a stream, showing progress meanwhile.

    Args:
        place: Where to ask: daemon or local archive.
        name: Name of the action.
        request: A value of the action's request type.
        kind: Type of the items to return; () for none.
    """
    what = action(name)
    found: list[Any] = []
    answer = None
    with Bar() as bar:
        for item in _following(stream(place, what, request), bar):
            if isinstance(item, what.answer):
                answer = item
            elif isinstance(item, kind):
                found.append(item)
    return found, answer


def _following(items: Iterator[Any], bar: Bar) -> Iterator[Any]:
    """Yield the items of a stream except progress, which goes to the progress line."""
    for item in items:
        if isinstance(item, Progress):
            bar.show(item.done, item.total, item.what)
        else:
            yield item


Sink = Annotated[
    str,
    typer.Option("--sink", metavar="NAME", help="Only this sink's files.", callback=not_empty),
]


class NothingMeant(StewardError):
    """A job or user named on the command line does not exist."""


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
    place = target_of(target, wanted)
    if target == "-" and is_terminal():
        raise UsageError("a tar would mess up the terminal: send it to a file or a pipe")
    if target == "-" and as_json:
        raise UsageError("--json and a tar on stdout exclude each other: name a directory or file")
    selected = options.selection(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    request = ExportRequest(**selected, environments=environments, limit=limit)
    items = stream(
        Place(config=config, socket=socket, archive=archive), action("archive.export"), request
    )
    first = next(items)
    if isinstance(first, ExportAnswer) and not first.jobs and (jobs or users):
        # Fail if a named job or user does not exist: the caller might not notice otherwise.
        raise NothingMeant("no script of such a job is here to be exported: nothing was written")
    answer: ExportAnswer | None = None
    with Bar() as bar, place:
        for item in itertools.chain((first,), items):
            if isinstance(item, ExportAnswer):
                answer = item
            else:
                place.add(item)
                bar.step("files")
    assert answer is not None, "a stream ends with its answer"
    for line in answer.unreadable:
        output.warn(f"not exported: {line}")
    if as_json:
        print_json(answer)
    else:
        output.note(
            f"{number(answer.files, 'file')} of {number(answer.jobs, 'job')}, "
            f"{size(answer.total_bytes)} bytes."
        )
    if answer.unreadable:
        raise typer.Exit(1)


def verify(
    sink: Sink = "",
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
    style = options.style(as_json, parsable, noheader)
    place = Place(config=config, socket=socket, archive=archive)
    problems, answer = collected(place, "archive.verify", VerifyRequest(sink=sink), ProblemLine)
    assert isinstance(answer, VerifyAnswer)
    if style.json:
        print_json({"version": answer.version, "problems": problems, "summary": answer})
    else:
        if problems or style.parsable:
            print_table(_PROBLEM_COLUMNS, problems, style)
        output.note(
            f"{number(answer.files, 'file')}, {size(answer.total_bytes)} bytes: "
            + (f"{number(answer.problems, 'problem')}." if answer.problems else "all as kept.")
        )
    if answer.problems:
        raise typer.Exit(1)


_PROBLEM_COLUMNS = [
    Column("Problem", lambda line: line.problem),
    Column("Sink", lambda line: line.sink, usual=False),
    Column("Path", lambda line: line.path),
    Column("Detail", lambda line: line.detail),
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
    style = options.style(as_json, parsable, noheader)
    selected = options.selection(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    place = Place(config=config, socket=socket, archive=archive)
    request = SecretsRequest(**selected, limit=limit)
    found, answer = collected(place, "archive.secrets", request, SecretLine)
    assert isinstance(answer, SecretsAnswer)
    if style.json:
        print_json({"version": answer.version, "secrets": found, "summary": answer})
    else:
        if found or style.parsable:
            print_table(_SECRET_COLUMNS, found, style)
        if answer.default_days:
            output.note("The last seven days; -S for more.")
        output.note(
            f"{answer.suspicious} of {number(answer.scripts, 'script')} look to hold a secret."
        )
    if answer.unreadable:
        output.warn(f"{number(answer.unreadable, 'script')} could not be read")
        raise typer.Exit(1)


def _of_job(line: SecretLine | PurgeLine) -> JobLine:
    return line.job


_JOB_COLUMNS = [
    Column("Cluster", lambda line: _of_job(line).cluster, usual=False),
    Column("JobID", lambda line: _of_job(line).job, right=True),
    Column("JobName", lambda line: _of_job(line).name, widest=WIDEST),
    Column("User", lambda line: user(_of_job(line))),
]
_SECRET_COLUMNS = [
    *_JOB_COLUMNS,
    Column("Line", lambda line: str(line.line), right=True),
    Column("Kind", lambda line: line.kind),
]


def purge(
    jobs: Jobs = None,
    users: Users = None,
    since: Since = "",
    until: Until = "",
    clusters: Clusters = None,
    names: Names = None,
    sink: Sink = "",
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
    style = options.style(as_json, parsable, noheader)
    selected = options.selection(clusters, users, jobs=jobs, names=names, since=since, until=until)
    request = PurgeRequest(**selected, sink=sink, reason=reason, yes=yes)
    place = Place(config=config, socket=socket, archive=archive)
    answer: PurgeAnswer = call(place, action("archive.purge"), request)
    if style.json:
        print_json(answer)
    elif answer.scripts or style.parsable:
        print_table(_PURGE_COLUMNS, answer.scripts, style)
    what = f"{number(len(answer.scripts), 'script')}, {size(answer.total_bytes)} bytes"
    what += f", from {', '.join(answer.sinks)}" if answer.sinks else ""
    if not answer.scripts:
        output.warn("no script is meant by that, nothing is to be removed")
        raise typer.Exit(1)
    # On stderr even in a pipe, so that nobody mistakes a dry run for the purge.
    if not answer.done:
        output.warn(f"nothing was removed: --yes removes {what}")
    elif style.json or style.parsable:
        output.note(f"Purged: {what}.")
    else:
        print(f"Purged: {what}.")


_PURGE_COLUMNS = [
    *_JOB_COLUMNS,
    Column("Bytes", lambda line: str(line.script.length or 0), right=True),
    Column("Path", lambda line: line.script.path),
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
    place = Place(config=config, socket=socket, archive=archive)
    _, answer = collected(place, "archive.reindex", ReindexRequest(sink=sink), ())
    assert isinstance(answer, ReindexAnswer)
    if as_json:
        print_json(answer)
        return
    print(f"Indexed {number(answer.scripts, 'script')}, {answer.distinct} of them distinct.")
    if answer.unreadable:
        output.warn(f"{answer.unreadable} could not be read and are not in it")
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
    style = options.style(as_json, parsable, noheader, columns)
    place = Place(config=config, socket=socket, archive=archive)
    answer: SinksAnswer = call(place, action("archive.sinks"), SinksRequest())
    if style.json:
        print_json(answer)
        return
    print_table(_COLUMNS, answer.sinks, style)
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
    """Format the age of a sink's oldest pending script in seconds, for programs."""
    return "" if line.oldest_s is None else f"{line.oldest_s:.0f}"


_COLUMNS = [
    Column("Sink", lambda line: line.name),
    Column("Kind", lambda line: line.kind),
    Column("State", lambda line: line.state),
    Column("Position", lambda line: str(line.position), right=True, usual=False),
    Column("Backlog", lambda line: str(line.backlog), right=True),
    Column("Behind", lambda line: str(line.behind), right=True, usual=False),
    Column("Oldest", lambda line: _age(line.oldest_s), _plain_age, right=True),
    Column("Rate", lambda line: f"{line.rate:.1f}", right=True),
    Column("SetAside", lambda line: str(line.set_aside), right=True),
    Column("Missed", lambda line: str(line.missed), right=True, usual=False),
    Column("ErrorAt", lambda line: show_time(line.error_at)),
    Column("LastError", lambda line: line.error),
]


def resend(
    sink: Annotated[
        str,
        typer.Option("--sink", metavar="NAME", help="The sink to fill up.", callback=not_empty),
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
    selected = options.selection(clusters, users, accounts, jobs=jobs, since=since, until=until)
    request = ResendRequest(**selected, sink=sink, missing=missing)
    place = Place(config=config, socket=socket, archive=archive)
    _, answer = collected(place, "archive.resend", request, ())
    assert isinstance(answer, ResendAnswer)
    if as_json:
        print_json(answer)
        return
    left_out = f"; {answer.present} are there already" if answer.present else ""
    what = f"{number(answer.scripts, 'script')}, {size(answer.total_bytes)} bytes"
    print(f"To be archived again in {answer.sink}: {what}{left_out}.")
    output.note("'steward archive sinks' shows how far it has come.")
