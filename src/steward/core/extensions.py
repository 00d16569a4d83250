"""Entry points of extensions, and lazy attributes of packages.

Extensions plug into lower packages, which never import them: an extension declares an entry
point ("offer") in a group such as ``steward.sink``, and the package that uses the group looks
it up with ``list_offers`` and ``load_offer``. That package declares the group's name and the
type of an offer.

``make_lazy_getattr`` makes a package's ``__getattr__``, which imports a module at first use.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steward.core.errors import StewardError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def list_offers(group: str) -> dict[str, "EntryPoint"]:
    """Return the entry points of a group by name, sorted, from all installed packages.

    Args:
        group: Name of the group, such as ``steward.sink``.

    Raises:
        StewardError: Two packages offer different objects under one name.
    """
    from importlib.metadata import entry_points

    offers: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group)):
        earlier = offers.setdefault(entry.name, entry)
        if earlier.value != entry.value:
            sources = f"{earlier.value} and {entry.value} both provide {entry.name!r}"
            raise StewardError(f"{group}: {sources}: uninstall one of the two packages", entry.name)
    return offers


def load_offer(group: str, name: str) -> Any:
    """Import the object of an entry point.

    Args:
        group: Name of the group.
        name: Name of the entry point.

    Raises:
        StewardError: No installed package offers this name, or its import fails.
    """
    offers = list_offers(group)
    if name not in offers:
        names = ", ".join(offers) or "none"
        raise StewardError(
            f"{group}: no installed package provides {name!r}; installed: {names}", name
        )
    try:
        return offers[name].load()
    except Exception as error:
        # An installed package may raise anything.
        raise StewardError(
            f"cannot import {name} ({offers[name].value}) of {group}: {error}. Reinstall the "
            "package that provides it",
            name,
        ) from error


def make_lazy_getattr(package: str, **names: tuple[str, ...]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` that imports exported names at first use, see PEP 562.

    Args:
        package: The package's name.
        names: For each module of the package, the names that the package exports.
    """
    module_of = {name: module for module, exported in names.items() for name in exported}
    # Importing a module sets it as an attribute of its package, which would hide such a name.
    assert module_of.keys().isdisjoint(names), f"{package}: a name is a module's, too"

    def get(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{module}"), name)
        # Set on the package, so that __getattr__ is not called for this name again.
        setattr(sys.modules[package], name, value)
        return value

    return get
