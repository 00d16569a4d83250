"""Filing of scripts: what each event does to the files and manifests of one tree.

:class:`ScriptFiling` handles job.script, job.identity and archive.resend events: it places files,
sets their readers and adds manifest lines. :func:`purge_files` handles archive.purge, with
:func:`remove_manifest_lines` for manifests and :func:`list_incoming_names` for stores. The sink and
the mover use both. Steps are repeatable: after a crash the batch comes again, and a step whose work
is done does nothing.
"""

import errno
import functools
import logging
from collections.abc import Callable, Iterable
from datetime import datetime

import msgspec

from steward.archive.files.batch import WAITING_DIRECTORY, FileSharing, PendingBatch, SourceFinder
from steward.archive.files.compression import swap_compression_suffix
from steward.archive.files.index import (
    MOVED,
    PLACED,
    UNVERIFIED,
    WAITING,
    FileRef,
    FileRow,
    FilesRecords,
    has_other_owner,
)
from steward.archive.files.layout import ArchiveLayout, ArchivePlace, PathSubject
from steward.archive.files.manifest import (
    MANIFEST_VERSION,
    ManifestFact,
    ManifestFile,
    ManifestWriter,
    encode_fact,
    encode_identity_line,
    encode_kept_line,
)
from steward.archive.files.owners import DirectoryOwners
from steward.archive.files.permissions import FileReaders
from steward.archive.files.placement import (
    FilePlacer,
    PlacementTarget,
    compute_file_digest,
    has_regular_file,
)
from steward.archive.files.tree import ArchiveTree, ByteSource, DirectoryAccess, PathBlocked
from steward.core.config import Settings
from steward.core.events import JOB_IDENTITY, ArchivePurge, Event, JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.core.script_stores import make_incoming_filename, parse_incoming_filename

log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_body_decoder = msgspec.json.Decoder(JobScript)
_NO_READERS = FileReaders()


