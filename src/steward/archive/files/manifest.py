"""Manifest of an archive directory: MANIFEST.jsonl, one fact per line, only ever appended to.

A line is a JSON object with ``v`` (the version, 1), ``fact`` and ``key`` (:class:`ManifestFact`).
If a crash cut a line short, the next append ends it and readers skip it; a repeated line adds
nothing. Only a purge rewrites a manifest, so that no line mentions purged scripts.

:class:`ManifestWriter` writes the manifests of a tree. :func:`iterate_scripts_in_tree` reads a tree
without the sink's database, by manifests or by file names (:func:`parse_file_name`); the catalog
rebuild uses it.
"""

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import BinaryIO, Final, Literal

import msgspec

from steward.archive.errors import make_archive_unavailable
from steward.archive.files.layout import UNVERIFIED, ArchiveLayout, decode_name
from steward.archive.files.tree import ArchiveTree
from steward.core.events import JobIdentity, JobScript, make_script_key
from steward.core.records import JobRecord
from steward.core.sqlite import Connection, open_scratch, translate_errors
from steward.core.timestamps import to_micros_or_zero

MANIFEST_FILE_NAME: Final = "MANIFEST.jsonl"
MANIFEST_VERSION: Final = 1
_MOST_SIZES: Final = 256
"""Number of manifests whose size after the last append is remembered."""


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its name in this directory, its size in bytes and its SHA-256 in hex.

    A name that ends in ``.zst`` is a compressed file; size and SHA-256 are those of the plain
    bytes.
    """

    name: str
    length: int
    sha256: str


class ManifestFact(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"version": "v"},
):
    """One line of a manifest.

    Attributes:
        fact: ``kept`` (these files are here), ``identity`` (their owner and the job record),
            ``moved`` (the files are now at ``to``), ``purged``.
        key: Key of the job.script event.
        cluster: The cluster's name.
        job_id: Id in the spool entry's name; for an identity the job's id.
        at: Time at which Steward wrote the line, UTC.
        spool_mtime: The script's time in the spool, UTC, to the microsecond.
        script: File of the script.
        environment: File of the environment.
        redacted: Names of redacted variables.
        flags: Anomalies, as in the job.script event.
        claimed_name: Job name that the environment claims: a hint, never an identity.
        claimed_dir: Submit directory, likewise.
        claimed_host: Submit host, likewise.
        source: Source of the script: ``spool`` or ``import``.
        why: Reason of an identity: ``bound``, ``renamed``, ``ended``, ``updated``.
        first_submit: First submit time of the job, UTC.
        record: Job record: user and uid, account, QOS, partition, requested TRES, dependency,
            array, het job, submit line, command, work directory, paths of stdin, stdout and stderr,
            submit host, times.
        to: Present directory of moved files, below the archive's root (or the second tree's).
        asked_by: User who had it purged.
    """

    fact: Literal["kept", "identity", "moved", "purged"]
    key: str
    # No default, so that omit_defaults never omits it.
    version: int
    cluster: str = ""
    job_id: int = 0
    at: datetime | None = None
    spool_mtime: datetime | None = None
    script: ManifestFile | None = None
    environment: ManifestFile | None = None
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    claimed_name: str = ""
    claimed_dir: str = ""
    claimed_host: str = ""
    source: str = ""
    why: str = ""
    first_submit: datetime | None = None
    record: JobRecord | None = None
    to: str = ""
    asked_by: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ManifestFact)


def encode_kept_line(
    key: str, cluster: str, body: JobScript, names: tuple[str, str], at: datetime, source: str
) -> bytes:
    """Encode a ``kept`` line: a script's files are in this directory.

    Args:
        key: Key of the job.script event.
        cluster: The cluster's name.
        body: The event's body.
        names: File names of script and environment, "" for none.
        at: Current time, UTC.
        source: Source of the event.
    """
    script, environment = body.script, body.environment
    return _encoder.encode(
        ManifestFact(
            fact="kept",
            key=key,
            version=MANIFEST_VERSION,
            cluster=cluster,
            job_id=body.job_id,
            at=at,
            spool_mtime=datetime.fromtimestamp(body.spool_mtime_ns / 1e9, UTC),
            script=ManifestFile(name=names[0], length=script.length, sha256=script.sha256)
            if script and names[0]
            else None,
            environment=ManifestFile(
                name=names[1], length=environment.length, sha256=environment.sha256
            )
            if environment and names[1]
            else None,
            redacted=body.redacted,
            flags=body.flags,
            claimed_name=body.claimed_name,
            claimed_dir=body.claimed_dir,
            claimed_host=body.claimed_host,
            source=source,
        )
    )


def encode_identity_line(cluster: str, body: JobIdentity, at: datetime) -> bytes:
    """Encode an ``identity`` line: the owner of a script and its job record."""
    return _encoder.encode(
        ManifestFact(
            fact="identity",
            key=body.script_key,
            version=MANIFEST_VERSION,
            cluster=cluster,
            job_id=body.job_id,
            at=at,
            why=body.why,
            first_submit=body.first_submit,
            record=body.record,
        )
    )


def encode_fact(fact: ManifestFact) -> bytes:
    """Encode a fact as a line, without newline."""
    return _encoder.encode(fact)


def decode_facts(data: bytes) -> Iterator[ManifestFact]:
    """Decode the facts of a manifest; skip incomplete lines and kinds of newer versions."""
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


class ManifestWriter:
    """Writer of one tree's manifests: collects lines and appends them once per batch."""

    def __init__(self, tree: ArchiveTree) -> None:
        self._tree = tree
        self._sizes: dict[int, int] = {}
        self._new_lines: dict[str, list[bytes]] = {}
        self._cache: dict[str, tuple[bytes, dict[str, list[tuple[int, int]]]]] = {}

    def add(self, path: str, text: bytes) -> None:
        """Add a line for the manifest of the directory ``path``, which must exist."""
        lines = self._new_lines.get(path)
        if lines is None:
            lines = self._new_lines[path] = []
        lines.append(text)

    def flush(self) -> None:
        """Append the collected lines; durable after :meth:`ArchiveTree.sync` or their own fsync.

        Raises:
            OSError: A manifest cannot be written; the next append repairs an incomplete line.
        """
        few = len(self._new_lines) <= 8
        for path, lines in self._new_lines.items():
            self._append(path, lines, sync=few)
            self._tree.record_change(path)
        self.drop()

    def drop(self) -> None:
        """Discard collected lines and cached manifests."""
        self._new_lines.clear()
        self._cache.clear()

    def find_facts(self, path: str, key: str) -> list[ManifestFact]:
        """Return the ``kept`` and ``identity`` facts about a script in the manifest of ``path``.

        The manifest is read once per batch; lines added since are included.

        Raises:
            OSError: It cannot be read.
        """
        if path not in self._cache:
            data = self.read(path)
            self._cache[path] = (data, _index_lines(data))
        data, index = self._cache[path]
        key_bytes = key.encode()
        lines = [data[start:end] for start, end in index.get(key, ())]
        lines.extend(line for line in self._new_lines.get(path, ()) if key_bytes in line)
        facts = [fact for line in lines for fact in decode_facts(line) if fact.key == key]
        return [fact for fact in facts if fact.fact in {"kept", "identity"}]

    def _append(self, path: str, lines: list[bytes], *, sync: bool) -> None:
        """Append lines to a manifest; end a line that a crash cut short."""
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        directory_fd = self._tree.get_directory_fd(path)
        try:
            fd = os.open(MANIFEST_FILE_NAME, flags, dir_fd=directory_fd)
        except FileNotFoundError:
            mode = self._get_mode(directory_fd)
            fd = os.open(MANIFEST_FILE_NAME, flags | os.O_CREAT, mode, dir_fd=directory_fd)
        try:
            status = os.fstat(fd)
            size = status.st_size
            is_known = not size or self._sizes.get(status.st_ino) == size
            if not is_known and os.pread(fd, 1, size - 1) != b"\n":
                lines = [b"", *lines]
            data = b"\n".join(lines) + b"\n"
            _write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        self._sizes[status.st_ino] = size + len(data)

    def _get_mode(self, directory_fd: int) -> int:
        """Return the mode of a new manifest in a directory."""
        # A default ACL turns the group bits into its mask; without one they would give access to
        # the file's group, which is not wanted.
        if not self._tree.has_acls:
            return 0o600
        try:
            os.getxattr(directory_fd, "system.posix_acl_default")
        except OSError:
            return 0o600
        return 0o640

    def read(self, path: str) -> bytes:
        """Return the manifest of the directory ``path``; empty if there is none.

        Raises:
            OSError: It cannot be read.
        """
        try:
            directory_fd = self._tree.get_directory_fd(path)
            fd = os.open(
                MANIFEST_FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd
            )
        except FileNotFoundError:
            return b""
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def remove_keys(self, path: str, keys: Collection[str], purge_lines: list[bytes]) -> None:
        """Rewrite a manifest atomically without the lines of ``keys``.

        Args:
            path: The directory.
            keys: Keys of job.script events.
            purge_lines: Lines to append instead.

        Raises:
            OSError: It cannot be rewritten; the old one remains.
        """
        data = self.read(path)
        if not data:
            return
        removed_keys = frozenset(keys)
        remaining = [line for line in data.split(b"\n") if _is_retained_line(line, removed_keys)]
        directory_fd = self._tree.get_directory_fd(path)
        temporary = f".{MANIFEST_FILE_NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, self._get_mode(directory_fd), dir_fd=directory_fd)
        try:
            _write_all(fd, b"".join(line + b"\n" for line in (*remaining, *purge_lines)))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, MANIFEST_FILE_NAME, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        self._tree.record_change(path)


