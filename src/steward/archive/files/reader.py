"""Archive reader: locate and read the scripts of a files sink, beside the running sink.

:class:`FilesReader` looks a script up in the sink's database, opened read-only, and reads its file;
if the file was moved between both steps, it looks it up again. Used by archive actions, the catalog
and remote sinks. :class:`PlacedScript` is the location of a script.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal

import msgspec

from steward.archive.errors import ArchiveUnavailable, NotArchived, make_archive_unavailable
from steward.archive.files.batch import WAITING_DIRECTORY
from steward.archive.files.compression import MAX_PLAIN_BYTES, read_plain
from steward.archive.files.index import LOST_NS, MOVED, WAITING, FileRow, FilesRecords
from steward.core.config import Settings
from steward.core.events import JobScript
from steward.core.sqlite import SqliteUnavailable

ContentKind = Literal["script", "environment"]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_body_decoder = msgspec.json.Decoder(JobScript)


class PlacedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One archived file: absolute path; size in bytes and SHA-256 (hex) of the plain bytes."""

    path: str
    length: int
    sha256: str


class PlacedScript(msgspec.Struct, frozen=True, kw_only=True):
    """Location and owner of one script.

    Attributes:
        script_key: Key of the job.script event.
        cluster: The cluster's name.
        job_id: The id in the spool entry's name.
        spool_mtime: The script's time in the spool, UTC.
        spool_mtime_ns: The same, in ns since the epoch.
        state: ``waiting`` (for its job's identity), ``unverified``, ``placed`` or ``moved``.
        script: File of the script; None if there is none.
        environment: File of the environment; None if there is none.
        uid: Owner's uid; None while unknown.
        user: Owner's name at submit; "" while unknown or unresolved.
    """

    script_key: str
    cluster: str
    job_id: int
    spool_mtime: datetime
    spool_mtime_ns: int
    state: Literal["waiting", "unverified", "placed", "moved"]
    script: PlacedFile | None = None
    environment: PlacedFile | None = None
    uid: int | None = None
    user: str = ""


class FilesReader:
    """Read access to the files sink ``name``, safe beside the running sink.

    Args:
        settings: The whole configuration.
        name: The sink's name.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._root = settings.sink_path(name)
        self._move_to = settings.files_sink(name).move_to
        self._opened_records: FilesRecords | None = None

    @property
    def _records(self) -> FilesRecords:
        # Opened on first use: an action may run before the daemon's first start.
        if self._opened_records is None:
            self._opened_records = FilesRecords(self._settings, self._name, read_only=True)
        return self._opened_records

    def locate(self, script_key: str, cluster: str = "") -> PlacedScript | None:
        """Return where a script is; None if this archive does not have it.

        Args:
            script_key: Key of the job.script event.
            cluster: Its cluster; "" if only one cluster is possible.

        Raises:
            SqliteUnavailable: The database cannot be read now.
        """
        row = self._find_row(script_key, cluster)
        return self._make_placed_script(row) if row else None

    def _find_row(self, key: str, cluster: str) -> FileRow | None:
        rows = self._records.select_rows(
            "key = ? AND (cluster = ? OR ? = '') LIMIT 1", key, cluster, cluster
        )
        return rows[0] if rows and rows[0].since_ns != LOST_NS else None

    def read(self, script_key: str, kind: ContentKind, cluster: str = "") -> bytes:
        """Return the bytes of a script or of its environment.

        Raises:
            NotArchived: This archive does not have them.
            ArchiveUnavailable: They cannot be read now.
            DamagedFile: The compressed file is damaged.
        """
        for is_last_try in (False, True):
            try:
                placed = self.locate(script_key, cluster)
            except SqliteUnavailable as error:
                raise ArchiveUnavailable(str(error), self._root) from error
            file = getattr(placed, kind) if placed else None
            if file is None:
                raise NotArchived(
                    f"archive {self._root} has no {kind} of {script_key}: run 'steward archive "
                    "verify'",
                    script_key,
                )
            try:
                return self._read(file.path, file.length)
            except FileNotFoundError as error:
                if is_last_try:
                    raise NotArchived(
                        f"{file.path} is missing: 'steward archive verify' lists all missing files",
                        script_key,
                    ) from error
            except OSError as error:
                raise make_archive_unavailable(self._root, error) from error
        raise AssertionError("unreachable")

    def _read(self, path: str, length: int) -> bytes:
        try:
            return read_archived_file(path, length)
        except FileNotFoundError:
            # The mover removed it here and has not yet recorded that it is in the second tree.
            if not self._move_to or not path.startswith(self._root + "/"):
                raise
            return read_archived_file(self._move_to + path.removeprefix(self._root), length)

    def iterate_scripts(self) -> Iterator[PlacedScript]:
        """Yield all scripts of this archive, by key.

        Raises:
            SqliteUnavailable: The database cannot be read now.
        """
        for row in self._records.iterate_rows():
            if row.since_ns != LOST_NS:
                yield self._make_placed_script(row)

    def _make_placed_script(self, row: FileRow) -> PlacedScript:
        script, environment = self._make_paths(row)
        return PlacedScript(
            script_key=row.key,
            cluster=row.cluster,
            job_id=row.job_id,
            spool_mtime=datetime.fromtimestamp(row.mtime_ns / 1e9, UTC),
            spool_mtime_ns=row.mtime_ns,
            state=("waiting", "unverified", "placed", "moved")[row.state],
            script=_make_placed_file(script, row.script_length, row.script_sha),
            environment=_make_placed_file(environment, row.env_length, row.env_sha),
            uid=row.uid,
            user=row.user,
        )

    def _make_paths(self, row: FileRow) -> tuple[str, str]:
        if row.state == WAITING:
            body = _body_decoder.decode(row.body or b"")
            base = os.path.join(self._root, WAITING_DIRECTORY)
            names = (
                body.script.path if body.script else "",
                body.environment.path if body.environment else "",
            )
        else:
            tree = self._move_to if row.state == MOVED and self._move_to else self._root
            base = os.path.join(tree, self._records.get_directory_path(row.directory))
            names = (row.script_name, row.env_name)
        return os.path.join(base, names[0]), os.path.join(base, names[1])

    def close(self) -> None:
        """Close the database."""
        if self._opened_records is not None:
            self._opened_records.close()
            self._opened_records = None


def read_archived_file(path: str, max_bytes: int = MAX_PLAIN_BYTES) -> bytes:
    """Return the plain bytes of a regular file; symbolic links are not followed.

    Args:
        path: The file.
        max_bytes: Size limit for the plain bytes of a compressed file.

    Raises:
        DamagedFile: The file is compressed, and damaged or too large.
        OSError: It cannot be read.
    """
    with os.fdopen(os.open(path, _READ), "rb") as file:
        return read_plain(file, path, max_bytes)


def _make_placed_file(path: str, length: int, sha: bytes | None) -> PlacedFile | None:
    if sha is None:
        return None
    return PlacedFile(path=path, length=length, sha256=sha.hex())
