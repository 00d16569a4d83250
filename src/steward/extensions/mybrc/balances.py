"""Balance synchronization: the ledger follows the balances of a myBRC server elsewhere.

The API returns no balance: it only tells whether a job of some cost can be submitted, and why not.
So :class:`RemoteBalances` asks for each account, with one of its users; where the text of the
refusal does not show the figures, it searches for the largest cost that passes. This runs in the
background: the daemon's worker calls ``ask_once``, which queries one account. A difference becomes
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
_REFUSAL_PATTERN: Final = re.compile(
    r"to (account|user) balance (-?[0-9]{1,20}(?:\.[0-9]{1,4})?)"
    r" would exceed \1 allocation ([0-9]{1,20}(?:\.[0-9]{1,4})?)",
    re.ASCII,
)
"""Text of a refusal: whose balance, its usage and its allocation."""


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
        self.next_s = 0.0
        self.is_active = False


class RemoteBalances:
    """Poller that queries accounts one after the other and adjusts the ledger.

    Args:
        settings: The whole configuration.
        ledger: Ledger whose balances follow the server's.
        link: Connection to the gate.
        push: Makes the gate read the ledger's changes.
        now: Returns the current time.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: "Ledger",
        link: "GateClient",
        push: Callable[[], None],
        now: Callable[[], datetime],
    ) -> None:
        self._ledger = ledger
        self._link = link
        self._push = push
        self._now = now
        self._remote = MybrcClient(settings)
        self._url = settings.bank.remote.url
        self._host = urlsplit(self._url).hostname or ""
        self._idle_s = settings.bank.remote.balance_age_s / _IDLE_POLLS_PER_AGE
        self._people = NameResolver()
        self._accounts: dict[str, _RemoteAccount] = {}
        self._listed_s = self._told_s = 0.0
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        self._away_s = 0.0
        self._said = ""

    def close(self) -> None:
        """Close connections."""
        self._remote.close()

    def ask_once(self, stop: Stop, beat: Callable[[], None]) -> float:
        """Query the account that is due, if any, and update the gate.

        Returns:
            Seconds to wait before the next call.
        """
        wait_s = _RETRY_S
        try:
            now_s = time.monotonic()
            if now_s >= self._listed_s:
                self._list()
                self._listed_s = now_s + _LIST_INTERVAL_S
            due = min(self._accounts, key=lambda name: self._accounts[name].next_s, default=None)
            if due is not None and now_s >= max(self._accounts[due].next_s, self._away_s):
                self._ask(due, self._accounts[due], stop, beat)
                wait_s = 0.0
            self._tell()
        except (RemoteUnavailable, RemoteFailed, LedgerUnavailable) as error:
            self._away_s = time.monotonic() + self._backoff.next_s()
            if str(error) != self._said:
                self._said = str(error)
                log.warning("the balances at the myBRC server are not read: %s", error)
        return wait_s

    def _list(self) -> None:
        """Update the list of accounts and users to query."""
        with self._ledger.reading() as t:
            refused = t.refusals.since(self._now() - _REJECTION_WINDOW)
            names = {
                each.name: each
                for each in t.accounts.all()
                if not each.closed and not each.draws_on_parent
            }
            users: dict[str, dict[int, str]] = {name: {} for name in names}
            new = [name for name in names if name not in self._accounts]
            kept = {
                name: _decode_figures(text)
                for name in new
                if (text := t.mark(f"{_MARK_PREFIX}{name}"))
            }
            active = {one.account for one in refused}
            for name, each in names.items():
                held = t.remote_holds.by_user(name)
                if held:
                    active.add(name)
                members = [*each.owners, *(member.user for member in t.accounts.users(name))]
                users[name] |= {uid: self._people.user(uid) or str(uid) for uid in held}
                for user in members:
                    uid = self._people.uid(user)
                    if uid is not None:
                        users[name][uid] = user
        for one in refused:
            if one.account in users and one.uid >= 0:
                users[one.account].setdefault(one.uid, one.user or str(one.uid))
        for name in self._accounts.keys() - names.keys():
            del self._accounts[name]
        for name, those in users.items():
            known = self._accounts.get(name)
            if known is None:
                known = self._accounts[name] = _RemoteAccount()
                figures = kept.get(name)
                if figures is not None and figures.url == self._url:
                    known.at_us, known.limits = figures.at_us, dict(figures.limits)
            if those.keys() - known.users.keys() or (name in active and not known.is_active):
                known.next_s = min(known.next_s, time.monotonic())
            known.users, known.is_active = those, name in active

    def _ask(self, name: str, known: _RemoteAccount, stop: Stop, beat: Callable[[], None]) -> None:
        """Query one account's balance and adjust the ledger to it."""
        known.next_s = time.monotonic() + (
            min(_ACTIVE_S, self._idle_s) if known.is_active else self._idle_s
        )
        with self._ledger.reading() as t:
            before = self._standing(t, name)
        if before is None:
            known.next_s = time.monotonic() + _RETRY_S
            return
        at = self._now()
        left: dict[int, int] = {}
        whole: int | None = None
        never = [uid for uid in known.users if uid not in known.asked]
        for uid in [*never, *(uid for uid in known.asked if uid in known.users)][
            :_MAX_USERS_PER_ACCOUNT
        ]:
            if stop.is_set():
                return
            last = known.asked.pop(uid, None)
            known.asked[uid] = None
            try:
                left[uid], of_account = self._left(uid, name, last, beat)
            except RemoteRejected as error:
                log.debug("account %s, uid %d: %s", name, uid, error)
                continue
            known.asked[uid] = left[uid]
            if of_account is not None:
                whole = of_account
        self._said = ""
        self._backoff.reset()
        if not left:
            return
        whole = max(left.values()) if whole is None else whole
        with self._ledger.transaction() as t:
            if self._standing(t, name) != before:
                known.next_s = time.monotonic() + _RETRY_S
                return  # a charge or message came in between: the answer matches neither state
            counted = t.remote_holds.by_user(name)
            missing = whole + sum(counted.values()) - before
            if abs(missing) >= COST_STEP:
                why = f"account {name} at {self._host}"
                t.transfers.adjust(name, missing, Authorship(who=_PRINCIPAL, why=why))
            spent = {member.user: member.spent for member in t.accounts.users(name)}
            limits = dict(known.limits)
            for uid, most in left.items():
                user = known.users[uid]
                limits.pop(user, None)
                if most < whole:
                    limits[user] = spent.get(user, 0) + most + counted.get(uid, 0)
            figures = _Figures(url=self._url, at_us=to_micros(at), limits=limits)
            t.set_mark(f"{_MARK_PREFIX}{name}", msgspec.json.encode(figures).decode())
        self._push()
        known.at_us, known.limits = figures.at_us, limits
        self._told_s = 0.0

    def _standing(self, t: "Transaction", name: str) -> int | None:
        """Compute an account's balance without the charges that are not sent to the server yet.

        A charge leaves this figure unchanged, so jobs of a busy account may end during the query.

        Returns:
            Micro-SU; None where too many messages are waiting to compute it.
        """
        items = t.outbox.untold((MYBRC_KIND,), _MAX_UNSENT)
        if len(items) == _MAX_UNSENT:
            return None
        jobs = {}
        for item in items:
            message = decode_outbox_item(item)
            if message.op == "change" and message.told.account == name and not item.aside:
                told = message.told
                jobs[told.cluster, told.job_id, told.first_submit] = told
        return t.reading.balance(name) + sum(job_cost_of(t, told) for told in jobs.values())

    def _left(
        self, uid: int, account: str, last: int | None, beat: Callable[[], None]
    ) -> tuple[int, int | None]:
        """Return a user's largest payable cost, and the account's balance if the server tells it.

        Raises:
            RemoteUnavailable: The server does not answer now.
            RemoteFailed: The server fails on this question.
            RemoteRejected: The server knows no such user or account.
        """

        def short(cost: int) -> str | None:
            """Return why a job of this cost cannot be submitted; None if it can."""
            beat()
            verdict = self._remote.afford(cost, uid, account)
            return None if verdict.success else verdict.message

        words = short(MAX_COST)
        if words is None:
            return MAX_COST, MAX_COST
        what, figure = _parse_refusal(words)
        if what == "user":
            return figure, MAX_COST  # the account's balance covers any cost
        if what == "account":
            if figure < 0:
                return figure, figure
            words = short(figure)
            if words is None:
                return figure, figure
            what, of_user = _parse_refusal(words)
            if what == "user":
                return of_user, figure
        return _find_largest_cost(lambda cost: short(cost) is None, last), None

    def _tell(self) -> None:
        """Send the gate the age of each account's figures, and the users' limits."""
        now_s = time.monotonic()
        if now_s < self._told_s:
            return
        self._told_s = now_s + _GATE_UPDATE_INTERVAL_S
        means = {
            name: RemoteMeans(at_us=known.at_us, limits=known.limits)
            for name, known in self._accounts.items()
            if known.at_us
        }
        try:
            self._link.remote_means(means)
        except GateUnavailable as error:
            log.debug("the gate is not told of balances yet: %s", error)


