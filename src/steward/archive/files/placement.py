"""File placement: put a script and its environment into the tree by link, copy or compression.

:class:`FilePlacer` writes pairs of files at a :class:`PlacementTarget`. Steps can be repeated after
a crash. Two different scripts may have the same name (a reused job id): a repeat of the same bytes
changes nothing, while different bytes get ``~2`` in their name, so that both are kept.
"""

import itertools
import os
import stat
from collections.abc import Callable, Iterator

import msgspec

from steward.archive.files.compression import (
    COMPRESSION_SUFFIX,
    DamagedFile,
    compute_plain_digest,
    is_compressed_name,
    open_archived_file,
)
from steward.archive.files.layout import ArchiveLayout
from steward.archive.files.permissions import FileReaders
from steward.archive.files.tree import (
    LINK_ERRORS,
    ArchiveTree,
    BytesGone,
    ByteSource,
    DirectoryAccess,
    copy_bytes,
    is_unsettled,
    make_temporary_name,
    remove_temporary,
)
from steward.core.files import sync_filesystem


class PlacementTarget(msgspec.Struct, frozen=True):
    """Directory and file name for a script and its environment.

    Attributes:
        directory: Path below the root.
        stem: File name without suffix.
        entry: Who may enter new directories.
        readers: Who may read the files.
    """

    directory: str
    stem: str
    entry: DirectoryAccess
    readers: FileReaders


