"""Charges of job runs in the ledger: post, correct, refund and query.

A charge is the total price of a run, or of a piece of a resized run, identified by its key.
Posting the same key again takes or gives back only the difference, so repeats and crashes in
between are harmless. Every posted version is kept for ever, and corrections are further transfers.

:class:`ChargeState` is a charge while it is posted; :class:`ChargePayments` moves the money from
and to allocations; :class:`Charges` is the entry point: the consumer, reconciliation and backfill
post by ``charge``, people refund by ``refund``. All amounts are micro-SU.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, func, insert, select, update

from steward.bank.errors import BankRefused, BankUsage, NotInBank
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import (
    Allocations,
    divide_payment,
    divide_repayment,
    excess_over_credit,
)
from steward.bank.ledger.postings import (
    LedgerSession,
    TransferWriter,
    encode_ledger_request,
    sanitize_text,
    validate_amount,
)
from steward.bank.ledger.records import (
    NO_ACCOUNT,
    Account,
    Allocation,
    Authorship,
    ChargeResult,
    ChargeRow,
    ChargeVersion,
    Transfer,
)
from steward.bank.ledger.tables import USAGE, act, charge, charge_version, entry
from steward.bank.money import MAX_AMOUNT
from steward.bank.records import AllocationShare, Charge
from steward.core.timestamps import moment, to_micros


@dataclass
class ChargeState:
    """State of a charge while it is posted.

    Attributes:
        number: Row number of the charge.
        key: Its idempotency key.
        account: Account that is charged.
        user: Owner of the job.
        payer: Account that pays.
        overdraw: Part of the charge beyond the payer's balance and credit limit, in micro-SU.
        paid: Amount that each allocation has paid, by allocation number.
    """

    number: int
    key: str
    account: str
    user: str
    payer: str
    overdraw: int = 0
    paid: dict[int, int] = field(default_factory=dict)

    @property
    def due(self) -> int:
        """Return the sum paid by all allocations."""
        return sum(self.paid.values())


class ChargePayments:
    """Payments of charges: move money from and to allocations.

    Args:
        session: The transaction.
        accounts: The accounts of the same transaction.
        allocations: The allocations of the same transaction.
        moves: Makes the transfers.
    """

    def __init__(
        self,
        session: LedgerSession,
        accounts: Accounts,
        allocations: Allocations,
        moves: TransferWriter,
    ) -> None:
        self._session = session
        self._accounts = accounts
        self._allocations = allocations
        self._moves = moves

    def take(
        self,
        stands: ChargeState,
        new: Charge,
        amount: int,
        by: Authorship,
        why: str,
        is_first: bool,
    ) -> Transfer:
        """Take an amount from the allocations that were active when the run began."""
        there = self._there(stands.payer, run_start(new) or self._session.now(by))
        taken = divide_payment(amount, there, new.shares, stands.paid)
        open_ended = there[-1]
        below = open_ended.balance - taken.get(open_ended.number, 0)
        made = self._moves.move(
            "charge" if is_first else "correction",
            Authorship(who=by.who, at=by.at),
            {where: -part for where, part in taken.items()} | {USAGE: amount},
            why=why,
            about=stands.account,
            user=stands.user,
            charge=stands.number,
            charge_key=stands.key,
        )
        self._accounts.spend(stands.account, stands.user, amount)
        credit = self._credit(stands.payer)
        stands.overdraw += excess_over_credit(below, credit) - excess_over_credit(
            open_ended.balance, credit
        )
        for where, part in taken.items():
            stands.paid[where] = stands.paid.get(where, 0) + part
        return made

    def give_back(
        self, stands: ChargeState, amount: int, by: Authorship, why: str, *, refund_asked: str = ""
    ) -> Transfer:
        """Give an amount back, first to the allocations that were drawn on last.

        Args:
            stands: The charge.
            amount: Amount, in micro-SU; at most the amount paid.
            by: Author.
            why: The reason.
            refund_asked: The request's text for a manual refund; "" for a correction.
        """
        those = self._allocations.needed(list(stands.paid))
        back = divide_repayment(amount, stands.paid, those)
        made = self._moves.move(
            "refund" if refund_asked else "correction",
            by if refund_asked else Authorship(who=by.who, at=by.at),
            back | {USAGE: -amount},
            asked=refund_asked,
            why=why,
            about=stands.account,
            user=stands.user,
            charge=stands.number,
            charge_key=stands.key,
        )
        self._accounts.spend(stands.account, stands.user, -amount)
        for where, part in back.items():
            stands.paid[where] -= part
        unended = {each.number for each in those if each.end is None}
        to_unended = sum(part for where, part in back.items() if where in unended)
        stands.overdraw = max(0, stands.overdraw - to_unended)
        return made

    def refuse_beyond(self, new: Charge, payer: str, amount: int) -> None:
        """Reject a charge beyond the payer's balance and credit limit.

        Raises:
            BankRefused: The amount exceeds them.
        """
        if amount <= 0:
            return
        *dated, open_ended = self._there(payer, run_start(new) or self._session.now())
        means = open_ended.balance + sum(max(each.balance, 0) for each in dated)
        if amount > means + self._credit(payer):
            raise BankRefused(f"{payer} cannot pay {amount} micro-SU", payer)

    def paid(self, number: int) -> dict[int, int]:
        """Return the net amount that each allocation has paid of a charge."""
        chosen = (
            select(entry.c.pot, func.sum(entry.c.amount).label("amount"))
            .join(act, act.c.number == entry.c.act)
            .where(act.c.charge == number, entry.c.pot > 0)
            .group_by(entry.c.pot)
        )
        return {row.pot: -int(row.amount) for row in self._session.rows(chosen) if row.amount}

    def _there(self, payer: str, at: datetime) -> list[Allocation]:
        """List the allocations active at a time, the open-ended one last."""
        return [each for each in self._allocations.of(payer, ended=True) if each.active(at)]

    def _credit(self, payer: str) -> int:
        found = self._accounts.get(payer)
        return 0 if found is None else found.credit


def run_start(new: Charge) -> datetime | None:
    """Return when the charged run began, or None if unknown."""
    return new.use.start if new.use is not None else None


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Charge)


class Charges:
    """Charges of runs: post, refund and query them.

    Args:
        session: The transaction.
        accounts: The accounts of the same transaction.
        allocations: The allocations of the same transaction.
        moves: Makes the transfers.
    """

    def __init__(
        self,
        session: LedgerSession,
        accounts: Accounts,
        allocations: Allocations,
        moves: TransferWriter,
    ) -> None:
        self._session = session
        self._accounts = accounts
        self._moves = moves
        self._paying = ChargePayments(session, accounts, allocations, moves)

    def charge(self, wanted: Charge, by: Authorship) -> ChargeResult:
        """Post a charge: take what is missing, or give back the excess, up to its amount.

        An account that does not exist is created as unknown, so that the usage is on record.

        Raises:
            BankRefused: It exceeds the payer's available money and must not overdraw.
            BankUsage: The amount is negative or too large.
        """
        new = _validate_charge(wanted)
        row = self._row(new.key)
        if row is not None and _is_same_charge(_decoder.decode(row.body), new):
            return _charge_result(self._standing(row))
        self._enter_account(new.account, by)
        before = None if row is None else self._standing(row)
        due = max(0, new.amount - (0 if row is None else row.refunded))
        stays = before is not None and (before.account, before.user) == (new.account, new.user)
        payer = before.payer if before and stays else self._accounts.payer(new.account)
        if not new.overdraw:
            self._paying.refuse_beyond(new, payer, due - (before.due if before and stays else 0))
        why = by.why or new.why
        made: list[Transfer] = []
        if before is not None and stays:
            why += f": {row.amount if row else 0} micro-SU before, {new.amount} now"
        elif before is not None and before.due:
            instead = f"{why}: charged to {new.account}, {new.user or 'no user'} instead"
            made.append(self._paying.give_back(before, before.due, by, instead))
        stands = before if before and stays else self._anew(new, payer, before)
        if due > stands.due:
            missing = due - stands.due
            made.append(self._paying.take(stands, new, missing, by, why, row is None))
        elif due < stands.due:
            made.append(self._paying.give_back(stands, stands.due - due, by, why))
        added = sum(_usage_amount(each) for each in made)
        self._write(stands, new, by, 1 if row is None else row.versions + 1)
        self._keep(stands.number, new, by, why, 1 if row is None else row.versions + 1, made)
        return _charge_result(stands, added=added, made=made, is_first=row is None)

    def refund(self, key: str, by: Authorship, amount: int | None = None) -> Transfer:
        """Refund part or all of a charge; later corrections leave the refund in place.

        Raises:
            BankRefused: The amount is more than the charge.
            BankUsage: The charge does not exist, nothing is left to refund, or the amount is
                invalid.
        """
        row = self._need(key)
        asked = encode_ledger_request("refund_charge", key, amount)
        earlier = self._moves.once(by, asked)
        if earlier is not None:
            return earlier
        stands = self._standing(row)
        wanted = validate_amount(stands.due if amount is None else amount)
        if wanted > stands.due:
            raise BankRefused(f"the charge {key} comes to {stands.due} micro-SU: that is more", key)
        made = self._paying.give_back(stands, wanted, by, by.why, refund_asked=asked)
        self._session.run(
            update(charge)
            .where(charge.c.number == row.number)
            .values(
                refunded=row.refunded + wanted,
                overdraw=stands.overdraw,
                last_at_us=to_micros(self._session.now(by)),
            )
        )
        return made

    def get(self, key: str) -> ChargeRow | None:
        """Return the charge with this key, or None."""
        row = self._row(key)
        return None if row is None else _charge_from_row(row)

    def of_job(
        self, cluster: str, job_id: int, first_submit: datetime | None = None
    ) -> list[ChargeRow]:
        """List the charges of a job's runs and their pieces, by raw job id.

        Without ``first_submit``, list those of every job that had this id.
        """
        chosen = select(charge).where(charge.c.cluster == cluster, charge.c.job_id == job_id)
        if first_submit is not None:
            chosen = chosen.where(charge.c.first_submit_us == to_micros(first_submit))
        return [
            _charge_from_row(row) for row in self._session.rows(chosen.order_by(charge.c.number))
        ]

    def of_jobs(self, cluster: str, job_ids: Collection[int]) -> list[ChargeRow]:
        """List the charges of several jobs' runs and their pieces, by raw job id."""
        chosen = select(charge).where(charge.c.cluster == cluster, charge.c.job_id.in_(job_ids))
        return [
            _charge_from_row(row) for row in self._session.rows(chosen.order_by(charge.c.number))
        ]

    def changed(self, after: int, limit: int = 500) -> list[tuple[int, str, ChargeRow]]:
        """List charges changed after a transaction number: (transaction number, author, charge)."""
        columns = (act.c.number.label("act_number"), act.c.who.label("act_who"), charge)
        chosen = (
            select(*columns)
            .join(charge, charge.c.number == act.c.charge)
            .where(act.c.number > after)
            .order_by(act.c.number)
            .limit(limit)
        )
        return [
            (row.act_number, row.act_who, _charge_from_row(row))
            for row in self._session.rows(chosen)
        ]

    def versions(self, key: str) -> list[ChargeVersion]:
        """List the posted versions of a charge, oldest first."""
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
        """List charges of runs that began at or after a time, by key, after the key ``after``."""
        chosen = select(charge).where(charge.c.begin_us >= to_micros(at), charge.c.key > after)
        if cluster:
            chosen = chosen.where(charge.c.cluster == cluster)
        rows = self._session.rows(chosen.order_by(charge.c.key).limit(limit))
        return [_charge_from_row(row) for row in rows]

    def _enter_account(self, name: str, by: Authorship) -> None:
        if self._accounts.get(name) is None:
            note = "entered since something was charged to it"
            self._accounts.make(Account(name=name, known=False, note=note), by)

    def _standing(self, row: "Row[Any]") -> ChargeState:
        """Return the current state of a stored charge."""
        return ChargeState(
            number=row.number,
            key=row.key,
            account=row.account,
            user=row.user_name,
            payer=row.payer,
            overdraw=row.overdraw,
            paid=self._paying.paid(row.number),
        )

    def _anew(self, new: Charge, payer: str, before: ChargeState | None) -> ChargeState:
        """Return the state of a charge that nobody has paid yet."""
        if before is not None:
            number = before.number
        else:
            number = (self._session.value(select(func.max(charge.c.number))) or 0) + 1
        return ChargeState(
            number=number,
            key=sanitize_text(new.key),
            account=new.account,
            user=new.user,
            payer=payer,
        )

    def _write(self, stands: ChargeState, new: Charge, by: Authorship, version: int) -> None:
        """Insert or update the row of a charge."""
        now_us = to_micros(self._session.now(by))
        columns = {
            "account": new.account,
            "user_name": new.user,
            "partition_name": new.partition,
            "amount": new.amount,
            "hold": sanitize_text(new.hold),
            "begin_us": to_micros(run_start(new) or new.first_submit),
            "body": _encoder.encode(new),
            "payer": stands.payer,
            "overdraw": stands.overdraw,
            "last_at_us": now_us,
            "versions": version,
        }
        if version > 1:
            same = charge.c.number == stands.number
            self._session.run(update(charge).where(same).values(columns))
            return
        columns |= {
            "number": stands.number,
            "key": stands.key,
            "cluster": sanitize_text(new.cluster),
            "job_id": new.job_id,
            "first_submit_us": to_micros(new.first_submit),
            "refunded": 0,
            "first_at_us": now_us,
        }
        self._session.run(insert(charge).values(columns))

    def _keep(
        self,
        number: int,
        new: Charge,
        by: Authorship,
        why: str,
        version: int,
        made: Sequence[Transfer],
    ) -> None:
        """Store the posted version of a charge, which is kept for ever."""
        self._session.run(
            insert(charge_version).values(
                charge=number,
                number=version,
                at_us=to_micros(self._session.now(by)),
                who=sanitize_text(by.who),
                why=sanitize_text(why),
                added=sum(_usage_amount(each) for each in made),
                acts=msgspec.json.encode([each.number for each in made]).decode(),
                body=_encoder.encode(new),
            )
        )

    def _row(self, key: str) -> "Row[Any] | None":
        return self._session.row(select(charge).where(charge.c.key == sanitize_text(key)))

    def _need(self, key: str) -> "Row[Any]":
        found = self._row(key)
        if found is None:
            raise NotInBank(f"there is no charge {key!r}", key)
        return found


