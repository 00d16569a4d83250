"""Admission decisions of the gate: accept or reject a submit or change.

Reading order:

- `AdmissionCase` (the job to decide on), `Shortfall` (needed and available SU), `HoldPlan` (the SU
  hold to place) and `Decision` (the result);
- `DecisionMaker` makes the decisions: `decide_submit` for new jobs, `decide_change` for updates,
  `decide_hold` for jobs in the queue, `decide_cost` for a cost given by the caller.

`vain_holds.py` limits users whose holds are void again and again, and `rejections.py` writes the
message that a rejected user sees. Only `VainHolds` has state; `holds.py` places the hold that a
decision plans. Balances come from `balances.py`, modes and estimates from `policy.py`. An
unforeseen error fails one request alone: `plugin_answers.py` and `calls.py` catch it. Amounts are
micro-SU.
"""

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from steward.bank.errors import NoEstimate, NoRate
from steward.bank.gate import token
from steward.bank.gate.balances import AccountBalances, OpenHold
from steward.bank.gate.policy import GateRules
from steward.bank.gate.rejections import (
    format_rejection,
)
from steward.bank.gate.vain_holds import (
    MOST_COUNTED_VAIN_S,
    VainHolds,
)
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
        short: Why the job is rejected, or would be in mode ``enforce``; "" if it can be paid.
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
        if decision.ok or case.account not in self._rules.bank.rejection:
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
        ``changed``. ``is_lenient`` as in :meth:`decide_submit`.
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
        decision = self.decide_hold(case, quotes)
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
        """Decide, as in mode ``enforce``, on a new job whose cost the caller gives, in micro-SU.

        Of ``job``, only the uid and the account matter. ``user`` is "" if the name is unknown.
        """
        base_case = self.build_case(cluster, job, user, now_us)
        is_exempt = self._rules.is_exempt(cluster, job.uid, user)
        is_lenient = self._is_lenient(base_case.account, now_us)
        case = msgspec.structs.replace(base_case, mode="enforce", free_pass=is_exempt or is_lenient)
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
                or mode != "enforce"
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

    def decide_hold(
        self, case: AdmissionCase, quotes: dict[JobRequest, Quote] | None = None
    ) -> Decision:
        """Decide on the SU that a job needs beyond its hold; its quote is added to ``quotes``."""
        try:
            quote = self._quote(case, {} if quotes is None else quotes)
        except (NoRate, NoEstimate) as error:
            return make_rejection(case, f"Steward: rejected: {error}", is_alarming=True)
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
            if not case.free_pass or (hold is not None and case.mode != "enforce"):
                return make_rejection(case, why, quote=quote)
        plan = HoldPlan(
            account=case.account,
            payer=payer,
            needed=needed,
            amount=amount,
            # In mode observe a job that would be rejected takes no SU from accepted ones.
            shares=()
            if shortfall is not None and case.mode != "enforce"
            else self._balances.split_amount(payer, amount, case.now_us),
            quote=quote,
            job=case.job,
            is_moved=is_moved,
        )
        return _accept(case, plan=plan, short=why)

    def _find_objection(self, case: AdmissionCase) -> str | None:
        """Return why the account cannot pay for this user's new job, or None."""
        objection = self.find_account_objection(case)
        if objection is not None or self._rules.is_member(case.cluster, case.account, case.user):
            return objection
        # Slurm rejects it later; a hold until then would block other users' SU.
        return (
            f"Steward: rejected: {case.user or f'user {case.job.uid}'} has no association "
            f"with account {case.account} in slurmdbd. Ask the account's coordinator for one; "
            "it works within a minute"
        )

    def find_account_objection(self, case: AdmissionCase) -> str | None:
        """Return the message that rejects an account: "" to admit without it, None if valid."""
        account, user = case.account, case.user
        books = self._balances.accounts.get(account)
        if books is None:
            if self._rules.bank.unknown_accounts == "allow":
                return ""
            if not account:
                return "Steward: rejected: the job names no account. Give one with --account"
            return (
                f"Steward: rejected: unknown account {account}. Give another with --account, "
                "or ask an operator to create it"
            )
        if books.closed:
            return f"Steward: rejected: account {account} is closed. Give another with --account"
        if books.only_listed and (not user or self._balances.find_user(account, user) is None):
            return (
                f"Steward: rejected: {user or 'this user'} may not charge account {account}. "
                "Ask an owner of the account"
            )
        remote = self._balances.remote_means.get(account)
        has_limits = any(listed.limit is not None for listed in books.users)
        if not user and (has_limits or (remote is not None and remote.limits)):
            return (
                f"Steward: rejected: cannot look up the name of uid {case.job.uid}, and "
                f"account {account} has limits for its users. Try again in a few seconds"
            )
        return None

    def _decide_new(self, case: AdmissionCase) -> Decision:
        """Decide on a new job; an overdrawn account rejects even one that holds nothing yet."""
        decision = self.decide_hold(case)
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
        alternative = self._rules.bank.rejection[case.account]
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
        say = f"{decision.say}\nSteward: the job was moved to {' and '.join(changes)}."
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
        return msgspec.structs.replace(self.decide_hold(case), sibling=hold)

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


GRANT_US: Final = 10_000_000
"""Time for which a grant waits for slurmctld's request, in µs."""


class ChangeGrant(msgspec.Struct, frozen=True):
    """A change that the gate approved and Steward is about to send for a user.

    Attributes:
        jobs: The jobs as the command names them.
        job: The requested change.
        until_us: Expiry, µs since the epoch; until then slurmctld's request may consume the grant.
        is_started: Whether the job had started.
        restarts: Restart count of the run that the change is for.
        extras: Ids of the holds placed for this change alone.
    """

    jobs: str
    job: JobRequest
    until_us: int
    is_started: bool
    restarts: int
    extras: frozenset[str]
