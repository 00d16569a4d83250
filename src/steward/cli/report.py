"""``steward report``: usage, capacity, jobs, wait times and waste, like Slurm's sreport.

Each command calls one action ``reports.NAME`` and prints its rows by period; :class:`ReportOptions`
holds the options that all reports share.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from steward.accounting.sacct.values import format_span
from steward.cli import options, output
from steward.cli.groups import CONTEXT
from steward.cli.options import (
    Accounts,
    Clusters,
    CommandCall,
    Partitions,
    Users,
    reject_empty,
    with_call_and_columns,
    with_options,
)
from steward.cli.output import (
    Column,
    find_requested_zone,
    format_time,
    print_csv,
    print_json,
    print_table,
)
from steward.core.errors import UsageError
from steward.reports.requests import (
    AccountRow,
    AccountsRequest,
    ClusterReply,
    ClusterRequest,
    JobCountsRequest,
    PartitionRow,
    PartitionUsageRequest,
    PeriodLength,
    ReportReply,
    UserRow,
    UsersRequest,
    WaitsRequest,
    WasteRequest,
)

app = typer.Typer(context_settings=CONTEXT, no_args_is_help=True, add_completion=False)

Since = Annotated[
    str,
    typer.Option(
        *("--starttime", "--since", "-S"),
        metavar="TIME",
        help="Since: now-30days, 2026-11-01; the day before today if not given.",
        callback=reject_empty,
    ),
]
Until = Annotated[
    str,
    typer.Option(
        *("--endtime", "--until", "-E"),
        metavar="TIME",
        help="Until; last midnight if not given.",
        callback=reject_empty,
    ),
]
ByOption = Annotated[
    str, typer.Option("--by", metavar="month|week|day", help="Each of them for itself.")
]
UnitOption = Annotated[
    str, typer.Option("--time", "-t", metavar="hours|minutes|seconds", help="The unit of amounts.")
]
Csv = Annotated[bool, typer.Option("--csv", help="Print a table with commas.")]
Top = Annotated[
    int, typer.Option("--top", "-L", min=0, help="So many of each cluster and period; 0 for all.")
]
Unit = Literal["hours", "minutes", "seconds"]
"""Units of resource time."""
Group = Literal["", "size", "account", "user"]
"""What ``waits`` groups by, beside the partition."""

_UNIT_SECONDS: Final[dict[Unit, int]] = {"hours": 3600, "minutes": 60, "seconds": 1}
_PERIOD_NAMES: Final[dict[str, PeriodLength]] = {
    "": "",
    "month": "month",
    "week": "week",
    "day": "day",
}
"""Lengths of the periods into which a report is split."""
_GROUPS: Final[dict[str, Group]] = {
    "": "",
    "size": "size",
    "account": "account",
    "user": "user",
}


class ReportOptions(msgspec.Struct, frozen=True):
    """Options that all reports share.

    Attributes:
        fields: Fields of the request.
        unit: Unit of resource time.
        as_csv: Whether to print CSV.
    """

    fields: dict[str, Any]
    unit: Unit
    as_csv: bool

    def make_amount_column(self, field: str, label: str, *, is_default: bool = True) -> Column:
        """Return a column for an attribute in seconds, shown in the chosen unit."""

        def text(row: Any) -> str:
            seconds = getattr(row, field)
            if seconds is None:
                return ""
            return (
                str(seconds)
                if self.unit == "seconds"
                else f"{seconds / _UNIT_SECONDS[self.unit]:.1f}"
            )

        return Column(label, text, right=True, is_default=is_default)


def _read_period_options(
    since: Since = "",
    until: Until = "",
    by: ByOption = "",
    clusters: Clusters = None,
    unit: UnitOption = "hours",
    as_csv: Csv = False,
) -> ReportOptions:
    """Read the options that all reports share."""
    if by not in _PERIOD_NAMES:
        raise UsageError(f"--by takes month, week or day, not {by!r}", by)
    units = [
        unit_name for unit_name in _UNIT_SECONDS if unit and unit_name.startswith(unit.lower())
    ]
    if not units:
        raise UsageError(f"--time takes hours, minutes or seconds, not {unit!r}", unit)
    fields = {
        "since": since,
        "until": until,
        "by": _PERIOD_NAMES[by],
        "zone": find_requested_zone(),
        "clusters": options.split_lists(clusters),
    }
    return ReportOptions(fields, units[0], as_csv)


def _read_job_options(
    since: Since = "",
    until: Until = "",
    by: ByOption = "",
    clusters: Clusters = None,
    accounts: Accounts = None,
    users: Users = None,
    partitions: Partitions = None,
    unit: UnitOption = "hours",
    as_csv: Csv = False,
) -> ReportOptions:
    """Read the options of reports on jobs: also accounts, users and partitions."""
    period_options = _read_period_options(since, until, by, clusters, unit, as_csv)
    fields = {
        "accounts": options.split_lists(accounts),
        "users": options.split_lists(users),
        "partitions": options.split_lists(partitions),
    }
    return ReportOptions(period_options.fields | fields, period_options.unit, period_options.as_csv)


@app.callback()
def report() -> None:
    """What a cluster did, who used it, how long jobs waited, what was wasted.

    Operators see everybody, coordinators their accounts,
    users themselves.
    """


@app.command()
@with_call_and_columns
@with_options(_read_period_options)
def cluster(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell what a cluster's CPUs and GPUs did, as 'sreport cluster Utilization' does."""
    reply = call.send("reports.cluster", ClusterRequest(**report_options.fields))
    has_gpus = any(row.gpus or row.allocated_gpu_s for row in reply.rows)
    _print_report(
        reply,
        report_options,
        call,
        [
            Column("Jobs", lambda row: str(row.jobs), right=True),
            report_options.make_amount_column("allocated_cpu_s", "Allocated"),
            report_options.make_amount_column("down_cpu_s", "Down"),
            report_options.make_amount_column("planned_down_cpu_s", "PlannedDown"),
            report_options.make_amount_column("idle_cpu_s", "Idle"),
            report_options.make_amount_column("planned_cpu_s", "Planned"),
            report_options.make_amount_column("reported_cpu_s", "Reported"),
            Column(
                "Used%",
                lambda row: _format_percentage(row.allocated_cpu_s, row.reported_cpu_s),
                right=True,
            ),
            report_options.make_amount_column(
                "allocated_gpu_s", "GPUAllocated", is_default=has_gpus
            ),
            report_options.make_amount_column("down_gpu_s", "GPUDown", is_default=False),
            report_options.make_amount_column(
                "planned_down_gpu_s", "GPUPlannedDown", is_default=False
            ),
            report_options.make_amount_column("idle_gpu_s", "GPUIdle", is_default=has_gpus),
            report_options.make_amount_column("reported_gpu_s", "GPUReported", is_default=has_gpus),
            report_options.make_amount_column("known_s", "Known", is_default=False),
            *_make_capacity_columns("cpus", "gpus", "nodes"),
        ],
    )
    if not reply.sensor:
        output.print_note("There is no sensor, which alone tells of capacity: see [sensor].")


