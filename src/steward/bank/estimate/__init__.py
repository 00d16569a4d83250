"""Estimate of a job's highest cost, from the request that sbatch sends.

`estimate` is for callers who ask once; the gate keeps an `Estimator` for each cluster.
"""

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
    """Return a quote: the highest cost of a job, with its price lines.

    Args:
        description: The job's request.
        picture: The model of the cluster.
        rates: All rates.
        settings: [bank].
        now: When it is submitted, or was first submitted.

    Raises:
        NoRate: A partition has no rate.
        NoEstimate: A partition is unknown, or the array is malformed.
    """
    return Estimator(picture, rates, settings).quote(description, now, lines=True)
