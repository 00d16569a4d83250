"""Record types of the ledger: accounts, allocations, transfers, charges, statements, leases.

Immutable Structs that the ledger accepts and returns: first accounts, money and reports, then
what it stores beside the money: outbox messages, API tokens, rejected and reported jobs, leases.

Amounts are micro-SU. Times are UTC and aware; names that end in ``_us`` are microseconds since
the epoch. Types that the gate shares are in ``steward.bank.records``.
"""

from datetime import datetime
from typing import Final, Literal

from steward.bank.records import AllocationShare, BankRecord, Charge, Mode

NO_ACCOUNT: Final = "(none)"
"""Account charged for jobs that have no account."""

Rollover = Literal["none", "next"]
"""What happens to the balance when an allocation ends: it expires, or moves to the next."""

TransferKind = Literal[
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
"""Kind of a transfer."""


class Authorship(BankRecord, frozen=True):
    """Author, reason and idempotency key of a change.

    Attributes:
        who: A user, or the part of Steward that acts.
        why: The reason, for people.
        key: Idempotency key chosen by the caller, so that a repeat does nothing; "" for none.
        at: Time of the change; None for now.
    """

    who: str
    why: str = ""
    key: str = ""
    at: datetime | None = None


class Account(BankRecord, frozen=True):
    """Bank account.

    Attributes:
        name: Name in lower case, as in Slurm.
        parent: Name of the account above; "" for none.
        owners: Users who manage it.
        credit_limit: Credit limit: how far below zero it may go.
        parent_pays: Whether it has no money of its own and the account above pays.
        only_listed: Whether only listed users may charge it.
        closed: Whether new charges are forbidden.
        note: Description, for people.
        known: Whether somebody created it; False if it exists only because of a charge.
        created: Time of creation.
    """

    name: str
    parent: str = ""
    owners: tuple[str, ...] = ()
    credit_limit: int = 0
    parent_pays: bool = False
    only_listed: bool = False
    closed: bool = False
    note: str = ""
    known: bool = True
    created: datetime | None = None


class Member(BankRecord, frozen=True):
    """User in an account.

    Attributes:
        account: The account.
        user: The user's name.
        limit: Spending limit of the user; None for no limit.
        spent: Amount the user has spent of the account.
        listed: Whether somebody added the user; False if only charged.
    """

    account: str
    user: str
    limit: int | None = None
    spent: int = 0
    listed: bool = True


class Allocation(BankRecord, frozen=True):
    """Service units of an account that can be spent in a period.

    Attributes:
        number: Its number.
        account: The account that owns it.
        begin: Start of the period.
        end: End of the period; None for the open-ended allocation of every account.
        rollover: What happens to the balance at the end.
        note: Description, for people.
        balance: Current balance.
        granted: Net amount received, without charges and refunds.
    """

    number: int
    account: str
    begin: datetime
    end: datetime | None = None
    rollover: Rollover = "none"
    note: str = ""
    balance: int = 0
    granted: int = 0

    def is_active(self, at: datetime) -> bool:
        """Return True if charges can use it at a time."""
        return self.begin <= at and (self.end is None or at < self.end)


class Posting(BankRecord, frozen=True):
    """Posting: the change of one allocation by a transfer.

    Attributes:
        name: ``allocation:7``, or ``issued``, ``usage``, ``expired``, ``adjusted``.
        amount: Amount added; negative for an amount removed.
        balance: Balance afterwards.
        account: Account that owns the allocation; "" for the bank's own.
        allocation: Number of the allocation; 0 for the bank's own counterparts.
    """

    name: str
    amount: int
    balance: int
    account: str = ""
    allocation: int = 0


class Transfer(BankRecord, frozen=True):
    """Ledger transaction that moved money.

    Attributes:
        number: Ascending number.
        at: Time of entry.
        kind: Kind of transfer.
        posted_by: Author.
        reason: Reason.
        key: The caller's idempotency key.
        account: The account concerned.
        user: The user concerned; "" for none.
        charge: Key of the charge it belongs to; "" for none.
        amount: Amount moved.
        postings: Its postings, which sum to zero.
    """

    number: int
    at: datetime
    kind: TransferKind
    posted_by: str = ""
    reason: str = ""
    key: str = ""
    account: str = ""
    user: str = ""
    charge: str = ""
    amount: int = 0
    postings: tuple[Posting, ...] = ()


class ChargeResult(BankRecord, frozen=True):
    """Result of posting a charge.

    Attributes:
        key: Key of the charge.
        added: Amount taken by this posting; negative if given back.
        amount: Total charged so far, less refunds.
        shares: Allocations that pay now, and how much.
        payer: Account that owns these allocations.
        overdraw: Part beyond the payer's balance and credit limit.
        transfers: Numbers of the transfers made.
        first: Whether no charge with this key existed before.
    """

    key: str
    added: int = 0
    amount: int = 0
    shares: tuple[AllocationShare, ...] = ()
    payer: str = ""
    overdraw: int = 0
    transfers: tuple[int, ...] = ()
    first: bool = False


class ChargeRow(BankRecord, frozen=True, kw_only=True):
    """Current state of a charge.

    Attributes:
        charge: The charge as last posted.
        refunded: Amount refunded by hand since.
        overdraw: Part beyond the payer's balance and credit limit.
        payer: Account that paid.
        first_at: Time of the first posting.
        last_at: Time of the last posting.
        versions: Number of postings that changed something.
    """

    charge: Charge
    refunded: int = 0
    overdraw: int = 0
    payer: str = ""
    first_at: datetime
    last_at: datetime
    versions: int = 1


class ChargeVersion(BankRecord, frozen=True, kw_only=True):
    """Posted version of a charge.

    Attributes:
        number: Version number, from 1.
        charge: The charge as posted then.
        transfers: Numbers of the transfers it made.
        added: Amount taken; negative if given back.
        at: Time of posting.
        who: Author.
        why: Reason.
    """

    number: int
    charge: Charge
    transfers: tuple[int, ...] = ()
    added: int = 0
    at: datetime
    who: str = ""
    why: str = ""


class StatementLine(BankRecord, frozen=True):
    """Line of a statement: the effect of one transfer on an account or user.

    Attributes:
        number: Number of the transfer.
        at: Time of entry.
        kind: Kind of transfer.
        posted_by: Author.
        reason: Reason.
        account: The account concerned.
        user: The user concerned.
        charge: Key of the charge it belongs to.
        amount: Amount added; negative for an amount removed.
        balance: Running balance afterwards.
        allocations: Numbers of the allocations it changed.
    """

    number: int
    at: datetime
    kind: TransferKind
    posted_by: str = ""
    reason: str = ""
    account: str = ""
    user: str = ""
    charge: str = ""
    amount: int = 0
    balance: int = 0
    allocations: tuple[int, ...] = ()


class Statement(BankRecord, frozen=True):
    """Statement of an account or of a user's jobs for a period.

    Attributes:
        account: The account; "" for all.
        user: The user; "" for all.
        begin: Start of the period; None for the beginning.
        end: End of the period; None for now.
        opening: Balance before the period.
        closing: Balance after the period.
        lines: Lines in order of time.
    """

    account: str = ""
    user: str = ""
    begin: datetime | None = None
    end: datetime | None = None
    opening: int = 0
    closing: int = 0
    lines: tuple[StatementLine, ...] = ()


class UsageRow(BankRecord, frozen=True):
    """Sum of charges for one group; columns not grouped by are "".

    Attributes:
        cluster: Cluster of the jobs.
        account: Account charged.
        user: Owner of the jobs.
        partition: Partition of the jobs.
        month: Month of the run's start, as ``2026-11``.
        day: Day of the run's start, as ``2026-11-22``.
        amount: Amount charged, less refunds.
        charges: Number of charges.
    """

    cluster: str = ""
    account: str = ""
    user: str = ""
    partition: str = ""
    month: str = ""
    day: str = ""
    amount: int = 0
    charges: int = 0


class BalanceDay(BankRecord, frozen=True):
    """Balance and spending of one day.

    Attributes:
        day: The day, as ``2026-11-22``.
        balance: Balance at the end of the day.
        spent: Amount charged for jobs that day, less refunds and corrections.
    """

    day: str
    balance: int
    spent: int


class LedgerFinding(BankRecord, frozen=True):
    """Inconsistency found by the ledger proof.

    Attributes:
        kind: Kind of inconsistency, one word.
        finding: Description, one line.
        object: The object concerned.
    """

    kind: str
    finding: str
    object: str = ""


DELIVERED: Final = 1
DEAD_LETTER: Final = 2


class OutboxItem(BankRecord, frozen=True):
    """Message to deliver to another system, with its retry state.

    Attributes:
        id: Ascending number.
        kind: Kind of message.
        key: Idempotency key within the kind; "" for none.
        payload: Content of the message.
        tries: Number of failed attempts.
        next_at: Time of the next attempt, or of the delivery.
        error: Error of the last attempt.
        done: 0 while it is pending, ``DELIVERED`` or ``DEAD_LETTER``.
    """

    id: int
    kind: str
    key: str
    payload: bytes
    next_at: datetime
    tries: int = 0
    error: str = ""
    done: int = 0

    @property
    def aside(self) -> bool:
        """Return True if it is a dead letter, retried only on request."""
        return self.done == DEAD_LETTER


class ApiToken(BankRecord, frozen=True):
    """Token of the myBRC API, stored as its digest only.

    Attributes:
        user: Owner of the token.
        digest: Digest of the token.
        created: Time of creation.
        expires: Time of expiry; None for never.
        note: Description, for people.
    """

    user: str
    digest: str
    created: datetime | None = None
    expires: datetime | None = None
    note: str = ""


class RejectedJob(BankRecord, frozen=True):
    """Job that the gate rejected, or would have rejected.

    Attributes:
        id: Unique id; a repeat is ignored.
        at: Time of the decision.
        mode: ``enforce`` if it was rejected, ``observe`` if it would have been.
        cluster: The cluster.
        uid: The submitting user's uid.
        user: That user's name; "" if unknown.
        account: Account that would pay.
        partition: Partition requested.
        job_id: Raw job id, if known.
        amount: Estimated cost.
        reason: Reason of the rejection.
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
    reason: str = ""


class ReportedJob(BankRecord, frozen=True):
    """Job reported by a client of the myBRC API.

    Attributes:
        jobslurmid: The client's id of the job.
        user: Owner of the job.
        uid: The owner's uid; -1 if unknown.
        account: Account that pays.
        status: State, in the client's words.
        partition: Partition of the job.
        amount: Cost, as last reported.
        submitted: Submit time.
        started: Start time.
        ended: End time.
        cpu_hours: CPU hours, as last reported.
        body: The whole report, read only by the API.
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


class ReportedTotals(BankRecord, frozen=True):
    """Sums over the jobs of a list.

    Attributes:
        jobs: Number of jobs.
        amount: Total cost, in micro-SU.
        cpu_hours: Total CPU hours.
    """

    jobs: int
    amount: int
    cpu_hours: float


class Lease(BankRecord, frozen=True):
    """Exclusive right to do something for a time.

    Attributes:
        name: Name of the lease.
        holder: Process that holds it.
        fence: Fencing number; grows whenever the lease is taken or released.
        until: Time of expiry, by the clock of the PostgreSQL server; on SQLite the process's.
    """

    name: str
    holder: str
    fence: int
    until: datetime
