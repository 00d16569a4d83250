"""What the ledger keeps beside the money: what is to be told, tokens, refusals, leases.

Amounts are micro-SU, times UTC and aware.
"""

from datetime import datetime

from steward.bank.records import Mode, Noun


class OutboxItem(Noun, frozen=True):
    """Something that is to be told elsewhere.

    Attributes:
        id: Its number; what came first has the lower.
        kind: What it is.
        key: Its name among those of the kind; "" for none.
        payload: What is to be told.
        tries: How often that failed.
        next_at: Not to be tried before.
        error: Why it failed last.
        aside: Whether it is not tried any more until somebody asks for it.
    """

    id: int
    kind: str
    key: str = ""
    payload: bytes = b""
    tries: int = 0
    next_at: datetime | None = None
    error: str = ""
    aside: bool = False


class Token(Noun, frozen=True):
    """A token of the myBRC API: its digest, never itself.

    Attributes:
        user: Whose it is.
        digest: What tells it from others.
        created: When it was given.
        expires: When it ends; None for never.
        note: For people.
    """

    user: str
    digest: str
    created: datetime | None = None
    expires: datetime | None = None
    note: str = ""


class Refusal(Noun, frozen=True):
    """A job that was refused, or would have been.

    Attributes:
        id: Its own; a repeat is passed over.
        at: When.
        mode: ``gate`` if it was refused, ``observe`` if it would have been.
        cluster: Where.
        uid: Who submitted.
        user: That user's name; "" where it is not known.
        account: Which account was to pay.
        partition: For which partition.
        job_id: The raw job id, where it is known.
        amount: What it may have cost.
        why: The reason.
    """

    id: str
    at: datetime
    mode: Mode = "observe"
    cluster: str = ""
    uid: int = -1
    user: str = ""
    account: str = ""
    partition: str = ""
    job_id: int = 0
    amount: int = 0
    why: str = ""


class ToldJob(Noun, frozen=True):
    """A job that a client of the myBRC API told of.

    Attributes:
        jobslurmid: The client's name for it.
        user: Whose job it is.
        uid: That user's number; -1 where it is not known.
        account: Who pays.
        status: Its state, as the client puts it.
        partition: Where it runs.
        amount: What it costs, as last told.
        submitted: When it was submitted.
        started: When it started.
        ended: When it ended.
        cpu_hours: Hours of CPU that it had, as last told.
        body: All that was told, for the API alone to read.
    """

    jobslurmid: str
    user: str = ""
    uid: int = -1
    account: str = ""
    status: str = ""
    partition: str = ""
    amount: int = 0
    submitted: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    cpu_hours: float = 0.0
    body: bytes = b""


class ToldTotals(Noun, frozen=True):
    """Sums over the jobs that a list is of.

    Attributes:
        jobs: How many there are.
        amount: What they cost, micro-SU.
        cpu_hours: Hours of CPU that they had.
    """

    jobs: int
    amount: int
    cpu_hours: float


class Lease(Noun, frozen=True):
    """The right to be the only one who does something, for a time.

    Attributes:
        name: What it is about.
        holder: Who has it.
        fence: Grows whenever another takes it.
        until: When it ends, by the database's clock.
    """

    name: str
    holder: str
    fence: int
    until: datetime
