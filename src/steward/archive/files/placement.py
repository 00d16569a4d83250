"""How a script and its environment get into the tree: by link, by copy, or by a move in it.

The same step may come again after a crash, and two different scripts may want
the same name (a re-used job id): the first is a harmless repeat, of the second
both are kept, the later one with ``~2`` in its name.
"""

import itertools
import os
import stat
from collections.abc import Callable, Iterator

import msgspec

from steward.archive.files.compression import SUFFIX, Damaged, is_packed, open_plain, plain_digest
from steward.archive.files.layout import Layout
from steward.archive.files.permissions import Readers
from steward.archive.files.tree import (
    NO_LINK,
    Entry,
    Gone,
    Source,
    Tree,
    copy,
    is_unsettled,
    remove_temporary,
    temporary_name,
)
from steward.core.files import sync_filesystem


class Target(msgspec.Struct, frozen=True):
    """Where bytes belong.

    Attributes:
        directory: Below the root.
        stem: The files' name without suffix.
        entry: Who may enter directories that are made.
        readers: Who may read the files.
    """

    directory: str
    stem: str
    entry: Entry
    readers: Readers


class Placer:
    """Puts pairs of files into one tree.

    Args:
        tree: The tree, opened.
        layout: How its files are called.
        settles: Whether :meth:`settle` is called for what is compressed, which else is made
            durable file by file.
    """

    def __init__(self, tree: Tree, layout: Layout, *, settles: bool = False) -> None:
        self._tree = tree
        self._settles = settles
        self._unsettled: list[tuple[str, str]] = []
        self._script_suffix, self._env_suffix = layout.suffixes

    def _names(
        self, stem: str, variant: int, script: Source | None, environment: Source | None
    ) -> tuple[str, str]:
        return (
            self._name(stem, variant, self._script_suffix, script),
            self._name(stem, variant, self._env_suffix, environment),
        )

    def _name(self, stem: str, variant: int, suffix: str, source: Source | None) -> str:
        packing = SUFFIX if source is not None and source.packed else ""
        if variant == 1:
            return f"{stem}{suffix}{packing}"
        if suffix.startswith("."):
            return f"{stem}~{variant}{suffix}{packing}"
        return f"{stem}{suffix}~{variant}{packing}"

    def put(
        self,
        target: Target,
        script: Source | None,
        environment: Source | None,
        claimed: Callable[[str], bool],
    ) -> tuple[str, str]:
        """Put a script and its environment in their place; what is there already stays.

        Args:
            target: The place.
            script: The script's bytes, if there is a script.
            environment: The environment's bytes, if there is one.
            claimed: Tells whether a name in the target's directory is another script's.

        Returns:
            The two files' names, "" for what there is none of.

        Raises:
            Gone: The bytes are missing or were changed.
            OSError: The tree cannot be written.
        """
        fd = self._tree.directory(target.directory, target.entry)
        for source in (script, environment):
            if source is not None and source.packed and self._settles:
                for one in (source, _instead(source)):
                    if self._is_late(one):
                        self._unsettled.append((target.directory, temporary_name(one)))
        variant = 1
        while True:
            names = self._names(target.stem, variant, script, environment)
            if self._put_both(fd, names, script, environment, claimed):
                break
            variant += 1
        self._tree.touch(target.directory)
        names = (names[0] if script else "", names[1] if environment else "")
        if self._tree.acls and (target.readers or not (script or environment or _STORE).link):
            self.admit(fd, names, target.readers)
        return names

    def as_before(
        self,
        target: Target,
        script: Source | None,
        environment: Source | None,
        claimed: Callable[[str], bool],
    ) -> tuple[Source | None, Source | None]:
        """The sources, packed as they were when a crash came, if they were put then.

        What is packed is a setting, which may have been changed since. Half written
        files of a try that was cut short are removed.

        Args:
            target: The place.
            script: The script's bytes, as they are to be put now.
            environment: The environment's, likewise.
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
        self, fd: int, stem: str, suffix: str, source: Source, claimed: Callable[[str], bool]
    ) -> Source:
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
        script: Source | None,
        environment: Source | None,
        claimed: Callable[[str], bool],
    ) -> list[str]:
        """Names of files of these bytes that a try before a crash has put somewhere.

        Args:
            directory: Below the root.
            stem: The files' name without suffix.
            script: The script's bytes, if there is a script.
            environment: The environment's, likewise.
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
        self, fd: int, stem: str, suffix: str, source: Source, claimed: Callable[[str], bool]
    ) -> Iterator[str]:
        for variant in itertools.count(1):
            name = self._name(stem, variant, suffix, source)
            if not exists(fd, name):
                return
            if not is_file(fd, name) or claimed(name):
                continue
            if is_unsettled(fd, name, source) or digest(fd, name) == source.sha:
                yield name

    def put_as(self, fd: int, name: str, source: Source) -> None:
        """Put bytes under a name that can only be theirs; what a crash left there is replaced.

        Raises:
            Gone: The bytes are missing or were changed.
            OSError: The tree cannot be written.
        """
        if self._put(fd, name, source, _nobody) is None:
            os.unlink(name, dir_fd=fd)
            self._put(fd, name, source, _nobody)

    def settle(self) -> None:
        """Make what was compressed durable, all at once, and take away the marks that it is not.

        Raises:
            OSError: The file system reports that something was not written.
        """
        if not self._unsettled:
            return
        sync_filesystem(self._tree.fd)
        for path, name in self._unsettled:
            self._tree.unlink(path, name)
        self._unsettled.clear()

    def drop(self) -> None:
        """Forget what was not settled: it is known by its marks when it comes again."""
        self._unsettled.clear()

    def _is_late(self, source: Source) -> bool:
        return self._settles and source.packed and not is_packed(source.name)

    def admit(self, fd: int, names: tuple[str, str], readers: Readers) -> None:
        """Let ``readers``, and nobody else, read the files of a directory."""
        for name in names:
            if name:
                self._tree.read_access(fd, name, readers)

    def _put_both(
        self,
        fd: int,
        names: tuple[str, str],
        script: Source | None,
        environment: Source | None,
        claimed: Callable[[str], bool],
    ) -> bool:
        new = script is not None and self._put(fd, names[0], script, claimed)
        if script is not None and new is None:
            return False
        done = False
        try:
            done = environment is None or (
                self._put(fd, names[1], environment, claimed) is not None
            )
        finally:
            # Half a pair is never left behind.
            if new and not done:
                os.unlink(names[0], dir_fd=fd)
                if script is not None and self._settles:
                    for source in (script, _instead(script)):
                        remove_temporary(source, fd)
        return done

    def _put(
        self, fd: int, name: str, source: Source, claimed: Callable[[str], bool]
    ) -> bool | None:
        """Whether the file is new (True) or was there (False); None if the name is another's."""
        try:
            if source.link and is_packed(source.name) == source.packed:
                os.link(source.name, name, src_dir_fd=source.fd, dst_dir_fd=fd)
            else:
                late = self._is_late(source)
                if late and is_unsettled(fd, name, source):
                    os.unlink(name, dir_fd=fd)
                copy(source, fd, name, settled=not late)
        except FileExistsError:
            return False if _is_ours(fd, name, source, claimed) else None
        except FileNotFoundError as error:
            if not exists(source.fd, source.name):
                if source.otherwise is not None:
                    return self._put(fd, name, _instead(source), claimed)
                if exists(fd, name):
                    if claimed(name):
                        return None
                    # It was removed after it had been put there.
                    if digest(fd, name) == source.sha:
                        return False
                raise Gone(f"the bytes of {source.name} are gone", source) from error
            raise
        except OSError as error:
            if not source.link or error.errno not in NO_LINK:
                raise
            return self._put(fd, name, _instead(source), claimed)
        return True


