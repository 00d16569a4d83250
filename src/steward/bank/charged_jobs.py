"""Charges of a job named by a person: ``123``, array task ``123_7``, component ``123+1``.

- :func:`find_job_charges` finds a job's charges, or raises :class:`NotCharged`.
- :func:`name_charged_jobs` turns charge keys into Slurm's job ids.
- :func:`explain_uncharged` explains why a job has no charges.
- :func:`resolve_raw_ids` resolves a job id to raw ids, with jobs.db.

Used by the bank's actions ``explain``, ``refund`` and ``statement``.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.billing import Pricing, compute_charge, get_hold_job_id
from steward.bank.enforcement import has_started
from steward.bank.errors import BankUsage, GateUnavailable, NoRate, NotInBank
from steward.bank.money import format_money
from steward.bank.records import parse_charge_key
from steward.core.errors import Unavailable
from steward.core.usage import RunEvent
from steward.jobs.job_ids import format_job_name
from steward.slurm.cluster_model import ClusterModel
from steward.slurm.job_states import FINISHED, strip_state_suffix

if TYPE_CHECKING:
    from steward.bank.context import BankContext, Rights
    from steward.bank.ledger import ChargeRow
    from steward.bank.ledger.ledger import Transaction
    from steward.jobs import Job


_MAX_NAMED: Final = 5000
"""Maximum number of charges whose job ids are looked up."""
_LOOKUP_BATCH: Final = 200
"""Number of jobs looked up in jobs.db at once."""


class NotCharged(NotInBank):
    """Error: the job has no charges; ``offender`` is its id."""


def find_job_charges(
    room: "BankContext", t: "Transaction", job: str, cluster: str = ""
) -> list["ChargeRow"]:
    """Return the charges of a job, oldest first; if Slurm reused the id, the newest job's.

    Raises:
        BankUsage: The job id is invalid.
        NotCharged: The job has no charges.
    """
    name = room.resolve_cluster(cluster)
    found: list[ChargeRow] = []
    for job_id in resolve_raw_ids(room, job, name):
        rows = t.charges.list_of_job(name, job_id)
        newest = max((row.charge.first_submit for row in rows), default=None)
        found += [row for row in rows if row.charge.first_submit == newest]
    if not found:
        raise NotCharged(f"nothing was charged for job {job} on {name}", job)
    return sorted(found, key=lambda row: (row.first_at, row.charge.key))


def name_charged_jobs(room: "BankContext", charges: Iterable[str]) -> dict[str, str]:
    """Return job ids in Slurm's notation for charges, where they differ from the raw id.

    Args:
        room: The context.
        charges: Charge keys; only the first 5000 are looked up.

    Returns:
        Ids like ``5_2`` of array tasks, by charge key.
    """
    keys: dict[str, dict[tuple[int, int], list[str]]] = {}
    for key in islice(charges, _MAX_NAMED):
        if (parts := parse_charge_key(key)) is not None:
            cluster, job_id, first = parts
            keys.setdefault(cluster, {}).setdefault((job_id, first), []).append(key)
    found: dict[str, str] = {}
    try:
        for cluster, jobs in keys.items():
            ids = sorted({job_id for job_id, _ in jobs})
            for start in range(0, len(ids), _LOOKUP_BATCH):
                for fact in room.jobs.list_run_events(cluster, ids[start : start + _LOOKUP_BATCH]):
                    job = fact.job_id, int(fact.first_submit.timestamp())
                    name = format_job_name(fact.record)
                    if job in jobs and name != str(fact.job_id):
                        found |= dict.fromkeys(jobs[job], name)
    except Unavailable:
        return found
    return found


def explain_uncharged(
    room: "BankContext", t: "Transaction", rights: "Rights", job: str, cluster: str
) -> str:
    """Explain why a job has no charges: it is pending, running, without a rate, or free.

    For a running job the text includes its hold and the price accrued so far.

    Args:
        room: The context.
        t: The ledger transaction.
        rights: The caller's rights: about others' jobs they learn only that there are no charges.
        job: The job id.
        cluster: Its cluster.
    """
    said = f"nothing was charged for job {job} on {cluster}"
    try:
        with room.jobs.snapshot():
            found = room.jobs.find(job, cluster)[:1]
            jobs = [*found, *(part for one in found for part in room.jobs.list_parts(one))]
    except Unavailable:
        return said
    mine = {one.job_id: one for one in jobs}.values()
    for one in mine:
        account = one.record.account.lower()
        if not rights.is_led(account) and (not rights.user or one.record.user != rights.user):
            return said
    running = [one for one in mine if has_started(one.record) and one.record.start is not None]
    ended = [one for one in mine if one.record.end is not None and one.record.start is not None]
    try:
        accrued = sum(_compute_accrued(room, t, one, cluster) for one in running or ended)
    except NoRate as error:
        return f"{said} yet: {error}; Steward then charges it"
    if running:
        held = _describe_hold(room, get_hold_job_id(running[0].record), cluster)
        return (
            f"{said} yet: it runs, and is charged when it ends; "
            f"{held}accrued so far: {format_money(accrued, room.unit)}"
        )
    if ended:
        return f"{said} yet: it ended, and Steward charges it within the hour"
    if any(strip_state_suffix(one.record.state) not in FINISHED for one in mine):
        held = _describe_hold(room, get_hold_job_id(next(iter(mine)).record), cluster)
        return f"{said} yet: it waits; {held}it is charged when it ends"
    return f"{said}: it never ran"


def _compute_accrued(room: "BankContext", t: "Transaction", job: "Job", cluster: str) -> int:
    """Return the price of a run until now, or until its end.

    Raises:
        NoRate: No rate applies.
    """
    kept = t.read_mark(f"picture:{cluster}")
    pricing = Pricing(
        settings=room.settings.bank,
        rates=t.export_rules().rates,
        picture=msgspec.json.decode(kept, type=ClusterModel) if kept else None,
        zone=room.get_time_zone(cluster),
    )
    fact = RunEvent(
        job_id=job.job_id,
        first_submit=job.first_submit,
        restarts=job.record.restarts,
        record=job.record,
    )
    charge = compute_charge(cluster, fact, pricing, seen_at=room.now())
    return charge.amount if charge is not None else 0


def _describe_hold(room: "BankContext", leader: int, cluster: str) -> str:
    """Describe a job's hold in a phrase."""
    try:
        holds = room.gate.holds(cluster=cluster, job_id=leader)
    except GateUnavailable:
        return "held: not known while the gate does not answer; "
    return f"held: {format_money(sum(hold.remaining for hold in holds), room.unit)}; "


def resolve_raw_ids(room: "BankContext", job: str, cluster: str) -> list[int]:
    """Return the raw job ids that a job id stands for: for an array, those of its tasks.

    Raises:
        BankUsage: The job id is invalid.
        NotInBank: No such job is known.
    """
    from steward.jobs import JobNameError

    try:
        with room.jobs.snapshot():
            found = room.jobs.find(job, cluster)
            parts = room.jobs.list_parts(found[0]) if found else []
    except JobNameError as error:
        raise BankUsage(str(error), job) from error
    except Unavailable:
        # Without jobs.db (absent or busy), a plain number still identifies a job.
        found, parts = [], []
    ids = [one.job_id for one in (*found[:1], *parts)]
    if not ids and job.isascii() and job.isdecimal():
        ids = [int(job)]
    if not ids:
        raise NotInBank(f"no job {job} is known on {cluster}", job)
    return list(dict.fromkeys(ids))
