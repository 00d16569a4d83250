"""Journal actions: status, list of events, dead letters, retry, and forgetting a consumer.

The journal holds events of all clusters, so only operators on every cluster may use them.
``status``, ``list`` and ``dead`` read the file (``JournalReader``); ``retry`` and ``forget`` send
a command to the journal's writer, so they need the running daemon.
"""

import difflib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, ClassVar

import msgspec

from steward.core.access import Access, Caller
from steward.core.actions import Answer, Request, action, argument, option
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import BODIES, Event
from steward.core.journal import refill_command
from steward.core.journal.control import (
    ForgetConsumer,
    JournalCommand,
    RetryDeadLetters,
    send_command,
)
from steward.core.journal.reader import ConsumerStatus, DeadLetter, JournalReader
from steward.core.layouts import Column, Layout
from steward.reports.events import MAX_EVENTS, EventItem, make_event_item

_READ_AT_ONCE = 1_000
"""Least events that one query reads, of which a filter by cluster may leave few."""


class JournalContext:
    """Context of the journal actions.

    Args:
        state_dir: Directory of the journal.
        access: Access decisions.
        clusters: Names of all clusters that may have events in it; at least one.
    """

    def __init__(self, state_dir: str, access: Access, clusters: Iterable[str]) -> None:
        self._state_dir = state_dir
        self._access = access
        self._clusters = tuple(clusters)

    def require_operator(self, caller: Caller) -> None:
        """Require an operator.

        Raises:
            PermissionRefused: The asker is not an operator on every cluster.
        """
        if not all(self._access.is_operator(caller, cluster) for cluster in self._clusters):
            raise PermissionRefused(
                "permission denied: the journal concerns jobs of all users, so only "
                "operators may read it"
            )

    def open_reader(self) -> JournalReader:
        """Open the journal for reading."""
        return JournalReader(self._state_dir)

    def find_consumer(self, caller: Caller, name: str) -> str:
        """Find the consumer that an operator names.

        Raises:
            PermissionRefused: As :meth:`require_operator`.
            UsageError: There is no such consumer.
        """
        self.require_operator(caller)
        reader = self.open_reader()
        try:
            return _find_consumer(reader, name)
        finally:
            reader.close()

    def send_command(self, command: JournalCommand) -> int:
        """Send the journal's writer a command and return its answer."""
        return send_command(self._state_dir, command)


def _to_moment(at_s: int) -> datetime | None:
    """Return the time of a second since 1970; None for 0."""
    return datetime.fromtimestamp(at_s, UTC) if at_s else None


def _describe_consumer(consumer: ConsumerStatus) -> str:
    """Describe a consumer: events missed while detached, with the command to refill."""
    if not consumer.missed:
        return consumer.detail
    command = refill_command(consumer.name, consumer.missed_from)
    events = "1 event" if consumer.missed == 1 else f"{consumer.missed} events"
    return f"missed {events} while detached: {command}; {consumer.detail}"


ConsumerName = Annotated[
    str,
    argument("Name of a consumer, as 'steward journal status' shows it, or of a sink.", "CONSUMER"),
]


EventPosition = Annotated[int, argument("Position of one event.", "ID", default="all", ge=1)]


class StatusRequest(Request, frozen=True, kw_only=True):
    """journal.status: status of the journal and its consumers."""


class StatusAnswer(Answer, frozen=True, kw_only=True):
    """Status of the journal and its consumers.

    Attributes:
        head: Position of the last event.
        oldest: Position of the oldest event not yet trimmed.
        events: Number of stored events.
        consumers: Status of each consumer.
    """

    head: int
    oldest: int
    events: int
    consumers: tuple[ConsumerStatus, ...] = ()
    layout: ClassVar[Layout] = (
        Column("Consumer", "name"),
        Column("Position", "position", "count", show="requested"),
        Column("Lag", "lag", "count"),
        Column("DeadLetters", "dead_letters", "count"),
        Column("State", lambda row, _: "detached" if row.detached else row.state),
        Column("Since", lambda row, _: _to_moment(row.since), "time"),
        Column("Detail", lambda row, _: _describe_consumer(row)),
        Column("Rate", lambda row, _: f"{row.rate:.1f}", show="requested", right=True),
        Column("LastError", "error", show="requested"),
        Column("ErrorAt", lambda row, _: _to_moment(row.error_at), "time", show="requested"),
    )


