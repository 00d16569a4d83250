"""``steward bank allocation create`` and ``change``: money that can be drawn on for a time."""

from typing import Annotated, Literal

import typer

from steward.bank import money
from steward.bank.actions.accounts import (
    AccountPage,
    AllocationChangeRequest,
    AllocationCreateRequest,
)
from steward.cli import options
from steward.cli.asking import Asked, asking
from steward.cli.bank_accounts import print_allocations
from steward.cli.bank_text import Account, Amount, Key, Reason, key_or_random, say
from steward.cli.times import zone_to_ask_in
from steward.core.errors import UsageError

Rollover = Annotated[
    Literal["none", "next"] | None,
    typer.Option("--rollover", help="What is left at the end expires, or goes on."),
]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="What it is.")]
Begin = Annotated[
    str,
    typer.Option("--begin", metavar="TIME", help="From when on.", callback=options.not_empty),
]


@asking
def allocation_create(
    asked: Asked,
    account: Account,
    amount: Amount,
    end: Annotated[
        str,
        typer.Option("--end", metavar="TIME", help="Until when.", callback=options.not_empty),
    ],
    begin: Begin = "",
    rollover: Rollover = None,
    note: Note = "",
    reason: Reason = "",
    key: Key = "",
) -> None:
    """Give an account money for a time.

    Of several allocations the one that ends first is drawn on first.
    """
    style = asked.style
    request = AllocationCreateRequest(
        account=account,
        amount=money.parse(amount),
        begin=begin,
        end=end,
        rollover=rollover or "none",
        note=note,
        zone=zone_to_ask_in(),
        reason=reason,
        key=key_or_random(key),
    )
    answer: AccountPage = asked.call("bank.allocation_create", request)
    print_allocations(answer, style, changed=True)
    if not style.json and not style.parsable:
        say(f"Key: {request.key}")


@asking
def allocation_change(
    asked: Asked,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", min=1, max=options.LAST, help="The allocation's.")
    ],
    begin: Begin = "",
    end: Annotated[
        str,
        typer.Option("--end", metavar="TIME", help="Until when.", callback=options.not_empty),
    ] = "",
    rollover: Rollover = None,
    note: Note = "",
    reason: Reason = "",
) -> None:
    """Change an allocation's time.

    Its money is changed by deposit and withdraw, with --allocation.
    """
    style = asked.style
    if not (begin or end or rollover or note):
        raise UsageError("nothing is to be changed: give --begin, --end, --rollover or --note")
    request = AllocationChangeRequest(
        number=number,
        begin=begin or None,
        end=end or None,
        rollover=rollover,
        note=note or None,
        zone=zone_to_ask_in(),
        reason=reason,
    )
    answer: AccountPage = asked.call("bank.allocation_change", request)
    print_allocations(answer, style, changed=True)
