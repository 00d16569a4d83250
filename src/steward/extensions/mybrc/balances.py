"""Balance synchronization: the ledger follows the balances of a myBRC server elsewhere.

The API returns no balance: it only tells whether a job of some cost can be submitted, and why not.
So :class:`Balances` asks for each account, with one of its users; where the text of the refusal
does not show the figures, it searches for the largest cost that passes. This runs in the
background: a difference becomes an adjustment in the ledger, and the gate learns how old each
account's figure is.

The server's figure is that of its own books: it counts the hold of a running job until it is told
what the job cost. The ledger counts charges alone, and the gate subtracts holds.
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
from steward.bank.ledger import By
from steward.core.config import Settings
from steward.core.timestamps import micros
from steward.core.waits import Backoff, Stop
from steward.extensions.mybrc.outbox import KIND
from steward.extensions.mybrc.remote import Remote, cost_of, read
from steward.extensions.mybrc.wire import RemoteFailed, RemoteRejected, RemoteUnavailable
from steward.slurm.users import People

if TYPE_CHECKING:
    from steward.bank.gate.client import GateLink
    from steward.bank.ledger.ledger import Ledger, Transaction

log = logging.getLogger(__name__)

STEP: Final = 10_000
"""Smallest cost that the API can express: a hundredth of an SU, in micro-SU."""
DEAREST: Final = 999_999_999_99 * STEP
"""Largest cost that the API can express, in micro-SU. A balance that covers it counts as unlimited.
"""
_ACTIVE_S: Final = 60.0
"""Interval of queries for an account with recent activity, in seconds."""
_PARTS: Final = 3
"""Queries of an idle account within the allowed age of a balance."""
_LISTED_S: Final = 10.0
"""Interval at which the list of accounts is updated, in seconds."""
_TOLD_S: Final = 5.0
"""Interval at which the gate is updated, in seconds."""
_AGAIN_S: Final = 1.0
"""Delay before another query after a change in between, in seconds."""
_MOST_USERS: Final = 20
"""Most users of one account to query each time."""
_MOST_UNTOLD: Final = 1000
"""Unsent messages at which a balance is not computed."""
_REFUSED: Final = timedelta(hours=1)
"""Time for which a rejected submit makes an account active."""
_FIRST_S: Final = 1.0
_MOST_S: Final = 60.0
_WHO: Final = "mybrc.remote"
"""Principal of the adjustments in the ledger."""
_MARK: Final = "mybrc.remote/"
"""Prefix of the ledger mark that stores an account's figures; the account's name follows."""
_SHORT: Final = re.compile(
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


class _Account:
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


class Balances:
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
        link: "GateLink",
        push: Callable[[], None],
        now: Callable[[], datetime],
    ) -> None:
        self._ledger = ledger
        self._link = link
        self._push = push
        self._now = now
        self._remote = Remote(settings)
        self._url = settings.bank.remote.url
        self._host = urlsplit(self._url).hostname or ""
        self._idle_s = settings.bank.remote.balance_age_s / _PARTS
        self._people = People()
        self._accounts: dict[str, _Account] = {}
        self._listed_s = self._told_s = 0.0
        self._backoff = Backoff(_FIRST_S, _MOST_S)
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
        wait_s = _AGAIN_S
        try:
            now_s = time.monotonic()
            if now_s >= self._listed_s:
                self._list()
                self._listed_s = now_s + _LISTED_S
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
            refused = t.refusals.since(self._now() - _REFUSED)
            names = {
                each.name: each
                for each in t.accounts.all()
                if not each.closed and not each.draws_on_parent
            }
            users: dict[str, dict[int, str]] = {name: {} for name in names}
            new = [name for name in names if name not in self._accounts]
            kept = {name: _decode(text) for name in new if (text := t.mark(f"{_MARK}{name}"))}
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
                known = self._accounts[name] = _Account()
                figures = kept.get(name)
                if figures is not None and figures.url == self._url:
                    known.at_us, known.limits = figures.at_us, dict(figures.limits)
            if those.keys() - known.users.keys() or (name in active and not known.is_active):
                known.next_s = min(known.next_s, time.monotonic())
            known.users, known.is_active = those, name in active

    def _ask(self, name: str, known: _Account, stop: Stop, beat: Callable[[], None]) -> None:
        """Query one account's balance and adjust the ledger to it."""
        known.next_s = time.monotonic() + (
            min(_ACTIVE_S, self._idle_s) if known.is_active else self._idle_s
        )
        with self._ledger.reading() as t:
            before = self._standing(t, name)
        if before is None:
            known.next_s = time.monotonic() + _AGAIN_S
            return
        at = self._now()
        left: dict[int, int] = {}
        whole: int | None = None
        never = [uid for uid in known.users if uid not in known.asked]
        for uid in [*never, *(uid for uid in known.asked if uid in known.users)][:_MOST_USERS]:
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
                known.next_s = time.monotonic() + _AGAIN_S
                return  # a charge or message came in between: the answer matches neither state
            counted = t.remote_holds.by_user(name)
            missing = whole + sum(counted.values()) - before
            if abs(missing) >= STEP:
                why = f"account {name} at {self._host}"
                t.transfers.adjust(name, missing, By(who=_WHO, why=why))
            spent = {member.user: member.spent for member in t.accounts.users(name)}
            limits = dict(known.limits)
            for uid, most in left.items():
                user = known.users[uid]
                limits.pop(user, None)
                if most < whole:
                    limits[user] = spent.get(user, 0) + most + counted.get(uid, 0)
            figures = _Figures(url=self._url, at_us=micros(at), limits=limits)
            t.set_mark(f"{_MARK}{name}", msgspec.json.encode(figures).decode())
        self._push()
        known.at_us, known.limits = figures.at_us, limits
        self._told_s = 0.0

    def _standing(self, t: "Transaction", name: str) -> int | None:
        """Compute an account's balance without the charges that are not sent to the server yet.

        A charge leaves this figure unchanged, so jobs of a busy account may end during the query.

        Returns:
            Micro-SU; None where too many messages are waiting to compute it.
        """
        items = t.outbox.untold((KIND,), _MOST_UNTOLD)
        if len(items) == _MOST_UNTOLD:
            return None
        jobs = {}
        for item in items:
            message = read(item)
            if message.op == "change" and message.told.account == name and not item.aside:
                told = message.told
                jobs[told.cluster, told.job_id, told.first_submit] = told
        return t.reading.balance(name) + sum(cost_of(t, told) for told in jobs.values())

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

        words = short(DEAREST)
        if words is None:
            return DEAREST, DEAREST
        what, figure = _figure(words)
        if what == "user":
            return figure, DEAREST  # the account's balance covers any cost
        if what == "account":
            if figure < 0:
                return figure, figure
            words = short(figure)
            if words is None:
                return figure, figure
            what, of_user = _figure(words)
            if what == "user":
                return of_user, figure
        return _largest(lambda cost: short(cost) is None, last), None

    def _tell(self) -> None:
        """Send the gate the age of each account's figures, and the users' limits."""
        now_s = time.monotonic()
        if now_s < self._told_s:
            return
        self._told_s = now_s + _TOLD_S
        means = {
            name: RemoteMeans(at_us=known.at_us, limits=known.limits)
            for name, known in self._accounts.items()
            if known.at_us
        }
        try:
            self._link.remote_means(means)
        except GateUnavailable as error:
            log.debug("the gate is not told of balances yet: %s", error)


