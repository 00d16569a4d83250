"""What users are told whose job is refused: what it may cost, what there is, what would fit."""

from typing import Final
from urllib.parse import urlsplit

from steward.bank.errors import NoEstimate
from steward.bank.gate.case import Case, Short
from steward.bank.gate.ground import Ground, moment
from steward.bank.gate.purses import Purses
from steward.bank.money import show
from steward.bank.records import Quote

_MINUTES_A_DAY: Final = 1440
_LONG_S: Final = 120
_MOST_OTHERS: Final = 3
"""Of accounts and of people that are named."""


def text_of(purses: Purses, ground: Ground, case: Case, quote: Quote, short: Short) -> str:
    """The lines that a user is shown."""
    lines = [_first(ground, case, quote, short)]
    if short.what == "unknown":
        return "\n".join([*lines, _asked(purses, ground, case)])
    lines += _standing(purses, ground, case, short)
    lines += _assumed(ground, case, quote)
    if ground.budget.is_spent():
        return "\n".join(lines)  # slurmctld waits: what would fit is not looked for
    fits = _fitting(ground, case, quote, short)
    if fits:
        lines.append(f"  What would fit: {fits}.")
    elif short.what not in ("share", "unseen"):
        lines += _elsewhere(purses, ground, case, quote)
    return "\n".join(lines)


def _first(ground: Ground, case: Case, quote: Quote, short: Short) -> str:
    account = case.account
    cost = show(quote.amount, ground.unit)
    what = f"this job may cost {cost}"
    if short.needed != quote.amount:
        what = f"this change may cost {show(short.needed, ground.unit)} more ({cost} in all)"
    free = show(max(0, short.free), ground.unit)
    if short.what == "user":
        return (
            f"Steward: {what}, but user {case.user} has {free} left to spend in account {account}"
        )
    if short.what == "unknown":
        return f"Steward: {what}, but what account {account} has is not known just now"
    if short.what == "share":
        return (
            f"Steward: {what}, but only {free} more of account {account} may be held for one "
            "user's jobs"
        )
    if short.what == "unseen":
        return (
            f"Steward: {what}, but jobs of yours were asked for again and again that Slurm then "
            f"did not have (sbatch --test-only asks, too), so that only {free} more of account "
            f"{account} may be held until Slurm shows their jobs: try again in {short.wait_s} s"
        )
    if short.free < 0:
        return f"Steward: {what}, but account {account} is overdrawn"
    return f"Steward: {what}, but account {account} has {free} free"


def _standing(purses: Purses, ground: Ground, case: Case, short: Short) -> list[str]:
    unit, account = ground.unit, case.account
    means = purses.means(account, case.user, case.job.uid, case.now_us)
    given = sum(one.total for one in purses.active(means.payer, case.now_us))
    lines = []
    if short.what == "user" and means.user_limit is not None:
        lines.append(
            f"  Of the limit of {show(means.user_limit, unit)}, {show(means.user_spent, unit)} "
            f"are spent and {show(means.user_held, unit)} held for other jobs."
        )
    else:
        paid = f" (paid by {means.payer})" if means.payer != account else ""
        spent = f"{show(max(0, given - means.balance), unit)} spent, " if given else ""
        owed = f", credit {show(means.credit, unit)}" if means.credit else ""
        lines.append(
            f"  Account {account}{paid}: {spent}balance {show(means.balance, unit)}, "
            f"{show(means.held, unit)} held for other jobs{owed}."
        )
    if means.at_us:
        lines.append(_asked(purses, ground, case))
    following = purses.next_allocation(means.payer, case.now_us)
    if following and short.what == "account":
        begins = moment(following.begin_us).astimezone(ground.zone(case.cluster))
        lines.append(
            f"  The next allocation, {show(following.balance, unit)}, "
            f"begins on {begins:%Y-%m-%d at %H:%M}."
        )
    return lines


def _asked(purses: Purses, ground: Ground, case: Case) -> str:
    """When the server elsewhere said what the account has."""
    host = urlsplit(ground.bank.remote.url).hostname
    at_us = purses.remote_at_us(case.account)
    if not at_us:
        return f"  {host} was not asked yet: try again in a minute."
    at = moment(at_us).astimezone(ground.zone(case.cluster))
    age_s = max(0, case.now_us - at_us) // 1_000_000
    age = f"{age_s // 60} min" if age_s >= _LONG_S else f"{age_s} s"
    return f"  {host} said what it has on {at:%Y-%m-%d at %H:%M:%S}, {age} ago."


def _assumed(ground: Ground, case: Case, quote: Quote) -> list[str]:
    """That the job gives no time limit, and what is reckoned with for that."""
    estimator = ground.estimator(case.cluster)
    is_given = case.is_change or case.job.time_limit_min is not None
    if estimator is None or is_given or not quote.tres:
        return []
    part = estimator.picture.partitions.get(quote.partition)
    seconds = None
    if part is not None:
        seconds = part.max_time_s if part.default_time_s is None else part.default_time_s
    minutes = (ground.bank.default_time_s if seconds is None else seconds) // 60
    clock = _clock(minutes)
    return [f"  It gives no time limit, so {clock} are reckoned with: a shorter --time costs less."]


def _elsewhere(purses: Purses, ground: Ground, case: Case, quote: Quote) -> list[str]:
    """Where nothing smaller can be paid: which account of the user's can, and whom to ask."""
    lines = []
    for name in purses.accounts_of(case.user) if case.user else ():
        if ground.budget.is_spent():
            break
        books = purses.accounts[name]
        if name == case.account or books.closed:
            continue
        means = purses.means(name, case.user, case.job.uid, case.now_us)
        left = means.available
        if means.user_limit is not None:
            left = min(left, means.user_limit - means.user_spent - means.user_held)
        if left >= quote.amount:
            lines.append(f"  Account {name} of yours can pay it (--account={name}).")
        if len(lines) == _MOST_OTHERS:
            break
    account = purses.accounts.get(case.account)
    payer = purses.accounts.get(purses.payer_of(case.account))
    owners = (account.owners if account else ()) or (payer.owners if payer else ())
    who = " or ".join(owners[:_MOST_OTHERS])
    looks = "looks" if len(owners) == 1 else "look"
    lines.append(
        f"  For more of account {case.account} ask {who}, who {looks} after it."
        if who
        else f"  For more of account {case.account} ask those who run the cluster."
    )
    return lines


def _fitting(ground: Ground, case: Case, quote: Quote, short: Short) -> str:
    """The smaller request that could be paid; "" if there is none."""
    estimator = ground.estimator(case.cluster)
    free = quote.amount - short.needed + short.free
    # Where only a cost was told there is no request that could be smaller.
    if estimator is None or free <= 0 or not quote.tres:
        return ""
    ways = []
    try:
        minutes = estimator.longest(
            case.job,
            free,
            moment(case.first_submit_us),
            tasks=quote.tasks,
            budget=ground.budget,
        )
    except NoEstimate:
        minutes = None  # with another limit it would cost more than can be told
    if minutes is not None and minutes > 0:
        ways.append(f"a time limit of at most {_clock(minutes)} (--time={minutes})")
    if quote.tasks > 1 and quote.per_task:
        tasks = free // quote.per_task
        if tasks:
            ways.append(f"{tasks} of its {quote.tasks} tasks")
    return ", or ".join(ways)


def _clock(minutes: int) -> str:
    days, rest = divmod(minutes, _MINUTES_A_DAY)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock
