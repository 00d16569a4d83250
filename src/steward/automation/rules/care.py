"""What a rule says under ``context: steward:``: limits, windows, what is tried again."""

import math
import re
from collections.abc import Callable
from typing import Any, Final

from steward.automation.errors import RuleError
from steward.automation.rules.model import Care, OnUnknown, Rate
from steward.automation.rules.triggers import TYPES

Wrong = Callable[..., RuleError]
"""Makes the error for what is wrong at a key: ``wrong(what, *key)``."""

_AT: Final = ("context", "steward")
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*([smhd]?)")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S: Final = 366 * 86400.0
_MOST_RETRIES: Final = 20
_MOST_RATE: Final = 100_000


def read(found: dict[str, Any], type_: str, wrong: Wrong) -> Care:
    """What a rule says of Steward's own keys.

    Raises:
        RuleError: A key is unknown, or its value makes no sense.
    """
    reader = _Reader(found, type_, wrong)
    for name in found:
        if name not in KEYS:
            raise wrong(f"there is no key {name!r} here: {', '.join(KEYS)}", *_AT, name)
    given = {name: KEYS[name](reader, name) for name in found}
    return Care(**{_FIELDS.get(name, name): value for name, value in given.items()})


class _Reader:
    def __init__(self, found: dict[str, Any], type_: str, wrong: Wrong) -> None:
        self._found = found
        self._type = type_
        self._wrong = wrong

    def duration(self, name: str) -> float:
        seconds = _duration(self._found[name])
        if seconds is None:
            raise self._wrong("a duration is wanted: 90s, 10m, 1h, 1d", *_AT, name)
        return seconds

    def some_time(self, name: str) -> float:
        seconds = self.duration(name)
        if not seconds:
            raise self._wrong("it must be above 0", *_AT, name)
        return seconds

    def rate(self, name: str) -> Rate:
        text = self._found[name]
        count, sign, length = str(text).replace(" ", "").partition("/")
        # "30/h" is thirty in one hour.
        seconds = _duration(f"1{length}" if length in _SECONDS and length else length)
        if not sign or not count.isdecimal() or len(count) > 6 or not seconds:
            raise self._wrong("a rate is wanted: 10/1h, 100/d", *_AT, name)
        if int(count) > _MOST_RATE:
            raise self._wrong(f"a rate is {_MOST_RATE} at the most", *_AT, name)
        return Rate(int(count), seconds)

    def percent(self, name: str) -> float:
        value = self._found[name]
        if isinstance(value, str) and re.fullmatch(r"\d{1,3}(\.\d+)?%", value):
            value = float(value[:-1])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise self._wrong("a share in percent is wanted, 0 to 100", *_AT, name)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._found[name]
        if not isinstance(value, bool):
            raise self._wrong("true or false is wanted", *_AT, name)
        return value

    def unknown(self, name: str) -> OnUnknown:
        value = self._found[name]
        if value not in ("end", "repeat"):
            raise self._wrong("'end' or 'repeat' is wanted", *_AT, name)
        kept: OnUnknown = value
        return kept

    def count(self, name: str) -> int:
        value = self._found[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_RETRIES:
            raise self._wrong(f"a number is wanted, 0 to {_MOST_RETRIES}", *_AT, name)
        return value

    def paths(self, name: str) -> tuple[tuple[str | int, ...], ...]:
        value = self._found[name]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts:
            raise self._wrong("fields are wanted: trigger.node", *_AT, name)
        return tuple(self._path(text, name) for text in texts)

    def _path(self, text: Any, name: str) -> tuple[str | int, ...]:
        prefix, _, field = text.partition(".") if isinstance(text, str) else ("", "", "")
        if prefix != "trigger" or field not in TYPES[self._type].fields:
            known = ", ".join(sorted(TYPES[self._type].fields))
            raise self._wrong(f"{text!r} is no field of {self._type}: trigger.…, with {known}",
                              *_AT, name)  # fmt: skip
        return (field,)


KEYS: Final[dict[str, Callable[[_Reader, str], Any]]] = {
    "rate_limit": _Reader.rate,
    "dedup_window": _Reader.duration,
    "dedup_by": _Reader.paths,
    "most_nodes_percent": _Reader.percent,
    "dry_run": _Reader.flag,
    "on_unknown": _Reader.unknown,
    "retries": _Reader.count,
    "backoff": _Reader.duration,
    "timeout": _Reader.some_time,
    "max_age": _Reader.some_time,
}
"""The keys, and what reads each."""
_FIELDS: Final = {
    "dedup_window": "dedup_window_s",
    "backoff": "backoff_s",
    "timeout": "timeout_s",
    "max_age": "max_age_s",
}


def _duration(value: Any) -> float | None:
    """Seconds of ``90``, ``90s``, ``10m``, ``1h``, ``1d``; None for what is no duration."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return None
        seconds = float(match[1]) * _SECONDS[match[2]]
    return seconds if math.isfinite(seconds) and 0 <= seconds <= _LONGEST_S else None
