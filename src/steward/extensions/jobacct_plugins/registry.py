"""Registry of accounting plugins: finds them by type among installed packages' entry points.

A plugin type is ``jobacct/NAME``; ``[accounting] type`` (JobAcctType) lists those to use.
jobacct/none and jobacct/log are built in. :func:`load_plugin_class` imports a plugin and checks its
type and API version, in the plugin's own process: an import may raise anything.
"""

from typing import TYPE_CHECKING, Final

from steward.core.extensions import list_offers
from steward.extensions.jobacct_plugins.api import API_VERSION, JobAcctPlugin, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


ENTRY_POINT_GROUP: Final = "steward.jobacct"
"""Entry point group; an entry's name is what follows ``jobacct/`` in the plugin type."""

TYPE_PREFIX: Final = "jobacct/"
NONE_TYPE: Final = "jobacct/none"
LOG_TYPE: Final = "jobacct/log"
BUILT_IN_TYPES: Final = (NONE_TYPE, LOG_TYPE)
"""Types without a plugin process: one does nothing, the other is a consumer of its own."""


def parse_plugin_types(text: str) -> tuple[str, ...]:
    """Parse JobAcctType into plugin types, without duplicates, in their order."""
    return tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))


def third_party_types(text: str) -> tuple[str, ...]:
    """Return the configured types that run in a plugin process."""
    return tuple(
        plugin_type for plugin_type in parse_plugin_types(text) if plugin_type not in BUILT_IN_TYPES
    )


def find_installed_plugins() -> dict[str, "EntryPoint"]:
    """Return the plugins of installed packages, by type, sorted."""
    return {f"{TYPE_PREFIX}{name}": entry for name, entry in list_offers(ENTRY_POINT_GROUP).items()}


def find_entry_point(plugin_type: str) -> "EntryPoint":
    """Return the entry point of a plugin type.

    Raises:
        PluginError: No installed package offers it.
    """
    installed = find_installed_plugins()
    if plugin_type not in installed:
        raise PluginError(
            f"no installed package provides {plugin_type!r}: use one of {', '.join(installed)}",
            plugin_type,
        )
    return installed[plugin_type]


def load_plugin_class(plugin_type: str) -> type[JobAcctPlugin]:
    """Import the plugin class of a type.

    Raises:
        PluginError: No installed package offers it, or its object is no such plugin.
    """
    entry = find_entry_point(plugin_type)
    try:
        plugin_class = entry.load()
    except BaseException as error:
        # An import may raise anything; the error must affect this plugin alone.
        raise PluginError(
            f"cannot import {plugin_type} ({entry.value}): {type(error).__name__}: {error}",
            plugin_type,
        ) from error
    if not (isinstance(plugin_class, type) and issubclass(plugin_class, JobAcctPlugin)):
        raise PluginError(f"{entry.value} is not a subclass of JobAcctPlugin", plugin_type)
    if plugin_class.plugin_type != plugin_type:
        raise PluginError(
            f"{entry.value} declares plugin_type {plugin_class.plugin_type!r}, but is "
            f"registered as {plugin_type!r}: make both equal",
            plugin_type,
        )
    if plugin_class.api_version != API_VERSION:
        raise PluginError(
            f"{plugin_type} requires version {plugin_class.api_version} of the plugin API, but "
            f"Steward has version {API_VERSION}: install a matching version of the plugin",
            plugin_type,
        )
    return plugin_class
