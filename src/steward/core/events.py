"""Events: the Event class, every kind of event with its body type, and their JSON encoding.

An event is an immutable fact that sources append to the journal and consumers apply. Its key
makes a repeat harmless: the journal keeps the first event of a (cluster, key) and ignores the
rest. ``BODIES`` maps each kind (``JOB_SCRIPT``, ``NODE_STATE`` ...) to the Struct of its body.
Bodies that compute nodes report are in ``usage.py``. Fields are only added, with defaults, so
that an old journal stays readable.

Also here: ``NodeStatesFile``, the status file of node states that the sensor writes.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.core.usage import (
    AccountedStep,
    AccountingExpiry,
    ExitedTasks,
    NodeGap,
    NodeJob,
    PluginMessage,
    RunEvent,
    StepEnd,
    StepStart,
    StepUsage,
)


class HoldFact(msgspec.Struct, frozen=True, kw_only=True):
    """hold.placed, hold.confirmed, hold.settled, hold.released: an SU hold changed.

    Attributes:
        hold: Id of the hold.
        account: Bank account that pays.
        amount: Amount of this change, in micro-SU: placed, charged or released.
        remaining: Micro-SU still held.
        job_id: Raw job id; 0 while unknown.
        user: Owner of the job.
        why: Cause of the change, as text for people.
    """

    hold: str
    account: str
    amount: int
    remaining: int = 0
    job_id: int = 0
    user: str = ""
    why: str = ""


class BankThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """bank.threshold: an allocation passed a threshold of use or of days until its end.

    Attributes:
        account: Bank account of the allocation.
        allocation: Number of the allocation in the ledger.
        kind: ``used`` or ``ends``.
        value: Percent used, or days until the end.
        balance: SU left, in micro-SU.
        total: SU granted, in micro-SU.
        end: End of the allocation; None for never.
    """

    account: str
    allocation: int
    kind: Literal["used", "ends"]
    value: int
    balance: int
    total: int
    end: datetime | None = None


PollCause = Literal["trigger", "interval", "start"]
"""Cause of a sensor poll: a report from slurmctld, the timer or slurmctld's start, our start."""


class NodeStatesFile(msgspec.Struct, frozen=True, kw_only=True):
    """Status file ``nodes-CLUSTER.json``: node states at the sensor's last poll.

    The sensor writes it for pages and commands that show nodes, because no event reports that a
    job starts or ends on a node.

    Attributes:
        states: Node names by state.
        silent_since: Time of that poll, if slurmctld has answered none since; None while it
            answers.
    """

    states: dict[str, tuple[str, ...]]
    silent_since: datetime | None = None


