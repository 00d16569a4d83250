"""Balance synchronization: the ledger follows the balances of a myBRC server elsewhere.

The API returns no balance: it only tells whether a job of some cost can be submitted, and why not.
So :class:`RemoteBalances` asks for each account, with one of its users; where the text of the
rejection does not show the figures, it searches for the largest cost that passes. This runs in the
background: the daemon's worker calls ``poll_once``, which queries one account. A difference becomes
an adjustment in the ledger, and the gate learns how old each account's figure is.

The server's figure is that of its own books: it counts the hold of a running job until the job's
cost is reported. The ledger counts charges alone, and the gate subtracts holds.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from steward.bank.errors import GateUnavailable, LedgerUnavailable
from steward.bank.gate.requests import RemoteMeans
from steward.bank.ledger import Authorship
from steward.core.config import Settings
from steward.core.timestamps import to_micros
from steward.core.waits import Backoff, Stop
from steward.extensions.mybrc.outbox import MYBRC_KIND
from steward.extensions.mybrc.remote import MybrcClient, decode_outbox_item, job_cost_of
from steward.extensions.mybrc.wire import RemoteFailed, RemoteRejected, RemoteUnavailable
from steward.slurm.users import NameResolver

if TYPE_CHECKING:
    from steward.bank.gate.client import GateClient
    from steward.bank.ledger.ledger import Ledger, Transaction


log = logging.getLogger(__name__)

COST_STEP: Final = 10_000
"""Smallest cost that the API can express: a hundredth of an SU, in micro-SU."""
MAX_COST: Final = 999_999_999_99 * COST_STEP
"""Largest cost that the API can express, in micro-SU. A balance that covers it counts as unlimited.
"""
_ACTIVE_S: Final = 60.0
"""Interval of queries for an account with recent activity, in seconds."""
_IDLE_POLLS_PER_AGE: Final = 3
"""Queries of an idle account within the allowed age of a balance."""
_LIST_INTERVAL_S: Final = 10.0
"""Interval at which the list of accounts is updated, in seconds."""
_GATE_UPDATE_INTERVAL_S: Final = 5.0
"""Interval at which the gate is updated, in seconds."""
_RETRY_S: Final = 1.0
"""Delay before another query after a change in between, in seconds."""
_MAX_USERS_PER_ACCOUNT: Final = 20
"""Most users of one account to query each time."""
_MAX_UNSENT: Final = 1000
"""Unsent messages at which a balance is not computed."""
_REJECTION_WINDOW: Final = timedelta(hours=1)
"""Time for which a rejected submit makes an account active."""
_BACKOFF_FIRST_S: Final = 1.0
_BACKOFF_MAX_S: Final = 60.0
_PRINCIPAL: Final = "mybrc.remote"
"""Principal of the adjustments in the ledger."""
_MARK_PREFIX: Final = "mybrc.remote/"
"""Prefix of the ledger mark that stores an account's figures; the account's name follows."""
_REJECTION_PATTERN: Final = re.compile(
    r"to (account|user) balance (-?[0-9]{1,20}(?:\.[0-9]{1,4})?)"
    r" would exceed \1 allocation ([0-9]{1,20}(?:\.[0-9]{1,4})?)",
    re.ASCII,
)
"""Text of a rejection: whose balance, its usage and its allocation."""


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one account as the ledger stores them, so that a restart loses none.

    Attributes:
        url: Server that returned them.
        at_us: Time of the query, µs since the epoch.
        limits: What users may spend of the account, micro-SU by name.
    """

    url: str
    at_us: int
    limits: dict[str, int]


class _RemoteAccount:
    """State of one account at the server."""

    def __init__(self) -> None:
        self.users: dict[int, str] = {}
        self.asked: dict[int, int | None] = {}
        """By uid, a user's largest payable cost at the last query, oldest first; None for a uid
        that the server does not know.
        """
        self.limits: dict[str, int] = {}
        self.at_us = 0
        self.next_query_s = 0.0
        self.is_active = False


