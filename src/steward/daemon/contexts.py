"""Registry of all actions with their contexts, for the processes that run any action.

``ACTIONS`` holds every action by name; ``action_registry`` makes the registry of a configuration,
whose contexts are created when needed. ``append_once`` and ``tell_once`` send to the journal's
writer. A caller that needs one action uses ``daemon/registry.py``, which imports one package.
"""

from collections.abc import Sequence
from typing import Any, Final

from steward.accounting.context import AccountingRoom
from steward.admin.credentials.context import CredentialsRoom
from steward.admin.doctor.findings import DoctorRoom
from steward.admin.journal import JournalRoom
from steward.admin.status.summary import StatusRoom
from steward.archive.context import Library
from steward.automation.actions import AutomationRoom
from steward.automation.rules.actions import RulesRoom
from steward.bank.context import BankRoom, accounts_led
from steward.core.access import access_of
from steward.core.actions import Action, Registry
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import Event
from steward.core.journal import JournalLink, JournalUnavailable
from steward.core.journal.store import rows_of
from steward.core.waits import Stop
from steward.daemon.registry import every_action
from steward.jobs.queries import clusters_of
from steward.reports.context import ReportsRoom
from steward.reports.events import EventsRoom
from steward.reports.history.context import HistoryRoom

ACTIONS: Final[dict[str, Action]] = {action.name: action for action in every_action()}
"""Every action, by its name."""


def action_registry(settings: Settings) -> Registry:
    """Make the registry of all actions of a configuration; contexts are created when needed."""
    access = access_of(settings, accounts_led(settings))

    def order(new: Sequence[Event]) -> None:
        append_once(settings, new)

    def refilled(consumer: str, since_s: int) -> None:
        tell_once(settings, "refilled", consumer, since_s)

    def archive() -> Library:
        if settings.forward.to:
            raise UsageError(
                "a controller keeps no archive and has no sinks: ask the Steward that it forwards "
                f"to, {settings.forward.to}",
                settings.forward.to,
            )
        return Library(settings, access=access, order=order, refilled=refilled)

    def accounting() -> AccountingRoom:
        if settings.forward.to:
            raise UsageError(
                "a controller keeps no books: ask the Steward that it forwards to, "
                f"{settings.forward.to}",
                settings.forward.to,
            )
        return AccountingRoom(settings, access=access, order=order)

    found = Registry(
        tuple(ACTIONS.values()),
        {
            "accounting": accounting,
            "archive": archive,
            "automation": lambda: AutomationRoom(settings, access=access, registry=found),
            "bank": lambda: BankRoom(settings, access=access),
            "credentials": lambda: CredentialsRoom(settings, access=access),
            "doctor": lambda: DoctorRoom(
                settings, access=access, fresh=lambda: action_registry(settings)
            ),
            "events": lambda: EventsRoom(settings.state_dir, access),
            "rules": lambda: RulesRoom(settings, access=access),
            "status": lambda: StatusRoom(settings, access=access, registry=found),
            "history": lambda: HistoryRoom(settings, access=access),
            "reports": lambda: ReportsRoom(settings, access=access),
            "journal": lambda: JournalRoom(settings.state_dir, access, clusters_of(settings)),
        },
    )
    return found


def append_once(settings: Settings, new: Sequence[Event]) -> None:
    """Append events to the journal, or say that its writer is away: somebody waits for it.

    Raises:
        JournalUnavailable: No daemon runs on the state directory.
    """
    tell_once(settings, "append", *rows_of(new))


def tell_once(settings: Settings, verb: str, *args: Any) -> None:
    """Have the journal's writer do something, or say that it is away: somebody waits for it.

    Raises:
        JournalUnavailable: No daemon runs on the state directory.
    """
    link = JournalLink(settings.state_dir, Stop())
    try:
        link.ask(verb, *args)
    except JournalUnavailable as error:
        raise JournalUnavailable(
            f"that is recorded in the journal, which needs the daemon: start 'steward serve' "
            f"({error})",
            settings.state_dir,
        ) from error
    finally:
        link.close()
