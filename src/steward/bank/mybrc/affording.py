"""Whether a job of some cost can be submitted: ``can_submit_job`` of the myBRC API.

The gate is asked, since only it knows what is spoken for. While it does not
answer the ledger is asked where the gate's policy is to allow, which is more
than the old plugins would do: they let everything pass.
"""

import re
from typing import TYPE_CHECKING, Final

from steward.bank.errors import (
    BankError,
    BankRefused,
    BankUsage,
    GateUnavailable,
    LedgerUnavailable,
)
from steward.bank.ledger import Account, Member
from steward.bank.money import Unit, show
from steward.bank.mybrc import amounts
from steward.bank.mybrc.errors import ApiError
from steward.bank.mybrc.shapes import PLAIN, Answer
from steward.bank.records import Mode, ModeRule
from steward.config import Settings
from steward.errors import StewardError
from steward.slurm.people import People

if TYPE_CHECKING:
    from steward.bank.gate.link import GateLink
    from steward.bank.gate.shapes import Means
    from steward.bank.ledger.opened import Ledger

_UID: Final = re.compile("[0-9]{1,10}", re.ASCII)


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
        self._unit = Unit(settings.bank.unit, settings.bank.decimals)

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
            not (user_id.isascii() and user_id.isdecimal() and len(user_id) <= 10)
            or int(user_id) >= 2**32
        ):
            raise ApiError(400, f"user_id {user_id[:60]!r} is no number")
        user = self._people.user(int(user_id)) or str(int(user_id))
        name = account_id.strip().lower()
        if not re.fullmatch(PLAIN, name):
            raise ApiError(400, "No account exists with such an account_id.")
        try:
            with self._ledger.reading() as t:
                account = t.accounts.get(name)
                members = t.accounts.users(name) if account else []
                rules = t.rules().modes
        except LedgerUnavailable as error:
            return self._without_ledger(cost, user, name, error)
        if account is None or not account.known:
            return self._unknown(account_id)
        why = self._objection(cost, user, account, members)
        mode = mode_of(rules, self._cluster, name)
        if why and mode in ("off", "observe"):
            return Answer(success=True, message=f"The bank only watches here ({mode}): {why}")
        if why:
            return Answer(success=False, message=why)
        return Answer(success=True, message=f"A job with job_cost {job_cost} can be submitted.")

    def _without_ledger(self, cost: int, user: str, name: str, error: LedgerUnavailable) -> Answer:
        """What the gate alone says: it goes on for a while without the ledger.

        Raises:
            LedgerUnavailable: The gate does not answer either, and its policy is to allow:
                the client then does what it does where there is no answer.
        """
        try:
            why = self._too_dear(cost, user, self._link.means(name, user))
        except StewardError as gone:
            if self._settings.gate.policy == "allow":
                raise error from gone
            why = f"What is left is not known just now: {gone}"
        return Answer(success=not why, message=why or "The gate says that it can be paid.")

    def _unknown(self, account_id: str) -> Answer:
        if self._settings.bank.unknown_accounts == "allow":
            return Answer(success=True, message=f"The bank does not know account {account_id}.")
        raise ApiError(400, f"No account exists with account_id {account_id}.")

    def _objection(self, cost: int, user: str, account: Account, members: list[Member]) -> str:
        """Why it cannot be; "" if it can."""
        if account.closed:
            return f"Account {account.name} is closed."
        listed = {member.user: member for member in members if member.listed}
        if account.only_listed and user not in listed:
            return f"User {user} is not a member of account {account.name}."
        try:
            return self._too_dear(cost, user, self._link.means(account.name, user))
        except (GateUnavailable, BankUsage) as error:
            # BankUsage: the gate has not been told of the account yet.
            if self._settings.gate.policy == "deny":
                return f"What is held is not known just now: {error}"
        except (BankError, BankRefused) as error:
            return str(error)
        member = next((one for one in members if one.user == user), None)
        return self._too_dear(cost, user, self._by_ledger(account.name, member))

    def _by_ledger(self, name: str, member: Member | None) -> "Means":
        from steward.bank.gate.shapes import Means

        with self._ledger.reading() as t:
            payer = t.accounts.payer(name)
            credit = t.accounts.need(payer).credit
            balance = t.reading.balance(name)
        return Means(
            account=name,
            payer=payer,
            available=balance + credit,
            balance=balance,
            held=0,
            credit=credit,
            user_limit=member.limit if member else None,
            user_spent=member.spent if member else 0,
        )

    def _too_dear(self, cost: int, user: str, means: "Means") -> str:
        if cost > means.available:
            return (
                f"A job that may cost {self._show(cost)} is more than account {means.account} "
                f"can pay: {self._show(means.available)} is free, {self._show(means.held)} held."
            )
        if means.user_limit is not None:
            left = means.user_limit - means.user_spent - means.user_held
            if cost > left:
                return (
                    f"A job that may cost {self._show(cost)} is more than user {user} may spend "
                    f"of account {means.account}: {self._show(max(0, left))} of "
                    f"{self._show(means.user_limit)} is left."
                )
        share = self._settings.bank.hold_share
        most = int((means.available + means.held) * share)
        if share < 1 and cost + means.user_held > most:
            return (
                f"Jobs of user {user} may hold {self._show(max(0, most))} of account "
                f"{means.account} at once, and hold {self._show(means.user_held)}."
            )
        return ""

    def _show(self, amount: int) -> str:
        return show(amount, self._unit)


def mode_of(rules: tuple[ModeRule, ...], cluster: str, account: str) -> Mode | None:
    """The mode that somebody has set for an account; None where nobody has.

    The client refuses jobs by its own setting: the bank's default to observe, which
    nobody has chosen, does not take that from it.
    """
    fitting = [
        rule
        for rule in rules
        if not rule.partition and rule.cluster in ("", cluster) and rule.account in ("", account)
    ]
    fitting.sort(key=lambda rule: (bool(rule.account), bool(rule.cluster)))
    return fitting[-1].mode if fitting else None
