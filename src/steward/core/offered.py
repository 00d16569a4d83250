"""What a room offers by its own name, imported from its modules when it is first named."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def offered(room: str, **names: tuple[str, ...]) -> Callable[[str], Any]:
    """A room's ``__getattr__``, see PEP 562.

    Args:
        room: The package's name.
        names: For each module of it the names that the package offers.
    """
    homes = {name: module for module, own in names.items() for name in own}
    # When a module is imported, its package gets it as an attribute, in place of such a name.
    assert homes.keys().isdisjoint(names), f"{room}: a name is a module's, too"

    def get(name: str) -> Any:
        module = homes.get(name)
        if module is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{room}.{module}"), name)
        # Found there from now on, without asking here.
        setattr(sys.modules[room], name, value)
        return value

    return get
