"""History requests and replies: the Structs of ``history.*`` for nodes, events and jobs on nodes.

One request and one reply class for each action of ``reports.history.actions``, with the rows that
the reply holds. Times in replies are UTC.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, ClassVar

import msgspec

from steward.core.actions import Answer, Request, Zone, described, option
from steward.core.layouts import Column, Layout, TimeBound, format_count, read_user
from steward.reports.event_texts import EVENT_LAYOUT
from steward.reports.events import MAX_EVENTS, EventFilter, EventItem

_Cluster = Annotated[str, described("Cluster; all clusters if empty.")]
_NodeCluster = Annotated[str, described("Cluster of the node; the main cluster if empty.")]
_Node = Annotated[str, described("NodeName.")]


class NodesRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.nodes``: node states, now or at a past time."""

    cluster: Annotated[
        str,
        option(
            "Only nodes of this cluster.",
            "--cluster",
            "-M",
            metavar="NAME",
            default="all clusters",
        ),
    ] = ""
    nodes: Annotated[str, described("Node list; all nodes if empty.")] = ""
    partitions: Annotated[
        tuple[str, ...],
        option("Only nodes in these partitions.", "--partition", "-r", metavar="NAME,…"),
    ] = ()
    states: Annotated[
        tuple[str, ...],
        option(
            "Only nodes with one of these base states or flags: DOWN, DRAIN, IDLE.",
            *("--state", "-s"),
            metavar="STATE,…",
        ),
    ] = ()
    at: Annotated[
        str,
        option(
            "Time of the states: now-1day, 2026-11-21T08:00.", "--at", metavar="TIME", default="now"
        ),
    ] = ""
    zone: Zone = ""
    known: Annotated[
        str,
        described(
            "``tag`` of an earlier reply to the same request. If nothing has changed since, the "
            "reply omits the nodes."
        ),
    ] = ""


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a node, now or at a past time.

    Attributes:
        cluster: The cluster's name.
        node: NodeName.
        state: As Slurm shows it; see :class:`steward.core.events.NodeState`.
        since: Time since the node has this state.
        since_is_known: True if ``since`` is the time of the change, False if it is the first
            observation.
        reason: Reason; "" for none.
        reason_user: Name of the user who set the reason.
        reason_uid: Uid of that user.
        reason_at: Time at which the reason was set.
        partitions: Partitions of the node.
        cpus: Number of CPUs; 0 if unknown.
        memory_bytes: Memory for jobs; 0 if unknown.
        gpus: Number of GPUs; 0 for none or unknown.
    """

    cluster: str
    node: str
    state: str
    since: datetime
    since_is_known: bool = True
    reason: str = ""
    reason_user: str = ""
    reason_uid: int | None = None
    reason_at: datetime | None = None
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0


def _read_since(row: NodeSnapshot, _: object) -> datetime | TimeBound:
    """Return when a node got its state; if the sensor did not see it, when it first saw it."""
    return row.since if row.since_is_known else TimeBound(row.since)


def _read_reason_user(row: NodeSnapshot, _: object) -> str:
    return row.reason_user or ("" if row.reason_uid is None else str(row.reason_uid))


class NodesReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.nodes``.

    Attributes:
        nodes: By cluster and name, without nodes unknown at that time.
        at: The time of these states.
        sensor: Whether a sensor is enabled; only sensors report node states.
        begins: Begin of the history of these clusters' nodes; None if there is none.
        silent_since: Clusters whose slurmctld does not answer the sensor, with the time of its last
            answer: their nodes are shown as of then. {} for a past time.
        position: Journal position of these states: pass it to events.list as ``after`` to get later
            events.
        tag: Version tag of the present states; "" for a past time.
        is_known: True if nothing changed since ``known``; the nodes are left out.
        zone: Time zone of the request.
    """

    nodes: tuple[NodeSnapshot, ...]
    at: datetime
    sensor: bool
    begins: datetime | None = None
    silent_since: dict[str, datetime] = msgspec.field(default_factory=dict)
    position: int = 0
    tag: str = ""
    is_known: bool = False
    zone: str = ""
    layout: ClassVar[Layout] = (
        Column("Cluster", "cluster", show="several"),
        Column("Node", "node", link="node"),
        Column("State", "state", "node_state"),
        Column("Since", _read_since, "time", exact="since"),
        Column("Reason", "reason", max_width=40),
        Column("SetBy", _read_reason_user, title="Set by"),
        Column("ReasonTime", "reason_at", "time", title="Reason set", show="pages"),
        Column("Partitions", "partitions", max_width=30),
        Column("CPUs", lambda row, _: row.cpus or None, "count"),
        Column("Memory", lambda row, _: row.memory_bytes or None, "bytes"),
        Column("GPUs", lambda row, _: row.gpus or None, "count"),
    )

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Time of the states."""
        return self.at, self.at

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        if self.begins is None or self.begins > self.at:
            return "No nodes: the sensor had recorded none by then."
        return "No nodes match the options."


class NodeCountsRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.node_counts``: number of nodes by state."""

    cluster: _Cluster = ""


