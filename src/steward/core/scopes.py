"""What a token is good for: for each action of the registry the scope that it takes.

A token never gives more than its user has: what its scopes let through is then
decided by the action itself, as for everybody. An action that is not known here
takes ``admin``, so that a new one is never open by accident.
"""

from typing import Final, Literal, get_args

from steward.core.access import Asker
from steward.core.errors import Refused

Scope = Literal["read", "scripts", "bank", "actions", "admin"]

SCOPES: Final[dict[Scope, str]] = {
    "read": "see jobs, usage, balances, nodes, events and reports",
    "scripts": "read scripts and environments, and search in them",
    "bank": "move money, and change accounts, limits and rates",
    "actions": "have something done to a cluster, or to jobs",
    "admin": "look after Steward itself",
}
"""The scopes, and what each lets a token do."""

ALL: Final[frozenset[Scope]] = frozenset(get_args(Scope))

_ROOMS: Final[dict[str, Scope]] = {
    **dict.fromkeys(("accounting", "bank", "events", "history", "reports", "status"), "read"),
    **dict.fromkeys(("doctor", "automation"), "read"),
    "archive": "scripts",
    **dict.fromkeys(("rules", "journal", "credentials"), "admin"),
}
"""The scope of a room's actions, but for …"""

_OTHERS: Final[dict[str, Scope]] = {
    **dict.fromkeys(("archive.list", "archive.sinks", "rules.check"), "read"),
    **dict.fromkeys(
        (f"archive.{verb}" for verb in ("verify", "reindex", "purge", "resend")), "admin"
    ),
    **dict.fromkeys((f"accounting.{verb}" for verb in ("dump", "expire", "plugins")), "admin"),
    **dict.fromkeys(
        (
            f"bank.{verb}"
            for verb in (
                *("deposit", "withdraw", "transfer", "refund", "adjust", "allow"),
                *("account_create", "account_change", "user_create", "user_change"),
                *("allocation_create", "allocation_change", "rate_create", "enforce"),
                *("reconcile", "backfill", "import", "notices_retry"),
            )
        ),
        "bank",
    ),
    "automation.run": "actions",
    "credentials.me": "read",
}
"""… these."""

READS: Final[frozenset[Scope]] = frozenset({"read", "scripts"})
"""The scopes of actions that change nothing."""

ALWAYS: Final = frozenset({"credentials.me"})
"""What every token lets through, whatever it was made for: whose it is."""


class NotInScope(Refused):
    """A token that was not made for this."""


def scope_of(action: str) -> Scope:
    """The scope that an action takes, by its name."""
    return _OTHERS.get(action) or _ROOMS.get(action.partition(".")[0], "admin")


def check_scope(asker: Asker, action: str) -> None:
    """Refuse an action that the asker's token was not made for.

    Raises:
        NotInScope: The token has another scope.
    """
    if asker.scopes is None or action in ALWAYS:
        return
    scope = scope_of(action)
    if scope not in asker.scopes:
        raise NotInScope(
            f"this token may not do {action}: it takes the scope '{scope}', "
            f"and has {' and '.join(sorted(asker.scopes)) or 'none'}",
            action,
        )


def is_known(action: str) -> bool:
    """Whether somebody has thought about the scope of this action."""
    return action in _OTHERS or action.partition(".")[0] in _ROOMS
