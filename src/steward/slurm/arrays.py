"""Task expressions of job arrays ("1,3,5-9:2%2"), as squeue shows the tasks an array has left."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


def covers(expression: str, task: int) -> bool:
    """Whether a task is among those of an expression.

    An expression that Slurm cut off (it ends with "...") covers all that may follow.

    Args:
        expression: Such as "1,3,5-9:2%2"; the part behind % is how many may run at once.
        task: The task's index.
    """
    tasks = expression.partition("%")[0]
    if "..." in tasks:
        return True
    for part in tasks.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            continue
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if first <= task <= last and (task - first) % max(1, step) == 0:
            return True
    return False


def covers_any(expression: str, tasks: frozenset[int]) -> bool:
    """Whether one of many tasks is among those of an expression, as :func:`covers` has it."""
    if expression.isdecimal() and len(expression) < 10:
        return int(expression) in tasks
    if "..." in expression.partition("%")[0]:
        return bool(tasks)
    return any(not tasks.isdisjoint(part) for part in _parts(expression, tasks))


def _parts(expression: str, tasks: frozenset[int]) -> Iterator[Iterable[int]]:
    """The tasks of each part; of a long one only those among the tasks that are asked for."""
    for part in expression.partition("%")[0].split(","):
        found = _PART.fullmatch(part)
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            of = range(first, last + 1, max(1, step))
            yield of if len(of) < len(tasks) else (task for task in tasks if task in of)


def without_task(expression: str, tasks: Iterable[int]) -> str:
    """The expression without some tasks, and without how many may run at once."""
    gone = sorted(set(tasks))
    kept = []
    for part in expression.partition("%")[0].split(","):
        found = _PART.fullmatch(part)
        if found is None:
            kept.append(part)
            continue
        first, last, step = int(found[1]), int(found[2] or found[1]), max(1, int(found[3] or 1))
        for task in gone:
            if task in range(first, last + 1, step):
                kept += _range(first, task - step, step)
                first = task + step
        kept += _range(first, last, step)
    return ",".join(kept)


def _range(first: int, last: int, step: int) -> list[str]:
    if first > last:
        return []
    if first + step > last:
        return [str(first)]
    return [f"{first}-{last}" + (f":{step}" if step > 1 else "")]


def count_tasks(expression: str) -> int:
    """How many tasks an expression covers, at least: what Slurm cut off is not counted."""
    total = 0
    for part in expression.partition("%")[0].split(","):
        found = _PART.fullmatch(part)
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            total += max(0, last - first) // max(1, step) + 1
    return total
