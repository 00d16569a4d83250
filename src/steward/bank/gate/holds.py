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
    Decision,
    DecisionMaker,
    HoldPlan,
    VainHolds,
    complete_description,
)
from steward.bank.gate.balances import AccountBalances, OpenHold
from steward.bank.gate.policy import GateRules, to_datetime
from steward.bank.gate.requests import (
    VERSION,
    Allowance,
    CoverRequest,
    GateFact,
    PendingChange,
    PendingChanges,
    PluginReply,
    PluginRequest,
)
from steward.bank.gate.store import GateStore
from steward.bank.gate.unconfirmed_changes import (
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
    "Steward: job {} has just been submitted, and is not seen yet by the bank: "
    "change it in a few seconds"
)
_TOO_MANY: Final = (
    "Steward: job {} was changed several times since the last poll of the queue, or its tasks "
    "differ too much, so nobody can tell its price now: try again in half a minute"
)
_NOT_PERMITTED: Final = "Steward: permission denied: this job is not yours to change"
"""All that a sender without rights on a job is told: slurmctld asks before it checks permission."""
GRANT_US: Final = 10_000_000
"""Time for which a grant waits for slurmctld's request, in µs."""
ROOT_CHANGE_US: Final = 15 * 60_000_000
"""Time for which a change by root waits for the poll that shows it, in µs."""
_SPLIT_ARRAY: Final = (
    "Steward: an array is paid by one account: {} cannot be moved to another one by itself"
)
PLACED: Final = "hold.placed"
CONFIRMED: Final = "hold.confirmed"
SETTLED: Final = "hold.settled"
RELEASED: Final = "hold.released"
REFUSAL: Final = "refusal"


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


class OverdrawError(BankError):
    """A hold that would make an account's available SU negative; nothing was placed."""


