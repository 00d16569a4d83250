"""What a job may cost at the most, from what sbatch really sends."""

from collections.abc import Sequence
from datetime import datetime

from steward.bank.estimate.descriptions import description_of, is_like, merged, with_unshown
from steward.bank.estimate.estimator import GRACE_S, Estimator
from steward.bank.estimate.quote_options import parse_jobs, parse_options, script_among
from steward.bank.estimate.request_limits import tasks_of
from steward.bank.records import Description, Quote, Rate
from steward.bank.settings import BankSettings
from steward.slurm.cluster_model import Picture

__all__ = [
    "GRACE_S",
    "Estimator",
    "description_of",
    "estimate",
    "is_like",
    "merged",
    "parse_jobs",
    "parse_options",
    "script_among",
    "tasks_of",
    "with_unshown",
]


def estimate(
    description: Description,
    picture: Picture,
    rates: Sequence[Rate],
    settings: BankSettings,
    now: datetime,
) -> Quote:
    """What a job may cost at the most, with the way to it; for one who asks once.

    Args:
        description: What it asks for.
        picture: The cluster.
        rates: Every rate there is.
        settings: [bank].
        now: When it is, or was first, submitted.

    Raises:
        NoRate: Nothing says what one of its partitions costs.
        NoEstimate: One of its partitions is not known, or its array makes no sense.
    """
    return Estimator(picture, rates, settings).quote(description, now, lines=True)
