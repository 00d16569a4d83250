"""What a myBRC server elsewhere is to be told, put into the ledger's outbox.

It goes there in the transaction that makes it true, so nothing is told that
did not happen, nothing that happened is forgotten, and nobody waits for it.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Transaction

KIND: Final = "mybrc"
"""Of such things in the outbox."""


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job as a server elsewhere knows it.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id, which is its name there.
        first_submit: When it was first submitted.
        account: Who pays.
        uid: Whose it is; -1 where nobody knew when it was queued, and it is asked again.
        partition: Where it is to run, or ran.
        qos: Its QOS.
        state: Its state, in Slurm's word.
        start: When it started.
        end: When it ended.
        cpus: How many CPUs it has; 0 where that is not known.
    """

    cluster: str
    job_id: int
    first_submit: datetime
    account: str
    uid: int
    partition: str = ""
    qos: str = ""
    state: str = ""
    start: datetime | None = None
    end: datetime | None = None
    cpus: int = 0


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to tell.

    Attributes:
        op: ``hold``, a running job and its hold; ``change``, the job's cost for its account so
            far, which is read from the ledger when it is sent: the last message is the right
            one, whatever the order.
        told: The job.
        amount: Of a hold, micro-SU.
    """

    op: Literal["hold", "change"]
    told: Told
    amount: int = 0


def describe(payload: bytes) -> str:
    """Say in a few words what a message in the outbox tells."""
    message = msgspec.json.decode(payload, type=Message)
    told = message.told
    what = "the hold of" if message.op == "hold" else "what it costs:"
    return f"{what} job {told.job_id} of cluster {told.cluster}, account {told.account}"


def told_hold(t: "Transaction", told: Told, amount: int) -> None:
    """Queue the hold of a running job, once for each job; array tasks have no hold of their own.

    A server stores a job without a start time and counts no usage for it. The final
    PUT then subtracts an amount that the server never added. So a job needs a start time.

    Args:
        t: The transaction.
        told: The job, which has a start time.
        amount: What is held, micro-SU.
    """
    if told.start is None:
        return
    first = int(told.first_submit.timestamp())
    key = f"hold/{told.cluster}/{told.job_id}/{first}"
    _put(t, Message(op="hold", told=told, amount=amount), key)


def told_change(t: "Transaction", told: Told) -> None:
    """Queue the cost of a job so far: it was charged, or its hold released.

    Args:
        t: The transaction, after the charge in it.
        told: The job.
    """
    _put(t, Message(op="change", told=told), "")


def _put(t: "Transaction", message: Message, key: str) -> None:
    if not message.told.account:
        return  # the API knows no job without one
    t.outbox.put(KIND, msgspec.json.encode(message), key=key)
