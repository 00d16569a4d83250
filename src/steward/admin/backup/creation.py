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
from steward.core.events import JOB_SCRIPT, JobScript, utc_now
from steward.core.files import open_parent
from steward.core.incoming import ARCHIVE_DIRECTORY, IncomingStores, make_stores
from steward.core.journal import JournalLink, JournalReader, JournalUnavailable
from steward.core.journal.reader import JOURNAL_FILENAME
from steward.core.journal.server import lock_state_dir
from steward.core.sqlite import Connection, SqliteUnavailable, open_reader, translate_errors
from steward.core.waits import Stop


class DatabaseSnapshots:
    """Read transactions on several databases, begun together; close it at the end.

    Args:
        root: The state directory.
        paths: Databases below it, in the order of their transactions.

    Raises:
        SqliteUnavailable, SqliteError: One of them cannot be read.
    """

    def __init__(self, root: str, paths: Iterable[str]) -> None:
        self._open: dict[str, Connection] = {}
        try:
            # Opening takes longest: the state seen is that of the transactions' begin.
            for path in paths:
                self._open[path] = open_reader(os.path.join(root, path))
            for path, connection in self._open.items():
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

    def copy(self, path: str, copy_path: str) -> None:
        """Copy one database as it was, and end its transaction.

        Args:
            path: The database.
            copy_path: The copy, which must not exist.

        Raises:
            BackupError: It is damaged.
            SqliteUnavailable: It cannot be read or written now.
        """
        connection = self._open.pop(path)
        os.close(os.open(copy_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        target: Connection = dbapi2.connect(copy_path, isolation_level=None)
        try:
            with translate_errors(copy_path):
                connection.backup(target)
                # One file, without a log beside it.
                target.execute("PRAGMA journal_mode=DELETE")
                result = target.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            target.close()
            connection.close()
        if result != "ok":
            raise BackupError(
                f"{path} is damaged, and a copy of it would be of no use: {result}", path
            )

    def close(self) -> None:
        """Close the remaining databases."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()


_HOLD_S: Final = 3600.0
"""Longest time that the journal server waits with trimming, in seconds."""
_TRIES: Final = 3
"""Attempts to open all databases, one of which may be replaced meanwhile."""
_PAGE: Final = 500
"""Events read from the journal at once."""
_PASSWORD: Final = re.compile(r"(?<=://)([^:/@]*):[^@/]*@")
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
            f"{destination} is no directory, and no name for a backup: name a directory that "
            "is there, or "
            f"a file NAME{SUFFIX}",
            destination,
        )
    return destination


def make_backup(
    settings: Settings,
    config: str,
    path: str,
    *,
    archive: bool = False,
    catalogue: bool = True,
    show_progress: ShowProgress = lambda *_: None,
) -> BackupManifest:
    """Make a backup.

    Args:
        settings: The whole configuration.
        config: File that it was read from; "" for none.
        path: Path of the backup.
        archive: Whether to include files of sinks, and a job log outside the state directory.
        catalogue: Whether to include the index for content search.
        show_progress: Progress callback.

    Returns:
        Manifest of the backup.

    Raises:
        BackupError: A database is damaged, or a file of that name exists.
        BackupUnavailable, SqliteUnavailable: Something cannot be read or written now.
    """
    state = os.path.abspath(settings.state_dir)
    if not os.path.exists(os.path.join(state, JOURNAL_FILENAME)):
        raise BackupError(f"{state} holds no journal: nothing has run there yet", state)
    trusted = {os.stat(state).st_uid}
    with (
        create_backup_file(path, trusted) as writer,
        _make_staging(path, trusted) as staging,
        ExitStack() as held_locks,
    ):
        is_running = held_locks.enter_context(_hold_journal(state))
        at = utc_now()
        selected, snapshots = _open_snapshots(settings, catalogue=catalogue)
        with snapshots:
            steps = _BackupSteps(state, writer, snapshots, staging, show_progress)
            files = steps.open_files(selected)
            steps.add_journal()
            reader = JournalReader(staging)
            head = reader.head()
            missing = steps.add_incoming(reader, make_stores(settings))
            reader.close()
            held_locks.close()
            steps.add_databases(selected)
        steps.add_files(files, selected)
        steps.add_configuration(config, settings)
        if archive:
            steps.add_archive(settings)
        return writer.end(
            BackupManifest(
                steward=__version__,
                host=socket.gethostname(),
                made_at=at,
                running=is_running,
                state_dir=state,
                owner=_get_owner_name(state),
                config=os.path.abspath(config) if config else "",
                head=head,
                stores={
                    store.name: os.path.abspath(store.directory) for store in make_stores(settings)
                },
                trees=list_trees(settings) if archive else {},
                ledger=_PASSWORD.sub(r"\1:***@", settings.bank.database),
                missing=missing,
            )
        )


@contextmanager
def _hold_journal(state: str) -> Iterator[bool]:
    """Keep the journal from being trimmed; yield whether the daemon runs."""
    link = JournalLink(state, Stop())
    try:
        link.send_command("hold", _HOLD_S)
    except JournalUnavailable:
        lock = lock_state_dir(state, wait_s=1.0)
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
            link.send_command("hold", 0)
        link.close()


@contextmanager
def _make_staging(path: str, trusted: Collection[int]) -> Iterator[str]:
    """Create a temporary directory beside the backup, for one database copy at a time."""
    try:
        with open_parent(path, trusted=trusted) as (directory, _):
            staging = os.path.realpath(
                tempfile.mkdtemp(prefix=".steward-backup-", dir=f"/proc/self/fd/{directory}")
            )
    except OSError as error:
        raise BackupUnavailable(f"{path} cannot be written: {error.strerror}", path) from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_snapshots(
    settings: Settings, *, catalogue: bool
) -> tuple[BackupFiles, DatabaseSnapshots]:
    """Select the files, and begin read transactions on the databases among them."""
    for tries_left in reversed(range(_TRIES)):
        selected = select_files(settings, catalogue=catalogue)
        try:
            return selected, DatabaseSnapshots(settings.state_dir, selected.databases)
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
        state: str,
        writer: BackupWriter,
        snapshots: DatabaseSnapshots,
        staging: str,
        show_progress: ShowProgress,
    ) -> None:
        self._state = state
        self._writer = writer
        self._snapshots = snapshots
        self._staging = staging
        self._show_progress = show_progress

    def open_files(self, selected: BackupFiles) -> dict[str, int]:
        """Open files that may be replaced or removed before they are copied."""
        opened = {}
        for name in selected.files:
            if name.endswith(_REPLACED_SUFFIXES):
                with contextlib.suppress(FileNotFoundError):
                    opened[name] = os.open(
                        os.path.join(self._state, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                    )
        return opened

    def add_journal(self) -> None:
        """Add the journal; its copy stays in the staging directory."""
        copy = os.path.join(self._staging, JOURNAL_FILENAME)
        self._snapshots.copy(JOURNAL_FILENAME, copy)
        self._writer.add(f"{STATE_PREFIX}{JOURNAL_FILENAME}", copy)

    def add_incoming(self, reader: JournalReader, stores: IncomingStores) -> int:
        """Add the incoming scripts of all journal events; return how many are missing."""
        position, head, missing, done = 0, reader.head(), 0, 0
        while position < head:
            events, position = reader.read(position, {JOB_SCRIPT}, _PAGE)
            for event in events:
                if isinstance(event.body, JobScript):
                    missing += self._add_script(event.body, stores)
                    done += 1
                    self._show_progress(done, None, "waiting scripts")
        return missing

    def _add_script(self, body: JobScript, stores: IncomingStores) -> int:
        """Add script and environment of an event; return how many are missing."""
        missing = 0
        for stored in (body.script, body.environment):
            if stored is None:
                continue
            try:
                fd = stores.get(body.store).open(stored)
            except FileNotFoundError:
                missing += 1  # purged: the journal has that event too
                continue
            self._writer.add_open(f"{INCOMING_PREFIX}{body.store}/{stored.path}", fd)
        return missing

    def add_databases(self, selected: BackupFiles) -> None:
        """Add all databases but the journal."""
        for done, name in enumerate(selected.databases):
            if name == JOURNAL_FILENAME:
                continue
            copy = os.path.join(self._staging, "copy.db")
            self._snapshots.copy(name, copy)
            self._writer.add(f"{STATE_PREFIX}{name}", copy)
            os.unlink(copy)
            self._show_progress(done, len(selected.databases), "databases")

    def add_files(self, opened: dict[str, int], selected: BackupFiles) -> None:
        """Add the other files of the state directory."""
        for name in selected.files:
            if name in opened:
                self._writer.add_open(f"{STATE_PREFIX}{name}", opened[name])
                continue
            with contextlib.suppress(FileNotFoundError):
                self._writer.add(f"{STATE_PREFIX}{name}", os.path.join(self._state, name))
        for name, target in selected.links.items():
            self._writer.add_link(f"{STATE_PREFIX}{name}", target)

    def add_configuration(self, config: str, settings: Settings) -> None:
        """Add the configuration and the files that it names: passwords, keys, rules."""
        config_paths = [os.path.abspath(config)] if config else []
        for path in [*config_paths, *list_named_files(settings)]:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # another user's, such as a key of the web process: not ours to back up
            self._writer.add_open(f"{CONFIG_PREFIX}{path.lstrip('/')}", fd)

    def add_archive(self, settings: Settings) -> None:
        """Add the files of files sinks and the job log, with modes and ACLs."""
        done = 0
        for name, root in list_trees(settings).items():
            for directory, subdirectories, files in os.walk(root):
                subdirectories[:] = sorted(
                    subdirectory
                    for subdirectory in subdirectories
                    if subdirectory != ARCHIVE_DIRECTORY
                )
                relative = os.path.relpath(directory, root)
                prefix = name if relative == "." else f"{name}/{relative}"
                self._writer.add_directory(prefix, directory)
                for file in sorted(files):
                    with contextlib.suppress(FileNotFoundError):
                        self._writer.add(f"{prefix}/{file}", os.path.join(directory, file))
                    done += 1
                    self._show_progress(done, None, "files of the archive")


def list_trees(settings: Settings) -> dict[str, str]:
    """Return directories of files sinks, and of a job log outside the state directory."""
    trees = {f"{ARCHIVE_PREFIX}{name}": settings.sink_path(name) for name in settings.files_sinks()}
    if settings.accounting.location:
        trees[JOB_LOG_TREE] = settings.accounting.location
    return {name: os.path.abspath(path) for name, path in trees.items() if os.path.isdir(path)}


def _get_owner_name(state: str) -> str:
    uid = os.stat(state).st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
