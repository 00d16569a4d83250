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
    for group in _ACTION_MODULES:
        yield from _import_actions(group)


def get_action(name: str) -> Action:
    """Return the action of that name.

    Raises:
        KeyError: There is no such action.
    """
    group = name.partition(".")[0]
    if group in _ACTION_MODULES:
        for action in _import_actions(group):
            if action.name == name:
                return action
    raise KeyError(name)


def _import_actions(group: str) -> tuple[Action, ...]:
    return tuple(
        action
        for module in _ACTION_MODULES[group]
        for action in importlib.import_module(module).ACTIONS
    )
