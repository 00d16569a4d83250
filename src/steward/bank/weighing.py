"""What a rate may weigh: names of TRES that jobs are handed, so that none is free by a slip.

A name that Slurm never shows of a job costs nothing for ever, and nobody would be told.
What no job can be handed is refused; what this cluster does not have is warned of.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from steward.bank.errors import BankUsage

if TYPE_CHECKING:
    from steward.slurm.picture import Picture

_PLAIN: Final = ("cpu", "mem", "node", "billing")
_NAMED: Final = re.compile(r"gres/[\w.-]+(?::[\w.+-]+)?|(?:license|bb)/[\w.@+-]+", re.ASCII)
_MEASURED: Final = re.compile(r"energy|vmem|pages|(?:fs|ic)/.*")
_MEANT: Final = {
    "core": "cpu",
    "cores": "cpu",
    "ram": "mem",
    "gpu": "gres/gpu",
    "gpus": "gres/gpu",
    "gres": "gres/gpu",
    "gres/gpus": "gres/gpu",
    "lic": "license/NAME",
    "licence": "license/NAME",
    "license": "license/NAME",
    "licenses": "license/NAME",
}
_KINDS: Final = ("gres", "license", "bb")
_ALL: Final = "cpu, mem, node, billing, gres/NAME, gres/NAME:TYPE, license/NAME, bb/NAME"


def check_names(names: Iterable[str]) -> None:
    """Refuse what Slurm would show of no job.

    Names are those of AccountingStorageTRES in slurm.conf(5), as far as jobs are
    allocated them.

    Raises:
        BankUsage: One is none; the nearest right name is told.
    """
    for name in names:
        if _MEASURED.fullmatch(name):
            raise BankUsage(
                f"{name} is measured, and not handed out to jobs: weigh one of {_ALL}", name
            )
        if name not in _PLAIN and (name in _MEANT or not _NAMED.fullmatch(name)):
            near = _nearest(name)
            raise BankUsage(
                f"{name!r} is no TRES that jobs are handed"
                + (f", {near} is" if near else f": weigh one of {_ALL}"),
                name,
            )


def unseen(names: Iterable[str], picture: "Picture") -> tuple[str, ...]:
    """What an operator is to be told of weights that nothing on a cluster may be charged by."""
    has = {name for shape in picture.shapes for name in shape.tres}
    has |= {name.partition(":")[0] for name in has}
    said = []
    for name in names:
        if name.startswith("gres/") and name not in has:
            known = f"; there are {', '.join(sorted(has))}" if has else ""
            said.append(f"no node of cluster {picture.cluster} has {name} now{known}")
        if name.startswith("bb/"):
            said.append(f"what a job asks for of {name} is not held, only charged")
    return tuple(said)


def _nearest(name: str) -> str:
    """The name that was meant; "" where it cannot be told."""
    low = name.lower()
    if low in _MEANT:
        return _MEANT[low]
    kind, slash, rest = low.partition("/")
    if not slash:
        return next(iter(get_close_matches(low, _PLAIN)), "")
    meant = next(iter(get_close_matches(kind, _KINDS)), "")
    found = f"{meant}/{name.partition('/')[2]}" if meant and rest else ""
    return _MEANT.get(found, found) if _NAMED.fullmatch(found) else ""
