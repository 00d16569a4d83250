"""Site: one Steward without processes, in a directory of the test.

Helpers of a subject are functions and constants in the harness module of that name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from harness.events import NOON
from steward.core.access import Access, Caller, ClusterRoles
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.consumers import Consumer
from steward.core.events import Event
from steward.core.script_stores import make_stores
from steward.slurm.settings import ClusterSettings

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger

ROOT = Caller(uid=0, user="root")
OWNER = Caller(uid=4000, user="olga")
ADA = Caller(uid=4001, user="ada")
BELA = Caller(uid=4002, user="bela")
COORDINATOR = Caller(uid=4003, user="carl")
NOBODY = Caller(uid=4999)

Opened = TypeVar("Opened")
Open = Callable[["Site"], Consumer]
"""Opens a consumer with a Site's settings and clock."""


class Clock:
    """Monotonic clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Site:
    """Settings, clock, journal, consumers and actions of one Steward.

    Args:
        directory: Directory of its files; the state directory is ``state`` in it.
        clusters: Names of clusters whose Slurm is never queried, or settings by name.
        sections: Other sections of the settings.

    Attributes:
        now: Wall clock; only the test moves it.
        clock: Monotonic clock; only the test moves it.
        user_names: User names by uid; None for the names of the machine.
        standing: Coordinators, administrators and PrivateData of every cluster.
        journal: All events so far.
        consumers: Open consumers by name.
    """

    def __init__(
        self,
        directory: Path,
        *,
        clusters: Iterable[str] | Mapping[str, ClusterSettings] = ("c1",),
        **sections: Any,
    ) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.state.mkdir(parents=True, exist_ok=True)
        if not isinstance(clusters, Mapping):
            clusters = {name: ClusterSettings(slurm=False, timezone="UTC") for name in clusters}
        self.settings = Settings(
            state_dir=str(self.state),
            run_dir=str(self.state),
            cluster=dict(clusters),
            **sections,
        )
        self.now = NOON
        self.clock = Clock()
        self.user_names: dict[int, str] | None = None
        self.standing = ClusterRoles()
        self.journal: list[Event] = []
        self.consumers: dict[str, Consumer] = {}
        self._opens: list[Open] = []
        self._fed: dict[str, int] = {}
        self._contexts: dict[str, Any] = {}
        self._ledger: Ledger | None = None
        self.reopen()

    def reopen(self, **sections: Any) -> None:
        """Reopen consumers as after a crash, without closing them; ``sections`` change settings."""
        self.settings = msgspec.structs.replace(self.settings, **sections)
        self.access = Access(self.settings.access, 0, lambda _cluster: self.standing)
        self.stores = make_stores(self.settings)
        self._contexts = {}
        self._registry: Registry | None = None
        for open_consumer in self._opens:
            self.add(open_consumer(self))

    def open(self, *opens: Open) -> None:
        """Open consumers, which receive the events appended from now on."""
        self._opens += opens
        for open_consumer in opens:
            self.add(open_consumer(self))

    def add(self, consumer: Consumer) -> None:
        """Feed a consumer from now on; it replaces an open consumer of the same name."""
        self.consumers[consumer.name] = consumer
        self._fed.setdefault(consumer.name, len(self.journal))

    def consumer(self, kind: type[Opened]) -> Opened:
        """Return the open consumer of a class."""
        return next(opened for opened in self.consumers.values() if isinstance(opened, kind))

    def append(self, new: Sequence[Event]) -> None:
        """Append events, each with its journal position as its id."""
        for event in new:
            self.journal.append(msgspec.structs.replace(event, id=len(self.journal) + 1))

    def refilled(self, consumer: str, since_s: int) -> None:
        """Ignore that a consumer receives missed events again."""

    def feed(self, *events: Event) -> list[Event]:
        """Append events and apply all new events, until consumers append no more.

        Returns:
            The events that consumers appended.

        Raises:
            Unavailable: A consumer raised it; the Site does not retry its events.
            Rejected: A consumer raised it; the Site does not retry its events.
        """
        self.append(events)
        begin = len(self.journal)
        while any(self._fed[name] < len(self.journal) for name in self.consumers):
            for name, consumer in self.consumers.items():
                upto = len(self.journal)
                news = self.journal[self._fed[name] : upto]
                self._fed[name] = upto
                batch = [event for event in news if event.kind in consumer.kinds]
                if batch:
                    consumer.apply(batch, upto, self.append)
        return self.journal[begin:]

    def tick(self) -> list[Event]:
        """Run the timed work of consumers; return the events that they appended."""
        begin = len(self.journal)
        for consumer in self.consumers.values():
            consumer.tick(self.append)
        return self.journal[begin:]

    @property
    def registry(self) -> Registry:
        """All actions, with this Site's contexts."""
        if self._registry is None:
            from steward.daemon.registry import import_actions

            actions = tuple(import_actions().values())
            contexts = {action.package: partial(self.context, action.package) for action in actions}
            self._registry = Registry(actions, contexts)
        return self._registry

    def context(self, name: str) -> Any:
        """Return the context of the actions of one package."""
        if name not in self._contexts:
            self._contexts[name] = self._make_context(name)
        return self._contexts[name]

    def _make_context(self, name: str) -> Any:
        common: dict[str, Any] = {"access": self.access, "now": lambda: self.now}
        match name:
            case "accounting":
                from steward.accounting.context import AccountingContext

                return AccountingContext(self.settings, append=self.append, **common)
            case "archive":
                from steward.archive.context import ArchiveContext

                return ArchiveContext(
                    self.settings, append=self.append, mark_refilled=self.refilled, **common
                )
            case "automation":
                from steward.automation.actions import AutomationContext

                return AutomationContext(self.settings, access=self.access, registry=self.registry)
            case "bank":
                from steward.bank.context import BankContext

                return BankContext(self.settings, **common)
            case "events":
                from steward.reports.events import EventsContext

                return EventsContext(self.settings, **common)
            case "history":
                from steward.reports.history.context import HistoryContext

                return HistoryContext(self.settings, **common)
            case "reports":
                from steward.reports.context import ReportsContext

                return ReportsContext(self.settings, **common)
            case _:
                raise AssertionError(f"a Site has no context called {name}")

    def ask(self, name: str, asker: Caller = ROOT, /, **request: Any) -> Any:
        """Apply all new events, then run an action and return its reply."""
        self.feed()
        return self.registry.call(name, asker, self.registry.decode(name, request))

    def stream(self, name: str, asker: Caller = ROOT, /, **request: Any) -> tuple[list[Any], Any]:
        """Run an action that streams; return its items and its reply."""
        *items, answer = self.ask(name, asker, **request)
        return items, answer

    @property
    def ledger(self) -> "Ledger":
        """The bank's ledger, with this Site's clock."""
        if self._ledger is None:
            from steward.bank.ledger import open_ledger

            self._ledger = open_ledger(self.settings, lambda: self.now)
        return self._ledger

    def close(self) -> None:
        """Close consumers, contexts and the ledger."""
        for opened in (*self.consumers.values(), *self._contexts.values(), self._ledger):
            if hasattr(opened, "close"):
                opened.close()
