"""List of all actions: `get_action` and `import_actions` import the modules that declare them.

A caller that needs one action imports only the module that declares it; ``daemon/contexts.py``
makes the registry that runs them all. ``action_index.py`` names that module. ``ACTIONS`` maps each
name to its action.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Final

from steward.core.actions import DECLARED, Action
from steward.daemon.action_index import ACTION_INDEX


def import_actions(package: str = "") -> dict[str, Action]:
    """Return all actions, or those of one package (the first word of their names), by name."""
    return {
        name: get_action(name)
        for name in ACTION_INDEX
        if not package or name.startswith(f"{package}.")
    }


def get_action(name: str) -> Action:
    """Return the action of that name.

    Raises:
        KeyError: There is no such action.
    """
    if name not in DECLARED:
        importlib.import_module(ACTION_INDEX[name].module)
    return DECLARED[name]


class _DeclaredActions(Mapping[str, Action]):
    """All actions by name; imports the module of an action when it is first needed."""

    def __getitem__(self, name: str) -> Action:
        return get_action(name)

    def __iter__(self) -> Iterator[str]:
        return iter(ACTION_INDEX)

    def __len__(self) -> int:
        return len(ACTION_INDEX)


ACTIONS: Final[Mapping[str, Action]] = _DeclaredActions()
"""Every action, by its name."""
