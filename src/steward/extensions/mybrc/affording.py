"""Whether a job of some cost can be submitted: ``can_submit_job`` of the myBRC API.

The gate is asked, by whose rules it is: only it knows what is spoken for. While it does
not answer the ledger is asked where the gate's policy is to allow, which is more than the
old plugins would do: they let everything pass.
"""

import re
import threading
import time
from typing import TYPE_CHECKING, Final

from steward.bank.errors import BankUsage, LedgerUnavailable
from steward.bank.gate.deciding import Deciding
from steward.bank.gate.doubts import Doubts
from steward.bank.gate.ground import Ground
from steward.bank.gate.purses import Purses
from steward.bank.records import Description, Mode
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.extensions.mybrc import amounts
from steward.extensions.mybrc.errors import ApiError
from steward.extensions.mybrc.shapes import PLAIN, Answer
from steward.slurm.people import People

if TYPE_CHECKING:
    from steward.bank.gate.link import GateLink
    from steward.bank.ledger.opened import Ledger

_MOST_DIGITS: Final = 10


class Affording:
    """Answers whether jobs can be submitted.

    Args:
        settings: The whole configuration.
        cluster: Whose jobs are asked of.
        ledger: Knows accounts, and what is left in them.
        link: The gate.
        people: Knows names of users.
    """

    def __init__(
        self, settings: Settings, cluster: str, ledger: "Ledger", link: "GateLink", people: People
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._ledger = ledger
        self._link = link
        self._people = people
        # The gate's rule, without its holds: for while it does not answer.
        self._purses = Purses()
        self._ground = Ground(settings)
        doubts = Doubts(settings.bank.unseen_share)
        self._deciding = Deciding(self._purses, self._ground, doubts)
        # Questions come from several threads.
        self._lock = threading.Lock()

    def answer(self, job_cost: str, user_id: str, account_id: str) -> Answer:
        """Whether a job can be submitted.

        Raises:
            ApiError: Something about the question is wrong.
        """
        try:
            cost = amounts.cost(job_cost)
        except BankUsage as error:
            raise ApiError(400, str(error)) from error
        user_id = user_id.strip()
        if (
            not (user_id.isascii() and user_id.isdecimal() and len(user_id) <= _MOST_DIGITS)
            or int(user_id) >= 2**32
        ):
            raise ApiError(400, f"user_id {user_id[:60]!r} is no number")
        name = account_id.strip().lower()
        if not name or not re.fullmatch(PLAIN, name):
            raise ApiError(400, "No account exists with such an account_id.")
        uid = int(user_id)
        user = self._people.user(uid)
        asked = Description(uid=uid, account=name)
        try:
            verdict = self._link.would(self._cluster, asked, user, cost=cost)
        except StewardError as gone:
            return self._by_ledger(cost, asked, user, gone)
        return _answered("" if verdict.ok else verdict.say, verdict.chosen)

    def _by_ledger(self, cost: int, asked: Description, user: str, gone: StewardError) -> Answer:
        """What can be said while the gate does not answer, or knows no such account yet.

        The gate's own rule decides by what the ledger knows: neither holds nor slurmdbd's
        associations.

        Raises:
            ApiError: There is no such account.
            LedgerUnavailable: The ledger does not answer either, and the gate's policy is to
                allow: the client then does what it does where there is no answer.
        """
        is_strict = self._settings.gate.policy == "deny"
        now_us = time.time_ns() // 1000
        try:
            with self._lock, self._ledger.reading() as t:
                self._purses.put(t.books(self._purses.position))
                self._ground.put_rules(t.rules())
                decision = self._deciding.afford(self._cluster, asked, user, cost, now_us)
        except LedgerUnavailable:
            if not is_strict:
                raise
            return Answer(success=False, message=f"What is left is not known just now: {gone}")
        if asked.account not in self._purses.accounts:
            return self._unknown(asked.account)
        why = "" if decision.ok else decision.say
        if not why and is_strict:
            why = f"What is held is not known just now: {gone}"
        return _answered(why, self._ground.chosen(self._cluster, asked.account))

    def _unknown(self, account: str) -> Answer:
        if self._settings.bank.unknown_accounts == "allow":
            return Answer(success=True, message=f"The bank does not know account {account}.")
        raise ApiError(400, f"No account exists with account_id {account}.")


def _answered(why: str, mode: Mode | None) -> Answer:
    """The answer where something speaks against a job, or nothing.

    The client refuses jobs by its own setting: the bank's default to observe, which
    nobody has chosen, does not take that from it.
    """
    if why and mode in ("off", "observe"):
        return Answer(success=True, message=f"The bank only watches here ({mode}): {why}")
    return Answer(success=not why, message=why or "The job can be submitted.")
