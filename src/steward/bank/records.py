"""The bank's nouns, which ledger, gate, prices and views share.

Amounts are micro-SU. Times are UTC and aware, but for those whose name ends in
``_us``: µs since the epoch. TRES go by Slurm's names (``cpu``, ``mem``, ``node``,
``gres/gpu``, ``gres/gpu:a100``, ``license/matlab``, ``billing``), ``mem`` in MiB.
"""

from datetime import datetime
from typing import Final, Literal

import msgspec

Mode = Literal["off", "observe", "gate"]
"""How much the bank enforces: nothing, on paper only, by refusing."""

Origin = Literal["submit", "queue", "transfer"]
"""Where a hold comes from: the submit plugin, the second gate, money that leaves an account."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all of them have in common: keyword-only, immutable, short when written."""


class Description(Noun, frozen=True):
    """What a job asks for, as slurmctld hands it to a submit plugin: job_desc_msg_t.

    The wire carries it as it is; what the submitter left unset is left out.
    Source of the fields: ``slurm/slurm.h``.

    Attributes:
        uid: job_desc->user_id, never the submitting uid.
        job_id: Of a job that is updated; 0 at submit.
        partition: Names with commas between; "" for the default one.
        time_limit_min: In minutes; -1 for unlimited; None where unset.
        min_cpus: All CPUs, as sbatch reckons them.
        pn_min_cpus: ``--mincpus``.
        pn_min_memory_mib: ``--mem``; 0 means all of a node's.
        mem_per_cpu_mib: ``--mem-per-cpu``.
        exclusive: ``--exclusive`` in any of its forms.
        array: The task expression: ``0-9:2%4``.
        begin_us: ``--begin``; 0 for now.
        held: Submitted held (priority 0).
        released: Of an update: it gives a held job a priority, as ``scontrol release`` does.
        het: Whether it is a component of a heterogeneous job.
        tres_per_job: ``--gpus`` and its like, as Slurm writes them (``gres/gpu:a100:2``).
        admin_comment: May carry our token.
        burst_buffers: TRES of its burst buffers (``bb/lua=10240M``), once Slurm's queue shows
            them: submit plugins are asked before Slurm reads a job's directives.
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
"""Fields of a :class:`Description` that request GRES by name."""


class Factor(Noun, frozen=True):
    """A time of the week at which a rate is another.

    Attributes:
        days: Days of the week, Monday is 0.
        begin_min: Minutes after midnight, in the cluster's zone.
        end_min: Minutes after midnight, beyond ``begin_min``; 1440 for the day's end.
        permille: What prices are multiplied with, in thousandths.
    """

    days: tuple[int, ...]
    begin_min: int
    end_min: int
    permille: int


class Rate(Noun, frozen=True):
    """What one partition's jobs cost that are first submitted from a time on.

    Attributes:
        number: Its number in the ledger; 0 for one that is in none.
        cluster: The cluster's name.
        partition: The partition's name; ``*`` for every one that has no rate of its own.
        qos: Only under this QOS; "" for all that have no rate of their own.
        valid_from: For jobs whose first submit is not before.
        created_us: When it was entered; 0 for one that is in no ledger.
        weights: micro-SU for a TRES' unit and hour; of ``mem`` and ``bb/NAME`` for a GiB and hour.
        combine: Whether the weighted TRES are added, or the dearest counts.
        minimum: What a run costs at the least.
        whole_nodes: Whether nodes are charged whole, as in an exclusive partition.
        factors: Times at which it costs more or less.
        qos_permille: By QOS, what prices are multiplied with, in thousandths.
        ends_permille: By final state (``NODE_FAIL``), the part that is charged, in thousandths.
        free: Whether it costs nothing, written down as such.
        note: Why it is so, for people.
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
    factors: tuple[Factor, ...] = ()
    qos_permille: dict[str, int] = {}
    ends_permille: dict[str, int] = {}
    free: bool = False
    note: str = ""


class Use(Noun, frozen=True):
    """What is priced: an allocation of TRES for a time.

    Attributes:
        tres: Amounts by name; ``mem`` in MiB.
        start: When it began.
        seconds: How long it lasted or may last, without what is not charged.
        qos: Its QOS.
        state: Its final state; "" for what is still to come.
        least: What it costs at the least, where other pieces of the run count towards that;
            None for the rate's minimum.
    """

    tres: dict[str, int]
    start: datetime | None = None
    seconds: int = 0
    qos: str = ""
    state: str = ""
    least: int | None = None


class PriceLine(Noun, frozen=True):
    """One line of a sum that people can follow."""

    what: str
    amount: int | None = None


class Price(Noun, frozen=True):
    """What something costs, and how that came about.

    Attributes:
        amount: The sum, rounded once.
        rate: Number of the rate.
        lines: The way to it.
    """

    amount: int
    rate: int = 0
    lines: tuple[PriceLine, ...] = ()


