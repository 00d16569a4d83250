"""Slurm's spool file ``environment``: what is in it, and what is odd about it.

The format is slurmctld's own: a native-endian uint32 with the number of
entries, then each entry as a NUL-terminated string. Values may hold newlines
and ``=``; a count of 0 with nothing behind it is legal. What is cut short or
miscounted is kept as it is, and flagged.
"""

import struct
from collections.abc import Iterable
from itertools import islice

import msgspec

from steward.core.redaction import REDACTED, Redactor

SHORT = "environment-short"
MISCOUNTED = "environment-count"

_COUNT = struct.Struct("=I")
COUNT_BYTES = _COUNT.size
"""How much of the file comes before its entries."""
_CLAIMS = {
    b"SLURM_JOB_NAME": "name",
    b"SLURM_SUBMIT_DIR": "directory",
    b"SLURM_SUBMIT_HOST": "host",
}
_LONGEST_CLAIM = 1024
_MOST_NAMES = 500
_LONGEST_NAME = 120


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment as it may be kept.

    Attributes:
        data: The file's bytes with every secret value taken out.
        redacted: Names of the variables that lost their value: the first 500, cut at 120
            letters, for a user may choose millions of any length, and events stay small.
        flags: What is odd about it.
        name: Job name as the environment claims it, "" for none.
        directory: Submit directory, likewise.
        host: Submit host, likewise.
    """

    data: bytes
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    name: str = ""
    directory: str = ""
    host: str = ""


def read_environment(raw: bytes, redactor: Redactor) -> Environment:
    """Redact and describe the bytes of an ``environment`` file; never fails."""
    if len(raw) < _COUNT.size:
        # Too short for a count: nothing in it can be told from a piece of a value.
        return Environment(data=b"", flags=(SHORT,))
    count = _COUNT.unpack_from(raw)[0]
    body = raw[_COUNT.size :]
    flags: tuple[str, ...] = ()
    if body and not body.endswith(b"\0"):
        flags = (SHORT,)
    elif body.count(b"\0") != count:
        flags = (MISCOUNTED,)
    redacted = redactor.entries(body)
    claims = claims_of(redacted.data)
    return Environment(
        data=raw[: _COUNT.size] + redacted.data,
        redacted=names_told(redacted.names),
        flags=flags,
        name=claims.get("name", ""),
        directory=claims.get("directory", ""),
        host=claims.get("host", ""),
    )


def names_told(names: Iterable[str]) -> tuple[str, ...]:
    """As many names, and as much of each, as an event tells."""
    return tuple(name[:_LONGEST_NAME] for name in islice(names, _MOST_NAMES))


def entries_of(data: bytes) -> list[tuple[bytes, bytes | None]]:
    """The (name, value) pairs of a kept environment, in order; None where there is no ``=``."""
    pairs: list[tuple[bytes, bytes | None]] = []
    for entry in data[_COUNT.size :].split(b"\0"):
        if entry:
            name, equals, value = entry.partition(b"=")
            pairs.append((name, value if equals else None))
    return pairs


def claims_of(block: bytes) -> dict[str, str]:
    """What redacted entries say of their job: any of ``name``, ``directory`` and ``host``."""
    found = {}
    for variable, field in _CLAIMS.items():
        start = 0 if block.startswith(variable + b"=") else block.find(b"\0" + variable + b"=") + 1
        if start == 0 and not block.startswith(variable + b"="):
            continue
        start += len(variable) + 1
        end = block.find(b"\0", start)
        value = block[start : end if end >= 0 else len(block)]
        if value != REDACTED and len(value) <= _LONGEST_CLAIM:
            found[field] = value.decode("utf-8", "backslashreplace")
    return found