def _make_capacity_columns(*names: str) -> list[Column]:
    """Define hidden columns of capacity: CPUs, GPUs, nodes."""

    def of(name: str) -> Callable[[Any], str]:
        return lambda row: str(getattr(row, name))

    labels = {"cpus": "CPUs", "gpus": "GPUs", "nodes": "Nodes"}
    return [Column(labels[name], of(name), right=True, is_default=False) for name in names]


def _format_percentage(part: int | None, whole: int | None) -> str:
    """Format a part of a whole as a percentage; "" if unknown."""
    return f"{100 * part / whole:.1f}" if part is not None and whole else ""


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def accounts(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell who used what: each account in all, then its users."""
    reply = call.send("reports.accounts", AccountsRequest(**report_options.fields))
    columns = [
        Column("Account", lambda row: row.account),
        Column("User", lambda row: "" if row.uid is None else row.user or str(row.uid)),
        *_make_resource_columns(reply.rows, report_options),
    ]
    _print_report(reply, report_options, call, columns)


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def users(
    report_options: ReportOptions,
    call: CommandCall,
    top: Top = 0,
) -> None:
    """Tell who used most."""
    reply = call.send("reports.users", UsersRequest(**report_options.fields, top=top))
    columns = [
        Column("User", _format_row_user),
        Column("Accounts", lambda row: ",".join(row.accounts), max_width=40),
        *_make_resource_columns(reply.rows, report_options),
        Column("Completed", lambda row: str(row.completed), right=True),
        Column("Failed", lambda row: str(row.failed), right=True),
    ]
    _print_report(reply, report_options, call, columns)


def _format_row_user(row: Any) -> str:
    """Return a row's user name, or the uid."""
    return row.user or ("" if row.uid is None else str(row.uid))


def _make_resource_columns(
    rows: Sequence[AccountRow | UserRow | PartitionRow], report_options: ReportOptions
) -> list[Column]:
    """Define the columns of resource use; GPUs only if any were used."""
    has_gpus = any(row.gpu_s for row in rows)
    return [
        Column("Jobs", lambda row: str(row.jobs), right=True),
        report_options.make_amount_column("cpu_s", "CPU"),
        report_options.make_amount_column("gpu_s", "GPU", is_default=has_gpus),
        report_options.make_amount_column("node_s", "Node", is_default=False),
    ]


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def partitions(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell what was used of partitions, and how long jobs waited for them."""
    reply = call.send("reports.partitions", PartitionUsageRequest(**report_options.fields))
    columns = [
        Column("Partition", lambda row: row.partition),
        *_make_resource_columns(reply.rows, report_options),
        *_make_wait_columns(),
    ]
    _print_report(reply, report_options, call, columns)


def _make_wait_columns() -> list[Column]:
    """Define the columns of wait times: number, median, 90th percentile, longest."""

    def of(name: str) -> tuple[Callable[[Any], str], Callable[[Any], str]]:
        def plain(row: Any) -> str:
            value = getattr(row, name)
            return "" if value is None else str(value)

        return (lambda row: format_span(getattr(row, name))), plain

    return [
        Column("Started", lambda row: str(row.started), right=True),
        Column("Median", *of("median_s"), right=True),
        Column("P90", *of("p90_s"), right=True),
        Column("Longest", *of("longest_s"), right=True),
    ]


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def waits(
    report_options: ReportOptions,
    call: CommandCall,
    group: Annotated[
        str,
        typer.Option("--group", metavar="size|account|user", help="Part them by this as well."),
    ] = "",
) -> None:
    """Tell how long jobs waited, from when they might begin until they did."""
    if group not in _GROUPS:
        raise UsageError(f"--group takes size, account or user, not {group!r}", group)
    reply = call.send("reports.waits", WaitsRequest(**report_options.fields, group=_GROUPS[group]))
    columns = [
        Column("Partition", lambda row: row.partition),
        Column("Account", lambda row: row.account, is_default=group == "account"),
        Column("User", lambda row: row.user, is_default=group == "user"),
        Column("CPUs", _format_cpu_range, right=True, is_default=group == "size"),
        *_make_wait_columns(),
    ]
    _print_report(reply, report_options, call, columns)


def _format_cpu_range(row: Any) -> str:
    """Format a range of CPU counts."""
    return f"{row.least_cpus}-{row.most_cpus or ''}"


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def jobs(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell how many jobs there were, by account, size and state."""
    reply = call.send("reports.jobs", JobCountsRequest(**report_options.fields))
    columns = [
        Column("Account", lambda row: row.account),
        Column("CPUs", _format_cpu_range, right=True),
        Column("State", lambda row: row.state),
        Column("Jobs", lambda row: str(row.jobs), right=True),
        report_options.make_amount_column("cpu_s", "CPU"),
        report_options.make_amount_column(
            "gpu_s", "GPU", is_default=any(row.gpu_s for row in reply.rows)
        ),
    ]
    _print_report(reply, report_options, call, columns)


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def waste(
    report_options: ReportOptions,
    call: CommandCall,
    top: Top = 0,
) -> None:
    """Tell what was asked for and not used, of jobs that ended.

    Used% is the CPU time of what the jobs had, Memory% the most that they used of it, Time%
    how long they ran of their limits. Who wasted most CPUs is first.
    """
    reply = call.send("reports.waste", WasteRequest(**report_options.fields, top=top))
    columns = [
        Column("Account", lambda row: row.account),
        Column("User", _format_row_user),
        Column("Jobs", lambda row: str(row.jobs), right=True),
        Column("Measured", lambda row: str(row.measured), right=True, is_default=False),
        report_options.make_amount_column("cpu_s", "CPU"),
        report_options.make_amount_column("used_cpu_s", "Used"),
        Column("Used%", lambda row: _format_percentage(row.used_cpu_s, row.cpu_s), right=True),
        Column(
            "Memory%",
            lambda row: _format_percentage(row.used_memory_byte_s, row.memory_byte_s),
            right=True,
        ),
        Column("Time%", lambda row: _format_percentage(row.elapsed_s, row.limit_s), right=True),
    ]
    _print_report(reply, report_options, call, columns)


def _print_report(
    reply: ReportReply, report_options: ReportOptions, call: CommandCall, columns: Sequence[Column]
) -> None:
    """Print a report; period and cluster are shown if there are several."""
    style = call.style
    if report_options.as_csv and (style.json or style.parsable):
        raise UsageError("--csv, --json and --parsable2 exclude each other")
    if style.json:
        print_json(reply)
        return
    rows = reply.rows
    periods, zone = reply.periods, reply.zone
    clusters = {row.cluster for row in rows}
    table = [
        Column("Period", lambda row: periods[row.period].label, is_default=len(periods) > 1),
        Column("Start", lambda row: format_time(periods[row.period].since, zone), is_default=False),
        Column("End", lambda row: format_time(periods[row.period].until, zone), is_default=False),
        Column("Cluster", lambda row: row.cluster, is_default=len(clusters) > 1),
        *columns,
    ]
    if report_options.as_csv:
        print_csv(table, rows, style)
        return
    if not style.parsable:
        begin, end = (format_time(at, zone) for at in (periods[0].since, periods[-1].until))
        output.print_note(f"From {begin} to {end}, in {report_options.unit}.")
        if not reply.is_all:
            output.print_note(
                "Of jobs that you may see: yours, and those of accounts that you lead."
            )
    print_table(table, rows, style)
    if not rows and not style.parsable:
        output.print_warning(_explain_empty(reply, report_options))


def _explain_empty(reply: ReportReply, report_options: ReportOptions) -> str:
    """Return the reason why a report has no rows."""
    if isinstance(reply, ClusterReply) and not reply.sensor:
        return "No rows: the sensor records capacity and is off. Set 'enabled = true' in [sensor]."
    visibility = "" if reply.is_all else " that you may see"
    hint = (
        ""
        if report_options.fields["since"]
        else " Yesterday is reported unless --starttime is given."
    )
    return f"No rows: no job{visibility} was counted in this period.{hint}"
