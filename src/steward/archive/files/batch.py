"""Batch state of a files sink: file changes that are not yet stored in the database.

:class:`PendingBatch` collects changed rows, manifest lines and files to remove, and writes them in
the transaction that moves the cursor. :class:`SourceFinder` finds the bytes of a script: in a
store, in ``.waiting/``, or in place. :class:`FileSharing` finds identical files of the same holder
to hard-link to; :func:`list_share_candidates` lists the candidates of a batch. Used by the sink and
the mover.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from steward.archive.errors import ArchiveError
from steward.archive.files.compression import (
    MAX_PLAIN_BYTES,
    DamagedFile,
    compute_plain_digest,
    is_compressed_name,
    open_archived_file,
)
from steward.archive.files.index import (
    LOST_NS,
    MOVED,
    WAITING,
    ByteCounts,
    FileRef,
    FileRow,
    FilesRecords,
    compute_content_number,
    delete_rows,
    execute_all,
    has_other_owner,
    save_rows,
)
from steward.archive.files.manifest import MANIFEST_FILE_NAME, ManifestWriter
from steward.archive.files.owners import DirectoryOwners
from steward.archive.files.placement import FilePlacer
from steward.archive.files.tree import (
    ArchiveTree,
    BytesGone,
    ByteSource,
    DirectoryAccess,
    PathBlocked,
)
from steward.core.events import ARCHIVE_RESEND, JOB_IDENTITY, JOB_SCRIPT, Event, JobScript
from steward.core.records import JobRecord
from steward.core.script_stores import ARCHIVE_DIRECTORY, IncomingStores
from steward.core.sqlite import Connection

log = logging.getLogger(__name__)

WAITING_DIRECTORY = ".waiting"
"""Directory of links to bytes whose job is not known yet: the store may be trimmed meanwhile."""

_body_decoder = msgspec.json.Decoder(JobScript)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HIDDEN_ENTRY = DirectoryAccess(others_pass=False)


class PendingBatch:
    """State of a batch: changed rows, and what is to be written or removed with them.

    Args:
        tree: The tree that the batch works on.
        records: The sink's database.
        owners: Owners of directories.
        manifests: Manifests of the tree.
    """

    def __init__(
        self,
        tree: ArchiveTree,
        records: FilesRecords,
        owners: DirectoryOwners,
        manifests: ManifestWriter,
    ) -> None:
        self._tree = tree
        self._records = records
        self._owners = owners
        self._manifests = manifests
        self.rows: dict[FileRef, FileRow] = {}
        self._saved_rows: dict[FileRef, FileRow] = {}
        self.new_scripts: dict[FileRef, JobScript] = {}
        self.used_names: set[tuple[int, str]] = set()
        self.vacated_directories: set[int] = set()
        self.files_to_remove: dict[tuple[str, str], None] = {}
        self.deferred: list[tuple[str, str, str, bytes]] = []
        self.now = datetime.now(UTC)
        self.now_ns = 0
        self.is_replay = False
        self._began_ns = time.time_ns()
        self._is_clean = False
        # In the order of the events, which is nearly that of the keys: neighbors share a database
        # page.
        self._dirty: dict[FileRef, None] = {}
        self._deleted: set[FileRef] = set()

    def begin(self, rows: dict[FileRef, FileRow]) -> None:
        """Begin a batch with the rows of its known scripts."""
        self.drop()
        self.rows = rows
        self._saved_rows = rows.copy()
        self.now = datetime.now(UTC)
        self.now_ns = time.time_ns()

    def drop(self) -> None:
        """Discard unsaved changes."""
        self.rows = {}
        self._saved_rows = {}
        for collected in (self.used_names, self.vacated_directories, self._deleted):
            collected.clear()
        self._dirty.clear()
        self.new_scripts.clear()
        self.files_to_remove.clear()
        self.deferred.clear()
        self._manifests.drop()
        self._records.discard_new()
        self._owners.discard_new()

    def set_row(self, row: FileRow) -> None:
        """Record a new or changed row."""
        ref = (row.cluster, row.key)
        self.rows[ref] = row
        self._dirty[ref] = None
        self._deleted.discard(ref)

    def delete(self, ref: FileRef) -> None:
        """Record that a row is to be deleted."""
        del self.rows[ref]
        self._dirty.pop(ref, None)
        self._deleted.add(ref)

    def is_name_taken(self, row: FileRow, directory: int, name: str) -> bool:
        """Return whether a file name in a directory belongs to another script than the row's."""
        return (directory, name) in self.used_names or self._records.is_name_taken(
            row.job_id, row.key, directory, name
        )

    def may_repeat(self, row: FileRow) -> bool:
        """Return whether a script may have been placed already, before a crash."""
        if (row.cluster, row.key) in self.new_scripts:
            return self.is_replay
        return not self._began_ns <= row.since_ns < LOST_NS

    def remove_leftovers(self) -> None:
        """Remove files left by batches that were interrupted after their commit.

        Call this before placing any file: the names to remove must not be in use again.

        Raises:
            OSError: The tree cannot be written.
        """
        if self._is_clean:
            return
        moved = int(self._records.moved)
        sql = "SELECT directory, name FROM leaving WHERE moved = ?"
        files = self._records.query(sql, moved)
        self._remove_files(files)
        remove_empty_directories(
            self._tree,
            self._records,
            {self._records.get_directory_number(path) for path, _ in files},
        )
        if not self._records.moved:
            self._remove_stale_links()
        self._is_clean = True

    def _remove_stale_links(self) -> None:
        """Remove links in ``.waiting/`` to which no waiting row refers."""
        try:
            names = set(os.listdir(self._tree.get_directory_fd(WAITING_DIRECTORY)))
        except FileNotFoundError:
            return
        referenced: set[str] = set()
        sql = "SELECT body FROM script WHERE state = ? AND body IS NOT NULL"
        for (text,) in self._records.query(sql, WAITING) if names else ():
            body = _body_decoder.decode(text)
            referenced.update(file.path for file in (body.script, body.environment) if file)
        for name in names - referenced:
            self._tree.unlink(WAITING_DIRECTORY, name)

    def finish(self, sources: "SourceFinder") -> None:
        """Write manifests and make all files durable.

        Raises:
            OSError: The tree cannot be written.
            BytesGone: Bytes that must wait for their job are not in the store.
        """
        for ref, body in self.new_scripts.items():
            row = self.rows.get(ref)
            if row is not None and row.state == WAITING:
                sources.link_waiting(row, body)
        sources.sync_files()
        self._manifests.flush()
        self._tree.sync()
        self._is_clean = not self.files_to_remove

    def write(self, connection: Connection, *, moved: bool = False) -> None:
        """Write the changes, inside the transaction that moves the cursor.

        Args:
            connection: Connection in a transaction.
            moved: Whether the files are in the second tree.
        """
        self._owners.save(connection)
        rows = [self.rows[ref] for ref in self._dirty]
        counts = ByteCounts()
        for row in rows:
            counts.change(self._saved_rows.get((row.cluster, row.key)), row, moved=moved)
        for ref in self._deleted:
            if ref in self._saved_rows:
                counts.remove(
                    self._saved_rows[ref], moved=moved or self._saved_rows[ref].state == MOVED
                )
        if moved:
            rows = [msgspec.structs.replace(row, state=MOVED) for row in rows]
        save_rows(connection, rows, self._saved_rows)
        delete_rows(connection, self._deleted)
        counts.write(connection)
        execute_all(
            connection,
            "INSERT INTO later (kind, key, cluster, body) VALUES (?, ?, ?, ?)",
            self.deferred,
        )
        # Waiting files are known by their rows.
        execute_all(
            connection,
            "INSERT OR IGNORE INTO leaving VALUES (?, ?, ?)",
            [(int(moved), *file) for file in self.files_to_remove if file[0] != WAITING_DIRECTORY],
        )

    def remove_replaced(self) -> None:
        """Remove replaced files and empty directories, after the commit.

        Not before: an interrupted batch is repeated and reads its bytes from where they were.

        Raises:
            OSError: The tree cannot be written.
        """
        self._owners.confirm_saved()
        self._remove_files(self.files_to_remove)
        self._is_clean = True
        remove_empty_directories(self._tree, self._records, self.vacated_directories)
        self.drop()

    def _remove_files(self, files: Iterable[tuple[str, str]]) -> None:
        """Remove files, and the database's notes that they are to be removed."""
        has_record = False
        for path, name in files:
            try:
                self._tree.unlink(path, name)
            except IsADirectoryError:
                log.error("%s/%s/%s is a directory: not changed", self._tree.root, path, name)
            has_record = has_record or path != WAITING_DIRECTORY
        if has_record:
            self._tree.sync()
            with self._records.writing() as connection:
                connection.execute(
                    "DELETE FROM leaving WHERE moved = ?", (int(self._records.moved),)
                )


