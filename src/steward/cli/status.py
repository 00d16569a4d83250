"""``steward status`` and ``steward metrics``: state of Steward's own processes, and its metrics.

``status`` lists daemon, workers, journal, consumers, sinks, clusters, disks and bank; ``metrics``
prints them in Prometheus format, or replaces a file atomically for node_exporter.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from steward.accounting.job_page.notes import duration
from steward.admin.status.requests import (
    ConsumerLine,
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.cli import output
from steward.cli.options import Asked, Config, Socket, asking
from steward.cli.output import Column, Style, number, print_json, print_table, show_time, size
from steward.client.places import Place
from steward.core.errors import Unavailable
from steward.core.files import replacing, told_by
from steward.core.poll_status import LONG_INTERVAL_S


class StatusUnavailable(Unavailable):
    """The output file cannot be written."""


class _Row(msgspec.Struct, frozen=True):
    """A row of the status table: component, state, details."""

    what: str
    state: str
    detail: str = ""


@asking
def status(
    asked: Asked,
    gaps: Annotated[
        bool, typer.Option("--gaps/--no-gaps", help="Whether books are looked through for gaps.")
    ] = True,
) -> None:
    """Show how Steward itself stands: processes, backlog, clusters, disks, the bank."""
    answer: StatusShowAnswer = asked.call("status.show", StatusShowRequest(gaps=gaps))
    if asked.style.json:
        print_json(answer)
    else:
        print_table(_COLUMNS, list(_rows(answer)), asked.style)


def metrics(
    to: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Replace this file with them, as a whole."
        ),
    ] = "",
    config: Config = "",
    socket: Socket = "",
) -> None:
    """Print figures for Prometheus, as for node_exporter's textfile collector."""
    asked = Asked(Style(), Place(config=config, socket=socket))
    answer: MetricsAnswer = asked.call("status.metrics", MetricsRequest())
    data = answer.text.encode()
    if not to:
        output.write(data)
        return
    try:
        with replacing(to, 0o640) as file:
            file.write(data)
    except OSError as error:
        raise StatusUnavailable(f"cannot write {to}: {told_by(error, to)}", to) from error


_COLUMNS = [
    Column("What", lambda row: row.what),
    Column("State", lambda row: row.state),
    Column("Detail", lambda row: row.detail),
]


def _rows(answer: StatusShowAnswer) -> Iterator[_Row]:
    """Yield the rows of the status table."""
    since = f" since {show_time(answer.since)}" if answer.since else ""
    yield _Row(
        "daemon", "running" if answer.running else "down", f"Steward {answer.steward}{since}"
    )
    for part in answer.parts:
        restarts = number(part.restarts, "restart") if part.restarts else ""
        why = f"{restarts}, the last since it {part.error}" if part.restarts else ""
        yield _Row(f"part {part.name}", "running" if part.pid else "down", why)
    yield from _journal(answer)
    for one in answer.clusters:
        state = "remote" if one.remote else {True: "up", False: "down", None: "not asked"}[one.up]
        cost = f", asked in {one.cost_s:.2f} s" if one.cost_s is not None and one.up else ""
        if one.up and (one.interval_s or 0) > LONG_INTERVAL_S:
            cost += f", and again only after {one.interval_s:.0f} s since that takes long"
        version = f"Slurm {one.slurm}" if one.slurm else ""
        yield _Row(f"cluster {one.cluster}", state, one.message or f"{version}{cost}")
    for disk in answer.disks:
        free = f"{size(disk.free)} of {size(disk.total)} are free"
        yield _Row(f"disk {disk.what}", "mounted", free)
    yield from _books(answer)
    for key, why in answer.unavailable.items():
        yield _Row(key, "unavailable", why)
    for address, why in answer.refused.items():
        yield _Row(f"agent {address}", "refused", why)
    for what, why in answer.unknown.items():
        yield _Row(what, "unknown", why)


def _journal(answer: StatusShowAnswer) -> Iterator[_Row]:
    """Yield the rows of journal, consumers and sinks."""
    if answer.journal is not None:
        kept = f"{answer.journal.events} of {number(answer.journal.head, 'event')} are kept"
        yield _Row("journal", "there", f"{kept}, {size(answer.journal.bytes)}")
    sinks = {f"archive.{one.name}" for one in answer.sinks}
    for one in answer.consumers:
        if one.name not in sinks:
            yield _Row(f"consumer {one.name}", one.state, _behind(one))
    for sink in answer.sinks:
        backlog = f"{number(sink.backlog, 'script')} to archive" if sink.backlog else ""
        aside = f"{number(sink.set_aside, 'event')} set aside" if sink.set_aside else ""
        why = (backlog, aside, sink.refill, sink.detail)
        yield _Row(f"sink {sink.name}", sink.state, "; ".join(filter(None, why)))


def _behind(one: ConsumerLine) -> str:
    """Describe a consumer's lag and dead letters."""
    said = []
    if one.behind:
        age = f", the oldest {duration(one.behind_s)} old" if one.behind_s else ""
        said.append(f"{number(one.behind, 'event')} behind{age}")
    if one.set_aside:
        said.append(f"{number(one.set_aside, 'event')} set aside")
    return "; ".join(filter(None, (*said, one.refill, one.detail)))


def _books(answer: StatusShowAnswer) -> Iterator[_Row]:
    """Yield the rows of gate, reconciliation and gaps."""
    bank = answer.bank
    if bank is not None:
        holds = "" if bank.holds is None else number(bank.holds, "open hold")
        yield _Row("gate", bank.gate, bank.gate_why or holds)
        for one in bank.reconciled:
            if one.compared_at is not None:
                found = number(one.differences, "difference")
                when = show_time(one.compared_at)
                yield _Row(f"comparison {one.cluster}", "made", f"at {when}: {found}")
    if answer.gaps is not None:
        found = number(answer.gaps.total, "finding") if answer.gaps.total else "nothing is missing"
        yield _Row("books", "looked through", found)
