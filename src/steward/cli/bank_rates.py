"""``steward bank rate``, ``enforce`` and ``would-refuse``: prices of jobs, and the bank's mode.

In order: option types and parsers of rates (weights by TRES, factors by time, QOS and end state),
``rate show|create|change``, ``enforce`` (off, observe, gate) and the list of jobs that the gate
would have rejected in observe mode.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
import typer

from steward.bank import money
from steward.bank.actions.rates import (
    EnforceReply,
    EnforceRequest,
    RateCreateRequest,
    RateShowRequest,
    RatesReply,
    WouldRefuseReply,
    WouldRefuseRequest,
)
from steward.bank.rate_validation import DAYS, check_tres_names, format_rate
from steward.bank.records import ModeRule, Rate, TimeFactor
from steward.cli import output
from steward.cli.bank_options import (
    AccountOption,
    ClusterOption,
    Reason,
    UserOption,
    make_since_option,
    make_until_option,
    note_gate_unaware,
    print_line,
)
from steward.cli.options import (
    CommandCall,
    reject_empty,
    split_lists,
    with_call,
    with_call_and_columns,
    with_options,
)
from steward.cli.output import (
    Style,
    find_requested_zone,
    print_json,
    print_table,
)
from steward.core.errors import UsageError
from steward.core.layouts import Column

_TIME_FACTOR: Final = re.compile(r"([a-z,-]+)/([\d:]+)-([\d:]+)=([\d.]+)")
"""A factor by time: days/begin-end=factor."""
_PERMILLE: Final = 1000
"""Factors are integers in thousandths."""


Partition = Annotated[
    str, typer.Argument(metavar="PARTITION", help="The partition; '*' for those without a rate.")
]
Qos = Annotated[
    str,
    typer.Option("--qos", "-q", metavar="NAME", help="Only for it.", callback=reject_empty),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--weight",
        "-w",
        metavar="TRES=AMOUNT,…",
        help="For an hour of a TRES: cpu=1,gres/gpu=20; of mem and bb/NAME for a GiB.",
        callback=reject_empty,
    ),
]
CombineByMaximum = Annotated[
    bool | None,
    typer.Option("--max/--sum", help="Let the dearest of the weighted TRES count, or their sum."),
]
Minimum = Annotated[
    str, typer.Option("--minimum", metavar="AMOUNT", help="What a run costs at the least.")
]
WholeNodes = Annotated[
    bool | None, typer.Option("--whole-nodes/--parts", help="Charge nodes whole, or what was used.")
]
TimeFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--factor",
        metavar="DAYS/TIME-TIME=NUMBER",
        help="At some times: sat-sun/0-24=0.5, mon-fri/08:00-18:00=1.5.",
        callback=reject_empty,
    ),
]
QosFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--qos-factor", metavar="QOS=NUMBER,…", help="Under a QOS.", callback=reject_empty
    ),
]
EndFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--end-factor",
        metavar="STATE=NUMBER,…",
        help="By final state: NODE_FAIL=0,PREEMPTED=0.5.",
        callback=reject_empty,
    ),
]
Free = Annotated[bool, typer.Option("--free", help="It costs nothing.")]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Why it is so.")]
ValidFrom = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="TIME",
        help="For jobs submitted since; from now on if not given.",
        callback=reject_empty,
    ),
]


class RateOptions(msgspec.Struct, frozen=True):
    """Options of ``rate create`` and ``rate change``.

    Attributes:
        partition: The partition.
        qos: Only under this QOS; "" for all.
        cluster: The cluster.
        given: Fields of the rate that the command line sets.
        valid_from: Start of validity, in Slurm's time format.
        reason: Reason recorded in the ledger.
    """

    partition: str
    qos: str
    cluster: str
    given: dict[str, Any]
    valid_from: str
    reason: str


def read_rate_options(
    partition: Partition,
    qos: Qos = "",
    weight: Weights = None,
    dearest: CombineByMaximum = None,
    minimum: Minimum = "",
    whole_nodes: WholeNodes = None,
    factor: TimeFactors = None,
    qos_factor: QosFactors = None,
    end_factor: EndFactors = None,
    free: Free = False,
    note: Note = "",
    valid_from: ValidFrom = "",
    cluster: ClusterOption = "",
    reason: Reason = "",
) -> RateOptions:
    """Parse the options that describe a rate.

    Raises:
        UsageError: An option is malformed.
    """
    option_values: dict[str, Any] = {
        "weights": parse_weights(weight) if weight else None,
        "combine": None if dearest is None else "max" if dearest else "sum",
        "minimum": money.parse_money(minimum) if minimum else None,
        "whole_nodes": whole_nodes,
        "factors": parse_time_factors(factor) if factor else None,
        "qos_permille": parse_factors(qos_factor, "--qos-factor lowprio=0.5") or None,
        "ends_permille": parse_factors(end_factor, "--end-factor NODE_FAIL=0") or None,
        "free": free or None,
        "note": note or None,
    }
    fields = {name: value for name, value in option_values.items() if value is not None}
    return RateOptions(partition, qos, cluster, fields, valid_from, reason)


def parse_weights(values: Iterable[str] | None) -> dict[str, int]:
    """Parse TRES weights such as ``cpu=1,mem=0.1`` into micro-SU by TRES.

    Raises:
        UsageError: A part is malformed or names no TRES.
    """
    weights: dict[str, int] = {}
    for name, value in _split_pairs(values, "--weight cpu=1"):
        weights[name] = money.parse_money(value)
    check_tres_names(weights)
    return weights


def parse_factors(values: Iterable[str] | None, example: str) -> dict[str, int]:
    """Parse factors such as ``lowprio=0.5`` into thousandths by name.

    Raises:
        UsageError: A part is malformed.
    """
    return {name: parse_permille(value) for name, value in _split_pairs(values, example)}


def parse_permille(text: str) -> int:
    """Parse a factor such as ``0.5`` into thousandths.

    Raises:
        UsageError: It is negative, or has more than three decimals.
    """
    permille, remainder = divmod(money.parse_money(text) * _PERMILLE, money.MICRO)
    if permille < 0 or remainder:
        raise UsageError(f"{text} is no factor: it is not below 0, with three decimals", text)
    return permille


def parse_time_factors(values: Iterable[str] | None) -> tuple[TimeFactor, ...]:
    """Parse factors by time, such as ``sat-sun/0-24=0.5`` or ``mon-fri/08:00-18:30=1.5``.

    Raises:
        UsageError: A part is malformed.
    """
    factors = []
    for value in values or ():
        match = _TIME_FACTOR.fullmatch(value.lower())
        if not match:
            raise UsageError(f"{value!r} is no factor by time: write sat-sun/0-24=0.5", value)
        days, begin, end, factor = match.groups()
        factors.append(
            TimeFactor(
                days=_parse_days(days), begin_min=_parse_minute(begin), end_min=_parse_minute(end),
                permille=parse_permille(factor),
            )
        )  # fmt: skip
    return tuple(factors)


def _parse_days(text: str) -> tuple[int, ...]:
    """Parse days such as ``mon-fri,sun`` into numbers, Monday 0."""
    days: set[int] = set()
    for day_range in text.split(","):
        first, dash, last = day_range.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise UsageError(f"{day_range!r} is no day: {', '.join(DAYS)}", day_range)
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % len(DAYS) if dash else 0
        days |= {(begin + step) % len(DAYS) for step in range(count + 1)}
    return tuple(sorted(days))


def _parse_minute(text: str) -> int:
    """Parse a time of day such as ``8`` or ``18:30`` into minutes after midnight."""
    hour, _, minute = text.partition(":")
    if hour.isdecimal() and (minute or "0").isdecimal() and len(hour) <= 2 and len(minute) <= 2:
        minutes = int(hour) * 60 + int(minute or 0)
        if minutes <= 24 * 60 and int(minute or 0) < 60:
            return minutes
    raise UsageError(f"{text!r} is no time of day: 8, 08:00 or 24", text)


def _split_pairs(values: Iterable[str] | None, example: str) -> Iterable[tuple[str, str]]:
    """Split comma-separated NAME=VALUE options."""
    for pair in split_lists(values):
        name, separator, value = pair.rpartition("=")
        if not separator or not name:
            raise UsageError(f"{pair!r} is not understood: write {example}", pair)
        yield name, value


@with_call_and_columns
def rate_show(
    call: CommandCall,
    cluster: ClusterOption = "",
    past: Annotated[bool, typer.Option("--past", help="Those that were replaced as well.")] = False,
) -> None:
    """Show what jobs cost.

    A job keeps for life the rates of its first submission.
    """
    style = call.style
    request = RateShowRequest(cluster=cluster, past=past)
    reply: RatesReply = call.send("bank.rate_show", request)
    _print_rates(reply, style)


@with_call
@with_options(read_rate_options)
def rate_create(rate_options: RateOptions, call: CommandCall) -> None:
    """Say what jobs cost from a time on.

    Rates are never changed: a new one holds for jobs that are submitted from then on.
    """
    rate = Rate(
        cluster=rate_options.cluster,
        partition=rate_options.partition,
        qos=rate_options.qos,
        **rate_options.given,
    )
    _send_rate(call, rate_options, rate)


@with_call
@with_options(read_rate_options)
def rate_change(rate_options: RateOptions, call: CommandCall) -> None:
    """Change a part of what jobs cost, from a time on.

    What is not given stays as it is now; jobs that were submitted before keep their rate.
    """
    reply: RatesReply = call.send("bank.rate_show", RateShowRequest(cluster=rate_options.cluster))
    partition = rate_options.partition
    current_rates = [
        rate for rate in reply.rates if rate.partition == partition and rate.qos == rate_options.qos
    ]
    clusters = {rate.cluster for rate in current_rates}
    if not current_rates or len(clusters) > 1:
        raise UsageError(
            f"there is no rate of {partition} to be changed: 'steward bank rate create'"
            if not current_rates
            else f"{partition} is a partition of {' and '.join(sorted(clusters))}: name one with -M"
        )
    changes = rate_options.given
    if "free" in changes:
        changes = {**changes, "weights": {}, "minimum": 0}
    elif not changes:
        raise UsageError("nothing is to be changed: give --weight or another option")
    elif "weights" in changes or "minimum" in changes:
        changes = {**changes, "free": False}
    _send_rate(call, rate_options, msgspec.structs.replace(current_rates[0], **changes))


def _send_rate(call: CommandCall, rate_options: RateOptions, rate: Rate) -> None:
    """Send a new rate, print the result and warnings."""
    request = RateCreateRequest(
        rate=rate,
        valid_from=rate_options.valid_from,
        zone=find_requested_zone(),
        reason=rate_options.reason,
    )
    reply: RatesReply = call.send("bank.rate_create", request)
    _print_rates(reply, call.style)
    for warning in reply.warnings:
        output.print_warning(warning)
    if not call.style.json:
        note_gate_unaware(reply.gate_knows)


def _print_rates(reply: RatesReply, style: Style) -> None:
    """Print the rates of a reply."""
    if style.json:
        print_json(reply)
        return
    columns = [
        Column("Number", "number", "count"),
        Column("Cluster", "cluster", show="several"),
        Column("Partition", "partition"),
        Column("QOS", "qos", show="filled"),
        Column("From", "valid_from", "time"),
        Column("Rate", lambda row, _: format_rate(row)),
        Column("Note", "note", show="requested"),
    ]
    if not reply.rates:
        output.print_note("Nothing says what jobs cost yet: 'steward bank rate create'.")
    print_table(columns, reply.rates, style, reply)


@with_call
def enforce(
    call: CommandCall,
    mode: Annotated[
        str,
        typer.Argument(
            metavar="off|observe|gate|default", help="Not given, it is only worded what holds."
        ),
    ] = "",
    cluster: ClusterOption = "",
    partition: Annotated[
        str,
        typer.Option(
            "--partition", "-r", metavar="NAME", help="Only there.", callback=reject_empty
        ),
    ] = "",
    account: AccountOption = "",
    reason: Reason = "",
) -> None:
    """Set how much the bank enforces.

    It holds at once. Under observe jobs are priced, held and charged, but none is
    refused; gate refuses; off does neither. An account's mode goes before a partition's,
    and that before the cluster's; default takes one back.
    """
    style = call.style
    request = EnforceRequest(
        mode=mode, cluster=cluster, partition=partition, account=account, reason=reason
    )
    reply: EnforceReply = call.send("bank.enforce", request)
    if style.json:
        print_json(reply)
        return
    if not any(_is_default_rule(rule) for rule in reply.rules) and not style.parsable:
        print_line("Where nothing else is said: observe.")
    if reply.rules or style.parsable:
        print_table(reply.layout, reply.rules, style, reply)
    if mode:
        note_gate_unaware(reply.gate_knows)
    if reply.warning:
        output.print_warning(reply.warning)


def _is_default_rule(rule: ModeRule) -> bool:
    """Return True if a mode applies to all clusters, partitions and accounts."""
    return not (rule.cluster or rule.partition or rule.account)


@with_call_and_columns
def would_refuse(
    call: CommandCall,
    start: Annotated[str, make_since_option("Since; the last seven days if not given.")] = "",
    end: Annotated[str, make_until_option()] = "",
    account: AccountOption = "",
    user: UserOption = "",
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="What was indeed refused as well.")
    ] = False,
) -> None:
    """List what the gate would have refused.

    These jobs were let in because the mode was observe.
    """
    style = call.style
    request = WouldRefuseRequest(
        since=start,
        until=end,
        zone=find_requested_zone(),
        account=account,
        user=user,
        all=everything,
    )
    reply: WouldRefuseReply = call.send("bank.would_refuse", request)
    if style.json:
        print_json(reply)
        return
    if reply.warning:
        output.print_warning(reply.warning)
    if not reply.refusals and not style.parsable:
        if not reply.warning:
            print_line("Nothing would have been refused.")
        return
    print_table(reply.layout, reply.refusals, style, reply)
    if reply.more:
        output.print_warning("there is more: see -S and -E")
