"""Files kept compressed with Zstandard (RFC 8878): ``….zst``, a frame each, beside plain ones.

What is told of a file, its size and SHA-256, is always that of the plain bytes.
Reading is bounded: a frame that wants much memory, or gives more bytes than the
file had, is damaged, whoever wrote it.
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
"""No script and no environment is longer, in bytes: Slurm's limit is 4 MB as it comes."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK = 1 << 20
# Our frames have windows of up to 2 MB.
_LARGEST_WINDOW = 8 << 20


class Damaged(ArchiveError):
    """A compressed file is none, or holds more than it can."""


def is_packed(name: str) -> bool:
    """Whether a file of that name is compressed."""
    return name.endswith(SUFFIX)


def plain_name(name: str) -> str:
    """The name that a file has where it is not compressed."""
    return name.removesuffix(SUFFIX)


def other_name(name: str) -> str:
    """A file's name as it is where what is packed is not, and the other way round."""
    return plain_name(name) if is_packed(name) else name + SUFFIX


def open_plain(fd: int, name: str) -> "BufferedReader":
    """The file ``name`` in the open directory ``fd``, to be read with :func:`blocks`.

    Raises:
        OSError: It cannot be opened.
    """
    return os.fdopen(os.open(name, _READ, dir_fd=fd), "rb")


def blocks(file: "BufferedReader[Any]", name: str, longest: int = LONGEST) -> Iterator[bytes]:
    """The plain bytes of an open file, piece by piece.

    Args:
        file: The file, at its beginning.
        name: Its name, which tells whether it is compressed.
        longest: How many plain bytes of a compressed file are believed.

    Raises:
        Damaged: It is no Zstandard frame, or holds more.
        OSError: It cannot be read.
    """
    if not is_packed(name):
        while block := file.read(_BLOCK):
            yield block
        return
    import zstandard

    given = 0
    try:
        # A second frame behind the first is read, too, and found to be too much.
        with _decompressor().stream_reader(file, read_across_frames=True, closefd=False) as plain:
            while block := plain.read(min(_BLOCK, longest + 1 - given)):
                given += len(block)
                if given > longest:
                    raise Damaged(f"{name} holds more than {longest} bytes", name)
                yield block
    except (zstandard.ZstdError, MemoryError) as error:
        raise Damaged(f"{name} is damaged: {error}", name) from error


def read_plain(file: "BufferedReader[Any]", name: str, longest: int = LONGEST) -> bytes:
    """All plain bytes of an open file; raises as :func:`blocks`."""
    if not is_packed(name):
        return file.read()
    return b"".join(blocks(file, name, longest))


def plain_digest(
    file: "BufferedReader[Any]", name: str, longest: int = LONGEST
) -> tuple[bytes, int]:
    """SHA-256 and size of the plain bytes of an open file; raises as :func:`blocks`."""
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
    """The bytes as one frame, which tells their size."""
    packed: bytes = _compressor().compress(data)
    return packed


@lru_cache(maxsize=1)
def _compressor() -> Any:
    import zstandard

    # The manifest's SHA-256 is the checksum.
    return zstandard.ZstdCompressor(write_checksum=False)


@lru_cache(maxsize=1)
def _decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
