"""Record types of the bank, shared by ledger, gate and prices: rates, quotes, holds, charges.

Immutable Structs, in reading order: a job's request (:class:`JobRequest`), prices (:class:`Rate`,
:class:`ResourceUse`, :class:`Price`, :class:`Quote`), what the ledger sends to the gate
(:class:`GateBooks`, :class:`BankRules`), and :class:`Hold`, :class:`Settlement`, :class:`Charge`.

Amounts are micro-SU. Times are UTC and aware; names that end in ``_us`` are microseconds since
the epoch. TRES have Slurm's names (``cpu``, ``mem``, ``node``, ``gres/gpu``, ``gres/gpu:a100``,
``license/matlab``, ``billing``), ``mem`` in MiB.
"""

from datetime import datetime
from typing import Final, Literal

import msgspec

Mode = Literal["off", "observe", "enforce"]
"""Mode of the bank: only charge jobs; also hold SU and record rejections; also reject jobs."""

Origin = Literal["submit", "queue", "transfer"]
"""Origin of a hold: the submit plugin, the check of queued jobs, or a withdrawal."""


class BankRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the bank's records: keyword-only, immutable, defaults omitted when encoded."""


class JobRequest(BankRecord, frozen=True):
    """Job request as slurmctld hands it to a submit plugin (job_desc_msg_t).

    It is sent to the gate in this form; fields that the submitter left unset are omitted.
    Source of the fields: ``slurm/slurm.h``.

    Attributes:
        uid: job_desc->user_id, never the submitting uid.
        job_id: Id of a job that is updated; 0 at submit.
        partition: Names separated by commas; "" for the default partition.
        time_limit_min: In minutes; -1 for unlimited; None if unset.
        min_cpus: Total number of CPUs, as sbatch computes it.
        pn_min_cpus: ``--mincpus``.
        pn_min_memory_mib: ``--mem``; 0 means all memory of a node.
        mem_per_cpu_mib: ``--mem-per-cpu``.
        exclusive: ``--exclusive`` in any of its forms.
        array: The task expression: ``0-9:2%4``.
        begin_us: ``--begin``; 0 for now.
        held: Whether it is submitted held (priority 0).
        released: Whether an update gives a held job a priority, as ``scontrol release`` does.
        het: Whether it is a component of a heterogeneous job.
        tres_per_job: ``--gpus`` and similar, as Slurm writes them (``gres/gpu:a100:2``).
        admin_comment: May carry Steward's token.
        burst_buffers: TRES of its burst buffers (``bb/lua=10240M``), once Slurm's queue shows
            them: Slurm calls submit plugins before it reads a job's directives.
        cron: Whether it is a scrontab job.
    """

    uid: int
    job_id: int = 0
    account: str = ""
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    time_limit_min: int | None = None
    time_min_min: int | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    num_tasks: int | None = None
    cpus_per_task: int | None = None
    min_cpus: int | None = None
    max_cpus: int | None = None
    pn_min_cpus: int | None = None
    pn_min_memory_mib: int | None = None
    mem_per_cpu_mib: int | None = None
    ntasks_per_node: int | None = None
    ntasks_per_socket: int | None = None
    ntasks_per_core: int | None = None
    ntasks_per_tres: int | None = None
    sockets_per_node: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    core_spec: int | None = None
    exclusive: bool = False
    overcommit: bool = False
    array: str = ""
    begin_us: int = 0
    held: bool = False
    released: bool = False
    het: bool = False
    cron: bool = False
    req_nodes: str = ""
    features: str = ""
    licenses: str = ""
    tres_per_job: str = ""
    tres_per_node: str = ""
    tres_per_socket: str = ""
    tres_per_task: str = ""
    cpus_per_tres: str = ""
    mem_per_tres: str = ""
    burst_buffers: str = ""
    admin_comment: str = ""


GRES_FIELDS: Final = ("tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task")
"""Fields of a :class:`JobRequest` that request GRES by name."""


class TimeFactor(BankRecord, frozen=True):
    """Factor on prices during a time of the week.

    Attributes:
        days: Days of the week; Monday is 0.
        begin_min: Start, in minutes after midnight in the cluster's time zone.
        end_min: End, in minutes after midnight, later than ``begin_min``; 1440 for midnight.
        permille: The factor, in thousandths.
    """

    days: tuple[int, ...]
    begin_min: int
    end_min: int
    permille: int


