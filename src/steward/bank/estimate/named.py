"""How many nodes a job's own list names: bounded before anything of it is written out.

The list is what a user typed, and the gate decides on all jobs in turn: it is read once,
in a time that grows with the text alone, whatever numbers stand in it.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

from steward.bank.estimate.bounds import LONGEST_NODELIST

_PART: Final = re.compile(r"[^\[\],\s]*(?:\[[0-9,-]*\][^\[\],\s]*)*")
_PIECE: Final = re.compile(r"\[([0-9,-]*)\]|([^\[\]]+)")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LONGEST_FOLDED: Final = 4096
"""Of a list with brackets, which is read piece by piece, in characters."""
_MOST_FOLDED: Final = 256
"""Of the pairs of brackets in it."""
_MOST_WRITTEN: Final = 1024
"""Names that are written out of brackets to be told apart; of more each counts as another."""
_BROKEN: Final = re.compile(r"[\]\s]")
_LONGEST_NAME: Final = 255

_Ranges = list[tuple[int, int, int]]


def nodes_named(nodelist: str, most: int) -> int:
    """How many nodes a list names at the most; one that cannot be read, as many as may be.

    Args:
        nodelist: As ``--nodelist`` takes it: ``n[1-3,7],gpu1``.
        most: More than so many a job cannot have.
    """
    if len(nodelist) > LONGEST_NODELIST:
        return most
    count = count_nodes(nodelist)
    return most if count is None else min(count, most)


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
    total, at = 0, 0
    while at < len(nodelist):
        found = _PART.match(nodelist, at)
        end = at if found is None else found.end()
        if found is None or (end < len(nodelist) and nodelist[end] != ","):
            return None
        at = end + 1
        if not found[0]:
            continue
        pieces = _pieces(found[0])
        if pieces is None:
            return None
        total += prod(_many(piece) for piece in pieces if not isinstance(piece, str))
        parts.append(pieces)
    if total > _MOST_WRITTEN:
        return total
    return len({"".join(name) for pieces in parts for name in product(*map(_written, pieces))})


def _pieces(part: str) -> list[str | _Ranges] | None:
    """A name's texts and ranges in turn; None for what is no name."""
    found: list[str | _Ranges] = []
    for piece in _PIECE.finditer(part):
        if piece[2]:
            found.append(piece[2])
            continue
        ranges: _Ranges = []
        for one in piece[1].split(","):
            match = _RANGE.fullmatch(one)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                return None
            ranges.append((int(match[1]), int(match[2] or match[1]), len(match[1])))
        found.append(ranges)
    # A long name many times over would fill the memory.
    texts = sum(len(one) for one in found if isinstance(one, str))
    return found if texts <= _LONGEST_NAME else None


def _many(ranges: _Ranges) -> int:
    return sum(last - first + 1 for first, last, _ in ranges)


def _written(piece: str | _Ranges) -> Iterator[str]:
    if isinstance(piece, str):
        yield piece
        return
    for first, last, width in piece:
        for number in range(first, last + 1):
            yield f"{number:0{width}}"
