"""Reconciliation of charges with Slurm's records: jobs.db and slurmdbd.

- :class:`DueCharges` computes what runs are due by the records.
- :func:`reconcile_cluster` compares a cluster on request and corrects the ledger.
- :class:`RegularReconciliation` does so in the bank's process: for new ends at every turn, for the
  last day every hour, and for runs without a rate whenever rates change.

jobs.db takes precedence: when a finished job was requeued, it knows which end of a run counts,
while slurmdbd has the second one. slurmdbd adds what nobody observed: runs that began and ended
while Steward was down, ends without a time. ``backfill.py`` charges earlier runs by the same means.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.billing import (
    Pricing,
    compute_charge,
    find_charge,
    is_charged,
    is_piece_of,
    match_earlier_charge,
)
from steward.bank.errors import NoRate
from steward.bank.gate.client import GateClient
from steward.bank.gate_sync import load_pricing
from steward.bank.ledger import Authorship
from steward.bank.money import format_money
from steward.bank.records import Charge, ChargeDifference
from steward.bank.remote import list_own_charges
from steward.core.config import Settings
from steward.core.principals import RECONCILIATION
from steward.core.records import JobRecord
from steward.core.timestamps import from_micros, to_micros, to_micros_or_zero
from steward.core.usage import RunEvent
from steward.jobs import Jobs, database_path
from steward.slurm.client import Slurm
from steward.slurm.errors import SlurmError
from steward.slurm.job_states import RESIZING, strip_state_suffix
from steward.slurm.sacct import SacctHistory, parse_job_row
from steward.slurm.slurmdbd import merge_resized_runs
from steward.slurm.users import NameResolver

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


SACCT_SOURCE: Final = "sacct"
"""Source of a charge that follows slurmdbd's record."""
_JOBS_SOURCE: Final = "jobs"
_CHUNK: Final = 200
"""Number of runs handled at once."""
_SLACK_US: Final = 2_000_000
"""Tolerance between times of jobs.db and slurmdbd, in microseconds."""


class NoJobsListed(SlurmError):
    """slurmdbd lists no job of a period in which runs ended."""


class DueCharge(msgspec.Struct, frozen=True, kw_only=True):
    """Run, or piece of one, with the charge it is due.

    Attributes:
        fact: The run.
        charge: The charge due; None if no rate applies.
        unpriced: Why no rate applies.
        source: Source of the record: ``jobs`` or ``sacct``.
    """

    fact: RunEvent
    charge: Charge | None = None
    unpriced: str = ""
    source: str = _JOBS_SOURCE


ChargeLookup = Callable[[int], Sequence[Charge]]
"""Function that returns the charges under a raw job id."""


