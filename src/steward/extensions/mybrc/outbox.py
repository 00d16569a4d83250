"""Outbox messages for a myBRC server elsewhere: holds of running jobs, and costs of ended ones.

Messages are written in the ledger transaction that makes them true, so none is false, none is lost,
and no caller waits for the server; ``remote`` sends them. :func:`queue_hold` and
:func:`queue_change` write one, :func:`describe` describes one for people.

:class:`CorrectionScan` queues messages for later corrections of charges, with :class:`JobOwners` to
find the uid. :func:`queue_events` queues messages for job events; the bank calls it through
:data:`REMOTE_BANK`.
"""

import logging
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.billing import REVOKED_STATES, find_charge, is_charged
from steward.bank.consumer import name_cursor
from steward.bank.enforcement import has_started
from steward.bank.ledger import ChargeRow
from steward.bank.records import Charge, Hold
from steward.bank.remote import REPORTED_SOURCE, RemoteBank, list_own_charges
from steward.bank.schedule import BANK_AUTHOR
from steward.core.config import Settings
from steward.core.events import QUEUE_POLLED, RUN_END, RUN_START, Event
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import from_micros
from steward.core.usage import RunEvent
from steward.jobs import Jobs, database_path
from steward.slurm.job_states import strip_state_suffix
from steward.slurm.users import NameResolver

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


MYBRC_KIND: Final = "mybrc"
"""Kind of these messages in the outbox."""


class RemoteJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Job as the server elsewhere knows it.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id, which is its name there.
        first_submit: Time of the first submission.
        account: Account that pays.
        uid: Uid of the job owner; -1 where it was unknown at queueing, and is looked up again.
        partition: Partition requested or used.
        qos: Its QOS.
        state: Its state, in Slurm's word.
        start: Start time.
        end: End time.
        cpus: Number of CPUs; 0 where unknown.
    """

    cluster: str
    job_id: int
    first_submit: datetime
    account: str
    uid: int
    partition: str = ""
    qos: str = ""
    state: str = ""
    start: datetime | None = None
    end: datetime | None = None
    cpus: int = 0


class RemoteMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message to the server.

    Attributes:
        op: ``hold``, a running job and its hold; ``change``, the job's cost for its account so
            far, which is read from the ledger when the message is sent: so the last message is
            the right one, in whatever order they were queued.
        told: The job.
        amount: The hold in micro-SU.
    """

    op: Literal["hold", "change"]
    told: RemoteJob
    amount: int = 0


def describe(payload: bytes) -> str:
    """Describe an outbox message in a few words."""
    message = msgspec.json.decode(payload, type=RemoteMessage)
    job = message.told
    subject = "the hold of" if message.op == "hold" else "the charge of"
    return f"{subject} job {job.job_id} of cluster {job.cluster}, account {job.account}"


def queue_hold(t: "Transaction", job: RemoteJob, amount: int) -> None:
    """Queue the hold of a running job, once for each job; array tasks have no hold of their own.

    A server stores a job without a start time and counts no usage for it. The final PUT then
    subtracts an amount that the server never added. So a job needs a start time.

    Args:
        t: The transaction.
        job: The job, which has a start time.
        amount: The hold in micro-SU.
    """
    if job.start is None:
        return
    first_submit_s = int(job.first_submit.timestamp())
    key = f"hold/{job.cluster}/{job.job_id}/{first_submit_s}"
    _queue_message(t, RemoteMessage(op="hold", told=job, amount=amount), key)


def queue_change(t: "Transaction", job: RemoteJob) -> None:
    """Queue the cost of a job so far, after a charge or the release of its hold.

    Args:
        t: The transaction, after the charge in it.
        job: The job.
    """
    _queue_message(t, RemoteMessage(op="change", told=job), "")


def _queue_message(t: "Transaction", message: RemoteMessage, key: str) -> None:
    """Write a message to the outbox, unless its job has no account."""
    if not message.told.account:
        return  # the API requires an account
    t.outbox.add(MYBRC_KIND, msgspec.json.encode(message), key=key)


log = logging.getLogger(__name__)

_READ_TRANSACTIONS: Final = 500
"""Charges read at once."""
_MAX_UNSAVED: Final = 10_000
"""Transactions without a message that may be read again after a restart."""


