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
        placing: The hold to place; None for none.
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
    placing: HoldPlan | None = None
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
        self._vain: dict[tuple[str, int], tuple[float, int]] = {}

    def add(self, payer: str, uid: int, vain_s: float, now_us: int) -> None:
        """Record that all available SU of a payer were held in vain for this many seconds."""
        vain_s += self._left_s(payer, uid, now_us)
        self._vain[payer, uid] = (min(vain_s, _MOST_VAIN_S), now_us)

    def most(self, payer: str, uid: int, free: int, now_us: int) -> int | None:
        """Return how much may be held for a user's unseen jobs, micro-SU; None for no bound.

        ``free`` is the payer's available SU plus the holds for the user's unseen jobs, micro-SU.
        """
        if not self._vain or self.wait_s(payer, uid, now_us) <= 0:
            return None
        return int(max(0, free) * self._share)

    def wait_s(self, payer: str, uid: int, now_us: int) -> float:
        """Return the seconds until a user is trusted again; 0 for a trusted user."""
        over_s = self._left_s(payer, uid, now_us) - MOST_TRUSTED_VAIN_S
        return max(0.0, over_s) / self._fades

    def forget(self, now_us: int) -> None:
        """Drop records that have decayed."""
        for payer, uid in list(self._vain):
            if self._left_s(payer, uid, now_us) < _LEAST_VAIN_S:
                del self._vain[payer, uid]

    @property
    def _fades(self) -> float:
        # Slower than a user in doubt can hold SU: a submit loop never regains trust.
        return self._share / 2

    def _left_s(self, payer: str, uid: int, now_us: int) -> float:
        vain_s, at_us = self._vain.get((payer, uid), (0.0, now_us))
        return max(0.0, vain_s - (now_us - at_us) / 1e6 * self._fades)


_MINUTES_A_DAY: Final = 1440
_SHOWN_IN_MINUTES_S: Final = 120
"""Age from which a balance's age is shown in minutes, in seconds."""
_MOST_NAMES: Final = 3
"""Maximum number of accounts and of owners that a message names."""


def format_rejection(
    purses: AccountBalances, ground: GateRules, case: AdmissionCase, quote: Quote, short: Shortfall
) -> str:
    """Write the rejection message for a user: cost, shortfall, balance, and what would fit."""
    lines = [_format_headline(ground, case, quote, short)]
    if short.what == "unknown":
        return "\n".join([*lines, _format_remote_age(purses, ground, case)])
    lines += _format_balance(purses, ground, case, short)
    lines += _format_assumed_limit(ground, case, quote)
    if ground.budget.is_spent():
        return "\n".join(lines)  # slurmctld waits: skip the search
    fits = _format_smaller_requests(ground, case, quote, short)
    if fits:
        lines.append(f"  What would fit: {fits}.")
    elif short.what not in ("share", "unseen"):
        lines += _format_alternatives(purses, ground, case, quote)
    return "\n".join(lines)


def _format_headline(ground: GateRules, case: AdmissionCase, quote: Quote, short: Shortfall) -> str:
    """Write the message's first line: the cost and the limit that it exceeds."""
    account = case.account
    cost = format_money(quote.amount, ground.unit)
    what = f"this job may cost {cost}"
    if short.needed != quote.amount:
        what = (
            f"this change may cost {format_money(short.needed, ground.unit)} more ({cost} in all)"
        )
    free = format_money(max(0, short.free), ground.unit)
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


def _format_balance(
    purses: AccountBalances, ground: GateRules, case: AdmissionCase, short: Shortfall
) -> list[str]:
    """Write the lines on the account's balance, holds, credit limit and next allocation."""
    unit, account = ground.unit, case.account
    means = purses.means(account, case.user, case.job.uid, case.now_us)
    given = sum(one.total for one in purses.active(means.payer, case.now_us))
    lines = []
    if short.what == "user" and means.user_limit is not None:
        lines.append(
            f"  Of the limit of {format_money(means.user_limit, unit)}, "
            f"{format_money(means.user_spent, unit)} "
            f"are spent and {format_money(means.user_held, unit)} held for other jobs."
        )
    else:
        paid = f" (paid by {means.payer})" if means.payer != account else ""
        spent = f"{format_money(max(0, given - means.balance), unit)} spent, " if given else ""
        owed = f", credit {format_money(means.credit, unit)}" if means.credit else ""
        lines.append(
            f"  Account {account}{paid}: {spent}balance {format_money(means.balance, unit)}, "
            f"{format_money(means.held, unit)} held for other jobs{owed}."
        )
    if means.at_us:
        lines.append(_format_remote_age(purses, ground, case))
    following = purses.next_allocation(means.payer, case.now_us)
    if following and short.what == "account":
        begins = to_datetime(following.begin_us).astimezone(ground.zone(case.cluster))
        lines.append(
            f"  The next allocation, {format_money(following.balance, unit)}, "
            f"begins on {begins:%Y-%m-%d at %H:%M}."
        )
    return lines


