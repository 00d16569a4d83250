"""Registry of all actions with their contexts, for the processes that run any action.

``ACTIONS`` holds every action by name; ``make_registry`` makes the registry of a configuration,
whose contexts are created when needed. The daemon's socket and the command line of root and
Steward's user run actions through it, so access is decided in one way. ``append_once``
sends events to the journal's writer. A caller that needs one action uses
``daemon/registry.py``, which imports one package.
"""

from collections.abc import Sequence
from typing import Final

from steward.accounting.context import AccountingContext
from steward.admin.credentials.sessions import CredentialsContext
from steward.admin.doctor.findings import DoctorContext
from steward.admin.journal import JournalContext
from steward.admin.status.summary import StatusContext
from steward.archive.context import ArchiveContext
from steward.automation.actions import AutomationContext
from steward.automation.rules.actions import RulesContext
from steward.bank.context import BankContext, make_led_accounts_reader
from steward.core.access import make_access
from steward.core.actions import Action, Registry
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import Event
from steward.core.journal import JournalLink, JournalUnavailable
from steward.core.journal.control import ClearMissed, send_command
from steward.core.journal.store import encode_rows
from steward.core.waits import Stop
from steward.daemon.registry import import_actions
from steward.jobs.queries import list_clusters
from steward.reports.context import ReportsContext
from steward.reports.events import EventsContext
from steward.reports.history.context import HistoryContext

ACTIONS: Final[dict[str, Action]] = import_actions()
"""Every action, by its name."""


def make_registry(settings: Settings) -> Registry:
    """Make the registry of all actions of a configuration; contexts are created when needed."""
    access = make_access(settings, make_led_accounts_reader(settings))

    def order(events: Sequence[Event]) -> None:
        append_once(settings, events)

    def record_refill(consumer: str, since_s: int) -> None:
        send_command(settings.state_dir, ClearMissed(consumer, since_s))

    def archive() -> ArchiveContext:
        if settings.forward.to:
            raise UsageError(
                "a controller has no archive and no sinks: run the command against the "
                f"Steward at {settings.forward.to}",
                settings.forward.to,
            )
        return ArchiveContext(settings, access=access, append=order, mark_refilled=record_refill)

    def accounting() -> AccountingContext:
        if settings.forward.to:
            raise UsageError(
                "a controller has no job records: run the command against the Steward at "
                f"{settings.forward.to}",
                settings.forward.to,
            )
        return AccountingContext(settings, access=access, append=order)

    registry = Registry(
        tuple(ACTIONS.values()),
        {
            "accounting": accounting,
            "archive": archive,
            "automation": lambda: AutomationContext(settings, access=access, registry=registry),
            "bank": lambda: BankContext(settings, access=access),
            "credentials": lambda: CredentialsContext(settings, access=access),
            "doctor": lambda: DoctorContext(
                settings, access=access, make_registry=lambda: make_registry(settings)
            ),
            "events": lambda: EventsContext(settings, access),
            "rules": lambda: RulesContext(settings, access=access),
            "status": lambda: StatusContext(settings, access=access, registry=registry),
            "history": lambda: HistoryContext(settings, access=access),
            "reports": lambda: ReportsContext(settings, access=access),
            "journal": lambda: JournalContext(settings.state_dir, access, list_clusters(settings)),
        },
    )
    return registry


def append_once(settings: Settings, events: Sequence[Event]) -> None:
    """Append events to the journal; fail at once if its writer is down, since a caller waits.

    Raises:
        JournalUnavailable: No daemon runs on the state directory.
    """
    link = JournalLink(settings.state_dir, Stop())
    try:
        link.append_once(encode_rows(events))
    except JournalUnavailable as error:
        raise JournalUnavailable(
            "cannot record the change in the journal without the daemon: start 'steward "
            f"serve' ({error})",
            settings.state_dir,
        ) from error
    finally:
        link.close()