def _instead(source: Source) -> Source:
    """What is put where there can be no link."""
    if source.otherwise is None:
        return msgspec.structs.replace(source, link=False)
    return msgspec.structs.replace(source.otherwise, packed=source.packed)


_STORE = Source(-1, "", b"")


def _nobody(_: str) -> bool:
    return False


def exists(fd: int, name: str) -> bool:
    """Whether an open directory has anything of that name."""
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def is_file(fd: int, name: str) -> bool:
    """Whether an open directory has a regular file of that name."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_ours(fd: int, name: str, source: Source, claimed: Callable[[str], bool]) -> bool:
    there = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISREG(there.st_mode):
        return False
    try:
        bytes_ = os.stat(source.name, dir_fd=source.fd, follow_symlinks=False)
    except FileNotFoundError:
        bytes_ = None
    if bytes_ and (there.st_dev, there.st_ino) == (bytes_.st_dev, bytes_.st_ino):
        # A shared file has as many names as there are scripts like it.
        return source.otherwise is None or not claimed(name)
    return not claimed(name) and digest(fd, name) == source.sha


def digest(fd: int, name: str) -> bytes:
    """SHA-256 of the plain bytes of the file ``name`` in the open directory ``fd``.

    Raises:
        OSError: It cannot be read.
    """
    with open_plain(fd, name) as file:
        try:
            return plain_digest(file, name)[0]
        except Damaged:
            # That of no file at all.
            return b""