def _decode(text: str) -> _Figures | None:
    try:
        return msgspec.json.decode(text, type=_Figures)
    except msgspec.DecodeError:
        return None


def _figure(words: str) -> tuple[str, int]:
    """Parse a refusal: whose balance it names, ``account`` or ``user``, and what is left, micro-SU.

    Return "" and 0 where it names none: the wording is no part of the API.
    """
    found = _SHORT.search(words[:1000])
    if found is None:
        return "", 0
    left = (Decimal(found[3]) - Decimal(found[2])) * 1_000_000
    # Only whole hundredths can be asked for.
    return found[1], int(left) // STEP * STEP


def _largest(can_pay: Callable[[int], bool], last: int | None) -> int:
    """Find the largest cost that can be paid, in micro-SU; 0 where none can.

    Args:
        can_pay: Asks the server for one cost; ``DEAREST`` is known to fail.
        last: The result of the previous search, to start near it.
    """
    low, high = 0, DEAREST // STEP
    for guess in _guesses(last):
        if guess <= low or guess >= high:
            continue
        if can_pay(guess * STEP):
            low = guess
        else:
            high = guess
        if high - low == 1:
            break
    while high - low > 1:
        middle = (low + high) // 2
        if can_pay(middle * STEP):
            low = middle
        else:
            high = middle
    return low * STEP


def _guesses(last: int | None) -> Iterator[int]:
    """Yield costs around the last one, in hundredths of an SU: most balances change little."""
    if last is None:
        return
    at = max(0, last // STEP)
    yield at
    yield at + 1
    for power in range(6, 36, 6):
        yield at - (1 << power)
        yield at + (1 << power)
