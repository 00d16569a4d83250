"""TRES parsing: ``cpu=4,mem=8G,node=2,billing=4,gres/gpu:a100=2`` and the forms of requests.

Amounts are integers by TRES name. Memory and burst buffers are in MiB. :func:`parse_gres` reads a
node's GRES, :func:`parse_requested_gres` and :func:`parse_licenses` read a job's requests, which
:func:`count_requested_kinds` adds up.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Final

from steward.core.records import JobRecord

_FACTORS: Final = {
    "": Fraction(1),
    "K": Fraction(1, 1024),
    "M": Fraction(1),
    "G": Fraction(1024),
    "T": Fraction(1024**2),
    "P": Fraction(1024**3),
}
_COUNTS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
_AMOUNT: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGTP]?)", re.IGNORECASE)
_MEMORY: Final = "mem"
_GPU: Final = "gres/gpu"


def is_size(name: str) -> bool:
    """Return True for a TRES that Slurm counts in MiB: memory and burst buffers."""
    return name == _MEMORY or name.startswith("bb/")


def parse_tres(text: str) -> dict[str, int]:
    """Parse TRES into amounts by name; ``mem`` and burst buffers in MiB.

    Parts without a valid amount are left out.
    """
    amounts: dict[str, int] = {}
    for part in text.split(","):
        name, equals, amount = part.rpartition("=")
        value = parse_tres_amount(name, amount) if equals else None
        if value is not None:
            amounts[name] = value
    return amounts


@lru_cache(maxsize=8192)
def count_gpus(text: str) -> int:
    """Return the number of GPUs in a TRES string; typed ones if only those are counted."""
    if _GPU not in text:
        return 0
    amounts = parse_tres(text)
    typed = sum(amount for name, amount in amounts.items() if name.startswith(f"{_GPU}:"))
    return amounts.get(_GPU, typed)


@lru_cache(maxsize=8192)
def parse_tres_amount(name: str, amount: str) -> int | None:
    """Parse one amount, in MiB for ``mem`` and burst buffers; None if malformed."""
    match = _AMOUNT.fullmatch(amount)
    if match is None:
        return None
    suffix = match[2].upper()
    if is_size(name):
        return int(Fraction(match[1]) * _FACTORS[suffix])
    return int(Fraction(match[1]) * _COUNTS[suffix])


def shorten_sizes(text: str) -> str:
    """Convert sacct's --noconvert form: ``mem=16384M`` to ``mem=16G``.

    Only exact amounts change; Slurm counts halves as exact: ``mem=1.50G``.
    """
    return ",".join(_shorten_size(part) for part in text.split(","))


def _shorten_size(part: str) -> str:
    """Convert one part of a TRES text."""
    name, _, amount = part.partition("=")
    number = amount.removesuffix("M")
    if not is_size(name) or number == amount:
        return part
    # A float holds up to 15 digits exactly.
    if not number.isdecimal() or not number.isascii() or len(number) > 15:
        return part
    size, letter = float(number), "M"
    for larger in "GTPE":
        if size < 1024 or size % 512:
            break
        size, letter = size / 1024, larger
    digits = f"{size:.0f}" if size.is_integer() else f"{size:.2f}"
    return f"{name}={digits}{letter}"


def parse_gres(text: str) -> dict[str, int]:
    """Parse a node's ``Gres=`` into TRES: ``gpu:a100:4(S:0-1),shard:8`` and similar forms.

    A typed GRES counts under its type and under its name.
    """
    counts: dict[str, int] = {}
    # Commas inside parentheses separate sockets and indices, not GRES.
    for part in re.sub(r"\([^()]*\)", "", text).split(","):
        words = part.split(":")
        count = parse_tres_amount("", words[-1]) if len(words) > 1 else None
        if count is None:
            count = 1
        else:
            words.pop()
        name = words[0]
        if not name or name == "(null)":
            continue
        counts[f"gres/{name}"] = counts.get(f"gres/{name}", 0) + count
        kind = next((word for word in words[1:] if word not in ("no_consume", "")), "")
        if kind:
            typed_name = f"gres/{name}:{kind}"
            counts[typed_name] = counts.get(typed_name, 0) + count
    return counts


def parse_requested_gres(text: str) -> dict[str, int]:
    """Parse a job's request per job, node, socket or task: ``gres/gpu:a100:2,gres/shard:1``.

    Also reads the forms of older versions (``gpu:2``, ``gres:gpu:2``) and licenses
    (``license/matlab:2``). A typed GRES counts under its type only.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        words = part.replace("=", ":").split(":")
        if words[0] == "gres" and len(words) > 1:
            words.pop(0)
        count = parse_tres_amount("", words[-1]) if len(words) > 1 else None
        if count is None:
            count = 1
        else:
            words.pop()
        name = words[0]
        if not name or name == "(null)":
            continue
        if "/" not in name and name not in ("cpu", "mem", "node"):
            name = f"gres/{name}"
        name = ":".join((name, *words[1:2]))
        counts[name] = counts.get(name, 0) + count
    return counts


def parse_licenses(text: str) -> dict[str, int]:
    """Parse ``--licenses`` into TRES: ``matlab:2,abaqus@db=5``; ``a|b`` counts both."""
    counts: dict[str, int] = {}
    for part in re.split(r"[,;|]", text):
        name, colon, amount = part.strip().rpartition(":")
        if not colon:
            name, colon, amount = part.strip().rpartition("=")
        count = parse_tres_amount("", amount) if colon else 1
        if not colon:
            name = part.strip()
        if name and name != "(null)" and count:
            counts[f"license/{name}"] = counts.get(f"license/{name}", 0) + count
    return counts


_COUNTED: Final = ("gres/", "license/")


def strip_tres_type(name: str) -> str:
    """Return a TRES name without its type: ``gres/gpu`` for ``gres/gpu:a100``."""
    return name.partition(":")[0]


def count_requested_kinds(record: JobRecord, sockets: int = 1) -> dict[str, int]:
    """Return the GRES and licenses a job requested, by the names it used.

    Args:
        record: The job as in the queue.
        sockets: Sockets per node, if known. A record does not tell how many of them a job takes.
    """
    nodes, tasks = max(1, record.nodes or 1), max(1, record.tasks or 1)
    amounts: dict[str, int] = {}
    for text, factor in (
        (record.tres_per_job, 1),
        (record.tres_per_node, nodes),
        (record.tres_per_socket, sockets * nodes),
        (record.tres_per_task, tasks),
    ):
        for name, amount in parse_requested_gres(text).items() if text else ():
            if name.startswith(_COUNTED):
                # One request may be stated twice, for the job and for a task.
                amounts[name] = max(amounts.get(name, 0), amount * factor)
    return amounts


def remove_kinds(text: str, kinds: set[str]) -> str:
    """Remove the parts of a request whose kinds are already known."""
    if not text or not kinds:
        return text
    kept = [part for part in text.split(",") if not kinds.intersection(_list_kinds(part))]
    return ",".join(kept)


def _list_kinds(part: str) -> set[str]:
    """Return the TRES names, without types, in one part of a request."""
    return {strip_tres_type(name) for name in parse_requested_gres(part)}
