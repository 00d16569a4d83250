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
from steward.core.incoming import make_incoming_filename, parse_incoming_filename
from steward.core.records import JobRecord

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
        self._sink = settings.files_sink(name)
        self._layout = layout
        self._tree = tree
        self._records = records
        self._owners = owners
        self._placer = placer
        self._sources = sources
        self._manifests = manifests
        self._pending = pending
        self._sharing = sharing
        self._entries: dict[tuple[int | None, bool], tuple[DirectoryAccess, FileReaders]] = {}

    # ------------------------------------------------------------ event job.script

    def script(self, event: Event) -> None:
        """File a captured script, or let it wait for its job's identity.

        Raises:
            BytesGone: Its bytes are not in the store.
            OSError: The tree cannot be written.
        """
        ref = (event.cluster, event.key)
        if ref in self._pending.rows:
            return
        body: JobScript = event.body
        row = self._fresh_row(ref, body)
        self._pending.fresh[ref] = body
        if not self._layout.needs_identity:
            self._file(row, body, None, event.source)
        elif self._waits(event.cluster):
            self._pending.keep(msgspec.structs.replace(row, body=_encoder.encode(body)))
        else:
            self.unverified(row, body, event.source)

    def _fresh_row(self, ref: FileRef, body: JobScript) -> FileRow:
        """Make the row of a newly captured script."""
        kept, environment = body.script, body.environment
        if not self._settings.archive.environments:
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
            bytes.fromhex(kept.sha256) if kept else None,
            kept.length if kept else 0,
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

    def waiting(self, ref: FileRef, body: JobScript) -> None:
        """Add a script that :class:`.sink.ResendHandler` put into ``.waiting/``."""
        row = self._fresh_row(ref, body)
        self._pending.keep(msgspec.structs.replace(row, body=_encoder.encode(body)))

    def settle(self, ref: FileRef, identity: JobIdentity | None) -> None:
        """File a waiting or unverified script, under its owner if known.

        Raises:
            BytesGone: Its bytes are not where they were.
            OSError: The tree cannot be written.
        """
        row = self._pending.rows[ref]
        waits = row.state == WAITING
        if waits and not self._layout.needs_identity:
            self._file(row, _body_decoder.decode(row.body or b""), None, "spool")
        if identity is not None and (waits or has_other_owner(row, identity.record)):
            self._identify(ref, identity)
        elif waits and self._pending.rows[ref].state == WAITING:
            self.unverified(row)

    def _waits(self, cluster: str) -> bool:
        """Return whether scripts of a cluster wait for their job's identity."""
        known = self._settings.cluster.get(cluster)
        return self._sink.identity_wait_s > 0 and (known is None or known.slurm)

    def unverified(
        self, row: FileRow, body: JobScript | None = None, source: str = "spool"
    ) -> None:
        """File a script whose job is not known yet under ``unverified/``.

        Raises:
            BytesGone: Its bytes are not where they were.
            OSError: The tree cannot be written.
        """
        body = body or _body_decoder.decode(row.body or b"")
        # Claims are not trusted: only groups may read it.
        place = self._unverified_place(row, body)
        entry, readers = self._who(None, hidden=True)
        changed = msgspec.structs.replace(row, state=UNVERIFIED, body=None)
        self._put(row, changed, body, place, entry, readers, source)

    def _unverified_place(self, row: FileRow, body: JobScript) -> ArchivePlace:
        """Return a script's place under ``unverified/``."""
        subject = PathSubject(
            cluster=row.cluster,
            job_id=row.job_id,
            spool_mtime_ns=row.mtime_ns,
            name=body.claimed_name,
        )
        return self._layout.unverified_place(subject, self._zone(row.cluster))

    def _leave_unverified(
        self,
        row: FileRow,
        body: JobScript,
        to: str,
        sources: tuple[ByteSource | None, ByteSource | None],
    ) -> None:
        """Remove files that an interrupted batch placed under ``unverified/``."""
        place = self._unverified_place(row, body)
        path, number = place.directory, self._records.number(place.directory)
        claimed: Callable[[str], bool] = functools.partial(self._pending.claimed, row, number)
        for name in self._placer.put_before(path, place.stem, *sources, claimed):
            self._pending.unlinks[path, name] = None
            self._pending.left.add(number)
        if number in self._pending.left and self._manifests.about(path, row.key):
            self._manifests.add(path, self._moved_line(row, to))

    # ------------------------------------------------------------ job.identity

    def identity(self, event: Event) -> None:
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
            self._pending.later.append((JOB_IDENTITY, key, cluster, _encoder.encode(body)))
            return
        if has_other_owner(row, body.record):
            kept = self._pending.fresh.get(ref)
            if kept is None and row.body:
                kept = _body_decoder.decode(row.body)
            self._file(row, kept, body.record, "spool")
            row = self._pending.rows[ref]
        elif row.holder is not None and body.record.account:
            self._charge(row, body.record)
        if self._layout.manifests and row.directory:
            path = self._records.directory(row.directory)
            self._manifests.add(path, encode_identity_line(cluster, body, self._pending.now))

    def _charge(self, row: FileRow, record: JobRecord) -> None:
        """Count a script for its account, if that was unknown when it was filed."""
        unknown = (row.cluster, row.uid or 0, row.user, "")
        if self._records.known_holder(unknown) == row.holder:
            holder = self._records.holder((*unknown[:3], record.account))
            self._pending.keep(msgspec.structs.replace(row, holder=holder))

    def _file(
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
        zone = self._zone(row.cluster)
        if uid is not None:
            owner = (self._layout.owner_scope(row.cluster), uid, user)
            is_foreign = functools.partial(self._is_foreign, uid, subject, zone)
            directory = self._owners.directory(owner, is_foreign)
            subject = msgspec.structs.replace(subject, user_directory=directory)
        entry, readers = self._who(self._owners.reader(uid, user), hidden=False)
        changed = msgspec.structs.replace(
            row,
            state=PLACED,
            uid=uid,
            user=user,
            body=None,
            holder=None if record is None else find_holder(self._records, row.cluster, record),
            # Share files only if their readers are those of a directory that contains all links.
            shared=int(self._layout.shares and readers.uid is not None),
        )
        if row.state == PLACED and not self._layout.user_depth:
            # Only its readers change: the file name keeps the job name at submit.
            fd = self._tree.directory(self._records.directory(row.directory))
            self._placer.admit(fd, (row.script_name, row.env_name), readers)
            self._pending.keep(changed)
            return
        self._put(row, changed, body, self._layout.place(subject, zone), entry, readers, source)

    def _is_foreign(self, uid: int, subject: PathSubject, zone: str, name: str) -> bool:
        """Return whether a user directory of that name belongs to another uid."""
        depth = self._layout.user_depth
        if not depth:
            return False
        place = self._layout.place(msgspec.structs.replace(subject, user_directory=name), zone)
        found = self._tree.owner_of("/".join(place.directory.split("/")[:depth]))
        return found is not None and found != uid

    # ------------------------------------------------------------ bytes and lines

    def _put(
        self,
        row: FileRow,
        changed: FileRow,
        body: JobScript | None,
        place: ArchivePlace,
        entry: DirectoryAccess,
        readers: FileReaders,
        source: str,
    ) -> None:
        """Place a script's files, record its new row, and add manifest lines."""
        number = self._records.number(place.directory)
        log.debug("job %d: filed in %r", row.job_id, f"{self._tree.root}/{place.directory}")
        fresh = (row.cluster, row.key) in self._pending.fresh
        script, environment, old = self._sources.of(row, body, fresh=fresh and not row.directory)
        claimed: Callable[[str], bool] = functools.partial(self._pending.claimed, row, number)
        target = PlacementTarget(place.directory, place.stem, entry, readers)
        sources = self._sharing.instead(changed, script, environment)
        if not row.directory and self._pending.may_repeat(row):
            sources = self._placer.as_before(target, *sources, claimed)
            if body is not None and not fresh and changed.state != UNVERIFIED:
                self._leave_unverified(row, body, place.directory, (script, environment))
        names = self._placer.put(target, *sources, claimed)
        self._pending.taken.add((number, names[0]))
        self._pending.taken.add((number, names[1]))
        unlinks = self._pending.unlinks
        if old:
            for before in (script, environment):
                if before:
                    unlinks[old, before.name] = None
        for name in names:
            # An earlier event of the batch may have moved it away from here.
            unlinks.pop((place.directory, name), None)
        came_from = row.came_from
        if row.directory and row.directory != number:
            came_from = f"{came_from},{row.directory}".lstrip(",")
            self._pending.left.add(row.directory)
        changed = msgspec.structs.replace(
            changed,
            directory=number,
            script_name=names[0],
            env_name=names[1],
            came_from=came_from,
            since_ns=min(row.since_ns, self._pending.now_ns),
        )
        if self._layout.manifests:
            self._tell(row, changed, body, place.directory, source)
        self._pending.keep(changed)
        self._sharing.add(changed, place.directory)

    def _tell(
        self, row: FileRow, changed: FileRow, body: JobScript | None, path: str, source: str
    ) -> None:
        """Add the manifest lines of a filed or moved script."""
        now = self._pending.now
        names = (changed.script_name, changed.env_name)
        if not row.directory:
            if body is not None:
                text = encode_kept_line(row.key, row.cluster, body, names, now, source)
                self._manifests.add(path, text)
            return
        before = self._records.directory(row.directory)
        for text in self._earlier_lines(before, row.key, names):
            self._manifests.add(path, text)
        if before != path:
            self._manifests.add(before, self._moved_line(row, path))

    def _moved_line(self, row: FileRow, to: str) -> bytes:
        moved = ManifestFact(
            fact="moved",
            key=row.key,
            version=MANIFEST_VERSION,
            cluster=row.cluster,
            at=self._pending.now,
            to=to,
        )
        return encode_fact(moved)

    def _earlier_lines(self, path: str, key: str, names: tuple[str, str]) -> list[bytes]:
        """Return a script's facts from the manifest of its old directory, for the new one."""
        return [
            encode_fact(rename_fact_files(fact, names)) for fact in self._manifests.about(path, key)
        ]

    def _who(self, uid: int | None, *, hidden: bool) -> tuple[DirectoryAccess, FileReaders]:
        """Return the permissions of directories and files for an owner, from a cache."""
        found = self._entries.get((uid, hidden))
        if found is None or found[0].gids != self.gids:
            depth = 0 if hidden else self._layout.user_depth
            entry = DirectoryAccess(
                uid=uid, gids=self.gids, user_depth=depth, others_pass=not hidden
            )
            if len(self._entries) > 4096:
                self._entries.clear()
            found = self._entries[uid, hidden] = (entry, FileReaders(uid, self.gids))
        return found

    def _zone(self, cluster: str) -> str:
        known = self._settings.cluster.get(cluster)
        return known.timezone if known else ""


def find_holder(records: FilesRecords, cluster: str, record: JobRecord) -> int | None:
    """Return the number of a job's holder, for whom bytes are counted; None without a uid."""
    if record.uid is None:
        return None
    return records.holder((cluster, record.uid, record.user, record.account))


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
    gone: list[FileRow] = []
    removed: dict[FileRef, FileRow] = {}
    for key in body.script_keys:
        row = pending.rows.get((event.cluster, key))
        if row is None:
            continue
        if row.state == MOVED:
            # The mover removes the files; manifest lines about them may still be here.
            pending.later.append((event.kind, key, event.cluster, msgspec.json.encode(body)))
            gone.append(row)
            continue
        _remove_files(row, tree, records)
        removed[event.cluster, key] = row
        if row.directory:
            gone.append(row)
    try:
        remove_manifest_lines(gone, records, manifests, body.asked_by, pending.now)
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.ELOOP}:
            raise
        raise PathBlocked(
            f"a manifest below {tree.root} that names what is to be purged is no file "
            f"({error.strerror}): move away what is there",
            tree.root,
        ) from error
    # Last: a purge that fails half way is repeated, and must find its rows.
    for ref, row in removed.items():
        pending.delete(ref)
        if row.directory:
            pending.left.add(row.directory)


