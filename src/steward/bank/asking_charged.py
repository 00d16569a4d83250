"""The action that tells what several jobs were charged, for lists of them."""

from datetime import datetime
from typing import Annotated, Final

import msgspec

from steward.bank.room import BankAnswer, BankRoom
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape

MOST: Final = 1000


class ChargedJob(Shape, frozen=True, kw_only=True):
    """A job that is asked about.

    Attributes:
        cluster: Its cluster.
        job_id: Its raw id.
        first_submit: Its first submit time, where the id may have been used before; None for any.
    """

    cluster: str
    job_id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    first_submit: datetime | None = None


class ChargedRequest(Request, frozen=True, kw_only=True):
    """bank.charged: what jobs were charged, each altogether.

    Attributes:
        jobs: Which.
    """

    jobs: Annotated[tuple[ChargedJob, ...], msgspec.Meta(max_length=MOST)]


class ChargedLine(Shape, frozen=True, kw_only=True):
    """What a job was charged.

    Attributes:
        cluster: Its cluster.
        job_id: Its raw id.
        account: Who paid.
        amount: All of it, micro-SU, refunds taken off.
    """

    cluster: str
    job_id: int
    account: str
    amount: int


class ChargedAnswer(BankAnswer, frozen=True, kw_only=True):
    """What jobs were charged.

    Attributes:
        jobs: Those of which something was charged, and which the asker may know of.
    """

    jobs: tuple[ChargedLine, ...]


def charged(room: BankRoom, asker: Asker, request: ChargedRequest) -> ChargedAnswer:
    """What jobs were charged; who may not know it of one is told nothing of it."""
    asked: dict[str, dict[int, datetime | None]] = {}
    for job in request.jobs:
        asked.setdefault(job.cluster, {})[job.job_id] = job.first_submit
    found: dict[tuple[str, int], ChargedLine] = {}
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for cluster, jobs in asked.items():
            for row in t.charges.of_jobs(cluster, jobs):
                charge = row.charge
                first = jobs[charge.job_id]
                if first is not None and charge.first_submit != first:
                    continue
                if not rights.leads(charge.account) and charge.user != rights.user:
                    continue
                key = (cluster, charge.job_id)
                before = found[key].amount if key in found else 0
                found[key] = ChargedLine(
                    cluster=cluster,
                    job_id=charge.job_id,
                    account=charge.account,
                    amount=before + charge.amount - row.refunded,
                )
    return ChargedAnswer(jobs=tuple(found.values()), **room.heading())


ACTIONS: Final = (
    Action(
        name="bank.charged",
        help="Say what jobs were charged, each altogether.",
        request=ChargedRequest,
        answer=ChargedAnswer,
        run=charged,
        only_reads=True,
    ),
)
