"""What a process that answers pages would import at its first question, imported before it starts.

The process that accepts connections forks one for each; what it has imported, they all
have. Only where there are pages is that worth its memory: command lines wait a little.
"""

import importlib
from collections.abc import Iterator

from steward.automation.catalogue import operations
from steward.core.config import Settings


def preload(settings: Settings) -> None:
    """Import what the pages' questions need."""
    for name in _needed(settings):
        importlib.import_module(name)
    operations()


def _needed(settings: Settings) -> Iterator[str]:
    yield "ClusterShell.NodeSet"
    yield "steward.automation.rules.book"
    yield "steward.automation.rules.rendering"
    yield "jinja2.async_utils"
    yield "steward.reports.history.reading"
    yield "steward.accounting.page.gathering"
    if settings.bank.enabled:
        yield "steward.bank.ledger.opened"
        yield "sqlalchemy.dialects.sqlite"
        yield "steward.bank.reconciling"