class ScriptFiling:
    """Event handler that files scripts into one tree.

    Args:
        settings: The whole configuration.
        name: The sink's name.
        layout: Layout of the sink.
        tree: The tree.
        records: Database of the sink.
        owners: Owners of directories.
        placer: Places files into the tree.
        sources: Finds script bytes.
        manifests: Manifests of the tree.
        pending: State of the batch.
        sharing: Finds identical files to link to.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        layout: ArchiveLayout,
        tree: ArchiveTree,
        records: FilesRecords,
        owners: DirectoryOwners,
        placer: FilePlacer,
        sources: SourceFinder,
        manifests: ManifestWriter,
        pending: PendingBatch,
        sharing: FileSharing,
    ) -> None:
        self.gids: tuple[int, ...] = ()
        self._settings = settings
        self._sink_settings = settings.files_sink(name)
        self._layout = layout
        self._tree = tree
        self._records = records
        self._owners = owners
        self._placer = placer
        self._sources = sources
        self._manifests = manifests
        self._pending = pending
        self._sharing = sharing
        self._access_cache: dict[tuple[int | None, bool], tuple[DirectoryAccess, FileReaders]] = {}

    # ------------------------------------------------------------ event job.script

    def file_script(self, event: Event) -> None:
        """File a captured script, or let it wait for its job's identity.

        Raises:
            BytesGone: Its bytes are not in the store.
            OSError: The tree cannot be written.
        """
        ref = (event.cluster, event.key)
        if ref in self._pending.rows:
            return
        body: JobScript = event.body
        row = self._make_row(ref, body)
        self._pending.new_scripts[ref] = body
        if not self._layout.needs_identity:
            self._file_under_owner(row, body, None, event.source)
        elif self._must_wait(event.cluster):
            self._pending.set_row(msgspec.structs.replace(row, body=_encoder.encode(body)))
        else:
            self.file_unverified(row, body, event.source)

    def _make_row(self, ref: FileRef, body: JobScript) -> FileRow:
        """Make the row of a newly captured script."""
        script, environment = body.script, body.environment
        if not (self._settings.archive.environments and self._sink_settings.environments):
            environment = None
        cluster, key = ref
        return FileRow(
            key,
            cluster,
            body.job_id,
            body.spool_mtime_ns,
            WAITING,
            0,
            "",
            bytes.fromhex(script.sha256) if script else None,
            script.length if script else 0,
            "",
            bytes.fromhex(environment.sha256) if environment else None,
            environment.length if environment else 0,
            None,
            "",
            self._pending.now_ns,
            "",
            None,
        )

    # ------------------------------------------------------------ archive.resend

    def add_waiting(self, ref: FileRef, body: JobScript) -> None:
        """Add a script that :class:`.sink.ResendHandler` put into ``.waiting/``."""
        row = self._make_row(ref, body)
        self._pending.set_row(msgspec.structs.replace(row, body=_encoder.encode(body)))

    def file_resent(self, ref: FileRef, identity: JobIdentity | None) -> None:
        """File a waiting or unverified script, under its owner if known.

        Raises:
            BytesGone: Its bytes are not where they were.
            OSError: The tree cannot be written.
        """
        row = self._pending.rows[ref]
        is_waiting = row.state == WAITING
        if is_waiting and not self._layout.needs_identity:
            self._file_under_owner(row, _body_decoder.decode(row.body or b""), None, "spool")
        if identity is not None and (is_waiting or has_other_owner(row, identity.record)):
            self._identify(ref, identity)
        elif is_waiting and self._pending.rows[ref].state == WAITING:
            self.file_unverified(row)

    def _must_wait(self, cluster: str) -> bool:
        """Return whether scripts of a cluster wait for their job's identity."""
        cluster_settings = self._settings.cluster.get(cluster)
        return cluster_settings is None or cluster_settings.slurm

    def file_unverified(
        self, row: FileRow, body: JobScript | None = None, source: str = "spool"
    ) -> None:
        """File a script whose job is not known yet under ``unverified/``.

        Raises:
            BytesGone: Its bytes are not where they were.
            OSError: The tree cannot be written.
        """
        body = body or _body_decoder.decode(row.body or b"")
        # Claims are not trusted: only groups may read it.
        place = self._make_unverified_place(row, body)
        access, readers = self._get_access(None, hidden=True)
        new_row = msgspec.structs.replace(row, state=UNVERIFIED, body=None)
        self._place_files(row, new_row, body, place, access, readers, source)

    def _make_unverified_place(self, row: FileRow, body: JobScript) -> ArchivePlace:
        """Return a script's place under ``unverified/``."""
        subject = PathSubject(
            cluster=row.cluster,
            job_id=row.job_id,
            spool_mtime_ns=row.mtime_ns,
            name=body.claimed_name,
        )
        return self._layout.make_unverified_place(subject, self._get_timezone(row.cluster))

    def _remove_unverified(
        self,
        row: FileRow,
        body: JobScript,
        new_directory: str,
        sources: tuple[ByteSource | None, ByteSource | None],
    ) -> None:
        """Remove files that an interrupted batch placed under ``unverified/``."""
        place = self._make_unverified_place(row, body)
        path, number = place.directory, self._records.get_directory_number(place.directory)
        is_taken: Callable[[str], bool] = functools.partial(
            self._pending.is_name_taken, row, number
        )
        for name in self._placer.find_existing(path, place.stem, *sources, is_taken):
            self._pending.files_to_remove[path, name] = None
            self._pending.vacated_directories.add(number)
        if number in self._pending.vacated_directories and self._manifests.find_facts(
            path, row.key
        ):
            self._manifests.add(path, self._make_moved_line(row, new_directory))

    # ------------------------------------------------------------ job.identity

    def apply_identity(self, event: Event) -> None:
        """Apply an identity: file a script under its owner, or add the news to the manifest.

        Raises:
            BytesGone: Its bytes are not where they were.
            OSError: The tree cannot be written.
        """
        body: JobIdentity = event.body
        ref = (event.cluster, body.script_key)
        if ref in self._pending.rows:
            self._identify(ref, body)

    def _identify(self, ref: FileRef, body: JobIdentity) -> None:
        """File a script under its owner if that changed, and add the identity to the manifest."""
        row = self._pending.rows[ref]
        cluster, key = ref
        if row.state == MOVED:
            self._pending.deferred.append((JOB_IDENTITY, key, cluster, _encoder.encode(body)))
            return
        if has_other_owner(row, body.record):
            script = self._pending.new_scripts.get(ref)
            if script is None and row.body:
                script = _body_decoder.decode(row.body)
            self._file_under_owner(row, script, body.record, "spool")
            row = self._pending.rows[ref]
        elif row.holder is not None and body.record.account:
            self._set_account(row, body.record)
        if self._layout.has_manifests and row.directory:
            path = self._records.get_directory_path(row.directory)
            self._manifests.add(path, encode_identity_line(cluster, body, self._pending.now))

    def _set_account(self, row: FileRow, record: JobRecord) -> None:
        """Count a script for its account, if that was unknown when it was filed."""
        without_account = (row.cluster, row.uid or 0, row.user, "")
        if self._records.find_holder(without_account) == row.holder:
            holder = self._records.get_or_add_holder((*without_account[:3], record.account))
            self._pending.set_row(msgspec.structs.replace(row, holder=holder))

    def _file_under_owner(
        self, row: FileRow, body: JobScript | None, record: JobRecord | None, source: str
    ) -> None:
        """File a script under its owner, or where the layout needs no owner."""
        uid = record.uid if record else None
        user = record.user if record else ""
        subject = PathSubject(
            cluster=row.cluster,
            job_id=row.job_id,
            spool_mtime_ns=row.mtime_ns,
            name=record.name if record else body.claimed_name if body else "",
            account=record.account if record else "",
            partition=record.partition if record else "",
        )
        zone = self._get_timezone(row.cluster)
        if uid is not None:
            owner = (self._layout.get_owner_scope(row.cluster), uid, user)
            is_foreign = functools.partial(self._is_foreign, uid, subject, zone)
            directory = self._owners.get_directory(owner, is_foreign)
            subject = msgspec.structs.replace(subject, user_directory=directory)
        access, readers = self._get_access(self._owners.get_reader_uid(uid, user), hidden=False)
        new_row = msgspec.structs.replace(
            row,
            state=PLACED,
            uid=uid,
            user=user,
            body=None,
            holder=None if record is None else find_holder(self._records, row.cluster, record),
            # Share files only if their readers are those of a directory that contains all links.
            shared=int(self._layout.can_share_files and readers.uid is not None),
        )
        if row.state == PLACED and not self._layout.user_depth:
            # Only its readers change: the file name keeps the job name at submit.
            fd = self._tree.get_directory_fd(self._records.get_directory_path(row.directory))
            self._placer.set_readers(fd, (row.script_name, row.env_name), readers)
            self._pending.set_row(new_row)
            return
        self._place_files(
            row, new_row, body, self._layout.make_place(subject, zone), access, readers, source
        )

    def _is_foreign(self, uid: int, subject: PathSubject, zone: str, name: str) -> bool:
        """Return whether a user directory of that name belongs to another uid."""
        depth = self._layout.user_depth
        if not depth:
            return False
        place = self._layout.make_place(msgspec.structs.replace(subject, user_directory=name), zone)
        owner_uid = self._tree.read_owner_uid("/".join(place.directory.split("/")[:depth]))
        return owner_uid is not None and owner_uid != uid

    # ------------------------------------------------------------ bytes and lines

    def _place_files(
        self,
        row: FileRow,
        new_row: FileRow,
        body: JobScript | None,
        place: ArchivePlace,
        access: DirectoryAccess,
        readers: FileReaders,
        source: str,
    ) -> None:
        """Place a script's files, record its new row, and add manifest lines."""
        number = self._records.get_directory_number(place.directory)
        log.debug("job %d: filed in %r", row.job_id, f"{self._tree.root}/{place.directory}")
        is_new = (row.cluster, row.key) in self._pending.new_scripts
        script, environment, old_directory = self._sources.find_sources(
            row, body, is_new=is_new and not row.directory
        )
        is_taken: Callable[[str], bool] = functools.partial(
            self._pending.is_name_taken, row, number
        )
        target = PlacementTarget(place.directory, place.stem, access, readers)
        sources = self._sharing.find_identical(new_row, script, environment)
        if not row.directory and self._pending.may_repeat(row):
            sources = self._placer.match_existing(target, *sources, is_taken)
            if body is not None and not is_new and new_row.state != UNVERIFIED:
                self._remove_unverified(row, body, place.directory, (script, environment))
        names = self._placer.place_pair(target, *sources, is_taken)
        self._pending.used_names.add((number, names[0]))
        self._pending.used_names.add((number, names[1]))
        files_to_remove = self._pending.files_to_remove
        if old_directory:
            for old_source in (script, environment):
                if old_source:
                    files_to_remove[old_directory, old_source.name] = None
        for name in names:
            # An earlier event of the batch may have moved it away from here.
            files_to_remove.pop((place.directory, name), None)
        came_from = row.came_from
        if row.directory and row.directory != number:
            came_from = f"{came_from},{row.directory}".lstrip(",")
            self._pending.vacated_directories.add(row.directory)
        new_row = msgspec.structs.replace(
            new_row,
            directory=number,
            script_name=names[0],
            env_name=names[1],
            came_from=came_from,
            since_ns=min(row.since_ns, self._pending.now_ns),
        )
        if self._layout.has_manifests:
            self._add_manifest_lines(row, new_row, body, place.directory, source)
        self._pending.set_row(new_row)
        self._sharing.add(new_row, place.directory)

    def _add_manifest_lines(
        self, row: FileRow, new_row: FileRow, body: JobScript | None, path: str, source: str
    ) -> None:
        """Add the manifest lines of a filed or moved script."""
        now = self._pending.now
        names = (new_row.script_name, new_row.env_name)
        if not row.directory:
            if body is not None:
                line = encode_kept_line(row.key, row.cluster, body, names, now, source)
                self._manifests.add(path, line)
            return
        old_path = self._records.get_directory_path(row.directory)
        for line in self._read_earlier_lines(old_path, row.key, names):
            self._manifests.add(path, line)
        if old_path != path:
            self._manifests.add(old_path, self._make_moved_line(row, path))

    def _make_moved_line(self, row: FileRow, new_directory: str) -> bytes:
        fact = ManifestFact(
            fact="moved",
            key=row.key,
            version=MANIFEST_VERSION,
            cluster=row.cluster,
            at=self._pending.now,
            to=new_directory,
        )
        return encode_fact(fact)

    def _read_earlier_lines(self, path: str, key: str, names: tuple[str, str]) -> list[bytes]:
        """Return a script's facts from the manifest of its old directory, for the new one."""
        return [
            encode_fact(rename_fact_files(fact, names))
            for fact in self._manifests.find_facts(path, key)
        ]

    def _get_access(self, uid: int | None, *, hidden: bool) -> tuple[DirectoryAccess, FileReaders]:
        """Return the permissions of directories and files for an owner, from a cache."""
        cached = self._access_cache.get((uid, hidden))
        if cached is None or cached[0].gids != self.gids:
            depth = 0 if hidden else self._layout.user_depth
            access = DirectoryAccess(
                uid=uid, gids=self.gids, user_depth=depth, others_pass=not hidden
            )
            if len(self._access_cache) > 4096:
                self._access_cache.clear()
            cached = self._access_cache[uid, hidden] = (access, FileReaders(uid, self.gids))
        return cached

    def _get_timezone(self, cluster: str) -> str:
        cluster_settings = self._settings.cluster.get(cluster)
        return cluster_settings.timezone if cluster_settings else ""