def _remove_files(row: FileRow, tree: ArchiveTree, records: FilesRecords) -> None:
    if row.state == WAITING:
        body = _body_decoder.decode(row.body) if row.body else None
        for kept in (body.script, body.environment) if body else ():
            if kept is not None:
                _remove_file(tree, WAITING_DIRECTORY, kept.path)
        return
    path = records.directory(row.directory)
    for name, sha in ((row.script_name, row.script_sha), (row.env_name, row.env_sha)):
        if name:
            _remove_file(tree, path, name)
            _remove_other_form(row, tree, records, swap_compression_suffix(name), sha)


def _remove_other_form(
    row: FileRow, tree: ArchiveTree, records: FilesRecords, name: str, sha: bytes | None
) -> None:
    """Remove the other form, plain or compressed, left by a crash and a change of the setting."""
    path = records.directory(row.directory)
    try:
        fd = tree.directory(path)
    except FileNotFoundError:
        return
    if (
        has_regular_file(fd, name)
        and not records.claimed(row.job_id, row.key, row.directory, name)
        and compute_file_digest(fd, name) == sha
    ):
        tree.unlink(path, name)


def _remove_file(tree: ArchiveTree, path: str, name: str) -> None:
    try:
        tree.unlink(path, name)
    except IsADirectoryError as error:
        raise PathBlocked(
            f"{tree.root}/{path}/{name} is a directory, not the file that is to be purged: "
            "move it away",
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
        body = pending.fresh.get(ref)
        if body is None and row.body:
            body = _body_decoder.decode(row.body)
        if body is not None:
            names.update(kept.path for kept in (body.script, body.environment) if kept)
            continue
        of = (row.cluster, row.job_id, row.mtime_ns)
        if row.script_sha is not None:
            names.add(make_incoming_filename(*of, row.script_length, "script"))
        if row.env_sha is not None:
            names.add(make_incoming_filename(*of, row.env_length, "env"))
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
    told: dict[str, list[bytes]] = {}
    for row in rows:
        path = records.directory(row.directory)
        fact = ManifestFact(
            fact="purged",
            key=row.key,
            version=MANIFEST_VERSION,
            cluster=row.cluster,
            at=now,
            asked_by=asked_by or "",
        )
        if asked_by is not None:
            told.setdefault(path, []).append(encode_fact(fact))
        for number in (row.directory, *list_former_directories(row)):
            keys.setdefault(records.directory(number), []).append(row.key)
    for path, forgotten in keys.items():
        manifests.forget(path, forgotten, told.get(path, []))


def list_former_directories(row: FileRow) -> list[int]:
    """Return the numbers of a script's former directories."""
    return [int(number) for number in row.came_from.split(",") if number]
