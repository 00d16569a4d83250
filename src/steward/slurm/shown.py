"""How ``scontrol -o show`` writes: a record a line, as ``Key=value`` words, and it escapes none.

A value goes on until the next word that looks like a key; who reads a record cuts off what
people may write before asking for its words.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from steward.slurm import values

_KEY: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z_/:]*)=")
_LISTS: Final = frozenset({"AvailableFeatures", "ActiveFeatures", "Partitions", "Flags"})
_TIMES: Final = ("Time", "Until")
_DECIMAL: Final = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")
_NOTHING: Final = frozenset({"", "(null)", "N/A", "None", "Unknown", "n/a", "n/s"})


@lru_cache(maxsize=1024)
def snake(name: str) -> str:
    """Slurm's CamelCase as Python writes it: ``MCSPlugin`` is ``mcs_plugin``."""
    spaced = name.replace("CPUs", "Cpus").replace("IDs", "Ids").replace("PrEp", "Prep")
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", spaced)
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", spaced)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")


def one_line(several: str) -> str:
    """A text of several lines as one; what is one already stays as it is."""
    if "\n" not in several:
        return several
    return " ".join(filter(None, (line.strip() for line in several.split("\n"))))


def lines(out: bytes, head: str) -> Iterator[str]:
    """The records of a text: what begins otherwise belongs to the one before it."""
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


def fields(line: str) -> Iterator[tuple[str, str]]:
    """Words and values; a word that comes again is part of the value before it, and left out."""
    keys = list(_KEY.finditer(line))
    seen: set[str] = set()
    for key, following in zip(keys, [*keys[1:], None], strict=False):
        if key[1] in seen:
            continue
        seen.add(key[1])
        yield key[1], line[key.end() : following.start() if following else None].strip()


def details(words: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Any]:
    """The words of a record as plain JSON, under these names or in snake_case."""
    return {names.get(word, snake(word)): value(word, raw) for word, raw in words.items()}


def value(word: str, raw: str) -> Any:
    """A value as JSON has it: a number, a list, seconds since the epoch, or text; None for none."""
    if word in _LISTS:
        return list(listed(raw))
    if raw in _NOTHING:
        return None
    if word.endswith(_TIMES) and (at := values.moment(raw)) is not None:
        return epoch(at)
    if word == "Version":
        return raw
    number = values.number(raw) if "-" not in raw else None
    if number is not None:
        return number
    return float(raw) if _DECIMAL.fullmatch(raw) else raw


def epoch(at: datetime | None) -> int | None:
    """A time as seconds since the epoch."""
    return None if at is None else int(at.timestamp())


def text(raw: str) -> str:
    """A word's value; "" for what Slurm writes for nothing."""
    return "" if raw in _NOTHING else raw


def listed(raw: str) -> tuple[str, ...]:
    """The parts of a value that commas part."""
    return () if raw in _NOTHING else tuple(part for part in raw.split(",") if part)
