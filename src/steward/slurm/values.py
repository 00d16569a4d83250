r"""How Slurm writes single values, and what they become in a record.

Text that users choose may hold any byte but NUL. It is decoded as UTF-8, with
bytes that are not UTF-8 written as ``\xff``: a record must be JSON.
"""

from datetime import UTC, datetime
from typing import Final

_NO_TEXT: Final = frozenset({"", "(null)"})
_NO_TIME: Final = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown", "UNKNOWN"})


def text(raw: bytes) -> str:
    """Text as Slurm shows it; "" for nothing and ``(null)``."""
    value = raw.decode("utf-8", "backslashreplace")
    return "" if value in _NO_TEXT else value


def number(raw: str) -> int | None:
    """A count: "4", "1-4" (the least), "0"; None for what is no number."""
    digits = raw.partition("-")[0]
    return int(digits) if _is_digits(digits) else None


def moment(raw: str) -> datetime | None:
    """A time that a command wrote under TZ=UTC ("2026-11-21T09:54:21")."""
    if raw in _NO_TIME:
        return None
    try:
        return datetime.fromisoformat(raw).replace(tzinfo=UTC)
    except ValueError:
        return None


def seconds(raw: str) -> int | None:
    """A time limit: "5:00", "1:00:00", "2-12:00:00"; None for UNLIMITED, NOT_SET and the like."""
    days, dash, clock = raw.partition("-")
    if not dash:
        days, clock = "0", raw
    parts = clock.split(":")
    if not 2 <= len(parts) <= 3 or not all(_is_digits(part) for part in [days, *parts]):
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return int(days) * 86400 + total


def exit_status(raw: str) -> tuple[int, int] | None:
    """Exit code and signal: "3:0" (24.11), or "768", the status of wait(2) (22.05)."""
    code, colon, sign = raw.partition(":")
    if not _is_digits(code) or (colon and not _is_digits(sign)):
        return None
    if colon:
        return int(code), int(sign)
    status = int(code)
    return status >> 8 & 0xFF, status & 0x7F


def _is_digits(raw: str) -> bool:
    # str.isdigit() is true of other scripts' digits too; more than 18 digits are no count.
    return raw.isascii() and raw.isdigit() and len(raw) <= 18
