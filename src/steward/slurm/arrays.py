"""Job array task expressions, such as "1,3,5-9:2%2": test, remove and count tasks.

squeue prints this expression for the tasks of an array that have not started. The number after "%"
limits how many tasks may run at once. Slurm cuts long expressions and ends them with "...".
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


def includes_task(expression: str, task: int) -> bool:
    """Return True if an expression includes a task.

    An expression that Slurm cut (it ends with "...") includes every task, to be safe.

    Args:
        expression: For example "1,3,5-9:2%2".
        task: The task's index.
    """
    tasks = expression.partition("%")[0]
    if "..." in tasks:
        return True
    for part in tasks.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first <= task <= last and (task - first) % max(1, step) == 0:
            return True
    return False


def includes_any_task(expression: str, tasks: frozenset[int]) -> bool:
    """Return True if an expression includes any of these tasks; see :func:`includes_task`."""
    if expression.isdecimal() and len(expression) < 10:
        return int(expression) in tasks
    if "..." in expression.partition("%")[0]:
        return bool(tasks)
    return any(not tasks.isdisjoint(part) for part in _iter_parts(expression, tasks))


def _iter_parts(expression: str, tasks: frozenset[int]) -> Iterator[Iterable[int]]:
    """Yield the tasks of each part; for a long part only those among ``tasks``."""
    for part in expression.partition("%")[0].split(","):
        match = _PART.fullmatch(part)
        if match is not None:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            indices = range(first, last + 1, max(1, step))
            yield (
                indices
                if len(indices) < len(tasks)
                else (task for task in tasks if task in indices)
            )


def remove_tasks(expression: str, tasks: Iterable[int]) -> str:
    """Return an expression without these tasks and without the "%" limit."""
    removed = sorted(set(tasks))
    parts = []
    for part in expression.partition("%")[0].split(","):
        match = _PART.fullmatch(part)
        if match is None:
            parts.append(part)
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), max(1, int(match[3] or 1))
        for task in removed:
            if task in range(first, last + 1, step):
                parts += _format_range(first, task - step, step)
                first = task + step
        parts += _format_range(first, last, step)
    return ",".join(parts)


def _format_range(first: int, last: int, step: int) -> list[str]:
    """Format a range of tasks; [] if it is empty."""
    if first > last:
        return []
    if first + step > last:
        return [str(first)]
    return [f"{first}-{last}" + (f":{step}" if step > 1 else "")]


def count_tasks(expression: str) -> int:
    """Count the tasks of an expression. A cut expression gives a lower bound."""
    total = 0
    for part in expression.partition("%")[0].split(","):
        match = _PART.fullmatch(part)
        if match is not None:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            total += max(0, last - first) // max(1, step) + 1
    return total
