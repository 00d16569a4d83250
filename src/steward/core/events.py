"""The nouns: every fact that Steward keeps is an Event, and this is the one list of kinds.

Events are immutable. Their key makes a repeat harmless: the journal keeps the
first event of a (cluster, key) and passes over the rest. Fields are only ever
added, with defaults, so that an old journal can always be read.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.core.timestamps import micros
from steward.core.usage import (
    AccountingExpire,
    NodeGap,
    NodeJob,
    PluginMessage,
    RunFact,
    StepAccounted,
    StepEnd,
    StepStart,
    StepUsage,
    TasksExited,
)


class HoldFact(msgspec.Struct, frozen=True, kw_only=True):
    """hold.placed, hold.confirmed, hold.settled, hold.released: what became of a hold.

    Attributes:
        hold: Its id.
        account: Who pays.
        amount: Micro-SU that this is about: placed, charged, or given back.
        remaining: Micro-SU that are still held.
        job_id: The raw job id; 0 while it is not known.
        user: Whose job it is.
        why: What brought it about, for people.
    """

    hold: str
    account: str
    amount: int
    remaining: int = 0
    job_id: int = 0
    user: str = ""
    why: str = ""


class BankThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """bank.threshold: an allocation is used so far, or ends so soon.

    Attributes:
        account: Whose it is.
        allocation: Its number in the ledger.
        kind: ``used`` or ``ends``.
        value: Percent that are used, or days until its end.
        balance: What is left, micro-SU.
        total: What it was given, micro-SU.
        end: When it ends; None for never.
    """

    account: str
    allocation: int
    kind: Literal["used", "ends"]
    value: int
    balance: int
    total: int
    end: datetime | None = None


Noticed = Literal["trigger", "reconcile", "start"]
"""What made us look: a wake-up of slurmctld's, the clock or slurmctld's start, or our own."""


class NodesNow(msgspec.Struct, frozen=True, kw_only=True):
    """``nodes-CLUSTER.json``: the nodes' states at the sensor's last poll.

    The sensor leaves it for those that show nodes, since no event tells that jobs come and go.

    Attributes:
        states: The nodes' names, by state.
        silent_since: When that poll was, if slurmctld has answered none since; None while it
            answers.
    """

    states: dict[str, tuple[str, ...]]
    silent_since: datetime | None = None


def nodes_now_path(state_dir: str, cluster: str) -> str:
    """The file of a cluster's :class:`NodesNow`."""
    return os.path.join(state_dir, f"nodes-{cluster}.json")


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """node.state: a node's state, flags or reason changed.

    Attributes:
        node: Its NodeName.
        state: As Slurm shows it, base first and then the flags in the alphabet's order:
            ``IDLE``, ``DOWN+DRAIN+NOT_RESPONDING``; ``REMOVED`` for a node that is not
            there any more.
        old_state: What it was before; "" for a node that is new.
        reason: Why, as Slurm shows it; "" for none.
        reason_uid: Who gave the reason; None where nobody did or the name is unknown.
        reason_user: The same by name.
        reason_at: When it was given, UTC.
        old_reason: What the reason was before.
        source: What made us look.
        failed: Whether it went from working to failing; not so of nodes that save power, are
            planned, being maintained, rebooted on demand, or drained by somebody, nor while
            one that was resumed has not answered yet.
        recovered: Whether it takes jobs again, for the first time since it failed, whoever
            drained it meanwhile; not so of one that was drained and resumed without a failure,
            nor while power saving has one off, or boots it.
        partitions: The partitions that it is in.
        cpus: How many CPUs it has; 0, as of the next two, where that was not told.
        memory_bytes: Its memory for jobs.
        gpus: How many GPUs it has; 0 for none.
        resized: Whether only what it has for jobs changed, or was told for the first time;
            rules are not told of that.
    """

    node: str
    state: str
    old_state: str = ""
    reason: str = ""
    reason_uid: int | None = None
    reason_user: str = ""
    reason_at: datetime | None = None
    old_reason: str = ""
    source: Noticed = "reconcile"
    failed: bool = False
    recovered: bool = False
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    resized: bool = False


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
    """partition.state: a partition's state changed.

    Attributes:
        partition: Its name.
        state: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``, or ``REMOVED``.
        old_state: What it was before; "" for one that is new.
        source: What made us look.
    """

    partition: str
    state: str
    old_state: str = ""
    source: Noticed = "reconcile"


