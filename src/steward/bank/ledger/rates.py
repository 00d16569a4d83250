"""Rates and modes in the ledger: prices of partitions, and how much the gate enforces.

:class:`LedgerRates` only ever adds rates: a job keeps the rates of its first submission, so a price
change is a new rate from a later time on. :class:`LedgerModes` sets modes (off, observe, gate) of a
cluster, a partition or an account. :func:`export_rules` returns both for the gate.
"""

from datetime import datetime
from typing import Any, Final, get_args

import msgspec
from sqlalchemy import delete, func, insert, select

from steward.bank.errors import BankUsage
from steward.bank.ledger.postings import LedgerSession, encode_ledger_request, sanitize_text
from steward.bank.ledger.records import Authorship
from steward.bank.ledger.tables import mode, rate
from steward.bank.records import BankRules, Mode, ModeRule, Rate
from steward.core.timestamps import to_micros

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Rate)


class LedgerRates:
    """Rates in the ledger: add and query them.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def add(self, new: Rate, by: Authorship) -> Rate:
        """Add a rate for jobs first submitted from ``valid_from`` on; None means now.

        Raises:
            BankUsage: Cluster or partition is missing, or the idempotency key was used for a
                different request.
        """
        if not new.cluster or not new.partition:
            raise BankUsage("a rate names a cluster and a partition", new)
        session = self._session
        asked = encode_ledger_request(
            "rate.add", msgspec.structs.replace(new, number=0, created_us=0)
        )
        done = session.done(by, asked)
        if done is not None:
            return next(each for each in self.all() if self._made_by(each.number) == done)
        now: datetime = session.now(by)
        since = new.valid_from or now
        number = (session.value(select(func.max(rate.c.number))) or 0) + 1
        made = msgspec.structs.replace(
            new, number=number, valid_from=since, created_us=to_micros(now)
        )
        act = session.act("rate.add", by, asked=asked)
        session.rules_seq = session.seq
        session.run(
            insert(rate).values(
                number=number,
                cluster=sanitize_text(made.cluster),
                partition_name=sanitize_text(made.partition),
                qos=sanitize_text(made.qos),
                valid_from_us=to_micros(since),
                body=_encoder.encode(made),
                made_by=act,
            )
        )
        return made

    def all(self, cluster: str = "") -> list[Rate]:
        """List all rates, or a cluster's, by number."""
        chosen = select(rate.c.body).order_by(rate.c.number)
        if cluster:
            chosen = chosen.where(rate.c.cluster == cluster)
        return [_decoder.decode(row.body) for row in self._session.rows(chosen)]

    def get(self, number: int) -> Rate | None:
        """Return the rate of this number, or None."""
        body = self._session.value(select(rate.c.body).where(rate.c.number == number))
        return None if body is None else _decoder.decode(body)

    def _made_by(self, number: int) -> int:
        return int(self._session.value(select(rate.c.made_by).where(rate.c.number == number)))


class LedgerModes:
    """Mode rules in the ledger: set, remove and list them.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def set(self, rule: ModeRule, by: Authorship) -> None:
        """Set the mode of a cluster, partition or account; replaces a rule of the same scope.

        Raises:
            BankUsage: The mode does not exist.
        """
        if rule.mode not in get_args(Mode):
            raise BankUsage(f"{rule.mode!r} is no mode: off, observe or gate", rule.mode)
        rule = msgspec.structs.replace(rule, account=rule.account.lower())
        asked = encode_ledger_request("mode.set", rule)
        if self._session.done(by, asked) is not None or rule in self.all():
            return
        self._session.act("mode.set", by, asked=asked, why=_mode_reason(by, rule.mode, rule))
        self._session.rules_seq = self._session.seq
        self._drop(rule.cluster, rule.partition, rule.account)
        self._session.run(
            insert(mode).values(
                cluster=sanitize_text(rule.cluster),
                partition_name=sanitize_text(rule.partition),
                account=sanitize_text(rule.account),
                mode=rule.mode,
            )
        )

    def drop(self, cluster: str, partition: str, account: str, by: Authorship) -> None:
        """Remove the mode rule of exactly this scope.

        Raises:
            BankUsage: No rule has this scope.
        """
        rule = ModeRule(mode="off", cluster=cluster, partition=partition, account=account.lower())
        asked = encode_ledger_request("mode.drop", rule)
        if self._session.done(by, asked) is not None:
            return
        if not self._drop(rule.cluster, rule.partition, rule.account):
            raise BankUsage("there is no mode of just that", rule)
        self._session.act("mode.drop", by, asked=asked, why=_mode_reason(by, "none", rule))
        self._session.rules_seq = self._session.seq

    def all(self) -> list[ModeRule]:
        """List all mode rules."""
        chosen = select(mode).order_by(mode.c.cluster, mode.c.partition_name, mode.c.account)
        return [
            ModeRule(
                mode=row.mode,
                cluster=row.cluster,
                partition=row.partition_name,
                account=row.account,
            )
            for row in self._session.rows(chosen)
        ]

    def _drop(self, *where: str) -> int:
        """Delete the mode rule of exactly this scope; return the number of rows."""
        columns = (mode.c.cluster, mode.c.partition_name, mode.c.account)
        pairs: list[Any] = [
            column == sanitize_text(text) for column, text in zip(columns, where, strict=True)
        ]
        return self._session.run(delete(mode).where(*pairs))


def export_rules(session: LedgerSession, rates: LedgerRates, modes: LedgerModes) -> BankRules:
    """Return all rates and modes, for the gate."""
    return BankRules(seq=session.rules_seq, modes=tuple(modes.all()), rates=tuple(rates.all()))


def _mode_reason(by: Authorship, what: str, rule: ModeRule) -> str:
    where = " ".join(part for part in (rule.cluster, rule.partition, rule.account) if part)
    return f"{what} for {where or 'everything'}" + (f": {by.why}" if by.why else "")