def find_holder(records: FilesRecords, cluster: str, record: JobRecord) -> int | None:
    """Return the number of a job's holder, for whom bytes are counted; None without a uid."""
    if record.uid is None:
        return None
    return records.get_or_add_holder((cluster, record.uid, record.user, record.account))


def rename_fact_files(fact: ManifestFact, names: tuple[str, str]) -> ManifestFact:
    """Return a ``kept`` fact with the present file names; any other fact unchanged."""
    if fact.fact != "kept":
        return fact
    return msgspec.structs.replace(
        fact,
        script=_rename_file(fact.script, names[0]),
        environment=_rename_file(fact.environment, names[1]),
    )


def _rename_file(file: ManifestFile | None, name: str) -> ManifestFile | None:
    return msgspec.structs.replace(file, name=name) if file and name else None


def purge_files(
    event: Event,
    pending: PendingBatch,
    tree: ArchiveTree,
    records: FilesRecords,
    manifests: ManifestWriter,
) -> None:
    """Remove the scripts of an archive.purge event, as far as they are in this tree.

    Raises:
        PathBlocked: Something other than an archived file is in the place of one.
        OSError: The tree cannot be written.
    """
    body: ArchivePurge = event.body
    # Lines about these scripts may still wait to be appended.
    manifests.flush()
    purged_rows: list[FileRow] = []
    removed_rows: dict[FileRef, FileRow] = {}
    for key in body.script_keys:
        row = pending.rows.get((event.cluster, key))
        if row is None:
            continue
        if row.state == MOVED:
            # The mover removes the files; manifest lines about them may still be here.
            pending.deferred.append((event.kind, key, event.cluster, msgspec.json.encode(body)))
            purged_rows.append(row)
            continue
        _remove_files(row, tree, records)
        removed_rows[event.cluster, key] = row
        if row.directory:
            purged_rows.append(row)
    try:
        remove_manifest_lines(purged_rows, records, manifests, body.asked_by, pending.now)
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.ELOOP}:
            raise
        raise PathBlocked(
            f"cannot remove scripts: a MANIFEST.jsonl below {tree.root} is a directory or symbolic "
            f"link: move it away ('find {tree.root} -name MANIFEST.jsonl ! -type f' lists it)",
            tree.root,
        ) from error
    # Last: a purge that fails half way is repeated, and must find its rows.
    for ref, row in removed_rows.items():
        pending.delete(ref)
        if row.directory:
            pending.vacated_directories.add(row.directory)


