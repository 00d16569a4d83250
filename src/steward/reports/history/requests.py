"""What the history is asked, and what it answers."""

from datetime import datetime

import msgspec

from steward.core.actions import Answer, Request
from steward.reports.events import EventTold


class NodesRequest(Request, frozen=True, kw_only=True):
    """history.nodes: how nodes are now, or were at a time.

    Attributes:
        cluster: Only of this cluster; of all if empty.
        nodes: Only these, a node list; all if empty.
        partitions: Only nodes that are in one of these.
        states: Only nodes whose state has one of these words, base or flag, in any case.
        at: The time; "" for now.
        zone: IANA name of the zone that a time without one is meant in; "" for the cluster's.
        known: The ``tag`` of an answer to the same question: while that is how nodes still
            are, they are not told again.
    """

    cluster: str = ""
    nodes: str = ""
    partitions: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    at: str = ""
    zone: str = ""
    known: str = ""


class NodeThen(msgspec.Struct, frozen=True, kw_only=True):
    """How a node is, or was.

    Attributes:
        cluster: The cluster's name.
        node: NodeName.
        state: As Slurm shows it, see :class:`steward.core.events.NodeState`.
        since: Since when it has been so.
        since_is_known: Whether that is when it became so; else it is when it was first seen.
        reason: Why; "" for none.
        reason_user: Who gave the reason, by name.
        reason_uid: The same by number.
        reason_at: When it was given.
        partitions: The partitions that it is in.
        cpus: How many CPUs it has; 0 where that is not known.
        memory_bytes: Its memory for jobs; 0 where that is not known.
        gpus: How many GPUs it has; 0 for none, and where that is not known.
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


class NodesAnswer(Answer, frozen=True, kw_only=True):
    """How nodes are, or were.

    Attributes:
        nodes: By cluster and name; without those that were not known then.
        at: The time that is told of.
        sensor: Whether there is a sensor, which alone tells states of nodes.
        begins: When the history of these clusters' nodes begins; None where there is none.
        silent_since: Clusters whose slurmctld does not answer the sensor, and when it last
            did: their nodes are shown as they were then. {} of a time that is past.
        position: How far the journal was read for that: give it to events.list as ``after``
            for what happens from now on.
        tag: What stands for how nodes are now; "" of a time that is past.
        is_known: Whether they are as the asker knows them already, and are left out.
    """

    nodes: tuple[NodeThen, ...]
    at: datetime
    sensor: bool
    begins: datetime | None = None
    silent_since: dict[str, datetime] = msgspec.field(default_factory=dict)
    position: int = 0
    tag: str = ""
    is_known: bool = False


class NodeCountsRequest(Request, frozen=True, kw_only=True):
    """history.node_counts: how many nodes are in which state.

    Attributes:
        cluster: Only of this cluster; of all if empty.
    """

    cluster: str = ""


class NodeCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes of a cluster are in a state."""

    cluster: str
    state: str
    nodes: int


class NodeCountsAnswer(Answer, frozen=True, kw_only=True):
    """How many nodes are in which state, of those clusters that show them to the asker.

    Attributes:
        counts: Of each cluster and state.
        silent_since: As in :class:`NodesAnswer`.
    """

    counts: tuple[NodeCount, ...]
    silent_since: dict[str, datetime] = msgspec.field(default_factory=dict)


class EventsRequest(Request, frozen=True, kw_only=True):
    """history.events: what happened, newest first.

    Attributes:
        kinds: Only these kinds; all that are kept if empty.
        clusters: Only on these clusters; all if empty.
        nodes: Only states of these nodes, a node list; of all if empty.
        failed: Only nodes that went from working to failing.
        since: Only what happened at this time or later; "" for any.
        until: Only what happened before this time; "" for any.
        zone: IANA name of the zone that times without one are meant in; "" for the cluster's.
        before: Only what is older than this: ``older`` of a former answer.
        after: Only what is newer than this: ``newer`` of a former answer.
        limit: How many at most.
    """

    kinds: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    nodes: str = ""
    failed: bool = False
    since: str = ""
    until: str = ""
    zone: str = ""
    before: str = ""
    after: str = ""
    limit: int = 50


class EventsAnswer(Answer, frozen=True, kw_only=True):
    """What happened, newest first.

    Attributes:
        events: The events; ``id`` is the history's own number, not the journal's position.
        older: Give it as ``before`` for what came before; "" where there is nothing more.
        newer: Give it as ``after`` for what comes later.
        sensor: Whether there is a sensor, which alone tells states of nodes.
        begins: The oldest that is kept; None where nothing is.
        position: How far the journal was read for that: give it to events.list as ``after``
            for what happens from now on.
    """

    events: tuple[EventTold, ...]
    older: str = ""
    newer: str = ""
    sensor: bool = False
    begins: datetime | None = None
    position: int = 0


