"""Extensions: what packages above offer to the packages below, which do not name them.

An offer is an entry point of an installed distribution. The package that uses the offers of a group
declares the group's name and what an offer is.
"""

from typing import TYPE_CHECKING, Any

from steward.core.errors import StewardError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offers_of(group: str) -> dict[str, "EntryPoint"]:
    """Return what installed packages offer in a group, by name, sorted.

    Args:
        group: The group of entry points: ``steward.sink``.
    """
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in sorted(entry_points(group=group))}


def load_offer(group: str, name: str) -> Any:
    """Import what a package offers.

    Raises:
        StewardError: No installed package offers it, or what it names cannot be imported.
    """
    offers = offers_of(group)
    if name not in offers:
        known = ", ".join(offers) or "none"
        raise StewardError(f"{group}: no installed package offers {name!r}; known: {known}", name)
    try:
        return offers[name].load()
    except (ImportError, AttributeError) as error:
        raise StewardError(f"{group}: {offers[name].value} cannot be imported: {error}") from error
