"""What another's books hold, as events: job.end of each run, step.accounted of each step.

A run and its steps go by job id and submit time, which make the keys too:
importing twice is harmless, and a job that Steward saw itself is that job.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.core.events import JOB_END, STEP_ACCOUNTED, Event, JobFacts, utc_now
from steward.core.lines import Line
from steward.core.moments import micros
from steward.core.records import JobRecord
from steward.core.usage import StepAccounted
from steward.jobs.facts import IMPORTED
from steward.slurm.states import FINISHED, base_state

_ENDS: Final = FINISHED | {"REQUEUED", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
# A requeue makes its time the end of one run and the submit time of the next.
_AT_ONCE: Final = timedelta(seconds=2)
_MOST_REMEMBERED: Final = 200_000


class _Last(msgspec.Struct, frozen=True):
    """The run of a job id that was told of last."""

    submit: datetime
    end: datetime | None
    uid: int | None
    restarts: int
    state: str


class RunCounter:
    """Counts the runs of jobs, told in the order of time: sacct shows restarts since 23.02 only."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}

    def counted(self, record: JobRecord) -> JobRecord:
        """The record of a run, with its restart count."""
        submit = record.submit
        if submit is None:
            return record
        last = self._last.get(record.job_id)
        restarts = record.restarts
        if not restarts and last is not None and last.uid == record.uid:
            if submit == last.submit:
                restarts = last.restarts
            elif submit > last.submit and (
                last.state == "REQUEUED"
                or (last.end is not None and abs(submit - last.end) <= _AT_ONCE)
            ):
                restarts = last.restarts + 1
        if len(self._last) >= _MOST_REMEMBERED:
            # The newer half holds the jobs that are likely to have more records.
            for job_id in list(self._last)[: _MOST_REMEMBERED // 2]:
                del self._last[job_id]
        self._last.pop(record.job_id, None)
        state = base_state(record.state)
        self._last[record.job_id] = _Last(submit, record.end, record.uid, restarts, state)
        return msgspec.structs.replace(record, restarts=restarts)


class Maker:
    """Makes events of records and lines, in the order in which books tell of them.

    Args:
        cluster: The cluster whose jobs these are.
        redact: Takes secrets out of a record.
        now: The clock.
    """

    def __init__(
        self,
        cluster: str,
        redact: Callable[[JobRecord], JobRecord],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster = cluster
        self._redact = redact
        self._now = now
        self._runs = RunCounter()

    def run(self, record: JobRecord) -> Event | None:
        """The event of a run; None of one that is not over, which its own cluster tells of."""
        submit, end = record.submit, record.end
        if submit is None or end is None or base_state(record.state) not in _ENDS:
            return None
        record = self._redact(self._runs.counted(record))
        submit_s = micros(submit) // 1_000_000
        key = f"accounted:{record.job_id}:{submit_s}:{record.restarts}"
        return self._event(JOB_END, key, end, JobFacts(record=record))

    def step(self, record: JobRecord, line: Line) -> Event | None:
        """The event of a step of that run."""
        if record.submit is None or record.end is None:
            return None
        submit_s = micros(record.submit) // 1_000_000
        private = self._redact(
            JobRecord(job_id=record.job_id, name=line.name, submit_line=line.submit_line)
        )
        line = msgspec.structs.replace(line, name=private.name, submit_line=private.submit_line)
        body = StepAccounted(job_id=record.job_id, submit=record.submit, line=line)
        key = f"accounted:{record.job_id}.{line.step}:{submit_s}"
        return self._event(STEP_ACCOUNTED, key, record.end, body)

    def _event(self, kind: str, key: str, at: datetime, body: msgspec.Struct) -> Event:
        return Event(
            kind=kind,
            cluster=self._cluster,
            key=key,
            at=at,
            seen_at=self._now(),
            source=IMPORTED,
            body=body,
        )