class Rate(BankRecord, frozen=True):
    """Price of a partition's jobs that are first submitted from a time on.

    Attributes:
        number: Number in the ledger; 0 if not stored.
        cluster: The cluster's name.
        partition: The partition's name; ``*`` for every partition without its own rate.
        qos: Only for this QOS; "" for all without their own rate.
        valid_from: Earliest first submit time of the jobs.
        created_us: Time of creation; 0 if not stored in a ledger.
        weights: micro-SU per unit of a TRES and hour; for ``mem`` and ``bb/NAME`` per GiB and hour.
        combine: Whether to add the weighted TRES, or to take only the most expensive.
        minimum: Minimum price of a run.
        whole_nodes: Whether nodes are charged whole, as in an exclusive partition.
        factors: Factors by time of the week.
        qos_permille: Factor by QOS, in thousandths.
        ends_permille: Factor by final state (``NODE_FAIL``), in thousandths.
        free: Whether jobs are explicitly free.
        note: Reason, for people.
    """

    number: int = 0
    cluster: str = ""
    partition: str = "*"
    qos: str = ""
    valid_from: datetime | None = None
    created_us: int = 0
    weights: dict[str, int] = {}
    combine: Literal["sum", "max"] = "sum"
    minimum: int = 0
    whole_nodes: bool = False
    factors: tuple[TimeFactor, ...] = ()
    qos_permille: dict[str, int] = {}
    ends_permille: dict[str, int] = {}
    free: bool = False
    note: str = ""


class ResourceUse(BankRecord, frozen=True):
    """Resource use to price: TRES for a period of time.

    Attributes:
        tres: Amounts by name; ``mem`` in MiB.
        start: Start of the period.
        seconds: Actual or highest possible duration, without time that is not charged.
        qos: Its QOS.
        state: Its final state; "" if it has not ended.
        least: Minimum price, if other pieces of the run count towards it; None for the rate's
            minimum.
    """

    tres: dict[str, int]
    start: datetime | None = None
    seconds: int = 0
    qos: str = ""
    state: str = ""
    least: int | None = None


class PriceLine(BankRecord, frozen=True):
    """Step of a price computation, for people."""

    description: str
    amount: int | None = None


class Price(BankRecord, frozen=True):
    """Price of resource use, with its computation.

    Attributes:
        amount: The price, rounded once.
        rate: Number of the rate.
        lines: Steps of the computation.
    """

    amount: int
    rate: int = 0
    lines: tuple[PriceLine, ...] = ()


class Quote(BankRecord, frozen=True):
    """Quote: the highest price a job may have.

    Attributes:
        amount: Price of the whole job, all tasks of an array.
        account: Account that pays.
        partition: The most expensive partition it may run in.
        qos: QOS it was priced under.
        rate: Number of the rate.
        time_s: Longest time it may hold its resources, including Slurm's grace period.
        tres: Highest possible allocation.
        tasks: Number of array tasks; 1 if it is not an array.
        per_task: Price of one task.
        at_once: Number of tasks that may run at once.
        lines: Steps of the computation.
    """

    amount: int
    account: str = ""
    partition: str = ""
    qos: str = ""
    rate: int = 0
    time_s: int = 0
    tres: dict[str, int] = {}
    tasks: int = 1
    per_task: int = 0
    at_once: int = 1
    lines: tuple[PriceLine, ...] = ()


class AllocationBooks(BankRecord, frozen=True):
    """Allocation as the gate knows it.

    Attributes:
        number: Number in the ledger.
        balance: Balance without regard to open holds; only an account's open-ended allocation
            may be below zero.
        begin_us: Start of the period.
        end_us: End of the period; 0 for never.
        total: Net amount received.
    """

    number: int
    balance: int
    begin_us: int = 0
    end_us: int = 0
    total: int = 0


class UserBooks(BankRecord, frozen=True):
    """User of an account as the gate knows them.

    Attributes:
        name: The user's name.
        limit: Spending limit of the user; None for no limit.
        spent: Amount the user has spent of the account.
    """

    name: str
    limit: int | None = None
    spent: int = 0


class AccountBooks(BankRecord, frozen=True):
    """Account as the gate knows it.

    Attributes:
        name: Name in lower case, as in Slurm.
        payer: Account whose allocations pay: itself, or one of its ancestors.
        credit: Credit limit.
        closed: Whether new charges are forbidden.
        allocations: Its own allocations.
        users: Users who have a limit or have spent.
        only_listed: Whether only ``users`` may charge it.
        owners: Users who manage it, named to users in rejections.
    """

    name: str
    payer: str = ""
    credit: int = 0
    closed: bool = False
    allocations: tuple[AllocationBooks, ...] = ()
    users: tuple[UserBooks, ...] = ()
    only_listed: bool = False
    owners: tuple[str, ...] = ()


class GateBooks(BankRecord, frozen=True):
    """Accounts that changed, or all accounts, as sent from the ledger to the gate.

    Attributes:
        seq: Position of the ledger; the gate ignores data of an earlier one.
        accounts: The accounts.
        whole: Whether these are all accounts.
        after: Position since which it contains every change.
    """

    seq: int
    accounts: tuple[AccountBooks, ...] = ()
    whole: bool = False
    after: int = 0


class ModeRule(BankRecord, frozen=True):
    """Mode of a cluster, partition or account; the most specific rule applies."""

    mode: Mode
    cluster: str = ""
    partition: str = ""
    account: str = ""


class BankRules(BankRecord, frozen=True):
    """Modes and rates by which the gate decides, in addition to its settings.

    Attributes:
        seq: Sequence number that grows with every change.
        modes: Mode rules; account goes before partition before cluster.
        rates: All rates.
    """

    seq: int
    modes: tuple[ModeRule, ...] = ()
    rates: tuple[Rate, ...] = ()


