"""Bank operation ``bank.balance``: account balances, through the bank's action of that name."""

from typing import Annotated, Any, Final

import msgspec

from steward.automation.operation import Operation, OperationContext, Parameters


class BalanceParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of bank.balance."""

    accounts: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="These; all that the asker is in or looks after if empty."),
    ] = ()


def show_balance(context: OperationContext, parameters: BalanceParameters) -> Any:
    """Return account balances, in micro-SU."""
    reply = context.call_action("bank.balance", {"accounts": list(parameters.accounts)})
    return msgspec.to_builtins(reply)


OPERATIONS: Final = (
    Operation(
        ref="bank.balance",
        help="Show what accounts have.",
        result_help="What 'steward bank balance --json' shows; amounts are micro-SU.",
        parameters=BalanceParameters,
        run=show_balance,
        on_cluster=False,
    ),
)