class FilePlacer:
    """Writer of pairs of files in one tree.

    Args:
        tree: The tree, opened.
        layout: Layout, which defines the suffixes.
        settles: Whether :meth:`settle` will be called for compressed files; otherwise each is made
            durable at once.
    """

    def __init__(self, tree: ArchiveTree, layout: ArchiveLayout, *, settles: bool = False) -> None:
        self._tree = tree
        self._settles = settles
        self._unsettled: list[tuple[str, str]] = []
        self._script_suffix, self._env_suffix = layout.suffixes

    def _names(
        self, stem: str, variant: int, script: ByteSource | None, environment: ByteSource | None
    ) -> tuple[str, str]:
        """Return the file names of a pair, with ``~N`` from the second variant on."""
        return (
            self._name(stem, variant, self._script_suffix, script),
            self._name(stem, variant, self._env_suffix, environment),
        )

    def _name(self, stem: str, variant: int, suffix: str, source: ByteSource | None) -> str:
        packing = COMPRESSION_SUFFIX if source is not None and source.packed else ""
        if variant == 1:
            return f"{stem}{suffix}{packing}"
        if suffix.startswith("."):
            return f"{stem}~{variant}{suffix}{packing}"
        return f"{stem}{suffix}~{variant}{packing}"

    def put(
        self,
        target: PlacementTarget,
        script: ByteSource | None,
        environment: ByteSource | None,
        claimed: Callable[[str], bool],
    ) -> tuple[str, str]:
        """Place a script and its environment; identical files that exist are kept.

        Args:
            target: Where to place them.
            script: Bytes of the script, if there is one.
            environment: Bytes of the environment, if there is one.
            claimed: Returns whether a name in the directory belongs to another script.

        Returns:
            The names of both files; "" for a missing one.

        Raises:
            BytesGone: The bytes are missing or were changed.
            OSError: The tree cannot be written.
        """
        fd = self._tree.directory(target.directory, target.entry)
        for source in (script, environment):
            if source is not None and source.packed and self._settles:
                for one in (source, _get_alternative_source(source)):
                    if self._is_late(one):
                        self._unsettled.append((target.directory, make_temporary_name(one)))
        variant = 1
        while True:
            names = self._names(target.stem, variant, script, environment)
            if self._put_both(fd, names, script, environment, claimed):
                break
            variant += 1
        self._tree.touch(target.directory)
        names = (names[0] if script else "", names[1] if environment else "")
        if self._tree.acls and (
            target.readers or not (script or environment or _STORE_SOURCE).link
        ):
            self.admit(fd, names, target.readers)
        return names

    def as_before(
        self,
        target: PlacementTarget,
        script: ByteSource | None,
        environment: ByteSource | None,
        claimed: Callable[[str], bool],
    ) -> tuple[ByteSource | None, ByteSource | None]:
        """Return the sources in the form, plain or compressed, that a crash left in place.

        Compression is a setting, which may have changed since. Incomplete files of an interrupted
        attempt are removed.

        Args:
            target: Where they are placed.
            script: Bytes of the script, in the form to be placed now.
            environment: Bytes of the environment, likewise.
            claimed: As for :meth:`put`.

        Raises:
            OSError: The tree cannot be used.
        """
        fd = self._tree.directory(target.directory, target.entry)
        suffixes = (self._script_suffix, self._env_suffix)
        both = [
            source and self._as_before(fd, target.stem, suffix, source, claimed)
            for source, suffix in zip((script, environment), suffixes, strict=True)
        ]
        return both[0], both[1]

    def _as_before(
        self, fd: int, stem: str, suffix: str, source: ByteSource, claimed: Callable[[str], bool]
    ) -> ByteSource:
        own = source.otherwise or source
        other = msgspec.structs.replace(own, packed=not source.packed)
        if next(self._put_before(fd, stem, suffix, other, claimed), ""):
            return other
        if not self._is_late(own):
            remove_temporary(own, fd)
        return source

    def put_before(
        self,
        directory: str,
        stem: str,
        script: ByteSource | None,
        environment: ByteSource | None,
        claimed: Callable[[str], bool],
    ) -> list[str]:
        """Return names of files with these bytes that an attempt before a crash placed.

        Args:
            directory: Path below the root.
            stem: File name without suffix.
            script: Bytes of the script, if there is one.
            environment: Bytes of the environment, if there is one.
            claimed: As for :meth:`put`.

        Raises:
            OSError: The tree cannot be read.
        """
        try:
            fd = self._tree.directory(directory)
        except FileNotFoundError:
            return []
        sources = ((self._script_suffix, script), (self._env_suffix, environment))
        found: list[str] = []
        for suffix, source in sources:
            for packed in (False, True):
                if source is not None:
                    own = msgspec.structs.replace(source, packed=packed)
                    found += self._put_before(fd, stem, suffix, own, claimed)
        return found

    def _put_before(
        self, fd: int, stem: str, suffix: str, source: ByteSource, claimed: Callable[[str], bool]
    ) -> Iterator[str]:
        for variant in itertools.count(1):
            name = self._name(stem, variant, suffix, source)
            if not has_entry(fd, name):
                return
            if not has_regular_file(fd, name) or claimed(name):
                continue
            if is_unsettled(fd, name, source) or compute_file_digest(fd, name) == source.sha:
                yield name

    def put_as(self, fd: int, name: str, source: ByteSource) -> None:
        """Place bytes under a reserved name; replace what a crash left there.

        Raises:
            BytesGone: The bytes are missing or were changed.
            OSError: The tree cannot be written.
        """
        if self._put(fd, name, source, _is_never_claimed) is None:
            os.unlink(name, dir_fd=fd)
            self._put(fd, name, source, _is_never_claimed)

    def settle(self) -> None:
        """Make compressed files durable with one sync, then remove the marks of unfinished ones.

        Raises:
            OSError: The file system reports a failed write.
        """
        if not self._unsettled:
            return
        sync_filesystem(self._tree.fd)
        for path, name in self._unsettled:
            self._tree.unlink(path, name)
        self._unsettled.clear()

    def drop(self) -> None:
        """Forget unsettled files: their marks identify them when the batch is repeated."""
        self._unsettled.clear()

    def _is_late(self, source: ByteSource) -> bool:
        """Return whether a file is compressed and made durable only by :meth:`settle`."""
        return self._settles and source.packed and not is_compressed_name(source.name)

    def admit(self, fd: int, names: tuple[str, str], readers: FileReaders) -> None:
        """Let ``readers``, and no one else, read these files of a directory."""
        for name in names:
            if name:
                self._tree.read_access(fd, name, readers)

    def _put_both(
        self,
        fd: int,
        names: tuple[str, str],
        script: ByteSource | None,
        environment: ByteSource | None,
        claimed: Callable[[str], bool],
    ) -> bool:
        """Place both files of a pair; return False if a name belongs to another script."""
        new = script is not None and self._put(fd, names[0], script, claimed)
        if script is not None and new is None:
            return False
        done = False
        try:
            done = environment is None or (
                self._put(fd, names[1], environment, claimed) is not None
            )
        finally:
            # Never leave half of a pair.
            if new and not done:
                os.unlink(names[0], dir_fd=fd)
                if script is not None and self._settles:
                    for source in (script, _get_alternative_source(script)):
                        remove_temporary(source, fd)
        return done

    def _put(
        self, fd: int, name: str, source: ByteSource, claimed: Callable[[str], bool]
    ) -> bool | None:
        """Place a file; True if new, False if it exists, None if the name is another script's."""
        try:
            if source.link and is_compressed_name(source.name) == source.packed:
                os.link(source.name, name, src_dir_fd=source.fd, dst_dir_fd=fd)
            else:
                late = self._is_late(source)
                if late and is_unsettled(fd, name, source):
                    os.unlink(name, dir_fd=fd)
                copy_bytes(source, fd, name, settled=not late)
        except FileExistsError:
            return False if _is_same_content(fd, name, source, claimed) else None
        except FileNotFoundError as error:
            if not has_entry(source.fd, source.name):
                if source.otherwise is not None:
                    return self._put(fd, name, _get_alternative_source(source), claimed)
                if has_entry(fd, name):
                    if claimed(name):
                        return None
                    # It was removed after it had been placed.
                    if compute_file_digest(fd, name) == source.sha:
                        return False
                raise BytesGone(f"the bytes of {source.name} are gone", source) from error
            raise
        except OSError as error:
            if not source.link or error.errno not in LINK_ERRORS:
                raise
            return self._put(fd, name, _get_alternative_source(source), claimed)
        return True


