"""Random requests and polls in any order: no reply overdraws an account or loses a hold."""

import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harness.gate import CLUSTER, DAY_US, GateCore, job, now_us
from steward.bank.errors import BankRefused
from steward.bank.gate.requests import HoldRequest, ShownJob
from steward.bank.money import MICRO
from steward.bank.records import AccountBooks, AllocationBooks, GateBooks, Settlement

ACCOUNTS = ("chem", "phys")


class Gate(RuleBasedStateMachine):
    """Gate with a model of the ledger in a few lines."""

    def __init__(self) -> None:
        super().__init__()
        self.dir = tempfile.mkdtemp(prefix="steward-gate-")
        self.now = now_us()
        self.balances = {1: 60 * MICRO, 2: 40 * MICRO, 3: 50 * MICRO}
        self.ends = {1: self.now + DAY_US // 4, 2: 0, 3: 0}
        self.owners = {1: "chem", 2: "chem", 3: "phys"}
        self.credits = {"chem": 5 * MICRO, "phys": 0}
        self.site = GateCore(Path(self.dir))
        self.comments: dict[int, str] = {}
        self.overdrawing: set[str] = set()
        self.next_job = 1
        self.seq = 0
        self.push()

    def teardown(self) -> None:
        self.site.store.close()
        shutil.rmtree(self.dir)

    def books(self) -> tuple[AccountBooks, ...]:
        return tuple(
            AccountBooks(
                name=name,
                payer=name,
                credit=self.credits[name],
                allocations=tuple(
                    AllocationBooks(
                        number=number, balance=self.balances[number], end_us=self.ends[number]
                    )
                    for number, owner in self.owners.items()
                    if owner == name
                ),
            )
            for name in ACCOUNTS
        )

    def push(self) -> None:
        self.site.tell(*self.books(), at_us=self.now)

    def free(self, name: str) -> int:
        """Return the available SU of an account, computed from scratch."""
        active = {
            number
            for number, owner in self.owners.items()
            if owner == name and (not self.ends[number] or self.now < self.ends[number])
        }
        held = sum(
            part
            for hold in self.site.keeper.balances.holds.values()
            for number, part in hold.shares
            if number in active
        )
        return self.credits[name] + sum(self.balances[number] for number in active) - held

    def overdraft(self, name: str) -> int:
        """Return the SU held by started jobs that no allocation of their account could pay."""
        holds = self.site.keeper.balances.holds.values()
        return sum(
            hold.remaining for hold in holds if hold.id in self.overdrawing and hold.payer == name
        )

    @property
    def open(self) -> list[str]:
        return list(self.site.keeper.balances.holds)

    @rule(
        name=st.sampled_from(ACCOUNTS),
        minutes=st.integers(1, 30),
        uid=st.integers(1000, 1001),
        held=st.booleans(),
        array=st.sampled_from(["", "0-3"]),
    )
    def submit(self, name: str, minutes: int, uid: int, held: bool, array: str) -> None:
        before = self.free(name)
        wanted = job(minutes, account=name, uid=uid, held=held, array=array)
        said = self.site.submit(wanted, at_us=self.now)
        after = self.free(name)
        if said.ok:
            assert after >= 0
            self.comments[self.next_job] = said.admin_comment
            self.next_job += 1
        else:
            assert after == before
            cost = (minutes + 1) * (4 if array else 1) * MICRO
            assert before < (0 if held else cost)

    @rule(data=st.data(), started=st.booleans())
    def show(self, data: st.DataObject, started: bool) -> None:
        if not self.comments:
            return
        number = data.draw(st.sampled_from(sorted(self.comments)))
        before = set(self.site.keeper.balances.stranded_holds)
        for uid in (1000, 1001):
            seen = ShownJob(
                cluster=CLUSTER,
                job_id=number,
                uid=uid,
                admin_comment=self.comments[number],
                started=started,
            )
            with self.site.store.transaction():
                (found,) = self.site.upkeep.confirm([seen], self.now)
            assert found is None or (found.confirmed and found.uid == uid)
        self.overdrawing |= before - set(self.site.keeper.balances.stranded_holds)

    @rule(late=st.booleans())
    def look(self, late: bool) -> None:
        began = self.now + (6_000_000 if late else 0)
        with self.site.store.transaction():
            self.site.upkeep.record_poll(CLUSTER, began, self.now)
        if late:
            unconfirmed = self.site.keeper.balances.unconfirmed_holds.values()
            assert all(hold.origin == "transfer" for hold in unconfirmed)

    @rule(data=st.data(), part=st.integers(0, 15), frees=st.integers(0, 15), final=st.booleans())
    def settle(self, data: st.DataObject, part: int, frees: int, final: bool) -> None:
        if not self.open:
            return
        hold = self.site.keeper.balances.holds[data.draw(st.sampled_from(self.open))]
        self.seq += 1
        # Another test covers usage beyond a hold: here a charge is at most the hold.
        amount = min(part * MICRO, sum(share for _, share in hold.shares))
        remains = max(0, hold.remaining - max(amount, frees * MICRO))
        left = amount
        for number, share in hold.shares:
            taken = min(share, left)
            self.balances[number] -= taken
            left -= taken
        one = Settlement(
            seq=self.seq, hold=hold.id, amount=amount, frees=frees * MICRO, final=final
        )
        self.site.seq += 1
        books = GateBooks(seq=self.site.seq, accounts=self.books(), whole=True)
        with self.site.store.transaction():
            self.site.upkeep.settle([one], books, self.now)
            held = self.site.keeper.balances.held
            self.site.upkeep.settle([one], books, self.now)
        assert self.site.keeper.balances.held == held, "a repeat is harmless"
        assert (hold.id in self.open) != final
        assert final or hold.remaining == remains

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.open:
            which = data.draw(st.sampled_from(self.open))
            with self.site.store.transaction():
                self.site.upkeep.release(which, "because", None, self.now)
                assert self.site.upkeep.release(which, "again", None, self.now) == 0

    @rule(number=st.sampled_from([1, 2, 3]), su=st.integers(1, 40))
    def deposit(self, number: int, su: int) -> None:
        self.balances[number] += su * MICRO
        self.push()

    @rule(name=st.sampled_from(ACCOUNTS), su=st.integers(1, 80))
    def reserve(self, name: str, su: int) -> None:
        with self.site.store.transaction():
            try:
                self.site.upkeep.reserve(name, su * MICRO, "a transfer", 0, self.now)
            except BankRefused:
                assert self.free(name) - self.credits[name] < su * MICRO

    @rule(minutes=st.integers(1, 40), name=st.sampled_from(ACCOUNTS), number=st.integers(900, 903))
    def cover(self, minutes: int, name: str, number: int) -> None:
        wanted = job(minutes, account=name)
        claim = HoldRequest(
            cluster=CLUSTER, job_id=number, description=wanted, is_exact=minutes > 20
        )
        with self.site.store.transaction():
            covered = self.site.upkeep.place_hold(claim, "alice", self.now)
        if covered.is_paid:
            assert covered.hold is not None
            assert covered.hold.account == name
            assert covered.hold.remaining >= (minutes + 1) * MICRO
            assert self.free(name) >= -self.overdraft(name)
        else:
            assert "Steward: " in covered.why

    @rule(hours=st.sampled_from([1, 2, 3, 7, 25]))
    def time_goes_by(self, hours: int) -> None:
        self.now += hours * 3_600_000_000
        with self.site.store.transaction():
            self.site.upkeep.tick(self.now)
        late = [
            hold
            for hold in self.site.keeper.balances.holds.values()
            if not hold.confirmed and hold.expires_us <= self.now
        ]
        assert not late
        self.push()

    @rule()
    def kill(self) -> None:
        before = sorted(map(msgspec.to_builtins, self.site.keeper.balances.holds.values()), key=str)
        self.site.keeper.load()
        after = sorted(map(msgspec.to_builtins, self.site.keeper.balances.holds.values()), key=str)
        assert after == before

    @invariant()
    def nothing_is_overdrawn(self) -> None:
        for name in ACCOUNTS:
            assert self.free(name) >= -self.overdraft(name)
            assert self.free(name) == self.site.keeper.balances.get_available(name, self.now)

    @invariant()
    def sums_are_right(self) -> None:
        purses = self.site.keeper.balances
        on: dict[int, int] = {}
        for hold in purses.holds.values():
            shares = sum(part for _, part in hold.shares)
            assert shares == hold.remaining or (
                not hold.shares and hold.id in purses.stranded_holds
            )
            assert all(part > 0 for _, part in hold.shares)
            for number, part in hold.shares:
                on[number] = on.get(number, 0) + part
                active = self.ends[number] == 0 or self.now < self.ends[number]
                assert active or hold.started or hold.origin == "transfer"
        assert on == {
            number: sum(dict(hold.shares)[number] for hold in holds.values())
            for number, holds in purses.holds_by_allocation.items()
        }
        assert purses.held == sum(on.values())
        unseen: dict[tuple[str, int], int] = {}
        for hold in purses.unconfirmed_holds.values():
            who = hold.payer, hold.uid
            unseen[who] = unseen.get(who, 0) + hold.remaining
        for hold in purses.holds.values():
            who = hold.payer, hold.uid
            assert purses.get_unseen_held(*who) == unseen.get(who, 0)

    @invariant()
    def every_fact_is_told_once(self) -> None:
        rows = self.site.store.fetch_facts(0, 10_000)
        assert [fact.seq for fact in rows] == sorted({fact.seq for fact in rows})
        for fact in rows:
            assert datetime.fromtimestamp(fact.at_us / 1e6, UTC).year > 2000


Gate.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_gate = Gate.TestCase
