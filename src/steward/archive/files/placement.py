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
    make_temporary_name,
    may_be_incomplete,
    remove_temporary,
)
from steward.core.files import sync_filesystem


class PlacementTarget(msgspec.Struct, frozen=True):
    """Directory and file name for a script and its environment.

    Attributes:
        directory: Path below the root.
        stem: File name without suffix.
        access: Users that may enter new directories.
        readers: Who may read the files.
    """

    directory: str
    stem: str
    access: DirectoryAccess
    readers: FileReaders


class FilePlacer:
    """Writer of pairs of files in one tree.

    Args:
        tree: The tree, opened.
        layout: Layout, which defines the suffixes.
        defers_sync: Whether :meth:`sync_files` will be called for compressed files; otherwise each
            is made durable at once.
    """

    def __init__(
        self, tree: ArchiveTree, layout: ArchiveLayout, *, defers_sync: bool = False
    ) -> None:
        self._tree = tree
        self._defers_sync = defers_sync
        self._unsynced: list[tuple[str, str]] = []
        self._script_suffix, self._env_suffix = layout.suffixes

    def _make_names(
        self, stem: str, variant: int, script: ByteSource | None, environment: ByteSource | None
    ) -> tuple[str, str]:
        """Return the file names of a pair, with ``~N`` from the second variant on."""
        return (
            self._make_name(stem, variant, self._script_suffix, script),
            self._make_name(stem, variant, self._env_suffix, environment),
        )

    def _make_name(self, stem: str, variant: int, suffix: str, source: ByteSource | None) -> str:
        compression = COMPRESSION_SUFFIX if source is not None and source.compressed else ""
        if variant == 1:
            return f"{stem}{suffix}{compression}"
        if suffix.startswith("."):
            return f"{stem}~{variant}{suffix}{compression}"
        return f"{stem}{suffix}~{variant}{compression}"

    def place_pair(
        self,
        target: PlacementTarget,
        script: ByteSource | None,
        environment: ByteSource | None,
        is_taken: Callable[[str], bool],
    ) -> tuple[str, str]:
        """Place a script and its environment; identical files that exist are kept.

        Args:
            target: Where to place them.
            script: Bytes of the script, if there is one.
            environment: Bytes of the environment, if there is one.
            is_taken: Returns whether a name in the directory belongs to another script.

        Returns:
            The names of both files; "" for a missing one.

        Raises:
            BytesGone: The bytes are missing or were changed.
            OSError: The tree cannot be written.
        """
        fd = self._tree.get_directory_fd(target.directory, target.access)
        for source in (script, environment):
            if source is not None and source.compressed and self._defers_sync:
                for candidate in (source, _get_alternative_source(source)):
                    if self._is_sync_deferred(candidate):
                        self._unsynced.append((target.directory, make_temporary_name(candidate)))
        variant = 1
        while True:
            names = self._make_names(target.stem, variant, script, environment)
            if self._place_both(fd, names, script, environment, is_taken):
                break
            variant += 1
        self._tree.record_change(target.directory)
        names = (names[0] if script else "", names[1] if environment else "")
        if self._tree.has_acls and (
            target.readers or not (script or environment or _STORE_SOURCE).link
        ):
            self.set_readers(fd, names, target.readers)
        return names

    def match_existing(
        self,
        target: PlacementTarget,
        script: ByteSource | None,
        environment: ByteSource | None,
        is_taken: Callable[[str], bool],
    ) -> tuple[ByteSource | None, ByteSource | None]:
        """Return the sources in the form, plain or compressed, that a crash left in place.

        Compression is a setting, which may have changed since. Incomplete files of an interrupted
        attempt are removed.

        Args:
            target: Where they are placed.
            script: Bytes of the script, in the form to be placed now.
            environment: Bytes of the environment, likewise.
            is_taken: As for :meth:`place_pair`.

        Raises:
            OSError: The tree cannot be used.
        """
        fd = self._tree.get_directory_fd(target.directory, target.access)
        suffixes = (self._script_suffix, self._env_suffix)
        both = [
            source and self._match_existing_file(fd, target.stem, suffix, source, is_taken)
            for source, suffix in zip((script, environment), suffixes, strict=True)
        ]
        return both[0], both[1]

    def _match_existing_file(
        self, fd: int, stem: str, suffix: str, source: ByteSource, is_taken: Callable[[str], bool]
    ) -> ByteSource:
        original = source.fallback or source
        other_form = msgspec.structs.replace(original, compressed=not source.compressed)
        if next(self._find_existing_file(fd, stem, suffix, other_form, is_taken), ""):
            return other_form
        if not self._is_sync_deferred(original):
            remove_temporary(original, fd)
        return source

    def find_existing(
        self,
        directory: str,
        stem: str,
        script: ByteSource | None,
        environment: ByteSource | None,
        is_taken: Callable[[str], bool],
    ) -> list[str]:
        """Return names of files with these bytes that an attempt before a crash placed.

        Args:
            directory: Path below the root.
            stem: File name without suffix.
            script: Bytes of the script, if there is one.
            environment: Bytes of the environment, if there is one.
            is_taken: As for :meth:`place_pair`.

        Raises:
            OSError: The tree cannot be read.
        """
        try:
            fd = self._tree.get_directory_fd(directory)
        except FileNotFoundError:
            return []
        sources = ((self._script_suffix, script), (self._env_suffix, environment))
        names: list[str] = []
        for suffix, source in sources:
            for packed in (False, True):
                if source is not None:
                    candidate = msgspec.structs.replace(source, compressed=packed)
                    names += self._find_existing_file(fd, stem, suffix, candidate, is_taken)
        return names

    def _find_existing_file(
        self, fd: int, stem: str, suffix: str, source: ByteSource, is_taken: Callable[[str], bool]
    ) -> Iterator[str]:
        for variant in itertools.count(1):
            name = self._make_name(stem, variant, suffix, source)
            if not has_entry(fd, name):
                return
            if not has_regular_file(fd, name) or is_taken(name):
                continue
            if may_be_incomplete(fd, name, source) or compute_file_digest(fd, name) == source.sha:
                yield name

    def place_at(self, fd: int, name: str, source: ByteSource) -> None:
        """Place bytes under a reserved name; replace what a crash left there.

        Raises:
            BytesGone: The bytes are missing or were changed.
            OSError: The tree cannot be written.
        """
        if self._place_file(fd, name, source, _is_never_claimed) is None:
            os.unlink(name, dir_fd=fd)
            self._place_file(fd, name, source, _is_never_claimed)

    def sync_files(self) -> None:
        """Make compressed files durable with one sync, then remove the marks of unfinished ones.

        Raises:
            OSError: The file system reports a failed write.
        """
        if not self._unsynced:
            return
        sync_filesystem(self._tree.fd)
        for path, name in self._unsynced:
            self._tree.unlink(path, name)
        self._unsynced.clear()

    def drop(self) -> None:
        """Forget unsettled files: their marks identify them when the batch is repeated."""
        self._unsynced.clear()

    def _is_sync_deferred(self, source: ByteSource) -> bool:
        """Return whether a file is compressed and made durable only by :meth:`sync_files`."""
        return self._defers_sync and source.compressed and not is_compressed_name(source.name)

    def set_readers(self, fd: int, names: tuple[str, str], readers: FileReaders) -> None:
        """Let ``readers``, and no one else, read these files of a directory."""
        for name in names:
            if name:
                self._tree.grant_access(fd, name, readers)

    def _place_both(
        self,
        fd: int,
        names: tuple[str, str],
        script: ByteSource | None,
        environment: ByteSource | None,
        is_taken: Callable[[str], bool],
    ) -> bool:
        """Place both files of a pair; return False if a name belongs to another script."""
        created = script is not None and self._place_file(fd, names[0], script, is_taken)
        if script is not None and created is None:
            return False
        is_complete = False
        try:
            is_complete = environment is None or (
                self._place_file(fd, names[1], environment, is_taken) is not None
            )
        finally:
            # Never leave half of a pair.
            if created and not is_complete:
                os.unlink(names[0], dir_fd=fd)
                if script is not None and self._defers_sync:
                    for source in (script, _get_alternative_source(script)):
                        remove_temporary(source, fd)
        return is_complete

    def _place_file(
        self, fd: int, name: str, source: ByteSource, is_taken: Callable[[str], bool]
    ) -> bool | None:
        """Place a file; True if new, False if it exists, None if the name is another script's."""
        try:
            if source.link and is_compressed_name(source.name) == source.compressed:
                os.link(source.name, name, src_dir_fd=source.fd, dst_dir_fd=fd)
            else:
                is_deferred = self._is_sync_deferred(source)
                if is_deferred and may_be_incomplete(fd, name, source):
                    os.unlink(name, dir_fd=fd)
                copy_bytes(source, fd, name, durable=not is_deferred)
        except FileExistsError:
            return False if _is_same_content(fd, name, source, is_taken) else None
        except FileNotFoundError as error:
            if not has_entry(source.fd, source.name):
                if source.fallback is not None:
                    return self._place_file(fd, name, _get_alternative_source(source), is_taken)
                if has_entry(fd, name):
                    if is_taken(name):
                        return None
                    # It was removed after it had been placed.
                    if compute_file_digest(fd, name) == source.sha:
                        return False
                raise BytesGone(f"the content of {source.name} is missing", source) from error
            raise
        except OSError as error:
            if not source.link or error.errno not in LINK_ERRORS:
                raise
            return self._place_file(fd, name, _get_alternative_source(source), is_taken)
        return True


def _get_alternative_source(source: ByteSource) -> ByteSource:
    """Return the source to use where no link is possible."""
    if source.fallback is None:
        return msgspec.structs.replace(source, link=False)
    return msgspec.structs.replace(source.fallback, compressed=source.compressed)


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
    fd: int, name: str, source: ByteSource, is_taken: Callable[[str], bool]
) -> bool:
    """Return whether an existing file has the source's bytes and belongs to no other script."""
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        return False
    try:
        source_status = os.stat(source.name, dir_fd=source.fd, follow_symlinks=False)
    except FileNotFoundError:
        source_status = None
    if source_status and (status.st_dev, status.st_ino) == (
        source_status.st_dev,
        source_status.st_ino,
    ):
        # A shared file has one name for each identical script.
        return source.fallback is None or not is_taken(name)
    return not is_taken(name) and compute_file_digest(fd, name) == source.sha


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