class _LineKey(msgspec.Struct, frozen=True):
    key: str = ""
    cluster: str = ""
    fact: str = ""


_key_decoder = msgspec.json.Decoder(_LineKey)


def _index_lines(data: bytes) -> dict[str, list[tuple[int, int]]]:
    """Map each key of a manifest to the byte ranges of its lines."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        if end < 0:
            break
        try:
            key = _key_decoder.decode(data[start:end]).key
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # Cut short by a crash, and written again since.
            key = ""
        if key:
            ranges.setdefault(key, []).append((start, end))
        start = end + 1
    return ranges


def _is_retained_line(line: bytes, purged_keys: frozenset[str]) -> bool:
    """Return whether a manifest line is kept when keys are purged."""
    try:
        return _key_decoder.decode(line).key not in purged_keys
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Cut short: it is useless, and may be part of what is to be forgotten.
        return False


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


_ID_AND_NAME = re.compile(r"([0-9]{1,10})(?:-(.*?))?(?:~([0-9]+))?\.(sh|env)(\.zst)?", re.DOTALL)
_SARCHIVE = re.compile(r"job\.([0-9]{1,10})_(script|environment)(?:~([0-9]+))?(\.zst)?")


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """File in a tree: path below the root, size in bytes, SHA-256 (hex) if a manifest has it."""

    path: str
    length: int
    sha256: str = ""


class FoundScript(msgspec.Struct, frozen=True, kw_only=True):
    """Script found in a tree, by manifest or by file name.

    Attributes:
        key: Key of its job.script event, from the manifest, or made from id and time.
        job_id: Job id in its name.
        spool_mtime_ns: Time in the key; without a manifest the file's own time.
        cluster: Cluster according to manifest or path; "" if unknown.
        name: Job name: verified, claimed, or from the file name.
        user_directory: Decoded name of the user's directory; "" for none.
        script: File of the script.
        environment: File of the environment.
        kept: Manifest fact about the files.
        record: Job record in the manifest; None if it was never known.
        first_submit: First submit time of the job, if known.
    """

    key: str
    job_id: int
    spool_mtime_ns: int
    cluster: str = ""
    name: str = ""
    user_directory: str = ""
    script: FoundFile | None = None
    environment: FoundFile | None = None
    kept: ManifestFact | None = None
    record: JobRecord | None = None
    first_submit: datetime | None = None


def iterate_scripts_in_tree(root: str, layout: ArchiveLayout) -> Iterator[FoundScript]:
    """Yield every script below ``root``, according to manifests or file names.

    Memory does not grow with the number of scripts, even of one directory.

    Raises:
        ArchiveUnavailable: The tree cannot be read.
        SqliteUnavailable: There is no place for temporary files.
    """
    tree = ArchiveTree(root)
    with closing(open_scratch(_LINE_TABLE)) as scratch:
        try:
            # A tree to be read may be a copy without a marker, so the marker is not checked.
            tree.open_for_reading()
            for directory, names in tree.iterate_files():
                path = os.path.join(root, directory)
                manifest = _open_manifest(path)
                if manifest is None:
                    yield from find_named_scripts(root, directory, names, path, layout)
                else:
                    with manifest:
                        yield from _find_manifest_scripts(directory, manifest, scratch)
        except OSError as error:
            raise make_archive_unavailable(root, error) from error
        finally:
            tree.close()


def _open_manifest(path: str) -> BinaryIO | None:
    """Open the manifest of a directory; None if it has none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(os.path.join(path, MANIFEST_FILE_NAME), flags), "rb")
    except FileNotFoundError:
        return None


