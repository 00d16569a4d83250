"""``steward bank deposit``, ``withdraw``, ``transfer``, ``refund``, ``adjust``: move SU.

Each command is one ledger transaction, recorded with its reason and an idempotency key.
"""

from typing import Annotated

import msgspec
import typer

from steward.bank import money
from steward.bank.actions.money import (
    AdjustRequest,
    DepositRequest,
    MoneyMoveReply,
    RefundRequest,
    TransferRequest,
    WithdrawRequest,
)
from steward.cli.bank_options import (
    Account,
    Amount,
    ClusterOption,
    Key,
    NeededReason,
    ReplyFormatter,
    ensure_key,
    note_gate_unaware,
    print_line,
)
from steward.cli.groups import CONTEXT
from steward.cli.options import LARGEST_NUMBER, CommandCall, reject_empty, with_call, with_options
from steward.cli.output import Style, print_json, print_table
from steward.core.layouts import Column

Allocation = Annotated[
    int,
    typer.Option(
        "--allocation",
        min=0,
        max=LARGEST_NUMBER,
        metavar="NUMBER",
        help="This one; else the ledger's own choice.",
    ),
]


class MoveOptions(msgspec.Struct, frozen=True):
    """Options of a deposit or withdrawal: account, amount in micro-SU, reason, key, allocation."""

    account: str
    amount: int
    reason: str
    key: str
    allocation: int


def _read_move_options(
    account: Account,
    amount: Amount,
    reason: NeededReason,
    key: Key = "",
    allocation: Allocation = 0,
) -> MoveOptions:
    """Read the options of a deposit or withdrawal."""
    return MoveOptions(account, money.parse_money(amount), reason, ensure_key(key), allocation)


@with_call
@with_options(_read_move_options)
def deposit(move_options: MoveOptions, call: CommandCall) -> None:
    """Give an account new money.

    It never ends: 'steward bank allocation create' gives money for a time.
    """
    request = DepositRequest(**msgspec.structs.asdict(move_options))
    _print_transactions(call.send("bank.deposit", request), call.style)


@with_call
@with_options(_read_move_options)
def withdraw(move_options: MoveOptions, call: CommandCall) -> None:
    """Take money away from an account.

    Only what is not held for jobs can go.
    """
    request = WithdrawRequest(**msgspec.structs.asdict(move_options))
    _print_transactions(call.send("bank.withdraw", request), call.style)


@with_call
def transfer(
    call: CommandCall,
    source: Annotated[str, typer.Argument(metavar="FROM", help="The account that gives.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The account that gets.")],
    amount: Amount,
    reason: NeededReason,
    key: Key = "",
    source_allocation: Annotated[
        int,
        typer.Option(
            "--from-allocation",
            min=0,
            max=LARGEST_NUMBER,
            metavar="NUMBER",
            help="Out of this one.",
        ),
    ] = 0,
    target_allocation: Annotated[
        int,
        typer.Option(
            "--to-allocation", min=0, max=LARGEST_NUMBER, metavar="NUMBER", help="Into this one."
        ),
    ] = 0,
) -> None:
    """Give money of one account to another.

    Only what is not held for jobs can go.
    """
    style = call.style
    request = TransferRequest(
        source=source,
        target=target,
        amount=money.parse_money(amount),
        reason=reason,
        key=ensure_key(key),
        source_allocation=source_allocation,
        target_allocation=target_allocation,
    )
    _print_transactions(call.send("bank.transfer", request), style)


@with_call
def refund(
    call: CommandCall,
    account: Annotated[
        str, typer.Argument(metavar="ACCOUNT", help="The account, where no job is named.")
    ] = "",
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="How much; of a job all if not given.")
    ] = "",
    reason: NeededReason = "",
    job: Annotated[
        str,
        typer.Option(
            "--job",
            "--jobs",
            "-j",
            metavar="JOB",
            help="What this job was charged: 123, 123_7, 123+1.",
            callback=reject_empty,
        ),
    ] = "",
    part: Annotated[
        str,
        typer.Option(
            "--amount", metavar="AMOUNT", help="Of a job only so much.", callback=reject_empty
        ),
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            "--user", "-u", metavar="NAME", help="Off this user's use.", callback=reject_empty
        ),
    ] = "",
    cluster: ClusterOption = "",
    key: Key = "",
) -> None:
    """Give back what was charged.

    Either of a job (--job 123), or of an account at large (physics 12.5).
    """
    style = call.style
    amount_text = part or amount
    request = RefundRequest(
        account=account,
        job=job,
        cluster=cluster,
        amount=money.parse_money(amount_text) if amount_text else None,
        user=user,
        reason=reason,
        key=ensure_key(key),
    )
    _print_transactions(call.send("bank.refund", request), style)


# A negative amount looks like an option.
adjust_app = typer.Typer(add_completion=False)


@adjust_app.command(context_settings={**CONTEXT, "ignore_unknown_options": True})
@with_call
def adjust(
    call: CommandCall,
    account: Account,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="Such as 12.5, or -12.5 to take away.")
    ],
    reason: NeededReason,
    key: Key = "",
    allocation: Allocation = 0,
) -> None:
    """Correct what an account has, by hand."""
    style = call.style
    request = AdjustRequest(
        account=account,
        amount=money.parse_money(amount),
        reason=reason,
        key=ensure_key(key),
        allocation=allocation,
    )
    reply: MoneyMoveReply = call.send("bank.adjust", request)
    _print_transactions(reply, style, is_decrease=request.amount < 0)


def _print_transactions(reply: MoneyMoveReply, style: Style, *, is_decrease: bool = False) -> None:
    """Print ledger transactions: a line each for people, their postings for programs.

    Args:
        reply: The reply.
        style: Output style.
        is_decrease: Whether it is an adjustment that decreases the balance, shown as negative.
    """
    if style.json:
        print_json(reply)
        return
    formatter = ReplyFormatter(reply)
    sign = -1 if is_decrease else 1
    if style.parsable:
        columns = [
            Column("Number", "number"),
            Column("Kind", "kind"),
            Column("Account", "account"),
            Column("Amount", lambda transaction, _: sign * transaction.amount, "money"),
            Column("Key", "key"),
        ]
        print_table(columns, reply.transfers, style, reply)
        return
    for transaction in reply.transfers:
        status = "Done before" if reply.repeated else "Done"
        print_line(
            f"{status}: {transaction.kind} of "
            f"{formatter.format_with_unit(sign * transaction.amount)}, number {transaction.number}."
        )
    for account, balance in reply.balances.items():
        print_line(f"{account} has {formatter.format_with_unit(balance)} now.")
    print_line(f"Key: {reply.key}")
    note_gate_unaware(reply.gate_knows)