class CorrectionScan:
    """Scanner that queues a message for each charge that was corrected after its run's end.

    A comparison with Slurm's records, a late rate and a refund are transactions in the ledger. They
    are read here in order, so that code that corrects charges need not know of the server.

    Args:
        settings: The whole configuration.
        ledger: Ledger to scan, which also holds the outbox.
        owners: Finds the uids of job owners.

    Raises:
        LedgerUnavailable: The ledger's database is away.
    """

    def __init__(self, settings: Settings, ledger: "Ledger", owners: "JobOwners") -> None:
        self._ledger = ledger
        self._clusters = frozenset(settings.cluster)
        self._owners = owners
        self._mark_name = f"{name_cursor(settings)}.corrections"
        with ledger.transaction() as t:
            position = t.read_mark(self._mark_name)
            if not position:
                # Corrections from before the remote bank was configured are known to the server.
                position = str(t.seq)
                t.set_mark(self._mark_name, position)
        self._position = self._saved_position = int(position)

    def scan(self) -> None:
        """Queue messages for the corrections since the last call.

        Raises:
            LedgerUnavailable: The ledger's database is away.
        """
        while True:
            with self._ledger.reading() as t:
                changes = t.charges.list_changed(self._position, _READ_TRANSACTIONS)
                end_position = changes[-1][0] if len(changes) == _READ_TRANSACTIONS else t.seq
                bank_start = from_micros(int(t.read_mark("began") or 0))
                # The first charge at a run's end is reported by its event.
                corrected = [
                    row for _, author, row in changes if author != BANK_AUTHOR or row.versions > 1
                ]
                jobs = list(self._find_changed_jobs(t, corrected, bank_start))
            if jobs or end_position - self._saved_position >= _MAX_UNSAVED:
                with self._ledger.transaction() as t:
                    for job in jobs:
                        queue_change(t, job)
                    t.set_mark(self._mark_name, str(end_position))
                self._saved_position = end_position
            self._position = end_position
            if len(changes) < _READ_TRANSACTIONS:
                return

    def _find_changed_jobs(
        self, t: "Transaction", rows: Iterable[ChargeRow], bank_start: datetime
    ) -> Iterator[RemoteJob]:
        """Yield the jobs of corrected charges, once for each account that ever paid."""
        jobs: dict[tuple[str, int, datetime], set[str]] = {}
        for row in rows:
            charge = row.charge
            if (
                charge.source == REPORTED_SOURCE
                or charge.cluster not in self._clusters
                or _end_of_charge(charge) < bank_start
            ):
                continue
            accounts = jobs.setdefault((charge.cluster, charge.job_id, charge.first_submit), set())
            # The server must learn that a former payer no longer pays.
            accounts.update(
                version.charge.account for version in t.charges.list_versions(charge.key)
            )
        for (cluster, job_id, first_submit), accounts in jobs.items():
            own_charges = [
                row.charge
                for row in t.charges.list_of_job(cluster, job_id, first_submit)
                if row.charge.source != REPORTED_SOURCE
            ]
            last_charge = max(own_charges, key=_charge_sort_key)
            uid = self._owners.find_uid(last_charge)
            job = _job_from_charge(last_charge, -1 if uid is None else uid)
            # The present payer comes last, because the last message is what the server keeps.
            for account in sorted(accounts, key=lambda name: (name == last_charge.account, name)):
                yield msgspec.structs.replace(job, account=account)