def _format_remote_age(purses: AccountBalances, ground: GateRules, case: AdmissionCase) -> str:
    """Write when the remote myBRC server reported the account's balance."""
    host = urlsplit(ground.bank.remote.url).hostname
    at_us = purses.remote_at_us(case.account)
    if not at_us:
        return f"  {host} was not asked yet: try again in a minute."
    at = to_datetime(at_us).astimezone(ground.zone(case.cluster))
    age_s = max(0, case.now_us - at_us) // 1_000_000
    age = f"{age_s // 60} min" if age_s >= _SHOWN_IN_MINUTES_S else f"{age_s} s"
    return f"  {host} said what it has on {at:%Y-%m-%d at %H:%M:%S}, {age} ago."


def _format_assumed_limit(ground: GateRules, case: AdmissionCase, quote: Quote) -> list[str]:
    """Write the assumed time limit, if the job sets none."""
    estimator = ground.estimator(case.cluster)
    is_given = case.is_change or case.job.time_limit_min is not None
    if estimator is None or is_given or not quote.tres:
        return []
    part = estimator.picture.partitions.get(quote.partition)
    seconds = None
    if part is not None:
        seconds = part.max_time_s if part.default_time_s is None else part.default_time_s
    minutes = (ground.bank.default_time_s if seconds is None else seconds) // 60
    clock = _format_minutes(minutes)
    return [f"  It gives no time limit, so {clock} are reckoned with: a shorter --time costs less."]


def _format_alternatives(
    purses: AccountBalances, ground: GateRules, case: AdmissionCase, quote: Quote
) -> list[str]:
    """Name the user's other accounts that can pay, and the owners to ask for more."""
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
        if len(lines) == _MOST_NAMES:
            break
    account = purses.accounts.get(case.account)
    payer = purses.accounts.get(purses.payer_of(case.account))
    owners = (account.owners if account else ()) or (payer.owners if payer else ())
    who = " or ".join(owners[:_MOST_NAMES])
    looks = "looks" if len(owners) == 1 else "look"
    lines.append(
        f"  For more of account {case.account} ask {who}, who {looks} after it."
        if who
        else f"  For more of account {case.account} ask those who run the cluster."
    )
    return lines


def _format_smaller_requests(
    ground: GateRules, case: AdmissionCase, quote: Quote, short: Shortfall
) -> str:
    """Describe a smaller request that the account could pay; "" if there is none."""
    estimator = ground.estimator(case.cluster)
    free = quote.amount - short.needed + short.free
    # If the caller gave only a cost, no request is known that could be made smaller.
    if estimator is None or free <= 0 or not quote.tres:
        return ""
    ways = []
    try:
        minutes = estimator.longest(
            case.job,
            free,
            to_datetime(case.first_submit_us),
            tasks=quote.tasks,
            budget=ground.budget,
        )
    except NoEstimate:
        minutes = None  # with another time limit the job cannot be priced
    if minutes is not None and minutes > 0:
        ways.append(f"a time limit of at most {_format_minutes(minutes)} (--time={minutes})")
    if quote.tasks > 1 and quote.per_task:
        tasks = free // quote.per_task
        if tasks:
            ways.append(f"{tasks} of its {quote.tasks} tasks")
    return ", or ".join(ways)


def _format_minutes(minutes: int) -> str:
    days, rest = divmod(minutes, _MINUTES_A_DAY)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock


DEFERRED_START_US: Final = 15 * 60 * 1_000_000
"""Start delay from which a job gets no hold yet, in µs."""


