"""Environments as other programs kept them, turned into the spool's own format.

The spool's format is a native uint32 with the number of entries, then each entry
with a NUL behind it. job_archive wrote the file with its NULs turned into
newlines, having read it in a way that dropped every white space. SArchive's first
versions copied the file; later ones write ``NAME=value`` lines in any order.
"""

import re
import struct
from collections.abc import Iterable

_COUNT = struct.Struct("=I")
_NAMED = re.compile(rb"[A-Za-z_][^=\0\n]*=")
# At most this is left of the count's four bytes before the first entry.
_LONGEST_COUNT = 4


def pack(entries: Iterable[bytes]) -> bytes:
    """Entries in the spool's format."""
    found = list(entries)
    return _COUNT.pack(len(found)) + b"".join(entry + b"\0" for entry in found)


def from_lines(data: bytes) -> bytes:
    """From ``NAME=value`` lines; a line that names nothing goes on with the value before it."""
    entries: list[bytes] = []
    for text in data.rstrip(b"\n").split(b"\n"):
        if entries and not _NAMED.match(text):
            entries[-1] += b"\n" + text
        elif text:
            entries.append(text)
    return pack(entry.replace(b"\0", b"\n") for entry in entries)


def from_job_archive(data: bytes) -> bytes:
    """From job_archive's ``.env``."""
    lines = [text for text in data.split(b"\n") if text]
    if lines and len(lines[0]) <= _LONGEST_COUNT and not _NAMED.match(lines[0]):
        lines = lines[1:]
    elif lines:
        lines[0] = _without_count(lines[0])
    return pack(text.replace(b"\0", b"") for text in lines)


def _without_count(text: bytes) -> bytes:
    """The first entry without the bytes of a count that run into it (four that are not zero)."""
    if _NAMED.match(text):
        return text
    for length in range(1, _LONGEST_COUNT + 1):
        if _NAMED.match(text[length:]):
            return text[length:]
    return text


def from_sarchive(data: bytes) -> bytes:
    """From SArchive's ``environment``: the spool's bytes, or lines."""
    if len(data) >= _COUNT.size and b"\0" in data:
        return data
    return from_lines(data)
