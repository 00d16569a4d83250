"""What the ledger takes in and gives out, beside the bank's own nouns.

Amounts are micro-SU. Times are UTC and aware, those whose name ends in ``_us``
microseconds since the epoch.
"""

from datetime import datetime
from typing import Final, Literal

from steward.bank.records import Charge, Mode, Noun, Share

NO_ACCOUNT: Final = "(none)"
"""The account that jobs without one are charged to."""

Rollover = Literal["none", "next"]
"""What becomes of money that is left when an allocation ends: it expires, or moves on."""

Kind = Literal[
    "deposit",
    "withdraw",
    "transfer",
    "charge",
    "correction",
    "refund",
    "adjust",
    "expire",
    "rollover",
]
"""What a transfer is."""


class By(Noun, frozen=True):
    """Who does something, and why.

    Attributes:
        who: A user, or the part of Steward that does it.
        why: The reason, for people.
        key: A name that the caller gives it, so that a repeat does nothing; "" for none.
        at: When; now if None.
    """

    who: str
    why: str = ""
    key: str = ""
    at: datetime | None = None


class Account(Noun, frozen=True):
    """An account.

    Attributes:
        name: In lower case, as Slurm has it.
        parent: The account above; "" for none.
        owners: Users who may look after it.
        credit: What it may owe.
        draws_on_parent: Whether it has no money of its own, but the account above pays.
        only_listed: Whether only listed users may charge it.
        closed: Whether nothing may be charged to it any more.
        note: What it is, for people.
        known: Whether somebody created it; not if something was merely charged to its name.
        created: When it came to be.
    """

    name: str
    parent: str = ""
    owners: tuple[str, ...] = ()
    credit: int = 0
    draws_on_parent: bool = False
    only_listed: bool = False
    closed: bool = False
    note: str = ""
    known: bool = True
    created: datetime | None = None


class Member(Noun, frozen=True):
    """A user in an account.

    Attributes:
        account: The account.
        user: The user's name.
        limit: What the user may spend of it; None for no limit.
        spent: What the user has spent of it.
        listed: Whether somebody named the user; not if something was merely charged.
    """

    account: str
    user: str
    limit: int | None = None
    spent: int = 0
    listed: bool = True


class Allocation(Noun, frozen=True):
    """Money of an account that can be drawn on for a time.

    Attributes:
        number: Its number.
        account: Whose it is.
        begin: When it can be drawn on.
        end: When no more; None for the open-ended one that every account has.
        rollover: What becomes of what is left then.
        note: What it is, for people.
        balance: What is left in it.
        given: All that came in but for what went out again, charges and refunds aside.
    """

    number: int
    account: str
    begin: datetime
    end: datetime | None = None
    rollover: Rollover = "none"
    note: str = ""
    balance: int = 0
    given: int = 0

    def active(self, at: datetime) -> bool:
        """Whether it can be drawn on at a time."""
        return self.begin <= at and (self.end is None or at < self.end)


class Entry(Noun, frozen=True):
    """One side of a transfer.

    Attributes:
        pot: ``allocation:7``, or ``issued``, ``usage``, ``expired``, ``adjusted``.
        amount: What came in; negative for what went out.
        balance: What the pot held afterwards.
        account: Whose pot it is; "" for the bank's own.
        allocation: Number of the allocation; 0 for the bank's own pots.
    """

    pot: str
    amount: int
    balance: int
    account: str = ""
    allocation: int = 0


class Transfer(Noun, frozen=True):
    """Money that moved.

    Attributes:
        number: Grows with each.
        at: When it was entered.
        kind: What it is.
        who: Who did it.
        why: Why.
        key: The caller's name for it.
        account: The account that it is about.
        user: The user whom it is about; "" for none.
        charge: Key of the charge that it belongs to; "" for none.
        amount: How much moved.
        entries: Its sides, whose sum is zero.
    """

    number: int
    at: datetime
    kind: Kind
    who: str = ""
    why: str = ""
    key: str = ""
    account: str = ""
    user: str = ""
    charge: str = ""
    amount: int = 0
    entries: tuple[Entry, ...] = ()


