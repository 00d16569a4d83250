"""Rates and modes in the ledger: prices of partitions, and how much the gate enforces.

:class:`LedgerRates` only ever adds rates: a job keeps the rates of its first submission, so a price
change is a new rate from a later time on. :class:`LedgerModes` sets modes (off, observe, enforce)
of a cluster, a partition or an account. :func:`export_rules` returns both for the gate.
"""

from datetime import datetime
from typing import get_args

import msgspec
from sqlalchemy import delete, func, select

from steward.bank.errors import BankUsage
from steward.bank.ledger.postings import LedgerSession, encode_ledger_request
from steward.bank.ledger.records import Authorship
from steward.bank.ledger.tables import StoredRate, mode, rate
from steward.bank.records import BankRules, Mode, ModeRule, Rate
from steward.core.timestamps import to_micros


class LedgerRates:
    """Rates in the ledger: add and query them.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def add(self, new: Rate, author: Authorship) -> Rate:
        """Add a rate for jobs first submitted from ``valid_from`` on; None means now.

        Raises:
            BankUsage: Cluster or partition is missing, or the idempotency key was used for a
                different request.
        """
        if not new.cluster or not new.partition:
            raise BankUsage("a rate needs a cluster and a partition: name both", new)
        session = self._session
        request = encode_ledger_request(
            "rate.add", msgspec.structs.replace(new, number=0, created_us=0)
        )
        earlier = session.find_repeat(author, request)
        if earlier is not None:
            return next(
                candidate
                for candidate in self.list_all()
                if self._find_transaction(candidate.number) == earlier
            )
        now: datetime = session.now(author)
        valid_from = new.valid_from or now
        number = (session.fetch_value(select(func.max(rate.c.number))) or 0) + 1
        stored = msgspec.structs.replace(
            new, number=number, valid_from=valid_from, created_us=to_micros(now)
        )
        transaction = session.add_transaction("rate.add", author, request=request)
        session.rules_seq = session.seq
        session.insert(
            rate,
            StoredRate(
                number=number,
                cluster=stored.cluster,
                partition=stored.partition,
                qos=stored.qos,
                valid_from=valid_from,
                made_by=transaction.number,
                rate=stored,
            ),
        )
        return stored

    def list_all(self, cluster: str = "") -> list[Rate]:
        """List all rates, or a cluster's, by number."""
        query = select(rate.c.rate).order_by(rate.c.number)
        if cluster:
            query = query.where(rate.c.cluster == cluster)
        return [stored for (stored,) in self._session.fetch_rows(query)]

    def get(self, number: int) -> Rate | None:
        """Return the rate of this number, or None."""
        stored: Rate | None = self._session.fetch_value(
            select(rate.c.rate).where(rate.c.number == number)
        )
        return stored

    def _find_transaction(self, number: int) -> int:
        return int(self._session.fetch_value(select(rate.c.made_by).where(rate.c.number == number)))


class LedgerModes:
    """Mode rules in the ledger: set, remove and list them.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def set(self, rule: ModeRule, author: Authorship) -> None:
        """Set the mode of a cluster, partition or account; replaces a rule of the same scope.

        Raises:
            BankUsage: The mode does not exist.
        """
        if rule.mode not in get_args(Mode):
            raise BankUsage(f"invalid mode {rule.mode!r}: use off, observe or enforce", rule.mode)
        rule = msgspec.structs.replace(rule, account=rule.account.lower())
        request = encode_ledger_request("mode.set", rule)
        if self._session.find_repeat(author, request) is not None or rule in self.list_all():
            return
        self._session.add_transaction(
            "mode.set", author, request=request, why=_mode_reason(author, rule.mode, rule)
        )
        self._session.rules_seq = self._session.seq
        self._delete(rule)
        self._session.insert(mode, rule)

    def remove(self, cluster: str, partition: str, account: str, author: Authorship) -> None:
        """Remove the mode rule of exactly this scope.

        Raises:
            BankUsage: No rule has this scope.
        """
        rule = ModeRule(mode="off", cluster=cluster, partition=partition, account=account.lower())
        request = encode_ledger_request("mode.drop", rule)
        if self._session.find_repeat(author, request) is not None:
            return
        if not self._delete(rule):
            raise BankUsage(
                "no mode is set for exactly this scope: 'steward bank mode' lists the modes",
                rule,
            )
        self._session.add_transaction(
            "mode.drop", author, request=request, why=_mode_reason(author, "none", rule)
        )
        self._session.rules_seq = self._session.seq

    def list_all(self) -> list[ModeRule]:
        """List all mode rules."""
        query = select(mode).order_by(*mode.primary_key)
        return self._session.fetch(ModeRule, query)

    def _delete(self, rule: ModeRule) -> int:
        """Delete the mode rule of exactly a rule's scope; return the number of rows."""
        scope = (column == getattr(rule, column.key) for column in mode.primary_key)
        return self._session.execute(delete(mode).where(*scope))


def export_rules(session: LedgerSession, rates: LedgerRates, modes: LedgerModes) -> BankRules:
    """Return all rates and modes, for the gate."""
    return BankRules(
        seq=session.rules_seq, modes=tuple(modes.list_all()), rates=tuple(rates.list_all())
    )


def _mode_reason(author: Authorship, mode_name: str, rule: ModeRule) -> str:
    scope = " ".join(name for name in (rule.cluster, rule.partition, rule.account) if name)
    return f"{mode_name} for {scope or 'everything'}" + (f": {author.why}" if author.why else "")
