"""Cost estimates of jobs: the most expensive of the partitions and QOS that a job may use.

`Estimator.quote` prices a request (`JobRequest`) for one cluster, by its model and rates;
`find_longest_limit` finds the longest affordable time limit. The gate calls it for every submit,
so everything that does not depend on the job is computed once per partition and QOS, and kept
until the cluster model or the rates change. Amounts are micro-SU.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.bank.errors import NoEstimate
from steward.bank.estimate.request_limits import (
    UNLIMITED,
    Budget,
    check_text_lengths,
    count_array_tasks,
    split_choices,
)
from steward.bank.estimate.sizes import PartitionLimits, PricedPartition, compute_size
from steward.bank.money import MAX_AMOUNT
from steward.bank.prices import compute_highest_price, find_rate
from steward.bank.records import JobRequest, PriceLine, Quote, Rate, ResourceUse
from steward.bank.settings import BankSettings
from steward.core.timestamps import from_micros
from steward.slurm.cluster_model import ClusterModel

UNLIMITED_S: Final = 86_400
"""Time limit assumed if neither job nor partition has one, in seconds."""
OVERRUN_S: Final = 60
"""Time that a job may exceed its limit, in seconds: slurmctld checks limits twice a minute, and
ends overdue jobs at the next check."""

_MOST_CACHED: Final = 10_000
"""Maximum number of cached prices: users choose the QOS names."""

_YEAR_MIN: Final = 365 * 1440
"""Minutes of a year: the upper bound of a searched time limit."""
_DEFAULT_QOS: Final = "normal"
"""QOS that slurmdbd assigns if an association has no default."""

_PricedChoice = tuple[PartitionLimits, PricedPartition, str, dict[str, int]]
"""A partition, its rate, a QOS, and the TRES that the job may get there."""


class Estimator:
    """Estimates for one cluster; make a new one when its model or the rates change.

    Args:
        model: The model of the cluster.
        rates: All rates.
        settings: [bank].
    """

    def __init__(self, model: ClusterModel, rates: Sequence[Rate], settings: BankSettings) -> None:
        self.model = model
        self._settings = settings
        self._rates = [rate for rate in rates if rate.cluster in ("", model.cluster)]
        # After the last change of rates, a rate can be chosen once for all jobs.
        times = [from_micros(rate.created_us) for rate in self._rates if rate.created_us]
        times += [rate.valid_from for rate in self._rates if rate.valid_from is not None]
        self._last_change = max(times, default=None)
        self._sites: dict[str, PartitionLimits] = {}
        self._priced: dict[tuple[str, str], PricedPartition] = {}

    def quote(
        self,
        job: JobRequest,
        now: datetime,
        *,
        lines: bool = False,
        budget: Budget = UNLIMITED,
    ) -> Quote:
        """Return the highest cost of a job.

        Args:
            job: The job's request.
            now: When it is submitted, or was first submitted: selects the rate.
            lines: Whether to include the lines that explain the price.
            budget: CPU time that the estimate may take.

        Raises:
            NoRate: A partition has no rate.
            NoEstimate: A partition is unknown, the array is malformed, or the budget is spent
                before all partitions and QOS are priced.
        """
        account = self.find_account(job)
        found = self._list_choices(job, account, now, budget)
        tasks, at_once = (1, 1) if not job.array else count_array_tasks(job.array)
        best: tuple[int, _PricedChoice] | None = None
        for choice in found:
            site, priced, qos, size = choice
            amount = priced.compute_cost(size, self.time_s(job.time_limit_min, site), qos)
            if best is None or amount > best[0]:
                best = amount, choice
        if best is None:
            raise NoEstimate(
                f"no partition given, and cluster {self.model.cluster} has no default partition: "
                "give --partition",
                job,
            )
        amount, (site, priced, qos, size) = best
        seconds = self.time_s(job.time_limit_min, site)
        if tasks * amount > MAX_AMOUNT:
            raise NoEstimate(
                "the price exceeds the largest possible balance: request fewer resources", job
            )
        quote = Quote(
            amount=tasks * amount,
            account=account,
            partition=site.name,
            qos=qos,
            rate=priced.rate.number,
            time_s=seconds,
            tres=size,
            tasks=tasks,
            per_task=amount,
            at_once=at_once,
        )
        return self._explain_quote(quote, priced.rate) if lines else quote

    def find_longest_limit(
        self,
        job: JobRequest,
        available: int,
        now: datetime,
        *,
        tasks: int = 1,
        budget: Budget = UNLIMITED,
    ) -> int | None:
        """Return the longest time limit, in minutes, with which a job costs at most an amount.

        Args:
            job: The job's request.
            available: The amount, micro-SU.
            now: When it is submitted, or was first submitted.
            tasks: Number of array tasks, from its quote.
            budget: CPU time that the search may take.

        Returns:
            Minutes, at most a year's; None if not even one is affordable, or the budget is spent
            first.

        Raises:
            NoRate: As :meth:`quote`.
            NoEstimate: As :meth:`quote`.
        """
        found = self._list_choices(job, self.find_account(job), now, budget)
        most = available // max(1, tasks)
        low, high = 0, _YEAR_MIN
        # Rounding and minimum charges make cost nonlinear, but a longer limit never costs less.
        while low < high:
            if budget.is_spent():
                return None
            middle = (low + high + 1) // 2
            if all(
                priced.compute_cost(size, self.time_s(middle, site), qos) <= most
                for site, priced, qos, size in found
            ):
                low = middle
            else:
                high = middle - 1
        return low or None

    def _list_choices(
        self, job: JobRequest, account: str, now: datetime, budget: Budget
    ) -> list[_PricedChoice]:
        """List all partitions and QOS that a job may use, with the TRES that it may get there."""
        check_text_lengths(job, budget)
        found: list[_PricedChoice] = []
        for name in self._partitions(job):
            site = self._get_limits(name)
            for qos in self._qos(job, account):
                if found and budget.is_spent():
                    raise NoEstimate(
                        "too many combinations of --partition and --qos to price in time: "
                        "name fewer",
                        name,
                    )
                priced = self._price(site, qos, now)
                found.append((site, priced, qos, compute_size(job, site, priced)))
        return found

    def find_account(self, job: JobRequest) -> str:
        """Return the account that pays, in lower case as in Slurm; "" if unknown."""
        if job.account:
            return job.account.lower()
        user = self.model.users.get(job.uid, "")
        return (self.model.accounts.get(user) or self._settings.default_account).lower()

    def find_user(self, uid: int) -> str:
        """Return the name of a user that slurmdbd knows; "" for others."""
        return self.model.users.get(uid, "")

    def time_s(self, limit: int | None, site: PartitionLimits) -> int:
        """Return how long a job may hold its allocation, in seconds; ``limit`` is in minutes."""
        part = site.partition
        if limit is None:
            seconds = part.usual_time_s
        else:
            # Zero requests no time limit, see sbatch(1).
            seconds = limit * 60 if limit > 0 else part.max_time_s
        times = (seconds, part.over_time_s)
        return OVERRUN_S + sum(UNLIMITED_S if time is None else time for time in times)

    def _partitions(self, job: JobRequest) -> Sequence[str]:
        """Return the partitions that a job may use."""
        if not job.partition:
            default = self.model.default_partition
            return (default,) if default else ()
        if "," not in job.partition:
            return (job.partition,)
        return split_choices(job.partition, "--partition")

    def _qos(self, job: JobRequest, account: str) -> Sequence[str]:
        """Return the QOS that a job may use."""
        if not job.qos:
            if not self.model.accounting:
                return ("",)
            user = self.model.users.get(job.uid, "")
            return (self.model.qos.get(f"{account}/{user}") or _DEFAULT_QOS,)
        return (job.qos,) if "," not in job.qos else split_choices(job.qos, "--qos")

    def _get_limits(self, name: str) -> PartitionLimits:
        """Return the limits of a partition, from the cache if possible."""
        site = self._sites.get(name)
        if site is None:
            part = self.model.partitions.get(name)
            if part is None:
                raise NoEstimate(
                    f"unknown partition {name} on cluster {self.model.cluster}: Steward sees "
                    "a new partition within a minute",
                    name,
                )
            site = self._sites[name] = PartitionLimits(part, self.model)
        return site

    def _price(self, site: PartitionLimits, qos: str, now: datetime) -> PricedPartition:
        """Return the rate of a partition and QOS, from the cache if possible."""
        is_settled = self._last_change is None or now >= self._last_change
        priced = self._priced.get((site.name, qos)) if is_settled else None
        if priced is None:
            rate = find_rate(self._rates, self.model.cluster, site.name, qos, now)
            priced = PricedPartition(rate, site)
            if is_settled and len(self._priced) < _MOST_CACHED:
                self._priced[site.name, qos] = priced
        return priced

    def _explain_quote(self, quote: Quote, rate: Rate) -> Quote:
        """Add the lines that explain a quote."""
        use = ResourceUse(tres=quote.tres, seconds=quote.time_s, qos=quote.qos)
        price = compute_highest_price(use, rate)
        head = f"partition {quote.partition}" + (f", QOS {quote.qos}" if quote.qos else "")
        lines = [PriceLine(description=f"{head}, by rate {rate.number}"), *price.lines]
        if quote.tasks > 1:
            lines.append(
                PriceLine(description=f"x {quote.tasks:,} array tasks", amount=quote.amount)
            )
        return msgspec.structs.replace(quote, lines=tuple(lines))
