"""Messages on the gate's two sockets.

Submit plugins send :class:`PluginRequest` and get :class:`PluginReply`, one line of JSON each way.
Steward's own processes use the local RPC (``core/rpc.py``): the bodies of their calls follow
(`ShownJob`, `HoldRequest`, `SettleRequest`, ...), with the replies (`HoldReply`,
`AdmissionVerdict`, `AccountMeans`, `GateStatus`, ...), a job's pending changes as gate.db stores
them (`PendingChanges`), and the facts that the gate reports to the journal (`GateFact`).
`client.py` and `calls.py` pair each operation with its body and reply. Amounts are micro-SU, times
µs since the epoch.
"""

from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from steward.bank.errors import (
    BankError,
    BankRefused,
    BankUsage,
    GateUnavailable,
    NoEstimate,
    NoRate,
)
from steward.bank.ledger import RejectedJob
from steward.bank.records import BankRecord, GateBooks, Hold, JobRequest, Mode, Quote, Settlement
from steward.core.events import HoldFact

VERSION: Final = 1
"""Version of the plugins' protocol; peers of another version are refused."""
CONTROL_SOCKET: Final = "gate-control.sock"
"""Name of the socket for Steward's own processes, in the state directory."""
LONGEST_REQUEST: Final = 1 << 20
"""Maximum length of a plugin's request, in bytes: the most that ``LONGEST_TEXTS`` can become in
JSON."""
MAX_REQUESTS: Final = 50
"""Maximum number of requests that a gate forwards to another host's at once."""
LONGEST_BATCH: Final = 4 * LONGEST_REQUEST
"""Maximum length of these requests, and of the replies, in bytes."""
DECIDE_PATH: Final = "/decide"
"""Path to which they are posted."""
TIMEOUT_SHARE: Final = 0.7
"""Part of the plugin's time-out for which the gate that asks waits for the one that decides."""
DECISION_SHARE: Final = 0.6
"""Part of the plugin's time-out after which the gate that decides starts no decision: the answer
must travel back."""
GATE_ERRORS: Final = (*(BankRefused, BankUsage, NoEstimate, NoRate, BankError, GateUnavailable),)
"""Errors of the gate's operations."""
LONGEST_CALL: Final = 64 << 20
"""Maximum length of a call by Steward's own processes, in bytes: all accounts at once."""


class PluginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a submit plugin; another host's gate forwards it as it is.

    Attributes:
        v: Version of the protocol.
        op: ``submit`` for a new job, ``modify`` for a change to one.
        cluster: The cluster's name.
        job: The request; of a change only the changed fields.
        jobs: The jobs to change as the command names them (``2_3``).
        by: The uid that submits or changes; -1 if unknown.
        oversize: The first field whose text is longer than the plugin sends; its text is cut. "" if
            all texts are complete.
    """

    v: int
    op: Literal["submit", "modify"]
    cluster: str
    job: JobRequest
    jobs: str = ""
    by: int = -1
    oversize: str = ""


class PluginReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reply to a submit plugin. Empty texts are left out and change nothing.

    Attributes:
        v: Version of the protocol.
        ok: Whether the job or change is accepted.
        say: Message to the user, some lines.
        admin_comment: The job's new admin_comment, complete.
        qos: The QOS that the job gets instead.
        partition: The partition that the job gets instead.
        account: The account that the job gets instead.
    """

    v: int
    ok: bool
    admin_comment: str = ""
    say: str = ""
    qos: str = ""
    partition: str = ""
    account: str = ""


class Allowance(BankRecord, frozen=True):
    """Permission for one job to pass the gate even if its account cannot pay.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id; an array's for each of its tasks.
        by: Who allowed it.
        until_us: Expiry, µs since the epoch.
        reason: The reason, for the log.
        is_once: Whether it covers a single change by root, until the next poll shows it: the gate
            decides on later changes by others.
    """

    cluster: str
    job_id: int
    by: str
    until_us: int
    reason: str = ""
    is_once: bool = False


class GrantRequest(BankRecord, frozen=True):
    """Body of ``grant``: a change that Steward is about to send to slurmctld for a user.

    Attributes:
        ask: The change, with the user's uid.
        user: The user's name.
        restarts: Restart count of the run that the change is for.
    """

    ask: PluginRequest
    user: str
    restarts: int = 0


_MonotonicUs = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class ForwardedRequest(BankRecord, frozen=True):
    """A plugin's request that a gate forwards to another host's.

    Attributes:
        request: The request.
        due_us: Monotonic time of the asking host after which nobody waits for the reply, µs.
    """

    request: PluginRequest
    due_us: _MonotonicUs


class UnusedReply(BankRecord, frozen=True):
    """A reply to a submit that came too late: the job has no token, or does not exist.

    Attributes:
        cluster: The job's cluster.
        uid: The job's user.
        admin_comment: The comment in the reply, with the token of the hold.
    """

    cluster: str
    uid: int
    admin_comment: str


