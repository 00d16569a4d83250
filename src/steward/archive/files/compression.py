"""File compression with Zstandard (RFC 8878): ``….zst`` files, one frame each, beside plain ones.

Sizes and SHA-256 in databases and manifests are those of the plain bytes. Reading is bounded: a
frame that needs much memory, or yields more bytes than the file had, is damaged, whoever wrote it.
:func:`blocks`, :func:`read_plain` and :func:`plain_digest` read both kinds of files; :func:`pack`
compresses.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from steward.archive.errors import ArchiveError

if TYPE_CHECKING:
    from io import BufferedReader


SUFFIX: Final = ".zst"
LONGEST: Final = 256 * 1024**2
"""Size limit of a script or environment, in bytes; Slurm's limit is 4 MB by default."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK = 1 << 20
# Frames written by :func:`pack` have windows of up to 2 MB.
_LARGEST_WINDOW = 8 << 20


class Damaged(ArchiveError):
    """Error: a compressed file is invalid, or larger than allowed."""


def is_packed(name: str) -> bool:
    """Return whether a file name is that of a compressed file."""
    return name.endswith(SUFFIX)


def plain_name(name: str) -> str:
    """Return the file's name without the compression suffix."""
    return name.removesuffix(SUFFIX)


def other_name(name: str) -> str:
    """Return the name of the other form: compressed for a plain file, and vice versa."""
    return plain_name(name) if is_packed(name) else name + SUFFIX


def open_plain(fd: int, name: str) -> "BufferedReader":
    """Open a file in the directory ``fd``, to be read with :func:`blocks`.

    Raises:
        OSError: It cannot be opened.
    """
    return os.fdopen(os.open(name, _READ, dir_fd=fd), "rb")


def blocks(file: "BufferedReader[Any]", name: str, longest: int = LONGEST) -> Iterator[bytes]:
    """Yield the plain bytes of an open file in blocks.

    Args:
        file: The file, at its begin.
        name: Its name, which tells whether it is compressed.
        longest: Size limit for the plain bytes of a compressed file.

    Raises:
        Damaged: It is not a Zstandard frame, or it is larger than the limit.
        OSError: It cannot be read.
    """
    if not is_packed(name):
        while block := file.read(_BLOCK):
            yield block
        return
    import zstandard

    given = 0
    try:
        # A second frame after the first is read, too, and exceeds the limit.
        with _decompressor().stream_reader(file, read_across_frames=True, closefd=False) as plain:
            while block := plain.read(min(_BLOCK, longest + 1 - given)):
                given += len(block)
                if given > longest:
                    raise Damaged(f"{name} holds more than {longest} bytes", name)
                yield block
    except (zstandard.ZstdError, MemoryError) as error:
        raise Damaged(f"{name} is damaged: {error}", name) from error


def read_plain(file: "BufferedReader[Any]", name: str, longest: int = LONGEST) -> bytes:
    """Return all plain bytes of an open file; raises as :func:`blocks`."""
    if not is_packed(name):
        return file.read()
    return b"".join(blocks(file, name, longest))


def plain_digest(
    file: "BufferedReader[Any]", name: str, longest: int = LONGEST
) -> tuple[bytes, int]:
    """Return SHA-256 and size of the plain bytes of an open file; raises as :func:`blocks`."""
    if not is_packed(name):
        found = hashlib.file_digest(file, "sha256").digest()
        return found, file.tell()
    sha = hashlib.sha256()
    size = 0
    for block in blocks(file, name, longest):
        sha.update(block)
        size += len(block)
    return sha.digest(), size


def pack(data: bytes) -> bytes:
    """Compress bytes to one frame, which records their size."""
    packed: bytes = _compressor().compress(data)
    return packed


@lru_cache(maxsize=1)
def _compressor() -> Any:
    import zstandard

    # The manifest's SHA-256 serves as checksum.
    return zstandard.ZstdCompressor(write_checksum=False)


@lru_cache(maxsize=1)
def _decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