class AllocationShare(BankRecord, frozen=True):
    """Part of a hold or charge that one allocation pays."""

    allocation: int
    amount: int


class Hold(BankRecord, frozen=True):
    """SU hold: service units reserved for a job, or for a withdrawal.

    Attributes:
        id: Unique id; part of the token.
        origin: What placed it.
        cluster: Cluster of the job.
        job_id: Raw job id, of an array for all of its tasks; 0 until known.
        account: Account that pays.
        uid: The job owner's uid.
        user: The job owner's name; "" if unknown.
        amount: Amount held at first.
        remaining: Amount still held.
        shares: Allocations that are to pay ``remaining``.
        confirmed: Whether Slurm has shown the job.
        started: Whether the job has started: its allocations then stay the same.
        created_us: Time it was placed.
        expires_us: Time it expires unless confirmed; 0 for never.
        quote: The quote it covers; None if it is not for a job.
    """

    id: str
    origin: Origin = "submit"
    cluster: str = ""
    job_id: int = 0
    account: str = ""
    uid: int = -1
    user: str = ""
    amount: int = 0
    remaining: int = 0
    shares: tuple[AllocationShare, ...] = ()
    confirmed: bool = False
    started: bool = False
    created_us: int = 0
    expires_us: int = 0
    quote: Quote | None = None


class Settlement(BankRecord, frozen=True):
    """Effect of a charge on its hold; the gate applies settlements in order.

    Attributes:
        seq: Sequence number.
        hold: Id of the hold.
        charge: Key of the charge; "" if SU are only released.
        amount: Amount charged.
        frees: Amount that the run or array task no longer needs: the larger of this and
            ``amount`` is deducted from the hold.
        final: Whether this is the last settlement: the hold's remainder is released.
    """

    seq: int
    hold: str
    charge: str = ""
    amount: int = 0
    frees: int = 0
    final: bool = False


class Charge(BankRecord, frozen=True):
    """Charge: the price of a run, or of a piece of one.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id.
        first_submit: First submit time; with cluster and job_id, the job's identity.
        restarts: Restart count; with those, the run's identity.
        piece_us: For a former size of a resized job, the end of that piece; 0 for the last.
        account: Account that pays.
        user: Owner of the job.
        partition: Partition it ran in.
        amount: Total price; posting deducts what was charged before.
        use: The use that was priced.
        rate: Number of the rate.
        hold: Id of the hold that covers it; "" for none.
        shares: Allocations that pay first, from the hold; then those active when the run
            started, in the order of their end.
        overdraw: Whether it may exceed the account's balance and credit limit.
        why: Reason: ``end``, ``piece``, ``correction``, ``backfill``, ``reconcile``.
        source: Source of the record: ``jobs``, ``sacct``, ``mybrc``.
        told: Name of the job given by another program that reported it without id and submit
            time; it then replaces both in the key.
        facts: Fingerprint of Slurm's record when it was priced; see
            :mod:`steward.bank.billing`.
        whole: Whether its nodes were charged whole.
    """

    cluster: str
    job_id: int
    first_submit: datetime
    restarts: int = 0
    piece_us: int = 0
    account: str = ""
    user: str = ""
    partition: str = ""
    amount: int = 0
    use: ResourceUse | None = None
    rate: int = 0
    hold: str = ""
    shares: tuple[AllocationShare, ...] = ()
    overdraw: bool = True
    why: str = "end"
    source: str = "jobs"
    told: str = ""
    facts: str = ""
    whole: bool = False

    @property
    def key(self) -> str:
        """Return the idempotency key, unique for every charge."""
        if self.told:
            return f"{self.cluster}/told/{self.told}"
        submit_s = int(self.first_submit.timestamp())
        return f"{self.cluster}/{self.job_id}/{submit_s}/{self.restarts}/{self.piece_us}"


def parse_charge_key(key: str) -> tuple[str, int, int] | None:
    """Return cluster, raw job id and first submit time (Unix seconds) of a charge's key.

    None if another program named the job: its name may hold anything, slashes too.
    """
    cluster, *numbers = key.split("/")
    if len(numbers) != 4 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    return cluster, int(numbers[0]), int(numbers[1])


class ChargeDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Run, or piece of one, whose charge differs from Slurm's records.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id.
        restarts: Restart count, which tells the runs of a job apart.
        account: Account that pays.
        user: Owner of the job.
        charged: Amount charged, in micro-SU; None for nothing.
        recomputed: Amount due, in micro-SU; None if no rate applies.
        reason: Cause of the difference.
        source: Source of the record: ``jobs`` or ``sacct``.
        done: Whether the ledger was corrected.
    """

    cluster: str
    job_id: int
    restarts: int = 0
    account: str = ""
    user: str = ""
    charged: int | None = None
    recomputed: int | None = None
    reason: str = ""
    source: str = ""
    done: bool = False
