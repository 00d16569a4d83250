"""MANIFEST.jsonl: what is known of a directory's files, a line a fact, only ever appended.

A line is a JSON object with ``v`` (the version, 1), ``fact`` and ``key``. A line
that a crash cut short is closed at the next append and passed over by readers;
the same line twice says nothing new. Only a purge rewrites a manifest, so that
what was purged is told by nobody any more.
"""

import os
import re
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from steward.archive.errors import unavailable
from steward.archive.files.layout import UNVERIFIED, Layout, decode_name
from steward.archive.files.tree import Tree
from steward.core.events import JobIdentity, JobScript, script_key
from steward.core.records import JobRecord
from steward.core.timestamps import micros_or_0

NAME: Final = "MANIFEST.jsonl"
VERSION: Final = 1


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its name in this directory, its size in bytes and its SHA-256 in hex.

    A name that ends in ``.zst`` is that of a compressed file; size and SHA-256 are
    those of the plain bytes.
    """

    name: str
    length: int
    sha256: str


class Fact(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"version": "v"},
):
    """One line of a manifest.

    Attributes:
        fact: ``kept`` (these files are here), ``identity`` (whose they are, and all that
            Slurm shows of the job), ``moved`` (the files are now at ``to``), ``purged``.
        key: Key of the job.script event.
        cluster: The cluster's name.
        job_id: The id in the spool entry's name; of an identity the job's.
        at: When Steward wrote the line, UTC.
        spool_mtime: Time of the script in the spool, UTC, to the microsecond.
        script: The script's file.
        environment: The environment's file.
        redacted: Names of the variables that lost their value.
        flags: What was odd, as in the job.script event.
        claimed_name: What the environment says of itself: hints, never an identity.
        claimed_dir: Likewise.
        claimed_host: Likewise.
        source: Who saw it: ``spool`` or ``import``.
        why: Of an identity: ``bound``, ``renamed``, ``ended``, ``updated``.
        first_submit: First submit time of the job, UTC.
        record: What Slurm showed: user and uid, account, QOS, partition, requested TRES,
            dependency, array, het job, submit line, command, work directory, paths of
            stdin, stdout and stderr, submit host, times.
        to: Where moved files are now, below the archive's root (or the second tree's).
        asked_by: Who had it purged.
    """

    fact: Literal["kept", "identity", "moved", "purged"]
    key: str
    # Without a default, so that omit_defaults never leaves it out.
    version: int
    cluster: str = ""
    job_id: int = 0
    at: datetime | None = None
    spool_mtime: datetime | None = None
    script: File | None = None
    environment: File | None = None
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
_decoder = msgspec.json.Decoder(Fact)


def kept_line(
    key: str, cluster: str, body: JobScript, names: tuple[str, str], at: datetime, source: str
) -> bytes:
    """The line that says that a script's files are in this directory.

    Args:
        key: Of the job.script event.
        cluster: The cluster's name.
        body: The event's body.
        names: Names of the script's and of the environment's file, "" for none.
        at: Now, UTC.
        source: Of the event.
    """
    script, environment = body.script, body.environment
    return _encoder.encode(
        Fact(
            fact="kept",
            key=key,
            version=VERSION,
            cluster=cluster,
            job_id=body.job_id,
            at=at,
            spool_mtime=datetime.fromtimestamp(body.spool_mtime_ns / 1e9, UTC),
            script=File(name=names[0], length=script.length, sha256=script.sha256)
            if script and names[0]
            else None,
            environment=File(name=names[1], length=environment.length, sha256=environment.sha256)
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


def identity_line(cluster: str, body: JobIdentity, at: datetime) -> bytes:
    """The line that says whose a script is and what Slurm shows of its job."""
    return _encoder.encode(
        Fact(
            fact="identity",
            key=body.script_key,
            version=VERSION,
            cluster=cluster,
            job_id=body.job_id,
            at=at,
            why=body.why,
            first_submit=body.first_submit,
            record=body.record,
        )
    )


def line(fact: Fact) -> bytes:
    """A fact as a line, without its newline."""
    return _encoder.encode(fact)


def facts(data: bytes) -> Iterator[Fact]:
    """The facts of a manifest; lines cut short or of a newer version's kind are passed over."""
    for text in data.split(b"\n"):
        if not text:
            continue
        try:
            yield _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


