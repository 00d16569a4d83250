"""Registry of all actions with their contexts, for the processes that run any action.

``make_registry`` makes the registry of a configuration. It imports the module of an action, and
makes the context of its package, when they are first needed. The daemon's socket and the command
line of root and Steward's user run actions through it, so access is decided in one way.
``append_once`` sends events to the journal's writer. ``daemon/registry.py`` finds an action without
its context.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from steward.core.access import make_access
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import Event
from steward.core.journal import JournalLink, JournalUnavailable
from steward.core.journal.control import ClearMissed, send_command
from steward.core.journal.store import encode_rows
from steward.core.waits import Stop
from steward.daemon.registry import ACTIONS


def make_registry(settings: Settings) -> Registry:
    """Make the registry of all actions of a configuration."""
    return _Contexts(settings).registry


class _Contexts:
    """Makers of contexts, by package; each imports its package when called."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._access = make_access(
            settings, self._read_led_accounts if settings.bank.enabled else None
        )
        makers = (
            *(self.accounting, self.archive, self.automation, self.bank, self.credentials),
            *(self.doctor, self.events, self.history, self.journal, self.reports, self.rules),
            self.status,
        )
        self.registry = Registry((), {make.__name__: make for make in makers}, declared=ACTIONS)

    def accounting(self) -> Any:
        from steward.accounting.context import AccountingContext

        self._reject_on_controller("job records")
        return AccountingContext(self._settings, access=self._access, append=self._append)

    def archive(self) -> Any:
        from steward.archive.context import ArchiveContext

        self._reject_on_controller("archive and no sinks")
        return ArchiveContext(
            self._settings,
            access=self._access,
            append=self._append,
            mark_refilled=self._record_refill,
        )

    def automation(self) -> Any:
        from steward.automation.actions import AutomationContext

        return AutomationContext(self._settings, access=self._access, registry=self.registry)

    def bank(self) -> Any:
        from steward.bank.context import BankContext

        return BankContext(self._settings, access=self._access)

    def credentials(self) -> Any:
        from steward.admin.credentials.sessions import CredentialsContext

        return CredentialsContext(self._settings, access=self._access)

    def doctor(self) -> Any:
        from steward.admin.doctor.findings import DoctorContext

        return DoctorContext(
            self._settings,
            access=self._access,
            make_registry=lambda: make_registry(self._settings),
        )

    def events(self) -> Any:
        from steward.reports.events import EventsContext

        return EventsContext(self._settings, self._access)

    def history(self) -> Any:
        from steward.reports.history.context import HistoryContext

        return HistoryContext(self._settings, access=self._access)

    def journal(self) -> Any:
        from steward.admin.journal import JournalContext
        from steward.jobs.queries import list_clusters

        state_dir = self._settings.state_dir
        return JournalContext(state_dir, self._access, list_clusters(self._settings))

    def reports(self) -> Any:
        from steward.reports.context import ReportsContext

        return ReportsContext(self._settings, access=self._access)

    def rules(self) -> Any:
        from steward.automation.rules.actions import RulesContext

        return RulesContext(self._settings, access=self._access)

    def status(self) -> Any:
        from steward.admin.status.summary import StatusContext

        return StatusContext(self._settings, access=self._access, registry=self.registry)

    def _read_led_accounts(self, user: str, coordinated: frozenset[str]) -> frozenset[str]:
        return self._led_accounts_reader(user, coordinated)

    @functools.cached_property
    def _led_accounts_reader(self) -> Callable[[str, frozenset[str]], frozenset[str]]:
        from steward.bank.context import make_led_accounts_reader

        return make_led_accounts_reader(self._settings)

    def _append(self, events: Sequence[Event]) -> None:
        append_once(self._settings, events)

    def _record_refill(self, consumer: str, since_s: int) -> None:
        send_command(self._settings.state_dir, ClearMissed(consumer, since_s))

    def _reject_on_controller(self, missing: str) -> None:
        receiver = self._settings.forward.to
        if receiver:
            raise UsageError(
                f"a controller has no {missing}: run the command against the Steward at {receiver}",
                receiver,
            )


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
