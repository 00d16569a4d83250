"""Action ``accounting.plugins``: lists accounting plugins, whether they run, and their errors."""

from typing import Final, Literal

import msgspec

from steward.accounting.context import AccountingRoom
from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.errors import Refused
from steward.core.sqlite import SqliteUnavailable
from steward.extensions.jobacct_plugins.log.actions import DUMP, EXPIRE
from steward.extensions.jobacct_plugins.registry import known_types, third_parties, types_of
from steward.extensions.jobacct_plugins.state import Failure, Health, read_health


class OperatorsOnly(Refused):
    """Refusal: the caller is no operator."""


class PluginsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """accounting.plugins: all plugins."""


class PluginLine(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin.

    Attributes:
        type: ``jobacct/NAME``.
        package: Name and version of its package; "" where it is not installed.
        where: Its class, ``module:name``.
        used: Whether the configuration names it.
        refusal: Why it does not run though it is used; "" when it runs, or has not started.
        failures: Errors of its hooks, the latest first.
    """

    type: str
    package: str = ""
    where: str = ""
    used: bool = False
    refusal: str = ""
    failures: tuple[Failure, ...] = ()


class PluginsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Plugins, by type."""

    version: Literal[1] = 1
    plugins: tuple[PluginLine, ...]


def plugins(room: AccountingRoom, asker: Asker, _: PluginsRequest) -> PluginsAnswer:
    """List the accounting plugins; operators only."""
    if not room.is_operator(asker):
        raise OperatorsOnly("only operators may look at the plugins", asker)
    configured = room.settings.accounting.type
    used = types_of(configured)
    failing = third_parties(configured)
    known = known_types()
    lines = []
    for name in sorted({*known, *used}):
        entry = known.get(name)
        package = entry.dist if entry else None
        health = _health(room, name) if name in failing else Health()
        lines.append(
            PluginLine(
                type=name,
                package=f"{package.name} {package.version}" if package else "",
                where=entry.value if entry else "",
                used=name in used,
                refusal=health.refusal,
                failures=health.failures,
            )
        )
    return PluginsAnswer(plugins=tuple(lines))


def _health(room: AccountingRoom, plugin_type: str) -> Health:
    try:
        return read_health(room.settings.state_dir, plugin_type)
    except SqliteUnavailable:
        return Health()


PLUGINS: Final = Action(
    name="accounting.plugins",
    help="Show the accounting plugins and what went wrong in them.",
    request=PluginsRequest,
    answer=PluginsAnswer,
    run=plugins,
    role="operator",
)

ACTIONS: Final[tuple[Action, ...]] = (DUMP, EXPIRE, PLUGINS)
"""Actions that this package adds to those of accounting, for the registry."""
