"""Limits of a job request: lengths of its texts, and CPU time that one estimate may take.

slurmctld calls the submit plugin before it checks the lengths of a job's texts, and waits for the
answer. `LONGEST_TEXTS` holds Slurm's own limits, rounded up where versions differ; the submit
plugins cut each text at the same length and name the field (``gate.requests.PluginRequest``,
``oversize``). `Budget` limits CPU time. `check_text_lengths` checks all texts; `split_choices`,
`bound_node_count` and `count_array_tasks` parse lists of names, node lists and array expressions
within these limits.
"""

import re
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

from steward.bank.errors import NoEstimate
from steward.bank.records import JobRequest

LONGEST_TEXT: Final = 4096
"""Maximum length of most texts, in bytes; slurmctld's own limit is a quarter of it."""
LONGEST_NODELIST: Final = 64 * 1024
"""Maximum length of a node list, in bytes."""
_LONGEST_LATE: Final = 256
"""Maximum length of a text once the budget is spent: names fit, long lists do not."""
_LONGEST_LIST: Final = 64
"""Maximum number of parts in lists of TRES and licenses."""
_MOST_CHOICES: Final = 64
"""Maximum number of partitions or QOS in a list."""

OPTION_OF_FIELD: Final = {
    "account": "--account",
    "partition": "--partition",
    "qos": "--qos",
    "reservation": "--reservation",
    "features": "--constraint",
    "array": "--array",
    "req_nodes": "--nodelist",
    "licenses": "--licenses",
    "tres_per_job": "--gpus",
    "tres_per_node": "--gres",
    "tres_per_socket": "--gpus-per-socket",
    "tres_per_task": "--tres-per-task",
    "cpus_per_tres": "--cpus-per-gpu",
    "mem_per_tres": "--mem-per-gpu",
}
"""Text fields of a description, with the option that sets each."""
LONGEST_TEXTS: Final = dict.fromkeys(OPTION_OF_FIELD, LONGEST_TEXT) | {
    "req_nodes": LONGEST_NODELIST
}
"""Maximum length of each text field, in bytes."""
_LIST_FIELDS: Final = frozenset(OPTION_OF_FIELD) - {
    *("account", "partition", "qos", "reservation", "array", "req_nodes")
}


class Budget:
    """CPU time of the calling thread that is left for one request.

    Args:
        budget_ns: The budget in ns; None for no limit.
    """

    __slots__ = ("_deadline_ns",)

    def __init__(self, budget_ns: int | None) -> None:
        self._deadline_ns = None if budget_ns is None else time.thread_time_ns() + budget_ns

    def is_spent(self) -> bool:
        """Return True if the budget is used up."""
        return self._deadline_ns is not None and time.thread_time_ns() >= self._deadline_ns


UNLIMITED: Final = Budget(None)
"""A budget without limit."""


def check_text_lengths(request: JobRequest, budget: Budget = UNLIMITED) -> None:
    """Reject a text that is longer than Slurm accepts, before reading any of it.

    Args:
        request: The job's request.
        budget: Once it is spent, only short texts are accepted.

    Raises:
        NoEstimate: A text is too long.
    """
    is_spent = budget.is_spent()
    for name, option in OPTION_OF_FIELD.items():
        text = getattr(request, name)
        if not text:
            continue
        if is_spent and len(text) > _LONGEST_LATE:
            raise NoEstimate(
                f"{option} takes too long to price: shorten it, or split the job", text[:80]
            )
        if len(text) > LONGEST_TEXTS[name] or (
            name in _LIST_FIELDS and text.count(",") >= _LONGEST_LIST
        ):
            raise NoEstimate(f"{option} is longer than Slurm accepts: shorten it", text[:80])


def split_choices(names: str, option: str) -> Sequence[str]:
    """Split a list of partitions or QOS, without duplicates.

    Raises:
        NoEstimate: The list names more than a cluster has.
    """
    choices = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    if len(choices) > _MOST_CHOICES:
        raise NoEstimate(f"{option} has more than {_MOST_CHOICES} names: give fewer", names[:80])
    return choices


_NODE_PART: Final = re.compile(r"[^\[\],\s]*(?:\[[0-9,-]*\][^\[\],\s]*)*")
_PIECE: Final = re.compile(r"\[([0-9,-]*)\]|([^\[\]]+)")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LONGEST_FOLDED: Final = 4096
"""Maximum length of a list with brackets, in characters: it is parsed piece by piece."""
_MOST_FOLDED: Final = 256
"""Maximum number of bracket pairs in it."""
_MOST_WRITTEN: Final = 1024
"""Maximum number of names that are expanded to find duplicates; beyond it each counts."""
_BROKEN: Final = re.compile(r"[\]\s]")
_LONGEST_NAME: Final = 255

