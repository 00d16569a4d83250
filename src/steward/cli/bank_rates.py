"""``steward bank rate``, ``enforce`` and ``would-refuse``: what jobs cost, and what of it holds."""

from typing import Annotated

import msgspec
import typer

from steward.bank.actions.rates import (
    EnforceAnswer,
    EnforceRequest,
    RateCreateRequest,
    RatesAnswer,
    RateShowRequest,
    WouldRefuseAnswer,
    WouldRefuseRequest,
)
from steward.bank.rate_validation import worded
from steward.bank.records import ModeRule, Rate
from steward.cli import options, output
from steward.cli.asking import Asked, asking, asking_columns, taking
from steward.cli.bank_rate_options import RateSaid, rate_said
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
from steward.cli.output import Column, Style
from steward.cli.times import zone_to_ask_in
from steward.core.errors import UsageError


@asking_columns
def rate_show(
    asked: Asked,
    cluster: ClusterOption = "",
    past: Annotated[bool, typer.Option("--past", help="Those that were replaced as well.")] = False,
) -> None:
    """Show what jobs cost.

    A job keeps for life the rates of its first submission.
    """
    style = asked.style
    request = RateShowRequest(cluster=cluster, past=past)
    answer: RatesAnswer = asked.call("bank.rate_show", request)
    _print_rates(answer, style)


@asking
@taking(rate_said)
def rate_create(said: RateSaid, asked: Asked) -> None:
    """Say what jobs cost from a time on.

    Rates are never changed: a new one holds for jobs that are submitted from then on.
    """
    rate = Rate(cluster=said.cluster, partition=said.partition, qos=said.qos, **said.given)
    _create(asked, said, rate)


@asking
@taking(rate_said)
def rate_change(said: RateSaid, asked: Asked) -> None:
    """Change a part of what jobs cost, from a time on.

    What is not given stays as it is now; jobs that were submitted before keep their rate.
    """
    now: RatesAnswer = asked.call("bank.rate_show", RateShowRequest(cluster=said.cluster))
    partition = said.partition
    last = [one for one in now.rates if one.partition == partition and one.qos == said.qos]
    clusters = {one.cluster for one in last}
    if not last or len(clusters) > 1:
        raise UsageError(
            f"there is no rate of {partition} to be changed: 'steward bank rate create'"
            if not last
            else f"{partition} is a partition of {' and '.join(sorted(clusters))}: name one with -M"
        )
    given = said.given
    if "free" in given:
        given = {**given, "weights": {}, "minimum": 0}
    elif not given:
        raise UsageError("nothing is to be changed: give --weight or another option")
    elif "weights" in given or "minimum" in given:
        given = {**given, "free": False}
    _create(asked, said, msgspec.structs.replace(last[0], **given))


def _create(asked: Asked, said: RateSaid, rate: Rate) -> None:
    request = RateCreateRequest(
        rate=rate, valid_from=said.valid_from, zone=zone_to_ask_in(), reason=said.reason
    )
    answer: RatesAnswer = asked.call("bank.rate_create", request)
    _print_rates(answer, asked.style)
    for warning in answer.warnings:
        output.warn(warning)
    if not asked.style.json:
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
        Column("Rate", worded),
        Column("Note", lambda one: one.note, usual=False),
    ]
    if not answer.rates:
        output.note("Nothing says what jobs cost yet: 'steward bank rate create'.")
    output.print_table(columns, answer.rates, style)


@asking
def enforce(
    asked: Asked,
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
            "--partition", "-r", metavar="NAME", help="Only there.", callback=options.not_empty
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
    style = asked.style
    request = EnforceRequest(
        mode=mode, cluster=cluster, partition=partition, account=account, reason=reason
    )
    answer: EnforceAnswer = asked.call("bank.enforce", request)
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


@asking_columns
def would_refuse(
    asked: Asked,
    start: Annotated[str, since("Since; the last seven days if not given.")] = "",
    end: Annotated[str, until()] = "",
    account: AccountOption = "",
    user: UserOption = "",
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="What was indeed refused as well.")
    ] = False,
) -> None:
    """List what the gate would have refused.

    These jobs were let in because the mode was observe.
    """
    style = asked.style
    request = WouldRefuseRequest(
        since=start, until=end, zone=zone_to_ask_in(), account=account, user=user, all=everything
    )
    answer: WouldRefuseAnswer = asked.call("bank.would_refuse", request)
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
