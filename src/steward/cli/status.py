"""``steward status`` and ``steward metrics``: state of Steward's own processes, and its metrics.

``status`` lists daemon, workers, journal, consumers, sinks, clusters, disks and bank; ``metrics``
prints them in Prometheus format, or replaces a file atomically for node_exporter.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from steward.accounting.job_page.notes import format_duration
from steward.admin.status.requests import (
    ConsumerLine,
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.cli import output
from steward.cli.options import CommandCall, Config, Socket, with_call
from steward.cli.output import (
    Column,
    Style,
    format_count,
    format_size,
    format_time,
    print_json,
    print_table,
)
from steward.client.places import ClientPlace
from steward.core.errors import Unavailable
from steward.core.files import describe_os_error, replace_file
from steward.core.poll_status import LONG_INTERVAL_S


class StatusUnavailable(Unavailable):
    """Error: the output file cannot be written."""


class _StatusRow(msgspec.Struct, frozen=True):
    """A row of the status table: component, state, details."""

    what: str
    state: str
    detail: str = ""


@with_call
def status(
    asked: CommandCall,
    gaps: Annotated[
        bool, typer.Option("--gaps/--no-gaps", help="Whether books are looked through for gaps.")
    ] = True,
) -> None:
    """Show how Steward itself stands: processes, backlog, clusters, disks, the bank."""
    answer: StatusShowAnswer = asked.call("status.show", StatusShowRequest(gaps=gaps))
    if asked.style.json:
        print_json(answer)
    else:
        print_table(_STATUS_COLUMNS, list(_make_status_rows(answer)), asked.style)


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
    asked = CommandCall(Style(), ClientPlace(config=config, socket=socket))
    answer: MetricsAnswer = asked.call("status.metrics", MetricsRequest())
    data = answer.text.encode()
    if not to:
        output.write_bytes(data)
        return
    try:
        with replace_file(to, 0o640) as file:
            file.write(data)
    except OSError as error:
        raise StatusUnavailable(f"cannot write {to}: {describe_os_error(error, to)}", to) from error


_STATUS_COLUMNS = [
    Column("What", lambda row: row.what),
    Column("State", lambda row: row.state),
    Column("Detail", lambda row: row.detail),
]


def _make_status_rows(answer: StatusShowAnswer) -> Iterator[_StatusRow]:
    """Yield the rows of the status table."""
    since = f" since {format_time(answer.since)}" if answer.since else ""
    yield _StatusRow(
        "daemon", "running" if answer.running else "down", f"Steward {answer.steward}{since}"
    )
    for part in answer.parts:
        restarts = format_count(part.restarts, "restart") if part.restarts else ""
        why = f"{restarts}, the last since it {part.error}" if part.restarts else ""
        yield _StatusRow(f"part {part.name}", "running" if part.pid else "down", why)
    yield from _make_journal_rows(answer)
    for one in answer.clusters:
        state = "remote" if one.remote else {True: "up", False: "down", None: "not asked"}[one.up]
        cost = f", asked in {one.cost_s:.2f} s" if one.cost_s is not None and one.up else ""
        if one.up and (one.interval_s or 0) > LONG_INTERVAL_S:
            cost += f", and again only after {one.interval_s:.0f} s since that takes long"
        version = f"Slurm {one.slurm}" if one.slurm else ""
        yield _StatusRow(f"cluster {one.cluster}", state, one.message or f"{version}{cost}")
    for disk in answer.disks:
        free = f"{format_size(disk.free)} of {format_size(disk.total)} are free"
        yield _StatusRow(f"disk {disk.what}", "mounted", free)
    yield from _make_bank_rows(answer)
    for key, why in answer.unavailable.items():
        yield _StatusRow(key, "unavailable", why)
    for address, why in answer.refused.items():
        yield _StatusRow(f"agent {address}", "refused", why)
    for what, why in answer.unknown.items():
        yield _StatusRow(what, "unknown", why)


def _make_journal_rows(answer: StatusShowAnswer) -> Iterator[_StatusRow]:
    """Yield the rows of journal, consumers and sinks."""
    if answer.journal is not None:
        kept = f"{answer.journal.events} of {format_count(answer.journal.head, 'event')} are kept"
        yield _StatusRow("journal", "there", f"{kept}, {format_size(answer.journal.bytes)}")
    sinks = {f"archive.{one.name}" for one in answer.sinks}
    for one in answer.consumers:
        if one.name not in sinks:
            yield _StatusRow(f"consumer {one.name}", one.state, _describe_backlog(one))
    for sink in answer.sinks:
        backlog = f"{format_count(sink.backlog, 'script')} to archive" if sink.backlog else ""
        aside = f"{format_count(sink.set_aside, 'event')} set aside" if sink.set_aside else ""
        why = (backlog, aside, sink.refill, sink.detail)
        yield _StatusRow(f"sink {sink.name}", sink.state, "; ".join(filter(None, why)))


def _describe_backlog(one: ConsumerLine) -> str:
    """Describe a consumer's lag and dead letters."""
    said = []
    if one.behind:
        age = f", the oldest {format_duration(one.behind_s)} old" if one.behind_s else ""
        said.append(f"{format_count(one.behind, 'event')} behind{age}")
    if one.set_aside:
        said.append(f"{format_count(one.set_aside, 'event')} set aside")
    return "; ".join(filter(None, (*said, one.refill, one.detail)))


def _make_bank_rows(answer: StatusShowAnswer) -> Iterator[_StatusRow]:
    """Yield the rows of gate, reconciliation and gaps."""
    bank = answer.bank
    if bank is not None:
        holds = "" if bank.holds is None else format_count(bank.holds, "open hold")
        yield _StatusRow("gate", bank.gate, bank.gate_why or holds)
        for one in bank.reconciled:
            if one.compared_at is not None:
                found = format_count(one.differences, "difference")
                when = format_time(one.compared_at)
                yield _StatusRow(f"comparison {one.cluster}", "made", f"at {when}: {found}")
    if answer.gaps is not None:
        found = (
            format_count(answer.gaps.total, "finding")
            if answer.gaps.total
            else "nothing is missing"
        )
        yield _StatusRow("books", "looked through", found)