class JobOwners:
    """Job owners' uids: from jobs.db, otherwise by user name.

    Args:
        state_dir: Directory of jobs.db.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = database_path(state_dir)
        self._name_resolver = NameResolver()
        self._jobs: Jobs | None = None

    def find_uid(self, charge: Charge) -> int | None:
        """Return the uid of a charged job's user; None where it is unknown."""
        try:
            if self._jobs is None:
                self._jobs = Jobs(self._path)
            facts = self._jobs.list_run_events(charge.cluster, [charge.job_id])
        except SqliteUnavailable as error:
            log.debug(
                "cannot resolve the owner of job %d, sending the user name: %s",
                charge.job_id,
                error,
            )
            facts = []
        for fact in facts:
            if fact.first_submit == charge.first_submit and fact.record.uid is not None:
                return fact.record.uid
        return int(charge.user) if charge.user.isdecimal() else self._name_resolver.uid(charge.user)

    def close(self) -> None:
        """Close jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def _job_from_charge(charge: Charge, uid: int) -> RemoteJob:
    """Build a job from its last charge."""
    use = charge.use
    start = use.start if use is not None else None
    return RemoteJob(
        cluster=charge.cluster,
        job_id=charge.job_id,
        first_submit=charge.first_submit,
        account=charge.account,
        uid=uid,
        partition=charge.partition,
        qos=use.qos if use is not None else "",
        state=use.state if use is not None else "",
        start=start,
        end=_end_of_charge(charge) if start is not None else None,
        cpus=use.tres.get("cpu", 0) if use is not None else 0,
    )


def _end_of_charge(charge: Charge) -> datetime:
    """Return the end of a charge's run, or the submit time where the run has no start."""
    use = charge.use
    if use is None or use.start is None:
        return charge.first_submit
    return use.start + timedelta(seconds=use.seconds)


def _charge_sort_key(charge: Charge) -> tuple[int, datetime]:
    """Return the sort key of a job's charges: run, then end."""
    return charge.restarts, _end_of_charge(charge)


def queue_events(
    t: "Transaction",
    events: Iterable[tuple[Event, Hold | None]],
    bank_start: datetime,
) -> None:
    """Queue messages for the events of one transaction: running jobs, and ends of runs.

    The hold of a pending job is not sent: the server counts jobs from their start time. Nothing is
    sent of a run that is not this bank's to charge (it ended before the bank's first start, was
    imported, or ran on another cluster of a federation), since the server may know its cost; nor of
    a run without a charge yet: its hold stays at the server until it is charged.

    Args:
        t: The transaction that charges the events.
        events: The events, each with its job's open hold.
        bank_start: Time of the bank's first start.
    """
    for event, hold in events:
        if event.kind == QUEUE_POLLED or not _is_billed_here(event, bank_start):
            continue
        job = _job_from_event(event)
        if job is None:
            continue
        record: JobRecord = event.body.record
        if event.kind == RUN_END:
            _queue_run_end(t, event.cluster, event.body, job)
        elif hold is not None and not record.array_job_id and _is_running(event):
            queue_hold(t, job, hold.amount)


def _queue_run_end(t: "Transaction", cluster: str, run: RunEvent, job: RemoteJob) -> None:
    """Queue the end of a run, under the first submit time of its charge."""
    if not is_charged(run):
        queue_change(t, job)
        return
    charge = find_charge(run, list_own_charges(t, cluster, run.job_id))
    if charge is not None:
        queue_change(t, msgspec.structs.replace(job, first_submit=charge.first_submit))


def _is_running(event: Event) -> bool:
    """Return True if the event's job has started."""
    # Slurm gives pending jobs a start time, too: the expected one.
    return event.kind == RUN_START or has_started(event.body.record)


def _is_billed_here(event: Event, bank_start: datetime) -> bool:
    """Return True if the bank decides the cost of the event's job."""
    if event.kind != RUN_END:
        return True
    record: JobRecord = event.body.record
    if event.body.source or (record.end or event.at) < bank_start:
        return False
    # A federation ran the job on another cluster, under the same number.
    return strip_state_suffix(record.state) not in REVOKED_STATES


def _job_from_event(event: Event) -> RemoteJob | None:
    """Build a job from an event; None where its first submit time or uid is unknown."""
    record, body = event.body.record, event.body
    first_submit = body.first_submit if isinstance(body, RunEvent) else record.submit
    if (
        first_submit is None
        or record.uid is None
        or (record.restarts and first_submit is record.submit)
    ):
        return None
    return RemoteJob(
        cluster=event.cluster,
        job_id=record.job_id,
        first_submit=first_submit,
        account=record.account.lower(),
        uid=record.uid,
        partition=record.partition,
        qos=record.qos,
        state=record.state,
        start=record.start,
        end=record.end,
        cpus=record.cpus or 0,
    )


REMOTE_BANK: Final = RemoteBank(relay=queue_events, describe=describe)
"""Registration of the myBRC client with the bank."""
