"""Action ``accounting.plugins``: lists accounting plugins, whether they run, and their errors."""

from datetime import UTC, datetime
from typing import ClassVar

import msgspec

from steward.accounting.context import AccountingContext
from steward.core.access import Caller
from steward.core.actions import Answer, Request, action
from steward.core.errors import PermissionRefused
from steward.core.layouts import Column, Layout
from steward.core.sqlite import SqliteMissing
from steward.extensions.jobacct_plugins.registry import (
    find_installed_plugins,
    parse_plugin_types,
    third_party_types,
)
from steward.extensions.jobacct_plugins.state import HookFailure, PluginHealth, read_health


class PluginOperatorsOnly(PermissionRefused):
    """The caller is not an operator."""


class PluginsRequest(Request, frozen=True, kw_only=True):
    """Request of accounting.plugins: list all plugins."""


class PluginInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin.

    Attributes:
        type: ``jobacct/NAME``.
        package: Name and version of its package; "" where it is not installed.
        class_name: Its class, ``module:name``.
        used: Whether the configuration names it.
        reason: Why it does not run though it is used; "" when it runs, or has not started.
        errors: Errors of its hooks, the latest first.
    """

    type: str
    package: str = ""
    class_name: str = ""
    used: bool = False
    reason: str = ""
    errors: tuple[HookFailure, ...] = ()


def _describe_use(plugin: PluginInfo, _: object) -> str:
    """Return whether a plugin is used, or was rejected."""
    if plugin.reason:
        return "rejected"
    return "yes" if plugin.used else "no"


def _describe_last_error(plugin: PluginInfo, _: object) -> str:
    """Return the last failure of a plugin, or the reason of its rejection."""
    if plugin.reason or not plugin.errors:
        return plugin.reason
    failure = plugin.errors[0]
    return f"{failure.hook}: {failure.kind}: {failure.text}"


def _read_failed_at(plugin: PluginInfo, _: object) -> datetime | None:
    """Return the time of the last failure of a plugin."""
    if plugin.reason or not plugin.errors:
        return None
    return datetime.fromtimestamp(plugin.errors[0].last_s, UTC)


class PluginsAnswer(Answer, frozen=True, kw_only=True):
    """Plugins, by type."""

    plugins: tuple[PluginInfo, ...]
    layout: ClassVar[Layout] = (
        Column("Type", "type"),
        Column("Used", _describe_use),
        Column("Package", "package"),
        Column("Class", "class_name", show="requested"),
        Column("Errors", lambda row, _: sum(failure.count for failure in row.errors), "count"),
        Column("Failed", _read_failed_at, "time", show="filled"),
        Column("LastError", _describe_last_error),
    )


@action(
    "accounting.plugins",
    scope="admin",
    role="operator",
    command="accounting plugins",
    rows="plugins",
)
def list_plugins(context: AccountingContext, asker: Caller, _: PluginsRequest) -> PluginsAnswer:
    """Show the accounting plugins with their state and last error.

    Raises:
        PluginOperatorsOnly: The caller is not an operator.
    """
    if not context.is_operator(asker):
        raise PluginOperatorsOnly(
            "permission denied: only operators may see the accounting plugins", asker
        )
    configured = context.settings.accounting.type
    used = parse_plugin_types(configured)
    third_party = third_party_types(configured)
    installed = find_installed_plugins()
    plugins = []
    for plugin_type in sorted({*installed, *used}):
        entry = installed.get(plugin_type)
        package = entry.dist if entry else None
        health = (
            _plugin_health(context, plugin_type) if plugin_type in third_party else PluginHealth()
        )
        plugins.append(
            PluginInfo(
                type=plugin_type,
                package=f"{package.name} {package.version}" if package else "",
                class_name=entry.value if entry else "",
                used=plugin_type in used,
                reason=health.refusal,
                errors=health.failures,
            )
        )
    return PluginsAnswer(plugins=tuple(plugins))


def _plugin_health(context: AccountingContext, plugin_type: str) -> PluginHealth:
    """Read a plugin's health; empty if it has not run yet."""
    try:
        return read_health(context.settings.state_dir, plugin_type)
    except SqliteMissing:
        return PluginHealth()