class Manifests:
    """The manifests of one tree: lines are gathered and appended once a batch."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lines: dict[str, list[bytes]] = {}
        self._read: dict[str, tuple[bytes, dict[str, list[tuple[int, int]]]]] = {}

    def add(self, path: str, text: bytes) -> None:
        """Remember a line for the manifest of the directory ``path``, which must exist."""
        lines = self._lines.get(path)
        if lines is None:
            lines = self._lines[path] = []
        lines.append(text)

    def flush(self) -> None:
        """Append what was gathered; durable after :meth:`Tree.sync` and its own fsync.

        Raises:
            OSError: A manifest cannot be written; a line cut short is healed next time.
        """
        few = len(self._lines) <= 8
        for path, lines in self._lines.items():
            self._append(path, lines, sync=few)
            self._tree.touch(path)
        self.drop()

    def drop(self) -> None:
        """Forget what was gathered and what was read."""
        self._lines.clear()
        self._read.clear()

    def about(self, path: str, key: str) -> list[Fact]:
        """What the manifest of the directory ``path`` says of a script, ``moved`` left out.

        The manifest is read once a batch; lines that were added since count too.

        Raises:
            OSError: It cannot be read.
        """
        if path not in self._read:
            data = self.read(path)
            self._read[path] = (data, _index(data))
        data, index = self._read[path]
        sign = key.encode()
        texts = [data[start:end] for start, end in index.get(key, ())]
        texts.extend(text for text in self._lines.get(path, ()) if sign in text)
        said = [fact for text in texts for fact in facts(text) if fact.key == key]
        return [fact for fact in said if fact.fact in {"kept", "identity"}]

    def _append(self, path: str, lines: list[bytes], *, sync: bool) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        directory_fd = self._tree.directory(path)
        fd = os.open(NAME, flags, self._mode(directory_fd), dir_fd=directory_fd)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                lines = [b"", *lines]
            _write_all(fd, b"\n".join(lines) + b"\n")
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _mode(self, directory_fd: int) -> int:
        # A default ACL turns the group bits into its mask; without one they would be
        # the group's own, which nobody asked for.
        if not self._tree.acls:
            return 0o600
        try:
            os.getxattr(directory_fd, "system.posix_acl_default")
        except OSError:
            return 0o600
        return 0o640

    def read(self, path: str) -> bytes:
        """The manifest of the directory ``path``; empty where there is none.

        Raises:
            OSError: It cannot be read.
        """
        try:
            directory_fd = self._tree.directory(path)
            fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        except FileNotFoundError:
            return b""
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def forget(self, path: str, keys: Collection[str], purged: list[bytes]) -> None:
        """Rewrite a manifest without every line of ``keys``, atomically.

        Args:
            path: The directory.
            keys: Keys of job.script events.
            purged: Lines to add instead.

        Raises:
            OSError: It cannot be rewritten; the old one is still there then.
        """
        data = self.read(path)
        if not data:
            return
        wanted = frozenset(keys)
        kept = [text for text in data.split(b"\n") if _stays(text, wanted)]
        directory_fd = self._tree.directory(path)
        temporary = f".{NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, self._mode(directory_fd), dir_fd=directory_fd)
        try:
            _write_all(fd, b"".join(text + b"\n" for text in (*kept, *purged)))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, NAME, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        self._tree.touch(path)


class _Key(msgspec.Struct, frozen=True):
    key: str = ""


_key_decoder = msgspec.json.Decoder(_Key)


def _index(data: bytes) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
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
            found.setdefault(key, []).append((start, end))
        start = end + 1
    return found


def _stays(text: bytes, forgotten: frozenset[str]) -> bool:
    try:
        return _key_decoder.decode(text).key not in forgotten
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Cut short: it says nothing to anyone, and may be a piece of what is to be forgotten.
        return False


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


_ID_AND_NAME = re.compile(r"([0-9]{1,10})(?:-(.*?))?(?:~([0-9]+))?\.(sh|env)(\.zst)?", re.DOTALL)
_SARCHIVE = re.compile(r"job\.([0-9]{1,10})_(script|environment)(?:~([0-9]+))?(\.zst)?")


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one manifest: the directory below the root, and the fact."""

    directory: str
    fact: Fact


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file: path below the root, size in bytes, SHA-256 (hex) where a manifest has it."""

    path: str
    length: int
    sha256: str = ""


class FoundScript(msgspec.Struct, frozen=True, kw_only=True):
    """A script that was found in a tree.

    Attributes:
        key: Key of its job.script event, as kept or made again from id and time.
        job_id: The id in its name.
        spool_mtime_ns: From the key; without a manifest the file's own time.
        cluster: Where a manifest or the path says it; "" otherwise.
        name: Job name: verified, or as claimed, or as the file's name has it.
        user_directory: The name of the user's directory, decoded; "" for none.
        script: Its file.
        environment: Its environment's file.
        kept: What the manifest says of the files.
        record: What the manifest says of the job; None where it was never known.
        first_submit: The job's first submit time, where it is known.
    """

    key: str
    job_id: int
    spool_mtime_ns: int
    cluster: str = ""
    name: str = ""
    user_directory: str = ""
    script: FoundFile | None = None
    environment: FoundFile | None = None
    kept: Fact | None = None
    record: JobRecord | None = None
    first_submit: datetime | None = None


def iter_manifest(root: str) -> Iterator[ManifestEntry]:
    """Every line of every manifest below ``root``.

    Raises:
        ArchiveUnavailable: The tree cannot be read.
    """
    for directory, names, path in _directories(root):
        if NAME in names:
            for fact in _facts(root, path):
                yield ManifestEntry(directory=directory, fact=fact)


def iter_files(root: str, layout: Layout) -> Iterator[FoundScript]:
    """Every script below ``root``, with all that manifests or names say of it.

    Raises:
        ArchiveUnavailable: The tree cannot be read.
    """
    for directory, names, path in _directories(root):
        if NAME in names:
            yield from _told(root, directory, path)
        else:
            yield from named_scripts(root, directory, names, path, layout)


def _directories(root: str) -> Iterator[tuple[str, list[str], str]]:
    tree = Tree(root)
    try:
        # A tree to be read may be a copy without a marker: it is not asked for.
        tree.open_for_reading()
        for directory, names in tree.files():
            yield directory, names, os.path.join(root, directory)
    except OSError as error:
        raise unavailable(root, error) from error
    finally:
        tree.close()


def _facts(root: str, path: str) -> Iterator[Fact]:
    try:
        fd = os.open(os.path.join(path, NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        # Purged between listing and reading.
        return
    except OSError as error:
        raise unavailable(root, error) from error
    yield from facts(data)


def _told(root: str, directory: str, path: str) -> Iterator[FoundScript]:
    kept: dict[tuple[str, str], Fact] = {}
    identity: dict[tuple[str, str], Fact] = {}
    for fact in _facts(root, path):
        ref = (fact.cluster, fact.key)
        if fact.fact == "kept":
            kept[ref] = fact
        elif fact.fact == "identity":
            identity[ref] = fact
        else:
            kept.pop(ref, None)
            identity.pop(ref, None)
    for ref, fact in kept.items():
        known = identity.get(ref)
        yield FoundScript(
            key=fact.key,
            job_id=fact.job_id,
            spool_mtime_ns=_time_in(fact),
            cluster=fact.cluster,
            name=known.record.name if known and known.record else fact.claimed_name,
            script=_kept_file(directory, fact, "script"),
            environment=_kept_file(directory, fact, "environment"),
            kept=fact,
            record=known.record if known else None,
            first_submit=known.first_submit if known else None,
        )


def _kept_file(directory: str, fact: Fact, which: str) -> FoundFile | None:
    file = fact.script if which == "script" else fact.environment
    if file is None or "/" in file.name:
        return None
    path = f"{directory}/{file.name}".lstrip("/")
    return FoundFile(path=path, length=file.length, sha256=file.sha256)


def _time_in(fact: Fact) -> int:
    # The key has nanoseconds, the manifest's time microseconds.
    last = fact.key.rpartition(":")[2]
    if last.isdecimal() and len(last) < 20:
        return int(last)
    return micros_or_0(fact.spool_mtime) * 1000


class _Name(msgspec.Struct, frozen=True):
    job_id: int
    name: str
    variant: str
    is_script: bool


def parse_file_name(filename: str) -> _Name | None:
    """What the name of an archived file says; None for a name that no layout makes."""
    match = _SARCHIVE.fullmatch(filename)
    if match:
        variant = (match[3] or "") + (match[4] or "")
        return _Name(int(match[1]), "", variant, match[2] == "script")
    match = _ID_AND_NAME.fullmatch(filename)
    if match:
        variant = (match[3] or "") + (match[5] or "")
        return _Name(int(match[1]), decode_name(match[2] or ""), variant, match[4] == "sh")
    return None


def named_scripts(
    root: str, directory: str, names: list[str], path: str, layout: Layout
) -> Iterator[FoundScript]:
    """The scripts of one directory by the names of its files.

    Args:
        root: The tree's root.
        directory: The directory below it.
        names: Names of the files in it.
        path: Its whole path.
        layout: What its path means.

    Raises:
        ArchiveUnavailable: A file cannot be looked at.
    """
    pairs: dict[tuple[int, str, str], dict[bool, tuple[FoundFile, int]]] = {}
    for filename in names:
        name = parse_file_name(filename)
        if name is None:
            continue
        try:
            status = os.stat(os.path.join(path, filename), follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unavailable(root, error) from error
        found = FoundFile(path=f"{directory}/{filename}".lstrip("/"), length=status.st_size)
        ref = (name.job_id, name.name, name.variant)
        pairs.setdefault(ref, {})[name.is_script] = (found, status.st_mtime_ns)
    cluster, user = _said_by_path(directory, layout)
    for (job_id, job_name, _), files in pairs.items():
        script, environment = files.get(True), files.get(False)
        mtime_ns = (script or environment or (None, 0))[1]
        yield FoundScript(
            key=script_key(job_id, mtime_ns),
            job_id=job_id,
            spool_mtime_ns=mtime_ns,
            cluster=cluster,
            name=job_name,
            user_directory=user,
            script=script[0] if script else None,
            environment=environment[0] if environment else None,
        )


def _said_by_path(directory: str, layout: Layout) -> tuple[str, str]:
    parts = directory.split("/")
    template = layout.template.split("/")[:-1]
    if parts[0] == UNVERIFIED:
        return (decode_name(parts[1]) if len(parts) > 1 else ""), ""
    said = dict(zip(template, parts, strict=False))
    return decode_name(said.get("{cluster}", "")), decode_name(said.get("{user}", ""))


def spool_time(script: FoundScript) -> datetime:
    """The script's time in the spool, UTC."""
    return datetime.fromtimestamp(script.spool_mtime_ns / 1e9, UTC)
