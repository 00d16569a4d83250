"""Admission decisions of the gate: accept or reject a submit or change, and explain rejections.

Reading order:

- `AdmissionCase` (the job to decide on), `Shortfall` (needed and available SU), `HoldPlan` (the SU
  hold to place) and `Decision` (the result);
- `VainHolds` limits users whose holds are void again and again: Slurm never shows their jobs;
- `format_rejection` and its helpers write the message that a rejected user sees;
- `DecisionMaker` makes the decisions: `submit` for new jobs, `change` for updates, `cover` for jobs
  in the queue, `afford` for a cost given by the caller.

Only `VainHolds` has state; `holds.py` places the hold that a decision plans. Balances come from
`balances.py`, modes and estimates from `policy.py`. An unforeseen error fails one request alone:
`plugin_answers.py` and `calls.py` catch it. Amounts are micro-SU.
"""

import math
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

import msgspec

from steward.bank.errors import NoEstimate, NoRate
from steward.bank.gate import token
from steward.bank.gate.balances import AccountBalances, OpenHold
from steward.bank.gate.policy import GateRules, to_datetime
from steward.bank.money import format_money
from steward.bank.records import JobRequest, Mode, Quote

Shares = tuple[tuple[int, int], ...]
"""Pairs of an allocation's number and micro-SU."""


