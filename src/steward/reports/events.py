"""Event listing: the action ``events.list`` reads the journal and filters by permission.

Node, partition and reservation states follow PrivateData, as Slurm's own commands do. States of
daemons are public. Users see events of jobs whose records they may see, and coordinators and owners
those of their accounts; operators see all. Events that the journal has trimmed are gone;
``history.events`` keeps states longer.

:class:`EventsContext` is the context and decides visibility; :class:`EventItem` is an event in a
reply, used by ``history.events`` too.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final

import msgspec

from steward.core.access import Access, Caller
from steward.core.actions import Answer, HostZone, Request, action, described, option
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import (
    BANK_THRESHOLD,
    BODIES,
    CONTROLLER_STATE,
    JOB_END,
    JOB_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    RULE_EXECUTION,
    BankThreshold,
    Event,
    JobFacts,
    NodeState,
    utc_now,
)
from steward.core.journal.reader import JournalReader
from steward.core.layouts import Layout
from steward.jobs.queries import check_clusters, list_clusters
from steward.reports.event_texts import EVENT_LAYOUT
from steward.slurm.nodelists import expand_nodelist
from steward.slurm.times import load_zone, parse_time

DEFAULT_KINDS: Final = (
    *(NODE_STATE, PARTITION_STATE, RESERVATION_STATE, CONTROLLER_STATE),
    *(BANK_THRESHOLD, RULE_EXECUTION),
)
"""Kinds of events that are listed if a request names none."""

MAX_EVENTS: Final = 10_000
"""Maximum number of events in a reply."""
_READ_BATCH: Final = 500
PRIVATE_DATA_WORDS: Final = {
    NODE_STATE: "nodes",
    PARTITION_STATE: "partitions",
    RESERVATION_STATE: "reservations",
}
"""PrivateData keyword that hides a kind of event, by kind."""
_PUBLIC_KINDS: Final = frozenset({CONTROLLER_STATE})


class EventsContext:
    """Context of the event actions.

    Args:
        settings: The whole configuration.
        access: Checks permissions.
        now: Returns the current time.
    """

    def __init__(
        self, settings: Settings, access: Access, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.settings = settings
        self._access = access
        self.now = now

    def open_reader(self) -> JournalReader:
        """Open the journal for reading."""
        return JournalReader(self.settings.state_dir)

    def can_see(self, asker: Caller, event: Event) -> bool:
        """Return whether the user may see an event."""
        keyword = PRIVATE_DATA_WORDS.get(event.kind)
        if keyword is not None:
            return self._access.can_see_all(asker, event.cluster, keyword)
        if event.kind in _PUBLIC_KINDS or self._access.is_operator(asker, event.cluster):
            return True
        if isinstance(event.body, JobFacts):
            record = event.body.record
            return self._access.can_see_job(asker, event.cluster, record.uid, record.account)
        if isinstance(event.body, BankThreshold):
            return event.body.account in self._access.list_led(asker, event.cluster)
        return False


class EventFilter(Request, frozen=True, kw_only=True):
    """Common fields of requests for events."""

    kinds: Annotated[
        tuple[str, ...],
        option(
            "Only events of these kinds.",
            *("--kind", "-k"),
            default="states, thresholds and rule executions",
            metavar="KIND,…",
        ),
    ] = ()
    clusters: Annotated[
        tuple[str, ...],
        option("Only events of these clusters.", "--clusters", "-M", metavar="NAME,…"),
    ] = ()
    nodes: Annotated[
        str, option("Only state changes of these nodes.", "--nodelist", "-w", metavar="NODES")
    ] = ""
    failed: Annotated[bool, option("Only state changes in which a node failed.", "--failed")] = (
        False
    )
    since: Annotated[
        str,
        option(
            "Start of the period: now-1day, 2026-11-21T08:00.",
            *("--starttime", "--since", "-S"),
            metavar="TIME",
        ),
    ] = ""
    until: Annotated[
        str,
        option(
            "End of the period, exclusive.",
            "--endtime",
            "--until",
            "-E",
            default="now",
            metavar="TIME",
        ),
    ] = ""
    limit: Annotated[
        int,
        option(
            "Maximum number of events, the newest.",
            "--limit",
            "-L",
            ge=1,
            le=MAX_EVENTS,
        ),
    ] = 50


class EventsRequest(EventFilter, frozen=True, kw_only=True):
    """Request of ``events.list``: journal events, filtered."""

    zone: HostZone = ""
    after: Annotated[
        int | None,
        described(
            "Only events after this journal position, oldest first.",
            default="the newest events",
        ),
    ] = None


class EventItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event in a reply; the fields are those of :class:`steward.core.events.Event`."""

    id: int
    kind: str
    cluster: str
    key: str
    at: datetime
    seen_at: datetime
    source: str
    body: Any


