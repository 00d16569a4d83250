"""Decides, of the files of one Torque job, what is complete, and takes hold of it.

A job file is complete as soon as it is not empty. A script is complete when nobody has
it open and its size is no multiple of qsub's pieces, or nothing more came for a while.
What waits is held open, so that a purge cannot take it.
"""

import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from steward.capture.schedulers import FOREIGN, OPEN, SpoolPlan, Taken, is_written, read_whole
from steward.core.events import utc_now
from steward.core.records import JobRecord
from steward.extensions.torque.files import PIECE_BYTES, TorqueNews, TorqueScript, settled_part
from steward.extensions.torque.records import TorqueJob, element_id, read_job
from steward.extensions.torque.xml import MOST_BYTES, TorqueRecordError
from steward.slurm.people import People
from steward.slurm.states import FINISHED

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""The directory of a job's files, below that of jobs, and what their names begin with."""

JOB_FILE = re.compile(r"(([1-9][0-9]{0,7})(?:-([0-9]{1,7}))?(?:\..+)?)\.(?:SC|JB|TA)", re.DOTALL)
"""Of a file's name: what it begins with, the job's number, an element's index."""

_SETTLE_S = 0.1
_GONE_S = 0.2
"""How long a job file must be away to be gone: a save takes it away for an instant."""


def share_of(job_id: int, of: int) -> int:
    """Which of ``of`` processes a job falls to: the last digit of Torque's id decides."""
    return job_id % 10 % of


class TorqueTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a Torque spool, in seconds.

    Attributes:
        pieces_s: Longest time that a possibly incomplete script waits for its next piece.
        record_s: Longest time that a script waits for a readable job file.
        look_s: Longest time of one poll of the spool, so that the supervisor does not take the
            worker for hung.
        check_s: Time between two checks that the root is still the watched directory.
        filled_s: Time for which a new root may be incomplete. Until then, files missing there
            do not count as lost.
        reattach_s: Time between two attempts to watch a missing root.
        rescan_s: Time between two scans if watches miss changes.
    """

    pieces_s: float = 5.0
    record_s: float = 5.0
    look_s: float = 1.0
    check_s: float = 10.0
    filled_s: float = 60.0
    reattach_s: float = 1.0
    rescan_s: float = 2.0


class _Job:
    """What is known of the files of one job, array or element.

    Attributes:
        directory: Where they are, below the directory of jobs.
        name: What their names begin with.
        job_id: The raw id; made up for an element.
        is_element: Whether it is an element of an array, which has no script of its own.
        said: What its job file told last, encoded.
        settled: Hash of what of it only a submission or a person changes.
        record_id: Inode, time (ns) and size of the job file that was read last.
        is_readable: Whether that could be read.
        record_fd: Held open while the script is waited for, else -1.
        script_fd: Likewise.
        script_ns: Modification time (ns) of the script that was taken last.
        size: Of the script at the last look, in bytes.
        since: Since when (monotonic) it has had that size.
        gone_since: Since when there has been no job file.
        is_unread: Whether its script could not be taken at the last look.
    """

    __slots__ = (
        "directory",
        "gone_since",
        "is_element",
        "is_readable",
        "is_unread",
        "job_id",
        "name",
        "record_fd",
        "record_id",
        "said",
        "script_fd",
        "script_ns",
        "settled",
        "since",
        "size",
    )

    def __init__(self, directory: str, name: str) -> None:
        match = JOB_FILE.fullmatch(f"{name}.JB")
        assert match is not None
        number, index = int(match[2]), match[3]
        self.directory = directory
        self.name = name
        self.is_element = index is not None
        self.job_id = number if index is None else element_id(number, int(index))
        self.said = b""
        self.settled = 0
        self.record_id: tuple[int, int, int] = (0, 0, 0)
        self.is_readable = self.is_unread = False
        self.record_fd = self.script_fd = -1
        self.script_ns = 0
        self.size = -1
        self.since = self.gone_since = 0.0

    def let_go(self) -> None:
        """Close what is held."""
        for fd in (self.record_fd, self.script_fd):
            if fd >= 0:
                os.close(fd)
        self.record_fd = self.script_fd = -1


class TorqueTaking:
    """The jobs that lie in the watched part of a spool.

    Args:
        plan: What is watched.
        ready: Where what was taken is put.
        vanished: Where the ids of jobs are put whose scripts were removed before that.
        timing: Times of the spool.
    """

    def __init__(
        self, plan: SpoolPlan, ready: deque[Taken], vanished: list[int], timing: TorqueTiming
    ) -> None:
        self.directories: dict[str, str] = {}
        """The watched directories, each with its path."""
        self.is_remote = False
        """Whether they are on a network file system."""
        self._plan = plan
        self._ready = ready
        self._vanished = vanished
        self._timing = timing
        self._jobs: dict[Key, _Job] = {}
        self._people = People()

    def known_keys(self) -> Collection[Key]:
        """The jobs that are known."""
        return self._jobs.keys()

    def holds(self, job_id: int, mtime_ns: int) -> bool:
        """Whether a script lies in the spool; True where that cannot be known now."""
        for job in self._jobs.values():
            if job.job_id == job_id and not job.is_element and job.directory in self.directories:
                try:
                    status = os.lstat(self._path(job, ".SC"))
                except FileNotFoundError:
                    continue
                except OSError:
                    return True
                if status.st_mtime_ns == mtime_ns:
                    return True
        return False

    def forget(self) -> None:
        """Take everything anew that was not captured."""
        for job in self._jobs.values():
            job.script_ns, job.record_id, job.said = 0, (0, 0, 0), b""

    def let_go(self) -> None:
        """Close all that is held, and forget it."""
        for job in self._jobs.values():
            job.let_go()
        self._jobs.clear()
        self.directories.clear()

    def take(self, key: Key) -> bool:
        """Take what is new of a job; whether nothing is left to wait for.

        Raises:
            OSError: No descriptor is left, or the disk fails.
        """
        if key[0] not in self.directories:
            return True
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(*key)
        failure: OSError | None = None
        record_fd = -1
        try:
            record_fd = self._open_record(job)
            if record_fd >= 0:
                job.gone_since = 0.0
                self._read_record(job, record_fd)
        except OSError as error:
            failure = error  # its script is held all the same
        try:
            is_sure = job.is_element or self._take_script(job)
        except OSError:
            job.is_unread = job.script_fd < 0 and not job.script_ns
            raise
        if failure is not None:
            raise failure
        if record_fd < 0:
            is_sure &= self._is_surely_gone(job)
        return is_sure

    def _open_record(self, job: _Job) -> int:
        fd = self._open(job, ".JB")
        return fd if fd >= 0 or job.is_element else self._open(job, ".TA")

    def _open(self, job: _Job, suffix: str) -> int:
        """A descriptor on one of a job's files; -1 if there is none that holds anything.

        Raises:
            OSError: It cannot be opened now.
        """
        try:
            fd = os.open(self._path(job, suffix), OPEN)
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno in FOREIGN:
                return -1
            raise
        is_ours = False
        try:
            status = os.fstat(fd)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_size > 0
        finally:
            if not is_ours:
                os.close(fd)
        return fd if is_ours else -1

    def _path(self, job: _Job, suffix: str) -> str:
        return os.path.join(self.directories[job.directory], job.name + suffix)

    def _read_record(self, job: _Job, fd: int) -> None:
        """Take in a job file, unless it is the one that was read last; owns the descriptor.

        Raises:
            OSError: It cannot be read now.
        """
        is_held = False
        try:
            status = os.fstat(fd)
            record_id = (status.st_ino, status.st_mtime_ns, status.st_size)
            if record_id == job.record_id:
                return
            # Whoever reads the script tries to read this again.
            is_held = True
            data = read_whole(fd, MOST_BYTES)
            job.record_id = record_id
            is_held = self._tell(job, data)
            job.is_readable = True
        except TorqueRecordError as error:
            # Its script is kept all the same, and no other job waits for it.
            job.is_readable = is_held = False
            log.error("job file of %s is passed over: %s", job.name, error)
        finally:
            if not is_held or job.is_element or job.script_ns:
                os.close(fd)
            else:
                # Until the script is taken: it may be the last that is seen of the environment.
                if job.record_fd >= 0:
                    os.close(job.record_fd)
                job.record_fd = fd

    def _tell(self, job: _Job, data: bytes | None) -> bool:
        """Make news of a job file that tells of something new; whether a script belongs to it.

        Raises:
            TorqueRecordError: It is too large, cannot be read, or is another job's.
        """
        if data is None:
            raise TorqueRecordError(f"it is larger than {MOST_BYTES} bytes", job.name)
        found = read_job(data, job.name, self._people)
        record = found.record
        if record.job_id != job.job_id:
            raise TorqueRecordError(f"it is of job {record.job_id}", job.name)
        found = msgspec.structs.replace(found, variables=None)
        said = msgspec.msgpack.encode(record)
        if said == job.said:
            return found.has_script
        settled = hash(msgspec.msgpack.encode(settled_part(record)))
        is_new = not job.said or settled != job.settled
        job.said, job.settled = said, settled
        self._ready.append(TorqueNews(self._plan.cluster, found, utc_now(), is_new=is_new))
        return found.has_script

    def _take_script(self, job: _Job) -> bool:
        """Take the script if it is complete; whether nothing is left to wait for."""
        fd = self._open(job, ".SC")
        if fd >= 0:
            if job.script_fd >= 0:
                os.close(job.script_fd)
            job.script_fd = fd
            job.is_unread = False
        if job.script_fd < 0:
            return True
        status = os.fstat(job.script_fd)
        if self._is_taken(job, status.st_mtime_ns):
            job.let_go()
            return True
        if not self._is_complete(job, status):
            return False
        if job.record_fd < 0 and job.is_readable:
            job.record_fd = self._open_record(job)  # of a script that grew after it was taken
        if job.record_fd < 0 and time.monotonic() - job.since < self._timing.record_s:
            return False
        # Not the time of the first look: its writer may have written and closed it since.
        job.script_ns = os.fstat(job.script_fd).st_mtime_ns
        taken = TorqueScript(job.job_id, job.script_ns, job.script_fd, job.record_fd)
        job.script_fd = job.record_fd = -1
        self._ready.append(taken)
        return True

    def _is_taken(self, job: _Job, mtime_ns: int) -> bool:
        if job.script_ns != mtime_ns and not self._plan.known(job.job_id, mtime_ns):
            return False
        job.script_ns = mtime_ns
        return True

    def _is_complete(self, job: _Job, status: os.stat_result) -> bool:
        """Whether nothing more is to come, as far as can be known."""
        now = time.monotonic()
        if job.size != status.st_size:
            job.size, job.since = status.st_size, now
        if not status.st_nlink:
            return True
        idle_s = now - job.since
        written = is_written(job.script_fd, remote=self.is_remote)
        if written is False:
            return False
        if status.st_size % PIECE_BYTES == 0:
            # One that has been lying there gets nothing more; another host's clock may lie.
            age_s = 0.0 if self.is_remote else time.time() - status.st_mtime
            return max(idle_s, age_s) >= self._timing.pieces_s
        return written is True or idle_s >= _SETTLE_S

    def _is_surely_gone(self, job: _Job) -> bool:
        """Whether there is nothing to wait for where no job file was found; ends what is gone."""
        for suffix in (".JB", ".TA", ".JC"):
            try:
                os.lstat(self._path(job, suffix))
            except FileNotFoundError:
                continue
            return True  # it is being written, and its creation will tell
        now = time.monotonic()
        job.gone_since = job.gone_since or now
        if now - job.gone_since < _GONE_S or job.script_fd >= 0:
            return False
        del self._jobs[job.directory, job.name]
        job.let_go()
        if job.is_unread:
            self._vanished.append(job.job_id)
        if job.said and not self._is_elsewhere(job):
            self._end(msgspec.msgpack.decode(job.said, type=JobRecord))
        return True

    def _is_elsewhere(self, job: _Job) -> bool:
        """Whether its files lie in another directory: use_jobs_subdirs was switched."""
        return any(
            os.path.lexists(os.path.join(path, job.name + suffix))
            for directory, path in self.directories.items()
            if directory != job.directory
            for suffix in (".JB", ".TA", ".JC")
        )

    def _end(self, record: JobRecord) -> None:
        """Say that a job has gone, unless its end was seen."""
        if record.state not in FINISHED:
            job = TorqueJob(record=record, changed_s=0, has_script=False, variables=None)
            self._ready.append(TorqueNews(self._plan.cluster, job, utc_now(), is_lost=True))

    def end_the_lost(self, unfinished: Iterable[JobRecord]) -> None:
        """End what was known to be there, and has gone while nobody watched."""
        here = {job.job_id for job in self._jobs.values()}
        for record in unfinished:
            number = record.array_job_id or record.job_id
            if share_of(number, self._plan.of) == self._plan.share and record.job_id not in here:
                self._end(record)
