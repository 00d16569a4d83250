"""``steward status`` and ``steward metrics``: state of Steward's own processes, and its metrics.

``status`` lists daemon, workers, journal, consumers, sinks, clusters, disks and bank; ``metrics``
prints them in Prometheus format, or replaces a file atomically for node_exporter.
"""

from collections.abc import Iterator
from typing import Annotated

from steward.accounting.job_page.notes import format_duration
from steward.admin.status.requests import (
    ConsumerLine,
    MetricsAnswer,
    MetricsRequest,
    StatusRow,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.cli import output
from steward.cli.options import CommandCall, Config, Socket, with_call
from steward.cli.output import (
    Style,
    format_count,
    format_size,
    format_time,
    print_json,
    print_table,
)
from steward.cli.parameters import Option
from steward.client.places import ClientPlace
from steward.core.errors import Unavailable
from steward.core.files import describe_os_error, replace_file
from steward.core.poll_status import LONG_INTERVAL_S


class StatusUnavailable(Unavailable):
    """Error: the output file cannot be written."""


@with_call
def status(
    call: CommandCall,
    gaps: Annotated[
        bool, Option("--gaps/--no-gaps", help="Whether to search for gaps in accounting.")
    ] = True,
) -> None:
    """Run the action ``status.show`` and print its reply."""
    reply: StatusShowAnswer = call.send("status.show", StatusShowRequest(gaps=gaps))
    if call.style.json:
        print_json(reply)
    else:
        print_table(StatusRow.layout, list(_make_status_rows(reply)), call.style)


def metrics(
    to: Annotated[
        str,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the metrics to this file, replacing it atomically.",
        ),
    ] = "",
    config: Config = "",
    socket: Socket = "",
) -> None:
    """Print Prometheus metrics, or write them for node_exporter's textfile collector."""
    call = CommandCall(Style(), ClientPlace(config=config, socket=socket))
    reply: MetricsAnswer = call.send("status.metrics", MetricsRequest())
    data = reply.text.encode()
    if not to:
        output.write_bytes(data)
        return
    try:
        with replace_file(to, 0o640) as file:
            file.write(data)
    except OSError as error:
        raise StatusUnavailable(f"cannot write {to}: {describe_os_error(error, to)}", to) from error


def _make_status_rows(reply: StatusShowAnswer) -> Iterator[StatusRow]:
    """Yield the rows of the status table."""
    since = f" since {format_time(reply.since)}" if reply.since else ""
    yield StatusRow(
        "daemon", "running" if reply.running else "down", f"Steward {reply.steward}{since}"
    )
    for worker in reply.workers:
        restarts = format_count(worker.restarts, "restart") if worker.restarts else ""
        reason = f"{restarts}, the last because it {worker.error}" if worker.restarts else ""
        yield StatusRow(f"worker {worker.name}", worker.state, reason)
    yield from _make_journal_rows(reply)
    for cluster in reply.clusters:
        cost_text = (
            f", polled in {cluster.cost_s:.2f} s"
            if cluster.cost_s is not None and cluster.up
            else ""
        )
        if cluster.up and (cluster.interval_s or 0) > LONG_INTERVAL_S:
            cost_text += f", and only every {cluster.interval_s:.0f} s because a poll takes long"
        version = f"Slurm {cluster.slurm}" if cluster.slurm else ""
        yield StatusRow(
            f"cluster {cluster.cluster}", cluster.state, cluster.message or f"{version}{cost_text}"
        )
    for disk in reply.disks:
        free_text = f"{format_size(disk.free)} of {format_size(disk.total)} are free"
        yield StatusRow(f"disk {disk.purpose}", "mounted", free_text)
    for database in reply.databases:
        details = (
            f"written by {', '.join(database.writers)}",
            format_count(database.files, "month") if database.name.endswith("*.db") else "",
            f"{format_size(database.free)} in free pages" if database.free else "",
        )
        size = format_size(database.bytes)
        yield StatusRow(f"database {database.name}", size, "; ".join(filter(None, details)))
    yield from _make_bank_rows(reply)
    for key, reason in reply.unavailable.items():
        yield StatusRow(key, "unavailable", reason)
    for address, reason in reply.rejected.items():
        yield StatusRow(f"agent {address}", "rejected", reason)
    for component, reason in reply.unknown.items():
        yield StatusRow(component, "unknown", reason)


def _make_journal_rows(reply: StatusShowAnswer) -> Iterator[StatusRow]:
    """Yield the rows of journal, consumers and sinks."""
    if reply.journal is not None:
        kept_text = (
            f"{reply.journal.events} of {format_count(reply.journal.head, 'event')} are kept"
        )
        yield StatusRow("journal", "open", f"{kept_text}, {format_size(reply.journal.bytes)}")
    sinks = {f"archive.{line.name}" for line in reply.sinks}
    for line in reply.consumers:
        if line.name not in sinks:
            yield StatusRow(f"consumer {line.name}", line.state, _describe_backlog(line))
    for sink in reply.sinks:
        backlog = f"{format_count(sink.backlog, 'script')} to archive" if sink.backlog else ""
        dead_text = (
            f"{format_count(sink.dead_letters, 'event')} in the dead letters"
            if sink.dead_letters
            else ""
        )
        details = (backlog, dead_text, sink.refill, sink.detail)
        yield StatusRow(f"sink {sink.name}", sink.state, "; ".join(filter(None, details)))


def _describe_backlog(consumer: ConsumerLine) -> str:
    """Describe a consumer's lag and dead letters."""
    parts = []
    if consumer.lag:
        age = f", the oldest {format_duration(consumer.lag_s)} old" if consumer.lag_s else ""
        parts.append(f"lag of {format_count(consumer.lag, 'event')}{age}")
    if consumer.dead_letters:
        parts.append(f"{format_count(consumer.dead_letters, 'event')} in the dead letters")
    return "; ".join(filter(None, (*parts, consumer.refill, consumer.detail)))


def _make_bank_rows(reply: StatusShowAnswer) -> Iterator[StatusRow]:
    """Yield the rows of gate, reconciliation and gaps."""
    bank = reply.bank
    if bank is not None:
        holds = "" if bank.hold_count is None else format_count(bank.hold_count, "open hold")
        yield StatusRow("gate", bank.gate, bank.gate_reason or holds)
        for comparison in bank.reconciled:
            if comparison.compared_at is not None:
                result = format_count(comparison.differences, "difference")
                compared_at = format_time(comparison.compared_at)
                yield StatusRow(
                    f"reconciliation {comparison.cluster}", "done", f"at {compared_at}: {result}"
                )
    if reply.gaps is not None:
        result = format_count(reply.gaps.total, "gap") if reply.gaps.total else "no gaps"
        yield StatusRow("job records", "checked", result)