_LONGEST_LINE: Final = 16 * 1024**2
_LINE_TABLE: Final = """
    CREATE TABLE line (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        kept INTEGER,
        identity INTEGER,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
"""
"""Offsets of the last ``kept`` and ``identity`` line of each script; negative after ``moved``."""
_SAVE_LINE: Final = (
    "INSERT INTO line VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "kept = coalesce(excluded.kept, kept), identity = coalesce(excluded.identity, identity)"
)


def _find_manifest_scripts(
    directory: str, manifest: BinaryIO, scratch: Connection
) -> Iterator[FoundScript]:
    """Yield the scripts that a directory's manifest says are there."""
    with translate_errors("a temporary file"):
        scratch.execute("DELETE FROM line")
        scratch.executemany(_SAVE_LINE, _locate_lines(manifest))
        for kept_offset, identity_offset in scratch.execute(
            "SELECT kept, coalesce(identity, -1) FROM line WHERE kept >= 0 ORDER BY key, cluster"
        ):
            fact = _read_fact(manifest, kept_offset)
            if fact is not None:
                yield _make_found_script(directory, fact, _read_fact(manifest, identity_offset))


def _locate_lines(manifest: BinaryIO) -> Iterator[tuple[str, str, int | None, int | None]]:
    """Yield a row of the line table for each line of a manifest."""
    offset = 0
    while line := manifest.readline(_LONGEST_LINE):
        try:
            ref = _key_decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            ref = _LineKey()  # cut short by a crash, and written again since
        if ref.fact == "kept":
            yield ref.key, ref.cluster, offset, None
        elif ref.fact == "identity":
            yield ref.key, ref.cluster, None, offset
        elif ref.fact in {"moved", "purged"}:
            yield ref.key, ref.cluster, -1, -1
        offset += len(line)