class ReservationState(msgspec.Struct, frozen=True, kw_only=True):
    """reservation.state: a reservation was made, began, ended or was taken away.

    Attributes:
        reservation: Its name.
        state: ``INACTIVE``, ``ACTIVE``, or ``REMOVED``.
        old_state: What it was before; "" for one that is new.
        nodes: Its node list.
        start: When it begins, UTC.
        end: When it ends, UTC.
        users: Whose it is.
        flags: Its flags.
        source: What made us look.
    """

    reservation: str
    state: str
    old_state: str = ""
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    source: Noticed = "reconcile"


class RuleExecution(msgspec.Struct, frozen=True, kw_only=True):
    """rule.execution: a rule's action ended, or was not run and why.

    Attributes:
        execution: Its id in the history.
        rule: The rule's name.
        event: Key of the event that it ran for.
        action: The action's name.
        status: How it ended.
        parameters: The action's, as rendered.
        message: What it said, one line.
    """

    execution: int
    rule: str
    event: str
    action: str
    status: Literal["succeeded", "failed", "timeout", "unknown", "dry-run", "held-back"]
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    message: str = ""


JOB_SCRIPT: Final = "job.script"
JOB_SEEN: Final = "job.seen"
JOB_STATE: Final = "job.state"
JOB_END: Final = "job.end"
JOB_IDENTITY: Final = "job.identity"
JOB_MISSED: Final = "job.missed"
STEP_START: Final = "step.start"
TASK_EXIT: Final = "task.exit"
STEP_END: Final = "step.end"
NODE_PROLOG: Final = "node.prolog"
NODE_EPILOG: Final = "node.epilog"
NODE_GAP: Final = "node.gap"
RUN_START: Final = "run.start"
RUN_SUSPEND: Final = "run.suspend"
RUN_END: Final = "run.end"
STEP_LAUNCH: Final = "step.launch"
STEP_USAGE: Final = "step.usage"
STEP_ACCOUNTED: Final = "step.accounted"
PLUGIN_MESSAGE: Final = "plugin.message"
ACCOUNTING_EXPIRE: Final = "accounting.expire"
QUEUE_LOOKED: Final = "queue.looked"
HOLD_PLACED: Final = "hold.placed"
HOLD_CONFIRMED: Final = "hold.confirmed"
HOLD_SETTLED: Final = "hold.settled"
HOLD_RELEASED: Final = "hold.released"
BANK_THRESHOLD: Final = "bank.threshold"
CONTROLLER_STATE: Final = "controller.state"
NODE_STATE: Final = "node.state"
PARTITION_STATE: Final = "partition.state"
RESERVATION_STATE: Final = "reservation.state"
RULE_EXECUTION: Final = "rule.execution"
ARCHIVE_PURGE: Final = "archive.purge"
ARCHIVE_RESEND: Final = "archive.resend"


class EventError(StewardError):
    """An event whose kind or body is not one of ours."""


class JobsMissed(msgspec.Struct, frozen=True, kw_only=True):
    """job.missed: jobs whose scripts were removed from the spool before capture read them.

    Attributes:
        job_ids: Their raw ids, at most ``MOST_MISSED``.
    """

    job_ids: tuple[int, ...]


MOST_MISSED: Final = 1000
"""Job ids in one event of missed jobs."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that capture has written, once, to a store of incoming files.

    Attributes:
        path: Name of the file below the store's directory.
        length: Size in bytes of what is kept (after redaction).
        sha256: Hex digest of what is kept (after redaction).
    """

    path: str
    length: int
    sha256: str


