"""Torque spool watcher: captures scripts and job files of pbs_server's ``server_priv`` by inotify.

:class:`TorqueTiming` holds the delays; :class:`TorqueJobs` tracks the files of each job and
captures those that are complete; :class:`TorqueSpool` watches directories and decides when to scan.
:data:`TORQUE` registers the scheduler with capture, which calls ``process_events`` when ``fd`` is
readable or after ``due_s`` seconds, and takes what was captured from ``ready``.

Torque keeps ``ID.SERVER.SC`` (the script), ``ID.SERVER.JB`` (the job, XML) or ``.TA`` (an array),
and ``ID-INDEX.SERVER.JB`` (an element), all in ``jobs`` or in ``jobs/0`` to ``jobs/9`` by the id's
last digit. It renames nothing: a save writes ``.JC``, unlinks ``.JB`` and links the one to the
other, so the creation of ``.JB`` alone shows that it is complete, and for an instant there is none.
The first ``.JB`` is empty. A script of more than 64 KiB goes on growing after that, in pieces of 64
KiB: one whose size is a multiple of that waits for more. All other files are foreign.
"""

import errno
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

import msgspec
from inotify_simple import INotify, flags

from steward.capture.spool_entries import (
    FOREIGN_ERRNOS,
    OPEN_FLAGS,
    CapturedEntry,
    SpoolPlan,
    WatchedSpool,
    has_no_writer,
    read_whole,
)
from steward.core.errors import Unavailable
from steward.core.events import utc_now
from steward.core.files import find_network_type
from steward.core.records import JobRecord
from steward.extensions.torque.files import (
    PIECE_BYTES,
    TorqueJobUpdate,
    TorqueScript,
    strip_run_fields,
)
from steward.extensions.torque.records import (
    MAX_JOB_FILE_BYTES,
    TorqueJob,
    TorqueRecordError,
    element_id,
    parse_torque_job,
)
from steward.slurm.job_states import FINISHED
from steward.slurm.users import NameResolver

log = logging.getLogger(__name__)

SpoolKey = tuple[str, str]
"""Job key: directory of its files, below that of jobs, and the start of their names."""

JOB_FILE_PATTERN = re.compile(
    r"(([1-9][0-9]{0,7})(?:-([0-9]{1,7}))?(?:\..+)?)\.(?:SC|JB|TA)", re.DOTALL
)
"""Groups of a file's name: its start, the job's number, an element's index."""

_SETTLE_S = 0.1
"""Seconds without a change after which a script counts as written."""
END_LOST_RETRY_S: Final = 5.0
"""Pause before the records of unfinished jobs are read again, in seconds."""
_GONE_AFTER_S = 0.2
"""Seconds without a job file after which the job is gone: a save removes the file for an instant.
"""


def assign_torque_share(job_id: int, share_count: int) -> int:
    """Return which of ``share_count`` processes handles a job, by the last digit of Torque's id."""
    return job_id % 10 % share_count


class TorqueTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of a Torque spool, in seconds.

    Attributes:
        pieces_s: Longest time that a possibly incomplete script waits for its next piece.
        record_s: Longest time that a script waits for a readable job file.
        poll_limit_s: Longest time of one poll of the spool, so that the supervisor does not take
            the worker for hung.
        check_s: Time between two checks that the root is still the watched directory.
        fill_s: Time for which a new root may be incomplete. Until then, files missing there
            do not count as lost.
        reattach_s: Time between two attempts to watch a missing root.
        rescan_s: Time between two scans if watches miss changes.
    """

    pieces_s: float = 5.0
    record_s: float = 5.0
    poll_limit_s: float = 1.0
    check_s: float = 10.0
    fill_s: float = 60.0
    reattach_s: float = 1.0
    rescan_s: float = 2.0


class _SpoolJob:
    """State of the files of one job, array or element.

    Attributes:
        directory: Directory of the files, below that of jobs.
        name: Start of the files' names.
        job_id: The raw id; made up for an element.
        is_element: Whether it is an element of an array, which has no script of its own.
        record_bytes: Record in the last job file, encoded.
        stable_hash: Hash of the part of it that only a submission or a person changes.
        record_id: Inode, time (ns) and size of the job file that was read last.
        is_readable: Whether that could be read.
        record_fd: Descriptor of the job file, open while the script is incomplete, else -1.
        script_fd: Descriptor of the script, likewise.
        script_ns: Modification time (ns) of the script that was captured last.
        size: Size of the script at the last check, in bytes.
        since: Since when (monotonic) it has had that size.
        gone_since: Since when there has been no job file.
        is_uncaptured: Whether its script could not be captured at the last check.
    """

    __slots__ = (
        "directory",
        "gone_since",
        "is_element",
        "is_readable",
        "is_uncaptured",
        "job_id",
        "name",
        "record_bytes",
        "record_fd",
        "record_id",
        "script_fd",
        "script_ns",
        "since",
        "size",
        "stable_hash",
    )

    def __init__(self, directory: str, name: str) -> None:
        match = JOB_FILE_PATTERN.fullmatch(f"{name}.JB")
        assert match is not None
        number, index = int(match[2]), match[3]
        self.directory = directory
        self.name = name
        self.is_element = index is not None
        self.job_id = number if index is None else element_id(number, int(index))
        self.record_bytes = b""
        self.stable_hash = 0
        self.record_id: tuple[int, int, int] = (0, 0, 0)
        self.is_readable = self.is_uncaptured = False
        self.record_fd = self.script_fd = -1
        self.script_ns = 0
        self.size = -1
        self.since = self.gone_since = 0.0

    def close_files(self) -> None:
        """Close its descriptors."""
        for fd in (self.record_fd, self.script_fd):
            if fd >= 0:
                os.close(fd)
        self.record_fd = self.script_fd = -1


class TorqueJobs:
    """Jobs in the watched part of a spool: captures their scripts and job files.

    A job file is complete as soon as it is not empty. A script is complete when nobody has it open
    and its size is no multiple of qsub's pieces, or when nothing more came for a while. Files that
    wait are held open, so that a purge cannot remove them.

    Args:
        plan: Description of the part to watch.
        ready: Queue that takes captured scripts and changes.
        vanished: List that takes the ids of jobs whose scripts were removed before capture.
        timing: Time limits of the spool.
    """

    def __init__(
        self,
        plan: SpoolPlan,
        ready: deque[CapturedEntry],
        vanished: list[int],
        timing: TorqueTiming,
    ) -> None:
        self.directories: dict[str, str] = {}
        """Watched directories, each with its path."""
        self.is_remote = False
        """Whether they are on a network file system."""
        self._plan = plan
        self._ready = ready
        self._vanished = vanished
        self._timing = timing
        self._jobs: dict[SpoolKey, _SpoolJob] = {}
        self._names = NameResolver()

    def list_keys(self) -> Collection[SpoolKey]:
        """Return the keys of known jobs."""
        return self._jobs.keys()

    def has_script(self, job_id: int, mtime_ns: int) -> bool:
        """Return True if a script is in the spool, or if that cannot be known now."""
        for job in self._jobs.values():
            if job.job_id == job_id and not job.is_element and job.directory in self.directories:
                try:
                    status = os.lstat(self._file_path(job, ".SC"))
                except FileNotFoundError:
                    continue
                except OSError:
                    return True
                if status.st_mtime_ns == mtime_ns:
                    return True
        return False

    def reset_state(self) -> None:
        """Reset the state, so that everything not captured is captured again."""
        for job in self._jobs.values():
            job.script_ns, job.record_id, job.record_bytes = 0, (0, 0, 0), b""

    def close_jobs(self) -> None:
        """Close all descriptors and forget all jobs."""
        for job in self._jobs.values():
            job.close_files()
        self._jobs.clear()
        self.directories.clear()

    def capture_job(self, key: SpoolKey) -> bool:
        """Capture what is new of a job; return True if nothing more is expected.

        Raises:
            OSError: No descriptor is left, or the disk fails.
        """
        if key[0] not in self.directories:
            return True
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _SpoolJob(*key)
        read_error: OSError | None = None
        record_fd = -1
        try:
            record_fd = self._open_job_file(job)
            if record_fd >= 0:
                job.gone_since = 0.0
                self._read_job_file(job, record_fd)
        except OSError as error:
            read_error = error  # hold its script all the same
        try:
            is_settled = job.is_element or self._capture_script(job)
        except OSError:
            job.is_uncaptured = job.script_fd < 0 and not job.script_ns
            raise
        if read_error is not None:
            raise read_error
        if record_fd < 0:
            is_settled &= self._check_gone(job)
        return is_settled

    def _open_job_file(self, job: _SpoolJob) -> int:
        fd = self._open(job, ".JB")
        return fd if fd >= 0 or job.is_element else self._open(job, ".TA")

    def _open(self, job: _SpoolJob, suffix: str) -> int:
        """Open one of a job's files; return -1 if it is missing, foreign or empty.

        Raises:
            OSError: It cannot be opened now.
        """
        try:
            fd = os.open(self._file_path(job, suffix), OPEN_FLAGS)
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno in FOREIGN_ERRNOS:
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

    def _file_path(self, job: _SpoolJob, suffix: str) -> str:
        return os.path.join(self.directories[job.directory], job.name + suffix)

    def _read_job_file(self, job: _SpoolJob, fd: int) -> None:
        """Read a job file, unless it was read last time; takes over the descriptor.

        Raises:
            OSError: It cannot be read now.
        """
        keeps_open = False
        try:
            status = os.fstat(fd)
            record_id = (status.st_ino, status.st_mtime_ns, status.st_size)
            if record_id == job.record_id:
                return
            # The reader of the script tries the job file again.
            keeps_open = True
            data = read_whole(fd, MAX_JOB_FILE_BYTES)
            job.record_id = record_id
            keeps_open = self._queue_update(job, data)
            job.is_readable = True
        except TorqueRecordError as error:
            # Its script is archived all the same, and no other job waits for it.
            job.is_readable = keeps_open = False
            log.error("skipping the job file of %s: %s", job.name, error)
        finally:
            if not keeps_open or job.is_element or job.script_ns:
                os.close(fd)
            else:
                # Hold it until the script is captured: it may be the last trace of the environment.
                if job.record_fd >= 0:
                    os.close(job.record_fd)
                job.record_fd = fd

    def _queue_update(self, job: _SpoolJob, data: bytes | None) -> bool:
        """Queue the change that a job file reports; return True if the job has a script.

        Raises:
            TorqueRecordError: It is too large, cannot be read, or is another job's.
        """
        if data is None:
            raise TorqueRecordError(f"larger than {MAX_JOB_FILE_BYTES} bytes", job.name)
        torque_job = parse_torque_job(data, job.name, self._names)
        record = torque_job.record
        if record.job_id != job.job_id:
            raise TorqueRecordError(f"it belongs to job {record.job_id}", job.name)
        torque_job = msgspec.structs.replace(torque_job, variables=None)
        record_bytes = msgspec.msgpack.encode(record)
        if record_bytes == job.record_bytes:
            return torque_job.has_script
        stable_hash = hash(msgspec.msgpack.encode(strip_run_fields(record)))
        is_new = not job.record_bytes or stable_hash != job.stable_hash
        job.record_bytes, job.stable_hash = record_bytes, stable_hash
        self._ready.append(
            TorqueJobUpdate(self._plan.cluster, torque_job, utc_now(), is_new=is_new)
        )
        return torque_job.has_script

    def _capture_script(self, job: _SpoolJob) -> bool:
        """Capture the script if it is complete; return True if nothing more is expected."""
        fd = self._open(job, ".SC")
        if fd >= 0:
            if job.script_fd >= 0:
                os.close(job.script_fd)
            job.script_fd = fd
            job.is_uncaptured = False
        if job.script_fd < 0:
            return True
        status = os.fstat(job.script_fd)
        if self._is_captured(job, status.st_mtime_ns):
            job.close_files()
            return True
        if not self._is_complete(job, status):
            return False
        if job.record_fd < 0 and job.is_readable:
            job.record_fd = self._open_job_file(job)  # of a script that grew after its capture
        if job.record_fd < 0 and time.monotonic() - job.since < self._timing.record_s:
            return False
        # Read the time again: its writer may have written and closed it since the first check.
        job.script_ns = os.fstat(job.script_fd).st_mtime_ns
        script = TorqueScript(job.job_id, job.script_ns, job.script_fd, job.record_fd)
        job.script_fd = job.record_fd = -1
        self._ready.append(script)
        return True

    def _is_captured(self, job: _SpoolJob, mtime_ns: int) -> bool:
        """Return True if this version of a script was captured before."""
        if job.script_ns != mtime_ns and not self._plan.known(job.job_id, mtime_ns):
            return False
        job.script_ns = mtime_ns
        return True

    def _is_complete(self, job: _SpoolJob, status: os.stat_result) -> bool:
        """Return True if the script is complete, as far as can be known."""
        now = time.monotonic()
        if job.size != status.st_size:
            job.size, job.since = status.st_size, now
        if not status.st_nlink:
            return True
        idle_s = now - job.since
        is_closed = has_no_writer(job.script_fd, remote=self.is_remote)
        if is_closed is False:
            return False
        if status.st_size % PIECE_BYTES == 0:
            # An old script gets no more pieces; on a network file system the other host's clock may
            # be wrong.
            age_s = 0.0 if self.is_remote else time.time() - status.st_mtime
            return max(idle_s, age_s) >= self._timing.pieces_s
        return is_closed is True or idle_s >= _SETTLE_S

    def _check_gone(self, job: _SpoolJob) -> bool:
        """Decide about a job without a job file; end it if it is gone. Return True if settled."""
        for suffix in (".JB", ".TA", ".JC"):
            try:
                os.lstat(self._file_path(job, suffix))
            except FileNotFoundError:
                continue
            return True  # it is being written, and its creation is an event
        now = time.monotonic()
        job.gone_since = job.gone_since or now
        if now - job.gone_since < _GONE_AFTER_S or job.script_fd >= 0:
            return False
        del self._jobs[job.directory, job.name]
        job.close_files()
        if job.is_uncaptured:
            self._vanished.append(job.job_id)
        if job.record_bytes and not self._is_moved(job):
            self._queue_loss(msgspec.msgpack.decode(job.record_bytes, type=JobRecord))
        return True

    def _is_moved(self, job: _SpoolJob) -> bool:
        """Return True if its files are in another directory: use_jobs_subdirs was switched."""
        return any(
            os.path.lexists(os.path.join(path, job.name + suffix))
            for directory, path in self.directories.items()
            if directory != job.directory
            for suffix in (".JB", ".TA", ".JC")
        )

    def _queue_loss(self, record: JobRecord) -> None:
        """Queue the loss of a job, unless its end was seen."""
        if record.state not in FINISHED:
            job = TorqueJob(record=record, changed_s=0, has_script=False, variables=None)
            self._ready.append(TorqueJobUpdate(self._plan.cluster, job, utc_now(), is_lost=True))

    def end_lost_jobs(self, unfinished: Iterable[JobRecord]) -> None:
        """End recorded jobs whose files disappeared while nobody watched."""
        known_ids = {job.job_id for job in self._jobs.values()}
        for record in unfinished:
            leader_id = record.array_job_id or record.job_id
            if (
                assign_torque_share(leader_id, self._plan.of) == self._plan.share
                and record.job_id not in known_ids
            ):
                self._queue_loss(record)


DEFAULT_ROOT: Final = "/var/spool/torque/server_priv"

_DIGIT = re.compile(r"[0-9]")
_GONE_MASK = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
"""inotify events after which a directory is no longer watched."""
_MASK = (
    flags.CREATE
    | flags.CLOSE_WRITE
    | flags.MOVED_TO
    | flags.DELETE
    | flags.MOVED_FROM
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)

_FileStamp = tuple[str, int, int, int]
"""File: name, inode, modification time (ns) and size."""


class TorqueSpool:
    """Watcher of one process's part of a spool.

    Args:
        plan: What to watch; its root is ``server_priv``, or ``jobs`` in it.
        timing: Time limits of the spool. Defaults if None.
    """

    def __init__(self, plan: SpoolPlan, *, timing: TorqueTiming | None = None) -> None:
        self.ready: deque[CapturedEntry] = deque()
        self.vanished: list[int] = []
        self._plan = plan
        self._timing = timing or TorqueTiming()
        self._inotify = INotify(nonblocking=True)
        self._root = ""
        self._root_wd = -1
        self._wds: dict[int, str] = {}
        self._jobs = TorqueJobs(plan, self.ready, self.vanished, self._timing)
        self._unsettled: set[SpoolKey] = set()
        self._queue: deque[SpoolKey] = deque()
        self._needs_rescan = self._needs_polling = False
        self._is_first_scan = True
        self._is_scan_complete = False
        self._last_scan: dict[SpoolKey, list[_FileStamp]] = {}
        self._root_id = (0, 0)
        self._end_lost_at = 0.0
        self._attach_at = self._check_at = self._rescan_at = 0.0
        self._last_problem = ""

    @property
    def fd(self) -> int:
        """Descriptor that is readable when :meth:`process_events` has work."""
        return int(self._inotify.fileno())

    @property
    def unavailable_reason(self) -> str:
        """Why the spool cannot be watched now; "" while it is watched."""
        return self._last_problem if self._root_wd < 0 else ""

    def due_s(self) -> float:
        """Return the seconds until :meth:`process_events` must run even without an event."""
        if self._root_wd < 0:
            return max(0.0, self._attach_at - time.monotonic())
        if (self._needs_rescan or self._queue) and len(self.ready) < self._plan.max_held:
            return 0.0
        if self._unsettled:
            return _SETTLE_S
        return self._timing.rescan_s if self._needs_polling else self._timing.check_s

    def process_events(self) -> None:
        """Handle new events; complete scripts and changes are then in ``ready``."""
        deadline = time.monotonic() + self._timing.poll_limit_s
        if not self._is_attached():
            return
        if len(self.ready) >= self._plan.max_held:
            # A later rescan finds what happens meanwhile.
            self._needs_rescan = True
            return
        touched: dict[SpoolKey, None] = {}
        for event in self._inotify.read(timeout=0):
            self._on_event(event.wd, event.mask, event.name, touched)
        if self._root_wd < 0:
            return
        for key in self._unsettled.difference(touched):
            if time.monotonic() < deadline:
                self._capture_job(key)
        # Handle each job once, however often it was saved.
        self._queue.extend(touched)
        is_due = self._needs_polling and not self._queue and time.monotonic() >= self._rescan_at
        if self._needs_rescan or is_due:
            self._needs_rescan = False
            self._rescan()
        while self._queue and len(self.ready) < self._plan.max_held:
            self._capture_job(self._queue.popleft())
            if time.monotonic() > deadline:
                break
        if self._last_problem and not (self._needs_polling or self._queue or self._needs_rescan):
            log.info("watching all of %s again", self._root)
            self._last_problem = ""
        self._end_lost_jobs()

    def _end_lost_jobs(self) -> None:
        """End jobs that disappeared while nobody watched, after the first complete scan."""
        if self._is_first_scan and not self._queue and time.monotonic() >= self._end_lost_at:
            if self._is_scan_complete and not self._last_problem:
                try:
                    unfinished = self._plan.unfinished()
                except Unavailable as error:
                    log.warning(
                        "cannot determine the jobs that ended while capture was not running: %s",
                        error,
                    )
                    self._end_lost_at = time.monotonic() + END_LOST_RETRY_S
                    return
                self._jobs.end_lost_jobs(unfinished)
            self._is_first_scan = False

    def has_script(self, job_id: int, mtime_ns: int) -> bool:
        """Return True if a script is in the spool, or if that cannot be known now."""
        return self._jobs.has_script(job_id, mtime_ns)

    def rescan(self) -> None:
        """Make the next :meth:`process_events` compare the whole spool with what was captured."""
        self._jobs.reset_state()
        self._last_scan.clear()
        self._needs_rescan = True

    def close(self) -> None:
        """Close all descriptors and watches."""
        while self.ready:
            self.ready.popleft().close()
        self._detach()
        self._inotify.close()

    def _is_attached(self) -> bool:
        """Watch the directory of jobs if possible; return True if it is watched."""
        if self._root_wd >= 0 and time.monotonic() >= self._check_at:
            self._check_root()
        if self._root_wd < 0 and time.monotonic() >= self._attach_at:
            self._attach()
        return self._root_wd >= 0

    def _attach(self) -> None:
        """Watch the directory of jobs; if it is missing, log that once and retry later."""
        root = self._plan.root.rstrip("/")
        # Never watch server_priv in its place: jobs would come unnoticed.
        self._root = root if os.path.basename(root) == "jobs" else os.path.join(root, "jobs")
        try:
            self._root_id = self._stat_root()
            self._root_wd = self._inotify.add_watch(self._root, _MASK)
            network_type = find_network_type(self._root)
        except OSError as error:
            self._root_wd = -1
            self._attach_at = time.monotonic() + self._timing.reattach_s
            self._end_lost_at = self._attach_at + self._timing.fill_s
            self._log_problem(
                f"cannot watch {self._root}: {error.strerror}. Is it pbs_server's server_priv?"
            )
            return
        self._check_at = time.monotonic() + self._timing.check_s
        self._needs_polling = self._jobs.is_remote = bool(network_type)
        if network_type:
            message = (
                "%s is on %s, where inotify reports only writes of this host: scanning it every "
                "%g s"
            )
            log.info(message, self._root, network_type, self._timing.rescan_s)
        elif self._last_problem:
            log.info("watching %s", self._root)
        self._last_problem = ""
        self._rescan()

    def _stat_root(self) -> tuple[int, int]:
        status = os.stat(self._root)
        return status.st_dev, status.st_ino

    def _check_root(self) -> None:
        """Check that the watched directory still has its name: no watch reports its parents."""
        self._check_at = time.monotonic() + self._timing.check_s
        try:
            is_same = self._stat_root() == self._root_id
        except OSError as error:
            log.debug("%s: %s", self._root, error.strerror)
            is_same = False
        if not is_same:
            self._lose_root()

    def _lose_root(self) -> None:
        """Stop watching a directory of jobs that has disappeared; log it."""
        self._detach()
        self._attach_at = time.monotonic() + self._timing.reattach_s
        self._log_problem(f"{self._root} is missing; waiting for it")

    def _detach(self) -> None:
        """Close all watches and forget all jobs."""
        self._jobs.close_jobs()
        for wd in (*self._wds, self._root_wd):
            self._unwatch(wd)
        for collection in (self._wds, self._unsettled, self._queue, self._last_scan):
            collection.clear()
        self._root_wd = -1

    def _unwatch(self, wd: int) -> None:
        try:
            self._inotify.rm_watch(wd)
        except OSError as error:
            # EINVAL: the directory is gone, and its watch with it.
            if error.errno != errno.EINVAL:
                raise

    def _log_problem(self, problem: str, reason: str = "") -> None:
        """Log a problem, except a repeat of the last one; ``reason`` identifies it if given."""
        if (reason or problem) != self._last_problem:
            log.error("%s", problem)
            self._last_problem = reason or problem

    def _rescan(self) -> None:
        """Scan all directories; queue changed and missing jobs."""
        self._rescan_at = time.monotonic() + self._timing.rescan_s
        self._needs_polling = self._jobs.is_remote
        files_by_key: dict[SpoolKey, list[_FileStamp]] = {}
        # Torque keeps jobs in the root or, if use_jobs_subdirs is set, in ten directories below it,
        # which it creates as needed.
        watched = [
            directory
            for directory in ("", *"0123456789")
            if self._watch_directory(directory, files_by_key)
        ]
        self._is_scan_complete = "" in watched
        # On a network file system each open waits: skip files that have not changed.
        changed = list(files_by_key)
        if self._jobs.is_remote:
            for files in files_by_key.values():
                files.sort()
            changed = [key for key in files_by_key if self._last_scan.get(key) != files_by_key[key]]
            self._last_scan = files_by_key
        # Known jobs that this scan misses disappeared unnoticed.
        missing = [key for key in self._jobs.list_keys() if key not in files_by_key]
        self._queue.clear()
        self._queue.extend((*changed, *missing))

    def _watch_directory(
        self, directory: str, files_by_key: dict[SpoolKey, list[_FileStamp]]
    ) -> bool:
        """Watch one directory and list its jobs' files; return True if it was read completely."""
        if directory and int(directory) % self._plan.of != self._plan.share:
            return False
        path = os.path.join(self._root, directory)
        try:
            wd = self._inotify.add_watch(path, _MASK | flags.DONT_FOLLOW)
            self._wds[wd] = directory
            # Keep no descriptor: it would keep a removed directory alive, without any event.
            self._jobs.directories[directory] = path
            with os.scandir(path) as entries:
                for entry in entries:
                    key = self._parse_key(directory, entry.name)
                    if key:
                        files_by_key.setdefault(key, []).append(self._stamp_file(entry))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._log_unwatched(path, error)
            return False
        return True

    def _stamp_file(self, entry: "os.DirEntry[str]") -> _FileStamp:
        """Return a file's stamp for comparison; without stat where inotify reports changes."""
        if not self._jobs.is_remote:
            return entry.name, 0, 0, 0
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return entry.name, 0, 0, 0  # the next scan misses it
        return entry.name, status.st_ino, status.st_mtime_ns, status.st_size

    def _log_unwatched(self, path: str, error: OSError) -> None:
        """Log a failed watch, and rely on scans meanwhile."""
        if error.errno == errno.ENOSPC:
            self._log_problem(
                "all inotify watches are in use: raise fs.inotify.max_user_watches (sysctl)"
            )
        else:
            self._log_problem(f"cannot watch {path}: {error.strerror}", str(error.strerror))
        self._needs_polling = True  # until a scan can watch everything, only scans find new files

    def _parse_key(self, directory: str, name: str) -> SpoolKey | None:
        """Return the key of a file's job; None if it is foreign or another process's."""
        match = JOB_FILE_PATTERN.fullmatch(name)
        if match and int(match[2]) % 10 % self._plan.of == self._plan.share:
            return directory, match[1]
        return None

    def _on_event(self, wd: int, mask: int, name: str, changed_keys: dict[SpoolKey, None]) -> None:
        """Handle an inotify event; collect the job that it touches."""
        if mask & flags.Q_OVERFLOW:
            log.warning("inotify's queue overflowed; scanning %s", self._root)
            self._needs_rescan = True
            return
        directory = self._wds.get(wd)
        if wd == self._root_wd:
            if mask & _GONE_MASK:
                changed_keys.clear()
                self._lose_root()
                return
            if mask & flags.ISDIR and _DIGIT.fullmatch(name):
                self._needs_rescan = True
        if directory is None:
            return
        if mask & _GONE_MASK:
            if mask & flags.IGNORED:
                del self._wds[wd]
            self._jobs.directories.pop(directory, None)
        elif not mask & flags.ISDIR:
            key = self._parse_key(directory, name)
            if key:
                changed_keys[key] = None

    def _capture_job(self, key: SpoolKey) -> None:
        """Capture what is complete of a job that has changed or was found."""
        try:
            is_settled = self._jobs.capture_job(key)
        except OSError as error:
            is_settled = True
            self._last_scan.pop(key, None)
            self._log_unwatched(key[1], error)  # no descriptor is left, or the disk fails
        if is_settled:
            self._unsettled.discard(key)
        else:
            self._unsettled.add(key)


class _TorqueScheduler:
    """Torque scheduler, as capture uses it."""

    default_root = DEFAULT_ROOT

    def share_of(self, job_id: int, of: int) -> int:
        """Return which process handles a job, see :func:`assign_torque_share`."""
        return assign_torque_share(job_id, of)

    def open(self, plan: SpoolPlan) -> WatchedSpool:
        """Open a watch on server_priv."""
        return TorqueSpool(plan)


TORQUE = _TorqueScheduler()
"""Registration of the Torque scheduler with capture."""
