"""List of all actions: `get_action` and `import_actions` import the modules that declare them.

A caller that needs one action imports only the module that declares it; ``daemon/contexts.py``
makes the registry that runs them all. ``action_index.py`` names that module.
"""

import importlib

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