class RemoteBalances:
    """Poller that queries accounts one after the other and adjusts the ledger.

    Args:
        settings: The whole configuration.
        ledger: Ledger whose balances follow the server's.
        gate: Connection to the gate.
        push_changes: Makes the gate read the ledger's changes.
        now: Returns the current time.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: "Ledger",
        gate: "GateClient",
        push_changes: Callable[[], None],
        now: Callable[[], datetime],
    ) -> None:
        self._ledger = ledger
        self._gate = gate
        self._push_changes = push_changes
        self._now = now
        self._client = MybrcClient(settings)
        self._url = settings.bank.remote.url
        self._host = urlsplit(self._url).hostname or ""
        self._idle_s = settings.bank.remote.balance_age_s / _IDLE_POLLS_PER_AGE
        self._name_resolver = NameResolver()
        self._accounts: dict[str, _RemoteAccount] = {}
        self._next_list_s = self._next_gate_update_s = 0.0
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        self._retry_at_s = 0.0
        self._last_error = ""

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def poll_once(self, stop: Stop, heartbeat: Callable[[], None]) -> float:
        """Query the account that is due, if any, and update the gate.

        Returns:
            Seconds to wait before the next call.
        """
        wait_s = _RETRY_S
        try:
            now_s = time.monotonic()
            if now_s >= self._next_list_s:
                self._update_accounts()
                self._next_list_s = now_s + _LIST_INTERVAL_S
            due_name = min(
                self._accounts, key=lambda name: self._accounts[name].next_query_s, default=None
            )
            if due_name is not None and now_s >= max(
                self._accounts[due_name].next_query_s, self._retry_at_s
            ):
                self._query_account(due_name, self._accounts[due_name], stop, heartbeat)
                wait_s = 0.0
            self._update_gate()
        except (RemoteUnavailable, RemoteFailed, LedgerUnavailable) as error:
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("cannot read the balances of the myBRC server: %s", error)
        return wait_s

    def _update_accounts(self) -> None:
        """Update the list of accounts and users to query."""
        with self._ledger.reading() as t:
            rejections = t.rejections.list_since(self._now() - _REJECTION_WINDOW)
            accounts = {
                account.name: account
                for account in t.accounts.list_all()
                if not account.closed and not account.parent_pays
            }
            users: dict[str, dict[int, str]] = {name: {} for name in accounts}
            new_names = [name for name in accounts if name not in self._accounts]
            stored_figures = {
                name: _decode_figures(text)
                for name in new_names
                if (text := t.read_mark(f"{_MARK_PREFIX}{name}"))
            }
            active = {rejection.account for rejection in rejections}
            for name, account in accounts.items():
                held_by_uid = t.remote_holds.sum_by_user(name)
                if held_by_uid:
                    active.add(name)
                members = [
                    *account.owners,
                    *(member.user for member in t.accounts.list_users(name)),
                ]
                users[name] |= {
                    uid: self._name_resolver.user(uid) or str(uid) for uid in held_by_uid
                }
                for user in members:
                    uid = self._name_resolver.uid(user)
                    if uid is not None:
                        users[name][uid] = user
        for rejection in rejections:
            if rejection.account in users and rejection.uid >= 0:
                users[rejection.account].setdefault(
                    rejection.uid, rejection.user or str(rejection.uid)
                )
        for name in self._accounts.keys() - accounts.keys():
            del self._accounts[name]
        for name, account_users in users.items():
            state = self._accounts.get(name)
            if state is None:
                state = self._accounts[name] = _RemoteAccount()
                figures = stored_figures.get(name)
                if figures is not None and figures.url == self._url:
                    state.at_us, state.limits = figures.at_us, dict(figures.limits)
            if account_users.keys() - state.users.keys() or (
                name in active and not state.is_active
            ):
                state.next_query_s = min(state.next_query_s, time.monotonic())
            state.users, state.is_active = account_users, name in active

    def _query_account(
        self, name: str, state: _RemoteAccount, stop: Stop, heartbeat: Callable[[], None]
    ) -> None:
        """Query one account's balance and adjust the ledger to it."""
        state.next_query_s = time.monotonic() + (
            min(_ACTIVE_S, self._idle_s) if state.is_active else self._idle_s
        )
        with self._ledger.reading() as t:
            ledger_balance = self._compute_balance(t, name)
        if ledger_balance is None:
            state.next_query_s = time.monotonic() + _RETRY_S
            return
        queried_at = self._now()
        largest_costs: dict[int, int] = {}
        remote_balance: int | None = None
        new_uids = [uid for uid in state.users if uid not in state.asked]
        for uid in [*new_uids, *(uid for uid in state.asked if uid in state.users)][
            :_MAX_USERS_PER_ACCOUNT
        ]:
            if stop.is_set():
                return
            last_cost = state.asked.pop(uid, None)
            state.asked[uid] = None
            try:
                largest_costs[uid], account_balance = self._query_largest_cost(
                    uid, name, last_cost, heartbeat
                )
            except RemoteRejected as error:
                log.debug("account %s, uid %d: %s", name, uid, error)
                continue
            state.asked[uid] = largest_costs[uid]
            if account_balance is not None:
                remote_balance = account_balance
        self._last_error = ""
        self._backoff.reset()
        if not largest_costs:
            return
        remote_balance = max(largest_costs.values()) if remote_balance is None else remote_balance
        with self._ledger.transaction() as t:
            if self._compute_balance(t, name) != ledger_balance:
                state.next_query_s = time.monotonic() + _RETRY_S
                return  # a charge or message came in between: the answer matches neither state
            remote_holds = t.remote_holds.sum_by_user(name)
            difference = remote_balance + sum(remote_holds.values()) - ledger_balance
            if abs(difference) >= COST_STEP:
                reason = f"account {name} at {self._host}"
                t.transfers.adjust(name, difference, Authorship(who=_PRINCIPAL, why=reason))
            spent = {member.user: member.spent for member in t.accounts.list_users(name)}
            limits = dict(state.limits)
            for uid, largest_cost in largest_costs.items():
                user = state.users[uid]
                limits.pop(user, None)
                if largest_cost < remote_balance:
                    limits[user] = spent.get(user, 0) + largest_cost + remote_holds.get(uid, 0)
            figures = _Figures(url=self._url, at_us=to_micros(queried_at), limits=limits)
            t.set_mark(f"{_MARK_PREFIX}{name}", msgspec.json.encode(figures).decode())
        self._push_changes()
        state.at_us, state.limits = figures.at_us, limits
        self._next_gate_update_s = 0.0

    def _compute_balance(self, t: "Transaction", name: str) -> int | None:
        """Compute an account's balance without the charges that are not sent to the server yet.

        A charge leaves this figure unchanged, so jobs of a busy account may end during the query.

        Returns:
            Micro-SU; None where too many messages are waiting to compute it.
        """
        items = t.outbox.list_undelivered((MYBRC_KIND,), _MAX_UNSENT)
        if len(items) == _MAX_UNSENT:
            return None
        jobs = {}
        for item in items:
            message = decode_outbox_item(item)
            if message.op == "change" and message.told.account == name and not item.aside:
                job = message.told
                jobs[job.cluster, job.job_id, job.first_submit] = job
        return t.queries.get_balance(name) + sum(job_cost_of(t, job) for job in jobs.values())

    def _query_largest_cost(
        self, uid: int, account: str, last_cost: int | None, heartbeat: Callable[[], None]
    ) -> tuple[int, int | None]:
        """Return a user's largest payable cost, and the account's balance if the server tells it.

        Raises:
            RemoteUnavailable: The server does not answer now.
            RemoteFailed: The server fails on this question.
            RemoteRejected: The server knows no such user or account.
        """

        def short(cost: int) -> str | None:
            """Return why a job of this cost cannot be submitted; None if it can."""
            heartbeat()
            verdict = self._client.query_can_submit(cost, uid, account)
            return None if verdict.success else verdict.message

        rejection = short(MAX_COST)
        if rejection is None:
            return MAX_COST, MAX_COST
        limited_by, available = _parse_rejection(rejection)
        if limited_by == "user":
            return available, MAX_COST  # the account's balance covers any cost
        if limited_by == "account":
            if available < 0:
                return available, available
            rejection = short(available)
            if rejection is None:
                return available, available
            limited_by, user_available = _parse_rejection(rejection)
            if limited_by == "user":
                return user_available, available
        return _find_largest_cost(lambda cost: short(cost) is None, last_cost), None

    def _update_gate(self) -> None:
        """Send the gate the age of each account's figures, and the users' limits."""
        now_s = time.monotonic()
        if now_s < self._next_gate_update_s:
            return
        self._next_gate_update_s = now_s + _GATE_UPDATE_INTERVAL_S
        means = {
            name: RemoteMeans(at_us=state.at_us, limits=state.limits)
            for name, state in self._accounts.items()
            if state.at_us
        }
        try:
            self._gate.send_remote_means(means)
        except GateUnavailable as error:
            log.debug("cannot report balances to the gate yet: %s", error)


