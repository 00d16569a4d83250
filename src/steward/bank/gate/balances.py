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
        self.remote_means: dict[str, RemoteMeans] = {}
        """Limits and balance times of accounts that a remote myBRC server manages."""
        self.holds: dict[str, OpenHold] = {}
        self.hold_by_job: dict[tuple[str, int], OpenHold] = {}
        self.unconfirmed_holds: dict[str, OpenHold] = {}
        self.changed_holds: dict[str, OpenHold] = {}
        """Holds of jobs with a change that no poll has shown."""
        self.stranded_holds: dict[str, OpenHold] = {}
        self.holds_by_allocation: dict[int, dict[str, OpenHold]] = {}
        self._users: dict[str, dict[str, tuple[int | None, int]]] = {}
        self._accounts_of: dict[str, set[str]] = {}
        self._allocations: dict[str, tuple[AllocationBooks, ...]] = {}
        self._held_by_allocation: dict[int, int] = {}
        self._held_by_user: dict[tuple[str, int], int] = {}
        self._held_by_payer_user: dict[tuple[str, int], int] = {}
        self._unseen_held: dict[tuple[str, int], int] = {}
        self._change_times_us: list[int] = []
        self._dates_us: dict[str, tuple[int, ...]] = {}
        self._has_new_dates = False
        self.lapsed_allocations: set[int] = set()
        """Allocations that no longer exist, but still carry holds."""
        self.held = 0

    # Balances from the ledger

    def apply_books(self, books: GateBooks) -> list[str]:
        """Apply an update from the ledger.

        Returns:
            Names of the accounts that changed, deleted ones included.
        """
        changed = []
        for account in books.accounts:
            if self.accounts.get(account.name) != account:
                self._replace_account(account)
                changed.append(account.name)
        if books.whole:
            removed = self.accounts.keys() - {account.name for account in books.accounts}
            for name in removed:
                self._mark_lapsed(name, set())
                self._replace_users(name, {})
                del self.accounts[name], self._users[name], self._allocations[name]
                self._replace_dates(name, ())
                self.remote_means.pop(name, None)
                changed.append(name)
        self.position = max(self.position, books.seq)
        if self._has_new_dates:
            self._has_new_dates = False
            self._change_times_us = sorted(
                {date for dates in self._dates_us.values() for date in dates if date}
            )
        return changed

    def _mark_lapsed(self, account: str, remaining: set[int]) -> None:
        numbers = {
            allocation.number for allocation in self._allocations.get(account, ())
        } - remaining
        self.lapsed_allocations |= numbers & self.holds_by_allocation.keys()

    def _replace_account(self, account: AccountBooks) -> None:
        """Store an account's new balances, allocations and users."""
        self._mark_lapsed(account.name, {entry.number for entry in account.allocations})
        self.accounts[account.name] = account
        self._replace_users(
            account.name, {entry.name: (entry.limit, entry.spent) for entry in account.users}
        )
        self._allocations[account.name] = tuple(
            sorted(
                account.allocations,
                key=lambda entry: (entry.end_us or _END_OF_TIME_US, entry.number),
            )
        )
        dates = [date for entry in account.allocations for date in (entry.begin_us, entry.end_us)]
        self._replace_dates(account.name, tuple(dates))

    def _replace_users(self, account: str, users: dict[str, tuple[int | None, int]]) -> None:
        """Replace the user list of an account, and the index of accounts by user."""
        before = self._users.get(account, {})
        for name in before.keys() - users.keys():
            self._accounts_of[name].discard(account)
        for name in users.keys() - before.keys():
            self._accounts_of.setdefault(name, set()).add(account)
        self._users[account] = users

    def _replace_dates(self, account: str, dates: tuple[int, ...]) -> None:
        """Store the dates on which an account's allocations begin and end."""
        # Balances change with every charge, dates hardly ever.
        if self._dates_us.get(account, ()) != dates:
            self._dates_us[account] = dates
            self._has_new_dates = True

    def get_next_change_us(self, after_us: int) -> int:
        """Return when the next allocation begins or ends; beyond all times if none does."""
        index = bisect_right(self._change_times_us, after_us)
        return (
            self._change_times_us[index] if index < len(self._change_times_us) else _END_OF_TIME_US
        )

    def get_payer(self, account: str) -> str:
        """Return the account whose allocations pay for an account."""
        books = self.accounts.get(account)
        return (books.payer or books.name) if books else account

    def find_user(self, account: str, user: str) -> tuple[int | None, int] | None:
        """Return a user's limit and spent SU; None for a user who is not listed."""
        return self._users.get(account, {}).get(user)

    def get_user_limit(self, account: str, user: str) -> tuple[int | None, int]:
        """Return a user's limit in an account (None for no limit) and spent SU.

        Of the bank's limit and one that a remote myBRC server reported, the lower counts.
        """
        limit, spent = self.find_user(account, user) or (None, 0)
        remote = self.remote_means.get(account)
        bound = remote.limits.get(user) if remote is not None else None
        if bound is not None and (limit is None or bound < limit):
            limit = bound
        return limit, spent

    def get_remote_at_us(self, account: str) -> int:
        """Return when a remote myBRC server reported an account's balance, µs; 0 for never.

        Args:
            account: The account; the time of its payer's balance counts.
        """
        remote = self.remote_means.get(self.get_payer(account))
        return remote.at_us if remote is not None else 0

    def list_accounts(self, user: str) -> list[str]:
        """List the accounts in which a user is listed or has spent SU."""
        return sorted(self._accounts_of.get(user, ()))

    # Available SU

    def iter_active(self, payer: str, now_us: int) -> Iterator[AllocationBooks]:
        """Yield the active allocations in the order in which jobs are charged to them."""
        for allocation in self._allocations.get(payer, ()):
            if allocation.begin_us <= now_us and (
                not allocation.end_us or now_us < allocation.end_us
            ):
                yield allocation

    def list_allocations(self, account: str) -> tuple[AllocationBooks, ...]:
        """Return all allocations of an account, in the order in which jobs are charged to them."""
        return self._allocations.get(account, ())

    def find_ended(self, now_us: int, accounts: Iterable[str] | None = None) -> set[int]:
        """Return allocations that have ended or no longer exist, but still carry holds.

        Args:
            now_us: The time, µs since the epoch.
            accounts: The accounts to check; all if None.
        """
        numbers = set(self.lapsed_allocations)
        for name in self._allocations if accounts is None else accounts:
            for allocation in self._allocations.get(name, ()):
                if (
                    allocation.end_us
                    and allocation.end_us <= now_us
                    and allocation.number in self.holds_by_allocation
                ):
                    numbers.add(allocation.number)
        return numbers

    def find_next_allocation(self, payer: str, now_us: int) -> AllocationBooks | None:
        """Return the allocation that begins next."""
        later = [
            allocation
            for allocation in self._allocations.get(payer, ())
            if allocation.begin_us > now_us
        ]
        return min(later, key=lambda allocation: allocation.begin_us) if later else None

    def get_credit(self, payer: str) -> int:
        """Return a payer's credit limit."""
        books = self.accounts.get(payer)
        return books.credit if books else 0

    def free(self, allocation: AllocationBooks) -> int:
        """Return an allocation's balance less its holds."""
        return allocation.balance - self._held_by_allocation.get(allocation.number, 0)

    def get_available(self, payer: str, now_us: int) -> int:
        """Return available SU: balance + credit limit - holds. May be negative."""
        total = self.get_credit(payer)
        for allocation in self._allocations.get(payer, ()):
            if allocation.begin_us <= now_us and (
                not allocation.end_us or now_us < allocation.end_us
            ):
                total += allocation.balance - self._held_by_allocation.get(allocation.number, 0)
        return total

    def get_means(self, account: str, user: str, uid: int, now_us: int) -> AccountMeans:
        """Return an account's balance, holds, credit limit and a user's limit in it."""
        payer = self.get_payer(account)
        limit, spent = self.get_user_limit(account, user)
        balance = sum(allocation.balance for allocation in self.iter_active(payer, now_us))
        available = self.get_available(payer, now_us)
        credit = self.get_credit(payer)
        return AccountMeans(
            account=account,
            payer=payer,
            available=available,
            balance=balance,
            held=balance + credit - available,
            credit=credit,
            user_limit=limit,
            user_spent=spent,
            user_held=self.get_user_held(account, uid),
            at_us=self.get_remote_at_us(account),
        )

    def get_user_held(self, account: str, uid: int) -> int:
        """Return the SU held in an account for one user's jobs."""
        return self._held_by_user.get((account, uid), 0)

    def get_payer_user_held(self, payer: str, uid: int) -> int:
        """Return the SU held for one user's jobs in all accounts of a payer."""
        return self._held_by_payer_user.get((payer, uid), 0)

    def get_unseen_held(self, payer: str, uid: int) -> int:
        """Return the SU held for one user's unseen jobs: Slurm has not shown them yet."""
        return self._unseen_held.get((payer, uid), 0)

    def split_amount(self, payer: str, amount: int, now_us: int) -> tuple[tuple[int, int], ...]:
        """Split an amount over the active allocations; the last one takes any overdraft.

        Only an open-ended allocation also takes the credit limit.
        """
        if amount <= 0:
            return ()
        shares = []
        rest = amount
        last = NO_ALLOCATION
        for allocation in self.iter_active(payer, now_us):
            last = allocation.number
            free = self.free(allocation) + (0 if allocation.end_us else self.get_credit(payer))
            share = min(rest, max(0, free))
            if share:
                shares.append((allocation.number, share))
                rest -= share
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
            self.hold_by_job[hold.cluster, hold.job_id] = hold
        if not hold.confirmed:
            self.unconfirmed_holds[hold.id] = hold
        if hold.changed_us:
            self.changed_holds[hold.id] = hold
        self._add_to_totals(hold, 1)

    def drop(self, hold: OpenHold) -> None:
        """Remove a hold from the totals."""
        self._add_to_totals(hold, -1)
        del self.holds[hold.id]
        self.unconfirmed_holds.pop(hold.id, None)
        self.changed_holds.pop(hold.id, None)
        if self.hold_by_job.get((hold.cluster, hold.job_id)) is hold:
            del self.hold_by_job[hold.cluster, hold.job_id]

    def resize(
        self,
        hold: OpenHold,
        remaining: int,
        shares: tuple[tuple[int, int], ...],
        *,
        account: str | None = None,
    ) -> None:
        """Change a hold's remainder, allocations or account."""
        self._add_to_totals(hold, -1)
        if account is not None:
            hold.account, hold.payer = account, self.get_payer(account)
        hold.remaining, hold.shares = remaining, shares
        self._add_to_totals(hold, 1)

    def confirm(self, hold: OpenHold, job_id: int) -> None:
        """Mark a hold as confirmed: Slurm has shown its job."""
        if not hold.confirmed:
            _add_to_sum(self._unseen_held, (hold.payer, hold.uid), -hold.remaining)
        hold.confirmed = True
        hold.expires_us = 0
        self.unconfirmed_holds.pop(hold.id, None)
        if not hold.job_id:
            hold.job_id = job_id
            self.hold_by_job[hold.cluster, job_id] = hold

    def reduce_shares(self, hold: OpenHold, amount: int) -> tuple[tuple[int, int], ...]:
        """Return a hold's shares less an amount, taken off in drawing order."""
        shares = []
        for number, share in hold.shares:
            deducted = min(share, amount)
            amount -= deducted
            if share > deducted:
                shares.append((number, share - deducted))
        return tuple(shares)

    def add_shares(
        self, hold: OpenHold, added: Iterable[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """Return a hold's shares with others added."""
        shares = dict(hold.shares)
        for number, share in added:
            shares[number] = shares.get(number, 0) + share
        return tuple(shares.items())

    def _add_to_totals(self, hold: OpenHold, sign: int) -> None:
        """Add a hold to all running totals, or subtract it (``sign`` -1)."""
        # A stranded hold blocks no SU that another job could use.
        amount = sign * hold.remaining if hold.shares else 0
        self.held += amount
        for number, share in hold.shares:
            self._held_by_allocation[number] = (
                self._held_by_allocation.get(number, 0) + sign * share
            )
            if sign > 0:
                self.holds_by_allocation.setdefault(number, {})[hold.id] = hold
            else:
                self.holds_by_allocation[number].pop(hold.id)
                if not self.holds_by_allocation[number]:
                    del self.holds_by_allocation[number], self._held_by_allocation[number]
        if hold.uid >= 0:
            _add_to_sum(self._held_by_user, (hold.account, hold.uid), amount)
            _add_to_sum(self._held_by_payer_user, (hold.payer, hold.uid), amount)
        if not hold.confirmed:
            _add_to_sum(self._unseen_held, (hold.payer, hold.uid), sign * hold.remaining)
        if sign > 0 and hold.is_stranded:
            self.stranded_holds[hold.id] = hold
        else:
            self.stranded_holds.pop(hold.id, None)


def _add_to_sum(sums: dict[tuple[str, int], int], key: tuple[str, int], amount: int) -> None:
    """Add to a running sum; drop sums of 0."""
    total = sums.get(key, 0) + amount
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)