def _remove_files(row: FileRow, tree: ArchiveTree, records: FilesRecords) -> None:
    if row.state == WAITING:
        body = _body_decoder.decode(row.body) if row.body else None
        for file in (body.script, body.environment) if body else ():
            if file is not None:
                _remove_file(tree, WAITING_DIRECTORY, file.path)
        return
    path = records.get_directory_path(row.directory)
    for name, sha in ((row.script_name, row.script_sha), (row.env_name, row.env_sha)):
        if name:
            _remove_file(tree, path, name)
            _remove_other_form(row, tree, records, swap_compression_suffix(name), sha)


def _remove_other_form(
    row: FileRow, tree: ArchiveTree, records: FilesRecords, name: str, sha: bytes | None
) -> None:
    """Remove the other form, plain or compressed, left by a crash and a change of the setting."""
    path = records.get_directory_path(row.directory)
    try:
        fd = tree.get_directory_fd(path)
    except FileNotFoundError:
        return
    if (
        has_regular_file(fd, name)
        and not records.is_name_taken(row.job_id, row.key, row.directory, name)
        and compute_file_digest(fd, name) == sha
    ):
        tree.unlink(path, name)


def _remove_file(tree: ArchiveTree, path: str, name: str) -> None:
    try:
        tree.unlink(path, name)
    except IsADirectoryError as error:
        raise PathBlocked(
            f"cannot remove {tree.root}/{path}/{name}: it is a directory, not a file: move it away",
            path,
        ) from error


