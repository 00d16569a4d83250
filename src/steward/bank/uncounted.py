"""TRES that have a price and that Slurm counts for no job: said, so that nobody is surprised.

Jobs are charged what they asked for of them, where that is shown (GRES), and
nothing where it is not.
"""

from collections.abc import Iterable

import msgspec

from steward.bank.ledger import Finding
from steward.bank.records import Rate
from steward.bank.settling import Pricing
from steward.bank.using import untracked
from steward.slurm.cluster_model import Picture


class Uncounted(msgspec.Struct, frozen=True):
    """A TRES that rates weigh, and no job's AllocTRES shows.

    Attributes:
        cluster: The cluster.
        name: The TRES.
        what: What that means, and what to do.
        is_mended: Whether slurm.conf can have it counted.
    """

    cluster: str
    name: str
    what: str
    is_mended: bool


def uncounted(rates: Iterable[Rate], picture: Picture) -> list[Uncounted]:
    """What rates of a cluster weigh that Slurm does not count there."""
    names = {
        name
        for rate in rates
        if rate.cluster in ("", picture.cluster) and not rate.free
        for name in untracked(rate, picture)
    }
    return [_said(name, picture) for name in sorted(names)]


def not_counted(clusters: Iterable[Pricing]) -> list[Finding]:
    """What of that slurm.conf can mend, as findings of the proof."""
    return [
        Finding(kind="not-counted", what=one.what, where=f"{one.cluster}/{one.name}")
        for pricing in clusters
        if pricing.picture is not None
        for one in uncounted(pricing.rates, pricing.picture)
        if one.is_mended
    ]


def _said(name: str, picture: Picture) -> Uncounted:
    is_gres = name.startswith("gres/")
    charged = "are charged what they asked for of it" if is_gres else "are charged nothing for it"
    is_mended = picture.accounting or not is_gres
    todo = (
        "name it in AccountingStorageTRES" if is_mended else "it counts GRES only with a slurmdbd"
    )
    what = f"Slurm of cluster {picture.cluster} does not count {name}: jobs {charged}; {todo}"
    return Uncounted(picture.cluster, name, what, is_mended)
