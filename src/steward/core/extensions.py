"""Extensions: entry points that packages above offer to packages below, which never import them.

An offer is an entry point of an installed distribution. The package that uses the offers of a group
declares the group's name and the type of an offer.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steward.core.errors import StewardError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offers_of(group: str) -> dict[str, "EntryPoint"]:
    """Return the entry points of a group by name, sorted, from all installed packages.

    Args:
        group: Name of the group, such as ``steward.sink``.

    Raises:
        StewardError: Two packages offer different objects under one name.
    """
    from importlib.metadata import entry_points

    offers: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group)):
        other = offers.setdefault(entry.name, entry)
        if other.value != entry.value:
            told = f"both {other.value} and {entry.value}: uninstall the package of one"
            raise StewardError(f"{group}: {entry.name!r} is offered as {told}", entry.name)
    return offers


def load_offer(group: str, name: str) -> Any:
    """Import the object that an entry point offers.

    Args:
        group: Name of the group.
        name: Name of the entry point.

    Raises:
        StewardError: No installed package offers this name, or its import fails.
    """
    offers = offers_of(group)
    if name not in offers:
        names = ", ".join(offers) or "none"
        raise StewardError(f"{group}: no installed package offers {name!r}; known: {names}", name)
    try:
        return offers[name].load()
    except Exception as error:
        # Whatever an installed package does wrong, the error names it.
        raise StewardError(f"{group}: {offers[name].value} cannot be imported: {error}") from error


def lazy_exports(room: str, **names: tuple[str, ...]) -> Callable[[str], Any]:
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
