r"""Field values of Slurm's output: parse numbers, times and text; split records into fields.

The first functions parse single values. :func:`split_records` and :func:`split_fields` split
``scontrol show`` output, :func:`convert_fields` makes JSON values of it.

Text that users write may contain any byte but NUL. It is decoded as UTF-8, with other bytes
written as ``\xff``, because a record must be valid JSON.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

_NO_TEXT: Final = frozenset({"", "(null)"})
_NO_TIME: Final = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown", "UNKNOWN"})


def decode_text(raw: bytes) -> str:
    """Decode text; "" for empty text and ``(null)``."""
    value = raw.decode("utf-8", "backslashreplace")
    return "" if value in _NO_TEXT else value


@lru_cache(maxsize=8192)
def parse_number(raw: str) -> int | None:
    """Parse a count: "4", "0", "1-4" (the minimum); None if not a number."""
    digits = raw.partition("-")[0]
    return int(digits) if _is_digits(digits) else None


@lru_cache(maxsize=8192)
def parse_moment(raw: str) -> datetime | None:
    """Parse a time that a command wrote under TZ=UTC ("2026-11-21T09:54:21"); None if unset."""
    if raw in _NO_TIME:
        return None
    try:
        return datetime.fromisoformat(raw).replace(tzinfo=UTC)
    except ValueError:
        return None


@lru_cache(maxsize=8192)
def parse_seconds(raw: str) -> int | None:
    """Parse a time limit ("5:00", "2-12:00:00") into seconds; None for UNLIMITED and such."""
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


def parse_exit_status(raw: str) -> tuple[int, int] | None:
    """Parse exit code and signal: "3:0" (24.11), or "768", a status of wait(2) (22.05)."""
    code, colon, signal = raw.partition(":")
    if not _is_digits(code) or (colon and not _is_digits(signal)):
        return None
    if colon:
        return int(code), int(signal)
    status = int(code)
    return status >> 8 & 0xFF, status & 0x7F


def _is_digits(raw: str) -> bool:
    # str.isdigit() accepts digits of other scripts; more than 18 digits are not a count.
    return raw.isascii() and raw.isdigit() and len(raw) <= 18


_KEY: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z_/:]*)=")
_LISTS: Final = frozenset({"AvailableFeatures", "ActiveFeatures", "Partitions", "Flags"})
_TIMES: Final = ("Time", "Until")
_DECIMAL: Final = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")
_NULLS: Final = frozenset({"", "(null)", "N/A", "None", "Unknown", "n/a", "n/s"})


@lru_cache(maxsize=1024)
def to_snake_case(name: str) -> str:
    """Convert Slurm's CamelCase to snake_case: ``MCSPlugin`` to ``mcs_plugin``."""
    spaced = name.replace("CPUs", "Cpus").replace("IDs", "Ids").replace("PrEp", "Prep")
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", spaced)
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", spaced)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")


def join_lines(text: str) -> str:
    """Join the lines of a text with blanks."""
    if "\n" not in text:
        return text
    return " ".join(filter(None, (line.strip() for line in text.split("\n"))))


def split_records(out: bytes, head: str) -> Iterator[str]:
    """Split output into records that begin with ``head``; other lines continue a record."""
    record: list[str] = []
    for line in out.decode("utf-8", "backslashreplace").split("\n"):
        if line.startswith(head):
            if record:
                yield "\n".join(record).rstrip("\n")
            record = [line]
        elif record:
            record.append(line)
    if record:
        yield "\n".join(record).rstrip("\n")


def split_fields(line: str) -> Iterator[tuple[str, str]]:
    """Yield key and value pairs; a repeated key belongs to the value before it and is skipped."""
    keys = list(_KEY.finditer(line))
    seen: set[str] = set()
    for key, next_key in zip(keys, [*keys[1:], None], strict=False):
        if key[1] in seen:
            continue
        seen.add(key[1])
        yield key[1], line[key.end() : next_key.start() if next_key else None].strip()


def convert_fields(fields: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Any]:
    """Convert a record's fields to JSON values, with keys from ``names`` or in snake_case."""
    return {
        names.get(key, to_snake_case(key)): convert_value(key, raw) for key, raw in fields.items()
    }


def convert_value(key: str, raw: str) -> Any:
    """Convert a value for JSON: number, list, seconds since the epoch or text; None if unset."""
    if key in _LISTS:
        return list(split_list(raw))
    if raw in _NULLS:
        return None
    if key.endswith(_TIMES) and (moment := parse_moment(raw)) is not None:
        return to_epoch(moment)
    if key == "Version":
        return raw
    number = parse_number(raw) if "-" not in raw else None
    if number is not None:
        return number
    return float(raw) if _DECIMAL.fullmatch(raw) else raw


def to_epoch(at: datetime | None) -> int | None:
    """Convert a time to seconds since the epoch."""
    return None if at is None else int(at.timestamp())


def clear_null(raw: str) -> str:
    """Return a value, or "" for Slurm's spellings of no value."""
    return "" if raw in _NULLS else raw


def split_list(raw: str) -> tuple[str, ...]:
    """Split a comma-separated value; () for no value."""
    return () if raw in _NULLS else tuple(part for part in raw.split(",") if part)