_Ranges = list[tuple[int, int, int]]
"""Ranges in brackets: first, last, and the number of digits."""


def bound_node_count(nodelist: str, max_nodes: int) -> int:
    """Return how many nodes a list names at most; for an unreadable list the maximum.

    A user wrote the list, and the gate decides on all jobs in turn: the time grows with the text's
    length only, whatever numbers it holds.

    Args:
        nodelist: Value of ``--nodelist``: ``n[1-3,7],gpu1``.
        max_nodes: Maximum number of nodes of a job.
    """
    if len(nodelist) > LONGEST_NODELIST:
        return max_nodes
    count = count_nodes(nodelist)
    return max_nodes if count is None else min(count, max_nodes)


@lru_cache(maxsize=16)  # the same list is read for each partition and QOS of a job
def count_nodes(nodelist: str) -> int | None:
    """Count the nodes in a node list; return None if it is malformed or too long."""
    if "[" not in nodelist:
        names = set(nodelist.split(","))
        names.discard("")
        return None if _BROKEN.search(nodelist) else len(names)
    if len(nodelist) > _LONGEST_FOLDED or nodelist.count("[") > _MOST_FOLDED:
        return None
    parts: list[list[str | _Ranges]] = []
    total, position = 0, 0
    while position < len(nodelist):
        match = _NODE_PART.match(nodelist, position)
        end = position if match is None else match.end()
        if match is None or (end < len(nodelist) and nodelist[end] != ","):
            return None
        position = end + 1
        if not match[0]:
            continue
        pieces = _split_name(match[0])
        if pieces is None:
            return None
        total += prod(_count_range(piece) for piece in pieces if not isinstance(piece, str))
        parts.append(pieces)
    if total > _MOST_WRITTEN:
        return total
    return len({"".join(name) for pieces in parts for name in product(*map(_expand_piece, pieces))})


def _split_name(name: str) -> list[str | _Ranges] | None:
    """Split a name into texts and ranges; None if it is malformed."""
    pieces: list[str | _Ranges] = []
    for piece in _PIECE.finditer(name):
        if piece[2]:
            pieces.append(piece[2])
            continue
        ranges: _Ranges = []
        for text in piece[1].split(","):
            match = _RANGE.fullmatch(text)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                return None
            ranges.append((int(match[1]), int(match[2] or match[1]), len(match[1])))
        pieces.append(ranges)
    # Many copies of a long name would fill the memory.
    text_length = sum(len(text) for text in pieces if isinstance(text, str))
    return pieces if text_length <= _LONGEST_NAME else None


def _count_range(ranges: _Ranges) -> int:
    return sum(last - first + 1 for first, last, _ in ranges)


def _expand_piece(piece: str | _Ranges) -> Iterator[str]:
    """Yield the texts that a piece of a name stands for."""
    if isinstance(piece, str):
        yield piece
        return
    for first, last, width in piece:
        for number in range(first, last + 1):
            yield f"{number:0{width}}"


_TASK_PART: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")
_MOST_TASKS: Final = 4_000_001
"""Slurm's own upper bound of MaxArraySize."""


def count_array_tasks(expression: str) -> tuple[int, int]:
    """Count an array's tasks, and how many may run at once.

    Args:
        expression: Such as ``0-9,20-30:2%4``, with or without brackets.

    Raises:
        NoEstimate: The expression is malformed, or has more tasks than any array.
    """
    tasks, percent, limit = expression.strip().removeprefix("[").partition("%")
    tasks, limit = tasks.removesuffix("]"), limit.removesuffix("]")
    count = 0
    for part in tasks.split(","):
        match = _TASK_PART.fullmatch(part.strip())
        if match is None:
            raise NoEstimate(
                f"invalid --array={expression[:80]}: write array tasks as 0-99:2 or 1,3,5",
                expression,
            )
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise NoEstimate(
                f"invalid --array={expression[:80]}: a range has no tasks. Write it as FIRST-LAST",
                expression,
            )
        count += (last - first) // step + 1
        if count > _MOST_TASKS:
            raise NoEstimate(
                f"invalid --array={expression[:80]}: more than {_MOST_TASKS:,} tasks", expression
            )
    if not percent:
        return count, count
    if not (limit.isascii() and limit.isdigit()) or len(limit) > 10:
        raise NoEstimate(f"invalid --array={expression[:80]}: write a number after %", expression)
    return count, min(count, int(limit) or count)
