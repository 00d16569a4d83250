"""Has the ledger's balances follow those that a myBRC server elsewhere keeps.

The API tells no balance: it only says whether a job of some cost can be submitted, and
why not. So each account is asked for with a user of its own; where the words of the
refusal do not show the figures, the largest cost that passes is looked for. Nobody waits
for it: what differs is entered into the ledger as an adjustment, and the gate is told how
old each account's figure is.

The server's figure is that of its own books: it counts the hold of a running job until it
is told what the job cost. The ledger counts charges alone, and the gate takes off holds.
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
"""The smallest cost that the API can tell, a hundredth of an SU, in micro-SU."""
DEAREST: Final = 999_999_999_99 * STEP
"""The largest. What can be paid even so has no bound."""
_ACTIVE_S: Final = 60.0
_PARTS: Final = 3
"""An account that nothing happens in is asked for so often within the age that is allowed."""
_LISTED_S: Final = 10.0
_TOLD_S: Final = 5.0
_AGAIN_S: Final = 1.0
_MOST_USERS: Final = 20
"""Of one account that are asked for each time."""
_MOST_UNTOLD: Final = 1000
_REFUSED: Final = timedelta(hours=1)
_FIRST_S: Final = 1.0
_MOST_S: Final = 60.0
_WHO: Final = "mybrc.remote"
_MARK: Final = "mybrc.remote/"
"""The ledger's note of an account's figures is called so, with the account's name behind it."""
_SHORT: Final = re.compile(
    r"to (account|user) balance (-?[0-9]{1,20}(?:\.[0-9]{1,4})?)"
    r" would exceed \1 allocation ([0-9]{1,20}(?:\.[0-9]{1,4})?)",
    re.ASCII,
)


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger keeps of an account's figures there, so that a restart forgets none.

    Attributes:
        url: The server that told them.
        at_us: When, µs since the epoch.
        limits: What users may spend of the account, micro-SU by name.
    """

    url: str
    at_us: int
    limits: dict[str, int]


class _Account:
    """What is known of one account there."""

    def __init__(self) -> None:
        self.users: dict[int, str] = {}
        self.asked: dict[int, int | None] = {}
        """By uid what a user's job could cost when the server was asked last, the oldest first;
        None where it said that it knows no such user."""
        self.limits: dict[str, int] = {}
        self.at_us = 0
        self.next_s = 0.0
        self.is_active = False


class Balances:
    """Asks for accounts one after the other.

    Args:
        settings: The whole configuration.
        ledger: Whose balances follow.
        link: The gate.
        push: Tells the gate what has changed in the ledger.
        now: The time.
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
        """Let go of connections."""
        self._remote.close()

    def ask_once(self, stop: Stop, beat: Callable[[], None]) -> float:
        """Ask for the account that is due, if one is, and tell the gate.

        Returns:
            Seconds to wait until the next time.
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
        """See which accounts and users there are to ask for."""
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
        """Have one account's balance follow."""
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
                return  # money or a message came in between: the answer is of neither
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
        """Compute an account's balance without the charges that the server has not been told.

        A charge leaves it as it is, so jobs of a busy account may end while the server is asked.

        Returns:
            Micro-SU; None where too much waits to be told for anybody to say.
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
        """What a job of a user may cost there at most, and what the account has if that is told.

        Raises:
            RemoteUnavailable: The server does not answer now.
            RemoteFailed: It fails over this question.
            RemoteRejected: It knows no such user or account.
        """

        def short(cost: int) -> str | None:
            """Why a job of a cost cannot be submitted; None if it can."""
            beat()
            verdict = self._remote.afford(cost, uid, account)
            return None if verdict.success else verdict.message

        words = short(DEAREST)
        if words is None:
            return DEAREST, DEAREST
        what, figure = _figure(words)
        if what == "user":
            return figure, DEAREST  # the account itself could pay all
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
        """Tell the gate how old the figures are, and what users may spend."""
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
    """Whose means a refusal names, ``account`` or ``user``, and what is left of them, micro-SU.

    "" where it names none: its words are no part of the API.
    """
    found = _SHORT.search(words[:1000])
    if found is None:
        return "", 0
    left = (Decimal(found[3]) - Decimal(found[2])) * 1_000_000
    # What is no whole hundredth cannot be asked for.
    return found[1], int(left) // STEP * STEP


def _largest(can_pay: Callable[[int], bool], last: int | None) -> int:
    """The largest cost that can be paid, micro-SU; 0 where none can.

    Args:
        can_pay: Asks for one cost; the dearest cannot be paid.
        last: Where it was the time before.
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
    """Costs around the last one, in hundredths: most balances change little."""
    if last is None:
        return
    at = max(0, last // STEP)
    yield at
    yield at + 1
    for power in range(6, 36, 6):
        yield at - (1 << power)
        yield at + (1 << power)