class DecisionMaker:
    """Decide on submits, changes and queued jobs, from the balances and rules in memory."""

    def __init__(self, purses: AccountBalances, ground: GateRules, doubts: VainHolds) -> None:
        self._purses = purses
        self._ground = ground
        self._doubts = doubts

    def submit(
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
        case = self.case(cluster, job, user, now_us, is_lenient=is_lenient)
        if case.mode == "off":
            return _accept(case)
        if job.admin_comment:
            sibling = self._sibling(cluster, job, secret)
            if sibling is not None:
                return self._of_sibling(case, sibling)
        why = self._objection(case)
        if why is not None:
            return make_rejection(case, why) if why else _accept(case)
        decision = self._new(case)
        if decision.ok or case.account not in self._ground.bank.refusal:
            return decision
        return self._otherwise(case, decision)

    def change(
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
            self._change(cluster, hold, before, after, job, now_us, quotes, is_lenient=is_lenient)
            for before, after in changed
        ]

    def _change(
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
        case, known = (
            msgspec.structs.replace(
                self.case(cluster, one, hold.user, now_us, is_lenient=is_lenient),
                first_submit_us=hold.created_us,
                is_started=hold.started,
                is_change=True,
                is_again=is_again,
                hold=hold,
            )
            for one in (complete_description(hold, after), complete_description(hold, before))
        )
        if case.mode == "off":
            return _accept(case)
        before_quote, quote = self._quote_or_none(known, quotes), self._quote_or_none(case, quotes)
        is_less = (
            before_quote is not None
            and quote is not None
            and quote.amount <= before_quote.amount
            and self._needed(case, quote) <= self._needed(known, before_quote)
            and case.account == known.account
            and not (job.released or job.begin_us)
            and (case.job.held, case.job.begin_us) == (known.job.held, known.job.begin_us)
        )
        if is_less:
            # A decrease passes even if the account is closed.
            return _accept(case)
        decision = self.cover(case, quotes)
        placing = decision.placing
        stranger = self.stranger(case)
        if stranger is not None:
            return make_rejection(case, stranger) if stranger else _accept(case)
        covered = before_quote.amount if before_quote is not None else 0
        if placing is None or placing.needed or placing.quote.amount <= covered:
            return decision
        # The hold is still empty; reject now what could not be paid when the job starts.
        short = self._short(case, placing.payer, placing.quote.amount)
        return self._not_yet(case, decision, placing, short) if short else decision

    def _quote_or_none(self, case: AdmissionCase, quotes: dict[JobRequest, Quote]) -> Quote | None:
        """Quote a job; None if it cannot be priced."""
        try:
            return self._quote(case, quotes)
        except (NoRate, NoEstimate):
            return None

    def _quote(self, case: AdmissionCase, quotes: dict[JobRequest, Quote]) -> Quote:
        known = quotes.get(case.job)
        if known is None:
            known = self._ground.quote(case.cluster, case.job, case.first_submit_us)
            quotes[case.job] = known
        return known

    def afford(self, cluster: str, job: JobRequest, user: str, cost: int, now_us: int) -> Decision:
        """Decide, as in mode ``gate``, on a new job whose cost the caller gives, in micro-SU.

        Of ``job``, only the uid and the account matter. ``user`` is "" if the name is unknown.
        """
        known = self.case(cluster, job, user, now_us)
        is_exempt = self._ground.is_exempt(cluster, job.uid, user)
        is_lenient = self._is_lenient(known.account, now_us)
        case = msgspec.structs.replace(known, mode="gate", free_pass=is_exempt or is_lenient)
        why = self._objection(case)
        if why is not None:
            return make_rejection(case, why) if why else _accept(case)
        return self._held(case, Quote(amount=cost, account=case.account))

    def case(
        self, cluster: str, job: JobRequest, user: str, now_us: int, *, is_lenient: bool = False
    ) -> AdmissionCase:
        """Build the case of a job: resolve its account, mode and exemptions."""
        account = self._ground.account_of(cluster, job, user)
        mode = self._ground.mode(cluster, job.partition, account)
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
                or self._ground.is_exempt(cluster, job.uid, user)
                or self._is_lenient(account, now_us)
            ),
            first_submit_us=now_us,
        )

    def _is_lenient(self, account: str, now_us: int) -> bool:
        """Return True if the policy accepts jobs while the remote balance is unknown."""
        return self._ground.settings.gate.policy == "allow" and self._is_unknown(account, now_us)

    def _is_unknown(self, account: str, now_us: int) -> bool:
        """Return True if the remote myBRC server's balance of an account is too old."""
        remote = self._ground.bank.remote
        if not remote.balances:
            return False
        return now_us - self._purses.remote_at_us(account) > remote.balance_age_s * 1e6

    def cover(self, case: AdmissionCase, quotes: dict[JobRequest, Quote] | None = None) -> Decision:
        """Decide on the SU that a job needs beyond its hold; its quote is added to ``quotes``."""
        try:
            quote = self._quote(case, {} if quotes is None else quotes)
        except (NoRate, NoEstimate) as error:
            return make_rejection(case, f"Steward: {error}", is_alarming=True)
        return self._held(case, quote)

    def _held(self, case: AdmissionCase, quote: Quote) -> Decision:
        """Decide on a job's quote: compare what it needs beyond its hold with what is available."""
        hold = case.hold
        needed = self._needed(case, quote)
        has, is_moved = 0, False
        if hold is not None:
            # Compare a change with the former request, of which a part may be settled.
            has = hold.amount if case.is_change and not case.is_again else hold.remaining
            is_moved = hold.account != case.account or hold.is_stranded
        amount = max(0, needed - has) + (hold.remaining if hold is not None and is_moved else 0)
        payer = self._purses.payer_of(case.account)
        short = self._short(case, payer, amount) if amount else None
        why = ""
        if short is not None:
            why = format_rejection(self._purses, self._ground, case, quote, short)
            if not case.free_pass or (hold is not None and case.mode != "gate"):
                return make_rejection(case, why, quote=quote)
        placing = HoldPlan(
            account=case.account,
            payer=payer,
            needed=needed,
            amount=amount,
            # In mode observe a job that would be rejected takes no SU from accepted ones.
            shares=()
            if short is not None and case.mode != "gate"
            else self._purses.draw(payer, amount, case.now_us),
            quote=quote,
            job=case.job,
            is_moved=is_moved,
        )
        return _accept(case, placing=placing, short=why)

    def _objection(self, case: AdmissionCase) -> str | None:
        """Return why the account cannot pay for this user's new job; as :meth:`stranger`."""
        stranger = self.stranger(case)
        if stranger is not None or self._ground.is_member(case.cluster, case.account, case.user):
            return stranger
        # Slurm rejects it later; a hold until then would block other users' SU.
        return (
            f"Steward: {case.user or f'user {case.job.uid}'} has no association with account "
            f"{case.account} in slurmdbd; a new one counts within a minute"
        )

    def stranger(self, case: AdmissionCase) -> str | None:
        """Return why the bank cannot charge an account: "" to accept anyway, None if it can."""
        account, user = case.account, case.user
        known = self._purses.accounts.get(account)
        if known is None:
            if self._ground.bank.unknown_accounts == "allow":
                return ""
            if not account:
                return "Steward: this job names no account: give one with --account"
            return (
                f"Steward: the bank knows no account {account}: give another with --account, "
                "or ask for it to be opened"
            )
        if known.closed:
            return f"Steward: account {account} is closed: give another with --account"
        if known.only_listed and (not user or self._purses.user_books(account, user) is None):
            return f"Steward: {user or 'this user'} may not charge account {account}"
        remote = self._purses.remote.get(account)
        has_limits = any(one.limit is not None for one in known.users)
        if not user and (has_limits or (remote is not None and remote.limits)):
            return (
                f"Steward: the name of user {case.job.uid} cannot be looked up now, and account "
                f"{account} has limits for its users: try again in a few seconds"
            )
        return None

    def _new(self, case: AdmissionCase) -> Decision:
        """Decide on a new job; an overdrawn account rejects even one that holds nothing yet."""
        decision = self.cover(case)
        placing = decision.placing
        if placing is None or placing.amount or not placing.quote.amount:
            return decision
        # It holds nothing yet, but an overdrawn account accepts no jobs.
        free = self._purses.available(placing.payer, case.now_us)
        if free >= 0:
            return decision
        short = Shortfall(needed=placing.quote.amount, free=free)
        return self._not_yet(case, decision, placing, short)

    def _not_yet(
        self, case: AdmissionCase, decision: Decision, placing: HoldPlan, short: Shortfall
    ) -> Decision:
        """Reject a job that would hold nothing now, but could not be paid later."""
        why = format_rejection(self._purses, self._ground, case, placing.quote, short)
        if case.free_pass:
            return msgspec.structs.replace(decision, short=why)
        return make_rejection(case, why, quote=placing.quote)

    def _needed(self, case: AdmissionCase, quote: Quote) -> int:
        """Return how much of a quote to hold now: 0 for jobs that are held, deferred or far off."""
        job = case.job
        if not case.is_started and (job.held or job.begin_us > case.now_us + DEFERRED_START_US):
            return 0
        arrays = self._ground.bank.arrays
        if job.array and arrays == "running":
            return quote.per_task * min(quote.at_once, quote.tasks)
        if job.array and arrays == "start" and not case.is_started:
            return 0
        return quote.amount

    def _otherwise(self, case: AdmissionCase, decision: Decision) -> Decision:
        """Apply the site's alternative to a rejected job: another QOS or partition it can pay."""
        instead = self._ground.bank.refusal[case.account]
        job = msgspec.structs.replace(
            case.job,
            qos=instead.qos or case.job.qos,
            partition=instead.partition or case.job.partition,
        )
        if job == case.job:
            return decision
        moved = self._new(msgspec.structs.replace(case, job=job))
        if not moved.ok:
            return decision
        changes = [
            f"{name} {value}"
            for name, value in (("QOS", instead.qos), ("partition", instead.partition))
            if value
        ]
        say = f"{decision.say}\nSteward: it goes to {' and '.join(changes)} instead."
        return msgspec.structs.replace(
            moved, say=say, short=decision.short, qos=instead.qos, partition=instead.partition
        )

    def _sibling(self, cluster: str, job: JobRequest, secret: bytes) -> OpenHold | None:
        """Find the hold whose token another cluster of the federation has put on the job."""
        for found in token.find_tokens(job.admin_comment):
            hold = self._purses.holds.get(found.id)
            if (
                hold is not None
                and hold.uid == job.uid
                and not hold.started
                and cluster not in hold.siblings
                and (cluster != hold.cluster or not hold.confirmed)
                and token.is_genuine(found, secret, hold.cluster, job.uid)
            ):
                return hold
        return None

    def _of_sibling(self, case: AdmissionCase, hold: OpenHold) -> Decision:
        """Decide on a federated job: its one hold covers the most expensive cluster."""
        case = msgspec.structs.replace(case, hold=hold, account=hold.account)
        return msgspec.structs.replace(self.cover(case), sibling=hold)

    def _short(self, case: AdmissionCase, payer: str, needed: int) -> Shortfall | None:
        """Return the shortfall of a hold; None if the account can pay."""
        purses = self._purses
        if self._is_unknown(payer, case.now_us):
            return Shortfall(needed=needed, free=0, what="unknown")
        available = purses.available(payer, case.now_us)
        if available < needed:
            return Shortfall(needed=needed, free=available)
        account, uid = case.account, case.job.uid
        limit, spent = purses.user_limit(account, case.user) if case.user else (None, 0)
        if limit is not None:
            left = limit - spent - purses.user_held(account, uid)
            if left < needed:
                return Shortfall(needed=needed, free=left, what="user")
        share = self._ground.bank.hold_share
        if share < 1:
            means = sum(one.balance for one in purses.active(payer, case.now_us))
            left = int((means + purses.credit(payer)) * share) - purses.user_held_of(payer, uid)
            if left < needed:
                return Shortfall(needed=needed, free=left, what="share")
        return None if case.is_seen else self._unseen(case, payer, needed, available)

    def _unseen(
        self, case: AdmissionCase, payer: str, needed: int, available: int
    ) -> Shortfall | None:
        """Return the shortfall of a user whose earlier holds were never confirmed."""
        uid, now_us = case.job.uid, case.now_us
        held = self._purses.unseen(payer, uid)
        most = self._doubts.most(payer, uid, available + held, now_us)
        if most is None or held + needed <= most:
            return None
        # Present holds are confirmed or void after the next poll; a larger amount must wait.
        wait_s = self._doubts.wait_s(payer, uid, now_us) if needed > most else MOST_COUNTED_VAIN_S
        return Shortfall(needed=needed, free=most - held, what="unseen", wait_s=math.ceil(wait_s))


def complete_description(hold: OpenHold, job: JobRequest) -> JobRequest:
    """Complete a description from its hold: user, account, and no deferral."""
    job = msgspec.structs.replace(job, uid=hold.uid, account=job.account or hold.account)
    # A job with a hold is never deferred: Slurm may reject the update that defers it.
    return msgspec.structs.replace(job, held=False, begin_us=0) if hold.amount else job


def _accept(case: AdmissionCase, *, placing: HoldPlan | None = None, short: str = "") -> Decision:
    """Return an acceptance, with the hold to place."""
    return Decision(
        ok=True,
        mode=case.mode,
        user=case.user,
        account=case.account,
        placing=placing,
        short=short,
        quote=placing.quote if placing else None,
        is_bound=placing is not None and not case.free_pass and placing.amount > 0,
    )