def _validate_charge(wanted: Charge) -> Charge:
    """Check the amount of a charge and return it normalized."""
    if not 0 <= wanted.amount <= MAX_AMOUNT:
        raise BankUsage("a charge is not below zero, and not beyond all measure", wanted.key)
    return msgspec.structs.replace(
        wanted,
        account=sanitize_text(wanted.account.lower()) or NO_ACCOUNT,
        user=sanitize_text(wanted.user),
        partition=sanitize_text(wanted.partition),
    )


def _charge_result(
    stands: ChargeState,
    *,
    added: int = 0,
    made: Sequence[Transfer] = (),
    is_first: bool = False,
) -> ChargeResult:
    """Build the result of posting a charge."""
    paid = sorted(stands.paid.items())
    return ChargeResult(
        key=stands.key,
        added=added,
        amount=stands.due,
        shares=tuple(
            AllocationShare(allocation=where, amount=part) for where, part in paid if part
        ),
        payer=stands.payer,
        overdraw=stands.overdraw,
        transfers=tuple(each.number for each in made),
        first=is_first,
    )


def _is_same_charge(one: Charge, other: Charge) -> bool:
    """Compare two charges, ignoring reason, source, shares, hold and overdraw."""
    told = {"why": "", "source": "", "shares": (), "hold": "", "overdraw": True}
    return msgspec.structs.replace(one, **told) == msgspec.structs.replace(other, **told)


def _usage_amount(made: Transfer) -> int:
    return sum(each.amount for each in made.entries if each.pot == "usage")


def _charge_from_row(row: "Row[Any]") -> ChargeRow:
    return ChargeRow(
        charge=_decoder.decode(row.body),
        refunded=row.refunded,
        overdraw=row.overdraw,
        payer=row.payer,
        first_at=moment(row.first_at_us),
        last_at=moment(row.last_at_us),
        versions=row.versions,
    )
