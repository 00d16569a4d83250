"""Files sink: consumer that archives scripts and environments as files in a directory tree.

A script waits in ``.waiting/`` until a job.identity event names its owner, then it is filed under
the owner. If none comes within ``identity_wait_s`` seconds, ``tick`` files it under
``unverified/``, from where a later identity moves it. Layouts without the owner in their paths
file it at once.

:class:`ResendHandler` applies archive.resend events; :class:`FilesSink` applies all others
(job.script, job.identity, archive.purge), checks owners and orders purges. Order within a batch:
links and ACLs, the manifests' lines, one sync, the database with the cursor, and only then the
removal of replaced files: after a crash the batch comes again. The parts: :mod:`.tree`
(directories), :mod:`.script_events` (effects of events), :mod:`.batch` (changes not yet stored),
:mod:`.index` (database and states), :mod:`.owners` (access), :mod:`.retention`.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from steward.archive.contents import ScriptContents, list_script_refs, make_script_contents
from steward.archive.errors import ArchiveError, make_archive_unavailable
from steward.archive.files.batch import (
    HIDDEN_ENTRY,
    WAITING_DIRECTORY,
    FileSharing,
    PendingBatch,
    SourceFinder,
    check_stored_name,
    list_share_candidates,
)
from steward.archive.files.index import LOST_NS, PAGE_ROWS, WAITING, FileRow, FilesRecords
from steward.archive.files.layout import compile_layout
from steward.archive.files.locks import TreeClaim, TreeLock
from steward.archive.files.manifest import ManifestWriter
from steward.archive.files.owners import (
    AccessChange,
    AccessUpdater,
    DirectoryOwners,
    resolve_user_name,
)
from steward.archive.files.permissions import resolve_group_ids
from steward.archive.files.placement import FilePlacer
from steward.archive.files.reader import ContentKind
from steward.archive.files.retention import RetentionWorker
from steward.archive.files.script_events import ScriptFiling, list_incoming_names, purge_files
from steward.archive.files.tree import ArchiveTree
from steward.archive.settings import IDENTITY_WAIT_S
from steward.core.config import Settings
from steward.core.consumers import Append, Rejected
from steward.core.errors import StewardError, Unavailable
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_IDENTITY,
    JOB_SCRIPT,
    ArchiveResend,
    Event,
    JobScript,
    ResentScript,
)
from steward.core.script_stores import STATE_STORE, IncomingStores
from steward.core.storage import move_cursor

_CONTENT_KINDS: Final[tuple[ContentKind, ContentKind]] = ("script", "environment")
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class ResendHandler:
    """Handler of archive.resend events: archives missing scripts again.

    Args:
        tree: The tree.
        filing: Files scripts into the tree.
        pending: State of the batch.
        contents: Reads script bytes.
        environments: Whether environments are archived.
    """

    def __init__(
        self,
        tree: ArchiveTree,
        filing: ScriptFiling,
        pending: PendingBatch,
        contents: ScriptContents,
        *,
        environments: bool,
    ) -> None:
        self._tree = tree
        self._filing = filing
        self._pending = pending
        self._contents = contents
        self._environments = environments

    def resend(self, event: Event) -> list[str]:
        """Archive the scripts of an event that are missing; leave existing ones alone.

        Returns:
            One line for each script whose bytes are gone; the others of the event are filed.

        Raises:
            Unavailable: Bytes cannot be read now.
            OSError: The tree cannot be written.
        """
        body: ArchiveResend = event.body
        losses: list[str] = []
        for resent in body.scripts:
            try:
                self._resend_script(event.cluster, resent)
            except Unavailable:
                raise
            except StewardError as error:
                losses.append(f"cannot archive {resent.script_key} again: {error}")
        return losses

    def _resend_script(self, cluster: str, resent: ResentScript) -> None:
        """Archive one script again if it is missing, and file it under its owner."""
        ref = (cluster, resent.script_key)
        row = self._pending.rows.get(ref)
        if row is None or row.since_ns == LOST_NS:
            body = resent.script
            self._write_waiting_files(cluster, resent.script_key, body)
            self._filing.add_waiting(ref, body)
        self._filing.file_resent(ref, resent.identity)

    def _write_waiting_files(self, cluster: str, key: str, body: JobScript) -> None:
        """Read a script's files, check their checksums, and put them into ``.waiting/``."""
        files: list[tuple[str, bytes]] = []
        for kind in _CONTENT_KINDS if self._environments else _CONTENT_KINDS[:1]:
            stored = body.script if kind == "script" else body.environment
            if stored is None:
                continue
            data = self._contents.read(cluster, key, body, kind)
            if data is None or hashlib.sha256(data).hexdigest() != stored.sha256:
                raise ArchiveError(
                    f"its {kind} was changed in its directory: run 'steward archive verify'", key
                )
            files.append((check_stored_name(stored.path), data))
        # Write after both were read: half a script is never left behind.
        for name, data in files:
            self._write_file(name, data)

    def _write_file(self, name: str, data: bytes) -> None:
        """Write a file to ``.waiting/``, durably and atomically."""
        fd = self._tree.get_directory_fd(WAITING_DIRECTORY, HIDDEN_ENTRY)
        temporary = f".copy.{name}"
        out = os.open(temporary, _WRITE, 0o600, dir_fd=fd)
        with os.fdopen(out, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(out)
        os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
        self._tree.record_change(WAITING_DIRECTORY)


log = logging.getLogger(__name__)

_OWNERS_EVERY_S = 60.0
_GROUPS_EVERY_S = 3600.0
_TICK_S = 5.0
_OVERDUE_AT_ONCE = 500
_MAX_LISTED_LOSSES = 10


class FilesSink:
    """Consumer ``archive.<name>`` for a directory tree.

    Args:
        settings: The whole configuration.
        name: Name of the sink in the configuration.
        stores: Stores of incoming bytes.
        resolve: Returns the present name of a uid.
        clock: Monotonic clock, in seconds.
        page_rows: Most rows of one query of the sink's database.
        identity_wait_s: Longest time a script waits for its job's identity, in seconds.

    Raises:
        LayoutError: The layout is invalid.
        SqliteUnavailable: The state directory cannot be used now.
    """

    kinds = frozenset({JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_PURGE, ARCHIVE_RESEND})
    batch_events = 500
    gather_s = 0.01

    def __init__(
        self,
        settings: Settings,
        name: str,
        stores: IncomingStores,
        *,
        resolve: Callable[[int], str] = resolve_user_name,
        clock: Callable[[], float] = time.monotonic,
        page_rows: int = PAGE_ROWS,
        identity_wait_s: float = IDENTITY_WAIT_S,
    ) -> None:
        self.name = f"archive.{name}"
        self._sink_name = name
        self._clock = clock
        self._identity_wait_s = identity_wait_s
        self._sink_settings = settings.files_sink(name)
        self._layout = compile_layout(self._sink_settings.layout)
        self._tree = ArchiveTree(settings.sink_path(name))
        self._records = FilesRecords(settings, name, page_rows=page_rows)
        self._owners = DirectoryOwners(self._records, resolve, is_plain=self._layout.is_plain)
        self._lock = TreeLock(f"{settings.state_dir}/archive-{name}.lock")
        self._claim = TreeClaim(settings.state_dir, self._tree.root)
        self._manifests = ManifestWriter(self._tree)
        self._pending = PendingBatch(self._tree, self._records, self._owners, self._manifests)
        placer = FilePlacer(self._tree, self._layout, defers_sync=True)
        self._stores = stores
        self._purged_names: list[str] = []
        compress = self._sink_settings.compress == "zstd"
        self._sources = SourceFinder(self._tree, stores, self._records, placer, compress=compress)
        self._sharing = FileSharing(self._tree, self._records)
        self._filing = ScriptFiling(
            settings,
            name,
            self._layout,
            self._tree,
            self._records,
            self._owners,
            placer,
            self._sources,
            self._manifests,
            self._pending,
            self._sharing,
        )
        self._contents = make_script_contents(settings, stores)
        self._resend_handler = ResendHandler(
            self._tree,
            self._filing,
            self._pending,
            self._contents,
            environments=settings.archive.environments and self._sink_settings.environments,
        )
        self._retention = RetentionWorker(self._records, name, self._sink_settings)
        self._access_updater = AccessUpdater(self._tree, self._records, self._layout)
        self._applied_count = 0
        self._oldest_wait_ns = 0
        self._has_access_changes = True
        self._losses: list[Rejected] = []
        self._next_owner_check = 0.0
        self._next_group_check = 0.0

    def cursor(self) -> int:
        """Return the position of the last applied event; 0 at first."""
        return self._records.load_cursor()

    def prepare(self) -> None:
        """Create the tree's root and its marker, or check that they exist.

        Capture writes to the tree's store only if the marker exists: call this first.

        Raises:
            ArchiveUnavailable: The tree cannot be used now.
        """
        with self._use_tree():
            pass

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """File scripts, set their owners, purge scripts; then move the cursor.

        Raises:
            ArchiveUnavailable: The tree cannot be used now.
            Rejected: The bytes of one event are gone, or something blocks its path.
        """
        del append
        conflicts = self._owners.find_conflicts(_iterate_owners(events))
        self._mark_changes(conflicts)
        with self._use_tree():
            for uid, user, _ in conflicts:
                self._access_updater.apply_page(self._filing.gids, (uid, user))
            self._pending.begin(self._records.load_rows(list_script_refs(events)))
            self._oldest_wait_ns = min(self._oldest_wait_ns, self._pending.now_ns)
            losses: list[Rejected] = []
            self._pending.is_replay = self._applied_count < self.batch_events
            if self._layout.can_share_files:
                self._sharing.begin(
                    list_share_candidates(events, self._pending.rows, self._records)
                )
            for event in events:
                try:
                    self._apply_event(event, losses)
                except Unavailable:
                    raise
                except StewardError as error:
                    raise Rejected(str(error), event) from error
            self._pending.finish(self._sources)
            with self._records.writing() as connection:
                self._pending.write(connection)
                move_cursor(connection, upto)
            self._applied_count += len(events)
            self._losses += losses
            self._pending.remove_replaced()
            self._empty_stores()

    def _apply_event(self, event: Event, losses: list[Rejected]) -> None:
        """Apply one event; collect scripts lost in a resend."""
        if event.kind == JOB_SCRIPT:
            self._filing.file_script(event)
        elif event.kind == JOB_IDENTITY:
            self._filing.apply_identity(event)
        elif event.body.sink not in {"", self._sink_name}:
            return
        elif event.kind == ARCHIVE_RESEND:
            errors = self._resend_handler.resend(event)
            if errors:
                losses.append(Rejected(_format_losses(errors, len(event.body.scripts)), event))
        else:
            if not event.body.sink:
                self._purged_names += list_incoming_names(event, self._pending)
            purge_files(event, self._pending, self._tree, self._records, self._manifests)

    def _empty_stores(self) -> None:
        """Remove scripts that were purged everywhere from the stores, which are otherwise trimmed.

        Only after the commit: a repeated batch may have to read them. Stores of other sinks are
        theirs, and may be on an unavailable file server.
        """
        names, self._purged_names = self._purged_names, []
        for store in self._stores if names else ():
            if store.name not in {self.name, STATE_STORE}:
                continue
            present = [name for name in names if os.path.lexists(f"{store.directory}/{name}")]
            try:
                if present:
                    store.unlink(present)
            except StewardError as error:
                log.warning(
                    "cannot remove the captured files of purged or erased jobs from %s; they "
                    "stay until the journal is trimmed: %s",
                    store.directory,
                    error,
                )

    def tick(self, append: Append) -> float:
        """File scripts that waited too long, check owners, order purges; return seconds to wait.

        Raises:
            ArchiveUnavailable: The tree cannot be used now.
            Rejected: Some scripts to resend are nowhere; the others were filed.
        """
        if self._losses:
            (first, *more), self._losses = self._losses, []
            raise Rejected(str(first), first.event, more)
        now = self._clock()
        due_s = self._file_next_overdue(self._identity_wait_s)
        if now >= self._next_owner_check:
            changes = self._owners.check()
            if changes is not None:
                self._mark_changes(changes)
                self._next_owner_check = now + _OWNERS_EVERY_S
        has_more = self._update_access()
        self._retention.order_purges(append)
        return 0.0 if has_more else min(due_s, _TICK_S)

    def file_waiting(self) -> None:
        """File all scripts that wait for their job's identity under ``unverified/`` now.

        For a run that ends: no one would file them later.

        Raises:
            ArchiveUnavailable: The tree cannot be used now.
        """
        while self._file_next_overdue(0.0) == 0.0:
            continue

    def _file_next_overdue(self, wait_s: float) -> float:
        """File scripts that waited too long; return seconds until the next one is overdue."""
        wait_ns = int(wait_s * 1e9)
        cutoff_ns = time.time_ns() - wait_ns
        # No waiting script is older: at most one query in the time that scripts wait.
        if self._oldest_wait_ns <= cutoff_ns:
            rows = self._records.select_rows(
                f"state = ? AND since_ns <= ? LIMIT {_OVERDUE_AT_ONCE}", WAITING, cutoff_ns
            )
            if rows:
                self._file_overdue(rows)
            if len(rows) == _OVERDUE_AT_ONCE:
                return 0.0
            oldest = self._records.query(
                "SELECT min(since_ns) FROM script WHERE state = ?", WAITING
            )
            self._oldest_wait_ns = LOST_NS if oldest[0][0] is None else oldest[0][0]
        return max(0.0, (self._oldest_wait_ns - cutoff_ns) / 1e9)

    def _file_overdue(self, rows: Sequence[FileRow]) -> None:
        """File overdue scripts under ``unverified/`` in one batch."""
        with self._use_tree():
            self._pending.begin({(row.cluster, row.key): row for row in rows})
            for row in rows:
                try:
                    self._filing.file_unverified(row)
                except Unavailable:
                    raise
                except StewardError as error:
                    # Keep its row: some of its files may be in the tree, and a purge must find
                    # them.
                    log.error("%s cannot archive %s: %s", self.name, row.key, error)
                    self._pending.set_row(msgspec.structs.replace(row, since_ns=LOST_NS))
            self._pending.finish(self._sources)
            with self._records.writing() as connection:
                self._pending.write(connection)
            self._pending.remove_replaced()

    def _mark_changes(self, changes: Iterable[AccessChange]) -> None:
        for uid, user, shut in changes:
            self._owners.set_access(uid, user, revoke=shut)
            self._has_access_changes = True

    def _update_access(self) -> bool:
        if self._has_access_changes and self._access_updater.has_queued_changes():
            with self._use_tree():
                self._has_access_changes = self._access_updater.apply_page(self._filing.gids)
        else:
            self._has_access_changes = False
        return self._has_access_changes

    @contextlib.contextmanager
    def _use_tree(self) -> "Iterator[None]":
        """Open and lock the tree; convert OSError to ArchiveUnavailable."""
        try:
            with self._lock.acquire():
                self._open()
                self._pending.remove_leftovers()
                yield
        except OSError as error:
            self._reset()
            raise make_archive_unavailable(self._tree.root, error) from error
        except BaseException:
            self._reset()
            raise

    def _open(self) -> None:
        """Open the tree, claim it, and refresh the groups once per hour."""
        expected_id = self._records.load_marker()
        marker_id = self._tree.open(expected_id)
        self._claim.acquire(self._tree.fd)
        if not expected_id:
            self._records.set_marker("root", marker_id)
        now = self._clock()
        if now >= self._next_group_check:
            self._filing.gids = resolve_group_ids(self._sink_settings.groups)
            self._next_group_check = now + _GROUPS_EVERY_S

    def _reset(self) -> None:
        """Drop the batch, and close the tree."""
        self._purged_names = []
        self._sharing.drop()
        self._pending.drop()
        self._sources.close()
        self._claim.release()
        self._tree.close()

    def close(self) -> None:
        """Close files and the database."""
        self._reset()
        self._lock.close()
        self._records.close()
        self._contents.close()


def _format_losses(lost: Sequence[str], total: int) -> str:
    """Format the losses of a resend as one line."""
    text = "; ".join(lost[:_MAX_LISTED_LOSSES])
    if len(lost) > _MAX_LISTED_LOSSES:
        text += f"; and {len(lost) - _MAX_LISTED_LOSSES} more"
    return f"{len(lost)} of {total} scripts are lost: {text}" if total > 1 else text


def _iterate_owners(events: Iterable[Event]) -> Iterator[tuple[int, str]]:
    """Yield uid and user name of every identity in the events."""
    for event in events:
        if event.kind == JOB_IDENTITY and event.body.record.uid is not None:
            yield event.body.record.uid, event.body.record.user
        elif event.kind == ARCHIVE_RESEND:
            for resent in event.body.scripts:
                record = resent.identity.record if resent.identity else None
                if record is not None and record.uid is not None:
                    yield record.uid, record.user
