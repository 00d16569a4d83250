"""``steward job``: one page for a person on what a job was, what it used, and how well."""

import sys
from typing import Annotated

import typer

from steward.accounting.job_page.requests import FEW, MOST_TASKS, PageAnswer, PageRequest
from steward.cli import options, output
from steward.cli.drawing import Pens, Row, drawn, pens, plain
from steward.cli.options import Place
from steward.client.asking import action, call


def job(
    job: options.JobId,
    array: Annotated[
        bool, typer.Option("--array", help="Sum up the array that it is, or is a task of.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Show every task, not only the most notable.")
    ] = False,
    cluster: options.Cluster = "",
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Show what a job was, what it used, and how well.

    Of a job that waits it says why, and when Slurm expects to start it.
    """
    place = Place(config=config, socket=socket, archive=archive)
    most = MOST_TASKS if every else FEW
    request = PageRequest(job=job, cluster=cluster, array=array, tasks=most, nodes=most)
    answer: PageAnswer = call(place, action("accounting.job"), request)
    if as_json:
        output.print_json(answer)
    elif output.is_terminal():
        output.show(*drawn(rows_of(answer, pens())))
    else:
        page = plain(rows_of(answer, pens()))
        output.write(page.encode(sys.stdout.encoding, "backslashreplace"))


def rows_of(answer: PageAnswer, with_: Pens) -> list[Row]:
    """The page, or the sum of an array, as rows."""
    from steward.cli.job_array import array
    from steward.cli.job_page import page

    if answer.array is not None:
        return array(answer, answer.array, with_)
    return page(answer, with_)
