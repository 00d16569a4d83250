"""Catalog rebuild: create a new search index from the files of a sink (``archive.reindex``).

:class:`CatalogBuilder` writes a new generation in long transactions that no other process waits
for. :class:`CatalogRebuild` lists the scripts by the manifests of the sink's trees; if the layout
has no manifests, by the sink's database, or by file names and ACLs if that is lost. Then it adds
scripts that the scan missed (moved meanwhile, or waiting), takes over what the consumer indexed
since the start, leaves out purged scripts, and makes the new generation current.
"""

import hashlib
import logging
import os
import pwd
from collections.abc import Generator, Iterator

import msgspec

from steward.archive.catalog.consumer import parse_spool_time
from steward.archive.catalog.generations import CatalogCursor, CatalogGenerations, CatalogKey
from steward.archive.catalog.month import (
    USE_COLUMNS,
    CatalogUnavailable,
    MonthReader,
    MonthWriter,
    ScriptUse,
    get_month,
    list_months,
    make_month_path,
)
from steward.archive.files.compression import DamagedFile
from steward.archive.files.layout import compile_layout
from steward.archive.files.manifest import FoundScript, iterate_scripts_in_tree, parse_file_name
from steward.archive.files.permissions import read_acl_readers
from steward.archive.files.reader import FilesReader, PlacedScript, read_archived_file
from steward.archive.requests import Progress, ReindexReply
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.files import sync_filesystem
from steward.core.sqlite import SqliteUnavailable

COMMIT_EVERY = 1000
_OPEN_MONTHS = 12


class CatalogBuilder:
    """Writer of a new generation.

    Args:
        directory: Directory of the generation.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._writers: dict[str, MonthWriter] = {}
        self._pending = 0

    def add(self, use: ScriptUse, data: bytes, sha256: bytes = b"") -> None:
        """Index a use and, if new, its script; replace what is stored of the use.

        Args:
            use: The use; its script number is ignored.
            data: The script's bytes, or the part that is indexed.
            sha256: SHA-256 of the whole script, if ``data`` is only a part.

        Raises:
            SqliteUnavailable: The disk is full.
        """
        writer = self._get_writer(get_month(use.at))
        digest = sha256 or hashlib.sha256(data).digest()
        number = writer.find_scripts((digest,)).get(digest) or writer.add_script(digest, data)
        stored_use = msgspec.structs.replace(use, script=number)
        if not writer.add_uses((stored_use,)):
            writer.update_uses((stored_use,))

    def has_use(self, use: ScriptUse) -> bool:
        """Return whether a use is stored."""
        return bool(self._get_writer(get_month(use.at)).find_uses(((use.cluster, use.key),)))

    def remove_use(self, at: int, key: CatalogKey) -> None:
        """Remove a use.

        Args:
            at: The script's time in the spool, microseconds since the epoch.
            key: Cluster and key of the use.
        """
        month = get_month(at)
        if month in self._writers or os.path.exists(make_month_path(self.directory, month)):
            self._get_writer(month).remove_use(*key)

    def finish(self, position: int, purged: list[tuple[str, str, int]]) -> tuple[int, int]:
        """Make the generation durable, set its cursor; return the number of uses and scripts.

        Args:
            position: Position of the last event included.
            purged: Purged scripts, with the event.
        """
        self._close_writers()
        uses = scripts = 0
        for month in list_months(self.directory):
            writer = MonthWriter(make_month_path(self.directory, month))
            counts = writer.count_rows()
            uses, scripts = uses + counts[0], scripts + counts[1]
            writer.shrink_log()
            writer.close()
        cursor = CatalogCursor(self.directory)
        cursor.advance(position, purged)
        cursor.close()
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_filesystem(fd)
        finally:
            os.close(fd)
        return uses, scripts

    def abandon(self) -> None:
        """Close all files; harmless after :meth:`finish`."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _get_writer(self, month: str) -> MonthWriter:
        """Return a month's writer, inside a transaction."""
        writer = self._writers.pop(month, None)
        if writer is None:
            # A crash discards the whole generation, so nothing is synced before the end.
            writer = MonthWriter(make_month_path(self.directory, month), synchronous="OFF")
            writer.begin()
        self._writers[month] = writer  # The one used last stands last.
        self._pending += 1
        if self._pending >= COMMIT_EVERY:
            self._pending = 0
            for open_writer in self._writers.values():
                open_writer.commit()
                open_writer.begin()
        while len(self._writers) > _OPEN_MONTHS:
            oldest = self._writers.pop(next(iter(self._writers)))
            oldest.commit()
            oldest.close()
        return writer

    def _close_writers(self) -> None:
        for writer in self._writers.values():
            writer.commit()
            writer.close()
        self._writers.clear()


