"""Synchronize the gate's holds with the ledger, the queue and time.

Steward's own processes report events; each call runs within one transaction of gate.db, see
`holds.py`. Reading order:

- `AllocationMover` moves holds from ended allocations to active ones;
- `HoldSync` applies ledger balances, confirmations from polls, requests of holds for queued jobs,
  settlements, releases and reservations; its `tick` expires holds;
- `HoldRecovery` rebuilds missing holds from the tokens in the jobs' admin_comment
  (`list_jobs_with_tokens`, `rebuild_holds`): if gate.db was lost, if a power loss took its last
  commits, and if another host's gate decided until now. Only tokens with a valid MAC count.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.bank.errors import BankRefused, BankUsage, NoEstimate
from steward.bank.estimate import describe_record
from steward.bank.gate import token
from steward.bank.gate.admission import AdmissionCase, HoldPlan, complete_description
from steward.bank.gate.balances import OpenHold
from steward.bank.gate.holds import CONFIRMED, POLL_MARGIN_US, SETTLED, HoldKeeper
from steward.bank.gate.requests import HoldReply, HoldRequest, ShownJob, UnusedReply
from steward.bank.gate.vain_holds import MOST_COUNTED_VAIN_S
from steward.bank.money import format_money
from steward.bank.records import AllocationBooks, GateBooks, Hold, JobRequest, Quote, Settlement
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.slurm import Slurm
from steward.slurm.job_states import FINISHED, WAITING


class AllocationMover:
    """Move holds between allocations, within one transaction of the store.

    A waiting job's hold moves when its allocation ends. In an array each task counts alone: running
    tasks are paid by the allocation on which they started, the others by the next.

    Args:
        keeper: The gate's state.
    """

    def __init__(self, keeper: HoldKeeper) -> None:
        self._keeper = keeper
        self._ended_by_hold: dict[str, set[int]] = {}

    def move(self, allocations: set[int], now_us: int) -> None:
        """Move holds of waiting jobs from these allocations to the active ones."""
        balances = self._keeper.balances
        for number in allocations:
            for hold in list(balances.holds_by_allocation.get(number, {}).values()):
                if hold.origin == "transfer":
                    continue  # it is released soon, or expires
                if not hold.started:
                    self._redraw(hold, now_us)
                elif self._get_quote(hold).tasks > 1:
                    self._ended_by_hold.setdefault(hold.id, set()).add(number)
        balances.lapsed_allocations &= balances.holds_by_allocation.keys()

    def fund_stranded(self, now_us: int) -> None:
        """Give SU that have become available to stranded holds, the oldest first."""
        for hold in list(self._keeper.balances.stranded_holds.values()):
            if self._keeper.is_enforced(hold):
                self._redraw(hold, now_us)

    def _redraw(self, hold: OpenHold, now_us: int) -> None:
        """Place a hold on the allocations that can pay now; strand it if none can."""
        balances = self._keeper.balances
        before = hold.shares
        balances.resize(hold, hold.remaining, ())
        can_pay = balances.get_available(hold.payer, now_us) >= hold.remaining
        if can_pay or self._keeper.rules.is_exempt(hold.cluster, hold.uid, hold.user):
            balances.resize(
                hold, hold.remaining, balances.split_amount(hold.payer, hold.remaining, now_us)
            )
        if hold.shares != before:
            self._keeper.store.update(hold)
            if not hold.shares:
                log.warning(
                    "job %d of cluster %s: no allocation of account %s can pay for it now",
                    hold.job_id,
                    hold.cluster,
                    hold.payer,
                )

    def list_stranded(self) -> list[Hold]:
        """List holds that no allocation can pay, of jobs on which the bank may act."""
        keeper = self._keeper
        stranded = keeper.balances.stranded_holds.values()
        return [keeper.store.make_record(hold) for hold in stranded if keeper.is_enforced(hold)]

    def _get_quote(self, hold: OpenHold) -> Quote:
        return self._keeper.store.read_covered(hold)[0] or Quote(amount=hold.amount)

    def sum_started(self, number: int) -> int:
        """Sum the holds of started jobs on an allocation, micro-SU."""
        holds = self._keeper.balances.holds_by_allocation.get(number, {}).values()
        return sum(dict(hold.shares)[number] for hold in holds if hold.started)

    def list_lingering(self) -> list[Hold]:
        """List holds of arrays with started tasks that are still on an ended allocation."""
        balances = self._keeper.balances
        holds = []
        for hold_id, ended in list(self._ended_by_hold.items()):
            hold = balances.holds.get(hold_id)
            # A later task may take the share of one that still runs: see part().
            funded = hold and {
                allocation.number
                for allocation in balances.list_allocations(hold.payer)
                if allocation.balance > 0
            }
            if hold is None or not (ended & dict(hold.shares).keys() or ended & (funded or set())):
                del self._ended_by_hold[hold_id]
            else:
                holds.append(self._keeper.store.make_record(hold))
        return holds

    def split_array_hold(self, hold: OpenHold, starts: Sequence[int], now_us: int) -> bool:
        """Split an array's hold: ended allocations keep only the share of tasks started on them.

        The other tasks' share is placed on active allocations; what these cannot pay is released.

        Args:
            hold: The array's hold.
            starts: Start times of its running tasks, µs since the epoch.
            now_us: The time, µs since the epoch.

        Returns:
            Whether the whole amount is still held.
        """
        ended = self._ended_by_hold.get(hold.id)
        if not ended:
            return True
        balances, before = self._keeper.balances, hold.remaining
        shares = self._compute_kept_shares(hold, ended, starts, now_us)
        rest = before - sum(share for _, share in shares)
        for number, share in hold.shares:
            if number not in ended and rest:
                shares.append((number, min(share, rest)))
                rest -= min(share, rest)
        if tuple(shares) == hold.shares:
            return True
        balances.resize(hold, before - rest, tuple(shares))
        can_pay = balances.get_available(hold.payer, now_us) >= rest
        is_exempt = self._keeper.rules.is_exempt(hold.cluster, hold.uid, hold.user)
        if rest and (can_pay or is_exempt):
            drawn = balances.split_amount(hold.payer, rest, now_us)
            balances.resize(hold, before, balances.add_shares(hold, drawn))
        self._keeper.store.update(hold)
        return hold.remaining == before or not self._keeper.is_enforced(hold)

    def _compute_kept_shares(
        self, hold: OpenHold, ended: set[int], starts: Sequence[int], now_us: int
    ) -> list[tuple[int, int]]:
        """Return the shares on ended allocations; each task counts on the first that it fits."""
        balances = self._keeper.balances
        books = {item.number: item for item in balances.list_allocations(hold.payer)}
        per_task, old_shares = self._get_quote(hold).per_task, dict(hold.shares)
        shares: list[tuple[int, int]] = []
        total = 0
        for number in sorted(
            ended, key=lambda item: (item not in books, _get_end_us(books.get(item)))
        ):
            end_us = _get_end_us(books.get(number)) or now_us
            needed = per_task * sum(1 for start_us in starts if start_us < end_us)
            # A later task may have ended first: restore what its charge took.
            available = old_shares.get(number, 0)
            available += max(0, balances.free(books[number])) if number in books else 0
            share = max(0, min(needed - total, hold.remaining - total, available))
            total += share
            shares += [(number, share)] * bool(share)
        return shares


def _get_end_us(allocation: AllocationBooks | None) -> int:
    """Return when an allocation ends; 0 for none."""
    return allocation.end_us if allocation else 0


log = logging.getLogger(__name__)

_ALLOCATION_ENDED: Final = (
    "Steward: insufficient funds: the allocation of its SU hold has ended, and no other "
    "allocation of its account can pay"
)
RESERVATION_US: Final = 120_000_000
"""Lifetime of a reservation of SU that are to leave an account, in µs."""


def _is_of_same_job(queue_hold: OpenHold | None, hold: OpenHold) -> bool:
    """Return True if a hold from the queue and an unconfirmed hold are for one job.

    The job was shown without its token first. An older hold is of a former job with the same id.
    """
    return (
        queue_hold is not None
        and queue_hold.origin == "queue"
        and queue_hold.confirmed
        and not (hold.confirmed or hold.siblings)
        and queue_hold.cluster == hold.cluster
        and queue_hold.uid == hold.uid
        and queue_hold.created_us >= hold.created_us - POLL_MARGIN_US
    )


class HoldSync:
    """Apply balances, confirmations, claims and settlements to the gate's holds.

    Args:
        keeper: The gate's state.
    """

    def __init__(self, keeper: HoldKeeper) -> None:
        self._keeper = keeper
        self.allocation_mover = AllocationMover(keeper)
        self.next_change_us = 0
        """When the next allocation begins or ends, so that :meth:`tick` is due."""

    # Ledger balances

    def apply_books(self, books: GateBooks, now_us: int) -> int:
        """Apply an update from the ledger; return the position that is known then.

        An update that does not follow the known position is ignored: the sender learns from the
        reply where to continue.
        """
        balances = self._keeper.balances
        store = self._keeper.store
        position = balances.position
        if not books.whole and (books.after > position or books.seq < position):
            return position
        changed = balances.apply_books(books)
        if books.whole:
            # A ledger restored from a backup counts from an earlier position.
            balances.position = books.seq
        store.put_accounts(books, changed)
        if balances.position != position:
            store.set_number("position", balances.position)
        if changed:
            self.allocation_mover.move(balances.find_ended(now_us, changed), now_us)
        self.allocation_mover.fund_stranded(now_us)
        return balances.position

    def tick(self, now_us: int) -> None:
        """Expire holds, and move holds when allocations begin or end."""
        balances = self._keeper.balances
        if now_us >= self.next_change_us:
            self.allocation_mover.move(balances.find_ended(now_us), now_us)
            self.allocation_mover.fund_stranded(now_us)
        self.next_change_us = balances.get_next_change_us(now_us)
        expired = [
            hold
            for hold in balances.unconfirmed_holds.values()
            if hold.expires_us and hold.expires_us <= now_us
        ]
        for hold in expired:
            self._keeper.release(hold, now_us, why="expired without confirmation")
        self._keeper.expire_grants(now_us)

    # Jobs in the queue

    def confirm(self, jobs: Sequence[ShownJob], now_us: int) -> list[Hold | None]:
        """Confirm jobs that Slurm shows; return the hold of each, None if no hold covers it."""
        return [self._confirm_job(job, now_us) for job in jobs]

    def _confirm_job(self, job: ShownJob, now_us: int) -> Hold | None:
        """Confirm one job's hold; return it, None if no hold covers the job."""
        keeper = self._keeper
        key = (job.cluster, job.job_id)
        hold = self._find_by_token(job.admin_comment, job.job_id, job.uid)
        queue_hold = keeper.balances.hold_by_job.get(key)
        if hold is None or _is_of_same_job(queue_hold, hold):
            if hold is not None:
                keeper.release(hold, now_us, why="its job has a hold from the queue")
            hold = queue_hold
        if hold is None or hold.uid != job.uid:
            return None
        keeper.expire_grant(key, job.restarts, now_us)
        self._confirm_hold(hold, job.job_id, now_us)
        if job.started and not hold.started:
            self._start(hold, now_us)
            keeper.store.update(hold)
        return keeper.store.make_record(hold)

    def _confirm_hold(self, hold: OpenHold | None, job_id: int, now_us: int) -> None:
        """Confirm a job's hold, if it has one that is not confirmed yet."""
        if hold is not None and not hold.confirmed:
            self._keeper.balances.confirm(hold, job_id)
            self._keeper.write_fact(
                CONFIRMED, hold, hold.remaining, now_us, why="Slurm has its job"
            )
            self._keeper.store.update(hold)

    def _start(self, hold: OpenHold, now_us: int) -> None:
        """Mark a hold's job as started: it will be charged, whatever its account has."""
        hold.started = True
        if hold.is_stranded and self._keeper.is_enforced(hold):
            balances = self._keeper.balances
            balances.resize(
                hold, hold.remaining, balances.split_amount(hold.payer, hold.remaining, now_us)
            )

    def release_unused(self, reply: UnusedReply, now_us: int) -> None:
        """Release the hold of a submit whose reply came too late, unless a job has its token."""
        hold = self._find_by_token(reply.admin_comment, 0, reply.uid)
        if hold is None or hold.cluster != reply.cluster or hold.confirmed or hold.siblings:
            return
        # Not in vain: the user is not to blame for a late reply.
        self._keeper.release(hold, now_us, why="the reply to the submit came too late")

    def _find_by_token(self, admin_comment: str, job_id: int, uid: int) -> OpenHold | None:
        """Find the hold whose genuine token a job's admin_comment holds."""
        for hold_token in token.find_tokens(admin_comment):
            hold = self._keeper.balances.holds.get(hold_token.id)
            if (
                hold is not None
                and hold.job_id in (0, job_id)
                and token.is_genuine(hold_token, self._keeper.secret, hold.cluster, uid)
            ):
                return hold
        return None

    def record_poll(self, cluster: str, began_us: int, now_us: int) -> int:
        """Record a complete poll; void older holds whose jobs it does not show."""
        self._keeper.note_poll(cluster, began_us)
        void = [
            hold
            for hold in self._keeper.balances.unconfirmed_holds.values()
            if hold.cluster == cluster
            and hold.origin == "submit"
            and hold.created_us < began_us - POLL_MARGIN_US
            and hold.parent not in self._keeper.balances.changed_holds
        ]
        self._keeper.vain_holds.drop_decayed(now_us)
        self._void(void, now_us, why="Slurm has no such job")
        return len(void)

    def _void(self, holds: Sequence[OpenHold], now_us: int, *, why: str) -> None:
        """Release holds that were placed in vain, and count them against their users."""
        vain: dict[tuple[str, int], float] = {}
        for hold in holds:
            key = hold.payer, hold.uid
            held_s = min(MOST_COUNTED_VAIN_S, (now_us - hold.created_us) / 1e6)
            vain[key] = vain.get(key, 0.0) + hold.remaining * held_s
            self._keeper.release(hold, now_us, why=why)
        vain_holds = self._keeper.vain_holds
        for (payer, uid), amount_s in vain.items():
            free = max(1, self._keeper.balances.get_available(payer, now_us))
            vain_holds.add(payer, uid, min(MOST_COUNTED_VAIN_S, amount_s / free), now_us)

    def _describe(
        self,
        hold: OpenHold | None,
        claim: HoldRequest,
        job: JobRequest,
        quote: Quote | None,
        now_us: int,
    ) -> None:
        """Store a job's description from the queue; void holds for changes that it lacks."""
        if hold is not None and self._keeper.describe(hold, job, quote, claim.tasks):
            self._void(
                self._keeper.list_extras(hold), now_us, why="the queue does not show the change"
            )

    def place_hold(self, claim: HoldRequest, user: str, now_us: int) -> HoldReply:
        """Place or adjust the hold of a queued job, and describe the job as the queue shows it.

        Raises:
            NoEstimate: The gate has no model of the cluster, so the job cannot be priced.
        """
        keeper = self._keeper
        if keeper.rules.get_estimator(claim.cluster) is None:
            raise NoEstimate(
                f"the gate has no state of cluster {claim.cluster} yet: try again after the "
                "next poll",
                claim.cluster,
            )
        hold = keeper.balances.hold_by_job.get((claim.cluster, claim.job_id))
        hold = hold or self._find_unconfirmed(claim)
        if hold is not None and claim.starts is not None:
            is_paid = self.allocation_mover.split_array_hold(hold, claim.starts, now_us)
            return self._make_reply(hold, is_paid=is_paid, why="" if is_paid else _ALLOCATION_ENDED)
        allowance = keeper.find_allowance((claim.cluster, claim.job_id), now_us)
        is_lenient = claim.mode_credit or allowance is not None
        case = msgspec.structs.replace(
            keeper.decision_maker.build_case(
                claim.cluster, claim.description, user, now_us, is_lenient=is_lenient
            ),
            first_submit_us=claim.first_submit_us or now_us,
            is_started=claim.started,
            is_seen=True,
            hold=hold,
        )
        objection = (
            None if case.mode == "off" else keeper.decision_maker.find_account_objection(case)
        )
        # A running job is charged to its account, even if its user may not use it.
        is_owed = claim.started and claim.mode_credit and case.account in keeper.balances.accounts
        if case.mode == "off" or (objection is not None and not is_owed):
            self._confirm_hold(hold, claim.job_id, now_us)
            self._describe(hold, claim, case.job, None, now_us)
            return self._make_reply(
                hold, is_paid=case.free_pass or not objection, why=objection or ""
            )
        if hold is not None and case.account != hold.account and not keeper.is_settled(hold):
            # The job may have been moved back since: both accounts hold for it.
            return self._make_reply(hold, is_paid=True, why="")
        possible = keeper.list_possible(hold, claim) if hold is not None else []
        with keeper.without_extras(hold) as extras:
            decision = max(
                (
                    keeper.decision_maker.decide_hold(msgspec.structs.replace(case, job=job))
                    for job in (
                        case.job,
                        *(complete_description(hold, job) for job in possible if hold),
                    )
                ),
                key=lambda decision: decision.quote.amount if decision.quote else -1,
            )
        plan = decision.plan
        self._confirm_hold(hold, claim.job_id, now_us)
        if plan is None:
            self._describe(hold, claim, case.job, None, now_us)
            if hold is None and not decision.ok and not claim.started:
                hold = self._describe_unpaid(claim, case, now_us)
            return self._make_reply(hold, is_paid=decision.ok, why=decision.short)
        if hold is None:
            hold = keeper.place_decided(
                claim.cluster,
                decision,
                now_us,
                job_id=claim.job_id,
                is_started=claim.started,
                first_submit_us=claim.first_submit_us,
            )
        else:
            if plan.amount:
                keeper.lessen_extras(extras, plan, now_us)
                keeper.enlarge_decided(hold, decision, now_us)
            elif claim.is_exact:
                self._shrink(hold, plan, is_started=claim.started)
            self._describe(hold, claim, case.job, plan.quote, now_us)
        if claim.started and not hold.started:
            self._start(hold, now_us)
            keeper.store.update(hold)
        return self._make_reply(hold, is_paid=True, why="")

    def _find_unconfirmed(self, claim: HoldRequest) -> OpenHold | None:
        """Find the unconfirmed hold whose token a queued job has.

        jobs.db may show a job before the event that confirms its hold is applied.
        """
        job = claim.description
        hold = self._find_by_token(job.admin_comment, claim.job_id, job.uid)
        return hold if hold is not None and hold.cluster == claim.cluster else None

    def _describe_unpaid(
        self, claim: HoldRequest, case: AdmissionCase, now_us: int
    ) -> OpenHold | None:
        """Place an empty hold for an unaffordable job, to record its request.

        With it, the gate decides on the job's release, from any sender.
        """
        keeper = self._keeper
        held = msgspec.structs.replace(case.job, held=True)
        decision = keeper.decision_maker.decide_hold(msgspec.structs.replace(case, job=held))
        if decision.plan is None:
            return None
        return keeper.place_decided(
            claim.cluster,
            decision,
            now_us,
            job_id=claim.job_id,
            is_started=False,
            first_submit_us=claim.first_submit_us,
        )

    def _shrink(self, hold: OpenHold, plan: HoldPlan, *, is_started: bool) -> None:
        """Shrink a hold to the need of the job as the queue shows it."""
        keeper = self._keeper
        if plan.job.array and hold.started:
            # A time limit lowered while tasks run frees nothing: see billing.derive_use.
            before = keeper.store.read_covered(hold)[0]
            per_task = before.per_task if before is not None else 0
            least = max(plan.needed, plan.quote.tasks * per_task)
            if least < hold.remaining:
                keeper.shrink(hold, least)
            return
        if is_started or hold.started or not keeper.is_settled(hold):
            # A started job keeps its hold until it is charged, and a poll from before a change must
            # not undo it.
            return
        if plan.needed < hold.remaining:
            keeper.shrink(hold, plan.needed)
            hold.amount = plan.needed
            description = keeper.store.read_covered(hold)[1] or plan.job
            description = msgspec.structs.replace(description, array=plan.job.array)
            keeper.store.update_description(hold, plan.quote, description)

    def _make_reply(self, hold: OpenHold | None, *, is_paid: bool, why: str) -> HoldReply:
        record = self._keeper.store.make_record(hold) if hold is not None else None
        return HoldReply(hold=record, is_paid=is_paid, why=why)

    # Charges and reservations

    def settle(
        self, settlements: Sequence[Settlement], books: GateBooks | None, now_us: int
    ) -> int:
        """Deduct charges from their holds; return the last settlement that was applied."""
        keeper = self._keeper
        before = keeper.settled
        for settlement in sorted(settlements, key=lambda settlement: settlement.seq):
            if settlement.seq <= keeper.settled:
                continue
            keeper.settled = settlement.seq
            hold = keeper.balances.holds.get(settlement.hold)
            if hold is not None:
                self._settle(hold, settlement, now_us)
        if keeper.settled != before:
            keeper.store.set_number("settled", keeper.settled)
        if books is not None:
            self.apply_books(books, now_us)
        return keeper.settled

    def _settle(self, hold: OpenHold, settlement: Settlement, now_us: int) -> None:
        """Deduct one settlement from its hold; the final one closes it."""
        keeper = self._keeper
        why = settlement.charge or "it never ran"
        remaining = max(0, hold.remaining - max(settlement.amount, settlement.frees))
        if settlement.final:
            if remaining:
                keeper.shrink(hold, remaining)
                keeper.write_fact(SETTLED, hold, settlement.amount, now_us, why=why)
                keeper.release(hold, now_us, why="its job has ended")
            else:
                keeper.release(hold, now_us, why=why, kind=SETTLED, amount=settlement.amount)
            return
        keeper.shrink(hold, remaining)
        keeper.write_fact(SETTLED, hold, settlement.amount, now_us, why=why)

    def release(self, hold_id: str, why: str, books: GateBooks | None, now_us: int) -> int:
        """Release a hold; return its remainder, 0 if it was not open."""
        hold = self._keeper.balances.holds.get(hold_id)
        released = self._keeper.release(hold, now_us, why=why) if hold is not None else 0
        if books is not None:
            self.apply_books(books, now_us)
        return released

    def reserve(self, account: str, amount: int, why: str, allocation: int, now_us: int) -> Hold:
        """Hold SU that are to leave an account, so that no job spends them meanwhile.

        Raises:
            BankUsage: The account or allocation does not exist, or the amount is not positive.
            BankRefused: The amount is not available.
        """
        keeper = self._keeper
        balances = keeper.balances
        if account not in balances.accounts:
            raise BankUsage(
                f"the gate has no account {account} yet: try again in a few seconds", account
            )
        if amount <= 0:
            raise BankUsage(f"invalid amount for account {account}: give more than 0", account)
        of = {one.number: one for one in balances.list_allocations(account)}
        if allocation and allocation not in of:
            raise BankUsage(f"account {account} has no allocation {allocation}", account)
        free = balances.get_available(account, now_us) - balances.get_credit(account)
        shares = balances.split_amount(account, amount, now_us)
        if allocation:
            one = of[allocation]
            own = balances.free(one)
            # No job can spend an inactive allocation.
            is_active = one in balances.iter_active(account, now_us)
            free = min(free, own) if is_active else own
            shares = ((allocation, amount),)
        if free < amount:
            raise BankRefused(
                f"insufficient funds: account {account} has "
                f"{format_money(max(0, free), keeper.rules.unit)} available, the rest is held "
                "for jobs or spent",
                account,
            )
        hold = OpenHold(
            number=keeper.store.next_number(),
            id=token.make_hold_id(),
            origin="transfer",
            account=account,
            payer=account,
            amount=amount,
            remaining=amount,
            shares=shares,
            created_us=now_us,
            expires_us=now_us + RESERVATION_US,
        )
        balances.add(hold)
        keeper.insert_hold(hold, None, None, now_us, why=why)
        return keeper.store.make_record(hold)


