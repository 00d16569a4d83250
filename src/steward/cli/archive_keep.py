"""``steward archive export``, ``verify``, ``secrets``, ``purge`` and ``reindex``: the long work."""

import itertools
from typing import Annotated

import typer

from steward.archive.requests import (
    ExportAnswer,
    ExportRequest,
    JobLine,
    ProblemLine,
    PurgeAnswer,
    PurgeLine,
    PurgeRequest,
    ReindexAnswer,
    ReindexRequest,
    SecretLine,
    SecretsAnswer,
    SecretsRequest,
    VerifyAnswer,
    VerifyRequest,
)
from steward.cli import options, output
from steward.cli.collecting import collected
from steward.cli.exporting import target_of
from steward.cli.jobs_table import WIDEST, user
from steward.cli.options import Place
from steward.cli.progress import Bar
from steward.cli.text import number, size
from steward.client.asking import action, call, stream
from steward.core.errors import StewardError, UsageError

Sink = Annotated[
    str,
    typer.Option(
        "--sink", metavar="NAME", help="Only this sink's files.", callback=options.not_empty
    ),
]


class NothingMeant(StewardError):
    """What was asked for by name is not there."""


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
    users: options.Users = None,
    accounts: options.Accounts = None,
    jobs: options.Jobs = None,
    names: options.Names = None,
    states: options.States = None,
    partitions: options.Partitions = None,
    clusters: options.Clusters = None,
    since: options.Since = "",
    until: options.Until = "",
    limit: Annotated[int, typer.Option("--limit", "-L", min=0, help="How many jobs at most.")] = 0,
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Write scripts of jobs to a directory or tar.

    Without -S or -j these are the jobs of the last seven days. A MANIFEST.jsonl
    beside the files says whose they are, with their checksums. The exit code is
    1, and nothing is written, where -j or -u name what is not there.
    """
    place = target_of(target, wanted)
    if target == "-" and output.is_terminal():
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
        # What was asked for by name is not there, which who asked may not notice otherwise.
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
        output.print_json(answer)
    else:
        output.note(
            f"{number(answer.files, 'file')} of {number(answer.jobs, 'job')}, "
            f"{size(answer.total_bytes)} bytes."
        )
    if answer.unreadable:
        raise typer.Exit(1)


def verify(
    sink: Sink = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Recompute every checksum.

    Says which files are missing, changed or nobody's; the exit code is 1 where any is.
    """
    style = options.style(as_json, parsable, noheader)
    place = Place(config=config, socket=socket, archive=archive)
    problems, answer = collected(place, "archive.verify", VerifyRequest(sink=sink), ProblemLine)
    assert isinstance(answer, VerifyAnswer)
    if style.json:
        output.print_json({"version": answer.version, "problems": problems, "summary": answer})
    else:
        if problems or style.parsable:
            output.print_table(_PROBLEM_COLUMNS, problems, style)
        output.note(
            f"{number(answer.files, 'file')}, {size(answer.total_bytes)} bytes: "
            + (f"{number(answer.problems, 'problem')}." if answer.problems else "all as kept.")
        )
    if answer.problems:
        raise typer.Exit(1)


_PROBLEM_COLUMNS = [
    output.Column("Problem", lambda line: line.problem),
    output.Column("Sink", lambda line: line.sink, usual=False),
    output.Column("Path", lambda line: line.path),
    output.Column("Detail", lambda line: line.detail),
]


def secrets(
    users: options.Users = None,
    accounts: options.Accounts = None,
    jobs: options.Jobs = None,
    names: options.Names = None,
    states: options.States = None,
    partitions: options.Partitions = None,
    clusters: options.Clusters = None,
    since: options.Since = "",
    until: options.Until = "",
    limit: Annotated[
        int, typer.Option("--limit", "-L", min=0, help="How many scripts to look at; 0 for all.")
    ] = 0,
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
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
        output.print_json({"version": answer.version, "secrets": found, "summary": answer})
    else:
        if found or style.parsable:
            output.print_table(_SECRET_COLUMNS, found, style)
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
    output.Column("Cluster", lambda line: _of_job(line).cluster, usual=False),
    output.Column("JobID", lambda line: _of_job(line).job, right=True),
    output.Column("JobName", lambda line: _of_job(line).name, widest=WIDEST),
    output.Column("User", lambda line: user(_of_job(line))),
]
_SECRET_COLUMNS = [
    *_JOB_COLUMNS,
    output.Column("Line", lambda line: str(line.line), right=True),
    output.Column("Kind", lambda line: line.kind),
]


def purge(
    jobs: options.Jobs = None,
    users: options.Users = None,
    since: options.Since = "",
    until: options.Until = "",
    clusters: options.Clusters = None,
    names: options.Names = None,
    sink: Sink = "",
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept with the order to purge.")
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it: without this it is only said what would go.")
    ] = False,
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
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
        output.print_json(answer)
    elif answer.scripts or style.parsable:
        output.print_table(_PURGE_COLUMNS, answer.scripts, style)
    what = f"{number(len(answer.scripts), 'script')}, {size(answer.total_bytes)} bytes"
    what += f", from {', '.join(answer.sinks)}" if answer.sinks else ""
    if not answer.scripts:
        output.warn("no script is meant by that, nothing is to be removed")
        raise typer.Exit(1)
    # On stderr for pipes as well: nobody should take a dry run for the deed.
    if not answer.done:
        output.warn(f"nothing was removed: --yes removes {what}")
    elif style.json or style.parsable:
        output.note(f"Purged: {what}.")
    else:
        print(f"Purged: {what}.")


_PURGE_COLUMNS = [
    *_JOB_COLUMNS,
    output.Column("Bytes", lambda line: str(line.script.length or 0), right=True),
    output.Column("Path", lambda line: line.script.path),
]


def reindex(
    sink: Annotated[
        str, typer.Option("--sink", metavar="NAME", help="The sink whose files are read.")
    ] = "",
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Rebuild the catalogue from files.

    Search goes on with the old one until the new one is complete.
    """
    place = Place(config=config, socket=socket, archive=archive)
    _, answer = collected(place, "archive.reindex", ReindexRequest(sink=sink), ())
    assert isinstance(answer, ReindexAnswer)
    if as_json:
        output.print_json(answer)
        return
    print(f"Indexed {number(answer.scripts, 'script')}, {answer.distinct} of them distinct.")
    if answer.unreadable:
        output.warn(f"{answer.unreadable} could not be read and are not in it")
        raise typer.Exit(1)