def _read_fact(manifest: BinaryIO, offset: int) -> ManifestFact | None:
    """Return the fact of the line at an offset; None for a negative one."""
    if offset < 0:
        return None
    manifest.seek(offset)
    return next(decode_facts(manifest.readline(_LONGEST_LINE)), None)


def _make_found_script(
    directory: str, fact: ManifestFact, identity_fact: ManifestFact | None
) -> FoundScript:
    """Make the script of a ``kept`` fact and, if its owner is known, an ``identity``."""
    record = identity_fact.record if identity_fact else None
    return FoundScript(
        key=fact.key,
        job_id=fact.job_id,
        spool_mtime_ns=_get_fact_time(fact),
        cluster=fact.cluster,
        name=record.name if record else fact.claimed_name,
        script=_make_found_file(directory, fact, "script"),
        environment=_make_found_file(directory, fact, "environment"),
        kept=fact,
        record=record,
        first_submit=identity_fact.first_submit if identity_fact else None,
    )


def _make_found_file(directory: str, fact: ManifestFact, kind: str) -> FoundFile | None:
    """Return a file of a ``kept`` fact, with its path below the root."""
    file = fact.script if kind == "script" else fact.environment
    if file is None or "/" in file.name:
        return None
    path = f"{directory}/{file.name}".lstrip("/")
    return FoundFile(path=path, length=file.length, sha256=file.sha256)


