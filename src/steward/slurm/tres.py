"""TRES as Slurm writes them: ``cpu=4,mem=8G,node=2,billing=4,gres/gpu:a100=2``."""

import re
from fractions import Fraction
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


def is_size(name: str) -> bool:
    """Return True for a TRES that Slurm counts in MiB: memory and burst buffers."""
    return name == _MEMORY or name.startswith("bb/")


def parse_tres(text: str) -> dict[str, int]:
    """Amounts by name, ``mem`` and burst buffers in MiB; what is no amount is left out."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, amount = part.rpartition("=")
        value = amount_of_tres(name, amount) if equals else None
        if value is not None:
            found[name] = value
    return found


def amount_of_tres(name: str, amount: str) -> int | None:
    """One amount, of ``mem`` and burst buffers in MiB; None for what is none."""
    match = _AMOUNT.fullmatch(amount)
    if match is None:
        return None
    suffix = match[2].upper()
    if is_size(name):
        return int(Fraction(match[1]) * _FACTORS[suffix])
    return int(Fraction(match[1]) * _COUNTS[suffix])


def converted(text: str) -> str:
    """Convert what sacct prints with --noconvert: ``mem=16384M`` to ``mem=16G``.

    Exact amounts alone change; Slurm counts halves as exact: ``mem=1.50G``.
    """
    return ",".join(_converted(part) for part in text.split(","))


def _converted(part: str) -> str:
    name, _, amount = part.partition("=")
    number = amount.removesuffix("M")
    if not is_size(name) or number == amount:
        return part
    # 15 digits: what a float holds exactly.
    if not number.isdecimal() or not number.isascii() or len(number) > 15:
        return part
    size, letter = float(number), "M"
    for larger in "GTPE":
        if size < 1024 or size % 512:
            break
        size, letter = size / 1024, larger
    digits = f"{size:.0f}" if size.is_integer() else f"{size:.2f}"
    return f"{name}={digits}{letter}"


def gres(text: str) -> dict[str, int]:
    """What ``Gres=`` of a node shows, as TRES: ``gpu:a100:4(S:0-1),shard:8`` and the like.

    A typed one counts under its type and under its name.
    """
    found: dict[str, int] = {}
    # Within brackets commas part sockets and indices, not GRES.
    for part in re.sub(r"\([^()]*\)", "", text).split(","):
        words = part.split(":")
        count = amount_of_tres("", words[-1]) if len(words) > 1 else None
        if count is None:
            count = 1
        else:
            words.pop()
        name = words[0]
        if not name or name == "(null)":
            continue
        found[f"gres/{name}"] = found.get(f"gres/{name}", 0) + count
        kind = next((word for word in words[1:] if word not in ("no_consume", "")), "")
        if kind:
            typed = f"gres/{name}:{kind}"
            found[typed] = found.get(typed, 0) + count
    return found


def requested_gres(text: str) -> dict[str, int]:
    """What a job asked for per job, node, socket or task: ``gres/gpu:a100:2,gres/shard:1``.

    Also as older versions have it (``gpu:2``, ``gres:gpu:2``), and licenses
    (``license/matlab:2``). A typed one counts under its type alone.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        words = part.replace("=", ":").split(":")
        if words[0] == "gres" and len(words) > 1:
            words.pop(0)
        count = amount_of_tres("", words[-1]) if len(words) > 1 else None
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
        found[name] = found.get(name, 0) + count
    return found


def licenses(text: str) -> dict[str, int]:
    """What ``--licenses`` asks for, as TRES: ``matlab:2,abaqus@db=5``; of ``a|b`` both."""
    found: dict[str, int] = {}
    for part in re.split(r"[,;|]", text):
        name, colon, amount = part.strip().rpartition(":")
        if not colon:
            name, colon, amount = part.strip().rpartition("=")
        count = amount_of_tres("", amount) if colon else 1
        if not colon:
            name = part.strip()
        if name and name != "(null)" and count:
            found[f"license/{name}"] = found.get(f"license/{name}", 0) + count
    return found


_COUNTED: Final = ("gres/", "license/")


def kind_of(name: str) -> str:
    """A TRES' name without its type: ``gres/gpu`` of ``gres/gpu:a100``."""
    return name.partition(":")[0]


def requested_kinds(record: JobRecord, sockets: int = 1) -> dict[str, int]:
    """What a job asked for, under the names that it used.

    Args:
        record: The job as the queue shows it.
        sockets: Of a node, as far as they are known: a record does not tell how many of them
            the job takes.
    """
    nodes, tasks = max(1, record.nodes or 1), max(1, record.tasks or 1)
    found: dict[str, int] = {}
    for text, many in (
        (record.tres_per_job, 1),
        (record.tres_per_node, nodes),
        (record.tres_per_socket, sockets * nodes),
        (record.tres_per_task, tasks),
    ):
        for name, amount in requested_gres(text).items() if text else ():
            if name.startswith(_COUNTED):
                # The same ones, said twice: as the job's and as a task's.
                found[name] = max(found.get(name, 0), amount * many)
    return found


def without_kind(text: str, kinds: set[str]) -> str:
    """A request without what is known of these kinds already."""
    if not text or not kinds:
        return text
    kept = [part for part in text.split(",") if not kinds.intersection(_kinds(part))]
    return ",".join(kept)


def _kinds(part: str) -> set[str]:
    return {kind_of(name) for name in requested_gres(part)}