class HoldKeeper:
    """The gate's state: balances, holds, rules, grants and allowances; all changes go through it.

    All texts that a user wrote are bounded before the first row is written, so none can fail later.

    Args:
        store: The database gate.db.
        ground: Settings, rules and cluster models.
        secret: The key of the tokens.
    """

    def __init__(self, store: GateStore, ground: GateRules, secret: bytes) -> None:
        self.store = store
        self.ground = ground
        self.secret = secret
        self.purses = AccountBalances()
        self.doubts = VainHolds(ground.bank.unseen_share)
        self.deciding = DecisionMaker(self.purses, ground, self.doubts)
        self.settled = 0
        self._polled_us: dict[str, int] = {}
        self._extras: dict[str, dict[str, str]] = {}
        """Ids of the holds for changes that no poll has shown, by the job's own hold and payer."""
        self._grants: dict[tuple[str, int], ChangeGrant] = {}
        self._allowances: dict[tuple[str, int], Allowance] = {}
        self.load()

    def load(self) -> None:
        """Rebuild the state in memory from the database."""
        self.purses = AccountBalances()
        self.deciding = DecisionMaker(self.purses, self.ground, self.doubts)
        position = self.store.number("position")
        self.purses.put(GateBooks(seq=position, accounts=self.store.accounts(), whole=True))
        self.settled = self.store.number("settled")
        rules = self.store.rules()
        if rules is not None:
            self.ground.put_rules(rules)
        for picture in self.store.pictures():
            self.ground.put_picture(picture)
        self._extras = {}
        for hold in self.store.holds():
            self.purses.add(hold)
            if hold.parent:
                self._extras.setdefault(hold.parent, {})[hold.payer] = hold.id
        self._grants.clear()
        self._allowances = {(one.cluster, one.job_id): one for one in self.store.allowances()}

    # Decisions

    def submit(
        self, ask: PluginRequest, user: str, now_us: int, *, is_lenient: bool
    ) -> PluginReply:
        """Decide on a new job, and place its hold."""
        job = ask.job
        decision = self.deciding.submit(
            ask.cluster, job, user, now_us, secret=self.secret, is_lenient=is_lenient
        )
        comment = ""
        placing = decision.placing
        if decision.sibling is not None:
            if placing is not None and placing.amount:
                self._enlarge(decision.sibling, decision, now_us, why="a sibling costs more")
            if decision.ok:
                decision.sibling.siblings += (ask.cluster,)
        elif placing is not None:
            hold = self._new(ask.cluster, decision, now_us)
            hold.expires_us = now_us + UNCONFIRMED_US
            self._place(hold, decision, now_us, why="submitted")
            comment = self._comment(job, hold)
        self._note(ask, decision, now_us)
        return PluginReply(
            v=VERSION,
            ok=decision.ok,
            say=decision.say,
            admin_comment=comment,
            qos=decision.qos,
            partition=decision.partition,
            id=ask.id,
        )

    def modify(
        self, ask: PluginRequest, user: str, now_us: int, *, is_lenient: bool
    ) -> PluginReply:
        """Decide on a change to a job, from any sender: the uid ``ask.by``, with the name ``user``.

        A job without a hold is priced at the next poll. ``is_lenient`` as in
        :meth:`DecisionMaker.submit`.
        """
        key = (ask.cluster, _get_raw_job_id(ask))
        if self._consume_grant(key, ask, now_us):
            return PluginReply(v=VERSION, ok=True, id=ask.id)
        hold = self.purses.by_job.get(key)
        quote, before = self.store.covered(hold) if hold is not None else (None, None)
        if hold is None or before is None:
            is_new = hold is None and not is_lenient and self._may_be_new(ask, user)
            say = _NOT_SEEN_YET.format(ask.jobs or ask.job.job_id) if is_new else ""
            return PluginReply(v=VERSION, ok=not is_new, say=say, id=ask.id)
        if not self.ground.may_change(hold.cluster, hold.uid, hold.account, ask.by, user):
            is_enforced = self.is_enforced(hold)
            say = _NOT_PERMITTED if is_enforced else ""
            return PluginReply(v=VERSION, ok=not is_enforced, say=say, id=ask.id)
        passed = self._pass(key, ask.by, now_us)
        is_lenient = is_lenient or bool(passed)
        if not passed and self._is_torn(ask, hold, quote):
            return PluginReply(v=VERSION, ok=False, say=_SPLIT_ARRAY.format(ask.jobs), id=ask.id)
        known = self.store.changes(hold)
        change = PendingChange(job=ask.job, is_of_tasks="_" in ask.jobs)
        changes = add_change(known, change, is_held_for=bool(hold.amount))
        current = list_descriptions(before, known)
        resulting = list_descriptions(before, changes)
        is_known = resulting == current
        is_many = len(resulting) > MOST_DESCRIPTIONS or len(changes.asked) > MOST_CHANGES
        is_refused = is_many and not is_known and not is_lenient and self._is_bound(hold)
        if is_refused and not is_covered(current, ask.job):
            say = _TOO_MANY.format(ask.jobs or ask.job.job_id)
            return PluginReply(v=VERSION, ok=False, say=say, id=ask.id)
        outcomes = {
            outcome: job
            for job in current
            for outcome in list_outcomes(job, ask.job)[1:]
            if outcome in resulting - current and not is_many
        }
        changed = [(job, apply_update(job, ask.job)) for job in current]
        changed += [(job, outcome) for outcome, job in outcomes.items()]
        with self.without_extras(hold):
            decisions = self.deciding.change(
                ask.cluster, hold, changed, ask.job, now_us, is_lenient=is_lenient
            )
        decision = min(decisions, key=_rank_decision)
        if decision.ok:
            # A change that is rejected repeatedly must not keep polls from settling the job.
            self._mark_changed(hold, now_us)
            if not is_known and not is_many:
                self.store.put_changes(hold, changes)
            self._ask_more(hold, decisions, now_us)
        self._note(ask, decision, now_us, passed=passed)
        return PluginReply(v=VERSION, ok=decision.ok, say=decision.say, id=ask.id)

    def _pass(self, key: tuple[str, int], by: int, now_us: int) -> str:
        """Return why a change passes even if the account cannot pay; "" if it does not.

        A change by root also passes the next poll.
        """
        if by == 0:
            until_us = now_us + ROOT_CHANGE_US
            self.allow(
                Allowance(cluster=key[0], job_id=key[1], by="root", until_us=until_us, is_once=True)
            )
            return "passed for root"
        allowance = self.allowance(key, now_us)
        if allowance is None or allowance.is_once:
            return ""
        return f"allowed by {allowance.by}"

    def grant(self, ask: PluginRequest, user: str, restarts: int, now_us: int) -> PluginReply:
        """Decide on a change that Steward is about to send for a user.

        The hold is placed now. slurmctld's request about the same change, which comes from
        SlurmUser, consumes the grant. An unconsumed grant releases its hold. The change applies to
        the run with this restart count.
        """
        key = (ask.cluster, _get_raw_job_id(ask))
        hold = self.purses.by_job.get(key)
        is_first = not self.extras(hold)
        said = self.modify(ask, user, now_us, is_lenient=False)
        if said.ok and hold is not None:
            # Holds that an earlier change also needs outlive the grant.
            extras = frozenset(one.id for one in self.extras(hold)) if is_first else frozenset()
            until_us = now_us + GRANT_US
            self._grants[key] = ChangeGrant(
                ask.jobs, ask.job, until_us, hold.started, restarts=restarts, extras=extras
            )
        return said

    def expire_grant(self, key: tuple[str, int], restarts: int, now_us: int) -> None:
        """End a job's grant if Slurm shows a later run than it is for; release its holds.

        An array's tasks share the grant: a later run of any task ends it, and the gate decides on
        slurmctld's next request anew.
        """
        grant = self._grants.get(key)
        if grant is not None and restarts > grant.restarts:
            self._drop_grant(key, now_us, why="its grant was for an earlier run")

    def expire_grants(self, now_us: int) -> None:
        """Release the holds of expired grants, and drop expired allowances."""
        for key, grant in list(self._grants.items()):
            if grant.until_us <= now_us:
                self._drop_grant(key, now_us, why="its grant was not consumed")
        for key, allowance in list(self._allowances.items()):
            if allowance.until_us <= now_us:
                self._forget_allowance(key)

    def _drop_grant(self, key: tuple[str, int], now_us: int, *, why: str) -> None:
        for name in self._grants.pop(key).extras & self.purses.holds.keys():
            self.give_back(self.purses.holds[name], now_us, why=why)

    def _consume_grant(self, key: tuple[str, int], ask: PluginRequest, now_us: int) -> bool:
        """Consume the grant that SlurmUser's request matches; return True if there was one."""
        grant = self._grants.get(key)
        hold = self.purses.by_job.get(key)
        if (
            grant is None
            or hold is None
            or not self.ground.is_slurms(ask.by)
            or grant.until_us <= now_us
            or not grant.extras <= self.purses.holds.keys()
            or (grant.jobs, grant.job, grant.is_started) != (ask.jobs, ask.job, hold.started)
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
                "cluster %s: %s lets job %d pass until %s: %s",
                *(allowance.cluster, allowance.by, allowance.job_id),
                *(to_datetime(allowance.until_us).isoformat(timespec="seconds"), allowance.reason),
            )

    def allowance(self, key: tuple[str, int], now_us: int) -> Allowance | None:
        """Return a job's allowance by cluster and id; None if it has none or it expired."""
        found = self._allowances.get(key)
        return found if found is not None and found.until_us > now_us else None

    def _forget_allowance(self, key: tuple[str, int]) -> None:
        if self._allowances.pop(key, None) is not None:
            self.store.drop_allowance(*key)

    def _is_torn(self, ask: PluginRequest, hold: OpenHold, quote: Quote | None) -> bool:
        """Return True if a change would charge one array task to another account than the rest."""
        if "_" not in ask.jobs or ask.job.account.lower() in ("", hold.account):
            return False
        partition = ask.job.partition or (quote.partition if quote else "")
        modes = (
            self.ground.mode(hold.cluster, partition, account)
            for account in (hold.account, ask.job.account.lower())
        )
        is_exempt = self.ground.is_exempt(hold.cluster, hold.uid, hold.user)
        return "gate" in modes and not is_exempt

    def extras(self, hold: OpenHold | None) -> list[OpenHold]:
        """List the holds for a job's changes that no poll has shown."""
        names = self._extras.get(hold.id, {}).values() if hold is not None else ()
        return [self.purses.holds[name] for name in sorted(names) if name in self.purses.holds]

    @contextmanager
    def without_extras(self, hold: OpenHold | None) -> Iterator[list[OpenHold]]:
        """Leave out the holds for unconfirmed changes while deciding on a job.

        Slurm asks once for each record of an array, and users change their minds.
        """
        extras = self.extras(hold)
        for extra in extras:
            self.purses.drop(extra)
        try:
            yield extras
        finally:
            for extra in extras:
                self.purses.add(extra)

    def _ask_more(self, hold: OpenHold, decisions: Iterable[Decision], now_us: int) -> None:
        """Hold the extra cost of a change until a poll shows it.

        Slurm may still reject the update, and asks before it checks permission. So the job's own
        hold stays unchanged until then, and the extra hold is voided like that of a job that is
        never shown. For each payer the most expensive decision counts.
        """
        dearest: dict[str, Decision] = {}
        for decision in decisions:
            placing = decision.placing
            if placing is not None and placing.amount:
                other = dearest.setdefault(placing.payer, decision)
                if _get_plan(other).amount < placing.amount:
                    dearest[placing.payer] = decision
        extras = self._extras.setdefault(hold.id, {}) if dearest else {}
        for payer, decision in dearest.items():
            extra = self.purses.holds.get(extras.get(payer, ""))
            if extra is not None and extra.amount >= _get_plan(decision).amount:
                # Slurm may have rejected this change, but not the one before it.
                extra.created_us = now_us
                self.store.update(extra)
                continue
            if extra is not None:
                self.give_back(extra, now_us, why="changed again")
            extra = self._new(hold.cluster, decision, now_us)
            extra.parent = hold.id
            extra.expires_us = now_us + UNCONFIRMED_US
            self._place(extra, decision, now_us, why="changed by its user")
            extras[payer] = extra.id

    def _may_be_new(self, ask: PluginRequest, user: str) -> bool:
        """Return True if the job may be a new one that the sender may change.

        The gate does not know a new job's number yet, so it cannot judge a change.
        """
        if ask.by <= 0:
            return False
        for hold in self.purses.unconfirmed.values():
            if (
                hold.cluster == ask.cluster
                and self.ground.may_change(hold.cluster, hold.uid, hold.account, ask.by, user)
                and self._is_bound(hold)
            ):
                return True
        return False

    def _is_bound(self, hold: OpenHold) -> bool:
        """Return True if the bank may reject a hold's job, and its user is not exempt."""
        is_exempt = self.ground.is_exempt(hold.cluster, hold.uid, hold.user)
        return self.is_enforced(hold) and not is_exempt

    def is_enforced(self, hold: OpenHold) -> bool:
        """Return True if the bank may reject a hold's job (mode ``gate``)."""
        quote = self.store.covered(hold)[0]
        partition = quote.partition if quote else ""
        return self.ground.mode(hold.cluster, partition, hold.account) == "gate"

    def lessen_extras(self, extras: Iterable[OpenHold], placing: HoldPlan, now_us: int) -> None:
        """Reduce the holds for changes by the amount that the job's own hold gets now."""
        for extra in extras:
            if extra.payer != placing.payer:
                continue
            left = extra.remaining - placing.amount
            if left > 0:
                extra.amount = left
                self.shrink(extra, left)
            else:
                self.give_back(extra, now_us, why="the queue shows the change")

    def _mark_changed(self, hold: OpenHold, now_us: int) -> None:
        """Record that the gate accepted a change of a job."""
        hold.changed_us = now_us
        self.purses.changed[hold.id] = hold
        self.store.update(hold)

    def note_poll(self, cluster: str, began_us: int) -> None:
        """Record that all jobs of a poll were confirmed and covered."""
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
        covered, before = self.store.covered(hold)
        known, array = self.store.changes(hold), job.array
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
        kept, of_tasks = [], set()
        if before is not None:
            # Slurm computes what the queue shows: keep the requests that match it.
            kept = self._match_queue(hold, before, known, shown)
            kept += self._list_unshown(before, known, shown)
            of_tasks = list_task_descriptions(before, known)
        job, *others = dict.fromkeys(
            msgspec.structs.replace(description, admin_comment="", job_id=0, array=array)
            for description in (*kept, *shown)
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
        if changes != known:
            self.store.put_changes(hold, changes)
        if hold.changed_us:
            hold.changed_us = 0
            self.purses.changed.pop(hold.id, None)
            self.store.update(hold)
        if covered is not None and job != before:
            self.store.describe(hold, covered, job)
        return True

    def list_possible(self, hold: OpenHold, claim: CoverRequest) -> list[JobRequest]:
        """List requests that a job may have but the queue cannot show.

        slurmctld may apply part of an update that it rejects, and squeue shows a waiting array
        task like its array.
        """
        before, changes = self.store.covered(hold)[1], self.store.changes(hold)
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
        asked = list_shown_descriptions(before, changes)
        known_nodes = max(job.min_nodes or 1 for job in (before, *changes.tasks))
        found = {
            add_unshown_requests(job, request, _get_unshown_nodes(request, known_nodes, changes))
            for request in asked
            for job in shown
        }
        return list(found.difference(shown))

    def _match_queue(
        self,
        hold: OpenHold,
        before: JobRequest,
        changes: PendingChanges,
        shown: Sequence[JobRequest],
    ) -> list[JobRequest]:
        """List the known requests that match what the queue shows, with the shown time limits."""
        found: list[JobRequest] = []
        for asked in list_shown_descriptions(before, changes):
            try:
                most = self.ground.quote(hold.cluster, asked, hold.created_us).tres
            except (NoRate, NoEstimate):
                most = {}
            limits = [job.time_limit_min or 0 for job in shown if is_compatible(asked, job, most)]
            if limits and asked.time_limit_min:
                found.append(set_limit(asked, max(limits) if min(limits) > 0 else min(limits)))
            elif limits:
                found.append(asked)
        return found

    def _comment(self, job: JobRequest, hold: OpenHold) -> str:
        """Return a job's admin_comment with the token of its hold."""
        made = token.make_token(
            self.secret,
            hold.id,
            hold.amount,
            hold.expires_us // 1_000_000,
            hold.account,
            hold.cluster,
            hold.uid,
        )
        return f"{token.remove_tokens(job.admin_comment)} {made}".lstrip()

    def _note(
        self, ask: PluginRequest, decision: Decision, now_us: int, *, passed: str = ""
    ) -> None:
        """Record a rejection, real or in mode observe; log an error if a rate is missing.

        ``passed``: why the request passed although it would have been rejected; "" otherwise.
        """
        if decision.is_alarming:
            log.error("cluster %s: %s", ask.cluster, decision.short)
        is_told = decision.mode == "observe" or not decision.ok or bool(passed)
        if not decision.short or not (is_told or decision.qos or decision.partition):
            return
        seq = self.store.fact_seq + 1
        quote = decision.quote
        refusal = RejectedJob(
            id=f"gate:{seq}",
            at=to_datetime(now_us),
            mode=decision.mode,
            cluster=ask.cluster,
            uid=ask.job.uid,
            user=decision.user,
            account=decision.account,
            partition=(quote.partition if quote else "") or ask.job.partition[:LONGEST_TEXT],
            job_id=ask.job.job_id,
            amount=quote.amount if quote else 0,
            why=f"{passed}: {decision.short}" if passed else decision.short,
        )
        self.store.put_fact(
            GateFact(seq=seq, kind=REFUSAL, at_us=now_us, cluster=ask.cluster, refusal=refusal)
        )

    # Holds

    def _new(self, cluster: str, decision: Decision, now_us: int) -> OpenHold:
        """Make a hold from a decision, without storing it."""
        placing = _get_plan(decision)
        return OpenHold(
            number=self.store.next_number(),
            id=token.make_hold_id(),
            cluster=cluster,
            account=placing.account,
            payer=placing.payer,
            uid=placing.job.uid,
            user=decision.user,
            amount=placing.amount,
            remaining=placing.amount,
            shares=placing.shares,
            created_us=now_us,
        )

    def _place(self, hold: OpenHold, decision: Decision, now_us: int, *, why: str) -> None:
        """Add a decided hold to memory and database; undo the former if the latter fails."""
        placing = _get_plan(decision)
        self.purses.add(hold)
        try:
            self._prove(decision, now_us)
            self.put_down(hold, placing.quote, placing.job, now_us, why=why)
        except Exception:
            self.purses.drop(hold)
            raise

    def put_down(
        self, hold: OpenHold, quote: Quote | None, job: JobRequest | None, now_us: int, *, why: str
    ) -> None:
        """Write a new hold to the database, and a fact to the outbox."""
        self.store.insert(hold, quote, job)
        self.tell(PLACED, hold, hold.amount, now_us, why=why)

    def _enlarge(
        self, hold: OpenHold, decision: Decision, now_us: int, *, why: str, is_whole: bool = False
    ) -> None:
        """Enlarge a hold as decided; with ``is_whole`` the decision is on the remaining tasks."""
        placing = _get_plan(decision)
        before = (hold.account, hold.remaining, hold.shares, hold.amount)
        if placing.is_moved:
            remaining, shares = placing.amount, placing.shares
        else:
            remaining = hold.remaining + placing.amount
            shares = self.purses.more(hold, placing.shares)
        self.purses.resize(hold, remaining, shares, account=placing.account)
        hold.amount = remaining if is_whole else hold.amount + remaining - before[1]
        try:
            self._prove(decision, now_us)
            self.store.update(hold)
            asked = self.store.covered(hold)[1] if is_whole else None
            if asked is not None:
                job = msgspec.structs.replace(asked, array=placing.job.array)
            else:
                job = placing.job
            self.store.describe(hold, placing.quote, job)
            self.tell(PLACED, hold, remaining - before[1], now_us, why=why)
        except Exception:
            self.purses.resize(hold, before[1], before[2], account=before[0])
            hold.amount = before[3]
            raise

    def _prove(self, decision: Decision, now_us: int) -> None:
        """Raise OverdrawError if an accepted hold makes balance + credit limit - holds negative."""
        if not decision.is_bound:
            return
        payer = _get_plan(decision).payer
        left = self.purses.available(payer, now_us)
        if left < 0:
            raise OverdrawError(
                f"a hold would have taken account {payer} to "
                f"{format_money(left, self.ground.unit)}: "
                "nothing was held; run 'steward bank check'",
                payer,
            )

    def shrink(self, hold: OpenHold, remaining: int) -> None:
        """Reduce a hold to this remainder."""
        shares = self.purses.less(hold, hold.remaining - remaining)
        self.purses.resize(hold, remaining, shares)
        self.store.update(hold)

    def give_back(
        self,
        hold: OpenHold,
        now_us: int,
        *,
        why: str,
        kind: str = RELEASED,
        amount: int | None = None,
    ) -> int:
        """Release or settle a hold; return its remainder, micro-SU."""
        for extra in self.extras(hold):
            self.give_back(extra, now_us, why=why)
        remained = hold.remaining
        self.purses.drop(hold)
        self._extras.pop(hold.id, None)
        if hold.job_id:
            self._grants.pop((hold.cluster, hold.job_id), None)
            self._forget_allowance((hold.cluster, hold.job_id))
        self.store.delete(hold)
        hold.remaining = 0
        self.tell(kind, hold, remained if amount is None else amount, now_us, why=why)
        return remained

    def tell(self, kind: str, hold: OpenHold, amount: int, now_us: int, *, why: str) -> None:
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
        hold = self._new(cluster, decision, now_us)
        hold.origin = "queue"
        hold.job_id = job_id
        hold.confirmed = True
        hold.started = is_started
        hold.created_us = first_submit_us or now_us
        self._place(hold, decision, now_us, why="found in the queue")
        return hold

    def enlarge_decided(self, hold: OpenHold, decision: Decision, now_us: int) -> None:
        """Enlarge the hold of a job that is in the queue."""
        self._enlarge(hold, decision, now_us, why="found in the queue", is_whole=True)


def _get_raw_job_id(ask: PluginRequest) -> int:
    """Return the raw job id of a change; for a het component ``7+1`` its own id."""
    leader, _, offset = ask.jobs.partition("+")
    is_component = leader.isdecimal() and offset.isdecimal() and len(offset) <= _MOST_OFFSET_DIGITS
    return ask.job.job_id + int(offset) if is_component else ask.job.job_id


def _get_unshown_nodes(asked: JobRequest, known_nodes: int, changes: PendingChanges) -> int:
    """Return up to how many nodes a job may request although the queue shows fewer.

    A change raises them, or the former poll left them possible.
    """
    nodes = asked.min_nodes or 1
    return nodes if nodes > known_nodes else changes.nodes


def _rank_decision(decision: Decision) -> tuple[bool, int]:
    """Return a sort key: rejections first, then the most expensive."""
    return decision.ok, -decision.quote.amount if decision.quote is not None else 0


def _get_plan(decision: Decision) -> HoldPlan:
    if decision.placing is None:
        raise AssertionError("nothing was decided to be held")
    return decision.placing
