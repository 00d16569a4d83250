"""Random transactions on a ledger, against a model of dictionaries.

The model has no postings: it has the balance of each allocation, and of each charge its amount and
the allocations that paid it. Its holds stand for those of the gate, which reserves SU before the
charge: as long as nothing else takes from an account, a job with a hold can be charged without
overdrawing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ledger.fixtures import BY, DAY, Clock, account, charge, keyed
from steward.bank.errors import BankRefused
from steward.bank.ledger import open_ledger
from steward.bank.ledger.ledger import Ledger
from steward.bank.records import AllocationShare, Charge
from steward.core.config import Settings

NAMES = ("chem", "phys")
CREDIT = {"chem": 0, "phys": 40}
USERS = ("ann", "bob")
ACCOUNTS = st.sampled_from(NAMES)
AMOUNTS = st.integers(1, 120)
PICKS = st.integers(0, 1_000_000)


@dataclass
class AllocationModel:
    account: str
    begin: datetime
    end: datetime | None
    rollover: str
    balance: int = 0

    def active(self, at: datetime) -> bool:
        return self.begin <= at and (self.end is None or at < self.end)


@dataclass
class Job:
    account: str
    user: str
    start: datetime
    amount: int = 0
    refunded: int = 0
    paid: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    shares: tuple[AllocationShare, ...] = ()

    @property
    def due(self) -> int:
        return max(0, self.amount - self.refunded)


class LedgerMachine(RuleBasedStateMachine):
    """Rules of the state machine; a subclass defines `fresh`, which returns an empty ledger."""

    fresh: ClassVar[Callable[[], Settings]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger: Ledger = open_ledger(type(self).fresh(), self.clock)
        self.allocations: dict[int, AllocationModel] = {}
        self.jobs: dict[int, Job] = {}
        self.issued = self.used = self.expired = self.adjusted = 0
        self.loose: set[str] = set()
        self.keys = 0
        with self.ledger.transaction() as t:
            for name in NAMES:
                account(t, name, credit_limit=CREDIT[name])
                found = t.allocations.get_open_ended(name)
                self.allocations[found.number] = AllocationModel(name, found.begin, None, "none")

    def teardown(self) -> None:
        found = self.ledger.check()
        self.ledger.close()
        assert not found

    # Queries of the model

    def of(self, name: str) -> list[int]:
        """Return an account's allocations, those that end first before the others."""
        mine = [
            number for number, allocation in self.allocations.items() if allocation.account == name
        ]
        late = (
            max(allocation.end for allocation in self.allocations.values() if allocation.end)
            if self.dated(name)
            else None
        )
        return sorted(
            mine,
            key=lambda n: (self.allocations[n].end or late, self.allocations[n].end is None, n),
        )

    def dated(self, name: str) -> list[int]:
        return [
            n
            for n, allocation in self.allocations.items()
            if allocation.account == name and allocation.end
        ]

    def open_ended(self, name: str) -> int:
        return next(
            n
            for n, allocation in self.allocations.items()
            if allocation.account == name and not allocation.end
        )

    def free(self, number: int) -> int:
        """Return the balance of an allocation less its SU holds."""
        held = sum(job.held.get(number, 0) for job in self.jobs.values())
        return max(0, self.allocations[number].balance) - held

    def pick(self, pick: int) -> int:
        return sorted(self.allocations)[pick % len(self.allocations)]

    # Transactions of people

    @rule(name=ACCOUNTS, amount=AMOUNTS, begin=st.integers(-2, 3), days=st.integers(1, 4))
    def allocate(self, name: str, amount: int, begin: int, days: int) -> None:
        rollover = "next" if amount % 2 else "none"
        start = self.clock.at + begin * DAY
        with self.ledger.transaction() as t:
            made = t.allocations.create(
                name,
                amount,
                BY,
                begin=start,
                end=start + days * DAY,
                rollover="next" if amount % 2 else "none",
            )
        self.allocations[made.number] = AllocationModel(
            name, start, start + days * DAY, rollover, amount
        )
        self.issued += amount

    @rule(amount=AMOUNTS, pick=PICKS, repeats=st.integers(1, 2))
    def deposit(self, amount: int, pick: int, repeats: int) -> None:
        number = self.pick(pick)
        self.keys += 1
        for _ in range(repeats):
            with self.ledger.transaction() as t:
                name = self.allocations[number].account
                t.transfers.deposit(name, amount, keyed(f"k{self.keys}"), allocation=number)
        self.allocations[number].balance += amount
        self.issued += amount

    @rule(amount=AMOUNTS, pick=PICKS)
    def withdraw(self, amount: int, pick: int) -> None:
        number = self.pick(pick)
        amount = min(amount, self.free(number))
        if amount <= 0:
            return
        with self.ledger.transaction() as t:
            t.transfers.withdraw(self.allocations[number].account, amount, BY, allocation=number)
        self.allocations[number].balance -= amount
        self.issued -= amount

    @rule(pick=PICKS, beyond=AMOUNTS)
    def withdraw_too_much(self, pick: int, beyond: int) -> None:
        number = self.pick(pick)
        amount = max(0, self.allocations[number].balance) + beyond
        try:
            with self.ledger.transaction() as t:
                t.transfers.withdraw(
                    self.allocations[number].account, amount, BY, allocation=number
                )
        except BankRefused:
            return
        raise AssertionError("it was given more than there is")

    @rule(amount=AMOUNTS, giver=PICKS, taker=PICKS)
    def transfer(self, amount: int, giver: int, taker: int) -> None:
        one, other = self.pick(giver), self.pick(taker)
        amount = min(amount, self.free(one))
        if one == other or amount <= 0:
            return
        with self.ledger.transaction() as t:
            t.transfers.transfer(
                self.allocations[one].account,
                self.allocations[other].account,
                amount,
                BY,
                source_allocation=one,
                target_allocation=other,
            )
        self.allocations[one].balance -= amount
        self.allocations[other].balance += amount

    @rule(name=ACCOUNTS, amount=st.integers(-60, 60).filter(bool))
    def adjust(self, name: str, amount: int) -> None:
        with self.ledger.transaction() as t:
            t.transfers.adjust(name, amount, BY)
        self.allocations[self.open_ended(name)].balance += amount
        self.adjusted -= amount
        if amount < 0:
            self.loose.add(name)

    # Life of jobs

    @rule(name=ACCOUNTS, amount=AMOUNTS, user=st.sampled_from(USERS))
    def hold(self, name: str, amount: int, user: str) -> None:
        """Admit a job if the available SU suffice, and start it at once."""
        left, held = amount, {}
        for number in self.of(name):
            if self.allocations[number].active(self.clock.at):
                held[number] = min(left, max(0, self.free(number)))
                left -= held[number]
        if left:
            return
        shares = tuple(
            AllocationShare(allocation=n, amount=part) for n, part in held.items() if part
        )
        number = len(self.jobs) + 1
        self.jobs[number] = Job(name, user, self.clock.at, held=held, shares=shares)

    @precondition(lambda self: any(sum(job.held.values()) for job in self.jobs.values()))
    @rule(pick=PICKS, percent=st.integers(0, 100), is_last=st.booleans())
    def charge_what_is_held(self, pick: int, percent: int, is_last: bool) -> None:
        open_holds = [n for n, job in self.jobs.items() if sum(job.held.values())]
        number = open_holds[pick % len(open_holds)]
        job = self.jobs[number]
        part = sum(job.held.values()) * percent // 100
        before = job.amount
        overdraw = self.post(number, before + part)
        if job.account not in self.loose:
            assert overdraw == 0, "it was held, and yet overdrew"
        if is_last:
            job.held = {}

    @rule(name=ACCOUNTS, amount=AMOUNTS, user=st.sampled_from(USERS))
    def charge_unasked(self, name: str, amount: int, user: str) -> None:
        number = len(self.jobs) + 1
        self.loose.add(name)
        self.jobs[number] = Job(name, user, self.clock.at)
        self.post(number, amount)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICKS, amount=st.integers(0, 120))
    def correct(self, pick: int, amount: int) -> None:
        number = pick % len(self.jobs) + 1
        if amount > self.jobs[number].amount:
            self.loose.add(self.jobs[number].account)
        self.post(number, amount)

    @precondition(lambda self: any(job.due for job in self.jobs.values()))
    @rule(pick=PICKS, percent=st.integers(1, 100))
    def refund(self, pick: int, percent: int) -> None:
        paid = [n for n, job in self.jobs.items() if job.due]
        number = paid[pick % len(paid)]
        job = self.jobs[number]
        amount = max(1, job.due * percent // 100)
        with self.ledger.transaction() as t:
            t.transfers.refund_charge(self.charge(number, 0).key, BY, amount=amount)
        job.refunded += amount
        self.give_back(job, amount)

    @rule(hours=st.integers(1, 60))
    def time_passes(self, hours: int) -> None:
        self.clock.go(hours=hours)

    @rule()
    def expire(self) -> None:
        kept: dict[int, int] = {}
        for job in self.jobs.values():
            for number, part in job.held.items():
                kept[number] = kept.get(number, 0) + part
        with self.ledger.transaction() as t:
            t.transfers.expire(BY, reserved=kept)
            assert t.transfers.expire(BY, reserved=kept) == []
        # As they end; what rolls on into one that has ended as well goes on with it.
        for number in sorted(
            self.allocations, key=lambda n: (self.allocations[n].end or self.clock.at, n)
        ):
            allocation = self.allocations[number]
            if allocation.end is None or allocation.end > self.clock.at:
                continue
            left = allocation.balance - kept.get(number, 0)
            if left <= 0:
                continue
            allocation.balance -= left
            ends = {n: self.allocations[n].end for n in self.dated(allocation.account)}
            later = [n for n, end in ends.items() if end and end > allocation.end]
            if allocation.rollover == "none":
                self.expired += left
            elif later:
                self.allocations[
                    min(later, key=lambda n: (self.allocations[n].begin, n))
                ].balance += left
            else:
                self.allocations[self.open_ended(allocation.account)].balance += left

    # Postings in ledger and model

    def charge(self, number: int, amount: int) -> Charge:
        job = self.jobs[number]
        return charge(
            amount,
            job.account,
            job_id=number,
            user=job.user,
            start=job.start,
            shares=job.shares,
        )

    def post(self, number: int, amount: int) -> int:
        """Charge a job in ledger and model, by one of the rules; return the overdrawn amount."""
        job = self.jobs[number]
        with self.ledger.transaction() as t:
            made = t.charges.post(self.charge(number, amount), BY)
        before = job.due
        job.amount = amount
        assert made.added == job.due - before
        if made.added < 0:
            self.give_back(job, -made.added)
            return 0
        left = made.added
        credit = CREDIT[job.account]
        open_ended = self.open_ended(job.account)
        below = max(0, -self.allocations[open_ended].balance - credit)
        limits = [(s.allocation, s.amount - job.paid.get(s.allocation, 0)) for s in job.shares]
        for where, most in [*limits, *((n, left) for n in self.of(job.account))]:
            if self.allocations[where].active(job.start):
                left -= self.pay(job, where, min(left, most, self.allocations[where].balance))
        self.pay(job, open_ended, left)
        assert {s.allocation: s.amount for s in made.shares} == {
            n: part for n, part in job.paid.items() if part
        }
        return max(0, -self.allocations[open_ended].balance - credit) - below

    def pay(self, job: Job, number: int, amount: int) -> int:
        if amount <= 0:
            return 0
        self.allocations[number].balance -= amount
        job.paid[number] = job.paid.get(number, 0) + amount
        job.held[number] = max(0, job.held.get(number, 0) - amount)
        self.used += amount
        return amount

    def give_back(self, job: Job, amount: int) -> None:
        self.used -= amount
        for number in reversed(self.of(job.account)):
            part = min(amount, job.paid.get(number, 0))
            self.allocations[number].balance += part
            job.paid[number] = job.paid.get(number, 0) - part
            amount -= part

    # Invariants

    @invariant()
    def the_ledger_is_as_the_model(self) -> None:
        with self.ledger.reading() as t:
            for name in NAMES:
                found = {e.number: e.balance for e in t.allocations.list_own(name, with_ended=True)}
                assert found == {n: self.allocations[n].balance for n in self.of(name)}
                spent = {e.user: e.spent for e in t.accounts.list_users(name) if e.spent}
                due: dict[str, int] = {}
                for job in self.jobs.values():
                    if job.account == name and job.due:
                        due[job.user] = due.get(job.user, 0) + job.due
                assert spent == due
                assert t.queries.get_statement(name).closing == sum(found.values())
            assert sum(each.amount for each in t.queries.sum_usage(())) == self.used
            assert t.check() == []

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        inside = sum(allocation.balance for allocation in self.allocations.values())
        assert inside + self.used + self.expired + self.adjusted == self.issued

    @invariant()
    def what_is_held_stays_within_the_means(self) -> None:
        for name in set(NAMES) - self.loose:
            assert self.allocations[self.open_ended(name)].balance >= 0


SETTINGS = hypothesis.settings(
    deadline=None,
    max_examples=25,
    stateful_step_count=25,
    suppress_health_check=list(hypothesis.HealthCheck),
)