class ForwardedList(BankRecord, frozen=True):
    """Body that a gate posts to another host's. It answers a list: replies, or why there is none.

    Attributes:
        sent_us: Monotonic time of the asking host at which it sent the list, µs.
        due_us: The same clock's time after which nobody waits for the answer, µs.
        requests: The requests; none to ask whether the other gate decides.
        unused: Replies to earlier requests whose holds to release.
    """

    sent_us: _MonotonicUs
    due_us: _MonotonicUs
    requests: Annotated[tuple[ForwardedRequest, ...], msgspec.Meta(max_length=MAX_REQUESTS)] = ()
    unused: Annotated[tuple[UnusedReply, ...], msgspec.Meta(max_length=MAX_REQUESTS)] = ()


class TimedRequest(BankRecord, frozen=True):
    """A request of a submit plugin that asks on another host.

    Attributes:
        request: A `PluginRequest` in JSON: the gate measures the CPU time of decoding it.
        deadline: Monotonic time of this host after which nobody waits for the reply, in seconds.
    """

    request: msgspec.Raw
    deadline: float


class DecideRequest(BankRecord, frozen=True):
    """Body of ``decide``: requests of submit plugins that ask on other hosts.

    Attributes:
        requests: The requests.
        deadline: Monotonic time of this host after which nobody waits for any reply, in seconds.
        unused: Replies to earlier requests whose holds to release.
    """

    requests: tuple[TimedRequest, ...]
    deadline: float
    unused: tuple[UnusedReply, ...] = ()


class ShownJob(BankRecord, frozen=True):
    """Body of ``confirm``: a job that Slurm shows.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id; an array's for each of its tasks.
        uid: The job's user as Slurm reports it.
        admin_comment: The comment, which may hold a token.
        started: Whether it has started.
        restarts: Restart count.
    """

    cluster: str
    job_id: int
    uid: int
    admin_comment: str = ""
    started: bool = False
    restarts: int = 0


class PendingChange(BankRecord, frozen=True):
    """A change that the gate accepted and Slurm may have rejected.

    Attributes:
        job: The fields that change.
        is_of_tasks: Whether the change is for single tasks of an array.
    """

    job: JobRequest
    is_of_tasks: bool = False


class PendingChanges(BankRecord, frozen=True):
    """Descriptions that a job may have besides the one that its hold covers.

    Attributes:
        tasks: Descriptions of an array's tasks that differ from the one that the hold covers.
        of_tasks: Descriptions that updates of single tasks may have made. squeue shows a waiting
            task like its array.
        nodes: Node count that the job may request although the queue shows fewer; 0 for none.
        asked: Pending changes in their order, which no poll has shown.
    """

    tasks: tuple[JobRequest, ...] = ()
    of_tasks: tuple[JobRequest, ...] = ()
    nodes: int = 0
    asked: tuple[PendingChange, ...] = ()


class HoldRequest(BankRecord, frozen=True):
    """Body of ``place``: a queued job that needs a hold.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id; an array's for all of its tasks.
        description: The job's request; of an array the tasks that are not settled yet.
        tasks: Descriptions of an array's tasks that differ from it.
        first_submit_us: First submit time, which selects the rates, µs since the epoch; 0 for now.
        started: Whether it has started.
        mode_credit: Whether to place the hold even if the account cannot pay.
        is_exact: Whether to shrink a hold that is too large.
        starts: Start times of the array's running tasks, µs since the epoch, if the call only moves
            the other tasks' share of the hold to allocations that have not ended; None otherwise.
    """

    cluster: str
    job_id: int
    description: JobRequest
    tasks: tuple[JobRequest, ...] = ()
    first_submit_us: int = 0
    started: bool = False
    mode_credit: bool = False
    is_exact: bool = False
    starts: tuple[int, ...] | None = None


class HoldReply(BankRecord, frozen=True):
    """Reply to ``place``.

    Attributes:
        hold: The hold that covers the job; None if there is none.
        is_paid: Whether the job may run.
        why: Why it may not, for its user.
    """

    hold: Hold | None = None
    is_paid: bool = True
    why: str = ""


class AdmissionVerdict(BankRecord, frozen=True):
    """Reply to ``would``: the decision on a job as if it were submitted now.

    Attributes:
        ok: Whether the job would be accepted.
        say: The objection, even if the job would be accepted anyway.
        quote: The quote; None if the job cannot be priced.
        chosen: If the caller gave the cost, the mode that a rule sets; None if no rule does.
    """

    ok: bool
    say: str = ""
    quote: Quote | None = None
    chosen: Mode | None = None


class AccountMeans(BankRecord, frozen=True):
    """Balance, holds and limits of an account: what it can pay now.

    Attributes:
        account: The account's name.
        payer: The account whose allocations pay.
        available: Available SU, micro-SU.
        balance: Balance of the active allocations, micro-SU.
        held: SU holds, micro-SU.
        credit: The payer's credit limit, micro-SU.
        user_limit: The user's limit in the account, micro-SU; None for no limit.
        user_spent: SU that the user has spent of it, micro-SU.
        user_held: SU holds of the user's jobs, micro-SU.
        at_us: When a remote myBRC server reported the balance, µs since the epoch; 0 if none did.
    """

    account: str
    payer: str
    available: int
    balance: int
    held: int
    credit: int = 0
    user_limit: int | None = None
    user_spent: int = 0
    user_held: int = 0
    at_us: int = 0


