"""Backfill: charge runs that ended before the bank started and have no charge yet.

:func:`backfill_cluster` computes the charges as reconciliation does, and marks them with
the name of its service principal, so that the bank sends no notices of them.
"""

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from steward.bank.gate_sync import load_pricing
from steward.bank.reconciliation import (
    DueCharges,
    describe_missing_records,
    post_due_charges,
    read_own_charges,
)
from steward.bank.records import ChargeDifference
from steward.core.config import Settings
from steward.core.principals import BACKFILL
from steward.jobs import Jobs, database_path
from steward.slurm.client import Slurm
from steward.slurm.errors import SlurmError

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger


class BackfillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a backfill.

    Attributes:
        charges: Number of runs charged, or to be charged in a dry run.
        amount: Sum of the charges, in micro-SU.
        unpriced: Runs without an applicable rate.
        passed_over: Number of rows of slurmdbd that could not be parsed.
        missing_records: Period without slurmdbd's records, with the cause; "" if there is none.
    """

    charges: int = 0
    amount: int = 0
    unpriced: tuple[ChargeDifference, ...] = ()
    passed_over: int = 0
    missing_records: str = ""


def backfill_cluster(
    settings: Settings,
    ledger: "Ledger",
    cluster: str,
    since: datetime,
    until: datetime,
    *,
    is_dry: bool,
    now: datetime,
    author: str = BACKFILL.name,
) -> BackfillResult:
    """Charge all runs that ended in a period and have no charge yet.

    The runs come from jobs.db, with those imported into it, and from slurmdbd, if that answers. A
    repeat charges nothing twice, by the runs' keys; :func:`reconcile_cluster` corrects existing
    charges.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        cluster: The cluster's name.
        since: Only runs that ended at this time or later.
        until: Only runs that ended before this time.
        is_dry: Whether to report charges without making them.
        now: The current time; nothing ends later.
        author: Author of the charges: the caller, or the service principal.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    until = min(until, now)
    jobs = Jobs(database_path(settings.state_dir))
    passed_over, missing_records = 0, ""
    try:
        due_charges = DueCharges(
            *(cluster, jobs, load_pricing(settings, ledger, cluster)),
            lambda job_id: read_own_charges(ledger, cluster, job_id),
            with_imported=True,
        )
        differences = post_due_charges(
            ledger,
            cluster,
            due_charges.iter_from_jobs(since, until),
            why=BACKFILL.name,
            author=author,
            is_dry=is_dry,
            only_new=True,
        )
        try:
            cluster_settings = settings.cluster.get(cluster)
            slurm = (
                Slurm(cluster, cluster_settings)
                if cluster_settings and cluster_settings.asks_slurm and not cluster_settings.remote
                else None
            )
            history = slurm.history() if slurm else None
            if slurm is not None and history is not None:
                differences += post_due_charges(
                    ledger,
                    cluster,
                    due_charges.iter_from_slurmdbd(history, since, until, slurm.resolver),
                    why=BACKFILL.name,
                    author=author,
                    is_dry=is_dry,
                    only_new=True,
                )
                passed_over = history.passed_over
        except SlurmError as error:
            missing_records = describe_missing_records(since, until, error)
    finally:
        jobs.close()
    priced = [difference for difference in differences if difference.recomputed is not None]
    return BackfillResult(
        charges=len(priced),
        amount=sum(
            (difference.recomputed or 0) - (difference.charged or 0) for difference in priced
        ),
        unpriced=tuple(difference for difference in differences if difference.recomputed is None),
        passed_over=passed_over,
        missing_records=missing_records,
    )
