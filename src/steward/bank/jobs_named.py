"""Which charges are meant where a person names a job: ``123``, ``123_7``, ``123+1``."""

from typing import TYPE_CHECKING

from steward.bank.errors import BankUsage, NotInBank
from steward.errors import Unavailable

if TYPE_CHECKING:
    from steward.bank.ledger import ChargeRow
    from steward.bank.ledger.opened import Transaction
    from steward.bank.room import BankRoom


def charges_of(
    room: "BankRoom", t: "Transaction", job: str, cluster: str = ""
) -> list["ChargeRow"]:
    """The charges of a job, oldest first; of an id that Slurm used again, the newest job's.

    Raises:
        BankUsage: It is no job's name.
        NotInBank: Nothing was charged for it.
    """
    name = room.cluster(cluster)
    found: list[ChargeRow] = []
    for job_id in raw_ids(room, job, name):
        rows = t.charges.of_job(name, job_id)
        newest = max((row.charge.first_submit for row in rows), default=None)
        found += [row for row in rows if row.charge.first_submit == newest]
    if not found:
        raise NotInBank(f"nothing was charged for job {job} on {name}: has it ended?", job)
    return sorted(found, key=lambda row: (row.first_at, row.charge.key))


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
