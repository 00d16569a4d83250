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
    MovedAnswer,
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
    Shown,
    key_or_random,
    plain,
    say,
    tell_gate,
)
from steward.cli.groups import CONTEXT
from steward.cli.options import LAST, Asked, asking, not_empty, with_options
from steward.cli.output import Column, Style, print_json, print_table

Allocation = Annotated[
    int,
    typer.Option(
        "--allocation",
        min=0,
        max=LAST,
        metavar="NUMBER",
        help="This one; else the ledger's own choice.",
    ),
]


class Moving(msgspec.Struct, frozen=True):
    """Options of a deposit or withdrawal: account, amount in micro-SU, reason, key, allocation."""

    account: str
    amount: int
    reason: str
    key: str
    allocation: int


def _moving(
    account: Account,
    amount: Amount,
    reason: NeededReason,
    key: Key = "",
    allocation: Allocation = 0,
) -> Moving:
    """Read the options of a deposit or withdrawal."""
    return Moving(account, money.parse(amount), reason, key_or_random(key), allocation)


@asking
@with_options(_moving)
def deposit(moving: Moving, asked: Asked) -> None:
    """Give an account new money.

    It never ends: 'steward bank allocation create' gives money for a time.
    """
    request = DepositRequest(**msgspec.structs.asdict(moving))
    _moved(asked.call("bank.deposit", request), asked.style)


@asking
@with_options(_moving)
def withdraw(moving: Moving, asked: Asked) -> None:
    """Take money away from an account.

    Only what is not held for jobs can go.
    """
    request = WithdrawRequest(**msgspec.structs.asdict(moving))
    _moved(asked.call("bank.withdraw", request), asked.style)


@asking
def transfer(
    asked: Asked,
    source: Annotated[str, typer.Argument(metavar="FROM", help="The account that gives.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The account that gets.")],
    amount: Amount,
    reason: NeededReason,
    key: Key = "",
    source_allocation: Annotated[
        int,
        typer.Option(
            "--from-allocation", min=0, max=LAST, metavar="NUMBER", help="Out of this one."
        ),
    ] = 0,
    target_allocation: Annotated[
        int,
        typer.Option("--to-allocation", min=0, max=LAST, metavar="NUMBER", help="Into this one."),
    ] = 0,
) -> None:
    """Give money of one account to another.

    Only what is not held for jobs can go.
    """
    style = asked.style
    request = TransferRequest(
        source=source,
        target=target,
        amount=money.parse(amount),
        reason=reason,
        key=key_or_random(key),
        source_allocation=source_allocation,
        target_allocation=target_allocation,
    )
    _moved(asked.call("bank.transfer", request), style)


@asking
def refund(
    asked: Asked,
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
            callback=not_empty,
        ),
    ] = "",
    part: Annotated[
        str,
        typer.Option(
            "--amount", metavar="AMOUNT", help="Of a job only so much.", callback=not_empty
        ),
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            "--user", "-u", metavar="NAME", help="Off this user's use.", callback=not_empty
        ),
    ] = "",
    cluster: ClusterOption = "",
    key: Key = "",
) -> None:
    """Give back what was charged.

    Either of a job (--job 123), or of an account at large (physics 12.5).
    """
    style = asked.style
    given = part or amount
    request = RefundRequest(
        account=account,
        job=job,
        cluster=cluster,
        amount=money.parse(given) if given else None,
        user=user,
        reason=reason,
        key=key_or_random(key),
    )
    _moved(asked.call("bank.refund", request), style)


# A negative amount looks like an option.
adjust_app = typer.Typer(add_completion=False)


@adjust_app.command(context_settings={**CONTEXT, "ignore_unknown_options": True})
@asking
def adjust(
    asked: Asked,
    account: Account,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="Such as 12.5, or -12.5 to take away.")
    ],
    reason: NeededReason,
    key: Key = "",
    allocation: Allocation = 0,
) -> None:
    """Correct what an account has, by hand."""
    style = asked.style
    request = AdjustRequest(
        account=account,
        amount=money.parse(amount),
        reason=reason,
        key=key_or_random(key),
        allocation=allocation,
    )
    answer: MovedAnswer = asked.call("bank.adjust", request)
    _moved(answer, style, is_taken=request.amount < 0)


def _moved(answer: MovedAnswer, style: Style, *, is_taken: bool = False) -> None:
    """Print ledger transactions: a line each for people, their postings for programs.

    Args:
        answer: The reply.
        style: Output style.
        is_taken: Whether it is an adjustment that decreases the balance, shown as negative.
    """
    if style.json:
        print_json(answer)
        return
    shown = Shown(answer)
    sign = -1 if is_taken else 1
    if style.parsable:
        columns = [
            Column("Number", lambda one: str(one.number)),
            Column("Kind", lambda one: one.kind),
            Column("Account", lambda one: one.account),
            Column("Amount", lambda one: plain(sign * one.amount)),
            Column("Key", lambda one: one.key),
        ]
        print_table(columns, answer.transfers, style)
        return
    for one in answer.transfers:
        before = "Done before" if answer.repeated else "Done"
        say(f"{before}: {one.kind} of {shown.whole(sign * one.amount)}, number {one.number}.")
    for name, left in answer.balances.items():
        say(f"{name} has {shown.whole(left)} now.")
    say(f"Key: {answer.key}")
    tell_gate(answer.gate_knows)