def _get_alternative_source(source: ByteSource) -> ByteSource:
    """Return the source to use where no link is possible."""
    if source.otherwise is None:
        return msgspec.structs.replace(source, link=False)
    return msgspec.structs.replace(source.otherwise, packed=source.packed)


_STORE_SOURCE = ByteSource(-1, "", b"")


def _is_never_claimed(_: str) -> bool:
    return False


def has_entry(fd: int, name: str) -> bool:
    """Return whether an open directory has an entry of that name."""
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def has_regular_file(fd: int, name: str) -> bool:
    """Return whether an open directory has a regular file of that name."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_same_content(
    fd: int, name: str, source: ByteSource, claimed: Callable[[str], bool]
) -> bool:
    """Return whether an existing file has the source's bytes and belongs to no other script."""
    there = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISREG(there.st_mode):
        return False
    try:
        bytes_ = os.stat(source.name, dir_fd=source.fd, follow_symlinks=False)
    except FileNotFoundError:
        bytes_ = None
    if bytes_ and (there.st_dev, there.st_ino) == (bytes_.st_dev, bytes_.st_ino):
        # A shared file has one name for each identical script.
        return source.otherwise is None or not claimed(name)
    return not claimed(name) and compute_file_digest(fd, name) == source.sha


def compute_file_digest(fd: int, name: str) -> bytes:
    """Return the SHA-256 of the plain bytes of the file ``name`` in the directory ``fd``.

    Raises:
        OSError: It cannot be read.
    """
    with open_archived_file(fd, name) as file:
        try:
            return compute_plain_digest(file, name)[0]
        except DamagedFile:
            # A damaged file matches no checksum.
            return b""
