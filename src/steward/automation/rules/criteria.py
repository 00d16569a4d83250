"""StackStorm's criteria: whether a trigger's payload is one that a rule is about.

The operators are those of StackStorm's rules, by all of their names, and answer
as they do there: what cannot be compared (text with a number, anything with what is
not there) does not match.
"""

import fnmatch
import operator
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from types import FrameType
from typing import Any, Final

import msgspec

from steward.automation.errors import AutomationError
from steward.automation.rules.model import Criterion
from steward.automation.rules.templates import render_text

Payload = Mapping[str, Any]

_LONGEST_TEXT: Final = 65536


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """A criterion that a payload does not stand.

    Attributes:
        key: The criterion's key, as the rule has it.
        type: Its operator.
        pattern: What it was compared with, rendered.
        value: What the payload has there; None where it has nothing.
    """

    key: str
    type: str
    pattern: Any = None
    value: Any = None


def missed(criteria: Iterable[Criterion], payload: Payload, now: datetime) -> Missed | None:
    """The first criterion that a payload does not stand; None if it stands all."""
    for one in criteria:
        value = look_up(payload, one.path)
        pattern = render_text(one.pattern, payload) if one.is_template else one.pattern
        if not holds(one, value, pattern, now):
            return Missed(key=one.key, type=one.type, pattern=pattern, value=value)
    return None


def look_up(payload: Any, path: Iterable[str | int]) -> Any:
    """What is at a path of a payload; None where nothing is."""
    found = payload
    for step in path:
        if isinstance(found, Mapping):
            found = found.get(str(step))
        elif isinstance(found, list | tuple) and isinstance(step, int):
            found = found[step] if -len(found) <= step < len(found) else None
        else:
            return None
    return found


def holds(one: Criterion, value: Any, pattern: Any, now: datetime) -> bool:
    """Whether a value stands a criterion."""
    if isinstance(value, str):
        value = value[:_LONGEST_TEXT]
    if one.type == "search":
        return _search(one, value, now)
    if one.type in _TIMES:
        return _time_differs(value, pattern, _TIMES[one.type], now)
    if pattern is None and one.type not in _WITHOUT_PATTERN:
        return False
    try:
        return bool(_COMPARES[one.type](value, pattern))
    except (TypeError, AttributeError, ValueError, re.error):
        # What cannot be compared does not match: StackStorm's answer, too.
        return False


def _search(one: Criterion, value: Any, now: datetime) -> bool:
    if not isinstance(value, list | tuple):
        return False
    of_items, of_criteria = _CONDITIONS[one.condition]
    return of_items(
        of_criteria(
            holds(inner, look_up(item, inner.path), inner.pattern, now) for inner in one.inner
        )
        for item in value
    )


def _time_differs(
    value: Any, seconds: Any, compare: Callable[[float, float], bool], now: datetime
) -> bool:
    try:
        then = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return compare((now - then).total_seconds(), seconds)


def _lower(text: str) -> str:
    return text.lower()


@lru_cache(maxsize=512)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    return re.compile(pattern, flags)


_COMPARES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "equals": lambda value, pattern: value == pattern,
    "nequals": lambda value, pattern: value != pattern,
    "iequals": lambda value, pattern: _lower(value) == _lower(pattern),
    "contains": lambda value, pattern: pattern in value,
    "ncontains": lambda value, pattern: pattern not in value,
    "icontains": lambda value, pattern: _lower(pattern) in _lower(value),
    "incontains": lambda value, pattern: _lower(pattern) not in _lower(value),
    "startswith": lambda value, pattern: value.startswith(pattern),
    "istartswith": lambda value, pattern: _lower(value).startswith(_lower(pattern)),
    "endswith": lambda value, pattern: value.endswith(pattern),
    "iendswith": lambda value, pattern: _lower(value).endswith(_lower(pattern)),
    "lessthan": lambda value, pattern: value < pattern,
    "greaterthan": lambda value, pattern: value > pattern,
    "matchwildcard": fnmatch.fnmatchcase,
    "matchregex": lambda value, pattern: _compiled(pattern, re.DOTALL).match(value),
    "regex": lambda value, pattern: _compiled(pattern, 0).search(value),
    "iregex": lambda value, pattern: _compiled(pattern, re.IGNORECASE).search(value),
    "exists": lambda value, _pattern: value is not None,
    "nexists": lambda value, _pattern: value is None,
    "inside": lambda value, pattern: value in pattern,
    "ninside": lambda value, pattern: value not in pattern,
}
_TIMES: Final[dict[str, Callable[[float, float], bool]]] = {
    "timediff_lt": operator.lt,
    "timediff_gt": operator.gt,
}
_SHORT: Final = {
    "eq": "equals",
    "neq": "nequals",
    "ieq": "iequals",
    "lt": "lessthan",
    "gt": "greaterthan",
    "td_lt": "timediff_lt",
    "td_gt": "timediff_gt",
    "in": "inside",
    "nin": "ninside",
}
_WITHOUT_PATTERN: Final = frozenset({"exists", "nexists", "nequals"})
_CONDITIONS: Final = {
    "any": (any, all),
    "all": (all, all),
    "any2all": (any, all),
    "all2all": (all, all),
    "any2any": (any, any),
    "all2any": (all, any),
}

REGULAR: Final = frozenset({"regex", "iregex", "matchregex"})
"""Operators whose pattern is a regular expression."""
TIMED: Final = frozenset(_TIMES)
"""Operators whose pattern is a number of seconds."""
CONDITIONS: Final = frozenset(_CONDITIONS)
"""What ``search`` takes as its condition."""


def operators() -> list[str]:
    """The operators' names, long and short."""
    return sorted({*_COMPARES, *_TIMES, *_SHORT, "search"})


def in_long(name: str) -> str | None:
    """An operator's long name, from any of its names in any case; None where there is none."""
    name = name.lower()
    name = _SHORT.get(name, name)
    return name if name in _COMPARES or name in _TIMES or name == "search" else None


class TookTooLong(AutomationError):
    """Something was ended because it took longer than it may."""


class _Alarm(BaseException):
    """Raised in the midst of it; not an Exception, so that templates do not catch it."""


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """End what is in the block after so many seconds.

    Alarms reach the main thread alone, so in others there is no bound; rules are decided in
    the main thread of their process.

    Args:
        limit_s: The most seconds.
        what: What is being done, for the message.

    Raises:
        TookTooLong: It was ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if not is_over:
            raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            yield
        finally:
            # One that rings from here on finds it over.
            is_over = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Alarm:
        raise TookTooLong(f"{what} took longer than {limit_s:g} s", what) from None
    finally:
        signal.signal(signal.SIGALRM, before)
