"""Watches pbs_server's ``server_priv`` and takes hold of scripts and job files before they vanish.

Torque keeps ``ID.SERVER.SC`` (the script), ``ID.SERVER.JB`` (the job, XML) or ``.TA``
(an array), and ``ID-INDEX.SERVER.JB`` (an element), all in ``jobs`` or in ``jobs/0`` to
``jobs/9`` by the id's last digit. It renames nothing: a save writes ``.JC``, unlinks
``.JB`` and links the one to the other, so a complete ``.JB`` shows by its creation alone,
and for an instant there is none. The first ``.JB`` is empty. A script of more than 64 KiB
goes on growing after that, in pieces of 64 KiB: one whose size is a multiple of that waits
for more. Whatever else lies there is foreign.
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

from steward.capture.schedulers import (
    FOREIGN,
    OPEN,
    Spool,
    SpoolPlan,
    Taken,
    is_written,
    read_whole,
)
from steward.core.events import utc_now
from steward.core.files import network_kind
from steward.core.records import JobRecord
from steward.extensions.torque.files import PIECE_BYTES, TorqueNews, TorqueScript, settled_part
from steward.extensions.torque.records import (
    MOST_BYTES,
    TorqueJob,
    TorqueRecordError,
    element_id,
    read_job,
)
from steward.slurm.job_states import FINISHED
from steward.slurm.users import People

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


DEFAULT_ROOT: Final = "/var/spool/torque/server_priv"

_DIGIT = re.compile(r"[0-9]")
_GONE = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
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

_File = tuple[str, int, int, int]
"""Of a file its name, inode, modification time (ns) and size."""


class TorqueSpool:
    """The part of a spool that one process watches.

    Args:
        plan: What to watch; its root is ``server_priv``, or ``jobs`` in it.
        subdirs: Whether jobs are in ``jobs/0`` to ``jobs/9``; None for wherever they are.
        timing: Times of the spool. Defaults if None.
    """

    def __init__(
        self, plan: SpoolPlan, subdirs: bool | None = None, *, timing: TorqueTiming | None = None
    ) -> None:
        self.ready: deque[Taken] = deque()
        self.vanished: list[int] = []
        self._plan = plan
        self._subdirs = subdirs
        self._timing = timing or TorqueTiming()
        self._inotify = INotify(nonblocking=True)
        self._root = ""
        self._root_wd = -1
        self._wds: dict[int, str] = {}
        self._taking = TorqueTaking(plan, self.ready, self.vanished, self._timing)
        self._unsure: set[Key] = set()
        self._scanned: deque[Key] = deque()
        self._rescan_wanted = self._network = False
        self._is_first_scan = True
        self._is_whole = False
        self._seen: dict[Key, list[_File]] = {}
        self._root_id = (0, 0)
        self._lost_at = 0.0
        self._attach_at = self._check_at = self._rescan_at = 0.0
        self._complaint = ""

    @property
    def fd(self) -> int:
        """Readable when there is something to :meth:`look` at."""
        return int(self._inotify.fileno())

    @property
    def away(self) -> str:
        """Why nothing of it can be watched just now; "" where it is there."""
        return self._complaint if self._root_wd < 0 else ""

    def due_s(self) -> float:
        """Seconds until :meth:`look` is to be called even if nothing can be read."""
        if self._root_wd < 0:
            return max(0.0, self._attach_at - time.monotonic())
        if (self._rescan_wanted or self._scanned) and len(self.ready) < self._plan.most_held:
            return 0.0
        if self._unsure:
            return _SETTLE_S
        return self._timing.rescan_s if self._network else self._timing.check_s

    def look(self) -> None:
        """Take in what has happened; what is complete is then in ``ready``."""
        until = time.monotonic() + self._timing.look_s
        if not self._is_attached():
            return
        if len(self.ready) >= self._plan.most_held:
            # What happens meanwhile is found by the rescan that follows.
            self._rescan_wanted = True
            return
        touched: dict[Key, None] = {}
        for event in self._inotify.read(timeout=0):
            self._on_event(event.wd, event.mask, event.name, touched)
        if self._root_wd < 0:
            return
        for key in self._unsure.difference(touched):
            if time.monotonic() < until:
                self._consider(key)
        # Each job once, however often it was saved.
        self._scanned.extend(touched)
        is_due = self._network and not self._scanned and time.monotonic() >= self._rescan_at
        if self._rescan_wanted or is_due:
            self._rescan_wanted = False
            self._rescan()
        while self._scanned and len(self.ready) < self._plan.most_held:
            self._consider(self._scanned.popleft())
            if time.monotonic() > until:
                break
        if self._complaint and not (self._network or self._scanned or self._rescan_wanted):
            log.info("watching all of %s again", self._root)
            self._complaint = ""
        self._end_the_lost()

    def _end_the_lost(self) -> None:
        """After the first scan: end what has gone while nobody watched, if all could be seen."""
        if self._is_first_scan and not self._scanned and time.monotonic() >= self._lost_at:
            self._is_first_scan = False
            if self._is_whole and not self._complaint:
                self._taking.end_the_lost(self._plan.unfinished())

    def holds(self, job_id: int, mtime_ns: int) -> bool:
        """Whether a script lies in the spool; True where that cannot be known now."""
        return self._taking.holds(job_id, mtime_ns)

    def rescan(self) -> None:
        """Have the next :meth:`look` compare the whole spool with what was captured."""
        self._taking.forget()
        self._seen.clear()
        self._rescan_wanted = True

    def close(self) -> None:
        """Let go of everything."""
        while self.ready:
            self.ready.popleft().close()
        self._detach()
        self._inotify.close()

    def _is_attached(self) -> bool:
        """Whether the directory of jobs is watched, by now."""
        if self._root_wd >= 0 and time.monotonic() >= self._check_at:
            self._check_root()
        if self._root_wd < 0 and time.monotonic() >= self._attach_at:
            self._attach()
        return self._root_wd >= 0

    def _attach(self) -> None:
        """Watch the directory of jobs; where it is not there, say so once and try again."""
        root = self._plan.root.rstrip("/")
        # server_priv itself is never watched in its place: jobs would come, and nobody see them.
        self._root = root if os.path.basename(root) == "jobs" else os.path.join(root, "jobs")
        try:
            self._root_id = self._id_of_root()
            self._root_wd = self._inotify.add_watch(self._root, _MASK)
            kind = network_kind(self._root)
        except OSError as error:
            self._root_wd = -1
            self._attach_at = time.monotonic() + self._timing.reattach_s
            self._lost_at = self._attach_at + self._timing.filled_s
            self._complain(
                f"cannot watch {self._root}: {error.strerror}; is it pbs_server's server_priv?"
            )
            return
        self._check_at = time.monotonic() + self._timing.check_s
        self._network = self._taking.is_remote = bool(kind)
        if kind:
            what = "%s is on %s, where only this host's writes are told of: scanning it every %g s"
            log.info(what, self._root, kind, self._timing.rescan_s)
        elif self._complaint:
            log.info("watching %s", self._root)
        self._complaint = ""
        self._rescan()

    def _id_of_root(self) -> tuple[int, int]:
        status = os.stat(self._root)
        return status.st_dev, status.st_ino

    def _check_root(self) -> None:
        """See that what is watched is still what has that name: no watch tells of its parents."""
        self._check_at = time.monotonic() + self._timing.check_s
        try:
            is_same = self._id_of_root() == self._root_id
        except OSError as error:
            log.debug("%s: %s", self._root, error.strerror)
            is_same = False
        if not is_same:
            self._lose_root()

    def _lose_root(self) -> None:
        self._detach()
        self._attach_at = time.monotonic() + self._timing.reattach_s
        self._complain(f"{self._root} is gone; waiting for it")

    def _detach(self) -> None:
        self._taking.let_go()
        for wd in (*self._wds, self._root_wd):
            self._unwatch(wd)
        for table in (self._wds, self._unsure, self._scanned, self._seen):
            table.clear()
        self._root_wd = -1

    def _unwatch(self, wd: int) -> None:
        try:
            self._inotify.rm_watch(wd)
        except OSError as error:
            # EINVAL: the directory is gone, and its watch went with it.
            if error.errno != errno.EINVAL:
                raise

    def _complain(self, what: str, reason: str = "") -> None:
        """Say it, unless it was the last thing said; the same ``reason`` is the same thing."""
        if (reason or what) != self._complaint:
            log.error("%s", what)
            self._complaint = reason or what

    def _rescan(self) -> None:
        self._rescan_at = time.monotonic() + self._timing.rescan_s
        self._network = self._taking.is_remote
        found: dict[Key, list[_File]] = {}
        directories = ["", *"0123456789"] if self._subdirs is None else [""]
        if self._subdirs:
            directories = list("0123456789")
        # The ten appear when Torque makes them; where all are used at least one must be there.
        entered = [directory for directory in directories if self._enter(directory, found)]
        self._is_whole = "" in entered or (bool(self._subdirs) and bool(entered))
        # On a network each open is a wait: what has not changed is not looked at again.
        changed = list(found)
        if self._taking.is_remote:
            for files in found.values():
                files.sort()
            changed = [key for key in found if self._seen.get(key) != found[key]]
            self._seen = found
        # What is not there any more has gone while nobody looked.
        gone = [key for key in self._taking.known_keys() if key not in found]
        self._scanned.clear()
        self._scanned.extend((*changed, *gone))

    def _enter(self, directory: str, found: dict[Key, list[_File]]) -> bool:
        """Watch one directory, and note whose files lie in it; whether all of it was read."""
        if directory and int(directory) % self._plan.of != self._plan.share:
            return False
        path = os.path.join(self._root, directory)
        try:
            wd = self._inotify.add_watch(path, _MASK | flags.DONT_FOLLOW)
            self._wds[wd] = directory
            # No descriptor: ours would keep a removed directory alive, and nobody would say so.
            self._taking.directories[directory] = path
            with os.scandir(path) as entries:
                for entry in entries:
                    key = self._key_of(directory, entry.name)
                    if key:
                        found.setdefault(key, []).append(self._file(entry))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._cannot_watch(path, error)
            return False
        return True

    def _file(self, entry: "os.DirEntry[str]") -> _File:
        """What tells whether a file has changed; nothing of one that is told of by its watch."""
        if not self._taking.is_remote:
            return entry.name, 0, 0, 0
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return entry.name, 0, 0, 0  # the next scan misses it
        return entry.name, status.st_ino, status.st_mtime_ns, status.st_size

    def _cannot_watch(self, path: str, error: OSError) -> None:
        if error.errno == errno.ENOSPC:
            self._complain("no inotify watch is left: raise fs.inotify.max_user_watches (sysctl)")
        else:
            self._complain(f"cannot look at {path}: {error.strerror}", str(error.strerror))
        self._network = True  # until a scan can watch all, only scanning finds what is new

    def _key_of(self, directory: str, name: str) -> Key | None:
        """Whose file has this name; None for one that is foreign, or another process's."""
        match = JOB_FILE.fullmatch(name)
        if match and int(match[2]) % 10 % self._plan.of == self._plan.share:
            return directory, match[1]
        return None

    def _on_event(self, wd: int, mask: int, name: str, touched: dict[Key, None]) -> None:
        if mask & flags.Q_OVERFLOW:
            log.warning("inotify's queue overflowed; scanning %s", self._root)
            self._rescan_wanted = True
            return
        directory = self._wds.get(wd)
        if wd == self._root_wd:
            if mask & _GONE:
                touched.clear()
                self._lose_root()
                return
            if mask & flags.ISDIR and _DIGIT.fullmatch(name) and self._subdirs is not False:
                self._rescan_wanted = True
        if directory is None:
            return
        if mask & _GONE:
            if mask & flags.IGNORED:
                del self._wds[wd]
            self._taking.directories.pop(directory, None)
        elif not mask & flags.ISDIR:
            key = self._key_of(directory, name)
            if key:
                touched[key] = None

    def _consider(self, key: Key) -> None:
        """Something of a job has changed, or was found: take what is complete of it."""
        try:
            is_sure = self._taking.take(key)
        except OSError as error:
            is_sure = True
            self._seen.pop(key, None)
            self._cannot_watch(key[1], error)  # no descriptor is left, or the disk fails
        if is_sure:
            self._unsure.discard(key)
        else:
            self._unsure.add(key)


class _Torque:
    """Torque, as capture knows it."""

    default_root = DEFAULT_ROOT

    def share_of(self, job_id: int, of: int) -> int:
        """See :func:`share_of`."""
        return share_of(job_id, of)

    def open(self, plan: SpoolPlan) -> Spool:
        """A watch on server_priv."""
        subdirs = plan.options.get("torque_subdirs")
        return TorqueSpool(plan, subdirs if isinstance(subdirs, bool) else None)


TORQUE = _Torque()
