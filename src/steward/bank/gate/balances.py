"""What accounts can pay: the books as the ledger last told them, less what is held.

Nothing here is written down: it is made anew from the books and the open holds
(``store.py``) whenever the gate starts. All sums are kept up as holds come and
go, so that a decision adds up a few allocations and no more.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from steward.bank.gate.requests import Means, RemoteMeans
from steward.bank.records import AccountBooks, AllocationBooks, Books, Origin, Share

NOWHERE: Final = 0
"""The allocation that overdraws are put down to where an account has no open-ended one."""

_LAST: Final = 2**63


class Open(msgspec.Struct, kw_only=True, gc=False):
    """An open hold as decisions need it; the rest is in gate.db.

    Attributes:
        number: Its row in gate.db.
        shares: Pairs of an allocation's number and micro-SU; together ``remaining``, or
            nothing where no allocation can pay any more.
        siblings: Further clusters of a federation that have asked with its token.
        parent: Of what is held for a change of a job: id of the job's own hold.
        changed_us: When the gate last passed a change of its job that no poll has shown; 0 for
            none.

    The others are as in ``records.Hold``.
    """

    number: int
    id: str
    origin: Origin = "submit"
    cluster: str = ""
    job_id: int = 0
    account: str = ""
    payer: str = ""
    uid: int = -1
    user: str = ""
    amount: int = 0
    remaining: int = 0
    shares: tuple[tuple[int, int], ...] = ()
    confirmed: bool = False
    started: bool = False
    created_us: int = 0
    expires_us: int = 0
    siblings: tuple[str, ...] = ()
    parent: str = ""
    changed_us: int = 0

    @property
    def is_stranded(self) -> bool:
        """Whether it waits for an allocation that can pay."""
        return self.remaining > 0 and not self.shares

    def record_shares(self) -> tuple[Share, ...]:
        """Its shares as a noun."""
        return tuple(Share(allocation=number, amount=amount) for number, amount in self.shares)


class Purses:
    """All accounts, and what is held of each."""

    def __init__(self) -> None:
        self.position = 0
        self.accounts: dict[str, AccountBooks] = {}
        self.remote: dict[str, RemoteMeans] = {}
        """Of the accounts that have what a myBRC server elsewhere says."""
        self.holds: dict[str, Open] = {}
        self.by_job: dict[tuple[str, int], Open] = {}
        self.unconfirmed: dict[str, Open] = {}
        self.changed: dict[str, Open] = {}
        """Holds of jobs with a change that no poll has shown."""
        self.stranded: dict[str, Open] = {}
        self.on_allocation: dict[int, dict[str, Open]] = {}
        self._users: dict[str, dict[str, tuple[int | None, int]]] = {}
        self._accounts_of: dict[str, set[str]] = {}
        self._drawn: dict[str, tuple[AllocationBooks, ...]] = {}
        self._held: dict[int, int] = {}
        self._user_held: dict[tuple[str, int], int] = {}
        self._user_of_payer: dict[tuple[str, int], int] = {}
        self._unseen: dict[tuple[str, int], int] = {}
        self._turns: list[int] = []
        self._dates: dict[str, tuple[int, ...]] = {}
        self._is_dated_anew = False
        self.lapsed: set[int] = set()
        """Allocations that are no more, and that holds are still put down to."""
        self.held = 0

    # Books

    def put(self, books: Books) -> list[str]:
        """Take news of the ledger in.

        Returns:
            Names of the accounts that are changed; those that are gone are among them.
        """
        changed = []
        for account in books.accounts:
            if self.accounts.get(account.name) != account:
                self._put(account)
                changed.append(account.name)
        if books.whole:
            gone = self.accounts.keys() - {account.name for account in books.accounts}
            for name in gone:
                self._lapse(name, set())
                self._list(name, {})
                del self.accounts[name], self._users[name], self._drawn[name]
                self._date(name, ())
                self.remote.pop(name, None)
                changed.append(name)
        self.position = max(self.position, books.seq)
        if self._is_dated_anew:
            self._is_dated_anew = False
            self._turns = sorted({turn for dates in self._dates.values() for turn in dates if turn})
        return changed

    def _lapse(self, account: str, still: set[int]) -> None:
        numbers = {one.number for one in self._drawn.get(account, ())} - still
        self.lapsed |= numbers & self.on_allocation.keys()

    def _put(self, account: AccountBooks) -> None:
        self._lapse(account.name, {one.number for one in account.allocations})
        self.accounts[account.name] = account
        self._list(account.name, {one.name: (one.limit, one.spent) for one in account.users})
        self._drawn[account.name] = tuple(
            sorted(account.allocations, key=lambda one: (one.end_us or _LAST, one.number))
        )
        dates = [date for one in account.allocations for date in (one.begin_us, one.end_us)]
        self._date(account.name, tuple(dates))

    def _list(self, account: str, users: dict[str, tuple[int | None, int]]) -> None:
        before = self._users.get(account, {})
        for name in before.keys() - users.keys():
            self._accounts_of[name].discard(account)
        for name in users.keys() - before.keys():
            self._accounts_of.setdefault(name, set()).add(account)
        self._users[account] = users

    def _date(self, account: str, dates: tuple[int, ...]) -> None:
        # Books come with every charge, new dates hardly ever.
        if self._dates.get(account, ()) != dates:
            self._dates[account] = dates
            self._is_dated_anew = True

    def next_turn(self, after_us: int) -> int:
        """When the next allocation begins or ends; beyond all times if none does."""
        at = bisect_right(self._turns, after_us)
        return self._turns[at] if at < len(self._turns) else _LAST

    def payer_of(self, account: str) -> str:
        """Whose allocations an account draws on."""
        books = self.accounts.get(account)
        return (books.payer or books.name) if books else account

    def user_books(self, account: str, user: str) -> tuple[int | None, int] | None:
        """A user's limit and what they have spent; None for one that is not listed."""
        return self._users.get(account, {}).get(user)

    def user_limit(self, account: str, user: str) -> tuple[int | None, int]:
        """What a user may spend of an account, None for no limit, and what they have spent."""
        limit, spent = self.user_books(account, user) or (None, 0)
        remote = self.remote.get(account)
        bound = remote.limits.get(user) if remote is not None else None
        if bound is not None and (limit is None or bound < limit):
            limit = bound
        return limit, spent

    def remote_at_us(self, account: str) -> int:
        """When a myBRC server elsewhere said what an account has, µs since the epoch; 0 for never.

        Args:
            account: The account; its payer's balance counts.
        """
        remote = self.remote.get(self.payer_of(account))
        return remote.at_us if remote is not None else 0

    def accounts_of(self, user: str) -> list[str]:
        """Names of the accounts that a user is listed in, or has spent of."""
        return sorted(self._accounts_of.get(user, ()))

    # What can be paid

    def active(self, payer: str, now_us: int) -> Iterator[AllocationBooks]:
        """The allocations that can be drawn on, in the order in which they are."""
        for one in self._drawn.get(payer, ()):
            if one.begin_us <= now_us and (not one.end_us or now_us < one.end_us):
                yield one

    def allocations(self, account: str) -> tuple[AllocationBooks, ...]:
        """All allocations of an account, in the order in which they are drawn on."""
        return self._drawn.get(account, ())

    def ended(self, now_us: int, accounts: Iterable[str] | None = None) -> set[int]:
        """Allocations that have ended, or are no more, and that holds are still put down to.

        Args:
            now_us: The time, µs since the epoch.
            accounts: Whose; everybody's if None.
        """
        found = set(self.lapsed)
        for name in self._drawn if accounts is None else accounts:
            for one in self._drawn.get(name, ()):
                if one.end_us and one.end_us <= now_us and one.number in self.on_allocation:
                    found.add(one.number)
        return found

    def next_allocation(self, payer: str, now_us: int) -> AllocationBooks | None:
        """The one that begins next."""
        later = [one for one in self._drawn.get(payer, ()) if one.begin_us > now_us]
        return min(later, key=lambda one: one.begin_us) if later else None

    def credit(self, payer: str) -> int:
        """What a payer may owe."""
        books = self.accounts.get(payer)
        return books.credit if books else 0

    def free(self, one: AllocationBooks) -> int:
        """What of an allocation nobody has spoken for."""
        return one.balance - self._held.get(one.number, 0)

    def available(self, payer: str, now_us: int) -> int:
        """What a new job may cost: may be below zero."""
        total = self.credit(payer)
        for one in self._drawn.get(payer, ()):
            if one.begin_us <= now_us and (not one.end_us or now_us < one.end_us):
                total += one.balance - self._held.get(one.number, 0)
        return total

    def means(self, account: str, user: str, uid: int, now_us: int) -> Means:
        """How an account stands."""
        payer = self.payer_of(account)
        limit, spent = self.user_limit(account, user)
        balance = sum(one.balance for one in self.active(payer, now_us))
        available = self.available(payer, now_us)
        credit = self.credit(payer)
        return Means(
            account=account,
            payer=payer,
            available=available,
            balance=balance,
            held=balance + credit - available,
            credit=credit,
            user_limit=limit,
            user_spent=spent,
            user_held=self.user_held(account, uid),
            at_us=self.remote_at_us(account),
        )

    def user_held(self, account: str, uid: int) -> int:
        """What is held in an account for one user's jobs."""
        return self._user_held.get((account, uid), 0)

    def user_held_of(self, payer: str, uid: int) -> int:
        """The same in all accounts that draw on a payer."""
        return self._user_of_payer.get((payer, uid), 0)

    def unseen(self, payer: str, uid: int) -> int:
        """What is held for one user's jobs that Slurm has not shown yet."""
        return self._unseen.get((payer, uid), 0)

    def draw(self, payer: str, amount: int, now_us: int) -> tuple[tuple[int, int], ...]:
        """Which allocations pay an amount; what is beyond them is the open-ended one's."""
        if amount <= 0:
            return ()
        shares = []
        rest = amount
        last = NOWHERE
        for one in self.active(payer, now_us):
            last = one.number
            free = self.free(one) + (0 if one.end_us else self.credit(payer))
            part = min(rest, max(0, free))
            if part:
                shares.append((one.number, part))
                rest -= part
            if not rest:
                return tuple(shares)
        if shares and shares[-1][0] == last:
            shares[-1] = (last, shares[-1][1] + rest)
        else:
            shares.append((last, rest))
        return tuple(shares)

    # Holds

    def add(self, hold: Open) -> None:
        """A hold is open from now on."""
        self.holds[hold.id] = hold
        if hold.job_id:
            self.by_job[hold.cluster, hold.job_id] = hold
        if not hold.confirmed:
            self.unconfirmed[hold.id] = hold
        if hold.changed_us:
            self.changed[hold.id] = hold
        self._count(hold, 1)

    def drop(self, hold: Open) -> None:
        """A hold is open no more."""
        self._count(hold, -1)
        del self.holds[hold.id]
        self.unconfirmed.pop(hold.id, None)
        self.changed.pop(hold.id, None)
        if self.by_job.get((hold.cluster, hold.job_id)) is hold:
            del self.by_job[hold.cluster, hold.job_id]

    def resize(
        self,
        hold: Open,
        remaining: int,
        shares: tuple[tuple[int, int], ...],
        *,
        account: str | None = None,
    ) -> None:
        """A hold is of another size, on other allocations, or in another account."""
        self._count(hold, -1)
        if account is not None:
            hold.account, hold.payer = account, self.payer_of(account)
        hold.remaining, hold.shares = remaining, shares
        self._count(hold, 1)

    def confirm(self, hold: Open, job_id: int) -> None:
        """Slurm has shown a hold's job."""
        if not hold.confirmed:
            _add(self._unseen, (hold.payer, hold.uid), -hold.remaining)
        hold.confirmed = True
        hold.expires_us = 0
        self.unconfirmed.pop(hold.id, None)
        if not hold.job_id:
            hold.job_id = job_id
            self.by_job[hold.cluster, job_id] = hold

    def less(self, hold: Open, amount: int) -> tuple[tuple[int, int], ...]:
        """A hold's shares without an amount, taken off in the order in which they are drawn."""
        kept = []
        for number, part in hold.shares:
            off = min(part, amount)
            amount -= off
            if part > off:
                kept.append((number, part - off))
        return tuple(kept)

    def more(self, hold: Open, added: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """A hold's shares with others."""
        shares = dict(hold.shares)
        for number, part in added:
            shares[number] = shares.get(number, 0) + part
        return tuple(shares.items())

    def _count(self, hold: Open, sign: int) -> None:
        # Who waits for an allocation holds nothing that another could have.
        amount = sign * hold.remaining if hold.shares else 0
        self.held += amount
        for number, part in hold.shares:
            self._held[number] = self._held.get(number, 0) + sign * part
            if sign > 0:
                self.on_allocation.setdefault(number, {})[hold.id] = hold
            else:
                self.on_allocation[number].pop(hold.id)
                if not self.on_allocation[number]:
                    del self.on_allocation[number], self._held[number]
        if hold.uid >= 0:
            _add(self._user_held, (hold.account, hold.uid), amount)
            _add(self._user_of_payer, (hold.payer, hold.uid), amount)
        if not hold.confirmed:
            _add(self._unseen, (hold.payer, hold.uid), sign * hold.remaining)
        if sign > 0 and hold.is_stranded:
            self.stranded[hold.id] = hold
        else:
            self.stranded.pop(hold.id, None)


def _add(sums: dict[tuple[str, int], int], key: tuple[str, int], amount: int) -> None:
    """Keep up a sum; nought is not kept."""
    total = sums.get(key, 0) + amount
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)