class RemoteMeans(BankRecord, frozen=True):
    """Limits of an account that a remote myBRC server reported.

    Attributes:
        at_us: When the server reported them, µs since the epoch.
        limits: Users' limits as the server reports them, spent SU included: micro-SU by name. Other
            users are bounded by the account's balance only.
    """

    at_us: int
    limits: dict[str, int] = msgspec.field(default_factory=dict)


class AnswerCounts(BankRecord, frozen=True):
    """Counters of a gate's answers to submit plugins since it began.

    Attributes:
        admitted: Accepted requests.
        rejected: Rejected requests.
        by_policy: Requests answered by the outage policy; each also counts above.
        spent_us: Total time of the answers, from the arrival of each request, µs.
        slowest_us: Time of the slowest answer, µs.
    """

    admitted: int = 0
    rejected: int = 0
    by_policy: int = 0
    spent_us: int = 0
    slowest_us: int = 0


class HeldTotal(BankRecord, frozen=True):
    """Sum of the open holds on one paying account.

    Attributes:
        account: The account that pays.
        holds: Number of open holds.
        held: Their sum, micro-SU.
    """

    account: str
    holds: int
    held: int


class GateStatus(BankRecord, frozen=True):
    """Status of the gate.

    Attributes:
        position: Ledger position that the gate knows.
        settled: Seq of the last settlement that was applied.
        rules: Position of the rules; -1 if there are none yet.
        facts: Seq of the last fact.
        holds: Number of open holds.
        held: Their sum, micro-SU.
        pictures: Time of each cluster's model, µs since the epoch.
        deciding: Whether this gate decides; otherwise the outage policy or another gate does.
        why: Why it does not decide.
        fence: Fencing number of its lease; 0 without one.
        books_at_us: When the ledger was last heard from; 0 for never.
        asked_at_us: When a submit plugin last asked, to the minute; 0 for never.
        tally: Counters of its answers since it began.
        remote_at_us: Time of the oldest balance that a remote myBRC server reported; 0 for none.
    """

    position: int = 0
    settled: int = 0
    rules: int = -1
    facts: int = 0
    holds: int = 0
    held: int = 0
    pictures: dict[str, int] = msgspec.field(default_factory=dict)
    deciding: bool = False
    why: str = ""
    fence: int = 0
    books_at_us: int = 0
    asked_at_us: int = 0
    tally: AnswerCounts = AnswerCounts()
    remote_at_us: int = 0


class GateFact(BankRecord, frozen=True):
    """A fact that the gate reports to the journal and the ledger.

    Attributes:
        seq: Increasing number; it grows even if the gate's database is lost.
        kind: An event's kind (``hold.placed``), or ``rejection``.
        at_us: When it happened.
        cluster: The cluster; "" for facts about no job.
        hold: The change of a hold; None for a rejection.
        rejection: A rejection, or one that mode observe only records; None for others.
    """

    seq: int
    kind: str
    at_us: int
    cluster: str = ""
    hold: HoldFact | None = None
    rejection: RejectedJob | None = None


class CompletedPoll(BankRecord, frozen=True):
    """Body of ``poll``: a complete poll of a cluster's queue."""

    cluster: str
    began: datetime


class PriceRequest(BankRecord, frozen=True):
    """Body of ``would``: a question about a job that does not exist yet.

    Attributes:
        cluster: The cluster's name.
        description: The job's request.
        user: The user's name if the caller knows it; otherwise the gate looks it up.
        cost: The cost, micro-SU, if the caller computed it; the verdict is then that of mode
            ``enforce``, whatever the mode.
    """

    cluster: str
    description: JobRequest
    user: str = ""
    cost: int | None = None


class HoldQuery(BankRecord, frozen=True):
    """Body of ``holds``: which holds to list; "" and 0 for any.

    Attributes:
        changed: Whether to list only holds of jobs with a change that no poll has shown.
    """

    account: str = ""
    cluster: str = ""
    user: str = ""
    job_id: int = 0
    changed: bool = False
    after: str = ""
    limit: int = 1000


class MeansRequest(BankRecord, frozen=True):
    """Body of ``means``: an account, and a user in it."""

    account: str
    user: str = ""


class SettleRequest(BankRecord, frozen=True):
    """Body of ``settle``: charges in the ledger, and the balances that include them."""

    settlements: tuple[Settlement, ...] = ()
    books: GateBooks | None = None


class ReleaseRequest(BankRecord, frozen=True):
    """Body of ``release``: a hold to release, and the balances that show why."""

    hold: str
    why: str = ""
    books: GateBooks | None = None


class ReserveRequest(BankRecord, frozen=True):
    """Body of ``reserve``: SU that are to leave an account."""

    account: str
    amount: int
    why: str = ""
    allocation: int = 0


class LeaseRequest(BankRecord, frozen=True):
    """Body of ``lease``: the right to decide, for this many seconds."""

    fence: int
    valid_s: float
    secret: str = ""
