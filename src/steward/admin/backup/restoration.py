"""Restoring a backup: unpack it beside the state directory, then move it into place.

``restore_backup`` expects a backup that ``archive.verify_backup`` has verified. It locks the state
directory, checks all preconditions before it changes anything, unpacks the backup to
``.restoring``, ends credentials that were revoked since, moves an existing state aside, and moves
the new one into place. Existing configuration files and archived files are left unchanged.

It makes databases consistent that were copied at slightly different moments: the restored journal
waits until every consumer has reported its position.
"""

import contextlib
import os
import pwd
import shutil
import tarfile
from collections.abc import Callable
from datetime import datetime
from typing import IO, Final

from steward.admin.backup.archive import (
    ACL_HEADER_PREFIX,
    CONFIG_PREFIX,
    INCOMING_PREFIX,
    MANIFEST_NAME,
    STATE_PREFIX,
    BackupError,
    BackupManifest,
    BackupUnavailable,
    copy_member,
    read_members,
)
from steward.admin.backup.files import PREVIOUS_STATE_PREFIX
from steward.admin.credentials.store import end_revoked
from steward.core.actions import Answer
from steward.core.config import Settings
from steward.core.databases import JOURNAL
from steward.core.journal.server import lock_state_dir
from steward.core.journal.store import prepare_restored
from steward.core.script_stores import ARCHIVE_DIRECTORY, MARKER, STATE_STORE

_LOCK: Final = "journal.lock"
_UNPACK_DIRECTORY: Final = ".restoring"
"""Directory within the state directory to which the backup is unpacked."""
_SKIPPED_POSITIONS: Final = 1_000_000_000
"""Journal positions to skip if a ledger elsewhere may have seen more than the backup has."""
_INCOMING_DIRECTORY: Final = "incoming"

ShowProgress = Callable[[int, int | None, str], None]


class RestoreResult(Answer, frozen=True, kw_only=True):
    """Result of a restore.

    Attributes:
        state_dir: Path of the state directory.
        files: Number of written files.
        aside: Directory of the previous state; "" if there was none.
        written: Configuration files that were written.
        unchanged: Configuration files that existed and were left unchanged.
    """

    state_dir: str
    files: int
    aside: str = ""
    written: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


def restore_backup(
    path: str,
    manifest: BackupManifest,
    settings: Settings,
    *,
    force: bool,
    now: datetime,
    show_progress: ShowProgress = lambda *_: None,
) -> RestoreResult:
    """Restore a verified backup.

    Args:
        path: The backup.
        manifest: Its manifest.
        settings: The whole configuration, with the target directories.
        force: Whether to move an existing state aside.
        now: Current time.
        show_progress: Progress callback.

    Raises:
        BackupError: The state directory is not empty, or an archive is not there.
        BackupUnavailable: Something cannot be written.
        JournalUnavailable: A daemon runs on the state directory.
    """
    state_dir = os.path.abspath(settings.state_dir)
    try:
        owner = _make_state_dir(state_dir, manifest)
        lock = lock_state_dir(state_dir, wait_s=1.0)
        try:
            if os.geteuid() == 0:
                os.chown(os.path.join(state_dir, _LOCK), owner.st_uid, owner.st_gid)
            steps = _RestoreSteps(path, manifest, settings, owner, show_progress)
            steps.check_preconditions(force=force)
            return steps.run(now)
        finally:
            lock.close()
    except OSError as error:
        failed_path, reason = error.filename or state_dir, error.strerror or error
        raise BackupUnavailable(f"cannot write {failed_path}: {reason}", state_dir) from error


def _make_state_dir(state_dir: str, manifest: BackupManifest) -> os.stat_result:
    """Create the state directory if missing; return its status."""
    if not os.path.isdir(state_dir):
        try:
            uid = pwd.getpwnam(manifest.owner).pw_uid
        except KeyError:
            raise BackupError(
                f"unknown user {manifest.owner}, who owned the state: create the user, or "
                f"create {state_dir} for another user, and try again",
                manifest.owner,
            ) from None
        os.makedirs(state_dir, mode=0o700)
        if os.geteuid() == 0:
            os.chown(state_dir, uid, pwd.getpwuid(uid).pw_gid)
    return os.stat(state_dir)


