"""``steward bank rate``, ``enforce`` and ``would-refuse``: what jobs cost, and what of it holds."""

from typing import Annotated, Any

import msgspec
import typer

from steward.bank import money
from steward.bank.asking_rates import (
    EnforceAnswer,
    EnforceRequest,
    RateCreateRequest,
    RatesAnswer,
    RateShowRequest,
    WouldRefuseAnswer,
    WouldRefuseRequest,
)
from steward.bank.records import ModeRule, Rate
from steward.cli import options, output
from steward.cli.bank_rate_options import factors_of, shown, times, weights
from steward.cli.bank_text import (
    AccountOption,
    ClusterOption,
    Reason,
    Shown,
    UserOption,
    plain,
    say,
    since,
    tell_gate,
    until,
)
from steward.cli.client import action, call
from steward.cli.options import Place
from steward.cli.output import Column, Style
from steward.cli.times import zone_to_ask_in
from steward.errors import UsageError

Partition = Annotated[
    str, typer.Argument(metavar="PARTITION", help="The partition; '*' for those without a rate.")
]
Qos = Annotated[
    str,
    typer.Option("--qos", "-q", metavar="NAME", help="Only for it.", callback=options.not_empty),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--weight",
        "-w",
        metavar="TRES=AMOUNT,…",
        help="For an hour of a TRES: cpu=1,gres/gpu=20; of mem for a GiB.",
        callback=options.not_empty,
    ),
]
Dearest = Annotated[
    bool | None,
    typer.Option("--max/--sum", help="Let the dearest of the weighted TRES count, or their sum."),
]
Minimum = Annotated[
    str, typer.Option("--minimum", metavar="AMOUNT", help="What a run costs at the least.")
]
WholeNodes = Annotated[
    bool | None, typer.Option("--whole-nodes/--parts", help="Charge nodes whole, or what was used.")
]
Times = Annotated[
    list[str] | None,
    typer.Option(
        "--factor",
        metavar="DAYS/TIME-TIME=NUMBER",
        help="At some times: sat-sun/0-24=0.5, mon-fri/08:00-18:00=1.5.",
        callback=options.not_empty,
    ),
]
QosFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--qos-factor", metavar="QOS=NUMBER,…", help="Under a QOS.", callback=options.not_empty
    ),
]
EndFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--end-factor",
        metavar="STATE=NUMBER,…",
        help="By final state: NODE_FAIL=0,PREEMPTED=0.5.",
        callback=options.not_empty,
    ),
]
Free = Annotated[bool, typer.Option("--free", help="It costs nothing.")]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Why it is so.")]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="TIME",
        help="For jobs submitted since; from now on if not given.",
        callback=options.not_empty,
    ),
]


