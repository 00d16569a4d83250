"""Creation of backups while the daemon runs: a consistent state of all databases and files.

``make_backup`` begins a read transaction on every database within a few milliseconds
(:class:`DatabaseSnapshots`); from then on SQLite shows each as it was, whoever writes, and they are
copied one by one. Each copy is checked for damage. The order in the file (``_BackupSteps``): the
journal, the incoming scripts of its events, other databases, other files, the configuration, and
the archive if requested.

Until the incoming scripts are copied, the journal server does not trim (``_hold_journal``), so that
they stay. If no daemon runs, the backup holds the journal's lock instead, so that none starts.
"""

import contextlib
import os
import pwd
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Final, Self

from pysqlite3 import dbapi2

from steward import __version__
from steward.admin.backup.archive import (
    ARCHIVE_PREFIX,
    CONFIG_PREFIX,
    INCOMING_PREFIX,
    JOB_LOG_TREE,
    STATE_PREFIX,
    SUFFIX,
    BackupError,
    BackupManifest,
    BackupUnavailable,
    BackupUsage,
    BackupWriter,
    create_backup_file,
)
from steward.admin.backup.files import BackupFiles, list_named_files, select_files
from steward.core.config import Settings
from steward.core.databases import JOURNAL
from steward.core.events import JOB_SCRIPT, JobScript, utc_now
from steward.core.files import open_parent
from steward.core.journal import JournalReader, JournalUnavailable
from steward.core.journal.control import LONGEST_HOLD_S, HoldTrimming, send_command
from steward.core.journal.server import lock_state_dir
from steward.core.script_stores import ARCHIVE_DIRECTORY, IncomingStores, make_stores
from steward.core.sqlite import Connection, SqliteUnavailable, open_reader, translate_errors