class Quote(Noun, frozen=True):
    """What a job may cost at the most.

    Attributes:
        amount: Of the whole job, all tasks of an array.
        account: Who is to pay.
        partition: The dearest of those it may run in.
        qos: The QOS it was priced under.
        rate: Number of the rate.
        time_s: How long it may hold its resources, with Slurm's grace.
        tres: What it may be given at the most.
        tasks: How many array tasks; 1 for a job that is none.
        per_task: Of one task.
        at_once: How many tasks may run at once.
        lines: How it came about.
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


class AllocationBooks(Noun, frozen=True):
    """An allocation as the gate knows it.

    Attributes:
        number: In the ledger.
        balance: What is left in it, open holds not taken off; an account's open-ended one
            may be below zero.
        begin_us: When it can be drawn on.
        end_us: When it ends; 0 for never.
        total: What it was given altogether.
    """

    number: int
    balance: int
    begin_us: int = 0
    end_us: int = 0
    total: int = 0


class UserBooks(Noun, frozen=True):
    """A user in an account.

    Attributes:
        name: The user's name.
        limit: What the user may spend of the account; None for no limit.
        spent: What the user has spent of it.
    """

    name: str
    limit: int | None = None
    spent: int = 0


class AccountBooks(Noun, frozen=True):
    """An account as the gate knows it.

    Attributes:
        name: In lower case, as Slurm has it.
        payer: The account whose allocations are drawn on: itself, or one of its parents.
        credit: What it may owe.
        closed: Whether nothing may be charged to it any more.
        allocations: Its own.
        users: Those who have a limit in it, or have spent.
        only_listed: Whether only ``users`` may charge it.
        owners: Who looks after it: whom its users may ask.
    """

    name: str
    payer: str = ""
    credit: int = 0
    closed: bool = False
    allocations: tuple[AllocationBooks, ...] = ()
    users: tuple[UserBooks, ...] = ()
    only_listed: bool = False
    owners: tuple[str, ...] = ()


class Books(Noun, frozen=True):
    """The accounts that have changed, or all of them.

    Attributes:
        seq: Position of the ledger that they show; news of an earlier one is passed over.
        accounts: The accounts.
        whole: Whether these are all accounts there are.
        after: Of which position on it holds every change.
    """

    seq: int
    accounts: tuple[AccountBooks, ...] = ()
    whole: bool = False
    after: int = 0


class ModeRule(Noun, frozen=True):
    """The mode of a part of the cluster; the rule that names most goes first."""

    mode: Mode
    cluster: str = ""
    partition: str = ""
    account: str = ""


class Rules(Noun, frozen=True):
    """What the gate decides by, beside its settings.

    Attributes:
        seq: Grows with every change.
        modes: Where several apply: account before partition before cluster.
        rates: Every rate there is.
    """

    seq: int
    modes: tuple[ModeRule, ...] = ()
    rates: tuple[Rate, ...] = ()


class Share(Noun, frozen=True):
    """The part of a hold or charge that one allocation pays."""

    allocation: int
    amount: int


class Hold(Noun, frozen=True):
    """Money that is spoken for.

    Attributes:
        id: Its own; part of the token.
        origin: Where it comes from.
        cluster: Of the job.
        job_id: The raw id, an array's for all of its tasks; 0 until it is known.
        account: Who pays.
        uid: The job's user.
        user: The user's name; "" where it is not known.
        amount: What was held at first.
        remaining: What still is.
        shares: Which allocations are to pay ``remaining``.
        confirmed: Whether Slurm has shown the job.
        started: Whether it has started: its allocations then stay.
        created_us: When it was placed.
        expires_us: When it is voided unless it is confirmed; 0 for never.
        quote: What it covers; None for what is no job's.
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
    shares: tuple[Share, ...] = ()
    confirmed: bool = False
    started: bool = False
    created_us: int = 0
    expires_us: int = 0
    quote: Quote | None = None


class Settlement(Noun, frozen=True):
    """A charge's effect on the hold that covers it; the gate takes them in order.

    Attributes:
        seq: Its place in that order.
        hold: Id of the hold.
        charge: Key of the charge; "" where only something is given back.
        amount: What was charged.
        frees: What of the hold the run, or the array's task, needs no more: the larger of
            this and ``amount`` is taken off.
        final: Whether nothing more will be charged to it: all that remains is given back.
    """

    seq: int
    hold: str
    charge: str = ""
    amount: int = 0
    frees: int = 0
    final: bool = False


class Charge(Noun, frozen=True):
    """What a run, or a piece of one, cost.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id.
        first_submit: With cluster and job_id, the job's identity.
        restarts: With those, the run's.
        piece_us: Of a resized job's former size the end of that piece; 0 for a run's last.
        account: Who pays.
        user: Whose job it was.
        partition: Where it ran.
        amount: What it costs altogether; what was charged before is taken off.
        use: What was priced.
        rate: Number of the rate.
        hold: Id of the hold that covers it; "" for none.
        shares: Which allocations are to pay, as the hold had it; beyond them those that were
            there when the run started, in the order of their end.
        overdraw: Whether it was let through, and may take the account below its means.
        why: What it is: ``end``, ``piece``, ``correction``, ``backfill``, ``reconcile``.
        source: Whose word it is: ``jobs``, ``sacct``, ``mybrc``.
        told: Of a job that another program told of, and whose id and submit time are not
            known, the name that it gave; it then stands for both.
        facts: Digest of what Slurm's record said when it was priced; see
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
    use: Use | None = None
    rate: int = 0
    hold: str = ""
    shares: tuple[Share, ...] = ()
    overdraw: bool = True
    why: str = "end"
    source: str = "jobs"
    told: str = ""
    facts: str = ""
    whole: bool = False

    @property
    def key(self) -> str:
        """What tells it from every other charge."""
        if self.told:
            return f"{self.cluster}/told/{self.told}"
        first = int(self.first_submit.timestamp())
        return f"{self.cluster}/{self.job_id}/{first}/{self.restarts}/{self.piece_us}"