_KEEP_ENDED_US: Final = 60_000_000
"""Lifetime of a rebuilt hold of an ended job, in µs, until its charge arrives."""


def list_jobs_with_tokens(settings: Settings, cluster: str) -> list[JobRecord]:
    """List the jobs of a cluster whose admin_comment holds any token.

    Raises:
        SlurmUnavailable: slurmctld does not answer.
    """
    queue = Slurm(cluster, settings.cluster[cluster]).queue()
    return [record for record in queue.records if token.find_tokens(record.admin_comment)]


def rebuild_holds(
    keeper: HoldKeeper, cluster: str, records: Iterable[JobRecord], now_us: int
) -> int:
    """Place the missing holds of these jobs; return their number.

    Call it within one transaction of the store.
    """
    rebuilt = 0
    for record in sorted(records, key=_rank_record):
        hold_token = token.find_genuine_token(
            record.admin_comment, keeper.secret, cluster, -1 if record.uid is None else record.uid
        )
        if hold_token is None:
            if record.restarts == 0:
                log.warning("job %d of cluster %s carries a forged token", record.job_id, cluster)
            continue
        if hold_token.id in keeper.balances.holds:
            continue
        job_hold = keeper.balances.hold_by_job.get((cluster, record.array_job_id or record.job_id))
        if job_hold is not None and job_hold.confirmed and job_hold.uid == record.uid:
            continue  # from the queue: the job was requeued, or shown without its token first
        _rebuild_hold(keeper, cluster, record, hold_token, now_us)
        rebuilt += 1
    return rebuilt


