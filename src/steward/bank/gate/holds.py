"""SU holds of the gate: place, enlarge, shrink and release them in memory and in gate.db.

`HoldKeeper` is the gate's whole state, and the only class that changes it: balances and holds,
rules, pending changes of jobs, grants and allowances. Its parts:

- `submit` and `modify` decide on plugin requests (`admission.py`) and place the holds;
- grants let Steward send an approved change once; allowances let one job pass;
- "extras" are holds for accepted changes that no poll has shown yet;
- `describe` and `list_possible` compare pending changes with what the queue shows.

Every change also writes a fact to the outbox, for the journal and the ledger. Callers run
everything within one transaction of the store; if it fails, :meth:`HoldKeeper.load` rebuilds the
memory from the database. Amounts are micro-SU, times µs since the epoch.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from steward.bank.errors import BankError, NoEstimate, NoRate
from steward.bank.estimate import add_unshown_requests, apply_update, is_compatible
from steward.bank.estimate.request_limits import LONGEST_TEXT
from steward.bank.gate import token
from steward.bank.gate.admission import (
    GRANT_US,
    ChangeGrant,
    Decision,
    DecisionMaker,
    HoldPlan,
    complete_description,
)
from steward.bank.gate.balances import AccountBalances, OpenHold
from steward.bank.gate.policy import GateRules, to_datetime
from steward.bank.gate.possible_changes import (
    MOST_CHANGES,
    MOST_DESCRIPTIONS,
    add_change,
    drop_covered,
    is_at_most,
    is_covered,
    list_descriptions,
    list_outcomes,
    list_shown_descriptions,
    list_task_descriptions,
    set_limit,
)
from steward.bank.gate.requests import (
    VERSION,
    Allowance,
    GateFact,
    HoldRequest,
    PendingChange,
    PendingChanges,
    PluginReply,
    PluginRequest,
)
from steward.bank.gate.store import GateStore
from steward.bank.gate.vain_holds import VainHolds
from steward.bank.ledger import RejectedJob
from steward.bank.money import format_money
from steward.bank.records import GateBooks, JobRequest, Quote
from steward.core.events import HoldFact

log = logging.getLogger(__name__)

_MOST_OFFSET_DIGITS: Final = 4
"""Maximum digits of a het component's offset, which Slurm adds to the leader's id (raw id)."""
UNCONFIRMED_US: Final = 24 * 3600 * 1_000_000
"""Time after which an unconfirmed hold expires, in µs, even if no poll of the queue succeeds."""
POLL_MARGIN_US: Final = 5_000_000
"""Delay after the gate's answer within which slurmctld may still make or change the job, in µs:
since 23.02 it asks outside its locks."""
_NOT_SEEN_YET: Final = (
    "Steward: rejected: the bank has not seen the new job {} yet. Change it again in a few seconds"
)
_TOO_MANY: Final = (
    "Steward: rejected: the price of job {} is unknown, because it changed several times "
    "since the last poll or its tasks differ. Try again in half a minute"
)
_NOT_PERMITTED: Final = "Steward: permission denied: the job belongs to another user"
"""All that a sender without rights on a job is told: slurmctld asks before it checks permission."""
ROOT_CHANGE_US: Final = 15 * 60_000_000
"""Time for which a change by root waits for the poll that shows it, in µs."""
_SPLIT_ARRAY: Final = (
    "Steward: rejected: all tasks of an array charge one account. {} cannot move to "
    "another account alone"
)
PLACED: Final = "hold.placed"
CONFIRMED: Final = "hold.confirmed"
SETTLED: Final = "hold.settled"
RELEASED: Final = "hold.released"
REJECTION: Final = "rejection"


class OverdrawError(BankError):
    """A hold that would make an account's available SU negative; nothing was placed."""


