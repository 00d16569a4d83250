"""The accounts that somebody is in or looks after: what is left in each."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from litestar import Response, get

from steward.bank.asking_accounts import AccountPage, AccountShowRequest
from steward.bank.asking_views import AccountBalance, BalanceAnswer, BalanceRequest
from steward.bank.ledger import Account
from steward.web.rendering import Renderer
from steward.web.visit import Visit

_DEEPEST: Final = 20


class AccountRow(msgspec.Struct, frozen=True):
    """An account in the list.

    Attributes:
        account: What it is.
        balance: What it has.
        depth: How many of those above it are in the list, too.
    """

    account: Account
    balance: AccountBalance
    depth: int


@get("/accounts", include_in_schema=False)
async def accounts(visit: Visit, pages: Renderer) -> Response[Any]:
    """All of them, below those that they belong to."""
    if not visit.me.bank:
        return pages.page("no_bank.html", visit, here="/accounts")
    answer: BalanceAnswer = await visit.ask("bank.balance", BalanceRequest())
    # Of what nobody created, and jobs were only charged to, there is nothing more to show.
    names = tuple(one.account for one in answer.accounts if one.known)
    shown = AccountPage(unit=answer.unit, decimals=answer.decimals, zone=answer.zone)
    if names:
        shown = await visit.ask("bank.account_show", AccountShowRequest(names=names))
    return pages.page(
        "accounts.html",
        visit,
        here="/accounts",
        answer=answer,
        rows=list(tree(shown.accounts, answer.accounts)),
    )


def tree(accounts: Iterable[Account], balances: Iterable[AccountBalance]) -> Iterator[AccountRow]:
    """The accounts in the order of a tree, each behind the one above it."""
    by_name = {one.account: one for one in balances}
    known = {one.name: one for one in accounts}
    below: dict[str, list[Account]] = {}
    for name in sorted(by_name):
        account = known.get(name, Account(name=name, known=False))
        above = account.parent if account.parent in by_name else ""
        below.setdefault(above, []).append(account)

    def rows(above: str, depth: int) -> Iterator[AccountRow]:
        for account in below.get(above, ()) if depth < _DEEPEST else ():
            yield AccountRow(account, by_name[account.name], depth)
            yield from rows(account.name, depth + 1)

    return rows("", 0)


ROUTES: Final = (accounts,)
