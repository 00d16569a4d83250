"""Charges what ran before Steward: from jobs.db, with what was imported, and from slurmdbd."""

from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.live import pricing_of
from steward.bank.reckoning import Reckoning
from steward.bank.reconciling import Difference, charges, settle
from steward.core.config import Settings
from steward.jobs import Jobs, database_path
from steward.slurm.client import Slurm

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger

WHY: Final = "backfill"


class Backfilled(msgspec.Struct, frozen=True, kw_only=True):
    """What a backfill came to.

    Attributes:
        charges: How many runs were charged, or would be.
        amount: What they cost altogether, micro-SU.
        unpriced: Runs that no rate says the price of.
        passed_over: Rows of slurmdbd that were not understood.
    """

    charges: int = 0
    amount: int = 0
    unpriced: tuple[Difference, ...] = ()
    passed_over: int = 0


def backfill(
    settings: Settings,
    ledger: "Ledger",
    cluster: str,
    since: datetime,
    until: datetime,
    *,
    is_dry: bool,
    now: datetime,
) -> Backfilled:
    """Charge all runs that ended in a time and were not charged yet.

    A repeat charges nothing anew: each run is charged under its own key. What was charged
    already stays as it is, for :func:`steward.bank.reconciling.reconcile` to correct.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        cluster: The cluster's name.
        since: What ended at this time or later.
        until: What ended before this time.
        is_dry: Whether to say only what would be charged.
        now: The present moment: nothing ends later.

    Raises:
        LedgerUnavailable: The ledger's database is away.
        SqliteUnavailable: There is no jobs.db yet.
        SlurmError: slurmdbd does not answer.
    """
    until = min(until, now)
    jobs = Jobs(database_path(settings.state_dir))
    passed_over = 0
    try:
        reckoning = Reckoning(
            *(cluster, jobs, pricing_of(settings, ledger, cluster)),
            lambda job_id: charges(ledger, cluster, job_id),
            with_imported=True,
        )
        found = settle(
            ledger, cluster, reckoning.of_jobs(since, until), why=WHY, is_dry=is_dry, only_new=True
        )
        of = settings.cluster.get(cluster)
        slurm = Slurm(cluster, of) if of and of.asks_slurm and not of.remote else None
        history = slurm.history() if slurm else None
        if slurm is not None and history is not None:
            due = reckoning.of_slurmdbd(history, since, until, slurm.people)
            found += settle(ledger, cluster, due, why=WHY, is_dry=is_dry, only_new=True)
            passed_over = history.passed_over
    finally:
        jobs.close()
    priced = [one for one in found if one.due is not None]
    return Backfilled(
        charges=len(priced),
        amount=sum((one.due or 0) - (one.charged or 0) for one in priced),
        unpriced=tuple(one for one in found if one.due is None),
        passed_over=passed_over,
    )