def remove_empty_directories(
    tree: ArchiveTree, records: FilesRecords, directories: Iterable[int]
) -> None:
    """Remove directories that hold no script any more, with their manifests.

    Raises:
        OSError: The tree cannot be written.
    """
    for number in directories:
        if not records.is_used(number):
            path = records.get_directory_path(number)
            tree.unlink(path, MANIFEST_FILE_NAME)
            tree.prune(path)


class SourceFinder:
    """Finder of script bytes: in a store, waiting in the tree, or in place.

    Args:
        tree: The tree.
        stores: The stores of incoming bytes.
        records: The sink's database.
        placer: Places files into the tree.
        compress: Whether new files are compressed; existing ones stay as they are.
    """

    def __init__(
        self,
        tree: ArchiveTree,
        stores: IncomingStores,
        records: FilesRecords,
        placer: FilePlacer,
        *,
        compress: bool = False,
    ) -> None:
        self._tree = tree
        self._compress = compress
        self._stores = stores
        self._records = records
        self._placer = placer
        self._store_fds: dict[str, tuple[int, bool]] = {}

    def find_sources(
        self, row: FileRow, body: JobScript | None, *, is_new: bool
    ) -> tuple[ByteSource | None, ByteSource | None, str]:
        """Return a script's two sources, and their directory in the tree ("" for a store).

        Raises:
            BytesGone: Their location is unknown.
            OSError: The store or the directory cannot be opened.
        """
        if row.directory:
            directory = self._records.get_directory_path(row.directory)
            # A shared file has the readers of all its links.
            fd, can_link = self._tree.get_directory_fd(directory), not row.shared
            script, environment = row.script_name, row.env_name
        elif body is None:
            raise BytesGone(f"no directory in the index contains {row.key}", row)
        else:
            script = body.script.path if body.script else ""
            environment = body.environment.path if body.environment else ""
            if is_new:
                directory = ""
                fd, can_link = self._open_store(body.store)
            else:
                directory = WAITING_DIRECTORY
                fd, can_link = self._tree.get_directory_fd(directory, HIDDEN_ENTRY), True
        return (
            self._make_source(
                fd, script, row.script_sha, row, row.script_length, can_link=can_link
            ),
            self._make_source(fd, environment, row.env_sha, row, row.env_length, can_link=can_link),
            directory,
        )

    def _make_source(
        self, fd: int, name: str, sha: bytes | None, row: FileRow, length: int, *, can_link: bool
    ) -> ByteSource | None:
        """Make the source of one file; None if the script has no such file."""
        if sha is None or not name:
            return None
        # Never compress a file too large to be decompressed again.
        compressed = (
            is_compressed_name(name)
            if row.directory
            else self._compress and length <= MAX_PLAIN_BYTES
        )
        return ByteSource(fd, check_stored_name(name), sha, can_link, compressed)

    def link_waiting(self, row: FileRow, body: JobScript) -> None:
        """Link bytes into ``.waiting/`` until their job is known.

        Raises:
            BytesGone: They are not in the store.
            OSError: The tree cannot be written.
        """
        fd, can_link = self._open_store(body.store)
        waiting_fd = self._tree.get_directory_fd(WAITING_DIRECTORY, HIDDEN_ENTRY)
        for file, sha in ((body.script, row.script_sha), (body.environment, row.env_sha)):
            if file is not None and sha is not None:
                source = ByteSource(fd, check_stored_name(file.path), sha, can_link)
                self._placer.place_at(waiting_fd, file.path, source)
        self._tree.record_change(WAITING_DIRECTORY)

    def sync_files(self) -> None:
        """Make compressed files durable; see :meth:`FilePlacer.sync_files`."""
        self._placer.sync_files()

    def _open_store(self, name: str) -> tuple[int, bool]:
        """Return the open directory of a store, and whether its files may be linked to."""
        entry = self._store_fds.get(name)
        if entry is None:
            directory = self._stores.get(name).directory
            # Link within this tree only: a link shares its ACL, and another sink's groups are not
            # this one's.
            can_link = directory == os.path.join(self._tree.root, ARCHIVE_DIRECTORY)
            entry = self._store_fds[name] = (os.open(directory, _DIRECTORY), can_link)
        return entry

    def close(self) -> None:
        """Close the stores' directories."""
        self._placer.drop()
        for fd, _ in self._store_fds.values():
            os.close(fd)
        self._store_fds.clear()


