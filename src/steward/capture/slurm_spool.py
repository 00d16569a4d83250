"""Slurm spool: captures job scripts and environments from StateSaveLocation, through inotify.

slurmctld writes ``hash.N/job.ID/environment`` (N is ID modulo 10) and then ``script``, which ends
in one NUL, without rename or fsync, and removes the directory MinJobAge after the job's end.

:class:`SlurmSpool` first watches its hash directories, then scans them, so that it misses nothing.
It takes a script when its writer has closed it and holds its descriptor as :class:`HeldScript`, so
that an unlink cannot take the bytes. It scans everything at start, after an inotify overflow, when
a hash directory appears, and at an interval on network file systems. Other files there are foreign
and ignored. ``read_spooled_script`` reads a single script without a watch. :data:`SLURM` is what
the entry point ``slurm`` names (:class:`steward.capture.spool_entries.Scheduler`).
"""

import errno
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable

import msgspec
from inotify_simple import INotify, flags

from steward.capture.spool_entries import (
    ENVIRONMENT_MISSING,
    ENVIRONMENT_TOO_LARGE,
    ENVIRONMENT_UNREADABLE,
    FOREIGN_ERRNOS,
    MOST_ENVIRONMENT_BYTES,
    NO_DESCRIPTOR_ERRNOS,
    OPEN_FLAGS,
    SCRIPT_TOO_LARGE,
    CapturedEntry,
    EntryContents,
    EnvironmentUnreadable,
    SpoolPlan,
    WatchedSpool,
    has_no_writer,
    is_unlinked,
    read_whole,
)
from steward.core.files import find_network_type
from steward.core.redaction import Redactor
from steward.slurm.environment import read_environment

log = logging.getLogger(__name__)

SCRIPT_WITHOUT_NUL = "script-no-nul"
"""Flag: the script does not end in NUL, so it may be incomplete."""


# Reading a job's files


class _ForeignError(Exception):
    """Error: the file was not made by slurmctld."""


class HeldScript(msgspec.Struct, frozen=True):
    """Open descriptors of a job's complete script and its environment (-1 if there is none).

    ``environment_path`` is the path of an environment that could not be opened.
    """

    job_id: int
    mtime_ns: int
    script_fd: int
    environment_fd: int
    environment_path: str = ""

    @property
    def is_removed(self) -> bool:
        """Return whether slurmctld has removed the script."""
        return is_unlinked(self.script_fd)

    def read(self, redactor: Redactor) -> EntryContents:
        """Read the script without its trailing NUL, and the redacted environment."""
        script = read_whole(self.script_fd)
        if script is None:
            log.warning("job %d: script exceeds the size limit and is not archived", self.job_id)
            return EntryContents(None, flags=(SCRIPT_TOO_LARGE,))
        flags: tuple[str, ...] = ()
        if script.endswith(b"\0"):
            script = script[:-1]
        else:
            flags = (SCRIPT_WITHOUT_NUL,)
        if self.environment_fd < 0 and not self.environment_path:
            return EntryContents(script, None, (*flags, ENVIRONMENT_MISSING))
        without_environment = EntryContents(script, None, (*flags, ENVIRONMENT_UNREADABLE))
        try:
            environment_file = self._read_environment()
        except (FileNotFoundError, _ForeignError):
            return without_environment  # a later read cannot find it either
        except OSError as error:
            raise EnvironmentUnreadable(error, without_environment) from error
        if environment_file is None:
            log.warning(
                "job %d: environment exceeds the size limit and is not archived", self.job_id
            )
            return EntryContents(script, None, (*flags, ENVIRONMENT_TOO_LARGE))
        environment = read_environment(environment_file, redactor)
        return EntryContents(script, environment, flags + environment.flags)

    def _read_environment(self) -> bytes | None:
        """Read the environment's file; None if it is too large.

        Raises:
            OSError: It cannot be read now, or is gone.
            _ForeignError: It is not a regular file.
        """
        fd = (
            self.environment_fd
            if self.environment_fd >= 0
            else os.open(self.environment_path, OPEN_FLAGS)
        )
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _ForeignError
            return read_whole(fd, MOST_ENVIRONMENT_BYTES)
        finally:
            if fd != self.environment_fd:
                os.close(fd)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.script_fd)
        if self.environment_fd >= 0:
            os.close(self.environment_fd)