class NodeCount(msgspec.Struct, frozen=True, kw_only=True):
    """Number of nodes of a cluster in one state."""

    cluster: str
    state: str
    nodes: int


class NodeCountsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.node_counts``, for clusters whose nodes the user may see.

    Attributes:
        counts: Counts by cluster and state.
        silent_since: As in :class:`NodesReply`.
    """

    counts: tuple[NodeCount, ...]
    silent_since: dict[str, datetime] = msgspec.field(default_factory=dict)


class HistoryEventsRequest(EventFilter, frozen=True, kw_only=True):
    """Request of ``history.events``: state events, newest first."""

    zone: Zone = ""
    before: Annotated[
        str, described("Cursor: only events before it. Value of ``older`` in an earlier reply.")
    ] = ""
    after: Annotated[
        str, described("Cursor: only events after it. Value of ``newer`` in an earlier reply.")
    ] = ""


class HistoryEventsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.events``, newest first.

    Attributes:
        events: The events; ``id`` is a number of the history, not a journal position.
        older: Pass it as ``before`` to get older events; "" if there are none.
        newer: Pass it as ``after`` to get newer events.
        sensor: Whether a sensor is enabled; only sensors report node states.
        begins: Time of the oldest stored event; None if there is none.
        position: Journal position of this reply: pass it to events.list as ``after`` to get later
            events.
    """

    events: tuple[EventItem, ...]
    older: str = ""
    newer: str = ""
    sensor: bool = False
    begins: datetime | None = None
    position: int = 0
    layout: ClassVar[Layout] = EVENT_LAYOUT

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        if self.begins is None:
            reason = "" if self.sensor else ": set 'enabled = true' in [sensor] to record events"
            return f"The state history is empty{reason}."
        return "No event of the state history matches. Give fewer options, or an earlier -S."


class NodeJobsRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.node_jobs``: jobs that run or ran on a node."""

    node: _Node
    cluster: _NodeCluster = ""
    at: Annotated[str, described("Time; now if empty.")] = ""
    since: Annotated[str, described("Start of the interval; use it instead of ``at``.")] = ""
    until: Annotated[str, described("End of the interval; now if empty.")] = ""
    zone: Zone = ""
    limit: Annotated[
        int, described("Maximum number of jobs, those that started last.", ge=1, le=MAX_EVENTS)
    ] = 1000


class NodeJobRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a job, or a part of a resized run.

    Attributes:
        cluster: The cluster's name.
        job_id: Raw job id.
        label: Job id as Slurm prints it.
        restarts: Restart count of the run.
        name: Job name.
        user: Owner; "" if the uid resolves to no name.
        uid: Uid of the owner.
        account: Account charged.
        partition: Partition in which it ran.
        state: Latest known state, not the state at that time.
        start: Start time.
        end: End time; None while it runs.
        cpus: Number of CPUs on all its nodes.
        nodes: Number of nodes.
        nodelist: Node list.
    """

    cluster: str
    job_id: int
    label: str
    restarts: int = 0
    name: str = ""
    user: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    state: str = ""
    start: datetime
    end: datetime | None = None
    cpus: int = 0
    nodes: int = 0
    nodelist: str = ""


class NodeJobsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.node_jobs``: jobs that the user may see, last started first.

    Attributes:
        jobs: Runs of the jobs.
        since: Begin of the interval.
        until: End of the interval; equal to ``since`` for a single time.
        is_all: Whether the user may see all jobs of the cluster.
        total: Number of such runs; ``jobs`` has at most ``limit`` of them.
        zone: Time zone of the request.
    """

    jobs: tuple[NodeJobRun, ...]
    since: datetime
    until: datetime
    is_all: bool = True
    total: int = 0
    zone: str = ""
    layout: ClassVar[Layout] = (
        Column("JobID", "label", link="job"),
        Column("User", read_user, link="user"),
        Column("Account", "account"),
        Column("Name", "name", max_width=24),
        Column("Partition", "partition"),
        Column("State", "state", "state"),
        Column("Start", "start", "time"),
        Column("End", "end", "time"),
        Column("CPUs", "cpus", "count"),
        Column("NodeList", "nodelist", max_width=30),
    )

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Period in which the jobs ran, or the time."""
        return self.since, self.until

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return f"No jobs{'' if self.is_all else ' that you may see'} on this node."

    def list_notes(self) -> Iterable[str]:
        """Return the number of jobs."""
        if self.jobs:
            visibility = "" if self.is_all else " that you may see"
            yield f"{format_count(len(self.jobs), 'job')}{visibility}."


class JobEventsRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.job_events``: state events of a job's nodes during its run."""

    job: Annotated[str, described("Job id as Slurm writes it.")]
    cluster: Annotated[str, described("Cluster; any if empty.")] = ""
    limit: Annotated[
        int, described("Maximum number of events, oldest first.", ge=1, le=MAX_EVENTS)
    ] = 1000


class JobEventsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.job_events``, oldest first.

    Attributes:
        events: Events of kind node.state, as in ``history.events``.
        sensor: Whether a sensor is enabled; only sensors report node states.
    """

    events: tuple[EventItem, ...]
    sensor: bool = False
    layout: ClassVar[Layout] = EVENT_LAYOUT


class PartitionsRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.partitions``: present partitions."""

    cluster: _Cluster = ""


class PartitionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Present state of a partition.

    Attributes:
        cluster: The cluster's name.
        partition: Partition name.
        state: As Slurm shows it: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``.
        since: Time of the first observation of this state.
    """

    cluster: str
    partition: str
    state: str
    since: datetime


class PartitionsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.partitions``, by cluster and name, for clusters that the user may see."""

    partitions: tuple[PartitionStatus, ...]


class ReservationsRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.reservations``: present reservations."""

    cluster: _Cluster = ""


class ReservationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Present state of a reservation.

    Attributes:
        cluster: The cluster's name.
        reservation: Reservation name.
        state: ``ACTIVE`` or ``INACTIVE``.
        nodes: Node list.
        start: Start time.
        end: End time.
        users: Users who may use it.
        flags: Slurm's flags.
        seen_at: Time of the first observation of this state.
    """

    cluster: str
    reservation: str
    state: str
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    seen_at: datetime


class ReservationsReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.reservations``, by cluster and name, for clusters the user may see."""

    reservations: tuple[ReservationStatus, ...]
    layout: ClassVar[Layout] = (
        Column("Reservation", "reservation"),
        Column("State", "state", "state"),
        Column("Start", "start", "time", title="From"),
        Column("End", "end", "time", title="Until"),
        Column("NodeList", "nodes", "prose", title="Nodes"),
        Column("Users", "users"),
        Column("Flags", "flags"),
    )


class NodeRequest(Request, frozen=True, kw_only=True):
    """Request of ``history.node``: states of one node over time."""

    node: _Node
    cluster: _NodeCluster = ""
    since: Annotated[str, described("Start of the interval; 30 days ago if empty.")] = ""
    until: Annotated[str, described("End of the interval; now if empty.")] = ""
    zone: Zone = ""
    limit: Annotated[
        int,
        described(
            "Maximum number of spans, the newest. The sums include all.",
            ge=1,
            le=MAX_EVENTS,
        ),
    ] = 200


class NodeStateSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span in which a node had one state and one reason.

    Attributes:
        state: As Slurm showed it; ``REMOVED`` while the node did not exist.
        since: Begin of the span, which may precede the requested interval.
        until: End of the span; None while it lasts.
        reason: Reason; "" for none.
        reason_user: Name of the user who set the reason.
    """

    state: str
    since: datetime
    until: datetime | None = None
    reason: str = ""
    reason_user: str = ""


def _read_span_s(span: NodeStateSpan, reply: "NodeReply") -> float:
    """Return the duration of a span; until the end of the interval if it lasts."""
    return ((span.until or reply.until) - span.since).total_seconds()


class NodeReply(Answer, frozen=True, kw_only=True):
    """Reply of ``history.node``: spans and down time of a node.

    Attributes:
        spans: Spans, newest first.
        since: Begin of the interval.
        until: End of the interval.
        known_s: Seconds of the interval with a known state.
        down_s: Seconds in which the node was down, or drained with no job left.
        planned_down_s: Seconds of ``down_s`` that were planned: powered down.
        is_all: Whether all spans of the interval are included.
        sensor: Whether a sensor is enabled; only sensors report node states.
        zone: Time zone of the request.
    """

    spans: tuple[NodeStateSpan, ...]
    since: datetime
    until: datetime
    known_s: float
    down_s: float
    planned_down_s: float
    is_all: bool
    sensor: bool
    zone: str = ""
    layout: ClassVar[Layout] = (
        Column("Start", "since", "time", title="From", link="past"),
        Column("End", "until", "time", title="Until", absent="now"),
        Column("Duration", _read_span_s, "duration"),
        Column("State", "state", "node_state"),
        Column("Reason", "reason", "prose"),
        Column("SetBy", "reason_user", title="Set by"),
    )