class Charged(Noun, frozen=True):
    """What a charge came to.

    Attributes:
        key: The charge's.
        added: What was taken beyond what had been; negative for what was given back.
        amount: What it comes to altogether, refunds taken off.
        shares: Which allocations pay that now.
        payer: The account whose allocations these are.
        overdraw: The part of it that went beyond the payer's means.
        transfers: Numbers of the transfers made.
        first: Whether there was no charge of that key before.
    """

    key: str
    added: int = 0
    amount: int = 0
    shares: tuple[Share, ...] = ()
    payer: str = ""
    overdraw: int = 0
    transfers: tuple[int, ...] = ()
    first: bool = False


class ChargeRow(Noun, frozen=True, kw_only=True):
    """A charge as it stands.

    Attributes:
        charge: As it was last posted.
        refunded: What was given back by hand since.
        overdraw: The part of it that went beyond the payer's means.
        payer: The account that paid.
        first_at: When it was first posted.
        last_at: When it was last posted.
        versions: How often it was posted with something new.
    """

    charge: Charge
    refunded: int = 0
    overdraw: int = 0
    payer: str = ""
    first_at: datetime
    last_at: datetime
    versions: int = 1


class ChargeVersion(Noun, frozen=True, kw_only=True):
    """A charge as it once was.

    Attributes:
        number: 1 for the first.
        charge: What was posted.
        transfers: Numbers of the transfers that it made.
        added: What that took, or gave back.
        at: When.
        who: Who posted it.
        why: Why.
    """

    number: int
    charge: Charge
    transfers: tuple[int, ...] = ()
    added: int = 0
    at: datetime
    who: str = ""
    why: str = ""


class StatementLine(Noun, frozen=True):
    """A line of a statement: what one transfer did to an account, or for a user.

    Attributes:
        number: Of the transfer.
        at: When it was entered.
        kind: What it is.
        who: Who did it.
        why: Why.
        account: The account that it is about.
        user: The user whom it is about.
        charge: Key of the charge that it belongs to.
        amount: What came in; negative for what went out.
        balance: The running total after it.
        allocations: The allocations that it touched.
    """

    number: int
    at: datetime
    kind: Kind
    who: str = ""
    why: str = ""
    account: str = ""
    user: str = ""
    charge: str = ""
    amount: int = 0
    balance: int = 0
    allocations: tuple[int, ...] = ()


class Statement(Noun, frozen=True):
    """What happened to an account's money, or by a user's jobs, in a period.

    Attributes:
        account: The account; "" for all.
        user: The user; "" for all.
        begin: From when on; None for the beginning.
        end: Until when; None for now.
        opening: The total before.
        closing: The total after.
        lines: In order.
    """

    account: str = ""
    user: str = ""
    begin: datetime | None = None
    end: datetime | None = None
    opening: int = 0
    closing: int = 0
    lines: tuple[StatementLine, ...] = ()


class UsageRow(Noun, frozen=True):
    """What was charged, summed up; what was not grouped by is "".

    Attributes:
        cluster: Where it ran.
        account: Who paid.
        user: Whose it was.
        partition: Where it ran.
        month: ``2026-11``, of the run's start.
        day: ``2026-11-22``, of the run's start.
        amount: What was charged, refunds taken off.
        charges: How many charges.
    """

    cluster: str = ""
    account: str = ""
    user: str = ""
    partition: str = ""
    month: str = ""
    day: str = ""
    amount: int = 0
    charges: int = 0


class CourseDay(Noun, frozen=True):
    """How an account's money stood at the end of a day.

    Attributes:
        day: ``2026-11-22``.
        balance: What was there.
        spent: What jobs were charged that day, refunds and corrections taken off.
    """

    day: str
    balance: int
    spent: int


class Finding(Noun, frozen=True):
    """Something that the proof of the ledger found to be wrong.

    Attributes:
        kind: What sort of thing, a word.
        what: One line.
        where: The object that it is about.
    """

    kind: str
    what: str
    where: str = ""


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
