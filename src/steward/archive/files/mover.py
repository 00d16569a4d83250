"""Archive mover: moves files from the sink's tree to a second tree (``move_to``).

The archive is written locally and kept on another file system. :class:`StaleCopies` removes copies
of scripts that changed or were purged while they were copied. :class:`ArchiveMover` runs in its own
worker, because the second tree's server may hang: the sink never waits for it. Each file is copied,
compared with its checksum, made durable in the second tree, and only then removed here; the next
run completes what a crash interrupted. The tree's lock is held only for the removal. Identities and
purges of moved scripts, which the sink stores in the table ``later``, are applied here, too.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence

import msgspec

from steward.archive.errors import ArchiveError, make_archive_unavailable
from steward.archive.files.batch import (
    HIDDEN_ENTRY,
    FileSharing,
    PendingBatch,
    SourceFinder,
    remove_empty_directories,
)
from steward.archive.files.compression import is_compressed_name, strip_compression_suffix
from steward.archive.files.index import (
    MOVED,
    PLACED,
    UNVERIFIED,
    ByteCounts,
    FileRow,
    FilesRecords,
    save_rows,
)
from steward.archive.files.layout import UNVERIFIED as UNVERIFIED_DIRECTORY
from steward.archive.files.layout import compile_layout
from steward.archive.files.locks import TreeLock
from steward.archive.files.manifest import (
    MANIFEST_VERSION,
    ManifestFact,
    ManifestWriter,
    encode_fact,
)
from steward.archive.files.owners import AccessUpdater, DirectoryOwners, queue_access_change
from steward.archive.files.permissions import FileReaders, resolve_group_ids
from steward.archive.files.placement import FilePlacer, PlacementTarget, compute_file_digest
from steward.archive.files.script_events import (
    ScriptFiling,
    purge_files,
    remove_manifest_lines,
    rename_fact_files,
)
from steward.archive.files.tree import ArchiveTree, BytesGone, ByteSource, DirectoryAccess
from steward.core.config import Settings
from steward.core.errors import StewardError, Unavailable
from steward.core.events import ARCHIVE_PURGE, ArchivePurge, Event, JobIdentity, utc_now
from steward.core.script_stores import IncomingStores
from steward.core.waits import Stop

_row_decoder = msgspec.json.Decoder(FileRow)


class StaleCopies:
    """Remover of stale copies in the second tree.

    Args:
        tree: The second tree.
        records: Database of the sink, for that tree.
        manifests: Manifests of that tree.
    """

    def __init__(self, tree: ArchiveTree, records: FilesRecords, manifests: ManifestWriter) -> None:
        self._tree = tree
        self._records = records
        self._manifests = manifests

    def remove(self, copies: Sequence[FileRow]) -> None:
        """Remove copies of scripts that changed or were purged while they were copied.

        Raises:
            OSError: The tree cannot be written.
        """
        for copy in copies:
            path = self._records.get_directory_path(copy.directory)
            for name in (copy.script_name, copy.env_name):
                if name:
                    self._tree.unlink(path, name)
        remove_manifest_lines(copies, self._records, self._manifests, None, utc_now())
        remove_empty_directories(self._tree, self._records, {copy.directory for copy in copies})

    def remove_after_crash(self) -> None:
        """Remove copies of scripts purged during a copy that a crash interrupted.

        Raises:
            OSError: The tree cannot be written.
        """
        saved_rows = self._records.query("SELECT row FROM moving")
        if not saved_rows:
            return
        rows = [_row_decoder.decode(row) for (row,) in saved_rows]
        current_rows = self._records.load_rows([(row.cluster, row.key) for row in rows])
        for row in rows:
            if (row.cluster, row.key) in current_rows:
                continue
            path = self._records.get_directory_path(row.directory)
            for name, sha in ((row.script_name, row.script_sha), (row.env_name, row.env_sha)):
                if name and sha:
                    self._remove_copies(row, path, name, sha)
            remove_manifest_lines([row], self._records, self._manifests, None, utc_now())
            remove_empty_directories(self._tree, self._records, {row.directory})
        with self._records.writing() as connection:
            connection.execute("DELETE FROM moving")

    def _remove_copies(self, row: FileRow, path: str, name: str, sha: bytes) -> None:
        """Remove every copy of a file in its directory, whatever its name variant."""
        try:
            fd = self._tree.get_directory_fd(path)
            names = os.listdir(fd)
        except FileNotFoundError:
            return
        plain = strip_compression_suffix(name)
        stem = plain.rpartition(".")[0] if plain.endswith((".sh", ".env")) else plain
        for copy_name in names:
            if (
                copy_name.startswith(stem)
                and not self._records.is_name_taken(row.job_id, row.key, row.directory, copy_name)
                and compute_file_digest(fd, copy_name) == sha
            ):
                self._tree.unlink(path, copy_name)


log = logging.getLogger(__name__)

_MOVE_BATCH = 200
_IDLE_S = 5.0
_OWNERS_EVERY_S = 5.0
# Retry delay after an error, in seconds: first and largest.
_RETRY_S, _MAX_RETRY_S = 60, 3600
# Slurm may still identify the job: keep its script within easy reach for a day.
_UNVERIFIED_GRACE_NS = 86400 * 10**9

_encode_row = msgspec.json.encode
_purge_decoder = msgspec.json.Decoder(ArchivePurge)
_identity_decoder = msgspec.json.Decoder(JobIdentity)


class _CopiedScript(msgspec.Struct, frozen=True):
    """Copied script: its row, its future row, and its manifest facts."""

    row: FileRow
    moved_row: FileRow
    told: list[ManifestFact]


class ArchiveMover:
    """Worker that moves the files of sink ``name`` to its ``move_to``.

    Args:
        settings: The whole configuration; the sink's ``move_to`` must not be empty.
        name: The sink's name.

    Raises:
        ArchiveError: The sink has no ``move_to``.
        SqliteUnavailable: The state directory cannot be used now.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = f"archive.{name}.mover"
        self._sink_settings = settings.files_sink(name)
        if not self._sink_settings.move_to:
            raise ArchiveError(f"sink {name} cannot be moved: set its move_to", name)
        self._layout = compile_layout(self._sink_settings.layout)
        self._first_tree = ArchiveTree(settings.sink_path(name))
        self._second_tree = ArchiveTree(self._sink_settings.move_to)
        self._records = FilesRecords(settings, name, moved=True)
        self._first_records = FilesRecords(settings, name)
        self._owners = DirectoryOwners(self._records, is_plain=self._layout.is_plain)
        self._lock = TreeLock(f"{settings.state_dir}/archive-{name}.lock")
        self._first_manifests = ManifestWriter(self._first_tree)
        self._manifests = ManifestWriter(self._second_tree)
        self._pending = PendingBatch(
            self._second_tree, self._records, self._owners, self._manifests
        )
        self._placer = FilePlacer(self._second_tree, self._layout)
        self._sources = SourceFinder(
            self._second_tree, IncomingStores(()), self._records, self._placer
        )
        self._sharing = FileSharing(self._second_tree, self._records)
        self._stale_copies = StaleCopies(self._second_tree, self._records, self._manifests)
        self._filing = ScriptFiling(
            settings,
            name,
            self._layout,
            self._second_tree,
            self._records,
            self._owners,
            self._placer,
            self._sources,
            self._manifests,
            self._pending,
            self._sharing,
        )
        self._unmovable: set[tuple[str, str]] = set()
        self._access_updater = AccessUpdater(self._second_tree, self._records, self._layout)
        self._next_owner_check = 0.0

    def run_once(self, stop: Stop) -> float:
        """Move files that are old enough, batch by batch, until none is left or ``stop`` is set.

        Returns:
            Seconds until the next call.

        Raises:
            ArchiveUnavailable: One of the trees cannot be used now; nothing is lost.
            SqliteUnavailable: The sink's database cannot be used now.
        """
        busy = True
        while busy and not stop.is_set():
            with self._use_trees():
                busy = (
                    self._check_owners() | self._apply_deferred() | self._move(self._select_due())
                )
        return _IDLE_S

    @contextlib.contextmanager
    def _use_trees(self) -> "Iterator[None]":
        failed_path = self._first_tree.root
        try:
            self._first_tree.open(self._records.load_marker())
            failed_path = self._second_tree.root
            expected_id = self._records.load_marker("move_to")
            marker_id = self._second_tree.open(expected_id)
            if not expected_id:
                self._records.set_marker("move_to", marker_id)
            failed_path = (
                f"{self._second_tree.root} (or {self._first_tree.root}, which is moved there)"
            )
            self._pending.remove_leftovers()
            self._stale_copies.remove_after_crash()
            yield
        except OSError as error:
            self._reset()
            raise make_archive_unavailable(failed_path, error) from error
        except BaseException:
            self._reset()
            raise

    def _reset(self) -> None:
        self._pending.drop()
        self._sharing.drop()
        self._first_manifests.drop()
        self._first_tree.close()
        self._second_tree.close()

    # ------------------------------------------------------------ moving on

    def _select_due(self) -> list[FileRow]:
        """Return scripts that are old enough to move."""
        now_ns = time.time_ns()
        cutoff_ns = now_ns - int(self._sink_settings.move_after_s * 1e9)
        rows: list[FileRow] = []
        for state, limit_ns in (
            (PLACED, cutoff_ns),
            (UNVERIFIED, cutoff_ns - _UNVERIFIED_GRACE_NS),
        ):
            rows += self._records.select_rows(
                "state = ? AND mtime_ns < ? AND since_ns < ? ORDER BY mtime_ns LIMIT ?",
                state,
                limit_ns,
                limit_ns,
                _MOVE_BATCH + len(self._unmovable),
            )
        return [row for row in rows if (row.cluster, row.key) not in self._unmovable]

    def _move(self, rows: Sequence[FileRow]) -> bool:
        """Copy scripts to the second tree, then settle them; return whether there were any."""
        if not rows:
            return False
        self._pending.begin({})
        with self._records.writing() as connection:
            # Record the copies first, so that a crash cannot leave a copy of a script purged
            # meanwhile.
            connection.executemany(
                "INSERT OR REPLACE INTO moving VALUES (?, ?, ?)",
                [(row.key, row.cluster, _encode_row(row)) for row in rows],
            )
        self._sharing.begin(
            (row.holder, row.script_sha, row.env_sha) for row in rows if row.holder and row.shared
        )
        copies: list[_CopiedScript] = []
        for row in rows:
            try:
                copies.append(self._copy(row))
            except FileNotFoundError:
                # It was purged or moved within the tree since the query; otherwise verify reports
                # it.
                self._skip(row, "its files are missing from their directory")
            except BytesGone as error:
                self._skip(row, str(error))
        self._manifests.flush()
        self._second_tree.sync()
        with self._lock.acquire():
            changed_copies = self._remove_originals(copies)
        # Without the lock, because the second tree may hang.
        self._stale_copies.remove(changed_copies)
        with self._records.writing() as connection:
            connection.execute("DELETE FROM moving")
        return True

    def _skip(self, row: FileRow, reason: str) -> None:
        """Log and exclude a script whose files cannot be copied."""
        ref = (row.cluster, row.key)
        if self._records.load_rows([ref]).get(ref) == row:
            self._unmovable.add(ref)
            log.error("%s cannot move %s: %s", self.name, row.key, reason)

    def _copy(self, row: FileRow) -> "_CopiedScript":
        """Copy a script's files and manifest facts to the second tree."""
        path = self._records.get_directory_path(row.directory)
        directory_fd = self._first_tree.get_directory_fd(path)
        script_suffix, env_suffix = self._layout.suffixes
        name, suffix = (
            (row.script_name, script_suffix) if row.script_name else (row.env_name, env_suffix)
        )
        uid = self._owners.get_reader_uid(row.uid, row.user)
        gids = self._resolve_gids()
        if path.split("/")[0] == UNVERIFIED_DIRECTORY:
            access = msgspec.structs.replace(HIDDEN_ENTRY, gids=gids)
        else:
            access = DirectoryAccess(uid=uid, gids=gids, user_depth=self._layout.user_depth)
        target = PlacementTarget(path, name[: name.rindex(suffix)], access, FileReaders(uid, gids))
        script = _make_copy_source(directory_fd, row.script_name, row.script_sha)
        environment = _make_copy_source(directory_fd, row.env_name, row.env_sha)
        if uid is not None:
            script, environment = self._sharing.find_identical(row, script, environment)
        names = self._placer.place_pair(
            target,
            script,
            environment,
            lambda file_name: self._pending.is_name_taken(row, row.directory, file_name),
        )
        self._pending.used_names.update((row.directory, file_name) for file_name in names)
        facts = self._read_facts(row)
        for fact in facts:
            self._manifests.add(path, encode_fact(rename_fact_files(fact, names)))
        moved_row = msgspec.structs.replace(
            row, state=MOVED, script_name=names[0], env_name=names[1], body=None
        )
        if uid is not None:
            self._sharing.add(moved_row, path)
        return _CopiedScript(row, moved_row, facts)

    def _read_facts(self, row: FileRow) -> list[ManifestFact]:
        """Return a script's facts in the manifest of the first tree."""
        if not self._layout.has_manifests:
            return []
        return self._first_manifests.find_facts(
            self._records.get_directory_path(row.directory), row.key
        )

    def _remove_originals(self, copies: "Sequence[_CopiedScript]") -> list[FileRow]:
        """Remove the originals of copied scripts that have not changed; the lock is held.

        Returns:
            Copies of scripts that changed meanwhile.
        """
        current_rows = self._records.load_rows(
            [(copy.row.cluster, copy.row.key) for copy in copies]
        )
        self._first_manifests.drop()
        done: list[_CopiedScript] = []
        changed_copies: list[FileRow] = []
        for copy in copies:
            row = copy.row
            if (
                current_rows.get((row.cluster, row.key)) == row
                and self._read_facts(row) == copy.told
            ):
                done.append(copy)
            else:
                changed_copies.append(copy.moved_row)
        for copy in done:
            row = copy.row
            path = self._records.get_directory_path(row.directory)
            log.debug("job %d: moved to %r", row.job_id, f"{self._second_tree.root}/{path}")
            for name in (row.script_name, row.env_name):
                if name:
                    self._first_tree.unlink(path, name)
            if self._layout.has_manifests:
                self._first_manifests.add(path, _make_moved_line(row, path))
        self._first_manifests.flush()
        self._first_tree.sync()
        with self._records.writing() as connection:
            counts = ByteCounts()
            for copy in done:
                counts.remove(copy.row, moved=False)
                counts.add(copy.moved_row, moved=True)
            save_rows(connection, [copy.moved_row for copy in done], current_rows)
            counts.write(connection)
        remove_empty_directories(
            self._first_tree, self._first_records, {copy.row.directory for copy in done}
        )
        self._pending.drop()
        return changed_copies

    # ------------------------------------------------------------ later changes of moved scripts

    def _apply_deferred(self) -> bool:
        """Apply identities and purges of moved scripts, which the sink left to the mover."""
        changes = self._records.query(
            "SELECT number, kind, key, cluster, body, tries FROM later WHERE due_s <= ? "
            "ORDER BY number LIMIT ?",
            int(time.time()),
            _MOVE_BATCH,
        )
        if not changes:
            return False
        self._filing.gids = self._resolve_gids()
        rows = self._records.load_rows({(cluster, key) for _, _, key, cluster, *_ in changes})
        # Filing regards scripts in its own tree as placed, whichever tree that is.
        self._pending.begin(
            {
                ref: msgspec.structs.replace(row, state=PLACED)
                for ref, row in rows.items()
                if row.state == MOVED
            }
        )
        done: list[tuple[int]] = []
        retries: list[tuple[int, int]] = []
        for number, kind, key, cluster, body, tries in changes:
            try:
                self._apply_change(kind, key, cluster, body)
            except Unavailable:
                raise
            except StewardError as error:
                if not tries:
                    log.error(
                        "%s cannot finish %s of %s, retrying: %s",
                        self.name,
                        kind,
                        key,
                        error,
                    )
                wait_s = min(_RETRY_S << min(tries, 16), _MAX_RETRY_S)
                retries.append((int(time.time()) + wait_s, number))
            else:
                done.append((number,))
        self._pending.finish(self._sources)
        with self._records.writing() as connection:
            self._pending.write(connection, moved=True)
            connection.executemany("DELETE FROM later WHERE number = ?", done)
            connection.executemany(
                "UPDATE later SET tries = tries + 1, due_s = ? WHERE number = ?", retries
            )
        self._pending.remove_replaced()
        return True

    def _apply_change(self, kind: str, key: str, cluster: str, body: bytes) -> None:
        """Apply one deferred identity or purge to the second tree."""
        now = utc_now()
        decoded: ArchivePurge | JobIdentity
        if kind == ARCHIVE_PURGE:
            decoded = msgspec.structs.replace(_purge_decoder.decode(body), script_keys=(key,))
        else:
            decoded = _identity_decoder.decode(body)
        event = Event(
            kind=kind, cluster=cluster, key=key, at=now, seen_at=now, source="mover", body=decoded
        )
        if kind == ARCHIVE_PURGE:
            purge_files(event, self._pending, self._second_tree, self._records, self._manifests)
        else:
            self._filing.apply_identity(event)

    def _check_owners(self) -> bool:
        """Apply changes of access to the second tree; return whether some are left."""
        if time.monotonic() >= self._next_owner_check:
            self._queue_access_changes()
            self._next_owner_check = time.monotonic() + _OWNERS_EVERY_S
        return self._access_updater.has_queued_changes() and self._access_updater.apply_page(
            self._resolve_gids()
        )

    def _queue_access_changes(self) -> None:
        """Queue changes of access that the sink made and the second tree lacks."""
        self._owners.reload()
        changed = self._records.query(
            "SELECT DISTINCT uid, user, shut FROM owner WHERE shut != shut_there"
        )
        if not changed:
            return
        with self._records.writing() as connection:
            for uid, user, shut in changed:
                connection.execute(
                    "UPDATE owner SET shut_there = ? WHERE uid = ? AND user = ?", (shut, uid, user)
                )
                queue_access_change(connection, uid, user, revoke=bool(shut), moved=True)

    def _resolve_gids(self) -> tuple[int, ...]:
        return resolve_group_ids(self._sink_settings.groups)

    def close(self) -> None:
        """Close files and the database."""
        self._reset()
        self._lock.close()
        self._records.close()
        self._first_records.close()


def _make_copy_source(fd: int, name: str, sha: bytes | None) -> ByteSource | None:
    if not name or sha is None:
        return None
    return ByteSource(fd, name, sha, link=False, compressed=is_compressed_name(name))


def _make_moved_line(row: FileRow, path: str) -> bytes:
    return encode_fact(
        ManifestFact(
            fact="moved",
            key=row.key,
            version=MANIFEST_VERSION,
            cluster=row.cluster,
            at=utc_now(),
            to=path,
        )
    )
