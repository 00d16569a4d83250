"""How many nodes a job's own list names: bounded before anything of it is written out.

The list is what a user typed, and the gate decides on all jobs in turn: what is
read here takes a time that grows with the text alone, whatever numbers stand in it.
"""

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Final

_PART: Final = re.compile(r"[^\[\],\s]*(?:\[[0-9,-]*\][^\[\],\s]*)*")
_PIECE: Final = re.compile(r"\[([0-9,-]*)\]|([^\[\]]+)")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LONGEST: Final = 64 * 1024
"""Slurm's own bound of such a list, in characters."""
_LONGEST_NAME: Final = 255

_Ranges = list[tuple[int, int, int]]


def nodes_named(nodelist: str, most: int) -> int:
    """How many nodes a list names at the most; one that cannot be read, as many as may be.

    Args:
        nodelist: As ``--nodelist`` takes it: ``n[1-3,7],gpu1``.
        most: More than so many a job cannot have.
    """
    if len(nodelist) > _LONGEST:
        return most
    names: set[str] = set()
    total, at = 0, 0
    while at < len(nodelist):
        found = _PART.match(nodelist, at)
        end = at if found is None else found.end()
        if found is None or (end < len(nodelist) and nodelist[end] != ","):
            return most
        at = end + 1
        if not found[0]:
            continue
        pieces = _pieces(found[0])
        if pieces is None:
            return most
        total += prod(_many(piece) for piece in pieces if not isinstance(piece, str))
        if total > most:
            return most
        names.update(map("".join, product(*map(_written, pieces))))
    return len(names)


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