class ListRequest(Request, frozen=True, kw_only=True):
    """journal.list: list events."""

    kinds: Annotated[
        tuple[str, ...], option("Only events of these kinds.", "--kind", "-k", metavar="KIND,…")
    ] = ()
    clusters: Annotated[
        tuple[str, ...],
        option("Only events of these clusters.", "--clusters", "-M", metavar="NAME,…"),
    ] = ()
    after: Annotated[
        int,
        option(
            "Only events after this position, oldest first.",
            "--after",
            metavar="ID",
            default="the newest events",
            ge=0,
        ),
    ] = 0
    limit: Annotated[
        int, option("Maximum number of events.", "--limit", "-L", ge=1, le=MAX_EVENTS)
    ] = 50


class ListAnswer(Answer, frozen=True, kw_only=True):
    """Events, oldest first."""

    events: tuple[EventItem, ...]
    layout: ClassVar[Layout] = (
        Column("ID", "id", "count"),
        Column("Seen", "seen_at", "time"),
        Column("Kind", "kind"),
        Column("Cluster", "cluster"),
        Column("Source", "source"),
        Column("Key", "key"),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No event in the journal matches. The journal keeps only recent events."


class DeadRequest(Request, frozen=True, kw_only=True):
    """journal.dead: dead letters of one consumer, or of all."""

    consumer: Annotated[
        str, argument("Only dead letters of this consumer or sink.", "CONSUMER", default="all")
    ] = ""


class DeadLine(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: an event that a consumer rejected.

    Attributes:
        consumer: Name of the consumer.
        id: Position of the event.
        kind: Kind of the event.
        cluster: Cluster of the event.
        key: Key of the event.
        error: Last error.
        since: Time of the rejection.
        retry: Whether a retry is pending.
    """

    consumer: str
    id: int
    kind: str
    cluster: str
    key: str
    error: str
    since: datetime
    retry: bool


class DeadAnswer(Answer, frozen=True, kw_only=True):
    """Dead letters."""

    letters: tuple[DeadLine, ...]
    layout: ClassVar[Layout] = (
        Column("Consumer", "consumer"),
        Column("ID", "id", "count"),
        Column("Kind", "kind"),
        Column("Cluster", "cluster", show="pages"),
        Column("Key", "key", "prose"),
        Column("Since", "since", "time"),
        Column("Error", "error", "prose"),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No dead letters."

    def list_notes(self) -> Iterable[str]:
        """Return how to retry the dead letters."""
        return ("'steward journal retry CONSUMER' retries them.",) if self.letters else ()


class RetryRequest(Request, frozen=True, kw_only=True):
    """journal.retry: retry a consumer's dead letters."""

    consumer: ConsumerName
    id: EventPosition | None = None


class RetryAnswer(Answer, frozen=True, kw_only=True):
    """Number of dead letters that will be retried."""

    events: int

    def list_lines(self) -> Iterable[str]:
        """Return how many will be retried."""
        return (f"Steward retries {'1 event' if self.events == 1 else f'{self.events} events'}.",)


class ForgetRequest(Request, frozen=True, kw_only=True):
    """journal.forget: remove a consumer or sink with its dead letters."""

    consumer: ConsumerName


class ForgetAnswer(Answer, frozen=True, kw_only=True):
    """Name of the consumer that was removed from the journal."""

    consumer: str

    def list_notes(self) -> Iterable[str]:
        """Return that the journal no longer keeps events for the consumer."""
        return (f"The journal no longer keeps events for {self.consumer}.",)


@action(
    "journal.status",
    scope="admin",
    role="operator",
    command="journal status",
    rows="consumers",
)
def _show_status(context: JournalContext, caller: Caller, _request: StatusRequest) -> StatusAnswer:
    """Show the size of the journal, and state and lag of its consumers."""
    context.require_operator(caller)
    reader = context.open_reader()
    try:
        return StatusAnswer(
            head=reader.head(),
            oldest=reader.get_oldest(),
            events=reader.count(),
            consumers=tuple(reader.list_consumers()),
        )
    finally:
        reader.close()


@action(
    "journal.list",
    scope="admin",
    role="operator",
    command="journal list",
    rows="events",
)
def _list_events(context: JournalContext, caller: Caller, request: ListRequest) -> ListAnswer:
    """List events of the journal, newest last."""
    context.require_operator(caller)
    unknown = set(request.kinds) - set(BODIES)
    if unknown:
        kinds = ", ".join(BODIES)
        raise UsageError(f"unknown kind {min(unknown)!r}: the kinds are {kinds}")
    reader = context.open_reader()
    try:
        events = _read_events(reader, request)
    finally:
        reader.close()
    return ListAnswer(events=tuple(map(make_event_item, events)))


def _read_events(reader: JournalReader, request: ListRequest) -> list[Event]:
    """Return the first events after a position; the last events if the request names none."""
    kinds, clusters, limit = frozenset(request.kinds or BODIES), request.clusters, request.limit
    head, oldest = reader.head(), reader.get_oldest()

    def between(after: int, count: int) -> list[Event]:
        matching: list[Event] = []
        while after < head and len(matching) < count:
            events, after = reader.read(after, kinds, max(count, _READ_AT_ONCE))
            matching += [event for event in events if not clusters or event.cluster in clusters]
        return matching

    if request.after:
        return between(request.after, limit)[:limit]
    span = limit
    while True:
        matching = between(head - span, span)
        if len(matching) >= limit or head - span < oldest:
            return matching[-limit:]
        span *= 4


@action(
    "journal.dead",
    scope="admin",
    role="operator",
    command="journal dead",
    rows="letters",
)
def _list_dead_letters(context: JournalContext, caller: Caller, request: DeadRequest) -> DeadAnswer:
    """List dead letters: events that a consumer rejected, with the error."""
    context.require_operator(caller)
    reader = context.open_reader()
    try:
        consumer = _find_consumer(reader, request.consumer) if request.consumer else ""
        return DeadAnswer(letters=tuple(map(_make_dead_line, reader.list_dead_letters(consumer))))
    finally:
        reader.close()


def _find_consumer(reader: JournalReader, name: str) -> str:
    """Return the consumer of that name, or that of the sink of that name.

    Raises:
        UsageError: There is neither.
    """
    names = {status.name for status in reader.list_consumers()}
    names |= {letter.consumer for letter in reader.list_dead_letters()}
    for consumer in (name, f"archive.{name}"):
        if consumer in names:
            return consumer
    sinks = {consumer.removeprefix("archive."): consumer for consumer in sorted(names)}
    matches = difflib.get_close_matches(name, [*names, *sinks], n=1)
    hint = f"did you mean {sinks.get(matches[0], matches[0])!r}?" if matches else ""
    hint = hint or f"the consumers are {', '.join(sorted(names)) or 'none'}"
    raise UsageError(f"unknown consumer {name!r}: {hint}", name)


def _make_dead_line(letter: DeadLetter) -> DeadLine:
    fields = msgspec.structs.asdict(letter)
    fields["since"] = datetime.fromtimestamp(letter.since, UTC)
    return DeadLine(**fields)


@action(
    "journal.retry",
    scope="admin",
    role="operator",
    command="journal retry",
    writes=True,
)
def _retry_dead_letters(
    context: JournalContext, caller: Caller, request: RetryRequest
) -> RetryAnswer:
    """Retry dead letters of a consumer."""
    consumer = context.find_consumer(caller, request.consumer)
    return RetryAnswer(events=context.send_command(RetryDeadLetters(consumer, request.id)))


@action(
    "journal.forget",
    scope="admin",
    role="operator",
    command="journal forget",
    writes=True,
)
def _forget_consumer(
    context: JournalContext, caller: Caller, request: ForgetRequest
) -> ForgetAnswer:
    """Remove a consumer permanently: the journal keeps no events for it."""
    consumer = context.find_consumer(caller, request.consumer)
    context.send_command(ForgetConsumer(consumer))
    return ForgetAnswer(consumer=consumer)