class HoldKeeper:
    """The gate's state: balances, holds, rules, grants and allowances; all changes go through it.

    All texts that a user wrote are bounded before the first row is written, so none can fail later.

    Args:
        store: The database gate.db.
        rules: Settings, rules and cluster models.
        secret: The key of the tokens.
    """

    def __init__(self, store: GateStore, rules: GateRules, secret: bytes) -> None:
        self.store = store
        self.rules = rules
        self.secret = secret
        self.balances = AccountBalances()
        self.vain_holds = VainHolds()
        self.decision_maker = DecisionMaker(self.balances, rules, self.vain_holds)
        self.settled = 0
        self._polled_us: dict[str, int] = {}
        self._extras: dict[str, dict[str, str]] = {}
        """Ids of the holds for changes that no poll has shown, by the job's own hold and payer."""
        self._grants: dict[tuple[str, int], ChangeGrant] = {}
        self._allowances: dict[tuple[str, int], Allowance] = {}
        self.load()

    def load(self) -> None:
        """Rebuild the state in memory from the database."""
        self.balances = AccountBalances()
        self.decision_maker = DecisionMaker(self.balances, self.rules, self.vain_holds)
        position = self.store.read_number("position")
        self.balances.apply_books(
            GateBooks(seq=position, accounts=self.store.load_accounts(), whole=True)
        )
        self.settled = self.store.read_number("settled")
        rules = self.store.load_rules()
        if rules is not None:
            self.rules.put_rules(rules)
        for model in self.store.load_models():
            self.rules.put_model(model)
        self._extras = {}
        for hold in self.store.iter_holds():
            self.balances.add(hold)
            if hold.parent:
                self._extras.setdefault(hold.parent, {})[hold.payer] = hold.id
        self._grants.clear()
        self._allowances = {
            (allowance.cluster, allowance.job_id): allowance
            for allowance in self.store.load_allowances()
        }

    # Decisions

    def submit(
        self, request: PluginRequest, user: str, now_us: int, *, is_lenient: bool
    ) -> PluginReply:
        """Decide on a new job, and place its hold."""
        job = request.job
        decision = self.decision_maker.decide_submit(
            request.cluster, job, user, now_us, secret=self.secret, is_lenient=is_lenient
        )
        comment = ""
        plan = decision.plan
        if decision.sibling is not None:
            if plan is not None and plan.amount:
                self._enlarge(decision.sibling, decision, now_us, why="a sibling costs more")
            if decision.ok:
                decision.sibling.siblings += (request.cluster,)
        elif plan is not None:
            hold = self._new_hold(request.cluster, decision, now_us)
            hold.expires_us = now_us + UNCONFIRMED_US
            self._place_hold(hold, decision, now_us, why="submitted")
            comment = self._format_comment(job, hold)
        self._record_rejection(request, decision, now_us)
        return PluginReply(
            v=VERSION,
            ok=decision.ok,
            say=decision.say,
            admin_comment=comment,
            qos=decision.qos,
            partition=decision.partition,
        )

    def modify(
        self, request: PluginRequest, user: str, now_us: int, *, is_lenient: bool
    ) -> PluginReply:
        """Decide on a change to a job, from any sender.

        The sender has the uid ``request.by`` and the name ``user``. A job without a hold is priced
        at the next poll. ``is_lenient`` as in
        :meth:`DecisionMaker.decide_submit`.
        """
        key = (request.cluster, _get_raw_job_id(request))
        if self._consume_grant(key, request, now_us):
            return PluginReply(v=VERSION, ok=True)
        hold = self.balances.hold_by_job.get(key)
        quote, before = self.store.read_covered(hold) if hold is not None else (None, None)
        if hold is None or before is None:
            is_new = hold is None and not is_lenient and self._may_be_new(request, user)
            say = _NOT_SEEN_YET.format(request.jobs or request.job.job_id) if is_new else ""
            return PluginReply(v=VERSION, ok=not is_new, say=say)
        if not self.rules.may_change(hold.cluster, hold.uid, hold.account, request.by, user):
            is_enforced = self.is_enforced(hold)
            say = _NOT_PERMITTED if is_enforced else ""
            return PluginReply(v=VERSION, ok=not is_enforced, say=say)
        pass_reason = self._find_pass_reason(key, request.by, now_us)
        is_lenient = is_lenient or bool(pass_reason)
        if not pass_reason and self._splits_array(request, hold, quote):
            return PluginReply(v=VERSION, ok=False, say=_SPLIT_ARRAY.format(request.jobs))
        pending = self.store.read_changes(hold)
        change = PendingChange(job=request.job, is_of_tasks="_" in request.jobs)
        changes = add_change(pending, change, has_hold=bool(hold.amount))
        current = list_descriptions(before, pending)
        resulting = list_descriptions(before, changes)
        is_unchanged = resulting == current
        is_many = len(resulting) > MOST_DESCRIPTIONS or len(changes.asked) > MOST_CHANGES
        is_refused = is_many and not is_unchanged and not is_lenient and self._is_bound(hold)
        if is_refused and not is_covered(current, request.job):
            say = _TOO_MANY.format(request.jobs or request.job.job_id)
            return PluginReply(v=VERSION, ok=False, say=say)
        outcomes = {
            outcome: job
            for job in current
            for outcome in list_outcomes(job, request.job)[1:]
            if outcome in resulting - current and not is_many
        }
        changed = [(job, apply_update(job, request.job)) for job in current]
        changed += [(job, outcome) for outcome, job in outcomes.items()]
        with self.without_extras(hold):
            decisions = self.decision_maker.decide_change(
                request.cluster, hold, changed, request.job, now_us, is_lenient=is_lenient
            )
        decision = min(decisions, key=_rank_decision)
        if decision.ok:
            # A change that is rejected repeatedly must not keep polls from settling the job.
            self._mark_changed(hold, now_us)
            if not is_unchanged and not is_many:
                self.store.put_changes(hold, changes)
            self._hold_extra_cost(hold, decisions, now_us)
        self._record_rejection(request, decision, now_us, pass_reason=pass_reason)
        return PluginReply(v=VERSION, ok=decision.ok, say=decision.say)

    def _find_pass_reason(self, key: tuple[str, int], by: int, now_us: int) -> str:
        """Return why a change passes even if the account cannot pay; "" if it does not.

        A change by root also passes the next poll.
        """
        if by == 0:
            until_us = now_us + ROOT_CHANGE_US
            self.allow(
                Allowance(cluster=key[0], job_id=key[1], by="root", until_us=until_us, is_once=True)
            )
            return "admitted for root"
        allowance = self.find_allowance(key, now_us)
        if allowance is None or allowance.is_once:
            return ""
        return f"allowed by {allowance.by}"

    def grant(self, request: PluginRequest, user: str, restarts: int, now_us: int) -> PluginReply:
        """Decide on a change that Steward is about to send for a user.

        The hold is placed now. slurmctld's request about the same change, which comes from
        SlurmUser, consumes the grant. An unconsumed grant releases its hold. The change applies to
        the run with this restart count.
        """
        key = (request.cluster, _get_raw_job_id(request))
        hold = self.balances.hold_by_job.get(key)
        is_first = not self.list_extras(hold)
        reply = self.modify(request, user, now_us, is_lenient=False)
        if reply.ok and hold is not None:
            # Holds that an earlier change also needs outlive the grant.
            extras = (
                frozenset(extra.id for extra in self.list_extras(hold)) if is_first else frozenset()
            )
            until_us = now_us + GRANT_US
            self._grants[key] = ChangeGrant(
                request.jobs, request.job, until_us, hold.started, restarts=restarts, extras=extras
            )
        return reply

    def expire_grant(self, key: tuple[str, int], restarts: int, now_us: int) -> None:
        """End the grant of an earlier run once Slurm shows a later one; release its holds.

        An array's tasks share the grant: a later run of any task ends it, and the gate decides on
        slurmctld's next request anew.
        """
        grant = self._grants.get(key)
        if grant is not None and restarts > grant.restarts:
            self._drop_grant(key, now_us, why="its grant is for an earlier run")

    def expire_grants(self, now_us: int) -> None:
        """Release the holds of expired grants, and drop expired allowances."""
        for key, grant in list(self._grants.items()):
            if grant.until_us <= now_us:
                self._drop_grant(key, now_us, why="its grant was not used")
        for key, allowance in list(self._allowances.items()):
            if allowance.until_us <= now_us:
                self._forget_allowance(key)

    def _drop_grant(self, key: tuple[str, int], now_us: int, *, why: str) -> None:
        for hold_id in self._grants.pop(key).extras & self.balances.holds.keys():
            self.release(self.balances.holds[hold_id], now_us, why=why)

    def _consume_grant(self, key: tuple[str, int], request: PluginRequest, now_us: int) -> bool:
        """Consume the grant that SlurmUser's request matches; return True if there was one."""
        grant = self._grants.get(key)
        hold = self.balances.hold_by_job.get(key)
        if (
            grant is None
            or hold is None
            or not self.rules.is_slurm_uid(request.by)
            or grant.until_us <= now_us
            or not grant.extras <= self.balances.holds.keys()
            or (grant.jobs, grant.job, grant.is_started)
            != (request.jobs, request.job, hold.started)
        ):
            return False
        del self._grants[key]
        self._mark_changed(hold, now_us)
        return True

    def allow(self, allowance: Allowance) -> None:
        """Let a job pass until a given time, even if unaffordable; it is still charged."""
        key = (allowance.cluster, allowance.job_id)
        before = self._allowances.get(key)
        if before is not None and allowance.is_once and not before.is_once:
            return  # an operator's allowance outlasts one for a single change by root
        self._allowances[key] = allowance
        self.store.put_allowance(allowance)
        if not allowance.is_once:
            log.warning(
                "cluster %s: %s allows job %d to overdraw its account until %s: %s",
                *(allowance.cluster, allowance.by, allowance.job_id),
                *(to_datetime(allowance.until_us).isoformat(timespec="seconds"), allowance.reason),
            )

    def find_allowance(self, key: tuple[str, int], now_us: int) -> Allowance | None:
        """Return a job's allowance by cluster and id; None if it has none or it expired."""
        allowance = self._allowances.get(key)
        return allowance if allowance is not None and allowance.until_us > now_us else None

    def _forget_allowance(self, key: tuple[str, int]) -> None:
        if self._allowances.pop(key, None) is not None:
            self.store.drop_allowance(*key)

    def _splits_array(self, request: PluginRequest, hold: OpenHold, quote: Quote | None) -> bool:
        """Return True if a change would charge one array task to another account than the rest."""
        if "_" not in request.jobs or request.job.account.lower() in ("", hold.account):
            return False
        partition = request.job.partition or (quote.partition if quote else "")
        modes = (
            self.rules.get_mode(hold.cluster, partition, account)
            for account in (hold.account, request.job.account.lower())
        )
        is_exempt = self.rules.is_exempt(hold.cluster, hold.uid, hold.user)
        return "enforce" in modes and not is_exempt

    def list_extras(self, hold: OpenHold | None) -> list[OpenHold]:
        """List the holds for a job's changes that no poll has shown."""
        hold_ids = self._extras.get(hold.id, {}).values() if hold is not None else ()
        return [
            self.balances.holds[name] for name in sorted(hold_ids) if name in self.balances.holds
        ]

    @contextmanager
    def without_extras(self, hold: OpenHold | None) -> Iterator[list[OpenHold]]:
        """Leave out the holds for unconfirmed changes while deciding on a job.

        Slurm asks once for each record of an array, and users change their minds.
        """
        extras = self.list_extras(hold)
        for extra in extras:
            self.balances.drop(extra)
        try:
            yield extras
        finally:
            for extra in extras:
                self.balances.add(extra)

    def _hold_extra_cost(self, hold: OpenHold, decisions: Iterable[Decision], now_us: int) -> None:
        """Hold the extra cost of a change until a poll shows it.

        Slurm may still reject the update, and asks before it checks permission. So the job's own
        hold stays unchanged until then, and the extra hold is voided like that of a job that is
        never shown. For each payer the most expensive decision counts.
        """
        most_expensive: dict[str, Decision] = {}
        for decision in decisions:
            plan = decision.plan
            if plan is not None and plan.amount:
                other = most_expensive.setdefault(plan.payer, decision)
                if _get_plan(other).amount < plan.amount:
                    most_expensive[plan.payer] = decision
        extras = self._extras.setdefault(hold.id, {}) if most_expensive else {}
        for payer, decision in most_expensive.items():
            extra = self.balances.holds.get(extras.get(payer, ""))
            if extra is not None and extra.amount >= _get_plan(decision).amount:
                # Slurm may have rejected this change, but not the one before it.
                extra.created_us = now_us
                self.store.update(extra)
                continue
            if extra is not None:
                self.release(extra, now_us, why="changed again")
            extra = self._new_hold(hold.cluster, decision, now_us)
            extra.parent = hold.id
            extra.expires_us = now_us + UNCONFIRMED_US
            self._place_hold(extra, decision, now_us, why="changed by its user")
            extras[payer] = extra.id

    def _may_be_new(self, request: PluginRequest, user: str) -> bool:
        """Return True if the job may be a new one that the sender may change.

        The gate does not know a new job's number yet, so it cannot judge a change.
        """
        if request.by <= 0:
            return False
        for hold in self.balances.unconfirmed_holds.values():
            if (
                hold.cluster == request.cluster
                and self.rules.may_change(hold.cluster, hold.uid, hold.account, request.by, user)
                and self._is_bound(hold)
            ):
                return True
        return False

    def _is_bound(self, hold: OpenHold) -> bool:
        """Return True if the bank may reject a hold's job, and its user is not exempt."""
        is_exempt = self.rules.is_exempt(hold.cluster, hold.uid, hold.user)
        return self.is_enforced(hold) and not is_exempt

    def is_enforced(self, hold: OpenHold) -> bool:
        """Return True if the bank may reject a hold's job (mode ``enforce``)."""
        quote = self.store.read_covered(hold)[0]
        partition = quote.partition if quote else ""
        return self.rules.get_mode(hold.cluster, partition, hold.account) == "enforce"

    def lessen_extras(self, extras: Iterable[OpenHold], plan: HoldPlan, now_us: int) -> None:
        """Reduce the holds for changes by the amount that the job's own hold gets now."""
        for extra in extras:
            if extra.payer != plan.payer:
                continue
            remaining = extra.remaining - plan.amount
            if remaining > 0:
                extra.amount = remaining
                self.shrink(extra, remaining)
            else:
                self.release(extra, now_us, why="the queue shows the change")

    def _mark_changed(self, hold: OpenHold, now_us: int) -> None:
        """Record that the gate accepted a change of a job."""
        hold.changed_us = now_us
        self.balances.changed_holds[hold.id] = hold
        self.store.update(hold)

    def note_poll(self, cluster: str, began_us: int) -> None:
        """Record that all jobs of a poll were confirmed and have their holds."""
        self._polled_us[cluster] = max(began_us, self._polled_us.get(cluster, 0))

    def is_settled(self, hold: OpenHold) -> bool:
        """Return True if a poll began after a job's last change."""
        polled_us = self._polled_us.get(hold.cluster, 0) - POLL_MARGIN_US
        return not hold.changed_us or hold.changed_us < polled_us

    def describe(
        self, hold: OpenHold, job: JobRequest, quote: Quote | None, tasks: tuple[JobRequest, ...]
    ) -> bool:
        """Replace a job's description by the queue's, once that shows the last change.

        The amount stays. An array's hold covers all of its tasks; the queue shows the remaining
        ones, in ``tasks`` those that differ from ``job``. ``quote`` is None if the job cannot be
        priced. Return True if the description was replaced.
        """
        if not self.is_settled(hold):
            return False
        covered, before = self.store.read_covered(hold)
        pending, array = self.store.read_changes(hold), job.array
        if hold.amount and before is not None and before.array:
            array = before.array.partition("%")[0] + "".join(job.array.partition("%")[1:])
        elif quote is not None and (
            covered is None or not hold.amount or quote.amount >= covered.amount
        ):
            covered = quote
        shown = [
            msgspec.structs.replace(complete_description(hold, description), array=array)
            for description in (job, *tasks)
        ]
        matching, of_tasks = [], set()
        if before is not None:
            # Slurm computes what the queue shows: keep the requests that match it.
            matching = self._match_queue(hold, before, pending, shown)
            matching += self._list_unshown(before, pending, shown)
            of_tasks = list_task_descriptions(before, pending)
        job, *others = dict.fromkeys(
            msgspec.structs.replace(description, admin_comment="", job_id=0, array=array)
            for description in (*matching, *shown)
        )
        nodes = max(description.min_nodes or 1 for description in (job, *others))
        of_array = (msgspec.structs.replace(task, array=array) for task in of_tasks)
        changes = PendingChanges(
            tasks=tuple(others),
            of_tasks=tuple(
                task
                for task in drop_covered(of_array)
                if not any(is_at_most(task, other) for other in (job, *others))
            ),
            nodes=nodes if nodes > max(task.min_nodes or 1 for task in shown) else 0,
        )
        if changes != pending:
            self.store.put_changes(hold, changes)
        if hold.changed_us:
            hold.changed_us = 0
            self.balances.changed_holds.pop(hold.id, None)
            self.store.update(hold)
        if covered is not None and job != before:
            self.store.update_description(hold, covered, job)
        return True

    def list_possible(self, hold: OpenHold, claim: HoldRequest) -> list[JobRequest]:
        """List requests that a job may have but the queue cannot show.

        slurmctld may apply part of an update that it rejects, and squeue shows a waiting array
        task like its array.
        """
        before, changes = self.store.read_covered(hold)[1], self.store.read_changes(hold)
        if before is None or not self.is_settled(hold):
            return []
        account = claim.description.account or hold.account
        shown = msgspec.structs.replace(claim.description, account=account)
        tasks = list_task_descriptions(before, changes) if shown.array else set()
        return [
            msgspec.structs.replace(
                job, array=shown.array, held=shown.held, begin_us=shown.begin_us
            )
            for job in (*self._list_unshown(before, changes, (shown, *claim.tasks)), *tasks)
            if job.account.lower() in ("", account.lower())
        ]

    def _list_unshown(
        self, before: JobRequest, changes: PendingChanges, shown: Sequence[JobRequest]
    ) -> list[JobRequest]:
        """List what the queue shows, completed by requests that it does not show."""
        requests = list_shown_descriptions(before, changes)
        known_nodes = max(job.min_nodes or 1 for job in (before, *changes.tasks))
        completed = {
            add_unshown_requests(job, request, _get_unshown_nodes(request, known_nodes, changes))
            for request in requests
            for job in shown
        }
        return list(completed.difference(shown))

    def _match_queue(
        self,
        hold: OpenHold,
        before: JobRequest,
        changes: PendingChanges,
        shown: Sequence[JobRequest],
    ) -> list[JobRequest]:
        """List the known requests that match what the queue shows, with the shown time limits."""
        matching: list[JobRequest] = []
        for request in list_shown_descriptions(before, changes):
            try:
                max_tres = self.rules.quote(hold.cluster, request, hold.created_us).tres
            except (NoRate, NoEstimate):
                max_tres = {}
            limits = [
                job.time_limit_min or 0 for job in shown if is_compatible(request, job, max_tres)
            ]
            if limits and request.time_limit_min:
                matching.append(set_limit(request, max(limits) if min(limits) > 0 else min(limits)))
            elif limits:
                matching.append(request)
        return matching

    def _format_comment(self, job: JobRequest, hold: OpenHold) -> str:
        """Return a job's admin_comment with the token of its hold."""
        hold_token = token.make_token(
            self.secret,
            hold.id,
            hold.amount,
            hold.expires_us // 1_000_000,
            hold.account,
            hold.cluster,
            hold.uid,
        )
        return f"{token.remove_tokens(job.admin_comment)} {hold_token}".lstrip()

    def _record_rejection(
        self, request: PluginRequest, decision: Decision, now_us: int, *, pass_reason: str = ""
    ) -> None:
        """Record a rejection, real or in mode observe; log an error if a rate is missing.

        ``pass_reason``: why the request passed although it would have been rejected; "" otherwise.
        """
        if decision.is_alarming:
            log.error("cluster %s: %s", request.cluster, decision.short)
        is_recorded = decision.mode == "observe" or not decision.ok or bool(pass_reason)
        if not decision.short or not (is_recorded or decision.qos or decision.partition):
            return
        seq = self.store.fact_seq + 1
        quote = decision.quote
        rejection = RejectedJob(
            id=f"gate:{seq}",
            at=to_datetime(now_us),
            mode=decision.mode,
            cluster=request.cluster,
            uid=request.job.uid,
            user=decision.user,
            account=decision.account,
            partition=(quote.partition if quote else "") or request.job.partition[:LONGEST_TEXT],
            job_id=request.job.job_id,
            amount=quote.amount if quote else 0,
            reason=f"{pass_reason}: {decision.short}" if pass_reason else decision.short,
        )
        self.store.put_fact(
            GateFact(
                seq=seq, kind=REJECTION, at_us=now_us, cluster=request.cluster, rejection=rejection
            )
        )

    # Holds

    def _new_hold(self, cluster: str, decision: Decision, now_us: int) -> OpenHold:
        """Make a hold from a decision, without storing it."""
        plan = _get_plan(decision)
        return OpenHold(
            number=self.store.next_number(),
            id=token.make_hold_id(),
            cluster=cluster,
            account=plan.account,
            payer=plan.payer,
            uid=plan.job.uid,
            user=decision.user,
            amount=plan.amount,
            remaining=plan.amount,
            shares=plan.shares,
            created_us=now_us,
        )

    def _place_hold(self, hold: OpenHold, decision: Decision, now_us: int, *, why: str) -> None:
        """Add a decided hold to memory and database; undo the former if the latter fails."""
        plan = _get_plan(decision)
        self.balances.add(hold)
        try:
            self._check_balance(decision, now_us)
            self.insert_hold(hold, plan.quote, plan.job, now_us, why=why)
        except Exception:
            self.balances.drop(hold)
            raise

    def insert_hold(
        self, hold: OpenHold, quote: Quote | None, job: JobRequest | None, now_us: int, *, why: str
    ) -> None:
        """Write a new hold to the database, and a fact to the outbox."""
        self.store.insert(hold, quote, job)
        self.write_fact(PLACED, hold, hold.amount, now_us, why=why)

    def _enlarge(
        self, hold: OpenHold, decision: Decision, now_us: int, *, why: str, is_whole: bool = False
    ) -> None:
        """Enlarge a hold as decided; with ``is_whole`` the decision is on the remaining tasks."""
        plan = _get_plan(decision)
        before = (hold.account, hold.remaining, hold.shares, hold.amount)
        if plan.is_moved:
            remaining, shares = plan.amount, plan.shares
        else:
            remaining = hold.remaining + plan.amount
            shares = self.balances.add_shares(hold, plan.shares)
        self.balances.resize(hold, remaining, shares, account=plan.account)
        hold.amount = remaining if is_whole else hold.amount + remaining - before[1]
        try:
            self._check_balance(decision, now_us)
            self.store.update(hold)
            covered_request = self.store.read_covered(hold)[1] if is_whole else None
            if covered_request is not None:
                job = msgspec.structs.replace(covered_request, array=plan.job.array)
            else:
                job = plan.job
            self.store.update_description(hold, plan.quote, job)
            self.write_fact(PLACED, hold, remaining - before[1], now_us, why=why)
        except Exception:
            self.balances.resize(hold, before[1], before[2], account=before[0])
            hold.amount = before[3]
            raise

    def _check_balance(self, decision: Decision, now_us: int) -> None:
        """Raise OverdrawError if an accepted hold makes balance + credit limit - holds negative."""
        if not decision.is_bound:
            return
        payer = _get_plan(decision).payer
        available = self.balances.get_available(payer, now_us)
        if available < 0:
            raise OverdrawError(
                f"a hold would overdraw account {payer} to "
                f"{format_money(available, self.rules.unit)}: no hold placed. Run 'steward "
                "bank check'",
                payer,
            )

    def shrink(self, hold: OpenHold, remaining: int) -> None:
        """Reduce a hold to this remainder."""
        shares = self.balances.reduce_shares(hold, hold.remaining - remaining)
        self.balances.resize(hold, remaining, shares)
        self.store.update(hold)

    def release(
        self,
        hold: OpenHold,
        now_us: int,
        *,
        why: str,
        kind: str = RELEASED,
        amount: int | None = None,
    ) -> int:
        """Release or settle a hold; return its remainder, micro-SU."""
        for extra in self.list_extras(hold):
            self.release(extra, now_us, why=why)
        remainder = hold.remaining
        self.balances.drop(hold)
        self._extras.pop(hold.id, None)
        if hold.job_id:
            self._grants.pop((hold.cluster, hold.job_id), None)
            self._forget_allowance((hold.cluster, hold.job_id))
        self.store.delete(hold)
        hold.remaining = 0
        self.write_fact(kind, hold, remainder if amount is None else amount, now_us, why=why)
        return remainder

    def write_fact(self, kind: str, hold: OpenHold, amount: int, now_us: int, *, why: str) -> None:
        """Write a fact about a hold to the outbox."""
        fact = HoldFact(
            hold=hold.id,
            account=hold.account,
            amount=amount,
            remaining=hold.remaining,
            job_id=hold.job_id,
            user=hold.user,
            why=why,
        )
        seq = self.store.fact_seq + 1
        self.store.put_fact(
            GateFact(seq=seq, kind=kind, at_us=now_us, cluster=hold.cluster, hold=fact)
        )

    def place_decided(
        self,
        cluster: str,
        decision: Decision,
        now_us: int,
        *,
        job_id: int,
        is_started: bool,
        first_submit_us: int,
    ) -> OpenHold:
        """Place the hold of a job that is in the queue already."""
        hold = self._new_hold(cluster, decision, now_us)
        hold.origin = "queue"
        hold.job_id = job_id
        hold.confirmed = True
        hold.started = is_started
        hold.created_us = first_submit_us or now_us
        self._place_hold(hold, decision, now_us, why="found in the queue")
        return hold

    def enlarge_decided(self, hold: OpenHold, decision: Decision, now_us: int) -> None:
        """Enlarge the hold of a job that is in the queue."""
        self._enlarge(hold, decision, now_us, why="found in the queue", is_whole=True)


def _get_raw_job_id(request: PluginRequest) -> int:
    """Return the raw job id of a change; for a het component ``7+1`` its own id."""
    leader, _, offset = request.jobs.partition("+")
    is_component = leader.isdecimal() and offset.isdecimal() and len(offset) <= _MOST_OFFSET_DIGITS
    return request.job.job_id + int(offset) if is_component else request.job.job_id


def _get_unshown_nodes(request: JobRequest, known_nodes: int, changes: PendingChanges) -> int:
    """Return up to how many nodes a job may request although the queue shows fewer.

    A change raises them, or the former poll left them possible.
    """
    nodes = request.min_nodes or 1
    return nodes if nodes > known_nodes else changes.nodes


def _rank_decision(decision: Decision) -> tuple[bool, int]:
    """Return a sort key: rejections first, then the most expensive."""
    return decision.ok, -decision.quote.amount if decision.quote is not None else 0


def _get_plan(decision: Decision) -> HoldPlan:
    if decision.plan is None:
        raise AssertionError("no hold requested")
    return decision.plan
