"""Rule criteria as in StackStorm: operators that compare a trigger's payload with patterns.

``find_failed_criterion`` finds the first criterion that fails, ``matches_criterion`` evaluates one.
Operators have the names, aliases and results of StackStorm's: values that cannot be compared (text
with a number, anything with an absent field) do not match.

Payloads are hostile input: a node's reason, a job's name. A regular expression can run for hours on
the wrong text, and must not delay the events of other rules; so ``limit_run_time`` limits the time
that criteria and templates may take.
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

# Evaluation

Payload = Mapping[str, Any]

_MAX_TEXT_LENGTH: Final = 65536
"""Maximum number of characters of a payload text that are compared."""


class FailedCriterion(msgspec.Struct, frozen=True, kw_only=True):
    """Criterion that a payload fails, for the explanation to people.

    Attributes:
        key: Key of the criterion in the rule's file.
        type: Its operator.
        pattern: Rendered pattern it was compared with.
        value: Value in the payload; None if absent.
    """

    key: str
    type: str
    pattern: Any = None
    value: Any = None


def find_failed_criterion(
    criteria: Iterable[Criterion], payload: Payload, now: datetime
) -> FailedCriterion | None:
    """Return the first criterion that a payload fails, or None if all hold."""
    for criterion in criteria:
        value = look_up(payload, criterion.path)
        pattern = (
            render_text(criterion.pattern, payload) if criterion.is_template else criterion.pattern
        )
        if not matches_criterion(criterion, value, pattern, now):
            return FailedCriterion(
                key=criterion.key, type=criterion.type, pattern=pattern, value=value
            )
    return None


def look_up(payload: Any, path: Iterable[str | int]) -> Any:
    """Return the value at a path of a payload, or None."""
    value = payload
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(str(step))
        elif isinstance(value, list | tuple) and isinstance(step, int):
            value = value[step] if -len(value) <= step < len(value) else None
        else:
            return None
    return value


def matches_criterion(criterion: Criterion, value: Any, pattern: Any, now: datetime) -> bool:
    """Return whether a value satisfies a criterion."""
    if isinstance(value, str):
        value = value[:_MAX_TEXT_LENGTH]
    if criterion.type == "search":
        return _matches_search(criterion, value, now)
    if criterion.type in _TIME_COMPARISONS:
        return _compare_time_difference(value, pattern, _TIME_COMPARISONS[criterion.type], now)
    if pattern is None and criterion.type not in _WITHOUT_PATTERN:
        return False
    try:
        return bool(_COMPARISONS[criterion.type](value, pattern))
    except (TypeError, AttributeError, ValueError, re.error):
        # Values that cannot be compared do not match, as in StackStorm.
        return False


def _matches_search(criterion: Criterion, value: Any, now: datetime) -> bool:
    """Evaluate ``search``: compare the items of a list with inner criteria."""
    if not isinstance(value, list | tuple):
        return False
    combine_items, combine_criteria = _CONDITIONS[criterion.condition]
    return combine_items(
        combine_criteria(
            matches_criterion(inner, look_up(item, inner.path), inner.pattern, now)
            for inner in criterion.inner
        )
        for item in value
    )


def _compare_time_difference(
    value: Any, seconds: Any, compare: Callable[[float, float], bool], now: datetime
) -> bool:
    """Compare the age of a time in the payload with a number of seconds."""
    try:
        then = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return compare((now - then).total_seconds(), seconds)


def _lowercase(text: str) -> str:
    """Convert to lower case; raises TypeError or AttributeError for other types."""
    return text.lower()


@lru_cache(maxsize=512)
def _compile_pattern(pattern: str, flags: int) -> re.Pattern[str]:
    """Compile a regular expression, cached."""
    return re.compile(pattern, flags)


# Operators

_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "equals": lambda value, pattern: value == pattern,
    "nequals": lambda value, pattern: value != pattern,
    "iequals": lambda value, pattern: _lowercase(value) == _lowercase(pattern),
    "contains": lambda value, pattern: pattern in value,
    "ncontains": lambda value, pattern: pattern not in value,
    "icontains": lambda value, pattern: _lowercase(pattern) in _lowercase(value),
    "incontains": lambda value, pattern: _lowercase(pattern) not in _lowercase(value),
    "startswith": lambda value, pattern: value.startswith(pattern),
    "istartswith": lambda value, pattern: _lowercase(value).startswith(_lowercase(pattern)),
    "endswith": lambda value, pattern: value.endswith(pattern),
    "iendswith": lambda value, pattern: _lowercase(value).endswith(_lowercase(pattern)),
    "lessthan": lambda value, pattern: value < pattern,
    "greaterthan": lambda value, pattern: value > pattern,
    "matchwildcard": fnmatch.fnmatchcase,
    "matchregex": lambda value, pattern: _compile_pattern(pattern, re.DOTALL).match(value),
    "regex": lambda value, pattern: _compile_pattern(pattern, 0).search(value),
    "iregex": lambda value, pattern: _compile_pattern(pattern, re.IGNORECASE).search(value),
    "exists": lambda value, _pattern: value is not None,
    "nexists": lambda value, _pattern: value is None,
    "inside": lambda value, pattern: value in pattern,
    "ninside": lambda value, pattern: value not in pattern,
}
"""Comparison function of each operator: ``compare(value, pattern)``."""
_TIME_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "timediff_lt": operator.lt,
    "timediff_gt": operator.gt,
}
"""Comparison function of the operators on times."""
_OPERATOR_ALIASES: Final = {
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
"""Short names of operators."""
_WITHOUT_PATTERN: Final = frozenset({"exists", "nexists", "nequals"})
"""Operators that work without a pattern."""
_CONDITIONS: Final = {
    "any": (any, all),
    "all": (all, all),
    "any2all": (any, all),
    "all2all": (all, all),
    "any2any": (any, any),
    "all2any": (all, any),
}
"""For each condition of ``search``: how items combine, then how criteria combine."""

REGEX_OPERATORS: Final = frozenset({"regex", "iregex", "matchregex"})
"""Operators whose pattern is a regular expression."""
TIME_OPERATORS: Final = frozenset(_TIME_COMPARISONS)
"""Operators whose pattern is a number of seconds."""
SEARCH_CONDITIONS: Final = frozenset(_CONDITIONS)
"""Values of ``condition`` for the operator ``search``."""


def list_operators() -> list[str]:
    """Return all operator names, long and short, sorted."""
    return sorted({*_COMPARISONS, *_TIME_COMPARISONS, *_OPERATOR_ALIASES, "search"})


def normalize_operator(name: str) -> str | None:
    """Return an operator's long name, given any of its names in any case; None if unknown."""
    name = name.lower()
    name = _OPERATOR_ALIASES.get(name, name)
    return name if name in _COMPARISONS or name in _TIME_COMPARISONS or name == "search" else None


# Time limit


class TimeLimitExceeded(AutomationError):
    """A rule's criteria or templates exceeded their time limit."""


class _AlarmRaised(BaseException):
    """Raised by the timer. Not an Exception, so that templates cannot catch it."""


@contextmanager
def limit_run_time(limit_s: float, task: str) -> Iterator[None]:
    """Limit the run time of a block by an alarm signal.

    Python delivers signals only to the main thread, so there is no limit in other threads; rules
    are decided in the main thread of their process.

    Args:
        limit_s: Time limit in seconds.
        task: Description of the work, for the error message.

    Raises:
        TimeLimitExceeded: The time limit passed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if not is_over:
            raise _AlarmRaised

    previous_handler = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            yield
        finally:
            # An alarm that fires from here on has no effect.
            is_over = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _AlarmRaised:
        raise TimeLimitExceeded(f"{task} took longer than {limit_s:g} s", task) from None
    finally:
        signal.signal(signal.SIGALRM, previous_handler)