class AdmissionCase(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job to decide on: its request, who pays for it, and the bank's mode that applies to it.

    Attributes:
        cluster: The cluster's name.
        job: The job's complete request.
        user: The user's name; "" if unknown.
        account: The account that pays; "" if none is known.
        mode: The bank's mode that applies to the job.
        now_us: The time, µs since the epoch.
        free_pass: Whether the job is accepted even if the account cannot pay.
        first_submit_us: Submit time that selects the rates, µs since the epoch.
        is_started: Whether the job runs already, so that its hold cannot wait for its start.
        is_change: Whether this is a change that the user requests.
        is_again: Whether the change begins another run of the job.
        is_seen: Whether Slurm's queue shows the job with this request.
        hold: The job's open SU hold; None if it has none.
    """

    cluster: str
    job: JobRequest
    user: str
    account: str
    mode: Mode
    now_us: int
    free_pass: bool
    first_submit_us: int
    is_started: bool = False
    is_change: bool = False
    is_again: bool = False
    is_seen: bool = False
    hold: OpenHold | None = None


class Shortfall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The shortfall that makes a job unaffordable: needed and available SU, and the limit hit.

    Attributes:
        needed: SU that the job needs beyond its present hold, micro-SU.
        free: SU that are available to it, micro-SU.
        what: Which limit is hit: the ``account``, the ``user`` limit in it, the ``share`` of the
            account that one user's jobs may hold, the bound on holds for jobs that are ``unseen``
            in the queue; or ``unknown`` if the remote myBRC server has not reported a balance.
        wait_s: Seconds until a retry can succeed; 0 if unknown.
    """

    needed: int
    free: int
    what: str = "account"
    wait_s: int = 0


class HoldPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An SU hold to place, or the change of an existing one.

    Attributes:
        account: The account that pays.
        payer: The account whose allocations pay.
        needed: SU that the job needs in total, micro-SU.
        amount: SU to hold beyond the present hold, micro-SU; all of it if the hold moves.
        shares: Pairs of an allocation's number and its part of ``amount``.
        quote: The quote that the hold covers.
        job: The request that was priced.
        is_moved: Whether the whole hold is placed again, in this account.
    """

    account: str
    payer: str
    needed: int
    amount: int
    shares: Shares
    quote: Quote
    job: JobRequest
    is_moved: bool = False


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The gate's decision on one request, and the hold to place for it.

    Attributes:
        ok: Whether the job is accepted.
        mode: The bank's mode that applies to the job.
        user: The user's name.
        account: The account that pays; "" if none is known.
        say: The message to the user.
        qos: The QOS that the job gets instead of its own.
        partition: The partition that the job gets instead of its own.
        plan: The hold to place; None for none.
        sibling: The hold of another cluster of the federation that covers the job already.
        short: Why the job is rejected, or would be in mode ``gate``; "" if it can be paid.
        quote: The quote; None if none was requested, or the job cannot be priced.
        is_bound: Whether the hold must not make the account's available SU negative.
        is_alarming: Whether to alert operators, because a rate is missing.
    """

    ok: bool
    mode: Mode
    user: str = ""
    account: str = ""
    say: str = ""
    qos: str = ""
    partition: str = ""
    plan: HoldPlan | None = None
    sibling: OpenHold | None = None
    short: str = ""
    quote: Quote | None = None
    is_bound: bool = False
    is_alarming: bool = False


def make_rejection(
    case: AdmissionCase, why: str, *, quote: Quote | None = None, is_alarming: bool = False
) -> Decision:
    """Return a rejection; with a free pass an acceptance that records the reason."""
    return Decision(
        ok=case.free_pass,
        mode=case.mode,
        user=case.user,
        account=case.account,
        say="" if case.free_pass else why,
        short=why,
        quote=quote,
        is_alarming=is_alarming,
    )


MOST_TRUSTED_VAIN_S: Final = 20.0
"""Vain time, at all of an account's available SU, beyond which a user is in doubt, in seconds."""
MOST_COUNTED_VAIN_S: Final = 10.0
"""Longest time that a void hold counts, in seconds: a user is not to blame for failed polls."""
_MOST_VAIN_S: Final = 30.0
"""Upper bound of a user's recorded vain time, in seconds."""
_LEAST_VAIN_S: Final = 1.0
"""Vain time below which a record is dropped, in seconds."""


class VainHolds:
    """Record of SU held in vain, per payer and user: holds whose jobs Slurm never showed.

    slurmctld does not say whether the job will stay: ``sbatch --test-only`` asks like any other, as
    does a job that Slurm rejects later. Each gets a hold until a poll shows that there is no job. A
    user who submits so in a loop would block everybody's SU; once in doubt they may hold only a
    part, until the record has decayed. The record is in memory only: a restarted gate trusts all.

    The unit is seconds for which all available SU were held. The record decays over time, so that
    on average one user holds less than half of their share in vain.

    Args:
        share: Part of the available SU that a user in doubt may hold for unseen jobs.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._records: dict[tuple[str, int], tuple[float, int]] = {}

    def add(self, payer: str, uid: int, vain_s: float, now_us: int) -> None:
        """Record that all available SU of a payer were held in vain for this many seconds."""
        vain_s += self._get_vain_s(payer, uid, now_us)
        self._records[payer, uid] = (min(vain_s, _MOST_VAIN_S), now_us)

    def get_limit(self, payer: str, uid: int, available: int, now_us: int) -> int | None:
        """Return how much may be held for a user's unseen jobs, micro-SU; None for no bound.

        ``available`` is the payer's available SU plus the holds for the user's unseen jobs, micro-
        SU.
        """
        if not self._records or self.get_wait_s(payer, uid, now_us) <= 0:
            return None
        return int(max(0, available) * self._share)

    def get_wait_s(self, payer: str, uid: int, now_us: int) -> float:
        """Return the seconds until a user is trusted again; 0 for a trusted user."""
        over_s = self._get_vain_s(payer, uid, now_us) - MOST_TRUSTED_VAIN_S
        return max(0.0, over_s) / self._decay_rate

    def drop_decayed(self, now_us: int) -> None:
        """Drop records that have decayed."""
        for payer, uid in list(self._records):
            if self._get_vain_s(payer, uid, now_us) < _LEAST_VAIN_S:
                del self._records[payer, uid]

    @property
    def _decay_rate(self) -> float:
        # Slower than a user in doubt can hold SU: a submit loop never regains trust.
        return self._share / 2

    def _get_vain_s(self, payer: str, uid: int, now_us: int) -> float:
        vain_s, at_us = self._records.get((payer, uid), (0.0, now_us))
        return max(0.0, vain_s - (now_us - at_us) / 1e6 * self._decay_rate)


_MINUTES_A_DAY: Final = 1440
_SHOWN_IN_MINUTES_S: Final = 120
"""Age from which a balance's age is shown in minutes, in seconds."""
_MOST_NAMES: Final = 3
"""Maximum number of accounts and of owners that a message names."""


def format_rejection(
    balances: AccountBalances,
    rules: GateRules,
    case: AdmissionCase,
    quote: Quote,
    shortfall: Shortfall,
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
        lines.append(f"  What would fit: {suggestion}.")
    elif shortfall.what not in ("share", "unseen"):
        lines += _format_alternatives(balances, rules, case, quote)
    return "\n".join(lines)


def _format_headline(
    rules: GateRules, case: AdmissionCase, quote: Quote, shortfall: Shortfall
) -> str:
    """Write the message's first line: the cost and the limit that it exceeds."""
    account = case.account
    cost = format_money(quote.amount, rules.unit)
    what = f"this job may cost {cost}"
    if shortfall.needed != quote.amount:
        what = (
            f"this change may cost {format_money(shortfall.needed, rules.unit)} more "
            f"({cost} in all)"
        )
    available = format_money(max(0, shortfall.free), rules.unit)
    if shortfall.what == "user":
        return (
            f"Steward: {what}, but user {case.user} has {available} left to spend "
            f"in account {account}"
        )
    if shortfall.what == "unknown":
        return f"Steward: {what}, but what account {account} has is not known just now"
    if shortfall.what == "share":
        return (
            f"Steward: {what}, but only {available} more of account {account} may be held for one "
            "user's jobs"
        )
    if shortfall.what == "unseen":
        return (
            f"Steward: {what}, but jobs of yours were asked for again and again that Slurm then "
            f"did not have (sbatch --test-only asks, too), so that only {available} more of "
            "account "
            f"{account} may be held until Slurm shows their jobs: try again in {shortfall.wait_s} s"
        )
    if shortfall.free < 0:
        return f"Steward: {what}, but account {account} is overdrawn"
    return f"Steward: {what}, but account {account} has {available} free"


def _format_balance(
    balances: AccountBalances, rules: GateRules, case: AdmissionCase, shortfall: Shortfall
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


def _format_remote_age(balances: AccountBalances, rules: GateRules, case: AdmissionCase) -> str:
    """Write when the remote myBRC server reported the account's balance."""
    host = urlsplit(rules.bank.remote.url).hostname
    at_us = balances.get_remote_at_us(case.account)
    if not at_us:
        return f"  {host} was not asked yet: try again in a minute."
    at = to_datetime(at_us).astimezone(rules.get_time_zone(case.cluster))
    age_s = max(0, case.now_us - at_us) // 1_000_000
    age = f"{age_s // 60} min" if age_s >= _SHOWN_IN_MINUTES_S else f"{age_s} s"
    return f"  {host} said what it has on {at:%Y-%m-%d at %H:%M:%S}, {age} ago."


def _format_assumed_limit(rules: GateRules, case: AdmissionCase, quote: Quote) -> list[str]:
    """Write the assumed time limit, if the job sets none."""
    estimator = rules.get_estimator(case.cluster)
    is_given = case.is_change or case.job.time_limit_min is not None
    if estimator is None or is_given or not quote.tres:
        return []
    partition = estimator.model.partitions.get(quote.partition)
    seconds = None
    if partition is not None:
        seconds = (
            partition.max_time_s if partition.default_time_s is None else partition.default_time_s
        )
    minutes = (rules.bank.default_time_s if seconds is None else seconds) // 60
    clock = _format_minutes(minutes)
    return [f"  It gives no time limit, so {clock} are reckoned with: a shorter --time costs less."]


def _format_alternatives(
    balances: AccountBalances, rules: GateRules, case: AdmissionCase, quote: Quote
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
            lines.append(f"  Account {name} of yours can pay it (--account={name}).")
        if len(lines) == _MOST_NAMES:
            break
    account = balances.accounts.get(case.account)
    payer = balances.accounts.get(balances.get_payer(case.account))
    owners = (account.owners if account else ()) or (payer.owners if payer else ())
    owner_names = " or ".join(owners[:_MOST_NAMES])
    verb = "looks" if len(owners) == 1 else "look"
    lines.append(
        f"  For more of account {case.account} ask {owner_names}, who {verb} after it."
        if owner_names
        else f"  For more of account {case.account} ask those who run the cluster."
    )
    return lines


def _format_smaller_requests(
    rules: GateRules, case: AdmissionCase, quote: Quote, shortfall: Shortfall
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


DEFERRED_START_US: Final = 15 * 60 * 1_000_000
"""Start delay from which a job gets no hold yet, in µs."""


class DecisionMaker:
    """Decide on submits, changes and queued jobs, from the balances and rules in memory."""

    def __init__(self, balances: AccountBalances, rules: GateRules, vain_holds: VainHolds) -> None:
        self._balances = balances
        self._rules = rules
        self._vain_holds = vain_holds

    def decide_submit(
        self,
        cluster: str,
        job: JobRequest,
        user: str,
        now_us: int,
        *,
        secret: bytes = b"",
        is_lenient: bool = False,
    ) -> Decision:
        """Decide on a new job; ``secret`` is the key that proves tokens.

        ``is_lenient``: accept the job even if the account cannot pay, because the outage policy
        says so while the ledger is unavailable.
        """
        case = self.build_case(cluster, job, user, now_us, is_lenient=is_lenient)
        if case.mode == "off":
            return _accept(case)
        if job.admin_comment:
            sibling = self._find_sibling(cluster, job, secret)
            if sibling is not None:
                return self._decide_sibling(case, sibling)
        why = self._find_objection(case)
        if why is not None:
            return make_rejection(case, why) if why else _accept(case)
        decision = self._decide_new(case)
        if decision.ok or case.account not in self._rules.bank.refusal:
            return decision
        return self._apply_alternative(case, decision)

    def decide_change(
        self,
        cluster: str,
        hold: OpenHold,
        changed: Iterable[tuple[JobRequest, JobRequest]],
        job: JobRequest,
        now_us: int,
        *,
        is_lenient: bool = False,
    ) -> list[Decision]:
        """Decide on a change (``job``) to a job that has a hold.

        Return a decision for each pair of descriptions, before and after the change, in
        ``changed``. ``is_lenient`` as in :meth:`submit`.
        """
        quotes: dict[JobRequest, Quote] = {}
        return [
            self._decide_pair(
                cluster, hold, before, after, job, now_us, quotes, is_lenient=is_lenient
            )
            for before, after in changed
        ]

    def _decide_pair(
        self,
        cluster: str,
        hold: OpenHold,
        before: JobRequest,
        after: JobRequest,
        job: JobRequest,
        now_us: int,
        quotes: dict[JobRequest, Quote],
        *,
        is_lenient: bool,
    ) -> Decision:
        """Decide on one pair of descriptions, before and after a change."""
        # Only a waiting job gets a new start time or a release: its hold is what earlier runs left.
        is_again = hold.started and not before.array and bool(job.begin_us or job.released)
        case, before_case = (
            msgspec.structs.replace(
                self.build_case(cluster, description, hold.user, now_us, is_lenient=is_lenient),
                first_submit_us=hold.created_us,
                is_started=hold.started,
                is_change=True,
                is_again=is_again,
                hold=hold,
            )
            for description in (
                complete_description(hold, after),
                complete_description(hold, before),
            )
        )
        if case.mode == "off":
            return _accept(case)
        before_quote, quote = (
            self._quote_or_none(before_case, quotes),
            self._quote_or_none(case, quotes),
        )
        is_decrease = (
            before_quote is not None
            and quote is not None
            and quote.amount <= before_quote.amount
            and self._compute_needed(case, quote) <= self._compute_needed(before_case, before_quote)
            and case.account == before_case.account
            and not (job.released or job.begin_us)
            and (case.job.held, case.job.begin_us)
            == (before_case.job.held, before_case.job.begin_us)
        )
        if is_decrease:
            # A decrease passes even if the account is closed.
            return _accept(case)
        decision = self.decide_cover(case, quotes)
        plan = decision.plan
        objection = self.find_account_objection(case)
        if objection is not None:
            return make_rejection(case, objection) if objection else _accept(case)
        covered = before_quote.amount if before_quote is not None else 0
        if plan is None or plan.needed or plan.quote.amount <= covered:
            return decision
        # The hold is still empty; reject now what could not be paid when the job starts.
        shortfall = self._find_shortfall(case, plan.payer, plan.quote.amount)
        return self._reject_later_cost(case, decision, plan, shortfall) if shortfall else decision

    def _quote_or_none(self, case: AdmissionCase, quotes: dict[JobRequest, Quote]) -> Quote | None:
        """Quote a job; None if it cannot be priced."""
        try:
            return self._quote(case, quotes)
        except (NoRate, NoEstimate):
            return None

    def _quote(self, case: AdmissionCase, quotes: dict[JobRequest, Quote]) -> Quote:
        quote = quotes.get(case.job)
        if quote is None:
            quote = self._rules.quote(case.cluster, case.job, case.first_submit_us)
            quotes[case.job] = quote
        return quote

    def decide_cost(
        self, cluster: str, job: JobRequest, user: str, cost: int, now_us: int
    ) -> Decision:
        """Decide, as in mode ``gate``, on a new job whose cost the caller gives, in micro-SU.

        Of ``job``, only the uid and the account matter. ``user`` is "" if the name is unknown.
        """
        base_case = self.build_case(cluster, job, user, now_us)
        is_exempt = self._rules.is_exempt(cluster, job.uid, user)
        is_lenient = self._is_lenient(base_case.account, now_us)
        case = msgspec.structs.replace(base_case, mode="gate", free_pass=is_exempt or is_lenient)
        why = self._find_objection(case)
        if why is not None:
            return make_rejection(case, why) if why else _accept(case)
        return self._decide_quote(case, Quote(amount=cost, account=case.account))

    def build_case(
        self, cluster: str, job: JobRequest, user: str, now_us: int, *, is_lenient: bool = False
    ) -> AdmissionCase:
        """Build the case of a job: resolve its account, mode and exemptions."""
        account = self._rules.find_account(cluster, job, user)
        mode = self._rules.get_mode(cluster, job.partition, account)
        if job.account != account:
            job = msgspec.structs.replace(job, account=account)
        return AdmissionCase(
            cluster=cluster,
            job=job,
            user=user,
            account=account,
            mode=mode,
            now_us=now_us,
            free_pass=(
                is_lenient
                or mode != "gate"
                or self._rules.is_exempt(cluster, job.uid, user)
                or self._is_lenient(account, now_us)
            ),
            first_submit_us=now_us,
        )

    def _is_lenient(self, account: str, now_us: int) -> bool:
        """Return True if the policy accepts jobs while the remote balance is unknown."""
        return self._rules.settings.gate.policy == "allow" and self._is_unknown(account, now_us)

    def _is_unknown(self, account: str, now_us: int) -> bool:
        """Return True if the remote myBRC server's balance of an account is too old."""
        remote = self._rules.bank.remote
        if not remote.balances:
            return False
        return now_us - self._balances.get_remote_at_us(account) > remote.balance_age_s * 1e6

    def decide_cover(
        self, case: AdmissionCase, quotes: dict[JobRequest, Quote] | None = None
    ) -> Decision:
        """Decide on the SU that a job needs beyond its hold; its quote is added to ``quotes``."""
        try:
            quote = self._quote(case, {} if quotes is None else quotes)
        except (NoRate, NoEstimate) as error:
            return make_rejection(case, f"Steward: {error}", is_alarming=True)
        return self._decide_quote(case, quote)

    def _decide_quote(self, case: AdmissionCase, quote: Quote) -> Decision:
        """Decide on a job's quote: compare what it needs beyond its hold with what is available."""
        hold = case.hold
        needed = self._compute_needed(case, quote)
        held, is_moved = 0, False
        if hold is not None:
            # Compare a change with the former request, of which a part may be settled.
            held = hold.amount if case.is_change and not case.is_again else hold.remaining
            is_moved = hold.account != case.account or hold.is_stranded
        amount = max(0, needed - held) + (hold.remaining if hold is not None and is_moved else 0)
        payer = self._balances.get_payer(case.account)
        shortfall = self._find_shortfall(case, payer, amount) if amount else None
        why = ""
        if shortfall is not None:
            why = format_rejection(self._balances, self._rules, case, quote, shortfall)
            if not case.free_pass or (hold is not None and case.mode != "gate"):
                return make_rejection(case, why, quote=quote)
        plan = HoldPlan(
            account=case.account,
            payer=payer,
            needed=needed,
            amount=amount,
            # In mode observe a job that would be rejected takes no SU from accepted ones.
            shares=()
            if shortfall is not None and case.mode != "gate"
            else self._balances.split_amount(payer, amount, case.now_us),
            quote=quote,
            job=case.job,
            is_moved=is_moved,
        )
        return _accept(case, plan=plan, short=why)

    def _find_objection(self, case: AdmissionCase) -> str | None:
        """Return why the account cannot pay for this user's new job; as :meth:`objection`."""
        objection = self.find_account_objection(case)
        if objection is not None or self._rules.is_member(case.cluster, case.account, case.user):
            return objection
        # Slurm rejects it later; a hold until then would block other users' SU.
        return (
            f"Steward: {case.user or f'user {case.job.uid}'} has no association with account "
            f"{case.account} in slurmdbd; a new one counts within a minute"
        )

    def find_account_objection(self, case: AdmissionCase) -> str | None:
        """Return why the bank cannot charge an account: "" to accept anyway, None if it can."""
        account, user = case.account, case.user
        books = self._balances.accounts.get(account)
        if books is None:
            if self._rules.bank.unknown_accounts == "allow":
                return ""
            if not account:
                return "Steward: this job names no account: give one with --account"
            return (
                f"Steward: the bank knows no account {account}: give another with --account, "
                "or ask for it to be opened"
            )
        if books.closed:
            return f"Steward: account {account} is closed: give another with --account"
        if books.only_listed and (not user or self._balances.find_user(account, user) is None):
            return f"Steward: {user or 'this user'} may not charge account {account}"
        remote = self._balances.remote_means.get(account)
        has_limits = any(listed.limit is not None for listed in books.users)
        if not user and (has_limits or (remote is not None and remote.limits)):
            return (
                f"Steward: the name of user {case.job.uid} cannot be looked up now, and account "
                f"{account} has limits for its users: try again in a few seconds"
            )
        return None

    def _decide_new(self, case: AdmissionCase) -> Decision:
        """Decide on a new job; an overdrawn account rejects even one that holds nothing yet."""
        decision = self.decide_cover(case)
        plan = decision.plan
        if plan is None or plan.amount or not plan.quote.amount:
            return decision
        # It holds nothing yet, but an overdrawn account accepts no jobs.
        available = self._balances.get_available(plan.payer, case.now_us)
        if available >= 0:
            return decision
        shortfall = Shortfall(needed=plan.quote.amount, free=available)
        return self._reject_later_cost(case, decision, plan, shortfall)

    def _reject_later_cost(
        self, case: AdmissionCase, decision: Decision, plan: HoldPlan, shortfall: Shortfall
    ) -> Decision:
        """Reject a job that would hold nothing now, but could not be paid later."""
        why = format_rejection(self._balances, self._rules, case, plan.quote, shortfall)
        if case.free_pass:
            return msgspec.structs.replace(decision, short=why)
        return make_rejection(case, why, quote=plan.quote)

    def _compute_needed(self, case: AdmissionCase, quote: Quote) -> int:
        """Return how much of a quote to hold now: 0 for jobs that are held, deferred or far off."""
        job = case.job
        if not case.is_started and (job.held or job.begin_us > case.now_us + DEFERRED_START_US):
            return 0
        arrays = self._rules.bank.arrays
        if job.array and arrays == "running":
            return quote.per_task * min(quote.at_once, quote.tasks)
        if job.array and arrays == "start" and not case.is_started:
            return 0
        return quote.amount

    def _apply_alternative(self, case: AdmissionCase, decision: Decision) -> Decision:
        """Apply the site's alternative to a rejected job: another QOS or partition it can pay."""
        alternative = self._rules.bank.refusal[case.account]
        job = msgspec.structs.replace(
            case.job,
            qos=alternative.qos or case.job.qos,
            partition=alternative.partition or case.job.partition,
        )
        if job == case.job:
            return decision
        new_decision = self._decide_new(msgspec.structs.replace(case, job=job))
        if not new_decision.ok:
            return decision
        changes = [
            f"{name} {value}"
            for name, value in (("QOS", alternative.qos), ("partition", alternative.partition))
            if value
        ]
        say = f"{decision.say}\nSteward: it goes to {' and '.join(changes)} instead."
        return msgspec.structs.replace(
            new_decision,
            say=say,
            short=decision.short,
            qos=alternative.qos,
            partition=alternative.partition,
        )

    def _find_sibling(self, cluster: str, job: JobRequest, secret: bytes) -> OpenHold | None:
        """Find the hold whose token another cluster of the federation has put on the job."""
        for hold_token in token.find_tokens(job.admin_comment):
            hold = self._balances.holds.get(hold_token.id)
            if (
                hold is not None
                and hold.uid == job.uid
                and not hold.started
                and cluster not in hold.siblings
                and (cluster != hold.cluster or not hold.confirmed)
                and token.is_genuine(hold_token, secret, hold.cluster, job.uid)
            ):
                return hold
        return None

    def _decide_sibling(self, case: AdmissionCase, hold: OpenHold) -> Decision:
        """Decide on a federated job: its one hold covers the most expensive cluster."""
        case = msgspec.structs.replace(case, hold=hold, account=hold.account)
        return msgspec.structs.replace(self.decide_cover(case), sibling=hold)

    def _find_shortfall(self, case: AdmissionCase, payer: str, needed: int) -> Shortfall | None:
        """Return the shortfall of a hold; None if the account can pay."""
        balances = self._balances
        if self._is_unknown(payer, case.now_us):
            return Shortfall(needed=needed, free=0, what="unknown")
        available = balances.get_available(payer, case.now_us)
        if available < needed:
            return Shortfall(needed=needed, free=available)
        account, uid = case.account, case.job.uid
        limit, spent = balances.get_user_limit(account, case.user) if case.user else (None, 0)
        if limit is not None:
            remaining = limit - spent - balances.get_user_held(account, uid)
            if remaining < needed:
                return Shortfall(needed=needed, free=remaining, what="user")
        share = self._rules.bank.hold_share
        if share < 1:
            means = sum(
                allocation.balance for allocation in balances.iter_active(payer, case.now_us)
            )
            remaining = int(
                (means + balances.get_credit(payer)) * share
            ) - balances.get_payer_user_held(payer, uid)
            if remaining < needed:
                return Shortfall(needed=needed, free=remaining, what="share")
        return None if case.is_seen else self._find_unseen_shortfall(case, payer, needed, available)

    def _find_unseen_shortfall(
        self, case: AdmissionCase, payer: str, needed: int, available: int
    ) -> Shortfall | None:
        """Return the shortfall of a user whose earlier holds were never confirmed."""
        uid, now_us = case.job.uid, case.now_us
        held = self._balances.get_unseen_held(payer, uid)
        limit = self._vain_holds.get_limit(payer, uid, available + held, now_us)
        if limit is None or held + needed <= limit:
            return None
        # Present holds are confirmed or void after the next poll; a larger amount must wait.
        wait_s = (
            self._vain_holds.get_wait_s(payer, uid, now_us)
            if needed > limit
            else MOST_COUNTED_VAIN_S
        )
        return Shortfall(needed=needed, free=limit - held, what="unseen", wait_s=math.ceil(wait_s))


def complete_description(hold: OpenHold, job: JobRequest) -> JobRequest:
    """Complete a description from its hold: user, account, and no deferral."""
    job = msgspec.structs.replace(job, uid=hold.uid, account=job.account or hold.account)
    # A job with a hold is never deferred: Slurm may reject the update that defers it.
    return msgspec.structs.replace(job, held=False, begin_us=0) if hold.amount else job


def _accept(case: AdmissionCase, *, plan: HoldPlan | None = None, short: str = "") -> Decision:
    """Return an acceptance, with the hold to place."""
    return Decision(
        ok=True,
        mode=case.mode,
        user=case.user,
        account=case.account,
        plan=plan,
        short=short,
        quote=plan.quote if plan else None,
        is_bound=plan is not None and not case.free_pass and plan.amount > 0,
    )