def check_stored_name(name: str) -> str:
    """Check that the name of stored bytes is a single path component; return it.

    Raises:
        ArchiveError: It is not.
    """
    if "/" in name or name.startswith("."):
        raise ArchiveError(f"{name!r} is not the name of a captured file", name)
    return name


ShareCandidate = tuple[int, bytes | None, bytes | None]
"""A holder, and the SHA-256 of a script and of its environment."""

FileLocation = tuple[str, str]
"""A directory below the root, and a file name in it."""

_Content = tuple[int, bytes, bool]
"""A holder, the SHA-256 of a file, and whether it is an environment."""


class FileSharing:
    """Finder of identical files to hard-link to, in one tree.

    Args:
        tree: The tree.
        records: Database of the sink, for that tree.
    """

    def __init__(self, tree: ArchiveTree, records: FilesRecords) -> None:
        self._tree = tree
        self._records = records
        self._candidate_jobs: dict[_Content, int] = {}
        self._locations: dict[_Content, FileLocation] = {}

    def begin(self, candidates: Iterable[ShareCandidate]) -> None:
        """Look up link candidates for all scripts of a batch at once.

        Args:
            candidates: The scripts, from :func:`list_share_candidates`.
        """
        self.drop()
        moved = self._records.moved
        contents: dict[int, _Content] = {}
        for holder, script, environment in candidates:
            if script is not None:
                number = compute_content_number(holder, script, environment=False, moved=moved)
                contents[number] = (holder, script, False)
            if environment is not None:
                number = compute_content_number(holder, environment, environment=True, moved=moved)
                contents[number] = (holder, environment, True)
        for number, job_id in self._records.find_contents(list(contents)).items():
            self._candidate_jobs[contents[number]] = job_id

    def drop(self) -> None:
        """Discard the batch."""
        self._candidate_jobs.clear()
        self._locations.clear()

    def find_identical(
        self, row: FileRow, script: ByteSource | None, environment: ByteSource | None
    ) -> tuple[ByteSource | None, ByteSource | None]:
        """Return identical files as sources, in place of a script's and its environment's bytes.

        Args:
            row: The future row of the script.
            script: Source of the script, returned if there is no identical file.
            environment: Source of the environment, likewise.

        Raises:
            OSError: The tree cannot be read.
        """
        if not row.shared or row.holder is None:
            return script, environment
        if script is not None:
            content = (row.holder, script.sha, False)
            script = self._find_identical_file(script, content, row, row.script_length)
        if environment is not None:
            content = (row.holder, environment.sha, True)
            environment = self._find_identical_file(environment, content, row, row.env_length)
        return script, environment

    def _find_identical_file(
        self, source: ByteSource, content: "_Content", row: FileRow, length: int
    ) -> ByteSource:
        """Return an identical file as source, or the given one if there is none."""
        location = self._locations.get(content)
        if location is None:
            job_id = self._candidate_jobs.pop(content, None)
            if job_id is None:
                return source
            location = self._find_file(source.sha, row, job_id, length)
            if location is None:
                return source
            self._locations[content] = location
        path, name = location
        try:
            fd = self._tree.get_directory_fd(path)
        except FileNotFoundError:
            # It was purged in this batch, and its directory became empty.
            return source
        return ByteSource(
            fd, name, source.sha, compressed=is_compressed_name(name), fallback=source
        )

    def add(self, row: FileRow, path: str) -> None:
        """Record a filed script, to which later ones of the batch may be linked."""
        if not row.shared or row.holder is None:
            return
        if row.script_sha is not None and row.script_name:
            self._locations[row.holder, row.script_sha, False] = (path, row.script_name)
        if row.env_sha is not None and row.env_name:
            self._locations[row.holder, row.env_sha, True] = (path, row.env_name)

    def _find_file(self, sha: bytes, row: FileRow, job_id: int, length: int) -> FileLocation | None:
        """Find an undamaged file with this checksum among a job's scripts."""
        # All keys of a job's scripts have the same prefix.
        rows = self._records.select_rows(
            "key >= ? AND key < ? AND cluster = ? AND holder = ? AND shared "
            "AND state BETWEEN ? AND ?",
            f"script:{job_id}:",
            f"script:{job_id};",
            row.cluster,
            row.holder,
            *self._records.states,
        )
        for other in rows:
            for name, digest in (
                (other.script_name, other.script_sha),
                (other.env_name, other.env_sha),
            ):
                if digest == sha and name and other.key != row.key:
                    path = self._records.get_directory_path(other.directory)
                    if self._is_sound(path, name, sha, length):
                        return path, name
        return None

    def _is_sound(self, path: str, name: str, sha: bytes, length: int) -> bool:
        """Return whether a file still has its checksum."""
        try:
            with open_archived_file(self._tree.get_directory_fd(path), name) as file:
                return compute_plain_digest(file, name, length)[0] == sha
        except (FileNotFoundError, IsADirectoryError, PathBlocked, DamagedFile):
            # Verify reports the damage; this script gets its own bytes.
            return False


def list_share_candidates(
    events: Iterable[Event], rows: Mapping[FileRef, FileRow], records: FilesRecords
) -> Iterator[ShareCandidate]:
    """Yield the scripts of a batch that have an owner, as candidates for hard links.

    Args:
        events: Events of the batch.
        rows: Known rows of its scripts.
        records: The sink's database.
    """
    new_scripts: dict[FileRef, JobScript] = {}
    for event in events:
        candidate = None
        if event.kind == JOB_SCRIPT:
            new_scripts[event.cluster, event.key] = event.body
        elif event.kind == JOB_IDENTITY:
            ref = (event.cluster, event.body.script_key)
            candidate = _make_share_candidate(
                ref, event.body.record, rows.get(ref), new_scripts.get(ref), records
            )
        elif event.kind == ARCHIVE_RESEND:
            for resent in event.body.scripts:
                ref = (event.cluster, resent.script_key)
                if resent.identity is not None:
                    resent_candidate = _make_share_candidate(
                        ref, resent.identity.record, rows.get(ref), resent.script, records
                    )
                    if resent_candidate is not None:
                        yield resent_candidate
        if candidate is not None:
            yield candidate


def _make_share_candidate(
    ref: FileRef,
    record: JobRecord,
    row: FileRow | None,
    new_script: JobScript | None,
    records: FilesRecords,
) -> ShareCandidate | None:
    """Return the link candidate of one script; None if its owner is unknown or unchanged."""
    if record.uid is None or (row is not None and not has_other_owner(row, record)):
        return None
    holder = records.find_holder((ref[0], record.uid, record.user, record.account))
    if holder is None:
        return None
    if row is not None:
        return holder, row.script_sha, row.env_sha
    if new_script is None:
        return None
    files = (new_script.script, new_script.environment)
    script, environment = (bytes.fromhex(file.sha256) if file else None for file in files)
    return holder, script, environment
