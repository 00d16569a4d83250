"""Rejections: messages for users whose job costs more than is available, with what would fit."""

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from steward.bank.errors import NoEstimate
from steward.bank.estimate import UNLIMITED_S
from steward.bank.gate.balances import AccountBalances
from steward.bank.gate.policy import GateRules, to_datetime
from steward.bank.money import format_money
from steward.bank.records import Quote

if TYPE_CHECKING:
    from steward.bank.gate.admission import AdmissionCase, Shortfall

_MINUTES_A_DAY: Final = 1440
_SHOWN_IN_MINUTES_S: Final = 120
"""Age from which a balance's age is shown in minutes, in seconds."""
_MOST_NAMES: Final = 3
"""Maximum number of accounts and of owners that a message names."""


def format_rejection(
    balances: AccountBalances,
    rules: GateRules,
    case: "AdmissionCase",
    quote: Quote,
    shortfall: "Shortfall",
) -> str:
    """Write the rejection message for a user: cost, shortfall, balance, and what would fit."""
    lines = [_format_headline(rules, case, quote, shortfall)]
    if shortfall.what == "unknown":
        return "\n".join([*lines, _format_remote_age(balances, rules, case)])
    lines += _format_balance(balances, rules, case, shortfall)
    lines += _format_assumed_limit(rules, case, quote)
    if rules.budget.is_spent():
        return "\n".join(lines)  # slurmctld waits: skip the search
    suggestion = _format_smaller_requests(rules, case, quote, shortfall)
    if suggestion:
        lines.append(f"  The gate would admit {suggestion}.")
    elif shortfall.what not in ("share", "unseen"):
        lines += _format_alternatives(balances, rules, case, quote)
    return "\n".join(lines)


def _format_headline(
    rules: GateRules, case: "AdmissionCase", quote: Quote, shortfall: "Shortfall"
) -> str:
    """Write the message's first line: the cost and the limit that it exceeds."""
    account = case.account
    cost = format_money(quote.amount, rules.unit)
    what = f"this job may cost up to {cost}"
    if shortfall.needed != quote.amount:
        what = (
            f"this change may cost up to {format_money(shortfall.needed, rules.unit)} more "
            f"({cost} in all)"
        )
    available = format_money(max(0, shortfall.free), rules.unit)
    if shortfall.what == "user":
        return (
            f"Steward: insufficient funds: {what}, but the spending limit of user {case.user} "
            f"in account {account} leaves {available}"
        )
    if shortfall.what == "unknown":
        return f"Steward: rejected: {what}, but the balance of account {account} is unknown now"
    if shortfall.what == "share":
        return (
            f"Steward: rejected: {what}, but one user may hold only a share of account {account}, "
            f"so your holds may grow by only {available}"
        )
    if shortfall.what == "unseen":
        return (
            f"Steward: rejected: {what}, but many of your submissions never became jobs in "
            f"Slurm (sbatch --test-only counts, too), so your holds in account {account} may "
            f"grow by only {available}. Try again in {shortfall.wait_s} s"
        )
    if shortfall.free < 0:
        return f"Steward: insufficient funds: {what}, but account {account} is overdrawn"
    return f"Steward: insufficient funds: {what}, but account {account} has {available} available"


def _format_balance(
    balances: AccountBalances, rules: GateRules, case: "AdmissionCase", shortfall: "Shortfall"
) -> list[str]:
    """Write the lines on the account's balance, holds, credit limit and next allocation."""
    unit, account = rules.unit, case.account
    means = balances.get_means(account, case.user, case.job.uid, case.now_us)
    granted = sum(allocation.total for allocation in balances.iter_active(means.payer, case.now_us))
    lines = []
    if shortfall.what == "user" and means.user_limit is not None:
        lines.append(
            f"  Of the limit of {format_money(means.user_limit, unit)}, "
            f"{format_money(means.user_spent, unit)} "
            f"are spent and {format_money(means.user_held, unit)} held for other jobs."
        )
    else:
        paid = f" (paid by {means.payer})" if means.payer != account else ""
        spent = f"{format_money(max(0, granted - means.balance), unit)} spent, " if granted else ""
        credit = f", credit {format_money(means.credit, unit)}" if means.credit else ""
        lines.append(
            f"  Account {account}{paid}: {spent}balance {format_money(means.balance, unit)}, "
            f"{format_money(means.held, unit)} held for other jobs{credit}."
        )
    if means.at_us:
        lines.append(_format_remote_age(balances, rules, case))
    following = balances.find_next_allocation(means.payer, case.now_us)
    if following and shortfall.what == "account":
        begins = to_datetime(following.begin_us).astimezone(rules.get_time_zone(case.cluster))
        lines.append(
            f"  The next allocation, {format_money(following.balance, unit)}, "
            f"begins on {begins:%Y-%m-%d at %H:%M}."
        )
    return lines


