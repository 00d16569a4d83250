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
from steward.core.incoming import ARCHIVE_DIRECTORY, IncomingStores
from steward.core.records import JobRecord
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
        self._before: dict[FileRef, FileRow] = {}
        self.fresh: dict[FileRef, JobScript] = {}
        self.taken: set[tuple[int, str]] = set()
        self.left: set[int] = set()
        self.unlinks: dict[tuple[str, str], None] = {}
        self.later: list[tuple[str, str, str, bytes]] = []
        self.now = datetime.now(UTC)
        self.now_ns = 0
        self.replays = False
        self._began_ns = time.time_ns()
        self._is_clear = False
        # In the order of the events, which is nearly that of the keys: neighbors share a database
        # page.
        self._dirty: dict[FileRef, None] = {}
        self._deleted: set[FileRef] = set()

    def begin(self, rows: dict[FileRef, FileRow]) -> None:
        """Begin a batch with the rows of its known scripts."""
        self.drop()
        self.rows = rows
        self._before = rows.copy()
        self.now = datetime.now(UTC)
        self.now_ns = time.time_ns()

    def drop(self) -> None:
        """Discard unsaved changes."""
        self.rows = {}
        self._before = {}
        for gathered in (self.taken, self.left, self._deleted):
            gathered.clear()
        self._dirty.clear()
        self.fresh.clear()
        self.unlinks.clear()
        self.later.clear()
        self._manifests.drop()
        self._records.forget_new()
        self._owners.forget_new()

    def keep(self, row: FileRow) -> None:
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

    def claimed(self, row: FileRow, directory: int, name: str) -> bool:
        """Return whether a file name in a directory belongs to another script than the row's."""
        return (directory, name) in self.taken or self._records.claimed(
            row.job_id, row.key, directory, name
        )

    def may_repeat(self, row: FileRow) -> bool:
        """Return whether a script may have been placed already, before a crash."""
        if (row.cluster, row.key) in self.fresh:
            return self.replays
        return not self._began_ns <= row.since_ns < LOST_NS

    def clear_up(self) -> None:
        """Remove files left by batches that were interrupted after their commit.

        Call this before placing any file: the names to remove must not be in use again.

        Raises:
            OSError: The tree cannot be written.
        """
        if self._is_clear:
            return
        moved = int(self._records.moved)
        sql = "SELECT directory, name FROM leaving WHERE moved = ?"
        left = self._records.query(sql, moved)
        self._remove(left)
        remove_empty_directories(
            self._tree, self._records, {self._records.number(path) for path, _ in left}
        )
        if not self._records.moved:
            self._clear_waiting()
        self._is_clear = True

    def _clear_waiting(self) -> None:
        """Remove links in ``.waiting/`` to which no waiting row refers."""
        try:
            there = set(os.listdir(self._tree.directory(WAITING_DIRECTORY)))
        except FileNotFoundError:
            return
        wanted: set[str] = set()
        sql = "SELECT body FROM script WHERE state = ? AND body IS NOT NULL"
        for (text,) in self._records.query(sql, WAITING) if there else ():
            body = _body_decoder.decode(text)
            wanted.update(kept.path for kept in (body.script, body.environment) if kept)
        for name in there - wanted:
            self._tree.unlink(WAITING_DIRECTORY, name)

    def finish(self, sources: "SourceFinder") -> None:
        """Write manifests and make all files durable.

        Raises:
            OSError: The tree cannot be written.
            BytesGone: Bytes that must wait for their job are not in the store.
        """
        for ref, body in self.fresh.items():
            row = self.rows.get(ref)
            if row is not None and row.state == WAITING:
                sources.put_aside(row, body)
        sources.settle()
        self._manifests.flush()
        self._tree.sync()
        self._is_clear = not self.unlinks

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
            counts.change(self._before.get((row.cluster, row.key)), row, moved=moved)
        for ref in self._deleted:
            if ref in self._before:
                counts.remove(self._before[ref], moved=moved or self._before[ref].state == MOVED)
        if moved:
            rows = [msgspec.structs.replace(row, state=MOVED) for row in rows]
        save_rows(connection, rows, self._before)
        delete_rows(connection, self._deleted)
        counts.write(connection)
        connection.executemany(
            "INSERT INTO later (kind, key, cluster, body) VALUES (?, ?, ?, ?)", self.later
        )
        # Waiting files are known by their rows.
        connection.executemany(
            "INSERT OR IGNORE INTO leaving VALUES (?, ?, ?)",
            [(int(moved), *file) for file in self.unlinks if file[0] != WAITING_DIRECTORY],
        )

    def written(self) -> None:
        """Remove replaced files and empty directories, after the commit.

        Not before: an interrupted batch is repeated and reads its bytes from where they were.

        Raises:
            OSError: The tree cannot be written.
        """
        self._owners.saved()
        self._remove(self.unlinks)
        self._is_clear = True
        remove_empty_directories(self._tree, self._records, self.left)
        self.drop()

    def _remove(self, files: Iterable[tuple[str, str]]) -> None:
        """Remove files, and the database's notes that they are to be removed."""
        noted = False
        for path, name in files:
            try:
                self._tree.unlink(path, name)
            except IsADirectoryError:
                log.error("%s/%s/%s is a directory: it is left", self._tree.root, path, name)
            noted = noted or path != WAITING_DIRECTORY
        if noted:
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
            path = records.directory(number)
            tree.unlink(path, MANIFEST_FILE_NAME)
            tree.prune(path)


