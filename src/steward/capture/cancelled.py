"""Who cancelled a job: slurmctld does not show it, slurmdbd is told of it with the end.

It may take slurmdbd some seconds to have it, so each job is asked for some
seconds after its end, and again some times; who never gets an answer is left out.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from steward.capture.observed import end_key, run_name
from steward.core.events import JOB_END, Event, JobFacts, utc_now
from steward.core.records import JobRecord

CANCELLED: Final = "CANCELLED"

_FIRST_S: Final = 3.0
_TRIES: Final = 5
_MOST: Final = 5_000


class _Wanted(msgspec.Struct):
    record: JobRecord
    due: float
    wait_s: float = _FIRST_S
    tries: int = 0


class Cancelled:
    """The cancelled runs of a cluster whose canceller is not known yet.

    Args:
        cluster: Its name in events.
        clock: Seconds, growing.
    """

    def __init__(self, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._wanted: deque[_Wanted] = deque(maxlen=_MOST)
        self._names: dict[str, None] = {}

    def add(self, events: Sequence[Event]) -> None:
        """Want to know of the runs that ended so, of these events."""
        for event in events:
            if event.kind != JOB_END or event.source == "sacct":
                continue
            record: JobRecord = event.body.record
            name = run_name(record)
            if record.state == CANCELLED and record.cancelled_by is None:
                if name not in self._names:
                    self._wanted.append(_Wanted(record, self._clock() + _FIRST_S))
                self._names[name] = None
                if len(self._names) > _MOST:
                    del self._names[next(iter(self._names))]

    def due(self) -> int | None:
        """The job that is to be asked for now; None if there is none."""
        if self._wanted and self._wanted[0].due <= self._clock():
            return self._wanted[0].record.job_id
        return None

    def clear(self) -> None:
        """Want nothing more: there is no slurmdbd to ask."""
        self._wanted.clear()

    def told(self, records: Sequence[JobRecord]) -> list[Event]:
        """What follows of slurmdbd's answer for the job that was due."""
        wanted = self._wanted.popleft()
        for record in records:
            # Before 23.02 slurmdbd knows no restart count.
            same = record.job_id == wanted.record.job_id and record.submit == wanted.record.submit
            if same and record.cancelled_by is not None:
                return [self._event(wanted.record, record)]
        wanted.tries += 1
        if wanted.tries < _TRIES:
            wanted.wait_s *= 3
            wanted.due = self._clock() + wanted.wait_s
            self._wanted.append(wanted)
        return []

    def _event(self, known: JobRecord, told: JobRecord) -> Event:
        # All that was known, for of an end the last word counts, and with it only what nobody
        # else knows: slurmdbd writes TRES and the like in other words.
        record = msgspec.structs.replace(
            known,
            state=CANCELLED,
            suspended_s=max(known.suspended_s or 0, told.suspended_s or 0),
            exit_code=told.exit_code,
            exit_signal=told.exit_signal,
            cancelled_by=told.cancelled_by,
        )
        now = utc_now()
        return Event(
            kind=JOB_END,
            cluster=self._cluster,
            key=f"{end_key(record)}:by",
            at=record.end or now,
            seen_at=now,
            source="sacct",
            body=JobFacts(record=record),
        )
