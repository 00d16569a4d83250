"""Bank status: balances, holds, gate and reconciliation at a glance (``bank.status``)."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, ClassVar, Literal

import msgspec

from steward.bank.context import BankContext, BankReply
from steward.bank.errors import GateUnavailable
from steward.bank.gate.requests import AnswerCounts, HeldTotal
from steward.bank.notices import NOTICE_KIND as NOTICE
from steward.bank.records import AccountBooks
from steward.bank.remote import ENTRY_POINT_GROUP
from steward.core.access import Caller
from steward.core.actions import ActionMessage, Request, action, described
from steward.core.extensions import list_offers
from steward.core.layouts import Column, Layout
from steward.core.timestamps import from_micros, to_micros

GateAvailability = Literal["deciding", "not deciding", "away"]
"""State of the gate: it decides, it answers without deciding, or it does not answer."""


class BankStatusRequest(Request, frozen=True, kw_only=True):
    """Request of bank.status: the state of ledger, gate and reconciliation."""

    accounts: Annotated[bool, described("Also include the balance of each account.")] = False


class ReconciliationProgress(ActionMessage, frozen=True, kw_only=True):
    """Progress of a cluster's reconciliation.

    Attributes:
        cluster: The cluster.
        until: Runs that ended before were compared with jobs.db; None for none yet.
        by_slurmdbd_until: Runs that ended before were compared with slurmdbd's records.
        compared_at: Time of the last comparison.
        differences: Number of runs with a wrong charge found then.
        corrected: Number of those that were corrected.
    """

    cluster: str
    until: datetime | None = None
    by_slurmdbd_until: datetime | None = None
    compared_at: datetime | None = None
    differences: int = 0
    corrected: int = 0


class AccountMoney(ActionMessage, frozen=True, kw_only=True):
    """Balance and holds of an account that pays for itself, in micro-SU.

    Attributes:
        account: Name of the account.
        balance: Sum of its active allocations.
        credit_limit: Credit limit.
        holds: Sum of its holds; None if the gate does not answer.
        hold_count: Number of its holds.
    """

    account: str
    balance: int
    credit_limit: int = 0
    holds: int | None = None
    hold_count: int | None = None


class BankStatusReply(BankReply, frozen=True, kw_only=True):
    """Reply with the state of the bank.

    Attributes:
        position: Number of the ledger's last change.
        accounts: Number of accounts.
        gate: Whether the gate decides.
        gate_reason: Reason why the gate does not decide.
        hold_count: Number of open holds; None if the gate does not answer.
        holds: Sum of the open holds, in micro-SU.
        last_request_at: Last request of a submit plugin, to the minute; None if never or unknown.
        tally: Counts of the gate's decisions since its start; None if it does not answer.
        reconciled: Progress of reconciliation, by cluster.
        notices: Number of notices that are dead letters.
        money: Balance of each account, if requested.
        remote_at: Time of the oldest balance taken from a remote myBRC server; None for none.
    """

    position: int
    accounts: int
    gate: GateAvailability
    gate_reason: str = ""
    hold_count: int | None = None
    holds: int | None = None
    last_request_at: datetime | None = None
    tally: AnswerCounts | None = None
    reconciled: tuple[ReconciliationProgress, ...] = ()
    notices: int = 0
    money: tuple[AccountMoney, ...] = ()
    remote_at: datetime | None = None
    layouts: ClassVar[Mapping[str, Layout]] = {
        "reconciled": (
            Column("Cluster", "cluster"),
            Column("Compared", "compared_at", "time"),
            Column("Until", "until", "time", title="Runs compared until"),
            Column(
                "SlurmdbdUntil", "by_slurmdbd_until", "time", title="Compared with slurmdbd until"
            ),
            Column("Differences", "differences", "count"),
            Column("Corrected", "corrected", "count"),
        )
    }


@action(
    "bank.status",
    scope="read",
    role="operator",
    only_reads=True,
)
def show_bank_status(
    context: BankContext, caller: Caller, request: BankStatusRequest
) -> BankStatusReply:
    """Show the state of ledger, gate and reconciliation.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: No bank is configured.
        LedgerUnavailable: The ledger's database is unreachable.
    """
    from steward.bank.reconciliation import read_last_comparison

    progress_lines: list[ReconciliationProgress] = []
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_operator("see the state of the bank")
        position, notices = t.seq, t.outbox.count_dead_letters(list_outbox_kinds())
        accounts = len(t.accounts.list_all(unknown=True))
        books = t.export_books().accounts if request.accounts else ()
        for cluster in context.clusters:
            comparison, until, by_slurmdbd = read_last_comparison(t, cluster)
            progress_lines.append(
                ReconciliationProgress(
                    cluster=cluster,
                    until=_convert_moment_or_none(until),
                    by_slurmdbd_until=_convert_moment_or_none(by_slurmdbd),
                    compared_at=from_micros(comparison.at_us) if comparison else None,
                    differences=comparison.differences if comparison else 0,
                    corrected=comparison.corrected if comparison else 0,
                )
            )
    reply = BankStatusReply(
        position=position,
        accounts=accounts,
        gate="away",
        reconciled=tuple(progress_lines),
        notices=notices,
        money=_collect_account_money(books, to_micros(context.now()), None),
        **context.make_heading(),
    )
    return _add_gate_state(context, reply, books)


def _add_gate_state(
    context: BankContext, reply: BankStatusReply, books: tuple[AccountBooks, ...]
) -> BankStatusReply:
    """Add the gate's state to the reply; without it, the reason why it does not answer."""
    try:
        gate_status = context.gate.get_status()
        totals = context.gate.list_held_totals() if books else []
    except GateUnavailable as error:
        return msgspec.structs.replace(reply, gate_reason=str(error))
    return msgspec.structs.replace(
        reply,
        gate="deciding" if gate_status.deciding else "not deciding",
        gate_reason=gate_status.why,
        hold_count=gate_status.holds,
        holds=gate_status.held,
        last_request_at=_convert_moment_or_none(gate_status.asked_at_us),
        tally=gate_status.tally,
        remote_at=_convert_moment_or_none(gate_status.remote_at_us),
        money=_collect_account_money(
            books, to_micros(context.now()), {total.account: total for total in totals}
        ),
    )


def _collect_account_money(
    books: tuple[AccountBooks, ...], now_us: int, held_by_account: dict[str, HeldTotal] | None
) -> tuple[AccountMoney, ...]:
    """Return the balances of accounts that pay for themselves; others are part of those."""
    lines = []
    for account in books:
        if account.payer not in ("", account.name):
            continue
        balance = sum(
            allocation.balance
            for allocation in account.allocations
            if allocation.begin_us <= now_us
            and (not allocation.end_us or now_us < allocation.end_us)
        )
        no_holds = HeldTotal(account=account.name, holds=0, held=0)
        held_total = (
            None if held_by_account is None else held_by_account.get(account.name, no_holds)
        )
        lines.append(
            AccountMoney(
                account=account.name,
                balance=balance,
                credit_limit=account.credit,
                holds=held_total.held if held_total else None,
                hold_count=held_total.holds if held_total else None,
            )
        )
    return tuple(lines)


def _convert_moment_or_none(us: int) -> datetime | None:
    return from_micros(us) if us else None


def list_outbox_kinds() -> tuple[str, ...]:
    """Return the message kinds of the outbox: notices, and messages to remote banks."""
    return (NOTICE, *list_offers(ENTRY_POINT_GROUP))