def _decode_figures(text: str) -> _Figures | None:
    try:
        return msgspec.json.decode(text, type=_Figures)
    except msgspec.DecodeError:
        return None


def _parse_refusal(words: str) -> tuple[str, int]:
    """Parse a refusal: whose balance it names, ``account`` or ``user``, and what is left, micro-SU.

    Return "" and 0 where it names none: the wording is no part of the API.
    """
    found = _REFUSAL_PATTERN.search(words[:1000])
    if found is None:
        return "", 0
    left = (Decimal(found[3]) - Decimal(found[2])) * 1_000_000
    # Only whole hundredths can be asked for.
    return found[1], int(left) // COST_STEP * COST_STEP


def _find_largest_cost(can_pay: Callable[[int], bool], last: int | None) -> int:
    """Find the largest cost that can be paid, in micro-SU; 0 where none can.

    Args:
        can_pay: Asks the server for one cost; ``MAX_COST`` is known to fail.
        last: The result of the previous search, to start near it.
    """
    low, high = 0, MAX_COST // COST_STEP
    for guess in _guess_costs(last):
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


def _guess_costs(last: int | None) -> Iterator[int]:
    """Yield costs around the last one, in hundredths of an SU: most balances change little."""
    if last is None:
        return
    at = max(0, last // COST_STEP)
    yield at
    yield at + 1
    for power in range(6, 36, 6):
        yield at - (1 << power)
        yield at + (1 << power)
