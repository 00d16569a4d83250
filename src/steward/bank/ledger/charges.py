"""Charges of job runs in the ledger: post, correct, refund and query.

A charge is the total price of a run, or of a piece of a resized run, identified by its key.
Posting the same key again takes or gives back only the difference, so repeats and crashes in
between are harmless. Every posted version is kept for ever, and corrections are further transfers.

:class:`ChargeState` is a charge while it is posted. :class:`Charges` is the entry point: the
consumer, reconciliation and backfill post by ``post``, people refund by ``refund``; its base class
moves the money from and to allocations. All amounts are micro-SU.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
from sqlalchemy import func, select, update

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
from steward.bank.ledger.tables import (
    USAGE,
    StoredCharge,
    StoredVersion,
    charge,
    charge_version,
    posting,
    transaction,
)
from steward.bank.money import MAX_AMOUNT, format_money
from steward.bank.records import AllocationShare, Charge
from steward.core.sqlalchemy_tables import decode_row, sanitize_text


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


class _ChargePayments:
    """Payments of charges: move money from and to allocations.

    Args:
        session: The transaction.
        accounts: The accounts of the same transaction.
        allocations: The allocations of the same transaction.
        writer: Makes the transfers.
    """

    def __init__(
        self,
        session: LedgerSession,
        accounts: Accounts,
        allocations: Allocations,
        writer: TransferWriter,
    ) -> None:
        self._session = session
        self._accounts = accounts
        self._allocations = allocations
        self._writer = writer

    def _take(
        self,
        state: ChargeState,
        new: Charge,
        amount: int,
        author: Authorship,
        why: str,
        is_first: bool,
    ) -> Transfer:
        """Take an amount from the allocations that were active when the run began."""
        active = self._list_active(state.payer, run_start(new) or self._session.now(author))
        payments = divide_payment(amount, active, new.shares, state.paid)
        open_ended = active[-1]
        balance_after = open_ended.balance - payments.get(open_ended.number, 0)
        transfer = self._writer.write_transfer(
            "charge" if is_first else "correction",
            Authorship(who=author.who, at=author.at),
            {number: -share for number, share in payments.items()} | {USAGE: amount},
            why=why,
            account=state.account,
            user=state.user,
            charge=state.number,
            charge_key=state.key,
        )
        self._accounts.add_spent(state.account, state.user, amount)
        credit = self._find_credit(state.payer)
        state.overdraw += excess_over_credit(balance_after, credit) - excess_over_credit(
            open_ended.balance, credit
        )
        for number, share in payments.items():
            state.paid[number] = state.paid.get(number, 0) + share
        return transfer

    def _give_back(
        self,
        state: ChargeState,
        amount: int,
        author: Authorship,
        why: str,
        *,
        refund_request: str = "",
    ) -> Transfer:
        """Give an amount back, first to the allocations that were charged last.

        Args:
            state: The charge.
            amount: Amount, in micro-SU; at most the amount paid.
            author: Author.
            why: The reason.
            refund_request: The request's text for a manual refund; "" for a correction.
        """
        allocations = self._allocations.list_by_number(list(state.paid))
        repayments = divide_repayment(amount, state.paid, allocations)
        transfer = self._writer.write_transfer(
            "refund" if refund_request else "correction",
            author if refund_request else Authorship(who=author.who, at=author.at),
            repayments | {USAGE: -amount},
            request=refund_request,
            why=why,
            account=state.account,
            user=state.user,
            charge=state.number,
            charge_key=state.key,
        )
        self._accounts.add_spent(state.account, state.user, -amount)
        for number, share in repayments.items():
            state.paid[number] -= share
        open_ended = {allocation.number for allocation in allocations if allocation.end is None}
        to_open_ended = sum(share for number, share in repayments.items() if number in open_ended)
        state.overdraw = max(0, state.overdraw - to_open_ended)
        return transfer

    def _reject_excess(self, new: Charge, payer: str, amount: int) -> None:
        """Reject a charge beyond the payer's balance and credit limit.

        Raises:
            BankRefused: The amount exceeds them.
        """
        if amount <= 0:
            return
        *dated, open_ended = self._list_active(payer, run_start(new) or self._session.now())
        available = open_ended.balance + sum(max(allocation.balance, 0) for allocation in dated)
        if amount > available + self._find_credit(payer):
            raise BankRefused(
                f"insufficient funds: account {payer} cannot pay {format_money(amount)} SU", payer
            )

    def _sum_payments(self, number: int) -> dict[int, int]:
        """Return the net amount that each allocation has paid of a charge."""
        query = (
            select(posting.c.allocation, func.sum(posting.c.amount).label("amount"))
            .join(transaction, transaction.c.number == posting.c.transaction)
            .where(transaction.c.charge == number, posting.c.allocation > 0)
            .group_by(posting.c.allocation)
        )
        return {
            row.allocation: -int(row.amount)
            for row in self._session.fetch_rows(query)
            if row.amount
        }

    def _list_active(self, payer: str, at: datetime) -> list[Allocation]:
        """List the allocations active at a time, the open-ended one last."""
        return [
            allocation
            for allocation in self._allocations.list_own(payer, with_ended=True)
            if allocation.is_active(at)
        ]

    def _find_credit(self, payer: str) -> int:
        account = self._accounts.get(payer)
        return 0 if account is None else account.credit_limit


def run_start(new: Charge) -> datetime | None:
    """Return when the charged run began, or None if unknown."""
    return new.use.start if new.use is not None else None


class Charges(_ChargePayments):
    """Charges of runs: post, refund and query them."""

    def post(self, charge: Charge, author: Authorship) -> ChargeResult:
        """Post a charge: take what is missing, or give back the excess, up to its amount.

        An account that does not exist is created as unknown, so that the usage is on record.

        Raises:
            BankRefused: It exceeds the payer's available money and must not overdraw.
            BankUsage: The amount is negative or too large.
        """
        new = _validate_charge(charge)
        row = self._find_row(new.key)
        if row is not None and _is_same_charge(row.charge, new):
            return _charge_result(self._load_state(row))
        self._ensure_account(new.account, author)
        before = None if row is None else self._load_state(row)
        due = max(0, new.amount - (0 if row is None else row.refunded))
        is_same_account = before is not None and (before.account, before.user) == (
            new.account,
            new.user,
        )
        payer = (
            before.payer if before and is_same_account else self._accounts.find_payer(new.account)
        )
        if not new.overdraw:
            self._reject_excess(new, payer, due - (before.due if before and is_same_account else 0))
        why = author.why or new.why
        transfers: list[Transfer] = []
        if before is not None and is_same_account:
            earlier_amount = format_money(row.amount if row else 0)
            why += f": {earlier_amount} SU before, {format_money(new.amount)} now"
        elif before is not None and before.due:
            reason = f"{why}: charged to {new.account}, {new.user or 'no user'} instead"
            transfers.append(self._give_back(before, before.due, author, reason))
        state = before if before and is_same_account else self._make_state(new, payer, before)
        if due > state.due:
            missing = due - state.due
            transfers.append(self._take(state, new, missing, author, why, row is None))
        elif due < state.due:
            transfers.append(self._give_back(state, state.due - due, author, why))
        added = sum(_usage_amount(transfer) for transfer in transfers)
        stored = self._store_charge(state, new, author, row)
        self._session.insert(
            charge_version,
            StoredVersion(
                charge_number=stored.number,
                number=stored.versions,
                charge=new,
                transfers=tuple(transfer.number for transfer in transfers),
                added=added,
                at=stored.last_at,
                who=author.who,
                why=why,
            ),
        )
        return _charge_result(state, added=added, transfers=transfers, is_first=row is None)

    def refund(self, key: str, author: Authorship, amount: int | None = None) -> Transfer:
        """Refund part or all of a charge; later corrections leave the refund in place.

        Raises:
            BankRefused: The amount is more than the charge.
            BankUsage: The charge does not exist, nothing is left to refund, or the amount is
                invalid.
        """
        row = self._require_row(key)
        request = encode_ledger_request("refund_charge", key, amount)
        earlier = self._writer.find_repeat(author, request)
        if earlier is not None:
            return earlier
        state = self._load_state(row)
        refunded = validate_amount(state.due if amount is None else amount)
        if refunded > state.due:
            raise BankRefused(
                f"refund exceeds the charge {key}: it is {format_money(state.due)} SU", key
            )
        transfer = self._give_back(state, refunded, author, author.why, refund_request=request)
        self._session.execute(
            update(charge)
            .where(charge.c.number == row.number)
            .values(
                refunded=row.refunded + refunded,
                overdraw=state.overdraw,
                last_at=self._session.now(author),
            )
        )
        return transfer

    def get(self, key: str) -> ChargeRow | None:
        """Return the charge with this key, or None."""
        return self._session.find(ChargeRow, select(charge).where(charge.c.key == key))

    def list_of_job(
        self, cluster: str, job_id: int, first_submit: datetime | None = None
    ) -> list[ChargeRow]:
        """List the charges of a job's runs and their pieces, by raw job id.

        Without ``first_submit``, list those of every job that had this id.
        """
        query = select(charge).where(charge.c.cluster == cluster, charge.c.job_id == job_id)
        if first_submit is not None:
            query = query.where(charge.c.first_submit == first_submit)
        return self._session.fetch(ChargeRow, query.order_by(charge.c.number))

    def list_of_jobs(self, cluster: str, job_ids: Collection[int]) -> list[ChargeRow]:
        """List the charges of several jobs' runs and their pieces, by raw job id."""
        query = select(charge).where(charge.c.cluster == cluster, charge.c.job_id.in_(job_ids))
        return self._session.fetch(ChargeRow, query.order_by(charge.c.number))

    def list_changed(self, after: int, limit: int = 500) -> list[tuple[int, str, ChargeRow]]:
        """List charges changed after a transaction number: (transaction number, author, charge)."""
        query = (
            select(charge, transaction.c.number, transaction.c.posted_by)
            .select_from(transaction)
            .join(charge, charge.c.number == transaction.c.charge)
            .where(transaction.c.number > after)
            .order_by(transaction.c.number)
            .limit(limit)
        )
        return [
            (row[-2], row[-1], decode_row(ChargeRow, row))
            for row in self._session.fetch_rows(query)
        ]

    def list_versions(self, key: str) -> list[ChargeVersion]:
        """List the posted versions of a charge, oldest first."""
        number = self._require_row(key).number
        query = select(charge_version).where(charge_version.c.charge_number == number)
        return self._session.fetch(ChargeVersion, query.order_by(charge_version.c.number))

    def list_since(
        self, at: datetime, cluster: str = "", limit: int = 1000, after: str = ""
    ) -> list[ChargeRow]:
        """List charges of runs that began at or after a time, by key, after the key ``after``."""
        query = select(charge).where(charge.c.begin >= at, charge.c.key > after)
        if cluster:
            query = query.where(charge.c.cluster == cluster)
        return self._session.fetch(ChargeRow, query.order_by(charge.c.key).limit(limit))

    def _ensure_account(self, name: str, author: Authorship) -> None:
        if self._accounts.get(name) is None:
            note = "created by a charge to an unknown account"
            self._accounts.insert_account(Account(name=name, known=False, note=note), author)

    def _load_state(self, row: StoredCharge) -> ChargeState:
        """Return the current state of a stored charge."""
        state = msgspec.convert(row, ChargeState, from_attributes=True)
        state.paid = self._sum_payments(row.number)
        return state

    def _make_state(self, new: Charge, payer: str, before: ChargeState | None) -> ChargeState:
        """Return the state of a charge that nobody has paid yet."""
        if before is not None:
            number = before.number
        else:
            number = (self._session.fetch_value(select(func.max(charge.c.number))) or 0) + 1
        return ChargeState(
            number=number,
            key=sanitize_text(new.key),
            account=new.account,
            user=new.user,
            payer=payer,
        )

    def _store_charge(
        self, state: ChargeState, new: Charge, author: Authorship, before: StoredCharge | None
    ) -> StoredCharge:
        """Insert or update the row of a charge, and return it."""
        now = self._session.now(author)
        stored = StoredCharge(
            number=state.number,
            key=state.key,
            cluster=new.cluster,
            job_id=new.job_id,
            first_submit=new.first_submit,
            account=new.account,
            user=new.user,
            partition=new.partition,
            amount=new.amount,
            hold=new.hold,
            begin=run_start(new) or new.first_submit,
            charge=new,
            refunded=0 if before is None else before.refunded,
            overdraw=state.overdraw,
            payer=state.payer,
            first_at=now if before is None else before.first_at,
            last_at=now,
            versions=1 if before is None else before.versions + 1,
        )
        if before is None:
            self._session.insert(charge, stored)
        else:
            old = msgspec.structs.asdict(before)
            new_values = msgspec.structs.asdict(stored).items()
            changes = {name: value for name, value in new_values if value != old[name]}
            same = charge.c.number == stored.number
            self._session.execute(update(charge).where(same).values(changes))
        return stored

    def _find_row(self, key: str) -> StoredCharge | None:
        return self._session.find(StoredCharge, select(charge).where(charge.c.key == key))

    def _require_row(self, key: str) -> StoredCharge:
        row = self._find_row(key)
        if row is None:
            raise NotInBank(
                f"unknown charge {key!r}: 'steward bank explain JOB' shows the charges of a job",
                key,
            )
        return row


