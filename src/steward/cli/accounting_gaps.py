"""``steward accounting gaps``: what is missing or doubtful in the books."""

from typing import Annotated

import typer

from steward.accounting.gaps import LIMIT, SILENT_S, Finding, GapsAnswer, GapsRequest
from steward.accounting.job_page.notes import duration
from steward.cli import options, output
from steward.cli.options import Place
from steward.cli.output import Column
from steward.cli.text import number
from steward.cli.times import show as show_time
from steward.cli.times import zone_to_ask_in
from steward.client.asking import action, call


def gaps(
    clusters: options.Clusters = None,
    since: Annotated[
        str,
        typer.Option(
            "--starttime",
            "--since",
            "-S",
            metavar="TIME",
            help="Since: now-1day, 2026-11-21T08:00; the last seven days if not given.",
            callback=options.not_empty,
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
            callback=options.not_empty,
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
    columns: options.Format = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Tell what is missing or doubtful: lost facts, silent nodes, nobody's CPU time."""
    place = Place(config=config, socket=socket, archive=archive)
    style = options.style(as_json, parsable, noheader, columns)
    request = GapsRequest(
        clusters=options.split(clusters),
        since=since,
        until=until,
        zone=zone_to_ask_in(),
        silent_s=silent,
        limit=limit,
    )
    answer: GapsAnswer = call(place, action("accounting.gaps"), request)
    if style.json:
        output.print_json(answer)
    else:
        if answer.findings or style.parsable or not style.header:
            output.print_table(_columns(answer), answer.findings, style)
        else:
            print("Nothing is missing.")
    if answer.more:
        output.warn(f"there is more than {number(limit, 'finding')}: see --limit, -S and -E")
    if fail and answer.findings:
        raise typer.Exit(1)


def _columns(answer: GapsAnswer) -> list[Column]:
    has_clusters = len(answer.zones) > 1

    def time(one: Finding) -> str:
        return show_time(one.at, answer.zones.get(one.cluster, ""))

    return [
        Column("Time", time),
        Column("Cluster", lambda one: one.cluster, usual=has_clusters),
        Column("Kind", lambda one: one.kind),
        Column("Node", lambda one: one.node, widest=30),
        Column("JobID", _named, right=True),
        Column("User", lambda one: one.user),
        Column(
            "CPU", _cpu, lambda one: "" if one.cpu_s is None else f"{one.cpu_s:.6f}", right=True
        ),
        Column("Lines", lambda one: str(one.lines) if one.lines else "", right=True),
        Column("Missing", lambda one: one.words),
    ]


def _named(one: Finding) -> str:
    return f"{one.job}.{one.step}" if one.step else one.job


def _cpu(one: Finding) -> str:
    return "" if one.cpu_s is None else duration(one.cpu_s)