class DueCharges:
    """Computation of the charges that runs of one cluster are due.

    Args:
        cluster: The cluster's name.
        jobs: The job records of jobs.db.
        pricing: Inputs of charges.
        find_charges: Returns the charges under a job id.
        with_imported: Whether to include runs known only from an import of other records.
    """

    def __init__(
        self,
        cluster: str,
        jobs: Jobs,
        pricing: Pricing,
        find_charges: ChargeLookup,
        *,
        with_imported: bool = False,
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._pricing = pricing
        self._find_charges = find_charges
        self._with_imported = with_imported

    def iter_from_jobs(self, since: datetime, until: datetime) -> Iterator[DueCharge]:
        """Compute what is due for the runs in jobs.db that ended in a period."""
        after = (0, 0)
        while True:
            lines = self._jobs.list_ended_runs(
                since, until, self._cluster, limit=_CHUNK, after=after
            )
            if not lines:
                return
            after = lines[-1].end_us, lines[-1].job_id
            wanted = {(line.job_id, line.end_us) for line in lines}
            facts = self._jobs.list_run_events(self._cluster, {line.job_id for line in lines})
            for job_id, job_runs in _group_facts_by_job(facts).items():
                pieces: list[Charge] = list(self._find_charges(job_id))
                for fact in job_runs:
                    due = self._compute_due(fact, pieces)
                    if due is None:
                        continue
                    if due.charge is not None and due.charge.piece_us:
                        pieces.append(due.charge)
                    if (job_id, to_micros_or_zero(fact.record.end)) in wanted:
                        yield due

    def iter_from_slurmdbd(
        self, history: SacctHistory, since: datetime, until: datetime, people: NameResolver
    ) -> Iterator[DueCharge]:
        """Compute what is due by slurmdbd for runs that jobs.db lacks, or lacks times of.

        For runs that jobs.db has, it adds suspended time that nobody observed.

        Raises:
            SlurmError: slurmdbd does not answer.
            NoJobsListed: It lists no job although Steward observed some.
        """
        rows: list[JobRecord] = []
        has_rows = False
        for row in history.rows(since, until):
            has_rows = True
            if "." in row.get("jobid", "") or "." in row.get("jobidraw", ""):
                continue
            record = parse_job_row(row, people, UTC)
            if record is None or record.end is None or record.start is None:
                continue
            if record.end < since or record.end >= until:
                continue
            rows.append(record)
            if len(rows) >= _CHUNK:
                yield from self._iter_from_rows(rows)
                rows = []
        if not has_rows:
            self._check_empty_answer(since, until)
        yield from self._iter_from_rows(rows)

    def _check_empty_answer(self, since: datetime, until: datetime) -> None:
        """Reject an empty answer of slurmdbd if Steward observed runs that ended in the period.

        If slurmdbd's query of its database fails, sacct lists nothing and exits with 0.
        """
        if self._jobs.count_observed_runs(since, until, self._cluster):
            # Without times: a caller recognizes the same message in later periods.
            raise NoJobsListed(
                f"cluster {self._cluster}: slurmdbd lists no job of the period, but runs ended "
                "then: it never had them, purged them, or its query of the database failed. Look "
                "for 'Problem getting jobs' in its log",
                ("sacct",),
            )

    def _iter_from_rows(self, rows: Sequence[JobRecord]) -> Iterator[DueCharge]:
        """Compute what is due for a batch of rows of slurmdbd."""
        facts = self._jobs.list_run_events(self._cluster, {record.job_id for record in rows})
        ours = _group_facts_by_job(facts)
        for job_id, job_runs in _group_rows_by_job(rows).items():
            pieces = list(self._find_charges(job_id))
            for record in job_runs:
                mine = ours.get(job_id, [])
                same = [fact for fact in mine if _is_same_run(fact, record)]
                same = [
                    fact
                    for fact in same
                    if fact.record.end and not _has_forgotten_start(record, fact)
                ]
                if same:
                    halted = _add_suspension(same, record, mine)
                    if halted is None:
                        continue
                    fact = halted
                else:
                    fact = _fact_from_row(record, mine, job_runs)
                due = self._compute_due(fact, pieces, source=SACCT_SOURCE)
                if due is None:
                    continue
                if due.charge is not None and due.charge.piece_us:
                    pieces.append(due.charge)
                yield due

    def _compute_due(
        self, fact: RunEvent, known: Sequence[Charge], source: str = _JOBS_SOURCE
    ) -> DueCharge | None:
        """Compute what a run is due; None if it is not to be charged."""
        before = find_charge(fact, known)
        if self._with_imported and fact.source:
            # The import may lack the restart count, which is in the charge's key.
            restarts = fact.restarts if before is None else before.restarts
            fact = msgspec.structs.replace(fact, source="", restarts=restarts)
        if not is_charged(fact) or fact.record.end is None:
            return None
        held = before.use.tres if before is not None and before.use is not None else None
        try:
            charge = compute_charge(
                *(self._cluster, fact, self._pricing),
                pieces=[one for one in known if is_piece_of(one, fact)],
                hold_tres=held,
                earlier=before,
            )
        except NoRate as error:
            return DueCharge(fact=fact, unpriced=str(error), source=source)
        if charge is None:
            return None
        return DueCharge(
            fact=fact,
            charge=msgspec.structs.replace(match_earlier_charge(charge, known), source=source),
            source=source,
        )


def _group_facts_by_job(facts: Iterable[RunEvent]) -> dict[int, list[RunEvent]]:
    """Group runs by raw job id."""
    found: dict[int, list[RunEvent]] = {}
    for fact in facts:
        found.setdefault(fact.job_id, []).append(fact)
    return found


def _group_rows_by_job(rows: Iterable[JobRecord]) -> dict[int, list[JobRecord]]:
    """Group rows by raw job id, former sizes before the last one."""
    found: dict[int, list[JobRecord]] = {}
    for record in sorted(rows, key=_time_sort_key):
        found.setdefault(record.job_id, []).append(record)
    return found


def _time_sort_key(record: JobRecord) -> tuple[int, int]:
    return to_micros_or_zero(record.submit), to_micros_or_zero(record.end)


def _is_same_run(fact: RunEvent, record: JobRecord) -> bool:
    """Return True if a row of slurmdbd is for a run of jobs.db; pieces match by their end."""
    submit = fact.record.submit
    if submit is None or record.submit is None:
        return False
    if abs(to_micros(submit) - to_micros(record.submit)) > _SLACK_US:
        return False
    is_piece = strip_state_suffix(record.state) == RESIZING
    if is_piece != (fact.piece_end is not None):
        return False
    if not is_piece or fact.piece_end is None or record.end is None:
        return True
    return abs(to_micros(fact.piece_end) - to_micros(record.end)) <= _SLACK_US


def _has_forgotten_start(record: JobRecord, fact: RunEvent) -> bool:
    """Return True if slurmdbd knows that a run started, and slurmctld forgot it.

    A killed slurmctld had reported the start to slurmdbd but not saved its state.
    """
    return fact.record.start is None and to_micros_or_zero(record.start) < to_micros_or_zero(
        record.end
    )


def _add_suspension(
    same: Sequence[RunEvent], record: JobRecord, ours: Sequence[RunEvent]
) -> RunEvent | None:
    """Add suspended time from slurmdbd to a run of jobs.db.

    None if slurmdbd has no more. Only jobs.db tells the sizes of a resized run apart. If slurmdbd
    ends the run later, because a killed slurmctld forgot its end, the suspension may be later too.
    """
    fact = same[0]
    late_us = to_micros_or_zero(record.end) - to_micros_or_zero(fact.record.end)
    is_resized = any(one.piece_end and one.record.submit == fact.record.submit for one in ours)
    suspended_s = record.suspended_s or 0
    missing_us = (suspended_s - (fact.record.suspended_s or 0)) * 1_000_000
    if is_resized or len(same) > 1 or missing_us <= _SLACK_US or late_us > _SLACK_US:
        return None
    whole = msgspec.structs.replace(fact.record, suspended_s=suspended_s)
    return msgspec.structs.replace(fact, record=whole)


def _fact_from_row(
    record: JobRecord, ours: Sequence[RunEvent], job_runs: Sequence[JobRecord]
) -> RunEvent:
    """Convert a row of slurmdbd into the run that jobs.db would have reported."""
    assert record.submit is not None, "no submit time"
    first = record.submit
    if record.restarts:
        # The first submission under this id, but not that of an earlier job.
        earlier = [fact.first_submit for fact in ours if fact.first_submit <= first]
        earlier += [one.submit for one in job_runs if one.submit and not one.restarts]
        first = max((time for time in earlier if time <= first), default=first)
    is_piece = strip_state_suffix(record.state) == RESIZING
    own_s = record.suspended_s or 0
    sizes = [one for one in job_runs if strip_state_suffix(one.state) == RESIZING]
    if is_piece:
        # slurmdbd may give each size the start of the whole run.
        end_us = to_micros_or_zero(record.end)
        former = [one.end for one in sizes if one.submit == record.submit]
        ends = [end for end in former if to_micros_or_zero(end) < end_us]
        record = msgspec.structs.replace(
            record, start=max([record.start, *ends], key=to_micros_or_zero)
        )
    else:
        *_, record = merge_resized_runs([*sizes, record])
    return RunEvent(
        job_id=record.job_id,
        first_submit=first,
        restarts=record.restarts,
        record=record,
        piece_end=record.end if is_piece else None,
        suspended_before_s=(record.suspended_s or 0) - own_s,
    )


log = logging.getLogger(__name__)

END_GRACE: Final = timedelta(minutes=2)
"""Minimum age of an end: newer events may still be on their way."""

OVERLAP: Final = timedelta(minutes=10)
"""Overlap of two comparisons, because slurmdbd may learn of ends late."""

HOURLY_PERIOD: Final = timedelta(days=1)
"""Period compared again every hour and after the bank was down: slurmctld may report to slurmdbd
hours late, and operators may enter ends that slurmctld forgot, with times compared long ago."""

_HOURLY_INTERVAL: Final = timedelta(hours=1)
"""Interval of comparisons of the last ``HOURLY_PERIOD``."""


class ClusterReconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """Reconciliation of a cluster on request.

    Attributes:
        differences: Runs whose charge differs from the amount due.
        missing_records: Period without slurmdbd's records, with the cause; "" if there is none.
    """

    differences: list[ChargeDifference]
    missing_records: str = ""


class ComparisonResult(msgspec.Struct, frozen=True):
    """Result of a regular comparison.

    Attributes:
        at_us: Time of the comparison, in microseconds since the epoch.
        differences: Number of runs with a wrong charge.
        corrected: Number of those that were corrected.
    """

    at_us: int
    differences: int
    corrected: int


def reconcile_cluster(
    settings: Settings,
    ledger: "Ledger",
    link: GateClient | None,
    cluster: str,
    since: datetime,
    *,
    is_dry: bool,
    now: datetime,
    author: str = RECONCILIATION.name,
) -> ClusterReconciliation:
    """Compare a cluster's charges with Slurm's records, and correct them.

    Without slurmdbd's records, jobs.db decides alone.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        link: Client of the gate, which receives the changes; None if there is no gate.
        cluster: The cluster's name.
        since: Only runs that ended at this time or later. Runs that ended before the bank
            started are never included.
        is_dry: Whether to report differences without correcting them.
        now: The current time.
        author: Author of the corrections: the caller, or the service principal.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    with ledger.reading() as t:
        began = from_micros(int(t.read_mark("began") or 0))
    start = max(since, began)
    pricing = load_pricing(settings, ledger, cluster)
    missing_records = ""
    with _open_jobs(settings) as jobs:
        place = (jobs, cluster, pricing, (start, now))
        differences = compare_with_jobs(ledger, *place, is_dry=is_dry, author=author)
        try:
            differences += compare_with_slurmdbd(
                settings, ledger, *place, is_dry=is_dry, author=author
            )
        except SlurmError as error:
            missing_records = describe_missing_records(start, now, error)
    if link is not None and not is_dry and differences:
        with ledger.reading() as t:
            books = t.export_books(after_seq=link.get_status().position)
        link.send_books(books)
    return ClusterReconciliation(differences=differences, missing_records=missing_records)


def describe_missing_records(since: datetime, until: datetime, error: SlurmError) -> str:
    """Describe a period without slurmdbd's records, and the cause."""
    start, end = (f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%S}" for time in (since, until))
    return f"no records from slurmdbd for {start} to {end} UTC: {error}"


def compare_with_jobs(
    ledger: "Ledger",
    jobs: Jobs,
    cluster: str,
    pricing: Pricing,
    period: tuple[datetime, datetime],
    *,
    is_dry: bool = False,
    author: str = RECONCILIATION.name,
) -> list[ChargeDifference]:
    """Compare charges with the runs in jobs.db that ended in a period, and correct them.

    Raises:
        LedgerUnavailable, SqliteUnavailable: One of the two is unavailable.
    """
    due_charges = DueCharges(
        cluster, jobs, pricing, lambda job_id: read_own_charges(ledger, cluster, job_id)
    )
    due = due_charges.iter_from_jobs(*period)
    return post_due_charges(
        ledger, cluster, due, why=RECONCILIATION.name, author=author, is_dry=is_dry
    )


def compare_with_slurmdbd(
    settings: Settings,
    ledger: "Ledger",
    jobs: Jobs,
    cluster: str,
    pricing: Pricing,
    period: tuple[datetime, datetime],
    *,
    is_dry: bool = False,
    author: str = RECONCILIATION.name,
) -> list[ChargeDifference]:
    """Compare charges with slurmdbd's records, if there is a slurmdbd, and correct them.

    Raises:
        SlurmError: slurmdbd does not answer.
        LedgerUnavailable, SqliteUnavailable: One of the two is unavailable.
    """
    of = settings.cluster.get(cluster)
    if of is None or of.remote or not of.asks_slurm:
        return []
    slurm = Slurm(cluster, of)
    history = slurm.history()
    if history is None:
        return []
    due_charges = DueCharges(
        cluster, jobs, pricing, lambda job_id: read_own_charges(ledger, cluster, job_id)
    )
    due = due_charges.iter_from_slurmdbd(history, *period, slurm.resolver)
    return post_due_charges(
        ledger, cluster, due, why=RECONCILIATION.name, author=author, is_dry=is_dry
    )


def read_own_charges(ledger: "Ledger", cluster: str, job_id: int) -> list[Charge]:
    """Return the charges under a raw job id that Steward itself made.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
    """
    with ledger.reading() as t:
        return list_own_charges(t, cluster, job_id)


def post_due_charges(
    ledger: "Ledger",
    cluster: str,
    due: Iterator[DueCharge],
    *,
    why: str,
    author: str,
    is_dry: bool,
    only_new: bool = False,
) -> list[ChargeDifference]:
    """Post charges that are due and differ; return the differences.

    The charges are marked with ``why``, their ledger transactions name ``author``. With
    ``only_new``, existing charges stay unchanged.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
    """
    differences: list[ChargeDifference] = []
    for due_charge in due:
        if due_charge.charge is None:
            differences.append(_make_difference(cluster, due_charge, None, due_charge.unpriced))
            continue
        with ledger.reading() as t:
            row = t.charges.get(due_charge.charge.key)
        before = row.charge if row else None
        if before is not None and (only_new or not _is_different(before, due_charge.charge)):
            continue
        reason = _describe_difference(before, due_charge.charge)
        if not is_dry:
            charge = msgspec.structs.replace(due_charge.charge, why=why)
            _post_charge(ledger, charge, before, Authorship(who=author, why=reason))
        differences.append(_make_difference(cluster, due_charge, before, reason, done=not is_dry))
    return differences


def _is_different(before: Charge, due: Charge) -> bool:
    """Return True if amount or account of a charge differ from the one due."""
    if before.source == SACCT_SOURCE and due.source != SACCT_SOURCE:
        return False  # slurmdbd decided, because jobs.db lacked the facts
    return (before.amount, before.account) != (due.amount, due.account)


def _post_charge(
    ledger: "Ledger", charge: Charge, before: Charge | None, author: Authorship
) -> None:
    """Post a corrected charge, with the hold and shares of the earlier one."""
    if before is not None:
        charge = msgspec.structs.replace(charge, hold=before.hold, shares=before.shares)
    with ledger.transaction() as t:
        t.charges.post(charge, author)


def _describe_difference(before: Charge | None, due: Charge) -> str:
    """Describe how a charge differs from the one due."""
    record_name = "slurmdbd's record" if due.source == SACCT_SOURCE else "its record"
    if before is None:
        return f"it was not charged; its usage is from {record_name}"
    if before.account != due.account:
        return f"{record_name} has account {due.account}, {before.account} was charged"
    parts = [f"by {record_name}"]
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


def _make_difference(
    cluster: str, due: DueCharge, before: Charge | None, why: str, *, done: bool = False
) -> ChargeDifference:
    """Build the difference of a run."""
    fact = due.fact
    return ChargeDifference(
        cluster=cluster,
        job_id=fact.job_id,
        restarts=fact.restarts,
        account=fact.record.account.lower(),
        user=fact.record.user,
        charged=None if before is None else before.amount,
        recomputed=None if due.charge is None else due.charge.amount,
        reason=why,
        source=due.source,
        done=done,
    )


def mark_unpriced(t: "Transaction", cluster: str, at: datetime) -> None:
    """Record that a run that ended then had no rate, so that it is checked again."""
    before = t.read_mark(_make_unpriced_mark(cluster))
    if not before or int(before) > to_micros(at):
        t.set_mark(_make_unpriced_mark(cluster), str(to_micros(at)))


class RegularReconciliation:
    """Regular reconciliation in the bank's process.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        pricing: Returns the inputs of a cluster's charges.
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
        """Compare the runs that ended since the last turn, and correct their charges.

        Args:
            cluster: The cluster's name.
            began: Start of the bank; earlier ends are not charged.
            now: The current time.
            rules: Position of the rules; after a change, runs without a rate may have one.

        Raises:
            LedgerUnavailable, SqliteUnavailable: The ledger or jobs.db is unavailable.
        """
        with self._ledger.reading() as t:
            marks = [
                t.read_mark(_make_reconciled_mark(cluster)),
                t.read_mark(_make_reconciled_by_sacct_mark(cluster)),
            ]
            unpriced = t.read_mark(_make_unpriced_mark(cluster))
        until = now - END_GRACE
        is_far = now - self._far.get(cluster, from_micros(0)) >= _HOURLY_INTERVAL
        least = now - HOURLY_PERIOD if is_far else until
        since, since_by_sacct = (
            max(began, min(from_micros(int(mark)) - OVERLAP, least) if mark else began)
            for mark in marks
        )
        is_again = bool(unpriced) and self._rules.get(cluster) != rules
        start = max(began, min(since, from_micros(int(unpriced)))) if is_again else since
        if min(start, since_by_sacct) >= until:
            return
        if self._jobs is None:
            self._jobs = Jobs(database_path(self._settings.state_dir))
        pricing = self._pricing(cluster)
        found = compare_with_jobs(self._ledger, self._jobs, cluster, pricing, (start, until))
        by_sacct, sacct_until = self._with_slurmdbd(cluster, pricing, (since_by_sacct, until))
        found += by_sacct
        for one in found:
            if one.done:
                log.warning(
                    "cluster %s: corrected the charge of job %d to %s SU (before: %s): %s",
                    cluster,
                    one.job_id,
                    format_money(one.recomputed or 0),
                    format_money(one.charged or 0),
                    one.reason,
                )
        is_left = any(one.recomputed is None for one in found)
        said = ComparisonResult(to_micros(now), len(found), sum(one.done for one in found))
        with self._ledger.transaction() as t:
            t.set_mark(_make_reconciled_mark(cluster), str(to_micros(until)))
            t.set_mark(_make_compared_mark(cluster), msgspec.json.encode(said).decode())
            if sacct_until is not None:
                t.set_mark(_make_reconciled_by_sacct_mark(cluster), str(to_micros(sacct_until)))
            if is_again and not is_left:
                t.set_mark(_make_unpriced_mark(cluster), "")
        self._rules[cluster] = rules
        if is_far:
            self._far[cluster] = now

    def _with_slurmdbd(
        self, cluster: str, pricing: Pricing, period: tuple[datetime, datetime]
    ) -> tuple[list[ChargeDifference], datetime | None]:
        """Compare with slurmdbd; return differences, and until when the comparison is done.

        The time is None if slurmdbd does not answer: the next turn covers the same period. If it
        lists no job, it may have none: later turns then cover the last ``HOURLY_PERIOD`` only.
        """
        assert self._jobs is not None, "jobs.db is not open"
        try:
            found = compare_with_slurmdbd(
                *(self._settings, self._ledger, self._jobs, cluster, pricing, period)
            )
        except SlurmError as error:
            if self._said.get(cluster) != str(error):
                log.warning("cannot compare charges with slurmdbd: %s", error)
            self._said[cluster] = str(error)
            since, until = period
            is_old = isinstance(error, NoJobsListed) and since < until - HOURLY_PERIOD
            return [], until - HOURLY_PERIOD if is_old else None
        self._said.pop(cluster, None)
        return found, period[1]

    def close(self) -> None:
        """Close jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


@contextmanager
def _open_jobs(settings: Settings) -> Iterator[Jobs]:
    """Open jobs.db for the duration of a with block."""
    jobs = Jobs(database_path(settings.state_dir))
    try:
        yield jobs
    finally:
        jobs.close()


def read_last_comparison(
    t: "Transaction", cluster: str
) -> "tuple[ComparisonResult | None, int, int]":
    """Return the last comparison, and the ends of the periods compared.

    The ends are for jobs.db and for slurmdbd, in microseconds; 0 for never.

    Args:
        t: Transaction of the ledger.
        cluster: The cluster's name.
    """
    said = t.read_mark(_make_compared_mark(cluster))
    return (
        msgspec.json.decode(said, type=ComparisonResult) if said else None,
        int(t.read_mark(_make_reconciled_mark(cluster)) or 0),
        int(t.read_mark(_make_reconciled_by_sacct_mark(cluster)) or 0),
    )


def _make_compared_mark(cluster: str) -> str:
    return f"compared:{cluster}"


def _make_reconciled_mark(cluster: str) -> str:
    return f"reconciled:{cluster}"


def _make_reconciled_by_sacct_mark(cluster: str) -> str:
    return f"reconciled.sacct:{cluster}"


def _make_unpriced_mark(cluster: str) -> str:
    return f"unpriced:{cluster}"