def _decode_figures(text: str) -> _Figures | None:
    try:
        return msgspec.json.decode(text, type=_Figures)
    except msgspec.DecodeError:
        return None


def _parse_rejection(message: str) -> tuple[str, int]:
    """Parse a rejection: the balance it names, ``account`` or ``user``, and its rest in micro-SU.

    Return "" and 0 where it names none: the wording is no part of the API.
    """
    match = _REJECTION_PATTERN.search(message[:1000])
    if match is None:
        return "", 0
    available = (Decimal(match[3]) - Decimal(match[2])) * 1_000_000
    # Only whole hundredths can be asked for.
    return match[1], int(available) // COST_STEP * COST_STEP


def _find_largest_cost(can_pay: Callable[[int], bool], last_cost: int | None) -> int:
    """Find the largest cost that can be paid, in micro-SU; 0 where none can.

    Args:
        can_pay: Asks the server for one cost; ``MAX_COST`` is known to fail.
        last_cost: The result of the previous search, to start near it.
    """
    low, high = 0, MAX_COST // COST_STEP
    for guess in _guess_costs(last_cost):
        if guess <= low or guess >= high:
            continue
        if can_pay(guess * COST_STEP):
            low = guess
        else:
            high = guess
        if high - low == 1:
            break
    while high - low > 1:
        middle = (low + high) // 2
        if can_pay(middle * COST_STEP):
            low = middle
        else:
            high = middle
    return low * COST_STEP


def _guess_costs(last_cost: int | None) -> Iterator[int]:
    """Yield costs around the last one, in hundredths of an SU: most balances change little."""
    if last_cost is None:
        return
    center = max(0, last_cost // COST_STEP)
    yield center
    yield center + 1
    for power in range(6, 36, 6):
        yield center - (1 << power)
        yield center + (1 << power)
