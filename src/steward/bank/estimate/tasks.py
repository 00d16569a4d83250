"""How many tasks an array has: ``--array`` as a user may write it."""

import re
from typing import Final

from steward.bank.errors import NoEstimate

_PART: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")
_MOST: Final = 4_000_001
"""Slurm's own bound of MaxArraySize."""


def tasks_of(expression: str) -> tuple[int, int]:
    """How many tasks there are, and how many may run at once.

    Args:
        expression: Such as ``0-9,20-30:2%4``, with or without brackets.

    Raises:
        NoEstimate: It is no such expression, or has more tasks than any array.
    """
    tasks, percent, limit = expression.strip().removeprefix("[").partition("%")
    tasks, limit = tasks.removesuffix("]"), limit.removesuffix("]")
    count = 0
    for part in tasks.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise NoEstimate(f"--array={expression[:80]} is no list of array tasks", expression)
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            raise NoEstimate(f"--array={expression[:80]} has a range without tasks", expression)
        count += (last - first) // step + 1
        if count > _MOST:
            raise NoEstimate(f"--array={expression[:80]} has more tasks than can be", expression)
    if not percent:
        return count, count
    if not (limit.isascii() and limit.isdigit()) or len(limit) > 10:
        raise NoEstimate(f"--array={expression[:80]}: behind % stands a count", expression)
    return count, min(count, int(limit) or count)
