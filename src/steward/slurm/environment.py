"""Job environments: parse and redact slurmctld's spool file ``environment``.

Format: a native-endian uint32 with the number of entries, then each entry as a NUL-terminated
string. Values may contain newlines and ``=``. A count of 0 without entries is valid. Truncated or
miscounted files are kept (redacted, like all) and flagged (:data:`TRUNCATED`, :data:`MISCOUNTED`);
of a file shorter than the count, nothing is kept.
"""

import struct
from collections.abc import Iterable
from itertools import islice

import msgspec

from steward.core.redaction import REDACTED, Redactor

TRUNCATED = "environment-short"
MISCOUNTED = "environment-count"

_COUNT = struct.Struct("=I")
COUNT_BYTES = _COUNT.size
"""Size of the count before the entries, in bytes."""
_CLAIMS = {
    b"SLURM_JOB_NAME": "name",
    b"SLURM_SUBMIT_DIR": "directory",
    b"SLURM_SUBMIT_HOST": "host",
}
_CLAIM_PREFIX = b"SLURM_"
"""Prefix of all names in ``_CLAIMS``, so that one search finds them."""
_NEXT_CLAIM = b"\0" + _CLAIM_PREFIX
_LONGEST_CLAIM = 1024
_MOST_NAMES = 500
_LONGEST_NAME = 120


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Redacted environment of a job, with what it claims about the job.

    Attributes:
        data: The file's bytes with every secret value removed.
        redacted: Names of redacted variables: the first 500, each cut at 120 characters. A user
            may set millions of any length, and events must stay small.
        flags: :data:`TRUNCATED` or :data:`MISCOUNTED`, if the file is malformed.
        name: Job name according to the environment; "" if none. Untrusted.
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
    """Redact and describe the bytes of an ``environment`` file. Never fails."""
    if len(raw) < _COUNT.size:
        # Without a complete count, an entry cannot be told from part of a value.
        return Environment(data=b"", flags=(TRUNCATED,))
    count = _COUNT.unpack_from(raw)[0]
    redacted = redactor.redact_entries(raw[_COUNT.size :])
    flags: tuple[str, ...] = ()
    if len(raw) > _COUNT.size and not raw.endswith(b"\0"):
        flags = (TRUNCATED,)
    elif redacted.nuls != count:
        flags = (MISCOUNTED,)
    claims = read_claims(redacted.data)
    return Environment(
        data=raw[: _COUNT.size] + redacted.data,
        redacted=limit_names(redacted.names),
        flags=flags,
        name=claims.get("name", ""),
        directory=claims.get("directory", ""),
        host=claims.get("host", ""),
    )


def limit_names(names: Iterable[str]) -> tuple[str, ...]:
    """Limit names of redacted variables in number and length, for use in an event."""
    return tuple(name[:_LONGEST_NAME] for name in islice(names, _MOST_NAMES))


def split_entries(data: bytes) -> list[tuple[bytes, bytes | None]]:
    """Return the (name, value) pairs of a stored environment in order; value None without ``=``."""
    pairs: list[tuple[bytes, bytes | None]] = []
    for entry in data[_COUNT.size :].split(b"\0"):
        if entry:
            name, equals, value = entry.partition(b"=")
            pairs.append((name, value if equals else None))
    return pairs


def read_claims(block: bytes) -> dict[str, str]:
    """Return what redacted entries claim about their job: ``name``, ``directory``, ``host``."""
    claims: dict[str, str] = {}
    unread = dict(_CLAIMS)
    end = -1 if block.startswith(_CLAIM_PREFIX) else block.find(_NEXT_CLAIM)
    is_found = end >= 0 or block.startswith(_CLAIM_PREFIX)
    while is_found and unread:
        start = end + 1
        end = block.find(b"\0", start)
        name, equals, value = block[start : end if end >= 0 else len(block)].partition(b"=")
        field = unread.pop(name, "") if equals else ""
        if field and value != REDACTED and len(value) <= _LONGEST_CLAIM:
            claims[field] = value.decode("utf-8", "backslashreplace")
        end = block.find(_NEXT_CLAIM, end) if end >= 0 else -1
        is_found = end >= 0
    return claims