class NodeJobsRequest(Request, frozen=True, kw_only=True):
    """history.node_jobs: which jobs run on a node, or ran there.

    Attributes:
        node: NodeName.
        cluster: The node's cluster; "" for the configuration's first.
        at: The time; "" for now.
        since: Instead of a time: all that ran there since this one …
        until: … and until this one; "" for now.
        zone: IANA name of the zone that times without one are meant in; "" for the cluster's.
        limit: How many at most: those that began last.
    """

    node: str
    cluster: str = ""
    at: str = ""
    since: str = ""
    until: str = ""
    zone: str = ""
    limit: int = 1000


class JobThen(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a job, or a piece of one that was resized.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id.
        label: The job as Slurm prints it.
        restarts: The run's restart count.
        name: The job's.
        user: Whose it is; "" where the uid resolves to none.
        uid: The same by number.
        account: What it is charged to.
        partition: Where it ran.
        state: As it is now known, not as it was then.
        start: When it began.
        end: When it ended; None while it runs.
        cpus: How many it has, on all its nodes.
        nodes: How many nodes it has.
        nodelist: Which.
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


class NodeJobsAnswer(Answer, frozen=True, kw_only=True):
    """Which jobs ran on a node, of those that the asker may see; the last to begin first.

    Attributes:
        jobs: The jobs' runs.
        since: From when is told of.
        until: Until when; the same where a single time was asked for.
        is_all: Whether the asker may see everybody's jobs on the cluster.
    """

    jobs: tuple[JobThen, ...]
    since: datetime
    until: datetime
    is_all: bool = True


class JobEventsRequest(Request, frozen=True, kw_only=True):
    """history.job_events: what happened to a job's nodes while it ran there.

    Attributes:
        job: As Slurm names it.
        cluster: Only on this cluster; "" for any.
        limit: How many at most: the first.
    """

    job: str
    cluster: str = ""
    limit: int = 1000


class JobEventsAnswer(Answer, frozen=True, kw_only=True):
    """What happened to a job's nodes while it ran there, oldest first.

    Attributes:
        events: node.state events, as in history.events.
        sensor: Whether there is a sensor, which alone tells states of nodes.
    """

    events: tuple[EventTold, ...]
    sensor: bool = False


class PartitionsRequest(Request, frozen=True, kw_only=True):
    """history.partitions: which partitions there are.

    Attributes:
        cluster: Only of this cluster; of all if empty.
    """

    cluster: str = ""


class PartitionNow(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition is.

    Attributes:
        cluster: The cluster's name.
        partition: Its name.
        state: As Slurm shows it: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``.
        since: When it was first seen so.
    """

    cluster: str
    partition: str
    state: str
    since: datetime


class PartitionsAnswer(Answer, frozen=True, kw_only=True):
    """The partitions, by cluster and name, of those clusters that show them to the asker."""

    partitions: tuple[PartitionNow, ...]


class ReservationsRequest(Request, frozen=True, kw_only=True):
    """history.reservations: which reservations there are.

    Attributes:
        cluster: Only of this cluster; of all if empty.
    """

    cluster: str = ""


class ReservationNow(msgspec.Struct, frozen=True, kw_only=True):
    """How a reservation is.

    Attributes:
        cluster: The cluster's name.
        reservation: Its name.
        state: ``ACTIVE`` or ``INACTIVE``.
        nodes: Its node list.
        start: When it begins, or began.
        end: When it ends.
        users: Whose it is.
        flags: Its flags.
        seen_at: When it was first seen so.
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


class ReservationsAnswer(Answer, frozen=True, kw_only=True):
    """The reservations, by cluster and name, of those clusters that show them to the asker."""

    reservations: tuple[ReservationNow, ...]


class NodeRequest(Request, frozen=True, kw_only=True):
    """history.node: what became of one node.

    Attributes:
        node: NodeName.
        cluster: The node's cluster; "" for the configuration's first.
        since: From this time on; "" for the last 30 days.
        until: Until this time; "" for now.
        zone: IANA name of the zone that times without one are meant in; "" for the cluster's.
        limit: How many spans at most: the newest. The sums are of all.
    """

    node: str
    cluster: str = ""
    since: str = ""
    until: str = ""
    zone: str = ""
    limit: int = 200


class NodePast(msgspec.Struct, frozen=True, kw_only=True):
    """A node in one state, for one reason.

    Attributes:
        state: As Slurm showed it; ``REMOVED`` while the node was not there.
        since: Where that began, also where that is before the time asked for.
        until: Where it ended; None while it goes on.
        reason: Why; "" for none.
        reason_user: Who gave the reason.
    """

    state: str
    since: datetime
    until: datetime | None = None
    reason: str = ""
    reason_user: str = ""


class NodeAnswer(Answer, frozen=True, kw_only=True):
    """What became of one node.

    Attributes:
        spans: Newest first.
        since: Where the time begins that is told of.
        until: Where it ends.
        known_s: How much of it is known, in seconds.
        down_s: How long it was down then, or drained of its last job, in seconds …
        planned_down_s: … and how long of that by plan: powered down.
        is_all: Whether these are all spans of that time.
        sensor: Whether there is a sensor, which alone tells states of nodes.
    """

    spans: tuple[NodePast, ...]
    since: datetime
    until: datetime
    known_s: float
    down_s: float
    planned_down_s: float
    is_all: bool
    sensor: bool