def _rank_record(record: JobRecord) -> int:
    """Rank an array's records: a waiting one describes it best, ended ones least."""
    if record.state in WAITING:
        return 0
    return 2 if record.state in FINISHED else 1


def _rebuild_hold(
    keeper: HoldKeeper, cluster: str, record: JobRecord, hold_token: token.HoldToken, now_us: int
) -> None:
    """Place the hold of a job from its token."""
    is_over = record.state in FINISHED
    payer = keeper.balances.get_payer(hold_token.account)
    hold = OpenHold(
        number=keeper.store.next_number(),
        id=hold_token.id,
        # An ended job's hold expires by time only: the next poll does not void it.
        origin="queue" if is_over else "submit",
        cluster=cluster,
        job_id=record.array_job_id or record.job_id,
        account=hold_token.account,
        payer=payer,
        uid=-1 if record.uid is None else record.uid,
        user=record.user,
        amount=hold_token.amount,
        remaining=hold_token.amount,
        shares=keeper.balances.split_amount(payer, hold_token.amount, now_us),
        confirmed=not is_over,
        started=record.state not in WAITING,
        created_us=to_micros(record.submit) if record.submit else now_us,
        expires_us=now_us + _KEEP_ENDED_US if is_over else 0,
    )
    description = describe_record(msgspec.structs.replace(record, admin_comment=""))
    keeper.balances.add(hold)
    keeper.insert_hold(hold, None, description, now_us, why="restored from its token")


class HoldRecovery:
    """Rebuild missing holds from the jobs' tokens, cluster by cluster, until each has answered.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.waiting = [
            name
            for name, cluster_settings in settings.cluster.items()
            if cluster_settings.asks_slurm and not cluster_settings.remote
        ]
        """Clusters that have not answered yet."""
        self._untried = max(1, len(self.waiting))

    @property
    def is_tried(self) -> bool:
        """Return True if every cluster was asked once."""
        return self._untried <= 0

    def run(self, keeper: HoldKeeper, now_us: int) -> None:
        """Ask the next cluster that has not answered; one per call, as it may be slow."""
        self._untried -= 1
        if not self.waiting:
            return
        cluster = self.waiting.pop(0)
        try:
            records = list_jobs_with_tokens(self._settings, cluster)
        except StewardError as error:
            # Asked again later; a slurmctld that is down sends no requests either.
            log.debug("cannot restore the holds of cluster %s yet: %s", cluster, error)
            self.waiting.append(cluster)
            return
        with keeper.store.transaction():
            rebuilt = rebuild_holds(keeper, cluster, records, now_us)
        if rebuilt:
            log.warning("cluster %s: restored %d holds from their jobs' tokens", cluster, rebuilt)