class _RestoreSteps:
    """Steps of one restore.

    Args:
        path: The backup.
        manifest: Its manifest.
        settings: The whole configuration, with the target directories.
        owner: Status of the state directory, for owner and group.
        show_progress: Progress callback.
    """

    def __init__(
        self,
        path: str,
        manifest: BackupManifest,
        settings: Settings,
        owner: os.stat_result,
        show_progress: ShowProgress,
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._settings = settings
        self._owner_status = owner
        self._show_progress = show_progress
        self._state_dir = os.path.abspath(settings.state_dir)
        self._unpack_dir = os.path.join(self._state_dir, _UNPACK_DIRECTORY)
        self._file_count = 0
        self._written_config: list[str] = []
        self._unchanged_config: list[str] = []
        roots = {f"archive/{name}": settings.sink_path(name) for name in settings.files_sinks()}
        if settings.accounting.location:
            roots["joblog"] = settings.accounting.location
        self._tree_roots = {name: os.path.abspath(root) for name, root in roots.items()}

    def check_preconditions(self, *, force: bool) -> None:
        """Check all preconditions before anything is changed.

        Raises:
            BackupError: The state directory is not empty, an archive is not there, or the
                configuration lacks a sink or directory that the backup needs.
        """
        if self._list_existing() and not force:
            raise BackupError(
                f"{self._state_dir} is not empty: give --force to move its content aside",
                self._state_dir,
            )
        for store in sorted({name.split("/")[1] for name in self._list_names(INCOMING_PREFIX)}):
            root = self._find_root(store)
            is_in_backup = f"archive/{store.partition('.')[2]}" in self._manifest.trees
            if root and not is_in_backup and not os.path.exists(os.path.join(root, MARKER)):
                raise BackupError(
                    f"the archive {root}, for which the backup contains waiting scripts, is "
                    f"missing: mount it or restore it first (an archive has a file {MARKER})",
                    root,
                )
        for tree in self._manifest.trees:
            if tree not in self._tree_roots:
                raise BackupError(f"the configuration names no directory for {tree}", tree)

    def run(self, now: datetime) -> RestoreResult:
        """Unpack the backup and move it into place."""
        shutil.rmtree(self._unpack_dir, ignore_errors=True)
        os.mkdir(self._unpack_dir, 0o700)
        read_members(self._path, self._unpack_member)
        # Before ownership is set: files written here belong to the user who restores.
        end_revoked(self._unpack_dir, self._state_dir, now)
        self._make_consistent()
        previous_state_dir = self._move_aside(now)
        for name in os.listdir(self._unpack_dir):
            os.rename(os.path.join(self._unpack_dir, name), os.path.join(self._state_dir, name))
        os.rmdir(self._unpack_dir)
        os.sync()
        return RestoreResult(
            state_dir=self._state_dir,
            files=self._file_count,
            aside=previous_state_dir,
            written=tuple(self._written_config),
            unchanged=tuple(self._unchanged_config),
        )

    def _list_names(self, prefix: str) -> list[str]:
        return [member.name for member in self._manifest.members if member.name.startswith(prefix)]

    def _find_root(self, store: str) -> str:
        """Return the archive root of a store; "" for the state directory's.

        Raises:
            BackupError: The configuration has no such sink.
        """
        if store == STATE_STORE:
            return ""
        name = store.partition(".")[2]
        if f"archive/{name}" not in self._tree_roots:
            raise BackupError(
                f"the configuration lacks the sink {name}, for which the backup contains "
                "waiting scripts: add it, with its path",
                name,
            )
        return self._tree_roots[f"archive/{name}"]

    def _list_existing(self) -> list[str]:
        """List what a restore would replace in the state directory."""
        trees = self._tree_roots.values()

        def stays(name: str) -> bool:
            path = os.path.join(self._state_dir, name)
            return (
                name in (_LOCK, _UNPACK_DIRECTORY)
                or name.startswith(PREVIOUS_STATE_PREFIX)
                or any(tree == path or tree.startswith(f"{path}/") for tree in trees)
            )

        return [name for name in sorted(os.listdir(self._state_dir)) if not stays(name)]

    def _move_aside(self, now: datetime) -> str:
        """Move the present state aside; return the directory it went to."""
        existing_names = self._list_existing()
        if not existing_names:
            return ""
        previous_state_dir = os.path.join(
            self._state_dir, f"{PREVIOUS_STATE_PREFIX}{now:%Y%m%dT%H%M%SZ}"
        )
        os.mkdir(previous_state_dir, 0o700)
        os.chown(previous_state_dir, self._owner_status.st_uid, self._owner_status.st_gid)
        for name in existing_names:
            os.rename(os.path.join(self._state_dir, name), os.path.join(previous_state_dir, name))
        return previous_state_dir

    def _make_consistent(self) -> None:
        """Make databases consistent that were copied one after the other, and set their owner."""
        path = JOURNAL.locate(self._unpack_dir)
        prepare_restored(path, leap=_SKIPPED_POSITIONS if self._settings.bank.database else 0)
        for directory, _, files in os.walk(self._unpack_dir):
            self._set_owner(directory)
            for name in files:
                self._set_owner(os.path.join(directory, name))

    def _set_owner(self, path: str) -> None:
        if os.geteuid() == 0:
            os.chown(
                path, self._owner_status.st_uid, self._owner_status.st_gid, follow_symlinks=False
            )

    # Members

    def _unpack_member(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        """Unpack one member by the prefix of its name."""
        if info.name == MANIFEST_NAME:
            return
        self._file_count += file is not None
        self._show_progress(self._file_count, len(self._manifest.members), "files")
        if info.name.startswith(STATE_PREFIX):
            self._unpack_state(info, file)
        elif info.name.startswith(INCOMING_PREFIX):
            self._unpack_incoming(info, file)
        elif info.name.startswith(CONFIG_PREFIX):
            self._unpack_config(info, file)
        else:
            self._unpack_archived(info, file)

    def _unpack_state(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        path = os.path.join(self._unpack_dir, info.name.removeprefix(STATE_PREFIX))
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if info.issym():
            os.symlink(info.linkname, path)
        elif file is not None:
            self._write_file(info, file, path, mode=0o600)

    def _unpack_incoming(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        """Unpack an incoming script to its store."""
        _, store, name = info.name.split("/", 2)
        root = self._find_root(store)
        directory = os.path.join(root, ARCHIVE_DIRECTORY) if root else ""
        directory = directory or os.path.join(self._unpack_dir, _INCOMING_DIRECTORY)
        if not os.path.isdir(directory):
            os.makedirs(directory, mode=0o700)
            self._set_owner(directory)
        path = os.path.join(directory, name)
        # In an archive that survived they exist already, written once and never changed.
        if file is not None and not os.path.exists(path):
            self._write_file(info, file, path, mode=0o600)
            self._set_owner(path)

    def _unpack_config(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        """Unpack a configuration file, unless it exists."""
        path = f"/{info.name.removeprefix(CONFIG_PREFIX)}"
        if file is None:
            return
        if os.path.lexists(path):
            self._unchanged_config.append(path)
            return
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        self._write_file(info, file, path, mode=info.mode & 0o755)
        if os.geteuid() == 0:
            os.chown(path, info.uid, info.gid)
        self._written_config.append(path)

    def _unpack_archived(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        """Unpack a file or directory of an archive with owner, mode and ACLs."""
        tree = next(
            tree_name
            for tree_name in self._tree_roots
            if info.name == tree_name or info.name.startswith(f"{tree_name}/")
        )
        path = os.path.join(self._tree_roots[tree], info.name[len(tree) :].lstrip("/"))
        if os.path.lexists(path) and not info.isdir():
            return  # what the archive has is at least as new
        if info.isdir():
            os.makedirs(path, exist_ok=True)
            os.chmod(path, info.mode)
        elif file is not None:
            self._write_file(info, file, path, mode=info.mode & 0o777)
        if os.geteuid() == 0:
            os.chown(path, info.uid, info.gid)
        for key, value in info.pax_headers.items():
            if key.startswith(ACL_HEADER_PREFIX):
                # On a file system without ACLs, mode and owner must do.
                with contextlib.suppress(OSError):
                    os.setxattr(path, key.removeprefix(ACL_HEADER_PREFIX), bytes.fromhex(value))

    def _write_file(self, info: tarfile.TarInfo, file: IO[bytes], path: str, *, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(path, flags, 0o600), "wb") as target:
                copy_member(info, file, target.write)
                os.fchmod(target.fileno(), mode)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        os.utime(path, (info.mtime, info.mtime))