def node_states_path(state_dir: str, cluster: str) -> str:
    """Return the path of a cluster's :class:`NodeStatesFile` file."""
    return os.path.join(state_dir, f"nodes-{cluster}.json")


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """node.state: a node's state, flags or reason changed.

    Attributes:
        node: NodeName.
        state: State as Slurm shows it, base first, then flags in alphabetical order:
            ``IDLE``, ``DOWN+DRAIN+NOT_RESPONDING``; ``REMOVED`` for a node that no longer
            exists.
        old_state: Previous state; "" for a new node.
        reason: Reason as Slurm shows it; "" for none.
        reason_uid: Uid that set the reason; None if nobody did or the name does not resolve.
        reason_user: User name that set the reason.
        reason_at: Time the reason was set, UTC.
        old_reason: Previous reason.
        source: Cause of the poll.
        failed: Whether the node went from working to failing. False for nodes that save power,
            are planned, in maintenance, rebooted on demand or drained by somebody, and for a
            resumed node until it has answered.
        recovered: Whether the node takes jobs again for the first time since it failed, whoever
            drained it meanwhile. False for a node drained and resumed without a failure, and
            while power saving has it off or boots it.
        partitions: Partitions of the node.
        cpus: Number of CPUs; 0 if not reported, as for the next two.
        memory_bytes: Memory for jobs, in bytes.
        gpus: Number of GPUs; 0 for none.
        resized: Whether only the resources for jobs changed, or were reported for the first
            time; rules do not receive such events.
    """

    node: str
    state: str
    old_state: str = ""
    reason: str = ""
    reason_uid: int | None = None
    reason_user: str = ""
    reason_at: datetime | None = None
    old_reason: str = ""
    source: PollCause = "interval"
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
        partition: Name of the partition.
        state: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``, or ``REMOVED``.
        old_state: Previous state; "" for a new partition.
        source: Cause of the poll.
    """

    partition: str
    state: str
    old_state: str = ""
    source: PollCause = "interval"


class ReservationState(msgspec.Struct, frozen=True, kw_only=True):
    """reservation.state: a reservation was created, began, ended or was removed.

    Attributes:
        reservation: Name of the reservation.
        state: ``INACTIVE``, ``ACTIVE``, or ``REMOVED``.
        old_state: Previous state; "" for a new reservation.
        nodes: Node list.
        start: Start time, UTC.
        end: End time, UTC.
        users: Users who may use it.
        flags: Flags of the reservation.
        source: Cause of the poll.
    """

    reservation: str
    state: str
    old_state: str = ""
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    source: PollCause = "interval"


class RuleExecution(msgspec.Struct, frozen=True, kw_only=True):
    """rule.execution: a rule's action ended, or was not run and why.

    Attributes:
        execution: Id in the execution history.
        rule: Name of the rule.
        event: Key of the event that triggered the rule.
        action: Name of the action.
        status: Result of the execution.
        parameters: Parameters of the action, as rendered.
        message: Output of the action, one line.
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
JOBS_IMPORTED: Final = "jobs.imported"
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
QUEUE_POLLED: Final = "queue.polled"
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
    """An event has an unknown kind or an unreadable body."""


class MissedJobs(msgspec.Struct, frozen=True, kw_only=True):
    """job.missed: jobs whose scripts were removed from the spool before capture read them.

    Attributes:
        job_ids: Their raw ids, at most ``MAX_MISSED_JOB_IDS``.
    """

    job_ids: tuple[int, ...]


MAX_MISSED_JOB_IDS: Final = 1000
"""Largest number of job ids in one job.missed event."""


class IncomingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of script or environment bytes that capture wrote to the incoming store.

    Attributes:
        path: File name below the store's directory.
        length: Size of the stored bytes (after redaction).
        sha256: Hex digest of the stored bytes (after redaction).
    """

    path: str
    length: int
    sha256: str


class JobScript(msgspec.Struct, frozen=True, kw_only=True):
    """job.script: the script and environment that capture read from the spool for a job.

    Attributes:
        job_id: Id in the name of the spool entry; for arrays and het jobs the leader's.
        spool_mtime_ns: Modification time of the script in the spool, ns since the epoch.
        script: The script, byte for byte less the spool's one trailing NUL.
        environment: The environment, redacted; None if the spool had none.
        store: Name of the incoming store that holds both, see ``script_stores.py``.
        claimed_name: Job name from the environment: a hint, never an identity.
        claimed_dir: Submit directory from the environment, a hint too.
        claimed_host: Submit host from the environment, a hint too.
        redacted: Names of the environment variables whose values were redacted.
        flags: Anomalies: ``environment-short`` (cut off), ``environment-count`` (wrong
            count), ``environment-missing``, ``environment-too-large``,
            ``environment-unreadable`` and ``script-too-large`` (not stored), ``script-no-nul``.
    """

    job_id: int
    spool_mtime_ns: int
    script: IncomingFile | None = None
    environment: IncomingFile | None = None
    store: str = ""
    claimed_name: str = ""
    claimed_dir: str = ""
    claimed_host: str = ""
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """job.seen, job.state, job.end: Slurm showed this job record.

    ``whole`` is true for a record of ``scontrol show job`` (every field that Slurm has), false
    for the few columns of a snapshot.
    """

    record: JobRecord
    whole: bool = False


class JobIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """job.identity: a stored script belongs to this job; sent again when a fact changes.

    Attributes:
        script_key: Key of the job.script event.
        job_id: Id of the job that the script belongs to.
        first_submit: First submit time; (cluster, job_id, first_submit) identifies the job.
        record: Latest known record of the job.
        why: ``bound``, ``renamed`` (the uid resolves now), ``ended`` or ``updated``.
    """

    script_key: str
    job_id: int
    first_submit: datetime
    record: JobRecord
    why: str = "bound"


class ImportedJobs(msgspec.Struct, frozen=True, kw_only=True):
    """jobs.imported: ended runs and their steps from other accounting, see ``imported.py``.

    Attributes:
        runs: Number of runs.
        steps: Number of steps.
        data: Compressed columns of their records.
        is_continued: Whether these are further steps of the last run of an earlier event, which
            has too many or too long ones for one event. The run is repeated, alone.
    """

    runs: int
    steps: int
    data: bytes
    is_continued: bool = False


class ArchivePurge(msgspec.Struct, frozen=True, kw_only=True):
    """archive.purge: delete these scripts, bytes and index entries, by retention or on request.

    Attributes:
        script_keys: Keys of the job.script events.
        sink: The only sink to delete from; "" for every sink, the catalog and jobs.db.
        asked_by: User or service principal who requested it.
        reason: Reason that the user gave.
    """

    script_keys: tuple[str, ...]
    sink: str = ""
    asked_by: str = ""
    reason: str = ""


class ResentScript(msgspec.Struct, frozen=True, kw_only=True):
    """A script to archive again.

    Attributes:
        script_key: Key of the job.script event.
        script: Body of that event.
        identity: Latest job.identity body of the script; None if there is none yet.
    """

    script_key: str
    script: JobScript
    identity: JobIdentity | None = None


class ArchiveResend(msgspec.Struct, frozen=True, kw_only=True):
    """archive.resend: a sink must archive these scripts, even if it had them before.

    Their bytes may have left the store that they name: another sink has them.

    Attributes:
        sink: Name of the sink.
        scripts: The scripts; a few hundred at most.
        asked_by: User who requested it.
    """

    sink: str
    scripts: tuple[ResentScript, ...]
    asked_by: str = ""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """controller.state: slurmctld or slurmdbd is up, down, restarted or reconfigured.

    Attributes:
        up: Whether it answers.
        message: Detail for people.
        daemon: ``slurmctld`` or ``slurmdbd``.
        restarted: Whether it was restarted since the last poll.
        reconfigured: Whether it has read its configuration again.
    """

    up: bool
    message: str = ""
    daemon: str = "slurmctld"
    restarted: bool = False
    reconfigured: bool = False


class QueuePolled(msgspec.Struct, frozen=True, kw_only=True):
    """queue.polled: a poll of the whole queue ended; earlier events carry what it found.

    Attributes:
        began: Start time of the poll; a job submitted after it may be missing.
        cost_s: Duration of the poll, in seconds.
    """

    began: datetime
    cost_s: float = 0.0


BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    JOB_SCRIPT: JobScript,
    JOB_SEEN: JobFacts,
    JOB_STATE: JobFacts,
    JOB_END: JobFacts,
    JOB_IDENTITY: JobIdentity,
    JOB_MISSED: MissedJobs,
    JOBS_IMPORTED: ImportedJobs,
    STEP_START: StepStart,
    TASK_EXIT: ExitedTasks,
    STEP_END: StepEnd,
    NODE_PROLOG: NodeJob,
    NODE_EPILOG: NodeJob,
    NODE_GAP: NodeGap,
    RUN_START: RunEvent,
    RUN_SUSPEND: RunEvent,
    RUN_END: RunEvent,
    STEP_LAUNCH: StepUsage,
    STEP_USAGE: StepUsage,
    STEP_ACCOUNTED: AccountedStep,
    PLUGIN_MESSAGE: PluginMessage,
    ACCOUNTING_EXPIRE: AccountingExpiry,
    QUEUE_POLLED: QueuePolled,
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


class UnreadableBody(msgspec.Struct, frozen=True, kw_only=True):
    """Placeholder for a body that this version cannot read; consumers make it a dead letter."""

    error: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable fact with an idempotency key, as the journal stores it.

    Attributes:
        kind: One of the kinds above.
        cluster: Name of the cluster that it happened on.
        key: Unique among the cluster's events; the same fact reported twice has the same key.
        at: Time of the fact, UTC.
        seen_at: Time a source saw it, UTC.
        source: Name of the source ("spool", "snapshot", "import", "jobs" …).
        body: Struct that ``BODIES`` names for this kind.
        version: Version of the body's schema.
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


def make_script_key(job_id: int, spool_mtime_ns: int) -> str:
    """Return the key of a job.script event; the same spool entry always gives the same key."""
    return f"script:{job_id}:{spool_mtime_ns}"


def make_missed_event(cluster: str, source: str, job_ids: Sequence[int]) -> Event:
    """Make a job.missed event of now; its key holds the time, since it is reported only once."""
    now = utc_now()
    return Event(
        kind=JOB_MISSED,
        cluster=cluster,
        key=f"{JOB_MISSED}:{job_ids[0]}:{to_micros(now)}",
        at=now,
        seen_at=now,
        source=source,
        body=MissedJobs(job_ids=tuple(job_ids)),
    )


def make_script_event(cluster: str, source: str, body: JobScript) -> Event:
    """Make a job.script event; its key and time are those of the spool entry."""
    return Event(
        kind=JOB_SCRIPT,
        cluster=cluster,
        key=make_script_key(body.job_id, body.spool_mtime_ns),
        at=datetime.fromtimestamp(body.spool_mtime_ns / 1e9, UTC),
        seen_at=utc_now(),
        source=source,
        body=body,
    )


_Body = TypeVar("_Body")


class _Envelope(msgspec.Struct, Generic[_Body], frozen=True):
    """JSON form of an event's fields that are no columns of the journal."""

    at: datetime
    seen_at: datetime
    source: str
    body: _Body
    version: int = 1


