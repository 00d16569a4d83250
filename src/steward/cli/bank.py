"""``steward bank``: the group of commands about money."""

from typing import ClassVar

import typer

from steward.cli.lazy import ADMINISTRATORS, CONTEXT, EVERYONE, OPERATORS, Entry, LazyGroup

_VIEWS = "steward.cli.bank_views"
_JOBS = "steward.cli.bank_jobs"
_MONEY = "steward.cli.bank_money"
_RATES = "steward.cli.bank_rates"
_UPKEEP = "steward.cli.bank_upkeep"
_ACCOUNTS = "steward.cli.bank_accounts"
_HERE = "steward.cli.bank"


class BankGroup(LazyGroup):
    """The commands about money."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry("balance", EVERYONE, "Show what accounts have.", _VIEWS, "balance"),
        Entry(
            "statement",
            EVERYONE,
            "Show what happened to an account's money.",
            _VIEWS,
            "statement",
        ),
        Entry("usage", EVERYONE, "Sum up what was used.", "steward.cli.bank_usage", "usage"),
        Entry("quote", EVERYONE, "Say what a job may cost.", _JOBS, "quote_app"),
        Entry("explain", EVERYONE, "Say what a job was charged, and why.", _JOBS, "explain"),
        Entry("holds", EVERYONE, "Show what money is spoken for.", _VIEWS, "holds"),
        Entry("account", OPERATORS, "Create, show and change accounts.", _HERE, "accounts"),
        Entry("user", OPERATORS, "Say who may spend how much of an account.", _HERE, "users"),
        Entry("allocation", OPERATORS, "Give accounts money for a time.", _HERE, "allocations"),
        Entry("rate", OPERATORS, "Say what jobs cost.", _HERE, "rates"),
        Entry("deposit", OPERATORS, "Give an account new money.", _MONEY, "deposit"),
        Entry("withdraw", OPERATORS, "Take money away from an account.", _MONEY, "withdraw"),
        Entry("transfer", OPERATORS, "Give money of one account to another.", _MONEY, "transfer"),
        Entry("refund", OPERATORS, "Give back what was charged.", _MONEY, "refund"),
        Entry("adjust", OPERATORS, "Correct what an account has, by hand.", _MONEY, "adjust_app"),
        Entry("allow", OPERATORS, "Let one job pass whatever its account has.", _JOBS, "allow"),
        Entry("enforce", OPERATORS, "Set how much the bank enforces.", _RATES, "enforce"),
        Entry(
            "would-refuse",
            OPERATORS,
            "List what the gate would have refused.",
            _RATES,
            "would_refuse",
        ),
        Entry(
            "reconcile",
            OPERATORS,
            "Compare what was charged with Slurm's records.",
            _UPKEEP,
            "reconcile",
        ),
        Entry(
            "backfill", OPERATORS, "Charge what ran before there was a bank.", _UPKEEP, "backfill"
        ),
        Entry("check", OPERATORS, "Prove the ledger.", _UPKEEP, "check"),
        Entry(
            "notices",
            OPERATORS,
            "List mails and other notices that were not sent.",
            "steward.cli.bank_notices",
            "notices",
        ),
        Entry(
            "import",
            ADMINISTRATORS,
            "Bring in accounts, users, money and prices.",
            _UPKEEP,
            "import_",
        ),
        Entry(
            "mybrc-user",
            ADMINISTRATORS,
            "Say who may get a token of the myBRC API, and by which password.",
            "steward.cli.bank_mybrc",
            "mybrc_user",
        ),
    )


class AccountGroup(LazyGroup):
    """The commands about accounts."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry("show", EVERYONE, "Show accounts.", _ACCOUNTS, "account_show"),
        Entry("create", OPERATORS, "Create an account.", _ACCOUNTS, "account_create"),
        Entry("change", OPERATORS, "Change an account.", _ACCOUNTS, "account_change"),
    )


class UserGroup(LazyGroup):
    """The commands about users in accounts."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry("show", EVERYONE, "Show who is in which account.", _ACCOUNTS, "user_show"),
        Entry("create", EVERYONE, "Put a user into an account.", _ACCOUNTS, "user_create"),
        Entry("change", EVERYONE, "Set what a user may spend.", _ACCOUNTS, "user_change"),
    )


class AllocationGroup(LazyGroup):
    """The commands about allocations."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry("show", EVERYONE, "Show allocations.", _ACCOUNTS, "allocation_show"),
        Entry(
            "create",
            OPERATORS,
            "Give an account money for a time.",
            "steward.cli.bank_allocations",
            "allocation_create",
        ),
        Entry(
            "change",
            OPERATORS,
            "Change an allocation's time.",
            "steward.cli.bank_allocations",
            "allocation_change",
        ),
    )


class RateGroup(LazyGroup):
    """The commands about what jobs cost."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry("show", EVERYONE, "Show what jobs cost.", _RATES, "rate_show"),
        Entry("create", OPERATORS, "Say what jobs cost from a time on.", _RATES, "rate_create"),
        Entry(
            "change",
            OPERATORS,
            "Change a part of what jobs cost, from a time on.",
            _RATES,
            "rate_change",
        ),
    )


def _group(kind: type[LazyGroup]) -> typer.Typer:
    return typer.Typer(
        cls=kind, context_settings=CONTEXT, no_args_is_help=True, add_completion=False
    )


app = _group(BankGroup)
accounts = _group(AccountGroup)
users = _group(UserGroup)
allocations = _group(AllocationGroup)
rates = _group(RateGroup)


@app.callback()
def bank() -> None:
    """What jobs cost, and what is left to spend."""


@accounts.callback()
def account() -> None:
    """Create, show and change accounts."""


@users.callback()
def user() -> None:
    """Say who may spend how much of an account."""


@allocations.callback()
def allocation() -> None:
    """Give accounts money for a time."""


@rates.callback()
def rate() -> None:
    """Say what jobs cost."""