log = logging.getLogger(__name__)

_REPORT_EVERY = 500


class CatalogRebuild:
    """One rebuild of the catalog.

    Args:
        settings: The whole configuration.
        sink: Name of the sink whose files are read.
    """

    def __init__(self, settings: Settings, sink: str) -> None:
        self._generations = CatalogGenerations(os.path.join(settings.state_dir, "catalog"))
        sink_settings = settings.files_sink(sink)
        self._roots = [
            settings.sink_path(sink),
            *([sink_settings.move_to] if sink_settings.move_to else []),
        ]
        self._layout = compile_layout(sink_settings.layout)
        # A path without a cluster belongs to the only one, unless other hosts send theirs here.
        self._clusters = () if settings.consume else tuple(settings.cluster)
        self._reader = FilesReader(settings, sink)
        self._unreadable = 0

    def run(self) -> Generator[Progress | ReindexReply, None, None]:
        """Rebuild the catalog; yield progress, and the result at the end.

        Raises:
            CatalogUnavailable: Another rebuild is running, or the disk is full.
            ArchiveUnavailable: The tree cannot be read.
        """
        with self._generations.lock("reindex", wait=False):
            old_directory = self._generations.ensure_current()
            since = _read_cursor(old_directory)
            builder = CatalogBuilder(self._generations.create())
            try:
                yield from self._index_files(builder)
                self._add_moved_uses(old_directory, builder)
                with self._generations.lock():
                    uses, scripts = self._copy_new_uses(old_directory, builder, since)
                    months = list_months(builder.directory)
                    self._generations.make_current(builder.directory)
            finally:
                builder.abandon()
                self._reader.close()
                self._generations.remove_others()
        yield ReindexReply(
            scripts=uses, distinct=scripts, months=tuple(months), unreadable=self._unreadable
        )

    def _index_files(self, builder: CatalogBuilder) -> Iterator[Progress]:
        """Index every archived script; yield progress."""
        done = 0
        for path, use in self._iterate_uses():
            done += 1
            if done % _REPORT_EVERY == 0:
                yield Progress(done=done)
            try:
                data = read_archived_file(path)
            except OSError as error:
                # Moved, purged or damaged since it was listed; moved scripts are added later.
                log.warning("%s is not indexed: %s", path, error.strerror)
                self._unreadable += not isinstance(error, FileNotFoundError)
                continue
            except DamagedFile as error:
                log.warning("%s is not indexed: %s", path, error)
                self._unreadable += 1
                continue
            builder.add(use, data)
        yield Progress(done=done, total=done)

    def _iterate_uses(self) -> Iterator[tuple[str, ScriptUse]]:
        """Yield the path and use of every archived script."""
        if not self._layout.has_manifests:
            has_rows = False
            for placed in self._iterate_placed():
                has_rows = True
                if placed.script is not None:
                    yield placed.script.path, _make_placed_use(placed)
            if has_rows:
                return
        for root in self._roots:
            for found_script in iterate_scripts_in_tree(root, self._layout):
                if found_script.script is not None:
                    path = os.path.join(root, found_script.script.path)
                    yield path, self._make_found_use(found_script, path)

    def _iterate_placed(self) -> Iterator[PlacedScript]:
        try:
            yield from self._reader.iterate_scripts()
        except SqliteUnavailable as error:
            # Lost with the state directory: only the files are left.
            log.info("cannot read the sink's database: %s", error)

    def _make_found_use(self, found_script: FoundScript, path: str) -> ScriptUse:
        """Make the use of a script found by manifest or file name."""
        record = found_script.record
        cluster = found_script.cluster
        if not cluster and len(self._clusters) == 1:
            cluster = self._clusters[0]
        uid, user = (
            (record.uid, record.user)
            if record
            else _find_owner_by_acl(path, found_script.user_directory)
        )
        return ScriptUse(
            cluster=cluster,
            key=found_script.key,
            job_id=found_script.job_id,
            at=max(0, found_script.spool_mtime_ns // 1000),
            uid=uid,
            user=user,
            account=record.account if record else "",
            partition=record.partition if record else "",
            name=_escape_name(found_script.name),
        )

    def _add_moved_uses(self, old_directory: str, builder: CatalogBuilder) -> None:
        """Add uses that the sink has but the scan missed: waiting, or moved during the scan."""
        for reader, use, sha256 in _iterate_old_uses(old_directory, -1):
            if not builder.has_use(use) and self._is_in_sink(use):
                builder.add(use, reader.read_data(use.script), sha256)

    def _is_in_sink(self, use: ScriptUse) -> bool:
        try:
            return self._reader.locate(use.key, use.cluster) is not None
        except Unavailable:
            # Without the sink's database only the files count.
            return False

    def _copy_new_uses(
        self, old_directory: str, builder: CatalogBuilder, since: int
    ) -> tuple[int, int]:
        """Add what the consumer indexed after ``since``; return the number of uses and scripts."""
        for reader, use, sha256 in _iterate_old_uses(old_directory, since):
            builder.add(use, reader.read_data(use.script), sha256)
        purged: list[tuple[str, str, int]] = []
        position = since
        try:
            cursor = CatalogCursor(old_directory)
            try:
                purged, position = cursor.list_purged_since(-1), cursor.load_position()
            finally:
                cursor.close()
        except CatalogUnavailable as error:
            log.warning("cannot read the list of purged jobs: %s", error)
        for cluster, key, _ in purged:
            builder.remove_use(parse_spool_time(key), (cluster, key))
        return builder.finish(position, purged)


def _read_cursor(generation: str) -> int:
    """Return the cursor of a generation; 0 if it cannot be read."""
    try:
        cursor = CatalogCursor(generation)
        try:
            return cursor.load_position()
        finally:
            cursor.close()
    except CatalogUnavailable as error:
        # Damage may be the reason for the rebuild. Events still in the journal are applied again,
        # without harm.
        log.warning("cannot read the position of the old catalog: %s", error)
        return 0


def _iterate_old_uses(
    generation: str, since: int
) -> Iterator[tuple[MonthReader, ScriptUse, bytes]]:
    """Yield the uses changed by events after ``since``, with the script's SHA-256.

    A damaged month is skipped: the files have its scripts.
    """
    sql = (
        f"SELECT script.sha256, {USE_COLUMNS} FROM use JOIN script ON script.number = use.script "  # noqa: S608 - our own columns
        "WHERE event > ?"
    )
    for month in list_months(generation):
        try:
            reader = MonthReader(make_month_path(generation, month))
            try:
                for sha256, *row in reader.query(sql, (since,)):
                    yield (
                        reader,
                        ScriptUse(**dict(zip(ScriptUse.__struct_fields__, row, strict=True))),
                        sha256,
                    )
            finally:
                reader.close()
        except CatalogUnavailable as error:
            log.warning("%s of the old catalog is skipped: %s", month, error)


def _make_placed_use(placed: PlacedScript) -> ScriptUse:
    """Make the use of a script recorded in the sink's database."""
    assert placed.script is not None, "no script"
    parsed_name = parse_file_name(os.path.basename(placed.script.path))
    return ScriptUse(
        cluster=placed.cluster,
        key=placed.script_key,
        job_id=placed.job_id,
        at=max(0, placed.spool_mtime_ns // 1000),
        uid=placed.uid,
        user=placed.user,
        name=_escape_name(parsed_name.name) if parsed_name else "",
    )


def _find_owner_by_acl(path: str, user: str) -> tuple[int | None, str]:
    """Return the owner of a file without manifest: the uid in its ACL, if the name matches.

    A name alone proves nothing: it may belong to another person by now.
    """
    if not user:
        return None, ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            uid = read_acl_readers(fd).uid
        finally:
            os.close(fd)
    except OSError as error:
        log.debug("cannot determine the owner of %s: %s", path, error)
        return None, ""
    try:
        is_same = uid is not None and pwd.getpwuid(uid).pw_name == user
    except KeyError:
        is_same = False
    return (uid, user) if is_same else (None, "")


def _escape_name(name: str) -> str:
    """Convert a name to the form of records: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
