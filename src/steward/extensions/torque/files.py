"""What is taken from Torque's spool: a script with its job file, and what a job file tells.

Keys of events are made of what the file says, so that a scan repeats harmlessly
what was seen by watching.
"""

import hashlib
import logging
import os
from datetime import datetime
from typing import Final

import msgspec

from steward.capture.schedulers import (
    ENVIRONMENT_MISSING,
    ENVIRONMENT_TOO_LARGE,
    ENVIRONMENT_UNREADABLE,
    SCRIPT_TOO_LARGE,
    Contents,
    EnvironmentUnreadable,
    is_unlinked,
    read_whole,
)
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.records import JobRecord
from steward.core.redaction import Redactor
from steward.extensions.torque.environment import is_too_large, read_variables
from steward.extensions.torque.records import TorqueJob, read_job
from steward.extensions.torque.xml import MOST_BYTES, TorqueRecordError
from steward.slurm.environment import Environment
from steward.slurm.states import FINISHED, LOST

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 65536
"""qsub sends a longer script in pieces of this size; the last ones come behind the job file."""

MAYBE_CUT: Final = "script-maybe-cut"
"""The script's size is a multiple of a piece's, so that nothing tells whether it is whole."""
RECORD_UNREADABLE: Final = "record-unreadable"
"""There is no job file beside the script, or it cannot be read."""

SOURCE: Final = "spool"

# What a run's course changes by itself; all else makes a job.seen.
_COURSE: Final = dict.fromkeys(
    ("state", "reason", "start", "end", "nodelist", "nodes", "cpus", "exit_code", "exit_signal")
)


class TorqueScript(msgspec.Struct, frozen=True):
    """Open descriptors on a complete ``.SC`` and the job file of that moment (-1 for none)."""

    job_id: int
    mtime_ns: int
    script_fd: int
    record_fd: int

    @property
    def is_removed(self) -> bool:
        """Whether pbs_server has removed the script."""
        return is_unlinked(self.script_fd)

    def read(self, redactor: Redactor) -> Contents:
        """The script byte for byte, and of the job file the environment and the claims."""
        script = read_whole(self.script_fd)
        if script is None:
            log.warning("job %d has a script too large to be kept", self.job_id)
            return Contents(None, flags=(SCRIPT_TOO_LARGE,))
        flags: tuple[str, ...] = ()
        if len(script) % PIECE_BYTES == 0:
            flags = (MAYBE_CUT,)
        try:
            job = self._job()
        except OSError as error:
            odd = (*flags, RECORD_UNREADABLE, ENVIRONMENT_UNREADABLE)
            raise EnvironmentUnreadable(error, Contents(script, None, odd)) from error
        if job is None:
            return Contents(script, None, (*flags, RECORD_UNREADABLE, ENVIRONMENT_MISSING))
        environment, odd = _environment(job, redactor)
        # Not the name: it can be changed, and the record that comes with it tells it.
        return Contents(
            script,
            environment,
            (*flags, *odd),
            directory=job.record.work_dir,
            host=job.record.submit_host,
        )

    def _job(self) -> TorqueJob | None:
        data = read_whole(self.record_fd, MOST_BYTES) if self.record_fd >= 0 else None
        try:
            return None if data is None else read_job(data, f"job {self.job_id}")
        except TorqueRecordError:
            return None  # said when the file was first looked at

    def close(self) -> None:
        """Let go of the bytes."""
        os.close(self.script_fd)
        if self.record_fd >= 0:
            os.close(self.record_fd)


class TorqueNews(msgspec.Struct, frozen=True):
    """What a job file has told, in events; nothing is held open.

    Attributes:
        cluster: The cluster's name.
        job: What the file says.
        taken_at: When it was read, UTC.
        is_new: Whether more than the course of its run is new.
        is_lost: Whether the file is gone, without having told of an end.
    """

    cluster: str
    job: TorqueJob
    taken_at: datetime
    is_new: bool = True
    is_lost: bool = False

    @property
    def job_id(self) -> int:
        """The raw id of the job; made up for an element of an array."""
        return self.job.record.job_id

    @property
    def mtime_ns(self) -> int:
        """No script comes with it."""
        return 0

    @property
    def is_removed(self) -> bool:
        """It has no script to be removed."""
        return False

    def read(self, redactor: Redactor) -> Contents:
        """The events that follow, without secrets."""
        record = redactor.record(self.job.record)
        return Contents(None, events=tuple(self._events(record)))

    def close(self) -> None:
        """Nothing is held."""

    def _events(self, record: JobRecord) -> list[Event]:
        assert record.submit is not None
        run = f"{record.job_id}:{int(record.submit.timestamp())}:{record.restarts}"
        if self.is_lost:
            lost = msgspec.structs.replace(
                record, state=LOST, reason="", end=None, exit_code=None, exit_signal=None
            )
            return [self._event(JOB_END, f"{JOB_END}:{run}:{LOST}:0", lost, None)]
        events = []
        changed = f"{self.job.changed_s}:{_digest(record)}"
        first = record.state == "PENDING" and record.restarts == 0
        if self.is_new or first:
            key = f"{JOB_SEEN}:{run}:{changed}"
            events.append(self._event(JOB_SEEN, key, record, record.submit))
        if record.state in FINISHED:
            end = int(record.end.timestamp()) if record.end else 0
            key = f"{JOB_END}:{run}:{record.state}:{end}"
            events.append(self._event(JOB_END, key, record, record.end))
        elif not first:
            key = f"{JOB_STATE}:{run}:{record.state}:{changed}"
            start = record.start if record.state == "RUNNING" else None
            events.append(self._event(JOB_STATE, key, record, start))
        return events

    def _event(self, kind: str, key: str, record: JobRecord, at: datetime | None) -> Event:
        return Event(
            kind=kind,
            cluster=self.cluster,
            key=key,
            at=at or self.taken_at,
            seen_at=self.taken_at,
            source=SOURCE,
            body=JobFacts(record=record, whole=True),
        )


def settled_part(record: JobRecord) -> JobRecord:
    """The record without what a run's course changes by itself: a change of it is news."""
    changes = {field: getattr(_NOTHING, field) for field in _COURSE}
    if record.state == "PENDING":
        del changes["reason"]
    return msgspec.structs.replace(record, **changes)


_NOTHING: Final = JobRecord(job_id=0)


def _environment(job: TorqueJob, redactor: Redactor) -> tuple[Environment | None, tuple[str, ...]]:
    """The environment as it may be kept, and what is odd about it."""
    if not job.variables:
        # PBS_O_… are always there: what is empty was lost to a control character in a value.
        return None, (ENVIRONMENT_MISSING,)
    if is_too_large(job.variables):
        log.warning("job %d has an environment too large to be kept", job.record.job_id)
        return None, (ENVIRONMENT_TOO_LARGE,)
    environment = read_variables(job.variables, redactor)
    return environment, environment.flags


def _digest(record: JobRecord) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(record), digest_size=8).hexdigest()
