"""List of all actions: maps an action's name to its declaration.

A caller that needs one action imports only the package that declares it; ``daemon/contexts.py``
makes the registry that runs them all.
"""

import importlib
from collections.abc import Iterator
from typing import Final

from steward.core.actions import Action

_HOMES: Final = {
    "archive": ("steward.archive.actions",),
    "journal": ("steward.admin.journal",),
    "accounting": ("steward.accounting.actions", "steward.extensions.jobacct_plugins"),
    "bank": ("steward.bank.actions",),
    "automation": ("steward.automation.actions",),
    "events": ("steward.reports.events",),
    "rules": ("steward.automation.rules.actions",),
    "history": ("steward.reports.history.actions",),
    "reports": ("steward.reports.actions",),
    "credentials": ("steward.admin.credentials.actions",),
    "status": ("steward.admin.status.actions",),
    "doctor": ("steward.admin.doctor.actions",),
}
"""Modules that define the ACTIONS of each group."""


def every_action() -> Iterator[Action]:
    """Yield all actions."""
    for room in _HOMES:
        yield from _of(room)


def action(name: str) -> Action:
    """Return the action of that name.

    Raises:
        KeyError: There is no such action.
    """
    room = name.partition(".")[0]
    if room in _HOMES:
        for one in _of(room):
            if one.name == name:
                return one
    raise KeyError(name)


def _of(room: str) -> tuple[Action, ...]:
    return tuple(one for home in _HOMES[room] for one in importlib.import_module(home).ACTIONS)
