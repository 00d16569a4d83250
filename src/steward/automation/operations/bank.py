"""Bank operation ``bank.balance``: account balances, through the bank's action of that name."""

from typing import Annotated, Any

import msgspec

from steward.automation.operation import OperationContext, Parameters, operation
from steward.core.actions import described


class BalanceParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of bank.balance."""

    accounts: Annotated[
        tuple[str, ...],
        described("Accounts; if empty, all that the caller uses or manages."),
    ] = ()


@operation("bank.balance", only_reads=True, on_cluster=False)
def show_balance(context: OperationContext, parameters: BalanceParameters) -> Any:
    """Show balances of accounts.

    Returns:
        Reply of 'steward bank balance --json'; amounts are micro-SU.
    """
    reply = context.call_action("bank.balance", {"accounts": list(parameters.accounts)})
    return msgspec.to_builtins(reply)
