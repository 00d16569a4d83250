"""What becomes of holds once they are placed, as Steward's own processes tell the gate.

Each call is made within one transaction of the store, as ``keeper.py`` says.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from steward.bank.errors import BankRefused, BankUsage, NoEstimate
from steward.bank.gate import token
from steward.bank.gate.case import Case, Placing
from steward.bank.gate.deciding import of_hold
from steward.bank.gate.doubts import LOOK_S
from steward.bank.gate.keeper import CONFIRMED, LOOK_MARGIN_US, SETTLED, Keeper
from steward.bank.gate.moving import Moving
from steward.bank.gate.purses import Open
from steward.bank.gate.shapes import Claim, Covered, Seen
from steward.bank.money import show
from steward.bank.records import Books, Description, Hold, Quote, Settlement

log = logging.getLogger(__name__)

_ENDED: Final = (
    "Steward: the allocation that was to pay for it has ended, and no other of its account can"
)
RESERVED_US: Final = 120_000_000
"""Money that was to leave an account stays spoken for so long, in µs."""


class Upkeep:
    """Books, confirmations, settlements: all that follows a decision.

    Args:
        keeper: The gate's state.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.moving = Moving(keeper)
        self.turn_us = 0
        """When the next allocation begins or ends, so that :meth:`tick` is due."""

    # Books

    def books(self, books: Books, now_us: int) -> int:
        """Take news of the ledger in; the position that is known then.

        News that do not follow what is known are passed over: whoever tells them sees by
        the answer from where on to tell.
        """
        purses = self._keeper.purses
        store = self._keeper.store
        position = purses.position
        if not books.whole and (books.after > position or books.seq < position):
            return position
        changed = purses.put(books)
        if books.whole:
            # A ledger that was restored from a copy counts from an earlier position.
            purses.position = books.seq
        store.put_accounts(books, changed)
        if purses.position != position:
            store.set_number("position", purses.position)
        if changed:
            self.moving.move(purses.ended(now_us, changed), now_us)
        self.moving.fund(now_us)
        return purses.position

    def tick(self, now_us: int) -> None:
        """What comes with time alone: holds lapse, allocations end and begin."""
        purses = self._keeper.purses
        if now_us >= self.turn_us:
            self.moving.move(purses.ended(now_us), now_us)
            self.moving.fund(now_us)
        self.turn_us = purses.next_turn(now_us)
        late = [
            hold
            for hold in purses.unconfirmed.values()
            if hold.expires_us and hold.expires_us <= now_us
        ]
        for hold in late:
            self._keeper.give_back(hold, now_us, why="it was never confirmed")
        self._keeper.expire_grants(now_us)

    # Jobs

    def confirm(self, seen: Sequence[Seen], now_us: int) -> list[Hold | None]:
        """Slurm shows these jobs; the hold of each, None where none covers it."""
        return [self._confirmed(one, now_us) for one in seen]

    def _confirmed(self, seen: Seen, now_us: int) -> Hold | None:
        keeper = self._keeper
        key = (seen.cluster, seen.job_id)
        hold = self._of_token(seen) or keeper.purses.by_job.get(key)
        if hold is None or hold.uid != seen.uid:
            return None
        keeper.expire_grant(key, seen.restarts, now_us)
        is_news = not hold.confirmed or (seen.started and not hold.started)
        if not hold.confirmed:
            keeper.purses.confirm(hold, seen.job_id)
            keeper.tell(CONFIRMED, hold, hold.remaining, now_us, why="Slurm shows its job")
        if seen.started and not hold.started:
            self._start(hold, now_us)
        if is_news:
            keeper.store.update(hold)
        return keeper.store.whole(hold)

    def _start(self, hold: Open, now_us: int) -> None:
        """Its job runs, so that it will be charged, whatever its account has."""
        hold.started = True
        if hold.is_stranded and self._keeper.is_enforced(hold):
            purses = self._keeper.purses
            purses.resize(hold, hold.remaining, purses.draw(hold.payer, hold.remaining, now_us))

    def _of_token(self, seen: Seen) -> Open | None:
        for found in token.find(seen.admin_comment):
            hold = self._keeper.purses.holds.get(found.id)
            if (
                hold is not None
                and hold.job_id in (0, seen.job_id)
                and token.verify(found, self._keeper.secret, hold.cluster, seen.uid)
            ):
                return hold
        return None

    def looked(self, cluster: str, began_us: int, now_us: int) -> int:
        """The queue was seen whole: what was held before and is not in it, is void."""
        self._keeper.note_poll(cluster, began_us)
        void = [
            hold
            for hold in self._keeper.purses.unconfirmed.values()
            if hold.cluster == cluster
            and hold.origin == "submit"
            and hold.created_us < began_us - LOOK_MARGIN_US
            and hold.parent not in self._keeper.purses.changed
        ]
        self._keeper.doubts.forget(now_us)
        self._void(void, now_us, why="Slurm has no such job")
        return len(void)

    def _void(self, void: Sequence[Open], now_us: int, *, why: str) -> None:
        """Give back what was held for nothing, and count it against its user."""
        vain: dict[tuple[str, int], float] = {}
        for hold in void:
            key = hold.payer, hold.uid
            held_s = min(LOOK_S, (now_us - hold.created_us) / 1e6)
            vain[key] = vain.get(key, 0.0) + hold.remaining * held_s
            self._keeper.give_back(hold, now_us, why=why)
        doubts = self._keeper.doubts
        for (payer, uid), amount_s in vain.items():
            free = max(1, self._keeper.purses.available(payer, now_us))
            doubts.add(payer, uid, min(LOOK_S, amount_s / free), now_us)

    def _describe(
        self, hold: Open | None, claim: Claim, job: Description, quote: Quote | None, now_us: int
    ) -> None:
        """Take what the queue shows of a job, and void what its changes did not come to."""
        if hold is not None and self._keeper.describe(hold, job, quote, claim.tasks):
            self._void(self._keeper.extras(hold), now_us, why="the queue does not show the change")

    def cover(self, claim: Claim, user: str, now_us: int) -> Covered:
        """Hold for a job that is in the queue, as much as it needs.

        Raises:
            NoEstimate: Its cluster was never pictured, so nobody can tell what it needs.
        """
        keeper = self._keeper
        if keeper.ground.estimator(claim.cluster) is None:
            raise NoEstimate(
                f"the gate has no picture of cluster {claim.cluster} yet: try again",
                claim.cluster,
            )
        hold = keeper.purses.by_job.get((claim.cluster, claim.job_id))
        if hold is not None and claim.starts is not None:
            is_paid = self.moving.part(hold, claim.starts, now_us)
            return self._covered(hold, is_paid=is_paid, why="" if is_paid else _ENDED)
        allowance = keeper.allowance((claim.cluster, claim.job_id), now_us)
        is_lenient = claim.mode_credit or allowance is not None
        case = msgspec.structs.replace(
            keeper.deciding.case(
                claim.cluster, claim.description, user, now_us, is_lenient=is_lenient
            ),
            first_submit_us=claim.first_submit_us or now_us,
            is_started=claim.started,
            is_seen=True,
            hold=hold,
        )
        stranger = None if case.mode == "off" else keeper.deciding.stranger(case)
        # What runs is charged to its account, whoever may not use that.
        is_owed = claim.started and claim.mode_credit and case.account in keeper.purses.accounts
        if case.mode == "off" or (stranger is not None and not is_owed):
            self._describe(hold, claim, case.job, None, now_us)
            return self._covered(hold, is_paid=case.free_pass or not stranger, why=stranger or "")
        if hold is not None and case.account != hold.account and not keeper.is_settled(hold):
            # It may have been moved back since: both accounts hold for it.
            return self._covered(hold, is_paid=True, why="")
        possible = keeper.list_possible(hold, claim) if hold is not None else []
        with keeper.without_extras(hold) as extras:
            decision = max(
                (
                    keeper.deciding.cover(msgspec.structs.replace(case, job=job))
                    for job in (case.job, *(of_hold(hold, job) for job in possible if hold))
                ),
                key=lambda decision: decision.quote.amount if decision.quote else -1,
            )
        placing = decision.placing
        if placing is None:
            self._describe(hold, claim, case.job, None, now_us)
            if hold is None and not decision.ok and not claim.started:
                hold = self._describe_unpaid(claim, case, now_us)
            return self._covered(hold, is_paid=decision.ok, why=decision.short)
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
            if placing.amount:
                keeper.lessen_extras(extras, placing, now_us)
                keeper.enlarge_decided(hold, decision, now_us)
            elif claim.is_exact:
                self._shrink(hold, placing, is_started=claim.started)
            self._describe(hold, claim, case.job, placing.quote, now_us)
        if claim.started and not hold.started:
            self._start(hold, now_us)
            keeper.store.update(hold)
        return self._covered(hold, is_paid=True, why="")

    def _describe_unpaid(self, claim: Claim, case: Case, now_us: int) -> Open | None:
        """Hold nothing for a job that cannot be paid, but know what it asks for.

        So that the gate decides on its release, whoever sends that.
        """
        keeper = self._keeper
        held = msgspec.structs.replace(case.job, held=True)
        decision = keeper.deciding.cover(msgspec.structs.replace(case, job=held))
        if decision.placing is None:
            return None
        return keeper.place_decided(
            claim.cluster,
            decision,
            now_us,
            job_id=claim.job_id,
            is_started=False,
            first_submit_us=claim.first_submit_us,
        )

    def _shrink(self, hold: Open, placing: Placing, *, is_started: bool) -> None:
        """Hold no more than the queue shows that a job needs."""
        keeper = self._keeper
        if placing.job.array and hold.started:
            # A limit that is lowered while tasks run frees nothing: see using.use_of.
            before = keeper.store.covered(hold)[0]
            per_task = before.per_task if before is not None else 0
            least = max(placing.needed, placing.quote.tasks * per_task)
            if least < hold.remaining:
                keeper.shrink(hold, least)
            return
        if is_started or hold.started or not keeper.is_settled(hold):
            # What ran is charged, and a look from before a change must not undo it.
            return
        if placing.needed < hold.remaining:
            keeper.shrink(hold, placing.needed)
            hold.amount = placing.needed
            description = keeper.store.covered(hold)[1] or placing.job
            description = msgspec.structs.replace(description, array=placing.job.array)
            keeper.store.describe(hold, placing.quote, description)

    def _covered(self, hold: Open | None, *, is_paid: bool, why: str) -> Covered:
        whole = self._keeper.store.whole(hold) if hold is not None else None
        return Covered(hold=whole, is_paid=is_paid, why=why)

    # Money

    def settle(self, settlements: Sequence[Settlement], books: Books | None, now_us: int) -> int:
        """Take charges off their holds; the last settlement that was taken."""
        keeper = self._keeper
        before = keeper.settled
        for one in sorted(settlements, key=lambda one: one.seq):
            if one.seq <= keeper.settled:
                continue
            keeper.settled = one.seq
            hold = keeper.purses.holds.get(one.hold)
            if hold is not None:
                self._settle(hold, one, now_us)
        if keeper.settled != before:
            keeper.store.set_number("settled", keeper.settled)
        if books is not None:
            self.books(books, now_us)
        return keeper.settled

    def _settle(self, hold: Open, one: Settlement, now_us: int) -> None:
        keeper = self._keeper
        why = one.charge or "it never ran"
        left = max(0, hold.remaining - max(one.amount, one.frees))
        if one.final:
            if left:
                keeper.shrink(hold, left)
                keeper.tell(SETTLED, hold, one.amount, now_us, why=why)
                keeper.give_back(hold, now_us, why="its job is over")
            else:
                keeper.give_back(hold, now_us, why=why, kind=SETTLED, amount=one.amount)
            return
        keeper.shrink(hold, left)
        keeper.tell(SETTLED, hold, one.amount, now_us, why=why)

    def release(self, hold_id: str, why: str, books: Books | None, now_us: int) -> int:
        """Give a hold back; how much that was, 0 if it was not open."""
        hold = self._keeper.purses.holds.get(hold_id)
        given = self._keeper.give_back(hold, now_us, why=why) if hold is not None else 0
        if books is not None:
            self.books(books, now_us)
        return given

    def reserve(self, account: str, amount: int, why: str, allocation: int, now_us: int) -> Hold:
        """Keep money that is to leave an account from being spent meanwhile.

        Raises:
            BankUsage: There is no such account or allocation, or nothing is to leave.
            BankRefused: So much is not free.
        """
        keeper = self._keeper
        purses = keeper.purses
        if account not in purses.accounts:
            raise BankUsage(f"the gate knows no account {account} yet", account)
        if amount <= 0:
            raise BankUsage("the amount must be more than nothing", account)
        of = {one.number: one for one in purses.allocations(account)}
        if allocation and allocation not in of:
            raise BankUsage(f"account {account} has no allocation {allocation}", account)
        free = purses.available(account, now_us) - purses.credit(account)
        shares = purses.draw(account, amount, now_us)
        if allocation:
            one = of[allocation]
            own = purses.free(one)
            # What cannot be drawn on now is nobody else's to spend.
            is_active = one in purses.active(account, now_us)
            free = min(free, own) if is_active else own
            shares = ((allocation, amount),)
        if free < amount:
            raise BankRefused(
                f"account {account} has {show(max(0, free), keeper.ground.unit)} free: "
                "the rest is held for jobs, or spent",
                account,
            )
        hold = Open(
            number=keeper.store.next_number(),
            id=token.new_id(),
            origin="transfer",
            account=account,
            payer=account,
            amount=amount,
            remaining=amount,
            shares=shares,
            created_us=now_us,
            expires_us=now_us + RESERVED_US,
        )
        purses.add(hold)
        keeper.put_down(hold, None, None, now_us, why=why)
        return keeper.store.whole(hold)
