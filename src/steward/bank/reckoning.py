"""What runs are to be charged by the records that there are: jobs.db's, and slurmdbd's.

jobs.db goes before: it knows which end of a run counts where a finished job was
requeued and slurmdbd has the second one. slurmdbd tells of what nobody saw: a run
that came and went while Steward was away, an end without a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward.bank.errors import NoRate
from steward.bank.records import Charge
from steward.bank.settling import (
    Pricing,
    charge_of,
    charged_before,
    is_charged,
    is_piece_of,
    same_as,
)
from steward.core.records import JobRecord
from steward.core.timestamps import micros, micros_or_0
from steward.core.usage import RunFact
from steward.jobs import Jobs
from steward.slurm.accounting import whole_runs
from steward.slurm.job_states import RESIZING, base_state
from steward.slurm.sacct import History, job_from_row
from steward.slurm.users import People

SACCT: Final = "sacct"
"""A charge's source where slurmdbd's word was taken."""
_JOBS: Final = "jobs"
_CHUNK: Final = 200
_SLACK_US: Final = 2_000_000


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or a piece of one, and what it is to be charged.

    Attributes:
        fact: The run.
        charge: What it costs; None where nothing says what.
        unpriced: Why nothing does.
        source: Whose word it is: ``jobs`` or ``sacct``.
    """

    fact: RunFact
    charge: Charge | None = None
    unpriced: str = ""
    source: str = _JOBS


Known = Callable[[int], Sequence[Charge]]
"""The charges under a raw job id."""


