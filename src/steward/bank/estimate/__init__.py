"""Estimate of a job's highest cost, from the request that sbatch sends.

`estimate` is for callers who ask once; the gate keeps an `Estimator` for each cluster. Flow: a
`JobRequest` comes from a submit plugin, from sbatch options (`quote_options.py`), or from a queue
record or an update (`descriptions.py`). `request_limits.py` rejects texts that are too long,
`sizes.py` bounds the TRES that Slurm may allocate in each partition, and `estimator.py` prices
them and returns the most expensive choice as a `Quote`.
"""

from collections.abc import Sequence
from datetime import datetime

from steward.bank.estimate.descriptions import (
    add_unshown_requests,
    apply_update,
    describe_record,
    is_compatible,
)
from steward.bank.estimate.estimator import OVERRUN_S, UNLIMITED_S, Estimator
from steward.bank.estimate.quote_options import find_script, parse_jobs, parse_options
from steward.bank.estimate.request_limits import count_array_tasks
from steward.bank.records import JobRequest, Quote, Rate
from steward.bank.settings import BankSettings
from steward.slurm.cluster_model import ClusterModel

__all__ = [
    "OVERRUN_S",
    "UNLIMITED_S",
    "Estimator",
    "add_unshown_requests",
    "apply_update",
    "count_array_tasks",
    "describe_record",
    "estimate",
    "find_script",
    "is_compatible",
    "parse_jobs",
    "parse_options",
]


def estimate(
    description: JobRequest,
    model: ClusterModel,
    rates: Sequence[Rate],
    settings: BankSettings,
    now: datetime,
) -> Quote:
    """Return a quote: the highest cost of a job, with its price lines.

    Args:
        description: The job's request.
        model: The model of the cluster.
        rates: All rates.
        settings: [bank].
        now: When it is submitted, or was first submitted.

    Raises:
        NoRate: A partition has no rate.
        NoEstimate: A partition is unknown, or the array is malformed.
    """
    return Estimator(model, rates, settings).quote(description, now, lines=True)
