"""Consumer ``rules``: matches journal events against the rules and runs their actions.

:class:`RulesConsumer` decides in ``apply`` (:mod:`steward.automation.rules.decisions`) and runs
executions in ``tick`` (:mod:`steward.automation.rules.execution`). Decisions and the journal cursor
are one transaction of rules.db, so each rule decides once on each event, however often the process
is killed. Changed rule files are reloaded within 2 seconds; old history is removed once an hour.
"""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from steward.automation.rules import rulebook
from steward.automation.rules.decisions import RuleDecider
from steward.automation.rules.execution import (
    ExecutionScheduler,
    MakePerformer,
    make_end_event,
)
from steward.automation.rules.model import Rule
from steward.automation.rules.rulebook import FilesSignature, Rulebook
from steward.automation.rules.store import Execution, RulesStore
from steward.automation.rules.triggers import (
    FAILURE_WINDOWS,
    TRIGGER_KINDS,
    TRIGGER_TYPE_BY_KIND,
    make_trigger,
)
from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer
from steward.core.events import NODE_STATE, Event, utc_now

log = logging.getLogger(__name__)

_RELOAD_INTERVAL_S: Final = 2.0
"""Interval of checks for changed rule files, in seconds."""
_MAX_WINDOW_S: Final = max(seconds for _, seconds in FAILURE_WINDOWS)
"""Retention of node failures, in seconds."""


class RulesConsumer(DatabaseConsumer):
    """Journal consumer that runs the rules; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        make_performer: Creates the object that runs actions, one per thread.
        clock: Returns the current time.
        store: Database of the rules. If None, the consumer opens it in the state directory.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
    """

    name = "rules"
    kinds = TRIGGER_KINDS
    batch_events = 200
    has_outbox = True

    def __init__(
        self,
        settings: Settings,
        make_performer: MakePerformer,
        clock: Callable[[], datetime] = utc_now,
        *,
        store: RulesStore | None = None,
    ) -> None:
        self._settings = settings.rules
        self._retention = timedelta(days=settings.history_days)
        self._clock = clock
        self._store = store or RulesStore(settings.state_dir)
        super().__init__(self._store.database)
        self._first_run = self._store.record_first_run(clock())
        self._decider = RuleDecider(self._store, dry_run=settings.rules.mode == "dry-run")
        self._scheduler = ExecutionScheduler(
            *(self._store, self._open_transaction, settings.rules, settings.actions.timeout_s),
            *(make_performer, clock),
        )
        self._rulebook = Rulebook(rules={})
        self._signature: FilesSignature | None = None
        self._reload_at = 0.0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Decide on events and move the cursor to ``upto``, in one transaction.

        Raises:
            Unavailable: The database or the journal is unavailable.
        """
        # Before the transaction, which must not wait for slow files.
        self._reload_if_due()
        super().apply(events, upto, append)

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Decide on events; return events about executions that have ended already."""
        rules = list(select_enabled_rules(self._rulebook, self._store).values())
        self._store.insert_failures(
            [event for event in events if event.kind == NODE_STATE and event.body.failed]
        )
        executions = self._decide(events, rules)
        return [make_end_event(one) for one in executions if one.phase == "ended"]

    def _decide(self, events: Sequence[Event], rules: list[Rule]) -> list[Execution]:
        """Decide on events and return the executions created.

        Events observed before rules first ran here are skipped.
        """
        trigger_types = {rule.trigger for rule in rules}
        if not trigger_types:
            return []
        executions = []
        for event in events:
            if (
                event.seen_at < self._first_run
                or TRIGGER_TYPE_BY_KIND[event.kind] not in trigger_types
            ):
                continue
            trigger = make_trigger(event, self._store.count_failures)
            if trigger is not None:
                executions += self._decider.decide(event, trigger, rules, self._clock())
        return executions

    def tick(self, append: Append) -> float:
        """Process results of running actions and start those that are due; return seconds to wait.

        Raises:
            Unavailable: The database or the journal is unavailable.
        """
        self._reload_if_due()
        wait_s = self._scheduler.advance(select_enabled_rules(self._rulebook, self._store))
        return min(wait_s, super().tick(append))

    def close(self) -> None:
        """Wait up to 2.5 seconds for running actions, then close the database."""
        self._scheduler.close()
        super().close()

    def _reload_if_due(self) -> None:
        """Reload the rules if their files have changed, and log their errors."""
        now = time.monotonic()
        if now < self._reload_at:
            return
        self._reload_at = now + _RELOAD_INTERVAL_S
        signature = rulebook.compute_signature(self._settings)
        if signature == self._signature:
            return
        self._signature = signature
        self._rulebook = rulebook.load_rulebook(self._settings)
        for error in self._rulebook.troubles:
            log.error("%s", error.what)
        enabled_rules = select_enabled_rules(self._rulebook, self._store)
        log.info("%d rules loaded, %d enabled", len(self._rulebook.rules), len(enabled_rules))

    def _purge(self) -> bool:
        """Remove old history and node failures."""
        now = self._clock()
        return self._store.delete_old(
            now - self._retention,
            now - timedelta(seconds=_MAX_WINDOW_S),
        )


def select_enabled_rules(rulebook: Rulebook, store: RulesStore) -> dict[str, Rule]:
    """Return the enabled rules: switches of administrators override the files."""
    switches = store.read_switches()
    return {
        name: rule
        for name, rule in rulebook.rules.items()
        if (switches[name].enabled if name in switches else rule.enabled)
    }