class Reckoning:
    """Reckons what runs of one cluster are to be charged.

    Args:
        cluster: The cluster's name.
        jobs: jobs.db.
        pricing: What charges are reckoned by.
        known: Gives the charges there are under a job id.
        with_imported: Whether runs count that only an import of another's books tells of.
    """

    def __init__(
        self,
        cluster: str,
        jobs: Jobs,
        pricing: Pricing,
        known: Known,
        *,
        with_imported: bool = False,
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._pricing = pricing
        self._known = known
        self._with_imported = with_imported

    def of_jobs(self, since: datetime, until: datetime) -> Iterator[Due]:
        """What jobs.db says of the runs that ended in a time."""
        after = (0, 0)
        while True:
            lines = self._jobs.ended_runs(since, until, self._cluster, limit=_CHUNK, after=after)
            if not lines:
                return
            after = lines[-1].end_us, lines[-1].job_id
            wanted = {(line.job_id, line.end_us) for line in lines}
            facts = self._jobs.run_facts(self._cluster, {line.job_id for line in lines})
            for job_id, of_one in _by_job(facts).items():
                pieces: list[Charge] = list(self._known(job_id))
                for fact in of_one:
                    due = self._due(fact, pieces)
                    if due is None:
                        continue
                    if due.charge is not None and due.charge.piece_us:
                        pieces.append(due.charge)
                    if (job_id, micros_or_0(fact.record.end)) in wanted:
                        yield due

    def of_slurmdbd(
        self, history: History, since: datetime, until: datetime, people: People
    ) -> Iterator[Due]:
        """What slurmdbd says of runs that jobs.db does not know, or knows no start or end of.

        Of those that it knows, what slurmdbd says of their suspension: nobody may have seen it.

        Raises:
            SlurmError: slurmdbd does not answer.
        """
        rows: list[JobRecord] = []
        for row in history.rows(since, until):
            if "." in row.get("jobid", "") or "." in row.get("jobidraw", ""):
                continue
            record = job_from_row(row, people, UTC)
            if record is None or record.end is None or record.start is None:
                continue
            if record.end < since or record.end >= until:
                continue
            rows.append(record)
            if len(rows) >= _CHUNK:
                yield from self._of_rows(rows)
                rows = []
        yield from self._of_rows(rows)

    def _of_rows(self, rows: Sequence[JobRecord]) -> Iterator[Due]:
        facts = self._jobs.run_facts(self._cluster, {record.job_id for record in rows})
        ours = _by_job(facts)
        for job_id, of_one in _rows_by_job(rows).items():
            pieces = list(self._known(job_id))
            for record in of_one:
                mine = ours.get(job_id, [])
                same = [fact for fact in mine if _is_same_run(fact, record)]
                same = [fact for fact in same if fact.record.end and not _has_run(record, fact)]
                if same:
                    halted = _with_suspension(same, record, mine)
                    if halted is None:
                        continue
                    fact = halted
                else:
                    fact = _fact_of(record, mine, of_one)
                due = self._due(fact, pieces, source=SACCT)
                if due is None:
                    continue
                if due.charge is not None and due.charge.piece_us:
                    pieces.append(due.charge)
                yield due

    def _due(self, fact: RunFact, known: Sequence[Charge], source: str = _JOBS) -> Due | None:
        if self._with_imported and fact.source:
            fact = msgspec.structs.replace(fact, source="")
        if not is_charged(fact) or fact.record.end is None:
            return None
        before = charged_before(fact, known)
        held = before.use.tres if before is not None and before.use is not None else None
        try:
            charge = charge_of(
                *(self._cluster, fact, self._pricing),
                pieces=[one for one in known if is_piece_of(one, fact)],
                held=held,
                before=before,
            )
        except NoRate as error:
            return Due(fact=fact, unpriced=str(error), source=source)
        if charge is None:
            return None
        return Due(
            fact=fact,
            charge=msgspec.structs.replace(same_as(charge, known), source=source),
            source=source,
        )


def _by_job(facts: Iterable[RunFact]) -> dict[int, list[RunFact]]:
    found: dict[int, list[RunFact]] = {}
    for fact in facts:
        found.setdefault(fact.job_id, []).append(fact)
    return found


def _rows_by_job(rows: Iterable[JobRecord]) -> dict[int, list[JobRecord]]:
    """Rows by raw job id, former sizes before the last one."""
    found: dict[int, list[JobRecord]] = {}
    for record in sorted(rows, key=_in_time):
        found.setdefault(record.job_id, []).append(record)
    return found


def _in_time(record: JobRecord) -> tuple[int, int]:
    return micros_or_0(record.submit), micros_or_0(record.end)


def _is_same_run(fact: RunFact, record: JobRecord) -> bool:
    """Whether a row of slurmdbd is of a run that jobs.db has.

    A piece of it is the same piece where both end alike.
    """
    submit = fact.record.submit
    if submit is None or record.submit is None:
        return False
    if abs(micros(submit) - micros(record.submit)) > _SLACK_US:
        return False
    is_piece = base_state(record.state) == RESIZING
    if is_piece != (fact.piece_end is not None):
        return False
    if not is_piece or fact.piece_end is None or record.end is None:
        return True
    return abs(micros(fact.piece_end) - micros(record.end)) <= _SLACK_US


def _has_run(record: JobRecord, fact: RunFact) -> bool:
    """Whether slurmdbd was told that a run began which slurmctld took for one that waited.

    A slurmctld that was killed had told it, and had not saved it.
    """
    return fact.record.start is None and micros_or_0(record.start) < micros_or_0(record.end)


def _with_suspension(
    same: Sequence[RunFact], record: JobRecord, ours: Sequence[RunFact]
) -> RunFact | None:
    """A run that jobs.db has, with the suspension that a row of slurmdbd has more of.

    None where it has no more. A resized run's sizes are told apart in jobs.db alone.
    """
    fact = same[0]
    is_resized = any(one.piece_end and one.record.submit == fact.record.submit for one in ours)
    suspended_s = record.suspended_s or 0
    missing_us = (suspended_s - (fact.record.suspended_s or 0)) * 1_000_000
    if is_resized or len(same) > 1 or missing_us <= _SLACK_US:
        return None
    whole = msgspec.structs.replace(fact.record, suspended_s=suspended_s)
    return msgspec.structs.replace(fact, record=whole)


def _fact_of(record: JobRecord, ours: Sequence[RunFact], of_one: Sequence[JobRecord]) -> RunFact:
    """A row of slurmdbd as what jobs.db would have said of it."""
    assert record.submit is not None, "rows without one are none"
    first = record.submit
    if record.restarts:
        # What was submitted first under this id, and not another job's before it.
        earlier = [fact.first_submit for fact in ours if fact.first_submit <= first]
        earlier += [one.submit for one in of_one if one.submit and not one.restarts]
        first = max((time for time in earlier if time <= first), default=first)
    is_piece = base_state(record.state) == RESIZING
    own_s = record.suspended_s or 0
    sizes = [one for one in of_one if base_state(one.state) == RESIZING]
    if is_piece:
        # slurmdbd may give each size the start of the whole run.
        end_us = micros_or_0(record.end)
        former = [one.end for one in sizes if one.submit == record.submit]
        ends = [end for end in former if micros_or_0(end) < end_us]
        record = msgspec.structs.replace(record, start=max([record.start, *ends], key=micros_or_0))
    else:
        *_, record = whole_runs([*sizes, record])
    return RunFact(
        job_id=record.job_id,
        first_submit=first,
        restarts=record.restarts,
        record=record,
        piece_end=record.end if is_piece else None,
        suspended_before_s=(record.suspended_s or 0) - own_s,
    )
