"""Account balances and SU holds in the gate's memory: what each account can pay now.

`OpenHold` is an open hold; `AccountBalances` keeps all accounts, allocations and holds with running
totals, so that a decision adds up a few allocations and no more.

Nothing here is persistent: the gate rebuilds it at each start from the ledger's last balances and
the open holds in gate.db (`store.py`). Amounts are micro-SU, times µs since the epoch.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from steward.bank.gate.requests import AccountMeans, RemoteMeans
from steward.bank.records import AccountBooks, AllocationBooks, AllocationShare, GateBooks, Origin

NO_ALLOCATION: Final = 0
"""Number of the pseudo allocation that takes overdrafts of an account without an active one."""

_END_OF_TIME_US: Final = 2**63
"""A time beyond all times, in µs: for allocations without an end."""


class OpenHold(msgspec.Struct, kw_only=True, gc=False):
    """An open SU hold as the gate keeps it in memory; gate.db holds the rest.

    Attributes:
        number: Its row in gate.db.
        shares: Pairs of an allocation's number and micro-SU. Their sum is ``remaining``; empty if
            no allocation can pay any more.
        siblings: Other clusters of a federation that presented its token.
        parent: Id of the job's own hold, if this one covers a change of the job.
        changed_us: When the gate last accepted a change of the job that no poll has shown; 0 for
            none.

    The other fields are as in ``records.Hold``.
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
        """Return True if no allocation can pay the hold's remainder."""
        return self.remaining > 0 and not self.shares

    def record_shares(self) -> tuple[AllocationShare, ...]:
        """Return the shares as records."""
        return tuple(
            AllocationShare(allocation=number, amount=amount) for number, amount in self.shares
        )


