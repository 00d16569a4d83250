"""One decision: what it is about, and what came of it."""

import math
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

import msgspec

from steward.bank.errors import NoEstimate, NoRate
from steward.bank.gate import token
from steward.bank.gate.balances import Open, Purses
from steward.bank.gate.policy import Ground, moment
from steward.bank.money import show
from steward.bank.records import Description, Mode, Quote

Shares = tuple[tuple[int, int], ...]


class Case(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job that somebody is to pay for.

    Attributes:
        cluster: Where it is.
        job: What it asks for, all of it.
        user: Its user's name; "" where that is not known.
        account: Who is to pay; "" where nothing says so.
        mode: What holds for it.
        now_us: The time, µs since the epoch.
        free_pass: Whether it is let in whatever the account has.
        first_submit_us: By which rates it is priced.
        is_started: Whether it runs already, so that nothing is put off.
        is_change: Whether its user wants to change it.
        is_again: Whether that is to begin another run of it.
        is_seen: Whether Slurm shows that it asks for all this.
        hold: What holds for it already; None for nothing.
    """

    cluster: str
    job: Description
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
    hold: Open | None = None


class Short(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is missing.

    Attributes:
        needed: What the job needs, beyond what is held for it already, micro-SU.
        free: What it could have, micro-SU.
        what: Whose means are short: of the ``account``, of the ``user`` in it, the
            ``share`` of it that one user's jobs may take, what of it may be held for those
            that are ``unseen`` yet; or ``unknown`` where a myBRC server elsewhere should say.
        wait_s: After how many seconds it can be tried again; 0 where that is not known.
    """

    needed: int
    free: int
    what: str = "account"
    wait_s: int = 0


class Placing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A hold that is to be placed, or what one is to become.

    Attributes:
        account: Who pays.
        payer: Whose allocations are drawn on.
        needed: What the job needs altogether, micro-SU.
        amount: What is held, beyond what it has already; of one that is moved all of it.
        shares: Which allocations pay ``amount``.
        quote: What it covers.
        job: What was priced.
        is_moved: Whether all of it is held anew, in this account.
    """

    account: str
    payer: str
    needed: int
    amount: int
    shares: Shares
    quote: Quote
    job: Description
    is_moved: bool = False


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is to be answered and done.

    Attributes:
        ok: Whether the job may be.
        mode: What holds for it.
        user: Whose job it is, by name.
        account: Who is to pay; "" where nothing says so.
        say: What its user is told.
        qos: The QOS it is given instead.
        partition: The partition it is given instead.
        placing: The hold; None for none.
        sibling: The hold that covers it already.
        short: Why it is refused, or would be; "" if nothing speaks against it.
        quote: What it may cost; None where that was not asked, or nobody can tell.
        is_bound: Whether it must not take the account below its means.
        is_alarming: Whether operators should know, since a rate is missing.
    """

    ok: bool
    mode: Mode
    user: str = ""
    account: str = ""
    say: str = ""
    qos: str = ""
    partition: str = ""
    placing: Placing | None = None
    sibling: Open | None = None
    short: str = ""
    quote: Quote | None = None
    is_bound: bool = False
    is_alarming: bool = False


def refused(
    case: Case, why: str, *, quote: Quote | None = None, is_alarming: bool = False
) -> Decision:
    """It cannot be paid: said to the user, or only noted where it is let in all the same."""
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


PATIENCE_S: Final = 20.0
"""So long all that an account has free may be held for one user in vain, in seconds."""
LOOK_S: Final = 10.0
"""What is held in vain until the next look counts no more: the queue may not be to be seen."""
_MOST_S: Final = 30.0
_NEEDLESS_S: Final = 1.0


class Doubts:
    """What was held in vain, by who pays and whose questions they were.

    It is reckoned in seconds that all that was free was held, and fades: on the average one
    user holds less than half of their share in vain.

    Args:
        share: What a user in doubt may have held for jobs not shown yet, of what is free.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._vain: dict[tuple[str, int], tuple[float, int]] = {}

    def add(self, payer: str, uid: int, vain_s: float, now_us: int) -> None:
        """All that an account has free was held for nothing, for so many seconds."""
        vain_s += self._left_s(payer, uid, now_us)
        self._vain[payer, uid] = (min(vain_s, _MOST_S), now_us)

    def most(self, payer: str, uid: int, free: int, now_us: int) -> int | None:
        """How much may be held for jobs of a user that are not shown yet; None for no bound.

        Args:
            payer: Whose allocations are drawn on.
            uid: The user.
            free: What the payer has free, and what is held for such jobs of the user.
            now_us: The time, µs since the epoch.
        """
        if not self._vain or self.wait_s(payer, uid, now_us) <= 0:
            return None
        return int(max(0, free) * self._share)

    def wait_s(self, payer: str, uid: int, now_us: int) -> float:
        """When a user is trusted again, in seconds; 0 for one who is."""
        over_s = self._left_s(payer, uid, now_us) - PATIENCE_S
        return max(0.0, over_s) / self._fades

    def forget(self, now_us: int) -> None:
        """Let go of what has faded."""
        for payer, uid in list(self._vain):
            if self._left_s(payer, uid, now_us) < _NEEDLESS_S:
                del self._vain[payer, uid]

    @property
    def _fades(self) -> float:
        # Less than who is in doubt may go on holding: a loop does not win trust by itself.
        return self._share / 2

    def _left_s(self, payer: str, uid: int, now_us: int) -> float:
        vain_s, at_us = self._vain.get((payer, uid), (0.0, now_us))
        return max(0.0, vain_s - (now_us - at_us) / 1e6 * self._fades)


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


FAR_US: Final = 15 * 60 * 1_000_000
"""A job that may not begin before is not held for yet, in µs."""


class Deciding:
    """Decides by what is known.

    Args:
        purses: What accounts have.
        ground: Settings, rules and pictures.
        doubts: Whose questions came to nothing.
    """

    def __init__(self, purses: Purses, ground: Ground, doubts: Doubts) -> None:
        self._purses = purses
        self._ground = ground
        self._doubts = doubts

    def submit(
        self,
        cluster: str,
        job: Description,
        user: str,
        now_us: int,
        *,
        secret: bytes = b"",
        is_lenient: bool = False,
    ) -> Decision:
        """Decide on a new job.

        Args:
            cluster: Where it was submitted.
            job: What it asks for.
            user: Its user's name; "" where that is not known.
            now_us: The time, µs since the epoch.
            secret: What tokens are proved with.
            is_lenient: Whether it is let in whatever the account has, as the policy says
                where the ledger is away.
        """
        case = self.case(cluster, job, user, now_us, is_lenient=is_lenient)
        if case.mode == "off":
            return _let_in(case)
        if job.admin_comment:
            sibling = self._sibling(cluster, job, secret)
            if sibling is not None:
                return self._of_sibling(case, sibling)
        why = self._objection(case)
        if why is not None:
            return refused(case, why) if why else _let_in(case)
        decision = self._new(case)
        if decision.ok or case.account not in self._ground.bank.refusal:
            return decision
        return self._otherwise(case, decision)

    def change(
        self,
        cluster: str,
        hold: Open,
        changed: Iterable[tuple[Description, Description]],
        job: Description,
        now_us: int,
        *,
        is_lenient: bool = False,
    ) -> list[Decision]:
        """Decide on a change to a job that has a hold.

        Args:
            cluster: Where it is.
            hold: Its hold.
            changed: Pairs of descriptions, each before and after the change.
            job: The change.
            now_us: The time, µs since the epoch.
            is_lenient: As in :meth:`submit`.

        Returns:
            A decision for each pair.
        """
        quotes: dict[Description, Quote] = {}
        return [
            self._change(cluster, hold, before, after, job, now_us, quotes, is_lenient=is_lenient)
            for before, after in changed
        ]

    def _change(
        self,
        cluster: str,
        hold: Open,
        before: Description,
        after: Description,
        job: Description,
        now_us: int,
        quotes: dict[Description, Quote],
        *,
        is_lenient: bool,
    ) -> Decision:
        # Only a job that waits is told when to begin: what it has is what its runs have left.
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
            for one in (of_hold(hold, after), of_hold(hold, before))
        )
        if case.mode == "off":
            return _let_in(case)
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
            # Also where its account is closed by now.
            return _let_in(case)
        decision = self.cover(case, quotes)
        placing = decision.placing
        stranger = self.stranger(case)
        if stranger is not None:
            return refused(case, stranger) if stranger else _let_in(case)
        covered = before_quote.amount if before_quote is not None else 0
        if placing is None or placing.needed or placing.quote.amount <= covered:
            return decision
        # It holds nothing yet; what nobody could pay when it begins is refused now.
        short = self._short(case, placing.payer, placing.quote.amount)
        return self._not_yet(case, decision, placing, short) if short else decision

    def _quote_or_none(self, case: Case, quotes: dict[Description, Quote]) -> Quote | None:
        """Quote a job; None if it cannot be priced."""
        try:
            return self._quote(case, quotes)
        except (NoRate, NoEstimate):
            return None

    def _quote(self, case: Case, quotes: dict[Description, Quote]) -> Quote:
        known = quotes.get(case.job)
        if known is None:
            known = self._ground.quote(case.cluster, case.job, case.first_submit_us)
            quotes[case.job] = known
        return known

    def afford(self, cluster: str, job: Description, user: str, cost: int, now_us: int) -> Decision:
        """Decide on a new job of which the cost is told, as in mode ``gate``.

        Args:
            cluster: Where it would be submitted.
            job: Whose it is, and of which account.
            user: Its user's name; "" where that is not known.
            cost: What it may cost, micro-SU.
            now_us: The time, µs since the epoch.
        """
        known = self.case(cluster, job, user, now_us)
        is_exempt = self._ground.is_exempt(cluster, job.uid, user)
        is_lenient = self._is_lenient(known.account, now_us)
        case = msgspec.structs.replace(known, mode="gate", free_pass=is_exempt or is_lenient)
        why = self._objection(case)
        if why is not None:
            return refused(case, why) if why else _let_in(case)
        return self._held(case, Quote(amount=cost, account=case.account))

    def case(
        self, cluster: str, job: Description, user: str, now_us: int, *, is_lenient: bool = False
    ) -> Case:
        """What a job is about: who is to pay for it, and by which mode."""
        account = self._ground.account_of(cluster, job, user)
        mode = self._ground.mode(cluster, job.partition, account)
        if job.account != account:
            job = msgspec.structs.replace(job, account=account)
        return Case(
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
        """Whether the policy lets jobs in since nobody knows what the account has."""
        return self._ground.settings.gate.policy == "allow" and self._is_unknown(account, now_us)

    def _is_unknown(self, account: str, now_us: int) -> bool:
        """Whether the myBRC server elsewhere said too long ago what an account has."""
        remote = self._ground.bank.remote
        if not remote.balances:
            return False
        return now_us - self._purses.remote_at_us(account) > remote.balance_age_s * 1e6

    def cover(self, case: Case, quotes: dict[Description, Quote] | None = None) -> Decision:
        """Decide on what a job needs beyond what it has.

        Args:
            case: The job.
            quotes: Quotes that are known by description; this one's is added.
        """
        try:
            quote = self._quote(case, {} if quotes is None else quotes)
        except (NoRate, NoEstimate) as error:
            return refused(case, f"Steward: {error}", is_alarming=True)
        return self._held(case, quote)

    def _held(self, case: Case, quote: Quote) -> Decision:
        """Decide on what a job may cost, beyond what is held for it."""
        hold = case.hold
        needed = self._needed(case, quote)
        has, is_moved = 0, False
        if hold is not None:
            # A change is compared with what was asked for before, of which a part may be settled.
            has = hold.amount if case.is_change and not case.is_again else hold.remaining
            is_moved = hold.account != case.account or hold.is_stranded
        amount = max(0, needed - has) + (hold.remaining if hold is not None and is_moved else 0)
        payer = self._purses.payer_of(case.account)
        short = self._short(case, payer, amount) if amount else None
        why = ""
        if short is not None:
            why = text_of(self._purses, self._ground, case, quote, short)
            if not case.free_pass or (hold is not None and case.mode != "gate"):
                return refused(case, why, quote=quote)
        placing = Placing(
            account=case.account,
            payer=payer,
            needed=needed,
            amount=amount,
            # On paper a job that would be refused takes nothing from those that would not.
            shares=()
            if short is not None and case.mode != "gate"
            else self._purses.draw(payer, amount, case.now_us),
            quote=quote,
            job=case.job,
            is_moved=is_moved,
        )
        return _let_in(case, placing=placing, short=why)

    def _objection(self, case: Case) -> str | None:
        """Why a new job's account cannot pay for its user: as :meth:`stranger`."""
        stranger = self.stranger(case)
        if stranger is not None or self._ground.is_member(case.cluster, case.account, case.user):
            return stranger
        # Slurm refuses it later; held for until then, it would freeze others' money.
        return (
            f"Steward: {case.user or f'user {case.job.uid}'} has no association with account "
            f"{case.account} in slurmdbd; a new one counts within a minute"
        )

    def stranger(self, case: Case) -> str | None:
        """Why the bank cannot have an account pay: "" if it is let in; None if it can."""
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

    def _new(self, case: Case) -> Decision:
        decision = self.cover(case)
        placing = decision.placing
        if placing is None or placing.amount or not placing.quote.amount:
            return decision
        # It holds nothing yet, but an account that is overdrawn takes no jobs at all.
        free = self._purses.available(placing.payer, case.now_us)
        if free >= 0:
            return decision
        short = Short(needed=placing.quote.amount, free=free)
        return self._not_yet(case, decision, placing, short)

    def _not_yet(self, case: Case, decision: Decision, placing: Placing, short: Short) -> Decision:
        """Refuse what would hold nothing now, but could not be paid later."""
        why = text_of(self._purses, self._ground, case, placing.quote, short)
        if case.free_pass:
            return msgspec.structs.replace(decision, short=why)
        return refused(case, why, quote=placing.quote)

    def _needed(self, case: Case, quote: Quote) -> int:
        """What is to be held of a quote now."""
        job = case.job
        if not case.is_started and (job.held or job.begin_us > case.now_us + FAR_US):
            return 0
        arrays = self._ground.bank.arrays
        if job.array and arrays == "running":
            return quote.per_task * min(quote.at_once, quote.tasks)
        if job.array and arrays == "start" and not case.is_started:
            return 0
        return quote.amount

    def _otherwise(self, case: Case, decision: Decision) -> Decision:
        """What the site does with a refused job: let it in elsewhere, if that can be paid."""
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

    def _sibling(self, cluster: str, job: Description, secret: bytes) -> Open | None:
        """The hold whose token a federation's other cluster has put on the job already."""
        for found in token.find(job.admin_comment):
            hold = self._purses.holds.get(found.id)
            if (
                hold is not None
                and hold.uid == job.uid
                and not hold.started
                and cluster not in hold.siblings
                and (cluster != hold.cluster or not hold.confirmed)
                and token.verify(found, secret, hold.cluster, job.uid)
            ):
                return hold
        return None

    def _of_sibling(self, case: Case, hold: Open) -> Decision:
        """Of a federated job the hold is one, as large as the dearest of its clusters needs."""
        case = msgspec.structs.replace(case, hold=hold, account=hold.account)
        return msgspec.structs.replace(self.cover(case), sibling=hold)

    def _short(self, case: Case, payer: str, needed: int) -> Short | None:
        """What is missing; None if all is there."""
        purses = self._purses
        if self._is_unknown(payer, case.now_us):
            return Short(needed=needed, free=0, what="unknown")
        available = purses.available(payer, case.now_us)
        if available < needed:
            return Short(needed=needed, free=available)
        account, uid = case.account, case.job.uid
        limit, spent = purses.user_limit(account, case.user) if case.user else (None, 0)
        if limit is not None:
            left = limit - spent - purses.user_held(account, uid)
            if left < needed:
                return Short(needed=needed, free=left, what="user")
        share = self._ground.bank.hold_share
        if share < 1:
            means = sum(one.balance for one in purses.active(payer, case.now_us))
            left = int((means + purses.credit(payer)) * share) - purses.user_held_of(payer, uid)
            if left < needed:
                return Short(needed=needed, free=left, what="share")
        return None if case.is_seen else self._unseen(case, payer, needed, available)

    def _unseen(self, case: Case, payer: str, needed: int, available: int) -> Short | None:
        """What is missing for one whose questions came to nothing again and again."""
        uid, now_us = case.job.uid, case.now_us
        held = self._purses.unseen(payer, uid)
        most = self._doubts.most(payer, uid, available + held, now_us)
        if most is None or held + needed <= most:
            return None
        # What is held now is shown or void in a moment; what is more than the bound must wait.
        wait_s = self._doubts.wait_s(payer, uid, now_us) if needed > most else LOOK_S
        return Short(needed=needed, free=most - held, what="unseen", wait_s=math.ceil(wait_s))


def of_hold(hold: Open, job: Description) -> Description:
    """Complete a description by its hold: whose job it is, and that it is not put off."""
    job = msgspec.structs.replace(job, uid=hold.uid, account=job.account or hold.account)
    # What is held for is not put off: Slurm may refuse the update that says so.
    return msgspec.structs.replace(job, held=False, begin_us=0) if hold.amount else job


def _let_in(case: Case, *, placing: Placing | None = None, short: str = "") -> Decision:
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