def read_spooled_script(root: str, job_id: int) -> tuple[int, bytes] | None:
    """Read a job's script that slurmctld still holds; return its modification time (ns) and bytes.

    Args:
        root: StateSaveLocation.
        job_id: Raw id; the array's for an array, the leader's for a het job.

    Returns:
        None where there is none, it is being written, or this process may not read it.
    """
    try:
        fd = os.open(f"{root}/hash.{job_id % 10}/job.{job_id}/script", OPEN_FLAGS)
    except OSError:
        return None
    try:
        if has_no_writer(fd) is False:
            return None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return None
        script = read_whole(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if script is None else (status.st_mtime_ns, script.removesuffix(b"\0"))


# Watching the spool

_HASH = re.compile(r"hash\.([0-9])")
"""Name of a hash directory."""
_JOB = re.compile(r"job\.([1-9][0-9]{0,9})")
"""Name of a job directory."""
# Numbers: an access to a member of the enumeration takes longer than a system call.
_IGNORED = int(flags.IGNORED)
_CLOSE_WRITE = int(flags.CLOSE_WRITE)
_Q_OVERFLOW = int(flags.Q_OVERFLOW)
_REMOVED_MASK = flags.DELETE | flags.MOVED_FROM
"""Inotify events of a removed entry."""
_ROOT_REMOVED_MASK = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
"""Inotify events after which the root is no longer watched."""
_ROOT_MASK = (
    flags.CREATE
    | flags.MOVED_TO
    | _REMOVED_MASK
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
"""Inotify events watched in the root."""
_HASH_MASK = flags.CREATE | flags.MOVED_TO | flags.ONLYDIR
"""Inotify events watched in a hash directory."""
_JOB_MASK = flags.CREATE | flags.CLOSE_WRITE | flags.MOVED_TO | flags.ONLYDIR | flags.DONT_FOLLOW
"""Inotify events watched in a job directory."""
_MAX_REMEMBERED_SCRIPTS = 8192
"""Number of captured scripts remembered, to ignore them in scans."""
_SETTLE_S = 0.1
"""Time without change after which a script that ends in NUL is complete, in seconds."""


def assign_share(job_id: int, process_count: int) -> int:
    """Return which of ``process_count`` processes handles a job, by its hash directory."""
    return job_id % 10 % process_count


class _PendingScript(msgspec.Struct):
    """Job directory whose script is not complete yet."""

    hash_number: int
    name: str
    script_fd: int = -1
    environment_fd: int = -1
    environment_path: str = ""
    size: int = -1
    since: float = 0.0

    def close(self) -> None:
        """Close its descriptors."""
        for fd in (self.script_fd, self.environment_fd):
            if fd >= 0:
                os.close(fd)
        self.script_fd = self.environment_fd = -1
        self.environment_path = ""


class SlurmSpool:
    """Watched part of a spool, owned by one process.

    Args:
        root: StateSaveLocation.
        share: Hash directories to watch: those whose number is ``share`` modulo ``process_count``.
        process_count: Number of processes that share the spool.
        is_captured: Returns whether the script of a job id with this mtime (ns) was captured
            before.
        max_held: Maximum number of scripts held open before pausing.
        without_nul_s: Time without a change of size after which a script without a final NUL is
            complete, in seconds. Applies only if Steward cannot detect writers of the file.
        reattach_s: Time between two attempts to watch a missing root, in seconds.
        rescan_s: Time between two scans if watches miss changes, in seconds.
    """

    def __init__(
        self,
        root: str,
        *,
        share: int = 0,
        process_count: int = 1,
        is_captured: Callable[[int, int], bool],
        max_held: int = 4000,
        without_nul_s: float = 2.0,
        reattach_s: float = 1.0,
        rescan_s: float = 2.0,
    ) -> None:
        self.root = root
        self.ready: deque[CapturedEntry] = deque()
        self.vanished: list[int] = []
        self._share = share
        self._process_count = process_count
        self._is_captured = is_captured
        self._max_held = max_held
        self._without_nul_s = without_nul_s
        self._reattach_s = reattach_s
        self._rescan_s = rescan_s
        self._inotify = INotify(nonblocking=True)
        self._root_wd = -1
        self._hash_wds: dict[int, int] = {}
        self._hash_fds: dict[int, int] = {}
        self._job_wds: dict[int, tuple[int, str]] = {}
        self._pending: dict[str, _PendingScript] = {}
        self._unsettled: dict[str, _PendingScript] = {}
        self._recent_mtimes: dict[int, int] = {}
        self._unread: dict[str, int] = {}
        """Directories whose script could not be taken yet, with their hash numbers."""
        self._scan_queue: deque[tuple[int, str]] = deque()
        self._rescan_requested = False
        self._attach_at = self._rescan_at = 0.0
        self._needs_scans = self._is_remote = False
        self._problem = ""

    @property
    def fd(self) -> int:
        """Descriptor that is readable when :meth:`process_events` has something to process."""
        return int(self._inotify.fileno())

    @property
    def unavailable_reason(self) -> str:
        """Reason why the spool cannot be watched now; "" if it can."""
        return self._problem if self._root_wd < 0 else ""

    def due_s(self) -> float:
        """Return seconds until :meth:`process_events` is due even without inotify events."""
        now = time.monotonic()
        if self._root_wd < 0:
            return max(0.0, self._attach_at - now)
        if (self._rescan_requested or self._scan_queue) and len(self.ready) < self._max_held:
            return 0.0
        if self._unsettled:
            return _SETTLE_S
        return self._rescan_s if self._needs_scans else 60.0

    def process_events(self) -> None:
        """Process inotify events; complete scripts are then in ``ready``."""
        if self._root_wd < 0 and time.monotonic() >= self._attach_at:
            self._attach()
        if self._root_wd < 0:
            return
        if len(self.ready) >= self._max_held:
            # The rescan that follows finds what happens meanwhile.
            self._rescan_requested = True
            return
        for event in self._inotify.read(timeout=0):
            self._on_event(event.wd, event.mask, event.name)
        if self._unsettled:
            self._recheck_unsettled()
        if self._rescan_requested or (self._needs_scans and time.monotonic() >= self._rescan_at):
            self._rescan_requested = False
            self._rescan()
        while self._scan_queue and len(self.ready) < self._max_held:
            number, name = self._scan_queue.popleft()
            self._handle_directory(number, name, scanned=True)
        if self._problem and not (self._needs_scans or self._scan_queue or self._rescan_requested):
            log.info("watching all of %s again", self.root)
            self._problem = ""

    def close(self) -> None:
        """Close all descriptors."""
        while self.ready:
            self.ready.popleft().close()
        self._detach()
        self._inotify.close()

    def _attach(self) -> None:
        """Watch the root and its directories; if it is missing, log that once and retry."""
        try:
            self._root_wd = self._inotify.add_watch(self.root, _ROOT_MASK)
            network_type = find_network_type(self.root)
        except OSError as error:
            self._root_wd = -1
            self._attach_at = time.monotonic() + self._reattach_s
            self._log_problem(
                f"cannot watch {self.root}: {error.strerror}; is it slurmctld's spool?"
            )
            return
        self._needs_scans = self._is_remote = bool(network_type)
        if network_type:
            message = "%s is on %s, where inotify misses writes of other hosts: scanning every %g s"
            log.info(message, self.root, network_type, self._rescan_s)
        elif self._problem:
            log.info("watching %s", self.root)
        self._problem = ""
        self._rescan()

    def _detach(self) -> None:
        """Close all watched directories."""
        for fd in self._hash_fds.values():
            os.close(fd)
        for pending in self._pending.values():
            pending.close()
        for table in (
            self._hash_fds,
            self._hash_wds,
            self._job_wds,
            self._pending,
            self._unsettled,
        ):
            table.clear()
        self._scan_queue.clear()
        self._root_wd = -1

    def _log_problem(self, message: str, reason: str = "") -> None:
        """Log a problem unless it was the last one logged; ``reason`` identifies it."""
        if (reason or message) != self._problem:
            log.error("%s", message)
            self._problem = reason or message

    def has_script(self, job_id: int, mtime_ns: int) -> bool:
        """Return whether a script is in the spool; True if that cannot be determined now."""
        try:
            path = f"{self.root}/hash.{job_id % 10}/job.{job_id}/script"
            return os.stat(path, follow_symlinks=False).st_mtime_ns == mtime_ns
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def rescan(self) -> None:
        """Make the next :meth:`process_events` compare the whole spool with captured scripts."""
        # The ids stay: a job that was captured and is gone was not missed.
        self._recent_mtimes = dict.fromkeys(self._recent_mtimes, -1)
        self._rescan_requested = True

    def _rescan(self) -> None:
        """List the hash directories and queue all job directories."""
        self._rescan_at = time.monotonic() + self._rescan_s
        self._scan_queue.clear()
        try:
            with os.scandir(self.root) as entries:
                names = [entry.name for entry in entries if _HASH.fullmatch(entry.name)]
        except OSError as error:
            self._log_problem(f"cannot list {self.root}: {error.strerror}")
            self._needs_scans = True
            return
        # Watches may be free again. If any directory still cannot be watched, scanning goes on.
        self._needs_scans = self._is_remote
        for name in names:
            self._enter_hash(name)

    def _enter_hash(self, name: str) -> None:
        """Watch a hash directory of this share and queue its job directories."""
        number = int(name[-1])
        if number % self._process_count != self._share:
            return
        path = f"{self.root}/{name}"
        try:
            wd = self._inotify.add_watch(path, _HASH_MASK | flags.DONT_FOLLOW)
            if self._hash_wds.get(wd) != number or number not in self._hash_fds:
                if number in self._hash_fds:
                    os.close(self._hash_fds.pop(number))
                self._hash_wds[wd] = number
                open_flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
                self._hash_fds[number] = os.open(path, open_flags)
            with os.scandir(path) as entries:
                names = [entry.name for entry in entries]
            self._report_unread_vanished(number, names)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._fall_back_to_scans(path, error)
            return
        self._scan_queue.extend((number, entry) for entry in names)

    def _fall_back_to_scans(self, path: str, error: OSError) -> None:
        """Log that a path cannot be watched, and switch to scanning."""
        # One reason may apply to thousands of paths at every scan.
        if error.errno == errno.ENOSPC:
            message = f"no inotify watches left for {path}: raise fs.inotify.max_user_watches"
            self._log_problem(f"{message} (sysctl)", "no watch")
        else:
            self._log_problem(f"cannot watch {path}: {error.strerror}", str(error.strerror))
        self._needs_scans = True  # until a scan can watch everything, only scans find new scripts

    def _on_event(self, wd: int, mask: int, name: str) -> None:
        """Dispatch one inotify event."""
        number = self._hash_wds.get(wd)
        if number is not None:
            if mask & _IGNORED:
                del self._hash_wds[wd]
            else:
                self._handle_directory(number, name, scanned=False)
        elif wd in self._job_wds:
            if mask & _IGNORED:
                self._forget_job(wd)
            elif name == "script":
                self._on_script(wd, closed=bool(mask & _CLOSE_WRITE))
        elif wd == self._root_wd:
            self._on_root(mask, name)
        elif mask & _Q_OVERFLOW:
            log.warning("inotify's queue overflowed; scanning %s", self.root)
            self._rescan_requested = True

    def _on_root(self, mask: int, name: str) -> None:
        """Handle an event of the root: it is gone, or a hash directory came or went."""
        if mask & _ROOT_REMOVED_MASK:
            self._unwatch(self._root_wd)
            self._detach()
            self._attach_at = time.monotonic() + self._reattach_s
            self._log_problem(f"{self.root} is gone; waiting for it")
        elif _HASH.fullmatch(name):
            # An open descriptor would keep a removed directory, and its parents, alive.
            fd = self._hash_fds.pop(int(name[-1]), -1) if mask & _REMOVED_MASK else -1
            if fd >= 0:
                os.close(fd)
            elif not mask & _REMOVED_MASK:
                self._enter_hash(name)

    def _forget_job(self, wd: int) -> None:
        """Forget a job directory that was removed."""
        _, name = self._job_wds.pop(wd)
        pending = self._pending.pop(name, None)
        if pending is not None:
            self._report_vanished(int(name[4:]))
            pending.close()
        self._unsettled.pop(name, None)

    def _handle_directory(self, number: int, name: str, *, scanned: bool) -> None:
        """Handle a new or scanned directory: take its script, or wait for it."""
        match = _JOB.fullmatch(name)
        if match is None or name in self._pending or number not in self._hash_fds:
            return
        job_id = int(match[1])
        if scanned and self._was_captured(number, name, job_id):
            return
        pending = _PendingScript(number, name)
        if self._try_script(pending, job_id, closed=False):
            return
        try:
            wd = self._inotify.add_watch(f"{self.root}/hash.{number}/{name}", _JOB_MASK)
        except OSError as error:
            pending.close()
            if error.errno == errno.ENOENT:
                self._report_vanished(job_id)
            elif error.errno != errno.ENOTDIR:
                self._fall_back_to_scans(f"{self.root}/hash.{number}/{name}", error)
            return
        # Try again, because events between the first try and the watch would be missed.
        if self._try_script(pending, job_id, closed=False):
            self._unwatch(wd)
            return
        self._job_wds[wd] = (number, name)
        self._pending[name] = pending

    def _report_vanished(self, job_id: int) -> None:
        """Report a job whose directory is gone as missed, unless its script was captured."""
        if job_id not in self._recent_mtimes:
            self.vanished.append(job_id)

    def _report_unread_vanished(self, number: int, names: list[str]) -> None:
        """Report scripts that could not be taken and whose directories are gone."""
        unread_names = [name for name, hash_number in self._unread.items() if hash_number == number]
        for name in set(unread_names).difference(names):
            del self._unread[name]
            self._report_vanished(int(name[4:]))

    def _was_captured(self, number: int, name: str, job_id: int) -> bool:
        """Return whether the script in a directory has been captured before."""
        try:
            status = os.stat(f"{name}/script", dir_fd=self._hash_fds[number], follow_symlinks=False)
        except OSError:
            # No script yet, or a foreign entry: the following attempt finds out.
            return False
        mtime_ns = status.st_mtime_ns
        return self._recent_mtimes.get(job_id) == mtime_ns or self._is_captured(job_id, mtime_ns)

    def _on_script(self, wd: int, *, closed: bool) -> None:
        """Handle a change of a script: take it if it is complete."""
        _, name = self._job_wds[wd]
        pending = self._pending[name]
        if self._try_script(pending, int(name[4:]), closed=closed):
            del self._pending[name]
            self._unsettled.pop(name, None)
            del self._job_wds[wd]
            self._unwatch(wd)

    def _unwatch(self, wd: int) -> None:
        """Remove an inotify watch."""
        try:
            self._inotify.rm_watch(wd)
        except OSError as error:
            # EINVAL: the directory is gone, and its watch with it.
            if error.errno != errno.EINVAL:
                raise

    def _try_script(self, pending: _PendingScript, job_id: int, *, closed: bool) -> bool:
        """Take the script if it is complete; return whether nothing is left to wait for."""
        directory = self._hash_fds.get(pending.hash_number, -1)
        if directory < 0:
            return True
        try:
            is_done = self._take_script(pending, directory, job_id, closed=closed)
        except FileNotFoundError:
            return False
        except OSError as error:
            pending.close()
            if error.errno in FOREIGN_ERRNOS:
                log.debug("skipping %s: %s", pending.name, error)
                return True
            self._fall_back_to_scans(pending.name, error)
            self._unread[pending.name] = pending.hash_number
            return True
        if is_done:
            self._unread.pop(pending.name, None)
        return is_done

    def _take_script(
        self, pending: _PendingScript, directory: int, job_id: int, *, closed: bool
    ) -> bool:
        """Take the script if it is complete; return whether nothing is left to wait for.

        Raises:
            FileNotFoundError: There is no script yet.
            OSError: It is foreign, or cannot be taken now.
        """
        if pending.script_fd < 0:
            pending.script_fd = os.open(f"{pending.name}/script", OPEN_FLAGS, dir_fd=directory)
            # It was written before the script: hold it too from now on, whatever is removed.
            self._hold_environment(pending, directory)
        fd = pending.script_fd
        is_closed = closed or has_no_writer(fd, remote=self._is_remote)
        # Query afterwards: the writer may have written and closed it meanwhile.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            pending.close()
            return True
        if not closed and not self._is_complete(pending, status, is_closed=is_closed):
            return False
        if self._recent_mtimes.get(job_id) == status.st_mtime_ns:
            pending.close()
            return True
        if pending.environment_fd < 0:
            self._hold_environment(pending, directory)
        self._recent_mtimes[job_id] = status.st_mtime_ns
        if len(self._recent_mtimes) > _MAX_REMEMBERED_SCRIPTS:
            del self._recent_mtimes[next(iter(self._recent_mtimes))]
        self.ready.append(
            HeldScript(
                job_id, status.st_mtime_ns, fd, pending.environment_fd, pending.environment_path
            )
        )
        return True

    def _hold_environment(self, pending: _PendingScript, directory: int) -> None:
        """Open the environment, if there is one.

        Raises:
            OSError: No descriptor is left for it.
        """
        pending.environment_path = ""
        name = f"{pending.name}/environment"
        try:
            pending.environment_fd = os.open(name, OPEN_FLAGS, dir_fd=directory)
        except FileNotFoundError:
            return  # a burst-buffer plugin links only the script; a flag in the event says so
        except OSError as error:
            if error.errno in NO_DESCRIPTOR_ERRNOS:
                raise
            if error.errno not in FOREIGN_ERRNOS:
                # The script is held meanwhile, and the reader opens the environment again.
                pending.environment_path = f"{self.root}/hash.{pending.hash_number}/{name}"

    def _is_complete(
        self, pending: _PendingScript, status: os.stat_result, *, is_closed: bool | None
    ) -> bool:
        """Return whether a script is complete; ``is_closed`` is None if leases do not work."""
        if is_closed is None or (is_closed and not status.st_size):
            # open(2) makes a file before it counts as its writer; slurmctld writes at least a NUL.
            return self._is_settled(pending, status)
        return is_closed

    def _is_settled(self, pending: _PendingScript, status: os.stat_result) -> bool:
        """Return whether a script has not changed for long enough to be complete."""
        now = time.monotonic()
        if pending.size != status.st_size:
            pending.size, pending.since = status.st_size, now
            self._unsettled[pending.name] = pending
            return False
        try:
            ends_in_nul = (
                status.st_size and os.pread(pending.script_fd, 1, status.st_size - 1) == b"\0"
            )
        except OSError:
            ends_in_nul = False  # the reader of the whole file will retry
        settled_s = now - pending.since
        if settled_s < (_SETTLE_S if ends_in_nul else self._without_nul_s):
            self._unsettled[pending.name] = pending
            return False
        return True

    def _recheck_unsettled(self) -> None:
        """Check scripts again that inotify may not report."""
        wds = {name: wd for wd, (_, name) in self._job_wds.items()}
        for name in list(self._unsettled):
            if name in wds:
                self._on_script(wds[name], closed=False)
            else:
                del self._unsettled[name]


# Entry point


class _SlurmScheduler:
    """Slurm as a scheduler for capture."""

    default_root = ""

    def share_of(self, job_id: int, of: int) -> int:
        """Return which of ``of`` processes handles a job's spool entry."""
        return assign_share(job_id, of)

    def open(self, plan: SpoolPlan) -> WatchedSpool:
        """Open a watch on a StateSaveLocation."""
        return SlurmSpool(
            plan.root,
            share=plan.share,
            process_count=plan.of,
            is_captured=plan.known,
            max_held=plan.max_held,
        )


SLURM = _SlurmScheduler()
"""Entry point ``slurm`` for schedulers."""