class AccountBalances:
    """All accounts with their allocations, and the SU holds on each."""

    def __init__(self) -> None:
        self.position = 0
        self.accounts: dict[str, AccountBooks] = {}
        self.remote: dict[str, RemoteMeans] = {}
        """Limits and balance times of accounts that a remote myBRC server manages."""
        self.holds: dict[str, OpenHold] = {}
        self.by_job: dict[tuple[str, int], OpenHold] = {}
        self.unconfirmed: dict[str, OpenHold] = {}
        self.changed: dict[str, OpenHold] = {}
        """Holds of jobs with a change that no poll has shown."""
        self.stranded: dict[str, OpenHold] = {}
        self.on_allocation: dict[int, dict[str, OpenHold]] = {}
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
        """Allocations that no longer exist, but still carry holds."""
        self.held = 0

    # Balances from the ledger

    def put(self, books: GateBooks) -> list[str]:
        """Apply an update from the ledger.

        Returns:
            Names of the accounts that changed, deleted ones included.
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
        """Store an account's new balances, allocations and users."""
        self._lapse(account.name, {one.number for one in account.allocations})
        self.accounts[account.name] = account
        self._list(account.name, {one.name: (one.limit, one.spent) for one in account.users})
        self._drawn[account.name] = tuple(
            sorted(account.allocations, key=lambda one: (one.end_us or _END_OF_TIME_US, one.number))
        )
        dates = [date for one in account.allocations for date in (one.begin_us, one.end_us)]
        self._date(account.name, tuple(dates))

    def _list(self, account: str, users: dict[str, tuple[int | None, int]]) -> None:
        """Replace the user list of an account, and the index of accounts by user."""
        before = self._users.get(account, {})
        for name in before.keys() - users.keys():
            self._accounts_of[name].discard(account)
        for name in users.keys() - before.keys():
            self._accounts_of.setdefault(name, set()).add(account)
        self._users[account] = users

    def _date(self, account: str, dates: tuple[int, ...]) -> None:
        """Store the dates on which an account's allocations begin and end."""
        # Balances change with every charge, dates hardly ever.
        if self._dates.get(account, ()) != dates:
            self._dates[account] = dates
            self._is_dated_anew = True

    def next_turn(self, after_us: int) -> int:
        """Return when the next allocation begins or ends; beyond all times if none does."""
        at = bisect_right(self._turns, after_us)
        return self._turns[at] if at < len(self._turns) else _END_OF_TIME_US

    def payer_of(self, account: str) -> str:
        """Return the account whose allocations pay for an account."""
        books = self.accounts.get(account)
        return (books.payer or books.name) if books else account

    def user_books(self, account: str, user: str) -> tuple[int | None, int] | None:
        """Return a user's limit and spent SU; None for a user who is not listed."""
        return self._users.get(account, {}).get(user)

    def user_limit(self, account: str, user: str) -> tuple[int | None, int]:
        """Return a user's limit in an account (None for no limit) and spent SU.

        Of the bank's limit and one that a remote myBRC server reported, the lower counts.
        """
        limit, spent = self.user_books(account, user) or (None, 0)
        remote = self.remote.get(account)
        bound = remote.limits.get(user) if remote is not None else None
        if bound is not None and (limit is None or bound < limit):
            limit = bound
        return limit, spent

    def remote_at_us(self, account: str) -> int:
        """Return when a remote myBRC server reported an account's balance, µs; 0 for never.

        Args:
            account: The account; the time of its payer's balance counts.
        """
        remote = self.remote.get(self.payer_of(account))
        return remote.at_us if remote is not None else 0

    def accounts_of(self, user: str) -> list[str]:
        """List the accounts in which a user is listed or has spent SU."""
        return sorted(self._accounts_of.get(user, ()))

    # Available SU

    def active(self, payer: str, now_us: int) -> Iterator[AllocationBooks]:
        """Yield the active allocations in the order in which charges draw on them."""
        for one in self._drawn.get(payer, ()):
            if one.begin_us <= now_us and (not one.end_us or now_us < one.end_us):
                yield one

    def allocations(self, account: str) -> tuple[AllocationBooks, ...]:
        """Return all allocations of an account, in the order in which charges draw on them."""
        return self._drawn.get(account, ())

    def ended(self, now_us: int, accounts: Iterable[str] | None = None) -> set[int]:
        """Return allocations that have ended or no longer exist, but still carry holds.

        Args:
            now_us: The time, µs since the epoch.
            accounts: The accounts to check; all if None.
        """
        found = set(self.lapsed)
        for name in self._drawn if accounts is None else accounts:
            for one in self._drawn.get(name, ()):
                if one.end_us and one.end_us <= now_us and one.number in self.on_allocation:
                    found.add(one.number)
        return found

    def next_allocation(self, payer: str, now_us: int) -> AllocationBooks | None:
        """Return the allocation that begins next."""
        later = [one for one in self._drawn.get(payer, ()) if one.begin_us > now_us]
        return min(later, key=lambda one: one.begin_us) if later else None

    def credit(self, payer: str) -> int:
        """Return a payer's credit limit."""
        books = self.accounts.get(payer)
        return books.credit if books else 0

    def free(self, one: AllocationBooks) -> int:
        """Return an allocation's balance less its holds."""
        return one.balance - self._held.get(one.number, 0)

    def available(self, payer: str, now_us: int) -> int:
        """Return available SU: balance + credit limit - holds. May be negative."""
        total = self.credit(payer)
        for one in self._drawn.get(payer, ()):
            if one.begin_us <= now_us and (not one.end_us or now_us < one.end_us):
                total += one.balance - self._held.get(one.number, 0)
        return total

    def means(self, account: str, user: str, uid: int, now_us: int) -> AccountMeans:
        """Return an account's balance, holds, credit limit and a user's limit in it."""
        payer = self.payer_of(account)
        limit, spent = self.user_limit(account, user)
        balance = sum(one.balance for one in self.active(payer, now_us))
        available = self.available(payer, now_us)
        credit = self.credit(payer)
        return AccountMeans(
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
        """Return the SU held in an account for one user's jobs."""
        return self._user_held.get((account, uid), 0)

    def user_held_of(self, payer: str, uid: int) -> int:
        """Return the SU held for one user's jobs in all accounts of a payer."""
        return self._user_of_payer.get((payer, uid), 0)

    def unseen(self, payer: str, uid: int) -> int:
        """Return the SU held for one user's unseen jobs: Slurm has not shown them yet."""
        return self._unseen.get((payer, uid), 0)

    def draw(self, payer: str, amount: int, now_us: int) -> tuple[tuple[int, int], ...]:
        """Split an amount over the active allocations; the last one takes any overdraft.

        Only an open-ended allocation also takes the credit limit.
        """
        if amount <= 0:
            return ()
        shares = []
        rest = amount
        last = NO_ALLOCATION
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

    def add(self, hold: OpenHold) -> None:
        """Add an open hold to the totals."""
        self.holds[hold.id] = hold
        if hold.job_id:
            self.by_job[hold.cluster, hold.job_id] = hold
        if not hold.confirmed:
            self.unconfirmed[hold.id] = hold
        if hold.changed_us:
            self.changed[hold.id] = hold
        self._count(hold, 1)

    def drop(self, hold: OpenHold) -> None:
        """Remove a hold from the totals."""
        self._count(hold, -1)
        del self.holds[hold.id]
        self.unconfirmed.pop(hold.id, None)
        self.changed.pop(hold.id, None)
        if self.by_job.get((hold.cluster, hold.job_id)) is hold:
            del self.by_job[hold.cluster, hold.job_id]

    def resize(
        self,
        hold: OpenHold,
        remaining: int,
        shares: tuple[tuple[int, int], ...],
        *,
        account: str | None = None,
    ) -> None:
        """Change a hold's remainder, allocations or account."""
        self._count(hold, -1)
        if account is not None:
            hold.account, hold.payer = account, self.payer_of(account)
        hold.remaining, hold.shares = remaining, shares
        self._count(hold, 1)

    def confirm(self, hold: OpenHold, job_id: int) -> None:
        """Mark a hold as confirmed: Slurm has shown its job."""
        if not hold.confirmed:
            _add_to_sum(self._unseen, (hold.payer, hold.uid), -hold.remaining)
        hold.confirmed = True
        hold.expires_us = 0
        self.unconfirmed.pop(hold.id, None)
        if not hold.job_id:
            hold.job_id = job_id
            self.by_job[hold.cluster, job_id] = hold

    def less(self, hold: OpenHold, amount: int) -> tuple[tuple[int, int], ...]:
        """Return a hold's shares less an amount, taken off in drawing order."""
        kept = []
        for number, part in hold.shares:
            off = min(part, amount)
            amount -= off
            if part > off:
                kept.append((number, part - off))
        return tuple(kept)

    def more(self, hold: OpenHold, added: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return a hold's shares with others added."""
        shares = dict(hold.shares)
        for number, part in added:
            shares[number] = shares.get(number, 0) + part
        return tuple(shares.items())

    def _count(self, hold: OpenHold, sign: int) -> None:
        """Add a hold to all running totals, or subtract it (``sign`` -1)."""
        # A stranded hold blocks no SU that another job could use.
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
            _add_to_sum(self._user_held, (hold.account, hold.uid), amount)
            _add_to_sum(self._user_of_payer, (hold.payer, hold.uid), amount)
        if not hold.confirmed:
            _add_to_sum(self._unseen, (hold.payer, hold.uid), sign * hold.remaining)
        if sign > 0 and hold.is_stranded:
            self.stranded[hold.id] = hold
        else:
            self.stranded.pop(hold.id, None)


def _add_to_sum(sums: dict[tuple[str, int], int], key: tuple[str, int], amount: int) -> None:
    """Add to a running sum; drop sums of 0."""
    total = sums.get(key, 0) + amount
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)
