"""Which charges are meant where a person names a job: ``123``, ``123_7``, ``123+1``."""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.billing import Pricing, charge_of, leader_of
from steward.bank.enforcement import has_started
from steward.bank.errors import BankUsage, GateUnavailable, NoRate, NotInBank
from steward.bank.money import show
from steward.core.errors import Unavailable
from steward.core.usage import RunFact
from steward.jobs.job_ids import display
from steward.slurm.cluster_model import Picture
from steward.slurm.job_states import FINISHED, base_state

if TYPE_CHECKING:
    from steward.bank.context import BankRoom, Rights
    from steward.bank.ledger import ChargeRow
    from steward.bank.ledger.ledger import Transaction
    from steward.jobs import Job


_MOST_NAMED: Final = 5000
_KEY_PARTS: Final = 5
_AT_ONCE: Final = 200


class NotCharged(NotInBank):
    """Nothing was charged for a job; ``offender`` is its name."""


def charges_of(
    room: "BankRoom", t: "Transaction", job: str, cluster: str = ""
) -> list["ChargeRow"]:
    """The charges of a job, oldest first; of an id that Slurm used again, the newest job's.

    Raises:
        BankUsage: It is no job's name.
        NotCharged: Nothing was charged for it.
    """
    name = room.cluster(cluster)
    found: list[ChargeRow] = []
    for job_id in raw_ids(room, job, name):
        rows = t.charges.of_job(name, job_id)
        newest = max((row.charge.first_submit for row in rows), default=None)
        found += [row for row in rows if row.charge.first_submit == newest]
    if not found:
        raise NotCharged(f"nothing was charged for job {job} on {name}", job)
    return sorted(found, key=lambda row: (row.first_at, row.charge.key))


def names_of(room: "BankRoom", charges: Iterable[str]) -> dict[str, str]:
    """What Slurm calls the jobs of charges, where that is not their raw id: array tasks.

    Args:
        room: The context.
        charges: Keys of charges; of more than some thousands the first.

    Returns:
        Names like ``5_2`` by key.
    """
    keys: dict[str, dict[tuple[int, int], list[str]]] = {}
    for key in islice(charges, _MOST_NAMED):
        parts = key.split("/")
        if len(parts) == _KEY_PARTS:
            cluster, job_id, first, *_ = parts
            keys.setdefault(cluster, {}).setdefault((int(job_id), int(first)), []).append(key)
    found: dict[str, str] = {}
    try:
        for cluster, jobs in keys.items():
            ids = sorted({job_id for job_id, _ in jobs})
            for start in range(0, len(ids), _AT_ONCE):
                for fact in room.jobs.run_facts(cluster, ids[start : start + _AT_ONCE]):
                    job = fact.job_id, int(fact.first_submit.timestamp())
                    name = display(fact.record)
                    if job in jobs and name != str(fact.job_id):
                        found |= dict.fromkeys(jobs[job], name)
    except Unavailable:
        return found
    return found


def why_uncharged(
    room: "BankRoom", t: "Transaction", rights: "Rights", job: str, cluster: str
) -> str:
    """Why nothing was charged for a job: it waits, it runs, it has no rate, it cost nothing.

    Of a job that runs it tells what is held, and what is accrued by now.

    Args:
        room: The context.
        t: The ledger.
        rights: The asker's: of others' jobs they are told no more than that nothing was charged.
        job: The job's name.
        cluster: Its cluster.
    """
    said = f"nothing was charged for job {job} on {cluster}"
    try:
        with room.jobs.snapshot():
            found = room.jobs.find(job, cluster)[:1]
            jobs = [*found, *(part for one in found for part in room.jobs.parts_of(one))]
    except Unavailable:
        return said
    mine = {one.job_id: one for one in jobs}.values()
    for one in mine:
        account = one.record.account.lower()
        if not rights.leads(account) and (not rights.user or one.record.user != rights.user):
            return said
    running = [one for one in mine if has_started(one.record) and one.record.start is not None]
    ended = [one for one in mine if one.record.end is not None and one.record.start is not None]
    try:
        accrued = sum(_accrued(room, t, one, cluster) for one in running or ended)
    except NoRate as error:
        return f"{said} yet: {error}; Steward then charges it"
    if running:
        held = _held(room, leader_of(running[0].record), cluster)
        return (
            f"{said} yet: it runs, and is charged when it ends; "
            f"{held}accrued so far: {show(accrued, room.unit)}"
        )
    if ended:
        return f"{said} yet: it ended, and Steward charges it within the hour"
    if any(base_state(one.record.state) not in FINISHED for one in mine):
        held = _held(room, leader_of(next(iter(mine)).record), cluster)
        return f"{said} yet: it waits; {held}it is charged when it ends"
    return f"{said}: it never ran"


def _accrued(room: "BankRoom", t: "Transaction", job: "Job", cluster: str) -> int:
    """What a run comes to until now, or until its end.

    Raises:
        NoRate: Nothing says what it costs.
    """
    kept = t.mark(f"picture:{cluster}")
    pricing = Pricing(
        settings=room.settings.bank,
        rates=t.rules().rates,
        picture=msgspec.json.decode(kept, type=Picture) if kept else None,
        zone=room.zone(cluster),
    )
    fact = RunFact(
        job_id=job.job_id,
        first_submit=job.first_submit,
        restarts=job.record.restarts,
        record=job.record,
    )
    charge = charge_of(cluster, fact, pricing, seen_at=room.now())
    return charge.amount if charge is not None else 0


def _held(room: "BankRoom", leader: int, cluster: str) -> str:
    try:
        holds = room.gate.holds(cluster=cluster, job_id=leader)
    except GateUnavailable:
        return "held: not known while the gate does not answer; "
    return f"held: {show(sum(hold.remaining for hold in holds), room.unit)}; "


def raw_ids(room: "BankRoom", job: str, cluster: str) -> list[int]:
    """The raw ids that a job's name stands for: of an array all of its tasks'.

    Raises:
        BankUsage: It is no job's name.
        NotInBank: Nobody knows of such a job.
    """
    from steward.jobs import JobNameError

    try:
        with room.jobs.snapshot():
            found = room.jobs.find(job, cluster)
            parts = room.jobs.parts_of(found[0]) if found else []
    except JobNameError as error:
        raise BankUsage(str(error), job) from error
    except Unavailable:
        # jobs.db is not there yet, or busy: a plain number names a job without it.
        found, parts = [], []
    ids = [one.job_id for one in (*found[:1], *parts)]
    if not ids and job.isascii() and job.isdecimal():
        ids = [int(job)]
    if not ids:
        raise NotInBank(f"no job {job} is known on {cluster}", job)
    return list(dict.fromkeys(ids))
