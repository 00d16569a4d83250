"""``steward accounting``: report gaps, import records, print a dump and an expiry of the job log.

``gaps`` asks the daemon; ``import`` runs in this process and writes to the records itself. The
other commands derive from their actions.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import click
from msgspec.structs import replace

from steward.accounting.gaps import GapsAnswer, GapsRequest
from steward.cli import output
from steward.cli.commands import print_reply, prints, report_outcome, with_request
from steward.cli.options import Archive, CommandCall, Config, Json, with_table_call
from steward.cli.output import (
    ProgressLine,
    format_count,
    format_time,
    is_terminal,
    print_json,
    to_local_time,
)
from steward.cli.parameters import Option
from steward.client.calls import call_action
from steward.client.places import ClientPlace, require_settings
from steward.core.errors import UsageError
from steward.core.printable import escape_lines
from steward.daemon.registry import get_action
from steward.extensions.jobacct_plugins import DumpAnswer, DumpChunk, PurgeAnswer


@with_table_call
@with_request("accounting.gaps")
def gaps(
    request: GapsRequest,
    call: CommandCall,
    fail: Annotated[bool, Option("--fail", help="Exit with 1 if there are gaps.")] = False,
    archive: Archive = "",
) -> None:
    """Run the action ``accounting.gaps`` and print its reply."""
    place, style = replace(call.place, archive=archive), call.style
    reply: GapsAnswer = call_action(place, get_action("accounting.gaps"), request)
    if style.json:
        print_json(reply)
    else:
        print_reply(reply, style, "findings")
    for warning in reply.list_warnings():
        output.print_warning(warning)
    if fail and reply.findings:
        raise click.exceptions.Exit(1)


def import_(
    source: Annotated[
        str,
        Option(
            "--from",
            metavar="sacct|FILE",
            help="'sacct' queries slurmdbd. FILE is the output of `sacct -P`, or a job log.",
        ),
    ],
    since: Annotated[
        str,
        Option(
            "-S",
            "--starttime",
            metavar="TIME",
            help="Start of the period. Required with --from sacct.",
        ),
    ] = "",
    until: Annotated[
        str,
        Option("-E", "--endtime", metavar="TIME", help="End of the period. Default: now."),
    ] = "",
    cluster: Annotated[
        str,
        Option("--cluster", "-M", metavar="NAME", help="Cluster of the jobs."),
    ] = "",
    as_json: Json = False,
    config: Config = "",
) -> None:
    """Import jobs from slurmdbd, a file written by sacct, or a job log.

    Steward queries slurmdbd one day at a time. An interrupted import resumes
    where it stopped, and a repeated one changes nothing. If Steward observed a
    job itself, its own figures take precedence.
    """
    settings = require_settings(ClientPlace(config=config))
    cluster = cluster or _require_one_cluster(tuple(settings.cluster))
    begin, end = _parse_local_time(since), _parse_local_time(until)
    from steward.daemon.imports import import_history, import_records_file

    with ProgressLine() as progress:
        if source == "sacct":
            if begin is None:
                raise UsageError(
                    "no start time given: add -S, such as 'steward accounting import --from sacct "
                    "-S 2026-01-01'"
                )
            now = datetime.now(UTC)
            result = import_history(settings, cluster, begin, end or now, progress.show)
        else:
            path = os.path.abspath(source)
            result = import_records_file(settings, cluster, path, (begin, end), progress.show)
    if as_json:
        print_json(result)
        report_outcome(result)
        return
    if result.went_on:
        output.print_note(f"resumed {result.went_on} interrupted before")
    summary = f"{format_count(result.jobs, 'run')} of jobs and {format_count(result.steps, 'step')}"
    print(f"Imported {summary}. Runs that Steward knew already are counted once.")
    if result.unfinished:
        output.print_note(
            f"{format_count(result.unfinished, 'job')} not ended yet: queue polls will record "
            "their end"
        )
    report_outcome(result)


def _require_one_cluster(clusters: tuple[str, ...]) -> str:
    """Return the only configured cluster, or fail if there are several."""
    if len(clusters) == 1:
        return clusters[0]
    raise UsageError(
        f"several clusters are configured: choose one with --cluster: {', '.join(clusters)}"
    )


def _parse_local_time(text: str) -> datetime | None:
    """Parse a time in this host's zone; "" gives None."""
    from steward.slurm.times import parse_time

    now = datetime.now(UTC)
    return parse_time(text, now, to_local_time(now).tzinfo or UTC) if text else None


@prints("accounting.dump")
def print_dump(items: Iterator[DumpChunk | DumpAnswer]) -> DumpAnswer:
    """Print the records of the job log."""
    for item in items:
        if isinstance(item, DumpAnswer):
            return item
        if is_terminal():
            print(escape_lines(item.text), end="")
        else:
            output.write_bytes(item.text.encode())
    raise AssertionError("a stream ends with its reply")


@prints("accounting.purge")
def print_purge(reply: PurgeAnswer) -> None:
    """Print what was removed; the reply warns if nothing was."""
    if reply.done:
        print(f"Removed: {reply.summarize()}, from before {format_time(reply.before)}.")