def _validate_charge(charge: Charge) -> Charge:
    """Check the amount of a charge and return it normalized."""
    if not 0 <= charge.amount <= MAX_AMOUNT:
        raise BankUsage(
            f"invalid amount {format_money(charge.amount)} of charge {charge.key}: give 0 to "
            f"{format_money(MAX_AMOUNT)} SU",
            charge.key,
        )
    return msgspec.structs.replace(
        charge,
        account=sanitize_text(charge.account.lower()) or NO_ACCOUNT,
        user=sanitize_text(charge.user),
        partition=sanitize_text(charge.partition),
    )


def _charge_result(
    state: ChargeState,
    *,
    added: int = 0,
    transfers: Sequence[Transfer] = (),
    is_first: bool = False,
) -> ChargeResult:
    """Build the result of posting a charge."""
    paid = sorted(state.paid.items())
    return ChargeResult(
        key=state.key,
        added=added,
        amount=state.due,
        shares=tuple(
            AllocationShare(allocation=number, amount=amount) for number, amount in paid if amount
        ),
        payer=state.payer,
        overdraw=state.overdraw,
        transfers=tuple(transfer.number for transfer in transfers),
        first=is_first,
    )


def _is_same_charge(first: Charge, second: Charge) -> bool:
    """Compare two charges, ignoring reason, source, shares, hold and overdraw."""
    ignored = {"why": "", "source": "", "shares": (), "hold": "", "overdraw": True}
    return msgspec.structs.replace(first, **ignored) == msgspec.structs.replace(second, **ignored)


def _usage_amount(transfer: Transfer) -> int:
    return sum(posting.amount for posting in transfer.postings if posting.name == "usage")