def rate_show(
    cluster: ClusterOption = "",
    past: Annotated[bool, typer.Option("--past", help="Those that were replaced as well.")] = False,
    columns: options.Format = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Show what jobs cost.

    A job keeps for life the rates of its first submission.
    """
    style = options.style(as_json, parsable, noheader, columns)
    request = RateShowRequest(cluster=cluster, past=past)
    answer: RatesAnswer = call(
        Place(config=config, socket=socket), action("bank.rate_show"), request
    )
    _print_rates(answer, style)


def rate_create(
    partition: Partition,
    qos: Qos = "",
    weight: Weights = None,
    dearest: Dearest = None,
    minimum: Minimum = "0",
    whole_nodes: WholeNodes = None,
    factor: Times = None,
    qos_factor: QosFactors = None,
    end_factor: EndFactors = None,
    free: Free = False,
    note: Note = "",
    valid_from: From = "",
    cluster: ClusterOption = "",
    reason: Reason = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Say what jobs cost from a time on.

    Rates are never changed: a new one holds for jobs that are submitted from then on.
    """
    style = options.style(as_json, parsable, noheader)
    rate = Rate(
        cluster=cluster,
        partition=partition,
        qos=qos,
        weights=weights(weight),
        combine="max" if dearest else "sum",
        minimum=money.parse(minimum),
        whole_nodes=bool(whole_nodes),
        factors=times(factor),
        qos_permille=factors_of(qos_factor, "--qos-factor lowprio=0.5"),
        ends_permille=factors_of(end_factor, "--end-factor NODE_FAIL=0"),
        free=free,
        note=note,
    )
    _create(rate, valid_from, reason, Place(config=config, socket=socket), style)


def rate_change(
    partition: Partition,
    qos: Qos = "",
    weight: Weights = None,
    dearest: Dearest = None,
    minimum: Minimum = "",
    whole_nodes: WholeNodes = None,
    factor: Times = None,
    qos_factor: QosFactors = None,
    end_factor: EndFactors = None,
    free: Free = False,
    note: Note = "",
    valid_from: From = "",
    cluster: ClusterOption = "",
    reason: Reason = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Change a part of what jobs cost, from a time on.

    What is not given stays as it is now; jobs that were submitted before keep their rate.
    """
    style = options.style(as_json, parsable, noheader)
    place = Place(config=config, socket=socket)
    now: RatesAnswer = call(place, action("bank.rate_show"), RateShowRequest(cluster=cluster))
    last = [one for one in now.rates if one.partition == partition and one.qos == qos]
    clusters = {one.cluster for one in last}
    if not last or len(clusters) > 1:
        raise UsageError(
            f"there is no rate of {partition} to be changed: 'steward bank rate create'"
            if not last
            else f"{partition} is a partition of {' and '.join(sorted(clusters))}: name one with -M"
        )
    new: dict[str, Any] = {
        "weights": weights(weight) if weight else None,
        "combine": None if dearest is None else "max" if dearest else "sum",
        "minimum": money.parse(minimum) if minimum else None,
        "whole_nodes": whole_nodes,
        "factors": times(factor) if factor else None,
        "qos_permille": factors_of(qos_factor, "--qos-factor lowprio=0.5") or None,
        "ends_permille": factors_of(end_factor, "--end-factor NODE_FAIL=0") or None,
        "note": note or None,
    }
    given = {name: value for name, value in new.items() if value is not None}
    if free:
        given |= {"free": True, "weights": {}, "minimum": 0}
    elif not given:
        raise UsageError("nothing is to be changed: give --weight or another option")
    elif "weights" in given or "minimum" in given:
        given["free"] = False
    _create(msgspec.structs.replace(last[0], **given), valid_from, reason, place, style)


def _create(rate: Rate, valid_from: str, reason: str, place: Place, style: Style) -> None:
    request = RateCreateRequest(
        rate=rate, valid_from=valid_from, zone=zone_to_ask_in(), reason=reason
    )
    answer: RatesAnswer = call(place, action("bank.rate_create"), request)
    _print_rates(answer, style)
    for warning in answer.warnings:
        output.warn(warning)
    if not style.json:
        tell_gate(answer.gate_knows)


def _print_rates(answer: RatesAnswer, style: Style) -> None:
    if style.json:
        output.print_json(answer)
        return
    view = Shown(answer)
    several = len({one.cluster for one in answer.rates}) > 1
    columns = [
        Column("Number", lambda one: str(one.number), None, True),
        Column("Cluster", lambda one: one.cluster, usual=several),
        Column("Partition", lambda one: one.partition),
        Column("QOS", lambda one: one.qos, usual=any(one.qos for one in answer.rates)),
        Column("From", lambda one: view.time(one.valid_from)),
        Column("Rate", shown),
        Column("Note", lambda one: one.note, usual=False),
    ]
    if not answer.rates:
        output.note("Nothing says what jobs cost yet: 'steward bank rate create'.")
    output.print_table(columns, answer.rates, style)


def enforce(
    mode: Annotated[
        str,
        typer.Argument(
            metavar="off|observe|gate|default", help="Not given, it is only shown what holds."
        ),
    ] = "",
    cluster: ClusterOption = "",
    partition: Annotated[
        str,
        typer.Option(
            "--partition", "-r", metavar="NAME", help="Only there.", callback=options.not_empty
        ),
    ] = "",
    account: AccountOption = "",
    reason: Reason = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """Set how much the bank enforces.

    It holds at once. Under observe jobs are priced, held and charged, but none is
    refused; gate refuses; off does neither. An account's mode goes before a partition's,
    and that before the cluster's; default takes one back.
    """
    style = options.style(as_json, parsable, noheader)
    request = EnforceRequest(
        mode=mode, cluster=cluster, partition=partition, account=account, reason=reason
    )
    answer: EnforceAnswer = call(
        Place(config=config, socket=socket), action("bank.enforce"), request
    )
    if style.json:
        output.print_json(answer)
        return
    if not any(_is_general(one) for one in answer.rules) and not style.parsable:
        say("Where nothing else is said: observe.")
    columns = [
        Column("Cluster", lambda one: one.cluster or "all"),
        Column("Partition", lambda one: one.partition or "all"),
        Column("Account", lambda one: one.account or "all"),
        Column("Mode", lambda one: one.mode),
    ]
    if answer.rules or style.parsable:
        output.print_table(columns, answer.rules, style)
    if mode:
        tell_gate(answer.gate_knows)
    if answer.warning:
        output.warn(answer.warning)


def _is_general(rule: ModeRule) -> bool:
    return not (rule.cluster or rule.partition or rule.account)


def would_refuse(
    start: Annotated[str, since("Since; the last seven days if not given.")] = "",
    end: Annotated[str, until()] = "",
    account: AccountOption = "",
    user: UserOption = "",
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="What was indeed refused as well.")
    ] = False,
    columns: options.Format = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> None:
    """List what the gate would have refused.

    These jobs were let in because the mode was observe.
    """
    style = options.style(as_json, parsable, noheader, columns)
    request = WouldRefuseRequest(
        since=start, until=end, zone=zone_to_ask_in(), account=account, user=user, all=everything
    )
    answer: WouldRefuseAnswer = call(
        Place(config=config, socket=socket), action("bank.would_refuse"), request
    )
    if style.json:
        output.print_json(answer)
        return
    if answer.warning:
        output.warn(answer.warning)
    if not answer.refusals and not style.parsable:
        if not answer.warning:
            say("Nothing would have been refused.")
        return
    view = Shown(answer)
    several = len({one.cluster for one in answer.refusals}) > 1
    table = [
        Column("Time", lambda one: view.time(one.at)),
        Column("Cluster", lambda one: one.cluster, usual=several),
        Column("JobID", lambda one: str(one.job_id) if one.job_id else "", None, True,
               any(one.job_id for one in answer.refusals)),
        Column("User", lambda one: one.user or str(one.uid)),
        Column("Account", lambda one: one.account),
        Column("Partition", lambda one: one.partition),
        Column("Amount", lambda one: view.amount(one.amount), lambda one: plain(one.amount), True),
        Column("Mode", lambda one: one.mode, usual=everything),
        Column("Why", lambda one: one.why.split("\n", 1)[0], lambda one: one.why,
               widest=60 if output.is_terminal() else 0),
    ]  # fmt: skip
    output.print_table(table, answer.refusals, style)
    if answer.more:
        output.warn("there is more: see -S and -E")
