"""How executions end: in the history, and as events, each exactly once."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, cast

from steward.automation.rules.store import Store
from steward.automation.rules.tables import Execution
from steward.core.consumers import Append
from steward.core.events import RULE_EXECUTION, Event
from steward.core.sqlite import transaction
from steward.core.state_facts import RuleExecution
from steward.jobs.outbox import Outbox

SOURCE: Final = "rules"


class Telling:
    """Records ends together with the events that tell of them, and sends those.

    Args:
        store: The history.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._outbox = Outbox(store.connection, store.path)
        self._untold: list[Event] = []

    def put(self, ended: Iterable[Execution]) -> list[Event]:
        """Have executions told that ended, within a transaction; what is to be sent after it."""
        events = [_event_of(one) for one in ended]
        if events:
            self._outbox.put(events)
        return events

    def end(
        self,
        one: Execution,
        status: str,
        now: datetime,
        *,
        message: str = "",
        result: Any = None,
        audit: int = 0,
    ) -> None:
        """Record how an execution ended, and have it told."""
        with transaction(self._store.connection, self._store.path):
            ended = self._store.end(one, status, now, message=message, result=result, audit=audit)
            self._outbox.put([_event_of(ended)])
        self._untold.append(_event_of(ended))

    def send(self, append: Append, upto: int | None = None, events: Sequence[Event] = ()) -> None:
        """Tell what there is, then move the cursor.

        Args:
            append: Appends to the journal.
            upto: Where the cursor is to be; None to leave it.
            events: What was put, once that is committed.

        Raises:
            Unavailable: The journal is away.
        """
        # What could not be sent stays in the outbox, which sends it with the next.
        untold, self._untold = [*self._untold, *events], []
        self._outbox.send(append, upto, untold)


def _event_of(one: Execution) -> Event:
    at = one.ended or one.made
    return Event(
        kind=RULE_EXECUTION,
        cluster=one.cluster,
        key=f"{RULE_EXECUTION}:{one.rule}:{one.event}",
        at=at,
        seen_at=at,
        source=SOURCE,
        body=RuleExecution(
            execution=one.id,
            rule=one.rule,
            event=one.event,
            action=one.action,
            status=cast("Any", one.status),
            parameters=one.parameters,
            message=one.message,
        ),
    )
