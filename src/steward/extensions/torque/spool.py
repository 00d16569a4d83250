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
import time
from collections import deque
from typing import Final

from inotify_simple import INotify, flags

from steward.capture.schedulers import Spool, SpoolPlan, Taken
from steward.core.filesystems import network_kind
from steward.extensions.torque.taking import JOB_FILE, Key, TorqueTaking, TorqueTiming, share_of

log = logging.getLogger(__name__)

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
_SETTLE_S = 0.1

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
