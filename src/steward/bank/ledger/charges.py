"""What jobs cost: posted once by its key, corrected by further transfers, kept as it was.

A charge is what a run comes to altogether. Posting it again takes or gives back only
the difference, so that a repeat is harmless, and a crash in between as well.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, func, insert, select, update

from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.drawing import beyond, drawn, returned
from steward.bank.ledger.moving import Moves
from steward.bank.ledger.records import (
    NO_ACCOUNT,
    Account,
    By,
    Charged,
    ChargeRow,
    ChargeVersion,
    Transfer,
)
from steward.bank.ledger.session import Session, asking, checked_amount, clean
from steward.bank.ledger.tables import USAGE, act, charge, charge_version, entry
from steward.bank.money import MOST
from steward.bank.records import Charge, Share
from steward.jobs.facts import micros, moment

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Charge)


class Charges:
    """What can be asked of and done to charges.

    Args:
        session: The transaction.
        accounts: The accounts in it.
        allocations: The allocations in it.
        moves: The transfers in it.
    """

    def __init__(
        self,
        session: Session,
        accounts: Accounts,
        allocations: Allocations,
        moves: Moves,
    ) -> None:
        self._session = session
        self._accounts = accounts
        self._allocations = allocations
        self._moves = moves

    def charge(self, wanted: Charge, by: By) -> Charged:
        """Have a charge come to an amount: take what is missing, or give back what is too much.

        An account that nobody knows is entered, so that what was used is on record.

        Raises:
            BankRefused: It would go beyond the account's means, and may not.
            BankUsage: The amount is below zero, or beyond all measure.
        """
        if not 0 <= wanted.amount <= MOST:
            raise BankUsage("a charge is not below zero, and not beyond all measure", wanted.key)
        new = msgspec.structs.replace(
            wanted,
            account=clean(wanted.account.lower()) or NO_ACCOUNT,
            user=clean(wanted.user),
            partition=clean(wanted.partition),
        )
        before = self._row(new.key)
        if before is not None and _same(_decoder.decode(before.body), new):
            return self._charged(before, first=False)
        self._enter_account(new.account, by)
        payer = self._accounts.payer(new.account)
        stays = before is not None and (before.account, before.user_name) == (
            new.account,
            new.user,
        )
        if before is not None and stays:
            payer = before.payer
        due = max(0, new.amount - (before.refunded if before is not None else 0))
        if not new.overdraw:
            self._refuse_beyond(new, payer, due - (_due(before) if stays else 0))
        made: list[Transfer] = []
        if before is None:
            number = self._enter(new, payer, by)
        else:
            number = before.number
            if not stays:
                why = f"{new.why}: charged to {new.account}, {new.user or 'no user'} instead"
                made += self._give_back(before, _due(before), by, why)
        posted = self._posted(number)
        missing = due - sum(posted.values())
        why = by.why or new.why
        if before is not None and stays:
            why += f": {before.amount} micro-SU before, {new.amount} now"
        overdraw = before.overdraw if before is not None and stays else 0
        if missing > 0:
            part, beyond_means = self._take(number, new, payer, missing, posted, by, why, before)
            made.append(part)
            overdraw += beyond_means
        elif missing < 0 and before is not None:
            made += self._give_back(before, -missing, by, why)
            overdraw = self._less(overdraw, made[-1])
        added = sum(_used(each) for each in made)
        self._write(number, new, payer, overdraw, made, added, by, why)
        return self._charged(
            self._need(new.key), first=before is None, added=added, made=tuple(made)
        )

    def refund(self, key: str, by: By, amount: int | None = None) -> Transfer:
        """Give back a part of a charge, or all of it; later corrections keep that.

        Raises:
            BankRefused: It did not come to so much.
            BankUsage: There is no such charge, nothing to give back, or the amount is none.
        """
        row = self._need(key)
        asked = asking("refund_charge", key, amount)
        done = self._session.done(by, asked)
        if done is not None:
            earlier = self._moves.get(done)
            assert earlier is not None
            return earlier
        due = _due(row)
        wanted = checked_amount(due if amount is None else amount)
        if wanted > due:
            raise BankRefused(f"the charge {key} comes to {due} micro-SU: that is more", key)
        (made,) = self._give_back(row, wanted, by, by.why, kind="refund", asked=asked)
        self._session.run(
            update(charge)
            .where(charge.c.number == row.number)
            .values(
                refunded=row.refunded + wanted,
                overdraw=self._less(row.overdraw, made),
                last_at_us=micros(self._session.now(by)),
            )
        )
        return made

    def get(self, key: str) -> ChargeRow | None:
        """The charge of a key."""
        row = self._row(key)
        return None if row is None else _shown(row)

    def of_job(
        self, cluster: str, job_id: int, first_submit: datetime | None = None
    ) -> list[ChargeRow]:
        """The charges of a job's runs and their pieces; of all that had its id, if need be."""
        chosen = select(charge).where(charge.c.cluster == cluster, charge.c.job_id == job_id)
        if first_submit is not None:
            chosen = chosen.where(charge.c.first_submit_us == micros(first_submit))
        return [_shown(row) for row in self._session.rows(chosen.order_by(charge.c.number))]

    def versions(self, key: str) -> list[ChargeVersion]:
        """A charge as it was posted, the first first."""
        number = self._need(key).number
        chosen = select(charge_version).where(charge_version.c.charge == number)
        return [
            ChargeVersion(
                number=row.number,
                charge=_decoder.decode(row.body),
                transfers=msgspec.json.decode(row.acts, type=tuple[int, ...]),
                added=row.added,
                at=moment(row.at_us),
                who=row.who,
                why=row.why,
            )
            for row in self._session.rows(chosen.order_by(charge_version.c.number))
        ]

    def since(
        self, at: datetime, cluster: str = "", limit: int = 1000, after: str = ""
    ) -> list[ChargeRow]:
        """Charges of runs that began at a time or later, by key, behind the key ``after``."""
        chosen = select(charge).where(charge.c.begin_us >= micros(at), charge.c.key > after)
        if cluster:
            chosen = chosen.where(charge.c.cluster == cluster)
        rows = self._session.rows(chosen.order_by(charge.c.key).limit(limit))
        return [_shown(row) for row in rows]

    def _enter_account(self, name: str, by: By) -> None:
        if self._accounts.get(name) is None:
            note = "entered since something was charged to it"
            self._accounts.make(Account(name=name, known=False, note=note), by)

    def _enter(self, new: Charge, payer: str, by: By) -> int:
        number: int = (self._session.value(select(func.max(charge.c.number))) or 0) + 1
        now_us = micros(self._session.now(by))
        columns = self._columns(new) | {
            "number": number,
            "key": clean(new.key),
            "cluster": clean(new.cluster),
            "job_id": new.job_id,
            "first_submit_us": micros(new.first_submit),
            "payer": payer,
            "refunded": 0,
            "overdraw": 0,
            "first_at_us": now_us,
            "last_at_us": now_us,
            "versions": 0,
        }
        self._session.run(insert(charge).values(columns))
        return number

    def _columns(self, new: Charge) -> dict[str, Any]:
        return {
            "account": new.account,
            "user_name": new.user,
            "partition_name": new.partition,
            "amount": new.amount,
            "hold": clean(new.hold),
            "begin_us": micros(_began(new) or new.first_submit),
            "body": _encoder.encode(new),
        }

    def _take(
        self,
        number: int,
        new: Charge,
        payer: str,
        amount: int,
        posted: Mapping[int, int],
        by: By,
        why: str,
        before: "Row[Any] | None",
    ) -> tuple[Transfer, int]:
        """Take what is missing; returns the transfer, and what of it is beyond the means."""
        at = _began(new) or self._session.now(by)
        known = [each for each in self._allocations.of(payer, ended=True) if each.active(at)]
        taken = drawn(amount, known, new.shares, posted)
        open_ended = known[-1]
        credit = self._credit(payer)
        below = open_ended.balance - taken.get(open_ended.number, 0)
        made = self._moves.move(
            "charge" if before is None else "correction",
            By(who=by.who, at=by.at),
            {where: -part for where, part in taken.items()} | {USAGE: amount},
            why=why,
            about=new.account,
            user=new.user,
            charge=number,
        )
        self._accounts.spend(new.account, new.user, amount)
        return made, beyond(below, credit) - beyond(open_ended.balance, credit)

    def _give_back(
        self,
        row: "Row[Any]",
        amount: int,
        by: By,
        why: str,
        *,
        kind: str = "correction",
        asked: str = "",
    ) -> list[Transfer]:
        if not amount:
            return []
        paid = self._posted(row.number)
        back = returned(amount, paid, self._allocations.needed(list(paid)))
        made = self._moves.move(
            "refund" if kind == "refund" else "correction",
            by if asked else By(who=by.who, at=by.at),
            back | {USAGE: -amount},
            asked=asked,
            why=why,
            about=row.account,
            user=row.user_name,
            charge=row.number,
        )
        self._accounts.spend(row.account, row.user_name, -amount)
        return [made]

    def _refuse_beyond(self, new: Charge, payer: str, missing: int) -> None:
        """Refuse what would take an account further below its means."""
        if missing <= 0:
            return
        at = _began(new) or self._session.now()
        known = [each for each in self._allocations.of(payer, ended=True) if each.active(at)]
        means = known[-1].balance + sum(max(each.balance, 0) for each in known[:-1])
        if missing > means + self._credit(payer):
            raise BankRefused(f"{payer} cannot pay {missing} micro-SU", payer)

    def _credit(self, payer: str) -> int:
        found = self._accounts.get(payer)
        return 0 if found is None else found.credit

    def _less(self, overdraw: int, made: Transfer) -> int:
        """What is left of an overdraw when something came back to the open-ended allocation."""
        open_ended = {
            each.number
            for each in self._allocations.needed([entry.allocation for entry in made.entries])
            if each.end is None
        }
        back = sum(each.amount for each in made.entries if each.allocation in open_ended)
        return max(0, overdraw - back)

    def _posted(self, number: int) -> dict[int, int]:
        """What each allocation has paid of a charge until now."""
        chosen = (
            select(entry.c.pot, func.sum(entry.c.amount).label("amount"))
            .join(act, act.c.number == entry.c.act)
            .where(act.c.charge == number, entry.c.pot > 0)
            .group_by(entry.c.pot)
        )
        return {row.pot: -int(row.amount) for row in self._session.rows(chosen) if row.amount}

    def _write(
        self,
        number: int,
        new: Charge,
        payer: str,
        overdraw: int,
        made: list[Transfer],
        added: int,
        by: By,
        why: str,
    ) -> None:
        session = self._session
        now_us = micros(session.now(by))
        session.run(
            update(charge)
            .where(charge.c.number == number)
            .values(
                **self._columns(new),
                payer=payer,
                overdraw=overdraw,
                last_at_us=now_us,
                versions=charge.c.versions + 1,
            )
        )
        version = session.value(select(charge.c.versions).where(charge.c.number == number))
        session.run(
            insert(charge_version).values(
                charge=number,
                number=version,
                at_us=now_us,
                who=clean(by.who),
                why=clean(why),
                added=added,
                acts=msgspec.json.encode([each.number for each in made]).decode(),
                body=_encoder.encode(new),
            )
        )

    def _charged(
        self, row: "Row[Any]", *, first: bool, added: int = 0, made: tuple[Transfer, ...] = ()
    ) -> Charged:
        posted = sorted(self._posted(row.number).items())
        return Charged(
            key=row.key,
            added=added,
            amount=_due(row),
            shares=tuple(Share(allocation=where, amount=part) for where, part in posted),
            payer=row.payer,
            overdraw=row.overdraw,
            transfers=tuple(each.number for each in made),
            first=first,
        )

    def _row(self, key: str) -> "Row[Any] | None":
        return self._session.row(select(charge).where(charge.c.key == clean(key)))

    def _need(self, key: str) -> "Row[Any]":
        found = self._row(key)
        if found is None:
            raise BankUsage(f"there is no charge {key!r}", key)
        return found


def _same(one: Charge, other: Charge) -> bool:
    """Whether two charges come to the same, whatever brought them about."""
    told = {"why": "", "source": "", "shares": (), "hold": "", "overdraw": True}
    return msgspec.structs.replace(one, **told) == msgspec.structs.replace(other, **told)


def _began(new: Charge) -> datetime | None:
    return new.use.start if new.use is not None else None


def _due(row: "Row[Any] | None") -> int:
    """What a charge comes to, refunds taken off."""
    return 0 if row is None else max(0, row.amount - row.refunded)


def _used(made: Transfer) -> int:
    return sum(each.amount for each in made.entries if each.pot == "usage")


def _shown(row: "Row[Any]") -> ChargeRow:
    return ChargeRow(
        charge=_decoder.decode(row.body),
        refunded=row.refunded,
        overdraw=row.overdraw,
        payer=row.payer,
        first_at=moment(row.first_at_us),
        last_at=moment(row.last_at_us),
        versions=row.versions,
    )