class SourceFinder:
    """Finder of script bytes: in a store, waiting in the tree, or in place.

    Args:
        tree: The tree.
        stores: The stores of incoming bytes.
        records: The sink's database.
        placer: Places files into the tree.
        packs: Whether new files are compressed; existing ones stay as they are.
    """

    def __init__(
        self,
        tree: ArchiveTree,
        stores: IncomingStores,
        records: FilesRecords,
        placer: FilePlacer,
        *,
        packs: bool = False,
    ) -> None:
        self._tree = tree
        self._packs = packs
        self._stores = stores
        self._records = records
        self._placer = placer
        self._fds: dict[str, tuple[int, bool]] = {}

    def of(
        self, row: FileRow, body: JobScript | None, *, fresh: bool
    ) -> tuple[ByteSource | None, ByteSource | None, str]:
        """Return a script's two sources, and their directory in the tree ("" for a store).

        Raises:
            BytesGone: Their location is unknown.
            OSError: The store or the directory cannot be opened.
        """
        if row.directory:
            old = self._records.directory(row.directory)
            # A shared file has the readers of all its links.
            fd, link = self._tree.directory(old), not row.shared
            script, environment = row.script_name, row.env_name
        elif body is None:
            raise BytesGone(f"nothing tells where the bytes of {row.key} are", row)
        else:
            script = body.script.path if body.script else ""
            environment = body.environment.path if body.environment else ""
            if fresh:
                old = ""
                fd, link = self._store(body.store)
            else:
                old = WAITING_DIRECTORY
                fd, link = self._tree.directory(old, HIDDEN_ENTRY), True
        return (
            self._source(fd, script, row.script_sha, row, row.script_length, link=link),
            self._source(fd, environment, row.env_sha, row, row.env_length, link=link),
            old,
        )

    def _source(
        self, fd: int, name: str, sha: bytes | None, row: FileRow, length: int, *, link: bool
    ) -> ByteSource | None:
        """Make the source of one file; None if the script has no such file."""
        if sha is None or not name:
            return None
        # Never compress a file too large to be decompressed again.
        packed = (
            is_compressed_name(name) if row.directory else self._packs and length <= MAX_PLAIN_BYTES
        )
        return ByteSource(fd, check_stored_name(name), sha, link, packed)

    def put_aside(self, row: FileRow, body: JobScript) -> None:
        """Link bytes into ``.waiting/`` until their job is known.

        Raises:
            BytesGone: They are not in the store.
            OSError: The tree cannot be written.
        """
        fd, link = self._store(body.store)
        hidden = self._tree.directory(WAITING_DIRECTORY, HIDDEN_ENTRY)
        for kept, sha in ((body.script, row.script_sha), (body.environment, row.env_sha)):
            if kept is not None and sha is not None:
                source = ByteSource(fd, check_stored_name(kept.path), sha, link)
                self._placer.put_as(hidden, kept.path, source)
        self._tree.touch(WAITING_DIRECTORY)

    def settle(self) -> None:
        """Make compressed files durable; see :meth:`FilePlacer.settle`."""
        self._placer.settle()

    def _store(self, name: str) -> tuple[int, bool]:
        """Return the open directory of a store, and whether its files may be linked to."""
        found = self._fds.get(name)
        if found is None:
            directory = self._stores.get(name).directory
            # Link within this tree only: a link shares its ACL, and another sink's groups are not
            # this one's.
            link = directory == os.path.join(self._tree.root, ARCHIVE_DIRECTORY)
            found = self._fds[name] = (os.open(directory, _DIRECTORY), link)
        return found

    def close(self) -> None:
        """Close the stores' directories."""
        self._placer.drop()
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds.clear()