class JobScript(msgspec.Struct, frozen=True, kw_only=True):
    """job.script: what a scheduler's spool held for a job.

    Attributes:
        job_id: The id in the spool entry's name; an array's or a het job's leader.
        spool_mtime_ns: Modification time of the script in the spool, ns since the epoch.
        script: The script, byte for byte less the spool's one trailing NUL.
        environment: The environment, redacted; None where the spool had none.
        store: Name of the store that holds both, see ``incoming.py``.
        claimed_name: Job name as the environment claims it: a hint, never an identity.
        claimed_dir: Submit directory, likewise.
        claimed_host: Submit host, likewise.
        redacted: Names of the environment variables whose values were redacted.
        flags: What was odd: ``environment-short`` (cut off), ``environment-count`` (wrong
            count), ``environment-missing``, ``environment-too-large``,
            ``environment-unreadable`` and ``script-too-large`` (not kept), ``script-no-nul``.
    """

    job_id: int
    spool_mtime_ns: int
    script: Kept | None = None
    environment: Kept | None = None
    store: str = ""
    claimed_name: str = ""
    claimed_dir: str = ""
    claimed_host: str = ""
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """job.seen, job.state, job.end: Slurm showed this record.

    ``whole`` says that the record came from ``scontrol show job`` (every field
    that Slurm has), not from a snapshot's few columns.
    """

    record: JobRecord
    whole: bool = False


class JobIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """job.identity: a kept script belongs to this job; said again when a fact changes.

    Attributes:
        script_key: Key of the job.script event.
        job_id: The id of the job that the script belongs to.
        first_submit: First submit time: with cluster and job_id, the job's identity.
        record: The latest that is known of the job.
        why: ``bound``, ``renamed`` (the uid resolves now), ``ended`` or ``updated``.
    """

    script_key: str
    job_id: int
    first_submit: datetime
    record: JobRecord
    why: str = "bound"


class ArchivePurge(msgspec.Struct, frozen=True, kw_only=True):
    """archive.purge: these scripts are to be forgotten, bytes and index.

    Attributes:
        script_keys: Keys of the job.script events.
        sink: The one sink that they leave; "" for every sink, catalogue and jobs.db.
        asked_by: Who asked, "retention" where age did.
        reason: What the one who asked gave as the reason.
    """

    script_keys: tuple[str, ...]
    sink: str = ""
    asked_by: str = ""
    reason: str = ""


class Resent(msgspec.Struct, frozen=True, kw_only=True):
    """One script that is to be archived again.

    Attributes:
        script_key: Key of the job.script event.
        script: What that event said.
        identity: Whose it is, as last said; None while nobody has said.
    """

    script_key: str
    script: JobScript
    identity: JobIdentity | None = None


class ArchiveResend(msgspec.Struct, frozen=True, kw_only=True):
    """archive.resend: a sink is to archive these scripts, whatever it has seen of them.

    Their bytes may have left the store that they name: another sink has them.

    Attributes:
        sink: The sink's name.
        scripts: The scripts; a few hundred at the most.
        asked_by: Who asked.
    """

    sink: str
    scripts: tuple[Resent, ...]
    asked_by: str = ""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """controller.state: slurmctld or slurmdbd is up, down, started anew or reconfigured.

    Attributes:
        up: Whether it answers.
        message: What was said of it.
        daemon: ``slurmctld`` or ``slurmdbd``.
        restarted: Whether it was started anew since it was last seen.
        reconfigured: Whether it has read its configuration again.
    """

    up: bool
    message: str = ""
    daemon: str = "slurmctld"
    restarted: bool = False
    reconfigured: bool = False


class QueueLooked(msgspec.Struct, frozen=True, kw_only=True):
    """queue.looked: the queue was seen whole; what it held is told by other events before.

    Attributes:
        began: When the look began: a job that was let in later may be missing.
        cost_s: How long it took, in seconds.
    """

    began: datetime
    cost_s: float = 0.0


BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    JOB_SCRIPT: JobScript,
    JOB_SEEN: JobFacts,
    JOB_STATE: JobFacts,
    JOB_END: JobFacts,
    JOB_IDENTITY: JobIdentity,
    JOB_MISSED: JobsMissed,
    STEP_START: StepStart,
    TASK_EXIT: TasksExited,
    STEP_END: StepEnd,
    NODE_PROLOG: NodeJob,
    NODE_EPILOG: NodeJob,
    NODE_GAP: NodeGap,
    RUN_START: RunFact,
    RUN_SUSPEND: RunFact,
    RUN_END: RunFact,
    STEP_LAUNCH: StepUsage,
    STEP_USAGE: StepUsage,
    STEP_ACCOUNTED: StepAccounted,
    PLUGIN_MESSAGE: PluginMessage,
    ACCOUNTING_EXPIRE: AccountingExpire,
    QUEUE_LOOKED: QueueLooked,
    HOLD_PLACED: HoldFact,
    HOLD_CONFIRMED: HoldFact,
    HOLD_SETTLED: HoldFact,
    HOLD_RELEASED: HoldFact,
    BANK_THRESHOLD: BankThreshold,
    CONTROLLER_STATE: ControllerState,
    NODE_STATE: NodeState,
    PARTITION_STATE: PartitionState,
    RESERVATION_STATE: ReservationState,
    RULE_EXECUTION: RuleExecution,
    ARCHIVE_PURGE: ArchivePurge,
    ARCHIVE_RESEND: ArchiveResend,
}


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """Stands for a body that this version cannot read; whoever gets it sets the event aside."""

    error: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One fact.

    Attributes:
        kind: One of the kinds above.
        cluster: Name of the cluster that it happened on.
        key: Unique among the cluster's events; the same fact seen twice has the same key.
        at: When it happened, UTC.
        seen_at: When a source saw it, UTC.
        source: Which source saw it ("spool", "snapshot", "import", "jobs" …).
        body: The record of this kind.
        version: Of the body's shape.
        id: Position in the journal; 0 until the event is appended.
    """

    kind: str
    cluster: str
    key: str
    at: datetime
    seen_at: datetime
    source: str
    body: Any
    version: int = 1
    id: int = 0


def script_key(job_id: int, spool_mtime_ns: int) -> str:
    """The key of a job.script event: the same spool entry seen twice has the same one."""
    return f"script:{job_id}:{spool_mtime_ns}"


def missed_event(cluster: str, source: str, job_ids: Sequence[int]) -> Event:
    """A job.missed event, seen now; it is told once, so its key is the time's."""
    now = utc_now()
    return Event(
        kind=JOB_MISSED,
        cluster=cluster,
        key=f"{JOB_MISSED}:{job_ids[0]}:{micros(now)}",
        at=now,
        seen_at=now,
        source=source,
        body=JobsMissed(job_ids=tuple(job_ids)),
    )


def script_event(cluster: str, source: str, body: JobScript) -> Event:
    """A job.script event, seen now; its key and its time are those of the spool entry."""
    return Event(
        kind=JOB_SCRIPT,
        cluster=cluster,
        key=script_key(body.job_id, body.spool_mtime_ns),
        at=datetime.fromtimestamp(body.spool_mtime_ns / 1e9, UTC),
        seen_at=utc_now(),
        source=source,
        body=body,
    )


class _Envelope(msgspec.Struct, frozen=True):
    """How an event's parts that are not columns of the journal are written."""

    at: datetime
    seen_at: datetime
    source: str
    body: msgspec.Raw
    version: int = 1


_encoder = msgspec.json.Encoder()
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_body_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(body) for kind, body in BODIES.items()
}


def utc_now() -> datetime:
    """The present moment, aware, in UTC."""
    return datetime.now(UTC)


def encode(event: Event) -> bytes:
    """What the journal stores of an event beside its kind, cluster and key (JSON)."""
    return _encoder.encode(
        {
            "at": event.at,
            "seen_at": event.seen_at,
            "source": event.source,
            "body": event.body,
            "version": event.version,
        }
    )


def decode(id_: int, kind: str, cluster: str, key: str, data: bytes) -> Event:
    """The event that :func:`encode` wrote.

    Raises:
        EventError: The kind is unknown, or the bytes are not of its shape.
    """
    decoder = _body_decoders.get(kind)
    if decoder is None:
        raise EventError(f"event {id_} is of kind {kind!r}, which this version does not know", key)
    try:
        envelope = _envelope_decoder.decode(data)
        body = decoder.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise EventError(f"event {id_} ({kind}) cannot be read: {error}", key) from error
    return Event(
        kind=kind,
        cluster=cluster,
        key=key,
        at=envelope.at,
        seen_at=envelope.seen_at,
        source=envelope.source,
        body=body,
        version=envelope.version,
        id=id_,
    )
