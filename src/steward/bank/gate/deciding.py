"""May this job be afforded? Looks at the state, changes nothing, and asks nobody.

What it decides is carried out by ``keeper.py``, in one transaction. What fails here in a
way that nobody has thought of is caught where the request is answered (``answering.py``,
``calls.py``): nothing was changed, and it is that request alone that fails.
"""

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from steward.bank.errors import NoEstimate, NoRate
from steward.bank.gate import token
from steward.bank.gate.case import Case, Decision, Placing, Short, refused
from steward.bank.gate.doubts import LOOK_S, Doubts
from steward.bank.gate.ground import Ground
from steward.bank.gate.purses import Open, Purses
from steward.bank.gate.refusing import text_of
from steward.bank.records import Description, Quote

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