def check_stored_name(name: str) -> str:
    """Check that the name of stored bytes is a single path component; return it.

    Raises:
        ArchiveError: It is not.
    """
    if "/" in name or name.startswith("."):
        raise ArchiveError(f"{name!r} is not the name of kept bytes", name)
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
        self._jobs: dict[_Content, int] = {}
        self._found: dict[_Content, FileLocation] = {}

    def begin(self, wanted: Iterable[ShareCandidate]) -> None:
        """Look up link candidates for all scripts of a batch at once.

        Args:
            wanted: The scripts, from :func:`list_share_candidates`.
        """
        self.drop()
        moved = self._records.moved
        asked: dict[int, _Content] = {}
        for holder, script, environment in wanted:
            if script is not None:
                number = compute_content_number(holder, script, environment=False, moved=moved)
                asked[number] = (holder, script, False)
            if environment is not None:
                number = compute_content_number(holder, environment, environment=True, moved=moved)
                asked[number] = (holder, environment, True)
        for number, job_id in self._records.contents(list(asked)).items():
            self._jobs[asked[number]] = job_id

    def drop(self) -> None:
        """Discard the batch."""
        self._jobs.clear()
        self._found.clear()

    def instead(
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
            of = (row.holder, script.sha, False)
            script = self._instead(script, of, row, row.script_length)
        if environment is not None:
            of = (row.holder, environment.sha, True)
            environment = self._instead(environment, of, row, row.env_length)
        return script, environment

    def _instead(self, source: ByteSource, of: "_Content", row: FileRow, length: int) -> ByteSource:
        """Return an identical file as source, or the given one if there is none."""
        found = self._found.get(of)
        if found is None:
            job_id = self._jobs.pop(of, None)
            if job_id is None:
                return source
            found = self._kept(source.sha, row, job_id, length)
            if found is None:
                return source
            self._found[of] = found
        path, name = found
        try:
            fd = self._tree.directory(path)
        except FileNotFoundError:
            # It was purged in this batch, and its directory became empty.
            return source
        return ByteSource(fd, name, source.sha, packed=is_compressed_name(name), otherwise=source)

    def add(self, row: FileRow, path: str) -> None:
        """Record a filed script, to which later ones of the batch may be linked."""
        if not row.shared or row.holder is None:
            return
        if row.script_sha is not None and row.script_name:
            self._found[row.holder, row.script_sha, False] = (path, row.script_name)
        if row.env_sha is not None and row.env_name:
            self._found[row.holder, row.env_sha, True] = (path, row.env_name)

    def _kept(self, sha: bytes, row: FileRow, job_id: int, length: int) -> FileLocation | None:
        """Find an undamaged file with this checksum among a job's scripts."""
        # All keys of a job's scripts have the same prefix.
        rows = self._records.select(
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
                    path = self._records.directory(other.directory)
                    if self._is_sound(path, name, sha, length):
                        return path, name
        return None

    def _is_sound(self, path: str, name: str, sha: bytes, length: int) -> bool:
        """Return whether a file still has its checksum."""
        try:
            with open_archived_file(self._tree.directory(path), name) as file:
                return compute_plain_digest(file, name, length)[0] == sha
        except (FileNotFoundError, IsADirectoryError, PathBlocked, DamagedFile):
            # Verify reports the damage; this script gets its own bytes.
            return False


def list_share_candidates(
    events: Iterable[Event], rows: Mapping[FileRef, FileRow], records: FilesRecords
) -> Iterator[ShareCandidate]:
    """Yield the scripts that a batch files under their owners, as link candidates.

    Args:
        events: Events of the batch.
        rows: Known rows of its scripts.
        records: The sink's database.
    """
    fresh: dict[FileRef, JobScript] = {}
    for event in events:
        found = None
        if event.kind == JOB_SCRIPT:
            fresh[event.cluster, event.key] = event.body
        elif event.kind == JOB_IDENTITY:
            ref = (event.cluster, event.body.script_key)
            found = _make_share_candidate(
                ref, event.body.record, rows.get(ref), fresh.get(ref), records
            )
        elif event.kind == ARCHIVE_RESEND:
            for sent in event.body.scripts:
                ref = (event.cluster, sent.script_key)
                if sent.identity is not None:
                    one = _make_share_candidate(
                        ref, sent.identity.record, rows.get(ref), sent.script, records
                    )
                    if one is not None:
                        yield one
        if found is not None:
            yield found


def _make_share_candidate(
    ref: FileRef,
    record: JobRecord,
    row: FileRow | None,
    fresh: JobScript | None,
    records: FilesRecords,
) -> ShareCandidate | None:
    """Return the link candidate of one script; None if its owner is unknown or unchanged."""
    if record.uid is None or (row is not None and not has_other_owner(row, record)):
        return None
    holder = records.known_holder((ref[0], record.uid, record.user, record.account))
    if holder is None:
        return None
    if row is not None:
        return holder, row.script_sha, row.env_sha
    if fresh is None:
        return None
    kept = (fresh.script, fresh.environment)
    script, environment = (bytes.fromhex(file.sha256) if file else None for file in kept)
    return holder, script, environment