class DatabaseSnapshots:
    """Read transactions on several databases, begun together; close it at the end.

    Args:
        root: The state directory.
        paths: Databases below it, in the order of their transactions.

    Raises:
        SqliteUnavailable, SqliteError: One of them cannot be read.
    """

    def __init__(self, state_dir: str, paths: Iterable[str]) -> None:
        self._connections: dict[str, Connection] = {}
        try:
            # Opening takes longest: the state seen is that of the transactions' begin.
            for path in paths:
                self._connections[path] = open_reader(os.path.join(state_dir, path))
            for path, connection in self._connections.items():
                with translate_errors(path):
                    connection.execute("BEGIN")
                    connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy_database(self, path: str, copy_path: str) -> None:
        """Copy one database as it was, and end its transaction.

        Args:
            path: The database.
            copy_path: The copy, which must not exist.

        Raises:
            BackupError: It is damaged.
            SqliteUnavailable: It cannot be read or written now.
        """
        connection = self._connections.pop(path)
        os.close(os.open(copy_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        copy_connection: Connection = dbapi2.connect(copy_path, isolation_level=None)
        try:
            with translate_errors(copy_path):
                connection.backup(copy_connection)
                # One file, without a log beside it.
                copy_connection.execute("PRAGMA journal_mode=DELETE")
                check_result = copy_connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            copy_connection.close()
            connection.close()
        if check_result != "ok":
            raise BackupError(
                f"cannot back up {path}: the database is damaged: {check_result}", path
            )

    def close(self) -> None:
        """Close the remaining databases."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


_MAX_OPEN_ATTEMPTS: Final = 3
"""Attempts to open all databases, one of which may be replaced meanwhile."""
_EVENTS_PER_READ: Final = 500
"""Events read from the journal at once."""
_URL_PASSWORD: Final = re.compile(r"(?<=://)([^:/@]*):[^@/]*@")
_REPLACED_SUFFIXES: Final = (".jsonl", ".json", ".key", ".conf")

ShowProgress = Callable[[int, int | None, str], None]
"""Progress callback: number done, total or None, and the noun."""


def choose_backup_path(destination: str, now: datetime) -> str:
    """Return the path of a new backup: a default name in a directory, or the given name.

    Raises:
        BackupUsage: It is neither a directory nor a name with the suffix of backups.
    """
    if os.path.isdir(destination):
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
        return os.path.join(destination, f"steward-{host}-{now:%Y%m%dT%H%M%SZ}{SUFFIX}")
    if not destination.endswith(SUFFIX):
        raise BackupUsage(
            f"invalid target {destination}: name an existing directory, or a file NAME{SUFFIX}",
            destination,
        )
    return destination


def make_backup(
    settings: Settings,
    config_path: str,
    path: str,
    *,
    with_archive: bool = False,
    with_catalog: bool = True,
    show_progress: ShowProgress = lambda *_: None,
) -> BackupManifest:
    """Make a backup.

    Args:
        settings: The whole configuration.
        config_path: File that it was read from; "" for none.
        path: Path of the backup.
        with_archive: Whether to include files of sinks, and a job log outside the state directory.
        with_catalog: Whether to include the index for content search.
        show_progress: Progress callback.

    Returns:
        Manifest of the backup.

    Raises:
        BackupError: A database is damaged, or a file of that name exists.
        BackupUnavailable, SqliteUnavailable: Something cannot be read or written now.
    """
    state_dir = os.path.abspath(settings.state_dir)
    if not os.path.exists(JOURNAL.locate(state_dir)):
        raise BackupError(f"{state_dir} contains no journal: has the daemon ever run?", state_dir)
    trusted_uids = {os.stat(state_dir).st_uid}
    with (
        create_backup_file(path, trusted_uids) as writer,
        _make_staging(path, trusted_uids) as staging,
        ExitStack() as held_locks,
    ):
        is_running = held_locks.enter_context(_hold_journal(state_dir))
        made_at = utc_now()
        selection, snapshots = _open_snapshots(settings, with_catalog=with_catalog)
        with snapshots:
            steps = _BackupSteps(state_dir, writer, snapshots, staging, show_progress)
            open_fds = steps.open_files(selection)
            steps.add_journal()
            reader = JournalReader(staging)
            head = reader.head()
            missing = steps.add_incoming(reader, make_stores(settings))
            reader.close()
            held_locks.close()
            steps.add_databases(selection)
        steps.add_files(open_fds, selection)
        steps.add_configuration(config_path, settings)
        if with_archive:
            steps.add_archive(settings)
        return writer.finish(
            BackupManifest(
                steward=__version__,
                host=socket.gethostname(),
                made_at=made_at,
                running=is_running,
                state_dir=state_dir,
                owner=_get_owner_name(state_dir),
                config=os.path.abspath(config_path) if config_path else "",
                head=head,
                stores={
                    store.name: os.path.abspath(store.directory) for store in make_stores(settings)
                },
                trees=list_trees(settings) if with_archive else {},
                ledger=_URL_PASSWORD.sub(r"\1:***@", settings.bank.database),
                missing=missing,
            )
        )


@contextmanager
def _hold_journal(state_dir: str) -> Iterator[bool]:
    """Keep the journal from being trimmed; yield whether the daemon runs."""
    try:
        send_command(state_dir, HoldTrimming(LONGEST_HOLD_S))
    except JournalUnavailable:
        lock = lock_state_dir(state_dir, wait_s=1.0)
        try:
            yield False
        finally:
            lock.close()
        return
    try:
        yield True
    finally:
        # A writer that was restarted meanwhile has no hold.
        with contextlib.suppress(JournalUnavailable):
            send_command(state_dir, HoldTrimming(0))


@contextmanager
def _make_staging(path: str, trusted_uids: Collection[int]) -> Iterator[str]:
    """Create a temporary directory beside the backup, for one database copy at a time."""
    try:
        with open_parent(path, trusted=trusted_uids) as (parent_fd, _):
            staging = os.path.realpath(
                tempfile.mkdtemp(prefix=".steward-backup-", dir=f"/proc/self/fd/{parent_fd}")
            )
    except OSError as error:
        raise BackupUnavailable(f"cannot write {path}: {error.strerror}", path) from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_snapshots(
    settings: Settings, *, with_catalog: bool
) -> tuple[BackupFiles, DatabaseSnapshots]:
    """Select the files, and begin read transactions on the databases among them."""
    for tries_left in reversed(range(_MAX_OPEN_ATTEMPTS)):
        selection = select_files(settings, with_catalog=with_catalog)
        try:
            return selection, DatabaseSnapshots(settings.state_dir, selection.databases)
        except SqliteUnavailable:
            # A database disappeared between the two steps: the catalog was rebuilt.
            if not tries_left:
                raise
    raise AssertionError


class _BackupSteps:
    """Steps of making one backup.

    Args:
        state: The state directory.
        writer: Writer of the backup.
        snapshots: Open databases.
        staging: Directory for copies of them.
        show_progress: Progress callback.
    """

    def __init__(
        self,
        state_dir: str,
        writer: BackupWriter,
        snapshots: DatabaseSnapshots,
        staging: str,
        show_progress: ShowProgress,
    ) -> None:
        self._state_dir = state_dir
        self._writer = writer
        self._snapshots = snapshots
        self._staging = staging
        self._show_progress = show_progress

    def open_files(self, selection: BackupFiles) -> dict[str, int]:
        """Open files that may be replaced or removed before they are copied."""
        open_fds = {}
        for name in selection.files:
            if name.endswith(_REPLACED_SUFFIXES):
                with contextlib.suppress(FileNotFoundError):
                    open_fds[name] = os.open(
                        os.path.join(self._state_dir, name),
                        os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW,
                    )
        return open_fds

    def add_journal(self) -> None:
        """Add the journal; its copy stays in the staging directory."""
        copy_path = JOURNAL.locate(self._staging)
        self._snapshots.copy_database(JOURNAL.name, copy_path)
        self._writer.add_file(f"{STATE_PREFIX}{JOURNAL.name}", copy_path)

    def add_incoming(self, reader: JournalReader, stores: IncomingStores) -> int:
        """Add the incoming scripts of all journal events; return how many are missing."""
        position, head, missing_count, event_count = 0, reader.head(), 0, 0
        while position < head:
            events, position = reader.read(position, {JOB_SCRIPT}, _EVENTS_PER_READ)
            for event in events:
                if isinstance(event.body, JobScript):
                    missing_count += self._add_script(event.body, stores)
                    event_count += 1
                    self._show_progress(event_count, None, "waiting scripts")
        return missing_count

    def _add_script(self, body: JobScript, stores: IncomingStores) -> int:
        """Add script and environment of an event; return how many are missing."""
        missing_count = 0
        for stored_file in (body.script, body.environment):
            if stored_file is None:
                continue
            try:
                fd = stores.get(body.store).open(stored_file)
            except FileNotFoundError:
                missing_count += 1  # purged: the journal has that event too
                continue
            self._writer.add_open_file(f"{INCOMING_PREFIX}{body.store}/{stored_file.path}", fd)
        return missing_count

    def add_databases(self, selection: BackupFiles) -> None:
        """Add all databases but the journal."""
        for done, name in enumerate(selection.databases):
            if name == JOURNAL.name:
                continue
            copy_path = os.path.join(self._staging, "copy.db")
            self._snapshots.copy_database(name, copy_path)
            self._writer.add_file(f"{STATE_PREFIX}{name}", copy_path)
            os.unlink(copy_path)
            self._show_progress(done, len(selection.databases), "databases")

    def add_files(self, open_fds: dict[str, int], selection: BackupFiles) -> None:
        """Add the other files of the state directory."""
        for name in selection.files:
            if name in open_fds:
                self._writer.add_open_file(f"{STATE_PREFIX}{name}", open_fds[name])
                continue
            with contextlib.suppress(FileNotFoundError):
                self._writer.add_file(f"{STATE_PREFIX}{name}", os.path.join(self._state_dir, name))
        for name, target in selection.links.items():
            self._writer.add_link(f"{STATE_PREFIX}{name}", target)

    def add_configuration(self, config_path: str, settings: Settings) -> None:
        """Add the configuration and the files that it names: passwords, keys, rules."""
        config_paths = [os.path.abspath(config_path)] if config_path else []
        for path in [*config_paths, *list_named_files(settings)]:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # another user's, such as a key of the web process: not ours to back up
            self._writer.add_open_file(f"{CONFIG_PREFIX}{path.lstrip('/')}", fd)

    def add_archive(self, settings: Settings) -> None:
        """Add the files of files sinks and the job log, with modes and ACLs."""
        file_count = 0
        for tree_name, root in list_trees(settings).items():
            for directory, subdirectories, files in os.walk(root):
                subdirectories[:] = sorted(
                    subdirectory
                    for subdirectory in subdirectories
                    if subdirectory != ARCHIVE_DIRECTORY
                )
                relative = os.path.relpath(directory, root)
                member_name = tree_name if relative == "." else f"{tree_name}/{relative}"
                self._writer.add_directory(member_name, directory)
                for file in sorted(files):
                    with contextlib.suppress(FileNotFoundError):
                        self._writer.add_file(
                            f"{member_name}/{file}", os.path.join(directory, file)
                        )
                    file_count += 1
                    self._show_progress(file_count, None, "files of the archive")


def list_trees(settings: Settings) -> dict[str, str]:
    """Return directories of files sinks, and of a job log outside the state directory."""
    trees = {f"{ARCHIVE_PREFIX}{name}": settings.sink_path(name) for name in settings.files_sinks()}
    if settings.accounting.location:
        trees[JOB_LOG_TREE] = settings.accounting.location
    return {name: os.path.abspath(path) for name, path in trees.items() if os.path.isdir(path)}


def _get_owner_name(state_dir: str) -> str:
    uid = os.stat(state_dir).st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