def make_event_item(event: Event) -> EventItem:
    """Convert a journal event to its form in a reply."""
    return msgspec.convert(event, EventItem, from_attributes=True)


class EventsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``events.list``: events, oldest first.

    Attributes:
        events: The events.
        position: Journal position to continue from: pass it as ``after``.
    """

    events: tuple[EventItem, ...]
    position: int
    layout: ClassVar[Layout] = EVENT_LAYOUT

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No event matches. The journal keeps only recent events; see --history."


@action("events.list", scope="read", only_reads=True)
def _list_journal_events(
    context: EventsContext, asker: Caller, request: EventsRequest
) -> EventsReply:
    """List events of the journal, newest last.

    Raises:
        UsageError: A kind, a node list or a time is invalid.
    """
    unknown = set(request.kinds) - set(BODIES)
    if unknown:
        kinds = ", ".join((*DEFAULT_KINDS, JOB_STATE, JOB_END))
        raise UsageError(f"unknown kind {min(unknown)!r}: use for example {kinds}")
    matches = _make_event_filter(context, asker, request)
    reader = context.open_reader()
    try:
        head = reader.head()
        if request.after is None:
            matching, position = _read_newest_events(reader, request, matches, head), head
        else:
            matching, position = _read_events_after(reader, request, matches, head)
    finally:
        reader.close()
    if not matching and request.after is None:
        # The journal may have events of clusters that are no longer configured and have no jobs.
        check_clusters(request.clusters, list_clusters(context.settings))
    return EventsReply(events=tuple(map(make_event_item, matching)), position=position)


def _make_event_filter(
    context: EventsContext, asker: Caller, request: EventsRequest
) -> Callable[[Event], bool]:
    """Make a filter for the events of a request that the user may see."""
    zone, now = load_zone(request.zone), context.now()
    since = parse_time(request.since, now, zone) if request.since else None
    until = parse_time(request.until, now, zone) if request.until else None
    nodes = frozenset(expand_nodelist(request.nodes)) if request.nodes else None

    def is_chosen(event: Event) -> bool:
        body = event.body
        if request.clusters and event.cluster not in request.clusters:
            return False
        if (since is not None and event.at < since) or (until is not None and event.at >= until):
            return False
        if nodes is not None and not (isinstance(body, NodeState) and body.node in nodes):
            return False
        if request.failed and not (isinstance(body, NodeState) and body.failed):
            return False
        return isinstance(body, BODIES.get(event.kind, NodeState)) and context.can_see(asker, event)

    return is_chosen


def _get_requested_kinds(request: EventsRequest) -> Iterable[str]:
    return frozenset(request.kinds or DEFAULT_KINDS)


def _read_events_after(
    reader: JournalReader,
    request: EventsRequest,
    matches: Callable[[Event], bool],
    head: int,
) -> tuple[list[Event], int]:
    """Return the first matching events after a position, and the position to continue from."""
    # A position beyond the head is from an older journal: read the new journal from its start.
    position = request.after if request.after is not None and request.after <= head else 0
    matching: list[Event] = []
    while position < head and len(matching) < request.limit:
        events, upto = reader.read(position, _get_requested_kinds(request), _READ_BATCH)
        for event in events:
            if matches(event):
                matching.append(event)
                if len(matching) == request.limit:
                    return matching, event.id
        position = max(position, upto)
    return matching, position


def _read_newest_events(
    reader: JournalReader,
    request: EventsRequest,
    matches: Callable[[Event], bool],
    head: int,
) -> list[Event]:
    """Return the last matching events, reading backwards in steps that double in size."""
    oldest, span = reader.get_oldest(), _READ_BATCH
    matching: list[Event] = []
    end = head
    while end >= oldest > 0 and len(matching) < request.limit:
        begin = max(oldest - 1, end - span)
        matching = _read_events_between(reader, request, matches, begin, end) + matching
        end, span = begin, span * 2
        if end < oldest:
            break
    return matching[-request.limit :]


def _read_events_between(
    reader: JournalReader,
    request: EventsRequest,
    matches: Callable[[Event], bool],
    after: int,
    upto: int,
) -> list[Event]:
    """Return the matching events between two positions."""
    matching: list[Event] = []
    while after < upto:
        events, next_position = reader.read(after, _get_requested_kinds(request), _READ_BATCH)
        matching += [event for event in events if event.id <= upto and matches(event)]
        if next_position <= after:
            break
        after = next_position
    return matching
