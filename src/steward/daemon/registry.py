"""List of all actions: `get_action` and `iterate_actions` import the packages that declare them.

A caller that needs one action imports only the package that declares it; ``daemon/contexts.py``
makes the registry that runs them all.
"""

import importlib
from collections.abc import Iterator
from typing import Final

from steward.core.actions import Action

_ACTION_MODULES: Final = {
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
"""Modules that define the ``ACTIONS`` of each group: the first word of an action's name."""


def iterate_actions() -> Iterator[Action]:
    """Yield all actions."""
    for room in _ACTION_MODULES:
        yield from _import_actions(room)


def get_action(name: str) -> Action:
    """Return the action of that name.

    Raises:
        KeyError: There is no such action.
    """
    room = name.partition(".")[0]
    if room in _ACTION_MODULES:
        for one in _import_actions(room):
            if one.name == name:
                return one
    raise KeyError(name)


def _import_actions(room: str) -> tuple[Action, ...]:
    return tuple(
        one for home in _ACTION_MODULES[room] for one in importlib.import_module(home).ACTIONS
    )
