"""File compression with Zstandard (RFC 8878): ``….zst`` files, one frame each, beside plain ones.

Sizes and SHA-256 in databases and manifests are those of the plain bytes. Reading is bounded: a
frame that needs much memory, or yields more bytes than the file had, is damaged, whoever wrote it.
:func:`read_blocks`, :func:`read_plain` and :func:`compute_plain_digest` read both kinds of files;
:func:`compress_bytes` compresses.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from steward.archive.errors import ArchiveError

if TYPE_CHECKING:
    from io import BufferedReader


COMPRESSION_SUFFIX: Final = ".zst"
MAX_PLAIN_BYTES: Final = 256 * 1024**2
"""Size limit of a script or environment, in bytes; Slurm's limit is 4 MB by default."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK = 1 << 20
# Frames written by :func:`compress_bytes` have windows of up to 2 MB.
_MAX_WINDOW_BYTES = 8 << 20


class DamagedFile(ArchiveError):
    """Error: a compressed file is invalid, or larger than allowed."""


def is_compressed_name(name: str) -> bool:
    """Return whether a file name is that of a compressed file."""
    return name.endswith(COMPRESSION_SUFFIX)


def strip_compression_suffix(name: str) -> str:
    """Return the file's name without the compression suffix."""
    return name.removesuffix(COMPRESSION_SUFFIX)


def swap_compression_suffix(name: str) -> str:
    """Return the name of the other form: compressed for a plain file, and vice versa."""
    return strip_compression_suffix(name) if is_compressed_name(name) else name + COMPRESSION_SUFFIX


def open_archived_file(fd: int, name: str) -> "BufferedReader":
    """Open a file in the directory ``fd``, to be read with :func:`read_blocks`.

    Raises:
        OSError: It cannot be opened.
    """
    return os.fdopen(os.open(name, _READ, dir_fd=fd), "rb")


def read_blocks(
    file: "BufferedReader[Any]", name: str, max_bytes: int = MAX_PLAIN_BYTES
) -> Iterator[bytes]:
    """Yield the plain bytes of an open file in blocks.

    Args:
        file: The file, at its beginning.
        name: Its name, which tells whether it is compressed.
        max_bytes: Size limit for the plain bytes of a compressed file.

    Raises:
        DamagedFile: It is not a Zstandard frame, or it is larger than the limit.
        OSError: It cannot be read.
    """
    if not is_compressed_name(name):
        while block := file.read(_BLOCK):
            yield block
        return
    import zstandard

    total = 0
    try:
        # A second frame after the first is read, too, and exceeds the limit.
        with _get_decompressor().stream_reader(
            file, read_across_frames=True, closefd=False
        ) as plain:
            while block := plain.read(min(_BLOCK, max_bytes + 1 - total)):
                total += len(block)
                if total > max_bytes:
                    raise DamagedFile(
                        f"{name} is damaged: it decompresses to more than {max_bytes} bytes", name
                    )
                yield block
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedFile(f"{name} is damaged: {error}", name) from error


def read_plain(file: "BufferedReader[Any]", name: str, max_bytes: int = MAX_PLAIN_BYTES) -> bytes:
    """Return all plain bytes of an open file; raises as :func:`read_blocks`."""
    if not is_compressed_name(name):
        return file.read()
    return b"".join(read_blocks(file, name, max_bytes))


def compute_plain_digest(
    file: "BufferedReader[Any]", name: str, max_bytes: int = MAX_PLAIN_BYTES
) -> tuple[bytes, int]:
    """Return SHA-256 and size of the plain bytes of an open file; raises as :func:`read_blocks`."""
    sha = hashlib.sha256()
    size = 0
    for block in read_blocks(file, name, max_bytes):
        sha.update(block)
        size += len(block)
    return sha.digest(), size


def compress_bytes(data: bytes) -> bytes:
    """Compress bytes to one frame, which records their size."""
    frame: bytes = _get_compressor().compress(data)
    return frame


@lru_cache(maxsize=1)
def _get_compressor() -> Any:
    import zstandard

    # The manifest's SHA-256 serves as checksum.
    return zstandard.ZstdCompressor(write_checksum=False)


@lru_cache(maxsize=1)
def _get_decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
