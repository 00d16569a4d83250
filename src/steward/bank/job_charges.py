"""Charges of a job named by a person: ``123``, array task ``123_7``, component ``123+1``.

- :func:`find_job_charges` finds a job's charges, or raises :class:`NotCharged`.
- :func:`map_job_names` turns charge keys into Slurm's job ids.
- :func:`explain_uncharged` explains why a job has no charges.
- :func:`resolve_raw_ids` resolves a job id to raw ids, with jobs.db.

Used by the bank's actions ``explain``, ``refund`` and ``statement``.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

from steward.bank.billing import Pricing, compute_charge, get_hold_job_id
from steward.bank.enforcement import has_started
from steward.bank.errors import BankUsage, GateUnavailable, NoRate, NotInBank
from steward.bank.money import format_money
from steward.bank.records import parse_charge_key
from steward.core.errors import Unavailable
from steward.core.usage import RunEvent
from steward.jobs.job_ids import format_job_name
from steward.slurm.job_states import FINISHED, strip_state_suffix

if TYPE_CHECKING:
    from steward.bank.context import BankContext, Rights
    from steward.bank.ledger import ChargeRow
    from steward.bank.ledger.ledger import Transaction
    from steward.jobs import Job


_MAX_LOOKED_UP_CHARGES: Final = 5000
"""Maximum number of charges whose job ids are looked up."""
_LOOKUP_BATCH: Final = 200
"""Number of jobs looked up in jobs.db at once."""


class NotCharged(NotInBank):
    """Error: the job has no charges; ``offender`` is its id."""


def find_job_charges(
    context: "BankContext", t: "Transaction", job_name: str, cluster: str = ""
) -> list["ChargeRow"]:
    """Return the charges of a job, oldest first; if Slurm reused the id, the newest job's.

    Raises:
        BankUsage: The job id is invalid.
        NotCharged: The job has no charges.
    """
    cluster_name = context.resolve_cluster(cluster)
    charge_rows: list[ChargeRow] = []
    for job_id in resolve_raw_ids(context, job_name, cluster_name):
        rows = t.charges.list_of_job(cluster_name, job_id)
        newest = max((row.charge.first_submit for row in rows), default=None)
        charge_rows += [row for row in rows if row.charge.first_submit == newest]
    if not charge_rows:
        raise NotCharged(f"job {job_name} on {cluster_name} has no charges", job_name)
    return sorted(charge_rows, key=lambda row: (row.first_at, row.charge.key))


def map_job_names(context: "BankContext", charge_keys: Iterable[str]) -> dict[str, str]:
    """Return job ids in Slurm's notation for charges, where they differ from the raw id.

    Args:
        context: The context.
        charge_keys: Charge keys; only the first 5000 are looked up.

    Returns:
        Ids like ``5_2`` of array tasks, by charge key.
    """
    keys_by_job: dict[str, dict[tuple[int, int], list[str]]] = {}
    for key in islice(charge_keys, _MAX_LOOKED_UP_CHARGES):
        if (parts := parse_charge_key(key)) is not None:
            cluster, job_id, submit_s = parts
            keys_by_job.setdefault(cluster, {}).setdefault((job_id, submit_s), []).append(key)
    names: dict[str, str] = {}
    try:
        for cluster, jobs in keys_by_job.items():
            ids = sorted({job_id for job_id, _ in jobs})
            for start in range(0, len(ids), _LOOKUP_BATCH):
                for run in context.jobs.list_run_events(
                    cluster, ids[start : start + _LOOKUP_BATCH]
                ):
                    identity = run.job_id, int(run.first_submit.timestamp())
                    name = format_job_name(run.record)
                    if identity in jobs and name != str(run.job_id):
                        names |= dict.fromkeys(jobs[identity], name)
    except Unavailable:
        return names
    return names


def explain_uncharged(
    context: "BankContext", t: "Transaction", rights: "Rights", job_name: str, cluster: str
) -> str:
    """Explain why a job has no charges: it is pending, running, without a rate, or free.

    For a running job the text includes its hold and the price accrued so far.

    Args:
        context: The context.
        t: The ledger transaction.
        rights: The caller's rights: about others' jobs they learn only that there are no charges.
        job_name: The job id.
        cluster: Its cluster.
    """
    uncharged_text = f"job {job_name} on {cluster} has no charges"
    try:
        with context.jobs.snapshot():
            matches = context.jobs.find(job_name, cluster)[:1]
            jobs = [*matches, *(part for job in matches for part in context.jobs.list_parts(job))]
    except Unavailable:
        return uncharged_text
    unique_jobs = {job.job_id: job for job in jobs}.values()
    if not unique_jobs and not rights.is_operator:
        # As about a job of others: the text must not show which of them exist.
        return uncharged_text
    for job in unique_jobs:
        account = job.record.account.lower()
        if not rights.is_led(account) and (not rights.user or job.record.user != rights.user):
            return uncharged_text
    running = [
        job for job in unique_jobs if has_started(job.record) and job.record.start is not None
    ]
    ended = [
        job for job in unique_jobs if job.record.end is not None and job.record.start is not None
    ]
    try:
        accrued = sum(_compute_accrued(context, t, job, cluster) for job in running or ended)
    except NoRate as error:
        return (
            f"{uncharged_text} yet: {error}. "
            "Steward charges the job after its end, once a rate applies"
        )
    if running:
        hold_text = _describe_hold(context, get_hold_job_id(running[0].record), cluster)
        return (
            f"{uncharged_text} yet: it is running, and Steward charges it when it ends; "
            f"{hold_text}accrued so far: {format_money(accrued, context.unit)}"
        )
    if ended:
        return f"{uncharged_text} yet: it ended, and Steward charges it within an hour"
    if any(strip_state_suffix(job.record.state) not in FINISHED for job in unique_jobs):
        hold_text = _describe_hold(
            context, get_hold_job_id(next(iter(unique_jobs)).record), cluster
        )
        return f"{uncharged_text} yet: it is pending; {hold_text}Steward charges it when it ends"
    return f"{uncharged_text}: it never ran"


def _compute_accrued(context: "BankContext", t: "Transaction", job: "Job", cluster: str) -> int:
    """Return the price of a run until now, or until its end.

    Raises:
        NoRate: No rate applies.
    """
    pricing = Pricing(
        settings=context.settings.bank,
        rates=t.export_rules().rates,
        model=t.read_model(cluster),
        zone=context.get_time_zone(cluster),
    )
    run = RunEvent(
        job_id=job.job_id,
        first_submit=job.first_submit,
        restarts=job.record.restarts,
        record=job.record,
    )
    charge = compute_charge(cluster, run, pricing, seen_at=context.now())
    return charge.amount if charge is not None else 0


def _describe_hold(context: "BankContext", job_id: int, cluster: str) -> str:
    """Describe a job's hold in a phrase."""
    try:
        holds = context.gate.list_holds(cluster=cluster, job_id=job_id)
    except GateUnavailable:
        return "SU hold unknown while the gate does not answer; "
    return f"SU hold: {format_money(sum(hold.remaining for hold in holds), context.unit)}; "


def resolve_raw_ids(context: "BankContext", job_name: str, cluster: str) -> list[int]:
    """Return the raw job ids that a job id stands for: for an array, those of its tasks.

    Raises:
        BankUsage: The job id is invalid.
        NotInBank: No such job is known.
    """
    from steward.jobs import JobNameError

    try:
        with context.jobs.snapshot():
            jobs = context.jobs.find(job_name, cluster)
            parts = context.jobs.list_parts(jobs[0]) if jobs else []
    except JobNameError as error:
        raise BankUsage(str(error), job_name) from error
    except Unavailable:
        # Without jobs.db (absent or busy), a plain number still identifies a job.
        jobs, parts = [], []
    ids = [job.job_id for job in (*jobs[:1], *parts)]
    if not ids and job_name.isascii() and job_name.isdecimal():
        ids = [int(job_name)]
    if not ids:
        raise NotInBank(f"unknown job {job_name} on {cluster}", job_name)
    return list(dict.fromkeys(ids))