def _get_fact_time(fact: ManifestFact) -> int:
    """Return the spool time of a fact, ns since the epoch."""
    # The key has nanoseconds, the manifest's time only microseconds.
    suffix = fact.key.rpartition(":")[2]
    if suffix.isdecimal() and len(suffix) < 20:
        return int(suffix)
    return to_micros_or_zero(fact.spool_mtime) * 1000


class _ParsedName(msgspec.Struct, frozen=True):
    job_id: int
    name: str
    variant: str
    is_script: bool


def parse_file_name(filename: str) -> _ParsedName | None:
    """Parse the name of an archived file; None for a name that no layout makes."""
    match = _SARCHIVE.fullmatch(filename)
    if match:
        variant = (match[3] or "") + (match[4] or "")
        return _ParsedName(int(match[1]), "", variant, match[2] == "script")
    match = _ID_AND_NAME.fullmatch(filename)
    if match:
        variant = (match[3] or "") + (match[5] or "")
        return _ParsedName(int(match[1]), decode_name(match[2] or ""), variant, match[4] == "sh")
    return None


def find_named_scripts(
    root: str, directory: str, names: Iterable[str], path: str, layout: ArchiveLayout
) -> Iterator[FoundScript]:
    """Yield the scripts of one directory according to its file names.

    Args:
        root: The tree's root.
        directory: Path of the directory below the root.
        names: Names of its files, sorted: those of a job follow one another.
        path: Whole path of the directory.
        layout: Layout of the tree.

    Raises:
        ArchiveUnavailable: The status of a file cannot be read.
    """
    cluster, user = _parse_directory(directory, layout)
    parsed_names = ((name, parsed) for name in names if (parsed := parse_file_name(name)))
    for job_id, group in itertools.groupby(parsed_names, key=lambda pair: pair[1].job_id):
        pairs: dict[tuple[str, str], dict[bool, tuple[FoundFile, int]]] = {}
        for filename, parsed in group:
            try:
                status = os.stat(os.path.join(path, filename), follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise make_archive_unavailable(root, error) from error
            file = FoundFile(path=f"{directory}/{filename}".lstrip("/"), length=status.st_size)
            files = pairs.setdefault((parsed.name, parsed.variant), {})
            files[parsed.is_script] = (file, status.st_mtime_ns)
        for (job_name, _), files in pairs.items():
            script, environment = files.get(True), files.get(False)
            mtime_ns = (script or environment or (None, 0))[1]
            yield FoundScript(
                key=make_script_key(job_id, mtime_ns),
                job_id=job_id,
                spool_mtime_ns=mtime_ns,
                cluster=cluster,
                name=job_name,
                user_directory=user,
                script=script[0] if script else None,
                environment=environment[0] if environment else None,
            )


def _parse_directory(directory: str, layout: ArchiveLayout) -> tuple[str, str]:
    """Return cluster and user according to a directory's path."""
    parts = directory.split("/")
    template = layout.template.split("/")[:-1]
    if parts[0] == UNVERIFIED:
        return (decode_name(parts[1]) if len(parts) > 1 else ""), ""
    values = dict(zip(template, parts, strict=False))
    return decode_name(values.get("{cluster}", "")), decode_name(values.get("{user}", ""))
