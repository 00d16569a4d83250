"""Bank actions that move money: deposit, withdraw, transfer, refund and adjust.

Only operators may use them. Each needs a reason, and may carry an idempotency key that makes
a repeat harmless. Before money leaves an account in the ledger, the gate reserves it, so that no
job is admitted with money that is about to leave. Amounts are micro-SU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from steward.bank.context import (
    AccountName,
    Amount,
    BankContext,
    ChangeReply,
    Cluster,
    Key,
    Reason,
)
from steward.bank.errors import BankUsage, GateUnavailable
from steward.bank.ledger import Authorship, Transfer
from steward.core.access import Caller
from steward.core.actions import Request, action, argument, option, route
from steward.core.layouts import Column, Layout

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


_OPERATOR_TASK: Final = "change balances"


_ALLOCATION = option(
    "Number of the allocation.",
    "--allocation",
    default="the one without an end; for withdrawals then the others, latest end first",
    metavar="NUMBER",
    ge=0,
)
_ADJUSTED_ALLOCATION = option(
    "Number of the allocation.",
    "--allocation",
    default="the one without an end",
    metavar="NUMBER",
    ge=0,
)


class MoveRequest(Request, frozen=True, kw_only=True):
    """Request of bank.deposit and bank.withdraw: service units put in or taken out."""

    account: AccountName
    amount: Amount
    reason: Reason
    key: Key = ""
    allocation: Annotated[int, _ALLOCATION] = 0


class TransferRequest(Request, frozen=True, kw_only=True):
    """Request of bank.transfer: service units moved from one account to another."""

    source: Annotated[str, argument("Account that pays.", "FROM")]
    target: Annotated[str, argument("Account that receives.", "TO")]
    amount: Amount
    reason: Reason
    key: Key = ""
    source_allocation: Annotated[
        int,
        option(
            "Number of the allocation that pays.",
            "--from-allocation",
            default="the one without an end, then the others, latest end first",
            metavar="NUMBER",
            ge=0,
        ),
    ] = 0
    target_allocation: Annotated[
        int,
        option(
            "Number of the allocation that receives.",
            "--to-allocation",
            default="the one without an end",
            metavar="NUMBER",
            ge=0,
        ),
    ] = 0


class RefundRequest(Request, frozen=True, kw_only=True):
    """Request of bank.refund: a refund of a job, or of an account in general."""

    account: Annotated[str, argument("Account to refund, if no job is named.", "ACCOUNT")] = ""
    job: Annotated[
        str,
        option(
            "Id of the job to refund: 123, 123_7, 123+1.",
            "--job",
            "--jobs",
            "-j",
            metavar="JOB",
        ),
    ] = ""
    cluster: Cluster = ""
    amount: Annotated[
        int | None,
        option(
            "Amount to refund.",
            "--amount",
            metavar="AMOUNT",
            default="for a job, its whole charge",
            unit="money",
        ),
    ] = None
    user: Annotated[
        str, option("User whose spending the refund reduces.", "--user", "-u", metavar="NAME")
    ] = ""
    reason: Reason
    key: Key = ""


class AdjustRequest(Request, frozen=True, kw_only=True):
    """Request of bank.adjust: a manual correction."""

    account: AccountName
    amount: Annotated[
        int,
        argument(
            "Amount, such as 12.5; a negative one reduces the balance.",
            "AMOUNT",
            unit="money",
            is_signed=True,
        ),
    ]
    reason: Reason
    key: Key = ""
    allocation: Annotated[int, _ADJUSTED_ALLOCATION] = 0


def _read_amount(transfer: Transfer, _: object = None) -> int:
    """Return the amount of a transfer; an adjustment may have a negative one."""
    if transfer.kind != "adjust":
        return transfer.amount
    return sum(entry.amount for entry in transfer.postings if entry.account)


class MoneyMoveReply(ChangeReply, frozen=True, kw_only=True):
    """Reply to an action that moves service units.

    Attributes:
        transfers: The transfers made.
        key: The caller's idempotency key.
        repeated: Whether the key was used before, so that nothing was done now.
        balances: Current balances of the accounts, over their active allocations.
    """

    transfers: tuple[Transfer, ...]
    key: str = ""
    repeated: bool = False
    balances: dict[str, int] = msgspec.field(default_factory=dict)
    layout: ClassVar[Layout] = (
        Column("Number", "number", show="requested"),
        Column("Kind", "kind", show="requested"),
        Column("Account", "account", show="requested"),
        Column("Amount", _read_amount, "money", show="requested"),
        Column("Key", "key", show="requested"),
    )

    def list_lines(self) -> Iterable[str]:
        """Return a line for each transfer and balance, and the key."""
        status = "Already done" if self.repeated else "Done"
        for transfer in self.transfers:
            amount = self.format_with_unit(_read_amount(transfer))
            yield f"{status}: {transfer.kind} of {amount}, ledger transaction {transfer.number}."
        for account, balance in self.balances.items():
            yield f"{account} has a balance of {self.format_with_unit(balance)} now."
        yield f"Key: {self.key}"


MoveFunction = Callable[["Transaction", Authorship], tuple[Transfer, ...]]
"""Function that makes the transfers of an action within a transaction."""


@action(
    "bank.deposit",
    scope="bank",
    role="operator",
    command="bank deposit",
    rows="transfers",
    routes=(route("POST /accounts/{account}/deposits"),),
)
def deposit_money(context: BankContext, caller: Caller, request: MoveRequest) -> MoneyMoveReply:
    """Deposit service units in an account.

    Without --allocation, they never expire. 'steward bank allocation create' grants service
    units for a period.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The account does not exist, or the reason or amount is missing or invalid.
    """
    _require_positive(request.amount)

    def move(t: "Transaction", author: Authorship) -> tuple[Transfer, ...]:
        return (
            t.transfers.deposit(
                request.account, request.amount, author, allocation=request.allocation
            ),
        )

    return _move_money(context, caller, request, (request.account,), move)


@action(
    "bank.withdraw",
    scope="bank",
    role="operator",
    command="bank withdraw",
    rows="transfers",
    routes=(route("POST /accounts/{account}/withdrawals"),),
)
def withdraw_money(context: BankContext, caller: Caller, request: MoveRequest) -> MoneyMoveReply:
    """Withdraw service units from an account.

    You can withdraw at most the available SU. SU holds of jobs stay in the account.

    Raises:
        BankRefused: The caller is not an operator, or the available amount is too low.
        BankUsage: The account does not exist, or the reason or amount is missing or invalid.
        GateUnavailable: The gate does not answer, so the available amount is unknown.
    """
    _require_positive(request.amount)

    def move(t: "Transaction", author: Authorship) -> tuple[Transfer, ...]:
        return (
            t.transfers.withdraw(
                request.account, request.amount, author, allocation=request.allocation
            ),
        )

    with _reserve_at_gate(
        context, caller, request.account, request.amount, request, request.allocation
    ):
        return _move_money(context, caller, request, (request.account,), move)


@action(
    "bank.transfer",
    scope="bank",
    role="operator",
    command="bank transfer",
    rows="transfers",
    routes=(route("POST /transfers"),),
)
def transfer_money(
    context: BankContext, caller: Caller, request: TransferRequest
) -> MoneyMoveReply:
    """Transfer service units from one account to another.

    You can transfer at most the available SU. SU holds of jobs stay in the account.

    Raises:
        StewardError: As for :func:`withdraw_money`.
    """
    _require_positive(request.amount)

    def move(t: "Transaction", author: Authorship) -> tuple[Transfer, ...]:
        return (
            t.transfers.transfer(
                request.source,
                request.target,
                request.amount,
                author,
                source_allocation=request.source_allocation,
                target_allocation=request.target_allocation,
            ),
        )

    accounts = (request.source, request.target)
    with _reserve_at_gate(
        context, caller, request.source, request.amount, request, request.source_allocation
    ):
        return _move_money(context, caller, request, accounts, move)


@action(
    "bank.refund",
    scope="bank",
    role="operator",
    command="bank refund",
    rows="transfers",
    routes=(route("POST /refunds"),),
)
def refund_money(context: BankContext, caller: Caller, request: RefundRequest) -> MoneyMoveReply:
    """Refund charges of a job or of an account.

    Name a job (--job 123), or an account and an amount (physics --amount 12.5).

    Raises:
        BankRefused: The caller is not an operator, or the amount is more than was charged.
        BankUsage: Neither account nor job is named, or there is no such charge.
    """
    if bool(request.account) == bool(request.job):
        raise BankUsage("invalid refund: give either `account` and `amount`, or `job`")
    if request.amount is not None:
        _require_positive(request.amount)
    if request.job:
        return _move_money(
            context, caller, request, (), lambda t, author: _refund_job(context, t, author, request)
        )
    if request.amount is None:
        raise BankUsage("no amount given: set `amount`, such as 12.5")
    amount = request.amount

    def move(t: "Transaction", author: Authorship) -> tuple[Transfer, ...]:
        return (t.transfers.refund(request.account, amount, author, user=request.user),)

    return _move_money(context, caller, request, (request.account,), move)


@action(
    "bank.adjust",
    scope="bank",
    role="operator",
    command="bank adjust",
    rows="transfers",
    routes=(route("POST /accounts/{account}/adjustments"),),
)
def adjust_balance(context: BankContext, caller: Caller, request: AdjustRequest) -> MoneyMoveReply:
    """Adjust the balance of an account by hand.

    A negative amount reduces the balance.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The account does not exist, the reason is missing, or the amount is zero.
    """
    if not request.amount:
        raise BankUsage("invalid adjustment of 0: give a positive or negative amount")

    def move(t: "Transaction", author: Authorship) -> tuple[Transfer, ...]:
        return (
            t.transfers.adjust(
                request.account, request.amount, author, allocation=request.allocation
            ),
        )

    if request.amount >= 0:
        return _move_money(context, caller, request, (request.account,), move)
    with _reserve_at_gate(
        context, caller, request.account, -request.amount, request, request.allocation
    ):
        return _move_money(context, caller, request, (request.account,), move)


_MoneyRequest = MoveRequest | TransferRequest | RefundRequest | AdjustRequest


def _move_money(
    context: BankContext,
    caller: Caller,
    request: _MoneyRequest,
    accounts: tuple[str, ...],
    move: MoveFunction,
) -> MoneyMoveReply:
    """Run one money-moving action: check rights, make the transfers, and update the gate."""
    _require_reason(request.reason)
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        # Fail early with the name of an account that does not exist.
        names = [t.accounts.require(name.lower()).name for name in accounts]
        transfers = move(t, context.make_authorship(caller, request.reason, request.key))
        repeated = t.seq == seq_before
        names = names or list(dict.fromkeys(transfer.account for transfer in transfers))
        balances = {name: t.queries.get_balance(name) for name in names}
    return MoneyMoveReply(
        transfers=transfers,
        key=request.key,
        repeated=repeated,
        balances=balances,
        gate_knows=context.update_gate(seq_before),
        **context.make_heading(),
    )


@contextmanager
def _reserve_at_gate(
    context: BankContext,
    caller: Caller,
    account: str,
    amount: int,
    request: _MoneyRequest,
    allocation: int,
) -> Iterator[None]:
    """Reserve money at the gate until the ledger has moved it out.

    Raises:
        BankRefused: The amount is not available, or the caller lacks the right.
        GateUnavailable: A gate is configured but does not answer.
    """
    _require_reason(request.reason)
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        t.accounts.require(account.lower())
        is_repeat = bool(request.key) and t.transfers.find_by_key(request.key) is not None
    if is_repeat or not context.has_gate:
        yield
        return
    gate = context.gate
    try:
        hold = gate.reserve(account.lower(), amount, request.reason, allocation)
    except GateUnavailable as error:
        raise GateUnavailable(
            f"cannot determine the available SU of account {account}: the gate does not "
            f"answer. Start 'steward serve' ({error})",
            account,
        ) from error
    try:
        yield
    finally:
        try:
            position = gate.get_status().position
            # Send new balances with the release: otherwise the gate would, for a moment, count the
            # money as available again.
            with context.ledger.reading() as t:
                books = t.export_books(position)
                gate.release(hold.id, "the transfer ended", books=books)
        except GateUnavailable:
            # The reservation expires. Until then the gate sees too little available, never too
            # much.
            pass


def _refund_job(
    context: BankContext, t: "Transaction", author: Authorship, request: RefundRequest
) -> tuple[Transfer, ...]:
    """Refund the charges of a job, oldest first."""
    from steward.bank.job_charges import find_job_charges

    charge_rows = find_job_charges(context, t, request.job, request.cluster)
    remaining = request.amount
    refunds: list[Transfer] = []
    for row in charge_rows:
        charge = row.charge
        refundable = charge.amount - row.refunded
        key = f"{author.key}/{charge.key}" if author.key else ""
        earlier_refund = t.transfers.find_by_key(key) if key else None
        if earlier_refund is not None:
            refunds.append(earlier_refund)
            remaining = None if remaining is None else remaining - earlier_refund.amount
            continue
        amount = refundable if remaining is None else min(remaining, refundable)
        if amount > 0:
            refund_author = Authorship(who=author.who, why=author.why, key=key, at=author.at)
            refunds.append(t.transfers.refund_charge(charge.key, refund_author, amount=amount))
            remaining = None if remaining is None else remaining - amount
    if not refunds:
        raise BankUsage(f"job {request.job} has no charge left to refund")
    if remaining:
        raise BankUsage(
            f"refund exceeds the charge of job {request.job}: nothing refunded. 'steward bank "
            "explain' shows the charge"
        )
    return tuple(refunds)


def _require_positive(amount: int) -> None:
    """Reject an amount that is not above zero."""
    if amount <= 0:
        raise BankUsage(
            "invalid amount: give more than 0. 'steward bank adjust' accepts negative amounts",
            amount,
        )


def _require_reason(reason: str) -> None:
    """Reject a missing reason."""
    if not reason.strip():
        raise BankUsage("no reason given: set `reason`, which the ledger records permanently")