def list_incoming_names(event: Event, pending: PendingBatch) -> list[str]:
    """Return the file names, in a store, of the scripts of an archive.purge event."""
    names: set[str] = set()
    for key in event.body.script_keys:
        ref = (event.cluster, key)
        row = pending.rows.get(ref)
        if row is None:
            continue
        body = pending.new_scripts.get(ref)
        if body is None and row.body:
            body = _body_decoder.decode(row.body)
        if body is not None:
            names.update(file.path for file in (body.script, body.environment) if file)
            continue
        job_ref = (row.cluster, row.job_id, row.mtime_ns)
        if row.script_sha is not None:
            names.add(make_incoming_filename(*job_ref, row.script_length, "script"))
        if row.env_sha is not None:
            names.add(make_incoming_filename(*job_ref, row.env_length, "env"))
    return sorted(name for name in names if parse_incoming_filename(name))


def remove_manifest_lines(
    rows: Iterable[FileRow],
    records: FilesRecords,
    manifests: ManifestWriter,
    asked_by: str | None,
    now: datetime,
) -> None:
    """Remove every line about scripts from the manifests of present and former directories.

    Args:
        rows: Rows of the scripts.
        records: The sink's database.
        manifests: Manifests of the tree.
        asked_by: User who ordered the purge; None if there was no purge, and no line is to be
            added.
        now: Current time.

    Raises:
        OSError: A manifest cannot be rewritten.
    """
    keys: dict[str, list[str]] = {}
    lines: dict[str, list[bytes]] = {}
    for row in rows:
        path = records.get_directory_path(row.directory)
        fact = ManifestFact(
            fact="purged",
            key=row.key,
            version=MANIFEST_VERSION,
            cluster=row.cluster,
            at=now,
            asked_by=asked_by or "",
        )
        if asked_by is not None:
            lines.setdefault(path, []).append(encode_fact(fact))
        for number in (row.directory, *list_former_directories(row)):
            keys.setdefault(records.get_directory_path(number), []).append(row.key)
    for path, purged_keys in keys.items():
        manifests.remove_keys(path, purged_keys, lines.get(path, []))


def list_former_directories(row: FileRow) -> list[int]:
    """Return the numbers of a script's former directories."""
    return [int(number) for number in row.came_from.split(",") if number]
