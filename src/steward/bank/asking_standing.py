"""The action that tells how the bank itself stands, for operators and for monitoring."""

import logging
from datetime import datetime
from typing import Final, Literal

import msgspec

from steward.bank.asking_notices import outbox_kinds
from steward.bank.errors import GateUnavailable
from steward.bank.gate.shapes import Held, Tally
from steward.bank.records import AccountBooks
from steward.bank.room import BankAnswer, BankRoom
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape
from steward.core.timestamps import micros, moment

log = logging.getLogger(__name__)

Gate = Literal["deciding", "not deciding", "away"]


class BankStandingRequest(Request, frozen=True, kw_only=True):
    """bank.standing: how ledger, gate and comparisons stand.

    Attributes:
        accounts: Whether what each account has is wanted, too.
    """

    accounts: bool = False


class ReconciledLine(Shape, frozen=True, kw_only=True):
    """How far a cluster's charges were compared with its records.

    Attributes:
        cluster: The cluster.
        until: Runs that ended until then were compared with what Slurm showed of them; None
            for none yet.
        by_slurmdbd_until: Likewise with slurmdbd's records.
        compared_at: When that was last done.
        differences: How many runs were found then that were not charged what they are due.
        corrected: How many of them were put right.
    """

    cluster: str
    until: datetime | None = None
    by_slurmdbd_until: datetime | None = None
    compared_at: datetime | None = None
    differences: int = 0
    corrected: int = 0


class AccountMoney(Shape, frozen=True, kw_only=True):
    """What an account has that pays for itself; micro-SU.

    Attributes:
        account: Its name.
        balance: What its allocations hold that can be drawn on now.
        credit: What it may owe.
        held: What is held of it; None where the gate does not answer.
        holds: How many holds these are.
    """

    account: str
    balance: int
    credit: int = 0
    held: int | None = None
    holds: int | None = None


class BankStandingAnswer(BankAnswer, frozen=True, kw_only=True):
    """How the bank stands.

    Attributes:
        position: Number of the ledger's last change.
        accounts: How many accounts there are.
        gate: Whether the gate decides.
        gate_why: Why it does not.
        holds: How many holds are open; None where the gate is away.
        held: What they hold, micro-SU.
        asked_at: When a submit plugin asked last, to the minute; None for never, or where
            that is not known.
        tally: What the gate answered since it began; None where it is away.
        reconciled: How far charges were compared, by cluster.
        notices: How many notices were set aside since nobody took them.
        money: What each account has, where that was asked for.
        remote_at: Where balances are those of a myBRC server elsewhere, when it said the oldest.
    """

    position: int
    accounts: int
    gate: Gate
    gate_why: str = ""
    holds: int | None = None
    held: int | None = None
    asked_at: datetime | None = None
    tally: Tally | None = None
    reconciled: tuple[ReconciledLine, ...] = ()
    notices: int = 0
    money: tuple[AccountMoney, ...] = ()
    remote_at: datetime | None = None


def standing(room: BankRoom, asker: Asker, request: BankStandingRequest) -> BankStandingAnswer:
    """Tell how the bank stands.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no bank here.
        LedgerUnavailable: Its database is away.
    """
    from steward.bank.reconciling import last_comparison

    lines: list[ReconciledLine] = []
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator("see how the bank stands")
        position, notices = t.seq, t.outbox.set_aside(outbox_kinds())
        accounts = len(t.accounts.all(unknown=True))
        books = t.books().accounts if request.accounts else ()
        for cluster in room.clusters:
            compared, until, by_slurmdbd = last_comparison(t, cluster)
            lines.append(
                ReconciledLine(
                    cluster=cluster,
                    until=_moment(until),
                    by_slurmdbd_until=_moment(by_slurmdbd),
                    compared_at=moment(compared.at_us) if compared else None,
                    differences=compared.differences if compared else 0,
                    corrected=compared.corrected if compared else 0,
                )
            )
    answer = BankStandingAnswer(
        position=position,
        accounts=accounts,
        gate="away",
        reconciled=tuple(lines),
        notices=notices,
        money=_money(books, micros(room.now()), None),
        **room.heading(),
    )
    return _with_gate(room, answer, books)


def _with_gate(
    room: BankRoom, answer: BankStandingAnswer, books: tuple[AccountBooks, ...]
) -> BankStandingAnswer:
    try:
        state = room.gate.state()
        held = room.gate.held() if books else []
    except GateUnavailable as error:
        return msgspec.structs.replace(answer, gate_why=str(error))
    return msgspec.structs.replace(
        answer,
        gate="deciding" if state.deciding else "not deciding",
        gate_why=state.why,
        holds=state.holds,
        held=state.held,
        asked_at=_moment(state.asked_at_us),
        tally=state.tally,
        remote_at=_moment(state.remote_at_us),
        money=_money(books, micros(room.now()), {one.account: one for one in held}),
    )


def _money(
    books: tuple[AccountBooks, ...], now_us: int, held: dict[str, Held] | None
) -> tuple[AccountMoney, ...]:
    """What each account has that pays for itself; those that draw on another are part of that."""
    lines = []
    for one in books:
        if one.payer not in ("", one.name):
            continue
        balance = sum(
            some.balance
            for some in one.allocations
            if some.begin_us <= now_us and (not some.end_us or now_us < some.end_us)
        )
        none = Held(account=one.name, holds=0, held=0)
        known = None if held is None else held.get(one.name, none)
        lines.append(
            AccountMoney(
                account=one.name,
                balance=balance,
                credit=one.credit,
                held=known.held if known else None,
                holds=known.holds if known else None,
            )
        )
    return tuple(lines)


def _moment(us: int) -> datetime | None:
    return moment(us) if us else None


ACTIONS: Final = (
    Action(
        name="bank.standing",
        help="How ledger, gate and comparisons stand.",
        request=BankStandingRequest,
        answer=BankStandingAnswer,
        run=standing,
        only_reads=True,
        role="operator",
    ),
)
