"""Compares what was charged with Slurm's own records, and corrects the ledger.

It is done every minute for what ended of late, every hour for the last day, for all
that could not be priced when it ended, and at somebody's order for any time.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.gate.link import GateLink
from steward.bank.ledger import By
from steward.bank.live import pricing_of
from steward.bank.reckoning import SACCT, Due, Reckoning
from steward.bank.records import Charge
from steward.bank.settling import Pricing
from steward.bank.told_charges import own_charges
from steward.core.config import Settings
from steward.core.timestamps import micros, moment
from steward.jobs import Jobs, database_path
from steward.slurm.client import Slurm
from steward.slurm.errors import SlurmError

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger, Transaction

log = logging.getLogger(__name__)

WHO: Final = "reconcile"
"""Who corrects, in the ledger's books."""

GRACE: Final = timedelta(minutes=2)
"""What ended less than this ago is still on its way here."""

OVERLAP: Final = timedelta(minutes=10)
"""So much is looked at twice: slurmdbd may be told late."""

FAR: Final = timedelta(days=1)
"""So much is looked at once more every hour, and when the bank has been away.

What slurmctld could not tell slurmdbd for hours, and ends that an operator writes into it
for jobs that slurmctld forgot, come with times that were compared long ago.
"""

_FAR_EVERY: Final = timedelta(hours=1)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or piece of one, that was not charged what Slurm's records come to.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id.
        first_submit: With cluster and job_id, the job's identity.
        restarts: With those, the run's.
        account: Who pays.
        user: Whose job it was.
        charged: What was charged, micro-SU; None for nothing.
        due: What is to be, micro-SU; None where nothing says what it costs.
        why: What is different.
        source: Whose record tells it: ``jobs`` or ``sacct``.
        done: Whether the ledger was corrected.
    """

    cluster: str
    job_id: int
    first_submit: datetime
    restarts: int = 0
    account: str = ""
    user: str = ""
    charged: int | None = None
    due: int | None = None
    why: str = ""
    source: str = "jobs"
    done: bool = False


class Compared(msgspec.Struct, frozen=True):
    """What a comparison that the bank made by itself came to.

    Attributes:
        at_us: When it was made, µs since the epoch.
        differences: How many runs were not charged what they are due.
        corrected: How many of them were put right.
    """

    at_us: int
    differences: int
    corrected: int


def reconcile(
    settings: Settings,
    ledger: "Ledger",
    link: GateLink | None,
    cluster: str,
    since: datetime | None,
    *,
    is_dry: bool,
    now: datetime,
) -> list[Difference]:
    """Compare a cluster's charges with Slurm's records, and correct them.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        link: The way to the gate, which is told of what changed; None where there is none.
        cluster: The cluster's name.
        since: What ended at this time or later; the last day if None, and never what ended
            before the bank began.
        is_dry: Whether to say only what would be corrected.
        now: The present moment.

    Raises:
        LedgerUnavailable: The ledger's database is away.
        SqliteUnavailable: There is no jobs.db yet.
        SlurmError: slurmdbd does not answer.
    """
    with ledger.reading() as t:
        began = moment(int(t.mark("began") or 0))
    start = max(since or now - FAR, began)
    pricing = pricing_of(settings, ledger, cluster)
    with _jobs(settings) as jobs:
        found = compare(ledger, jobs, cluster, pricing, (start, now), is_dry=is_dry)
        found += with_slurmdbd(
            settings, ledger, jobs, cluster, pricing, (start, now), is_dry=is_dry
        )
    if link is not None and not is_dry and found:
        with ledger.reading() as t:
            books = t.books(after_seq=link.state().position)
        link.books(books)
    return found


def compare(
    ledger: "Ledger",
    jobs: Jobs,
    cluster: str,
    pricing: Pricing,
    period: tuple[datetime, datetime],
    *,
    is_dry: bool = False,
) -> list[Difference]:
    """Compare charges with what jobs.db knows of the runs that ended in a period.

    Raises:
        LedgerUnavailable, SqliteUnavailable: One of the two is away.
    """
    reckoning = Reckoning(cluster, jobs, pricing, lambda job_id: charges(ledger, cluster, job_id))
    return settle(ledger, cluster, reckoning.of_jobs(*period), why="reconcile", is_dry=is_dry)


def with_slurmdbd(
    settings: Settings,
    ledger: "Ledger",
    jobs: Jobs,
    cluster: str,
    pricing: Pricing,
    period: tuple[datetime, datetime],
    *,
    is_dry: bool = False,
) -> list[Difference]:
    """The same with slurmdbd's records, where there is a slurmdbd.

    Raises:
        SlurmError: slurmdbd does not answer.
        LedgerUnavailable, SqliteUnavailable: One of the two is away.
    """
    of = settings.cluster.get(cluster)
    if of is None or of.remote or not of.asks_slurm:
        return []
    slurm = Slurm(cluster, of)
    history = slurm.history()
    if history is None:
        return []
    reckoning = Reckoning(cluster, jobs, pricing, lambda job_id: charges(ledger, cluster, job_id))
    due = reckoning.of_slurmdbd(history, *period, slurm.people)
    return settle(ledger, cluster, due, why="reconcile", is_dry=is_dry)


def charges(ledger: "Ledger", cluster: str, job_id: int) -> list[Charge]:
    """The charges under a raw job id that are Steward's own.

    Raises:
        LedgerUnavailable: The ledger's database is away.
    """
    with ledger.reading() as t:
        return own_charges(t, cluster, job_id)


def settle(
    ledger: "Ledger",
    cluster: str,
    due: Iterator[Due],
    *,
    why: str,
    is_dry: bool,
    only_new: bool = False,
) -> list[Difference]:
    """Post what is due and was not charged so; say what that was.

    With ``only_new`` what was charged already stays as it is, whatever it was charged.

    Raises:
        LedgerUnavailable: The ledger's database is away.
    """
    found: list[Difference] = []
    for one in due:
        if one.charge is None:
            found.append(_difference(cluster, one, None, one.unpriced))
            continue
        with ledger.reading() as t:
            row = t.charges.get(one.charge.key)
        before = row.charge if row else None
        if before is not None and (only_new or not _differs(before, one.charge)):
            continue
        reason = _reason(before, one.charge)
        if not is_dry:
            _post(ledger, one.charge, before, why, reason)
        found.append(_difference(cluster, one, before, reason, done=not is_dry))
    return found


def _differs(before: Charge, due: Charge) -> bool:
    if before.source == SACCT and due.source != SACCT:
        return False  # slurmdbd was asked because jobs.db did not know
    return (before.amount, before.account) != (due.amount, due.account)


def _post(ledger: "Ledger", due: Charge, before: Charge | None, why: str, reason: str) -> None:
    charge = msgspec.structs.replace(due, why=why)
    if before is not None:
        charge = msgspec.structs.replace(charge, hold=before.hold, shares=before.shares)
    with ledger.transaction() as t:
        t.charges.charge(charge, By(who=WHO if why == "reconcile" else why, why=reason))


def _reason(before: Charge | None, due: Charge) -> str:
    said = "slurmdbd's record" if due.source == SACCT else "its record"
    if before is None:
        return f"it was not charged; {said} says what it used"
    if before.account != due.account:
        return f"{said} has account {due.account}, {before.account} was charged"
    parts = [f"by {said}"]
    if before.use is not None and due.use is not None:
        if before.use.seconds != due.use.seconds:
            parts.append(f"{due.use.seconds} s instead of {before.use.seconds} s")
        if before.use.tres != due.use.tres:
            parts.append("other resources")
        if before.use.state != due.use.state:
            parts.append(f"{due.use.state} instead of {before.use.state}")
    if before.rate != due.rate:
        parts.append(f"rate {due.rate} instead of {before.rate}")
    return ", ".join(parts)


def _difference(
    cluster: str, due: Due, before: Charge | None, why: str, *, done: bool = False
) -> Difference:
    fact = due.fact
    return Difference(
        cluster=cluster,
        job_id=fact.job_id,
        first_submit=fact.first_submit,
        restarts=fact.restarts,
        account=fact.record.account.lower(),
        user=fact.record.user,
        charged=None if before is None else before.amount,
        due=None if due.charge is None else due.charge.amount,
        why=why,
        source=due.source,
        done=done,
    )


def mark_unpriced(t: "Transaction", cluster: str, at: datetime) -> None:
    """Note that something that ended then could not be priced: to be looked at again."""
    before = t.mark(_unpriced(cluster))
    if not before or int(before) > micros(at):
        t.set_mark(_unpriced(cluster), str(micros(at)))


class Reconciling:
    """The comparison that the bank's process makes by itself.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        pricing: What a cluster's charges are reckoned by.
    """

    def __init__(
        self, settings: Settings, ledger: "Ledger", pricing: Callable[[str], Pricing]
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._pricing = pricing
        self._jobs: Jobs | None = None
        self._rules: dict[str, int] = {}
        self._said: dict[str, str] = {}
        self._far: dict[str, datetime] = {}

    def turn(self, cluster: str, began: datetime, now: datetime, rules: int) -> None:
        """Compare what ended since the last turn.

        Args:
            cluster: The cluster's name.
            began: When the bank began: what ended before is not its to charge.
            now: The present moment.
            rules: Position of the rules: where they changed, what had no rate may have one.

        Raises:
            LedgerUnavailable, SqliteUnavailable: The ledger or jobs.db is away.
        """
        with self._ledger.reading() as t:
            marks = [t.mark(_reconciled(cluster)), t.mark(_reconciled_by_sacct(cluster))]
            unpriced = t.mark(_unpriced(cluster))
        until = now - GRACE
        is_far = now - self._far.get(cluster, moment(0)) >= _FAR_EVERY
        least = now - FAR if is_far else until
        since, since_by_sacct = (
            max(began, min(moment(int(mark)) - OVERLAP, least) if mark else began) for mark in marks
        )
        is_again = bool(unpriced) and self._rules.get(cluster) != rules
        start = max(began, min(since, moment(int(unpriced)))) if is_again else since
        if min(start, since_by_sacct) >= until:
            return
        if self._jobs is None:
            self._jobs = Jobs(database_path(self._settings.state_dir))
        pricing = self._pricing(cluster)
        found = compare(self._ledger, self._jobs, cluster, pricing, (start, until))
        by_sacct = self._with_slurmdbd(cluster, pricing, (since_by_sacct, until))
        found += by_sacct or []
        for one in found:
            if one.done:
                log.warning(
                    "cluster %s: job %d is charged %s micro-SU, not %s: %s",
                    *(cluster, one.job_id, one.due, one.charged or 0, one.why),
                )
        is_left = any(one.due is None for one in found)
        said = Compared(micros(now), len(found), sum(one.done for one in found))
        with self._ledger.transaction() as t:
            t.set_mark(_reconciled(cluster), str(micros(until)))
            t.set_mark(_compared(cluster), msgspec.json.encode(said).decode())
            if by_sacct is not None:
                t.set_mark(_reconciled_by_sacct(cluster), str(micros(until)))
            if is_again and not is_left:
                t.set_mark(_unpriced(cluster), "")
        self._rules[cluster] = rules
        if is_far:
            self._far[cluster] = now

    def _with_slurmdbd(
        self, cluster: str, pricing: Pricing, period: tuple[datetime, datetime]
    ) -> list[Difference] | None:
        """What slurmdbd has otherwise; None where it does not answer: it is asked again then."""
        assert self._jobs is not None, "it was opened by the turn"
        try:
            found = with_slurmdbd(
                *(self._settings, self._ledger, self._jobs, cluster, pricing, period)
            )
        except SlurmError as error:
            # Its mark stays where it is, so that the next turn asks for the same time.
            if self._said.get(cluster) != str(error):
                log.warning("charges are not compared with slurmdbd: %s", error)
            self._said[cluster] = str(error)
            return None
        self._said.pop(cluster, None)
        return found

    def close(self) -> None:
        """Let go of jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


@contextmanager
def _jobs(settings: Settings) -> Iterator[Jobs]:
    jobs = Jobs(database_path(settings.state_dir))
    try:
        yield jobs
    finally:
        jobs.close()


def last_comparison(t: "Transaction", cluster: str) -> "tuple[Compared | None, int, int]":
    """The last comparison, and up to when jobs.db and slurmdbd were compared, in µs; 0 for never.

    Args:
        t: The ledger's transaction.
        cluster: The cluster's name.
    """
    said = t.mark(_compared(cluster))
    return (
        msgspec.json.decode(said, type=Compared) if said else None,
        int(t.mark(_reconciled(cluster)) or 0),
        int(t.mark(_reconciled_by_sacct(cluster)) or 0),
    )


def _compared(cluster: str) -> str:
    return f"compared:{cluster}"


def _reconciled(cluster: str) -> str:
    return f"reconciled:{cluster}"


def _reconciled_by_sacct(cluster: str) -> str:
    return f"reconciled.sacct:{cluster}"


def _unpriced(cluster: str) -> str:
    return f"unpriced:{cluster}"
