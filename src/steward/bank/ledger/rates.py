"""Rates and modes: what jobs cost, and how much is enforced. Rates are only ever added."""

from datetime import datetime
from typing import Any, Final, get_args

import msgspec
from sqlalchemy import delete, func, insert, select

from steward.bank.errors import BankUsage
from steward.bank.ledger.postings import Session, asking, clean
from steward.bank.ledger.records import By
from steward.bank.ledger.tables import mode, rate
from steward.bank.records import Mode, ModeRule, Rate, Rules
from steward.core.timestamps import micros

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Rate)


class Rates:
    """What can be asked of and done to rates.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, new: Rate, by: By) -> Rate:
        """Add a rate; it holds for jobs that are first submitted from ``valid_from`` on, or now.

        Raises:
            BankUsage: It names no cluster or partition, or the caller's key was used for
                something else.
        """
        if not new.cluster or not new.partition:
            raise BankUsage("a rate names a cluster and a partition", new)
        session = self._session
        asked = asking("rate.add", msgspec.structs.replace(new, number=0, created_us=0))
        done = session.done(by, asked)
        if done is not None:
            return next(each for each in self.all() if self._made_by(each.number) == done)
        now: datetime = session.now(by)
        since = new.valid_from or now
        number = (session.value(select(func.max(rate.c.number))) or 0) + 1
        made = msgspec.structs.replace(new, number=number, valid_from=since, created_us=micros(now))
        act = session.act("rate.add", by, asked=asked)
        session.rules_seq = session.seq
        session.run(
            insert(rate).values(
                number=number,
                cluster=clean(made.cluster),
                partition_name=clean(made.partition),
                qos=clean(made.qos),
                valid_from_us=micros(since),
                body=_encoder.encode(made),
                made_by=act,
            )
        )
        return made

    def all(self, cluster: str = "") -> list[Rate]:
        """Every rate, or a cluster's, by number."""
        chosen = select(rate.c.body).order_by(rate.c.number)
        if cluster:
            chosen = chosen.where(rate.c.cluster == cluster)
        return [_decoder.decode(row.body) for row in self._session.rows(chosen)]

    def get(self, number: int) -> Rate | None:
        """The rate of a number."""
        body = self._session.value(select(rate.c.body).where(rate.c.number == number))
        return None if body is None else _decoder.decode(body)

    def _made_by(self, number: int) -> int:
        return int(self._session.value(select(rate.c.made_by).where(rate.c.number == number)))


class Modes:
    """What can be asked of and done to modes.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def set(self, rule: ModeRule, by: By) -> None:
        """Say what holds for a part of a cluster, in place of what was said of just that part.

        Raises:
            BankUsage: There is no such mode.
        """
        if rule.mode not in get_args(Mode):
            raise BankUsage(f"{rule.mode!r} is no mode: off, observe or gate", rule.mode)
        rule = msgspec.structs.replace(rule, account=rule.account.lower())
        asked = asking("mode.set", rule)
        if self._session.done(by, asked) is not None or rule in self.all():
            return
        self._session.act("mode.set", by, asked=asked, why=_why(by, rule.mode, rule))
        self._session.rules_seq = self._session.seq
        self._drop(rule.cluster, rule.partition, rule.account)
        self._session.run(
            insert(mode).values(
                cluster=clean(rule.cluster),
                partition_name=clean(rule.partition),
                account=clean(rule.account),
                mode=rule.mode,
            )
        )

    def drop(self, cluster: str, partition: str, account: str, by: By) -> None:
        """Say nothing of a part of a cluster any more.

        Raises:
            BankUsage: Nothing was said of it.
        """
        rule = ModeRule(mode="off", cluster=cluster, partition=partition, account=account.lower())
        asked = asking("mode.drop", rule)
        if self._session.done(by, asked) is not None:
            return
        if not self._drop(rule.cluster, rule.partition, rule.account):
            raise BankUsage("there is no mode of just that", rule)
        self._session.act("mode.drop", by, asked=asked, why=_why(by, "none", rule))
        self._session.rules_seq = self._session.seq

    def all(self) -> list[ModeRule]:
        """Everything that was said of modes."""
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
        columns = (mode.c.cluster, mode.c.partition_name, mode.c.account)
        pairs: list[Any] = [
            column == clean(text) for column, text in zip(columns, where, strict=True)
        ]
        return self._session.run(delete(mode).where(*pairs))


def rules(session: Session, rates: Rates, modes: Modes) -> Rules:
    """All that the gate decides by, beside its settings."""
    return Rules(seq=session.rules_seq, modes=tuple(modes.all()), rates=tuple(rates.all()))


def _why(by: By, what: str, rule: ModeRule) -> str:
    where = " ".join(part for part in (rule.cluster, rule.partition, rule.account) if part)
    return f"{what} for {where or 'everything'}" + (f": {by.why}" if by.why else "")