def _format_remote_age(balances: AccountBalances, rules: GateRules, case: "AdmissionCase") -> str:
    """Write when the remote myBRC server reported the account's balance."""
    host = urlsplit(rules.bank.remote.url).hostname
    at_us = balances.get_remote_at_us(case.account)
    if not at_us:
        return f"  {host} was not queried yet: try again in a minute."
    at = to_datetime(at_us).astimezone(rules.get_time_zone(case.cluster))
    age_s = max(0, case.now_us - at_us) // 1_000_000
    age = f"{age_s // 60} min" if age_s >= _SHOWN_IN_MINUTES_S else f"{age_s} s"
    return f"  The balance is from {host}, queried on {at:%Y-%m-%d at %H:%M:%S}, {age} ago."


def _format_assumed_limit(rules: GateRules, case: "AdmissionCase", quote: Quote) -> list[str]:
    """Write the assumed time limit, if the job sets none."""
    estimator = rules.get_estimator(case.cluster)
    is_given = case.is_change or case.job.time_limit_min is not None
    if estimator is None or is_given or not quote.tres:
        return []
    partition = estimator.model.partitions.get(quote.partition)
    seconds = None if partition is None else partition.usual_time_s
    minutes = (UNLIMITED_S if seconds is None else seconds) // 60
    clock = _format_minutes(minutes)
    return [
        f"  The job has no time limit, so the price is for {clock}: a shorter --time costs less."
    ]


def _format_alternatives(
    balances: AccountBalances, rules: GateRules, case: "AdmissionCase", quote: Quote
) -> list[str]:
    """Name the user's other accounts that can pay, and the owners to ask for more."""
    lines = []
    for name in balances.list_accounts(case.user) if case.user else ():
        if rules.budget.is_spent():
            break
        books = balances.accounts[name]
        if name == case.account or books.closed:
            continue
        means = balances.get_means(name, case.user, case.job.uid, case.now_us)
        available = means.available
        if means.user_limit is not None:
            available = min(available, means.user_limit - means.user_spent - means.user_held)
        if available >= quote.amount:
            lines.append(f"  Your account {name} can pay it (--account={name}).")
        if len(lines) == _MOST_NAMES:
            break
    account = balances.accounts.get(case.account)
    payer = balances.accounts.get(balances.get_payer(case.account))
    owners = (account.owners if account else ()) or (payer.owners if payer else ())
    owner_names = " or ".join(owners[:_MOST_NAMES])
    lines.append(
        f"  To get more for account {case.account}, ask its owners: {owner_names}."
        if owner_names
        else f"  To get more for account {case.account}, ask an operator of the cluster."
    )
    return lines


def _format_smaller_requests(
    rules: GateRules, case: "AdmissionCase", quote: Quote, shortfall: "Shortfall"
) -> str:
    """Describe a smaller request that the account could pay; "" if there is none."""
    estimator = rules.get_estimator(case.cluster)
    affordable = quote.amount - shortfall.needed + shortfall.free
    # If the caller gave only a cost, no request is known that could be made smaller.
    if estimator is None or affordable <= 0 or not quote.tres:
        return ""
    suggestions = []
    try:
        minutes = estimator.find_longest_limit(
            case.job,
            affordable,
            to_datetime(case.first_submit_us),
            tasks=quote.tasks,
            budget=rules.budget,
        )
    except NoEstimate:
        minutes = None  # with another time limit the job cannot be priced
    if minutes is not None and minutes > 0:
        suggestions.append(f"a time limit of at most {_format_minutes(minutes)} (--time={minutes})")
    if quote.tasks > 1 and quote.per_task:
        tasks = affordable // quote.per_task
        if tasks:
            suggestions.append(f"{tasks} of its {quote.tasks} tasks")
    return ", or ".join(suggestions)


def _format_minutes(minutes: int) -> str:
    days, rest = divmod(minutes, _MINUTES_A_DAY)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock
