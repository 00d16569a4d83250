"""Archive verification: recompute every file's checksum and report missing or changed files.

:func:`verify_sink` yields the problems of a sink. :func:`iterate_tree_verifications` yields, for
each tree of a sink, an iterator of :class:`VerificationProblem` and :class:`VerificationProgress`
items; the action ``archive.verify`` uses it. Both run beside the sink and the mover.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import islice
from typing import Literal

import msgspec

from steward.archive.errors import make_archive_unavailable
from steward.archive.files.compression import DamagedFile, compute_plain_digest
from steward.archive.files.index import MOVED, PLACED, UNVERIFIED, FileRow, FilesRecords
from steward.archive.files.locks import TreeLock
from steward.archive.files.manifest import MANIFEST_FILE_NAME
from steward.archive.files.tree import ArchiveTree, SortedNames
from steward.core.config import Settings

_MAX_LOCKED_FILES = 1000
"""Most files to look up while verification holds the sink's lock."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class VerificationProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between a file and the database.

    Attributes:
        kind: ``missing``, ``changed``, ``unreadable``, or ``unknown``: a file that is not in the
            database.
        path: Absolute path of the file.
        script_key: Key of the job.script event; "" for an unknown file.
        cluster: The cluster's name; "" for an unknown file.
        detail: Further details, one line; "" for none.
    """

    kind: Literal["missing", "changed", "unreadable", "unknown"]
    path: str
    script_key: str = ""
    cluster: str = ""
    detail: str = ""


class VerificationProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the verification of one tree: files read, of how many, and bytes."""

    files: int
    total_files: int
    total_bytes: int


ReportProgress = Callable[[VerificationProgress], None]


def verify_sink(
    settings: Settings, name: str, report: ReportProgress | None = None
) -> Iterator[VerificationProblem]:
    """Compare every file of the sink ``name`` with the recorded checksums; yield problems.

    Args:
        settings: The whole configuration.
        name: The sink's name.
        report: Called after every directory and at the end.

    Raises:
        ArchiveUnavailable: A tree, or the sink's lock, cannot be read.
        SqliteUnavailable: The sink's database cannot be read.
    """
    for tree in iterate_tree_verifications(settings, name):
        for item in tree:
            if isinstance(item, VerificationProblem):
                yield item
            elif report:
                report(item)


def iterate_tree_verifications(
    settings: Settings, name: str
) -> Iterator[Iterator[VerificationProblem | VerificationProgress]]:
    """Yield for each tree of a sink an iterator of problems, with progress after every directory.

    The last item of each tree has its totals.
    """
    records = FilesRecords(settings, name, read_only=True)
    lock = TreeLock(f"{settings.state_dir}/archive-{name}.lock", creates=False)
    try:
        yield _TreeVerification(records, settings.sink_path(name), (UNVERIFIED, PLACED), lock).run()
        move_to = settings.files_sink(name).move_to
        if move_to:
            yield _TreeVerification(records, move_to, (MOVED, MOVED)).run()
    finally:
        lock.close()
        records.close()


class _TreeVerification:
    """Verification of one tree; its lock, if any, excludes the process that writes there."""

    def __init__(
        self,
        records: FilesRecords,
        root: str,
        states: tuple[int, int],
        lock: TreeLock | None = None,
    ) -> None:
        self._records = records
        self._lock = lock
        self._root = root
        self._states = states
        self._tree = ArchiveTree(root)
        self._checked_files = 0
        self._checked_bytes = 0
        counted = records.query(
            "SELECT total(script_name != '') + total(env_name != '') FROM script "
            "WHERE state BETWEEN ? AND ?",
            *states,
        )
        self._total_files = int(counted[0][0])

    def run(self) -> Iterator[VerificationProblem | VerificationProgress]:
        """Check every file of the tree; yield problems and progress."""
        try:
            self._tree.open_for_reading()
            for number in self._records.iterate_directory_numbers():
                yield from self._check_directory(number)
                yield self._make_progress()
            for directory, names in self._tree.iterate_files():
                yield from self._report_unknown(directory, names)
        except OSError as error:
            raise make_archive_unavailable(self._root, error) from error
        finally:
            self._tree.close()
        yield self._make_progress()

    def _make_progress(self) -> VerificationProgress:
        return VerificationProgress(
            files=self._checked_files,
            total_files=self._total_files,
            total_bytes=self._checked_bytes,
        )

    def _check_directory(self, number: int) -> Iterator[VerificationProblem]:
        """Check the recorded files of a directory."""
        path = os.path.join(self._root, self._records.get_directory_path(number))
        where = "directory = ? AND state BETWEEN ? AND ?"
        for row in self._records.iterate_rows(where, number, *self._states):
            for name, sha, length in (
                (row.script_name, row.script_sha, row.script_length),
                (row.env_name, row.env_sha, row.env_length),
            ):
                if name and sha is not None:
                    yield from self._check_file(row, os.path.join(path, name), sha, length)

    def _report_unknown(
        self, directory: str, names: Iterator[str]
    ) -> Iterator[VerificationProblem]:
        """Report files of a directory that the database does not have."""
        with closing(SortedNames()) as known_names, closing(SortedNames()) as candidates:
            known_names.add(MANIFEST_FILE_NAME)
            where = (
                "directory = (SELECT number FROM directory WHERE path = ?) "
                "AND state BETWEEN ? AND ?"
            )
            for row in self._records.iterate_rows(where, directory, *self._states):
                known_names.add(row.script_name)
                known_names.add(row.env_name)
            is_sound = True
            for name in _subtract_names(names, known_names.sort()):
                candidates.add(name)
                is_sound = False
            if is_sound:
                return
            remaining = map(os.fsdecode, candidates.sort())
            while suspects := list(islice(remaining, _MAX_LOCKED_FILES)):
                for name in self._find_unknown(directory, suspects):
                    path = os.path.join(self._root, directory, name)
                    yield VerificationProblem(kind="unknown", path=path)

    def _find_unknown(self, directory: str, suspects: Sequence[str]) -> list[str]:
        """Return the names of existing files that the database does not have, as of one moment."""
        if self._lock is None and directory in self._load_move_targets():
            return []  # the mover copies without the lock, but records beforehand where to
        # A batch is in the tree before it is in the database, and replaced files are removed last.
        with self._lock.acquire() if self._lock else nullcontext():
            known_names = self._records.iterate_names(directory, self._states)
            unknown = {
                name
                for name in suspects
                if not name.startswith(".copy.")
                and os.path.lexists(os.path.join(self._root, directory, name))
            }
        unknown.difference_update(known_names)
        return [name for name in suspects if name in unknown]

    def _load_move_targets(self) -> set[str]:
        """Return the directories to which the mover is copying."""
        rows = self._records.query("SELECT row FROM moving")
        return {
            self._records.get_directory_path(msgspec.json.decode(row, type=FileRow).directory)
            for (row,) in rows
        }

    def _check_file(
        self, row: FileRow, path: str, sha: bytes, length: int
    ) -> Iterator[VerificationProblem]:
        """Compare one file with its recorded checksum."""
        try:
            with os.fdopen(os.open(path, _READ), "rb") as file:
                digest, size = compute_plain_digest(file, path, length)
        except FileNotFoundError:
            if self._is_current(row):
                yield self._make_problem("missing", row, path)
            return
        except DamagedFile as error:
            self._checked_files += 1
            yield self._make_problem("changed", row, path, str(error))
            return
        except OSError as error:
            yield self._make_problem("unreadable", row, path, error.strerror or "")
            return
        self._checked_files += 1
        self._checked_bytes += size
        if digest != sha:
            detail = (
                f"{size} bytes, was {length}" if size != length else "same size, different content"
            )
            yield self._make_problem("changed", row, path, detail)

    def _is_current(self, row: FileRow) -> bool:
        """Return whether a row is unchanged: its files were not moved or purged meanwhile."""
        current_row = self._records.load_rows([(row.cluster, row.key)]).get((row.cluster, row.key))
        return current_row is not None and (current_row.state, current_row.directory) == (
            row.state,
            row.directory,
        )

    @staticmethod
    def _make_problem(
        kind: Literal["missing", "changed", "unreadable"], row: FileRow, path: str, detail: str = ""
    ) -> VerificationProblem:
        return VerificationProblem(
            kind=kind, path=path, script_key=row.key, cluster=row.cluster, detail=detail
        )


def _subtract_names(names: Iterable[str], known: Iterator[bytes]) -> Iterator[str]:
    """Yield the names that are not among the known ones; both are sorted by their bytes."""
    known_name = next(known, None)
    for name in names:
        encoded = os.fsencode(name)
        while known_name is not None and known_name < encoded:
            known_name = next(known, None)
        if encoded != known_name:
            yield name
