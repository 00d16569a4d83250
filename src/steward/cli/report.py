"""``steward report``: usage, capacity, jobs, wait times and waste, like Slurm's sreport.

Each command calls one action ``reports.NAME`` and prints its rows by period; :class:`ReportOptions`
holds the options that all reports share.
"""

from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import typer

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
    TimeUnit,
    find_requested_zone,
    format_time,
    print_csv,
    print_json,
    print_table,
)
from steward.core.errors import UsageError
from steward.reports.requests import (
    AccountsRequest,
    ClusterReply,
    ClusterRequest,
    JobCountsRequest,
    PartitionUsageRequest,
    PeriodLength,
    ReportReply,
    ReportRequest,
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
Group = Literal["", "size", "account", "user"]
"""What ``waits`` groups by, beside the partition."""

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
    unit: TimeUnit
    as_csv: bool


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
    units = [name for name in get_args(TimeUnit) if unit and name.startswith(unit.lower())]
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
    reply: ClusterReply = _print_report(
        "cluster", ClusterRequest(**report_options.fields), report_options, call
    )
    if not reply.sensor:
        output.print_note("There is no sensor, which alone tells of capacity: see [sensor].")


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def accounts(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell who used what: each account in all, then its users."""
    _print_report("accounts", AccountsRequest(**report_options.fields), report_options, call)


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def users(
    report_options: ReportOptions,
    call: CommandCall,
    top: Top = 0,
) -> None:
    """Tell who used most."""
    _print_report("users", UsersRequest(**report_options.fields, top=top), report_options, call)


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def partitions(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell what was used of partitions, and how long jobs waited for them."""
    request = PartitionUsageRequest(**report_options.fields)
    _print_report("partitions", request, report_options, call)


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
    request = WaitsRequest(**report_options.fields, group=_GROUPS[group])
    _print_report("waits", request, report_options, call)


@app.command()
@with_call_and_columns
@with_options(_read_job_options)
def jobs(report_options: ReportOptions, call: CommandCall) -> None:
    """Tell how many jobs there were, by account, size and state."""
    _print_report("jobs", JobCountsRequest(**report_options.fields), report_options, call)


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
    _print_report("waste", WasteRequest(**report_options.fields, top=top), report_options, call)


def _print_report(
    name: str, request: ReportRequest, report_options: ReportOptions, call: CommandCall
) -> Any:
    """Call a report's action, print its reply and return it."""
    style = msgspec.structs.replace(call.style, hours_unit=report_options.unit)
    if report_options.as_csv and (style.json or style.parsable):
        raise UsageError("--csv, --json and --parsable2 exclude each other")
    reply: ReportReply = call.send(f"reports.{name}", request)
    if style.json:
        print_json(reply)
        return reply
    if report_options.as_csv:
        print_csv(reply.layout, reply.rows, style, reply)
        return reply
    if not style.parsable:
        periods, zone = reply.periods, reply.zone
        begin, end = (format_time(at, zone) for at in (periods[0].since, periods[-1].until))
        output.print_note(f"From {begin} to {end}, in {report_options.unit}.")
        if not reply.is_all:
            output.print_note(
                "Of jobs that you may see: yours, and those of accounts that you lead."
            )
    print_table(reply.layout, reply.rows, style, reply)
    if not reply.rows and not style.parsable:
        output.print_warning(_explain_empty(reply, report_options))
    return reply


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
