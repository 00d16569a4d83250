"""``steward accounting import``: takes over what others' books hold of jobs and steps."""

import os
from datetime import UTC, datetime
from typing import Annotated

import typer

from steward.cli import options, output
from steward.cli.options import Place
from steward.cli.progress import Bar
from steward.cli.text import number
from steward.cli.times import local
from steward.client.here import settings_here
from steward.core.errors import UsageError


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
    as_json: options.Json = False,
    config: options.Config = "",
) -> None:
    """Take over another's books: slurmdbd's, a file of sacct's, a job log.

    slurmdbd is asked for a day at a time. What is cut short goes on where it
    was, and doing it twice does no harm: a job that Steward saw itself is that
    job, and Steward's own figures go before.
    """
    settings = settings_here(Place(config=config))
    cluster = cluster or _only(tuple(settings.cluster))
    begin, end = _time(since), _time(until)
    from steward.daemon.imports import take_over_file, take_over_history

    with Bar() as bar:
        if source == "sacct":
            if begin is None:
                raise UsageError("say since when: steward accounting import --from sacct -S TIME")
            now = datetime.now(UTC)
            taken = take_over_history(settings, cluster, begin, end or now, bar.show)
        else:
            path = os.path.abspath(source)
            taken = take_over_file(settings, cluster, path, (begin, end), bar.show)
    if as_json:
        output.print_json(taken)
        return
    if taken.went_on:
        output.note(f"went on where it was cut short: {taken.went_on}")
    what = f"{number(taken.jobs, 'run')} of jobs and {number(taken.steps, 'step')}"
    print(f"Took over {what}; those that were known are in the books once.")
    if taken.unfinished:
        output.note(f"{number(taken.unfinished, 'job')} not over yet: left to the snapshots")
    if taken.passed_over:
        output.warn(f"{number(taken.passed_over, 'row')} passed over: no rows of jobs or steps")


def _only(clusters: tuple[str, ...]) -> str:
    if len(clusters) == 1:
        return clusters[0]
    raise UsageError(f"say which with --cluster: {', '.join(clusters)}")


def _time(given: str) -> datetime | None:
    from steward.slurm.times import parse_time

    now = datetime.now(UTC)
    return parse_time(given, now, local(now).tzinfo or UTC) if given else None