_encoder = msgspec.json.Encoder()


@cache
def _make_decoder(kind: str) -> "msgspec.json.Decoder[_Envelope[Any]]":
    """Make the decoder of a kind, when its first event is read."""
    envelope: Any = _Envelope
    return msgspec.json.Decoder(envelope[BODIES[kind]])


def utc_now() -> datetime:
    """Return the current time, time zone aware, in UTC."""
    return datetime.now(UTC)


def encode_event(event: Event) -> bytes:
    """Encode an event as JSON for the journal, without the columns kind, cluster and key."""
    return _encoder.encode(
        {
            "at": event.at,
            "seen_at": event.seen_at,
            "source": event.source,
            "body": event.body,
            "version": event.version,
        }
    )


def decode_event(id_: int, kind: str, cluster: str, key: str, data: bytes) -> Event:
    """Decode an event that :func:`encode_event` wrote.

    Raises:
        EventError: The kind is unknown, or the bytes do not match its body type.
    """
    if kind not in BODIES:
        raise EventError(
            f"event {id_} has the kind {kind!r}, which this version does not know: upgrade Steward",
            key,
        )
    try:
        envelope = _make_decoder(kind).decode(data)
    except msgspec.MsgspecError as error:
        raise EventError(f"cannot decode event {id_} ({kind}): {error}", key) from error
    return _open_envelope(envelope, id_, kind, cluster, key)


def decode_unsent_event(kind: str, cluster: str, key: str, data: bytes) -> Event:
    """Decode an event of an outbox, which another version may have left there.

    A body that this version cannot read stays JSON: the journal takes it, and consumers make the
    event a dead letter.

    Raises:
        EventError: The bytes are no event.
    """
    try:
        return decode_event(0, kind, cluster, key, data)
    except EventError as error:
        try:
            envelope = msgspec.json.decode(data, type=_Envelope[msgspec.Raw])
        except msgspec.MsgspecError:
            raise error from None
        return _open_envelope(envelope, 0, kind, cluster, key)


def _open_envelope(envelope: _Envelope[Any], id_: int, kind: str, cluster: str, key: str) -> Event:
    """Return the event in an envelope."""
    return Event(
        kind=kind,
        cluster=cluster,
        key=key,
        at=envelope.at,
        seen_at=envelope.seen_at,
        source=envelope.source,
        body=envelope.body,
        version=envelope.version,
        id=id_,
    )
