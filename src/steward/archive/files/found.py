"""What an archive's files alone say: for rebuilding everything else from them.

Directories with a manifest say all; the presets without one say what their
names say: a job id, and with ``job_archive`` a job's name and a user's.
"""

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from steward.archive.errors import unavailable
from steward.archive.files.layout import UNVERIFIED, Layout
from steward.archive.files.manifest import NAME, Fact, facts
from steward.archive.files.names import decode_name
from steward.archive.files.tree import Tree
from steward.core.events import script_key
from steward.core.moments import micros_or_0
from steward.core.records import JobRecord

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
