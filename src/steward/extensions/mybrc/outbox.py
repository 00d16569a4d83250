"""What a myBRC server elsewhere is to be told, put into the ledger's outbox.

It goes there in the transaction that makes it true, so nothing is told that
did not happen, nothing that happened is forgotten, and nobody waits for it.
"""

import logging
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.billing import REVOKED, charged_before, is_charged
from steward.bank.consumer import cursor_name
from steward.bank.enforcement import has_started
from steward.bank.ledger import ChargeRow
from steward.bank.records import Charge, Hold
from steward.bank.remote import TOLD, RemoteBank, own_charges
from steward.bank.scheduled_work import BANK
from steward.core.config import Settings
from steward.core.events import QUEUE_LOOKED, RUN_END, RUN_START, Event
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import moment
from steward.core.usage import RunFact
from steward.jobs import Jobs, database_path
from steward.slurm.job_states import base_state
from steward.slurm.users import People

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


KIND: Final = "mybrc"
"""Of such things in the outbox."""


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job as a server elsewhere knows it.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id, which is its name there.
        first_submit: When it was first submitted.
        account: Who pays.
        uid: Whose it is; -1 where nobody knew when it was queued, and it is asked again.
        partition: Where it is to run, or ran.
        qos: Its QOS.
        state: Its state, in Slurm's word.
        start: When it started.
        end: When it ended.
        cpus: How many CPUs it has; 0 where that is not known.
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


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to tell.

    Attributes:
        op: ``hold``, a running job and its hold; ``change``, the job's cost for its account so
            far, which is read from the ledger when it is sent: the last message is the right
            one, whatever the order.
        told: The job.
        amount: Of a hold, micro-SU.
    """

    op: Literal["hold", "change"]
    told: Told
    amount: int = 0


def describe(payload: bytes) -> str:
    """Say in a few words what a message in the outbox tells."""
    message = msgspec.json.decode(payload, type=Message)
    told = message.told
    what = "the hold of" if message.op == "hold" else "what it costs:"
    return f"{what} job {told.job_id} of cluster {told.cluster}, account {told.account}"


def told_hold(t: "Transaction", told: Told, amount: int) -> None:
    """Queue the hold of a running job, once for each job; array tasks have no hold of their own.

    A server stores a job without a start time and counts no usage for it. The final
    PUT then subtracts an amount that the server never added. So a job needs a start time.

    Args:
        t: The transaction.
        told: The job, which has a start time.
        amount: What is held, micro-SU.
    """
    if told.start is None:
        return
    first = int(told.first_submit.timestamp())
    key = f"hold/{told.cluster}/{told.job_id}/{first}"
    _put(t, Message(op="hold", told=told, amount=amount), key)


def told_change(t: "Transaction", told: Told) -> None:
    """Queue the cost of a job so far: it was charged, or its hold released.

    Args:
        t: The transaction, after the charge in it.
        told: The job.
    """
    _put(t, Message(op="change", told=told), "")


def _put(t: "Transaction", message: Message, key: str) -> None:
    if not message.told.account:
        return  # the API knows no job without one
    t.outbox.put(KIND, msgspec.json.encode(message), key=key)


log = logging.getLogger(__name__)

_ACTS: Final = 500
_UNMARKED: Final = 10_000
"""So many acts that concern nobody elsewhere are read anew after a restart."""


class Noticing:
    """Puts corrections into the outbox.

    Args:
        settings: The whole configuration.
        ledger: What is read, and where the outbox is.
        owners: Whose jobs are.

    Raises:
        LedgerUnavailable: The ledger's database is away.
    """

    def __init__(self, settings: Settings, ledger: "Ledger", owners: "Owners") -> None:
        self._ledger = ledger
        self._clusters = frozenset(settings.cluster)
        self._owners = owners
        self._name = f"{cursor_name(settings)}.corrections"
        with ledger.transaction() as t:
            known = t.mark(self._name)
            if not known:
                # What was corrected before anybody was to be told is what they know already.
                known = str(t.seq)
                t.set_mark(self._name, known)
        self._position = self._marked = int(known)

    def turn(self) -> None:
        """Put what was corrected since the last time into the outbox.

        Raises:
            LedgerUnavailable: The ledger's database is away.
        """
        while True:
            with self._ledger.reading() as t:
                found = t.charges.changed(self._position, _ACTS)
                upto = found[-1][0] if len(found) == _ACTS else t.seq
                began = moment(int(t.mark("began") or 0))
                # What the end of a run brings about for the first time is told by its event.
                corrected = [row for _, who, row in found if who != BANK or row.versions > 1]
                told = list(self._to_tell(t, corrected, began))
            if told or upto - self._marked >= _UNMARKED:
                with self._ledger.transaction() as t:
                    for one in told:
                        told_change(t, one)
                    t.set_mark(self._name, str(upto))
                self._marked = upto
            self._position = upto
            if len(found) < _ACTS:
                return

    def _to_tell(
        self, t: "Transaction", rows: Iterable[ChargeRow], began: datetime
    ) -> Iterator[Told]:
        jobs: dict[tuple[str, int, datetime], set[str]] = {}
        for row in rows:
            one = row.charge
            if (
                one.source == TOLD
                or one.cluster not in self._clusters
                or _end_of_charge(one) < began
            ):
                continue
            accounts = jobs.setdefault((one.cluster, one.job_id, one.first_submit), set())
            # Who paid before has to be told that it is theirs no more.
            accounts.update(each.charge.account for each in t.charges.versions(one.key))
        for (cluster, job_id, first), accounts in jobs.items():
            own = [
                row.charge
                for row in t.charges.of_job(cluster, job_id, first)
                if row.charge.source != TOLD
            ]
            last = max(own, key=_order)
            uid = self._owners.uid(last)
            told = _told_of_charge(last, -1 if uid is None else uid)
            # Last whom it belongs to: that is how the job stands.
            for account in sorted(accounts, key=lambda name: (name == last.account, name)):
                yield msgspec.structs.replace(told, account=account)


class Owners:
    """Whose jobs are: by jobs.db, else by their users' names.

    Args:
        state_dir: Where jobs.db is.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = database_path(state_dir)
        self._people = People()
        self._jobs: Jobs | None = None

    def uid(self, charge: Charge) -> int | None:
        """The uid of the user of a job that was charged; None where nobody knows it."""
        try:
            if self._jobs is None:
                self._jobs = Jobs(self._path)
            facts = self._jobs.run_facts(charge.cluster, [charge.job_id])
        except SqliteUnavailable as error:
            log.debug("whose job %d was is told by its name: %s", charge.job_id, error)
            facts = []
        for fact in facts:
            if fact.first_submit == charge.first_submit and fact.record.uid is not None:
                return fact.record.uid
        return int(charge.user) if charge.user.isdecimal() else self._people.uid(charge.user)

    def close(self) -> None:
        """Let go of jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def _told_of_charge(charge: Charge, uid: int) -> Told:
    """A job as its last charge knows it."""
    use = charge.use
    start = use.start if use is not None else None
    return Told(
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
    """When it ended, as far as the charge says that."""
    use = charge.use
    if use is None or use.start is None:
        return charge.first_submit
    return use.start + timedelta(seconds=use.seconds)


def _order(charge: Charge) -> tuple[int, datetime]:
    return charge.restarts, _end_of_charge(charge)


def relay(
    t: "Transaction",
    events: Iterable[tuple[Event, Hold | None]],
    began: datetime,
) -> None:
    """Put into the outbox what events mean for the server elsewhere.

    Args:
        t: The transaction that charges them.
        events: The events, each with its job's open hold.
        began: When the bank was first started.
    """
    for event, hold in events:
        if event.kind == QUEUE_LOOKED or not _is_ours(event, began):
            continue
        told = _told_of_event(event)
        if told is None:
            continue
        record: JobRecord = event.body.record
        if event.kind == RUN_END:
            _relay_end(t, event.cluster, event.body, told)
        elif hold is not None and not record.array_job_id and _is_running(event):
            told_hold(t, told, hold.amount)


def _relay_end(t: "Transaction", cluster: str, fact: RunFact, told: Told) -> None:
    """Have the end of a run told, under the name that its charge has."""
    if not is_charged(fact):
        told_change(t, told)
        return
    charge = charged_before(fact, own_charges(t, cluster, fact.job_id))
    if charge is not None:
        told_change(t, msgspec.structs.replace(told, first_submit=charge.first_submit))


def _is_running(event: Event) -> bool:
    # Slurm gives pending jobs a start time, too: the one that it expects.
    return event.kind == RUN_START or has_started(event.body.record)


def _is_ours(event: Event, began: datetime) -> bool:
    """Whether it is the bank's to say what that costs."""
    if event.kind != RUN_END:
        return True
    record: JobRecord = event.body.record
    if event.body.source or (record.end or event.at) < began:
        return False
    # A job that a federation ran elsewhere has the same number there.
    return base_state(record.state) not in REVOKED


def _told_of_event(event: Event) -> Told | None:
    record, fact = event.body.record, event.body
    first = fact.first_submit if isinstance(fact, RunFact) else record.submit
    if first is None or record.uid is None or (record.restarts and first is record.submit):
        return None
    return Told(
        cluster=event.cluster,
        job_id=record.job_id,
        first_submit=first,
        account=record.account.lower(),
        uid=record.uid,
        partition=record.partition,
        qos=record.qos,
        state=record.state,
        start=record.start,
        end=record.end,
        cpus=record.cpus or 0,
    )


REMOTE_BANK: Final = RemoteBank(relay=relay, describe=describe)
"""What tells a myBRC server."""
