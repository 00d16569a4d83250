"""What goes over the gate's two sockets, and what the gate tells of itself.

One line of JSON each way. The plugin's requests are :class:`Submit`, answered by
:class:`Said`; Steward's own processes send :class:`Call` and get :class:`Result`.
"""

from datetime import datetime
from typing import Final, Literal

import msgspec

from steward.bank.ledger import Refusal
from steward.bank.records import Books, Description, Hold, Mode, Noun, Quote, Settlement
from steward.core.events import HoldFact

VERSION: Final = 1
CONTROL_SOCKET: Final = "gate.sock"
"""Of Steward's own processes, in the state directory."""
LONGEST_REQUEST: Final = 1 << 20
"""Of the plugin's, in bytes: the most that ``LONGEST_TEXTS`` can become in JSON."""
LONGEST_CALL: Final = 64 << 20
"""Of Steward's own, in bytes: all accounts at once."""


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """What the submit plugin asks, or another gate that passes its question on.

    Attributes:
        v: The protocol's version.
        op: ``submit`` for a new job, ``modify`` for a change to one.
        cluster: The cluster's name.
        job: What is asked for; of a change only what is to change.
        id: Tells the answers of one connection apart; 0 where there is one answer only.
        jobs: How a command named the jobs that it changes (``2_3``).
        by: The uid that submits or changes; -1 where that is not said.
        oversize: The first text that is longer than the plugin sends, by its field; what
            was sent of it is its beginning. "" where all is sent.
    """

    v: int
    op: Literal["submit", "modify"]
    cluster: str
    job: Description
    id: int = 0
    jobs: str = ""
    by: int = -1
    oversize: str = ""


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the plugin is answered. Text that is empty is left out and changes nothing.

    Attributes:
        v: The protocol's version.
        ok: Whether the job may be.
        say: What the user is told, some lines.
        admin_comment: What the job's is to be, all of it.
        qos: The QOS it is to have instead.
        partition: The partition it is to have instead.
        account: The account it is to have instead.
        id: As it was asked.
    """

    v: int
    ok: bool
    admin_comment: str = ""
    say: str = ""
    qos: str = ""
    partition: str = ""
    account: str = ""
    id: int = 0


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What one of Steward's own processes asks."""

    v: int
    op: str
    body: msgspec.Raw = msgspec.Raw(b"null")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What it is answered.

    Attributes:
        ok: Whether it was done.
        body: What it gave.
        kind: Name of the error's class.
        say: The error.
    """

    ok: bool
    body: msgspec.Raw = msgspec.Raw(b"null")
    kind: str = ""
    say: str = ""


class Allowance(Noun, frozen=True):
    """Leave for one job to pass whatever its account has.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id; an array's for each of its tasks.
        by: Who allowed it.
        until_us: When it ends, µs since the epoch.
        reason: Why, for the log.
        is_once: Whether it is for a change of root's alone, which the next poll shows: changes
            that others send later are decided on.
    """

    cluster: str
    job_id: int
    by: str
    until_us: int
    reason: str = ""
    is_once: bool = False


class Granted(Noun, frozen=True):
    """A change that Steward is about to send for a user.

    Attributes:
        ask: The change, from the user's uid.
        user: The user's name.
        restarts: How often the job was requeued before the run that the change is for.
    """

    ask: Submit
    user: str
    restarts: int = 0


class Seen(Noun, frozen=True):
    """A job that Slurm shows.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id; an array's for each of its tasks.
        uid: Whose it is, by Slurm's word.
        admin_comment: May carry a token.
        started: Whether it has started.
        restarts: How often it was requeued.
    """

    cluster: str
    job_id: int
    uid: int
    admin_comment: str = ""
    started: bool = False
    restarts: int = 0


class Change(Noun, frozen=True):
    """A change that the gate accepted and Slurm may have rejected.

    Attributes:
        job: The fields that change.
        is_of_tasks: Whether the change is for single tasks of an array.
    """

    job: Description
    is_of_tasks: bool = False


class Changes(Noun, frozen=True):
    """What a job may ask for besides the description that its hold covers.

    Attributes:
        tasks: Descriptions of an array's tasks that differ from the one that the hold covers.
        of_tasks: Descriptions that updates of single tasks may have made. squeue shows a waiting
            task like its array.
        nodes: Node count that the job may ask for although the queue shows fewer; 0 for none.
        asked: Pending changes in their order: no poll has shown them.
    """

    tasks: tuple[Description, ...] = ()
    of_tasks: tuple[Description, ...] = ()
    nodes: int = 0
    asked: tuple[Change, ...] = ()


class Claim(Noun, frozen=True):
    """A job in the queue that wants a hold.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw id; an array's for all of its tasks.
        description: What it asks for; of an array the tasks that are not settled yet.
        tasks: Descriptions of an array's tasks that differ from it.
        first_submit_us: When it was submitted first: by that it is priced. 0 for now.
        started: Whether it has started.
        mode_credit: Whether it is held whatever the account has.
        is_exact: Whether a hold that is too large is made smaller.
        starts: When the array's tasks that run have started, µs since the epoch, where only
            what is held already for the others is to move to allocations that have not
            ended; None otherwise.
    """

    cluster: str
    job_id: int
    description: Description
    tasks: tuple[Description, ...] = ()
    first_submit_us: int = 0
    started: bool = False
    mode_credit: bool = False
    is_exact: bool = False
    starts: tuple[int, ...] | None = None


class Covered(Noun, frozen=True):
    """What became of a claim.

    Attributes:
        hold: The hold that covers it; None where there is none.
        is_paid: Whether the job may be.
        why: Why it may not, for its user.
    """

    hold: Hold | None = None
    is_paid: bool = True
    why: str = ""


class Verdict(Noun, frozen=True):
    """What would be said of a job, if it were submitted now.

    Attributes:
        ok: Whether it would be let in.
        say: What speaks against it, also where it would be let in all the same.
        quote: What it may cost; None where nobody can tell.
        chosen: Where the cost was told, the mode that somebody has set; None for nobody.
    """

    ok: bool
    say: str = ""
    quote: Quote | None = None
    chosen: Mode | None = None


class Means(Noun, frozen=True):
    """What an account can pay now.

    Attributes:
        account: Its name.
        payer: Whose allocations are drawn on.
        available: What a new job may cost, micro-SU.
        balance: What the active allocations hold, micro-SU.
        held: What of that is spoken for, micro-SU.
        credit: What the payer may owe, micro-SU.
        user_limit: What the user may spend of the account; None for no limit.
        user_spent: What the user has spent of it.
        user_held: What is held for the user's jobs.
        at_us: When a myBRC server elsewhere said what the account has, µs since the epoch; 0
            where none did.
    """

    account: str
    payer: str
    available: int
    balance: int
    held: int
    credit: int = 0
    user_limit: int | None = None
    user_spent: int = 0
    user_held: int = 0
    at_us: int = 0


class RemoteMeans(Noun, frozen=True):
    """How far an account's balance is that of a myBRC server elsewhere.

    Attributes:
        at_us: When the server said it, µs since the epoch.
        limits: What users may spend of the account by the server's word, what they have spent
            included: micro-SU by name. Of the others the account's means are the bound.
    """

    at_us: int
    limits: dict[str, int] = msgspec.field(default_factory=dict)


class Tally(Noun, frozen=True):
    """What a gate answered submit plugins since it began.

    Attributes:
        allowed: Requests that it let in.
        refused: Requests that it refused.
        by_policy: Those of both that the policy answered, since the gate could not decide.
        spent_us: Time that the answers took, from when a request was there.
        slowest_us: The longest of these times.
    """

    allowed: int = 0
    refused: int = 0
    by_policy: int = 0
    spent_us: int = 0
    slowest_us: int = 0


class Held(Noun, frozen=True):
    """What is held of an account, for the jobs of all whose money it is.

    Attributes:
        account: The account that pays.
        holds: How many are open.
        held: What they hold, micro-SU.
    """

    account: str
    holds: int
    held: int


class GateState(Noun, frozen=True):
    """How the gate stands.

    Attributes:
        position: Of the ledger, as far as it is known here.
        settled: The last settlement that was taken.
        rules: Position of the rules; -1 where there are none yet.
        facts: The last fact that was told.
        holds: How many are open.
        held: What they hold, micro-SU.
        pictures: When each cluster was pictured, µs since the epoch.
        deciding: Whether it decides; otherwise the policy does, or another gate.
        why: Why not.
        fence: Of the lease that it decides by; 0 without one.
        books_at_us: When the ledger last said anything; 0 for never.
        asked_at_us: When a submit plugin asked last, to the minute; 0 for never.
        tally: What it answered since it began.
        remote_at_us: Where balances are those of a myBRC server elsewhere, the oldest of the
            times at which it said them; 0 for none.
    """

    position: int = 0
    settled: int = 0
    rules: int = -1
    facts: int = 0
    holds: int = 0
    held: int = 0
    pictures: dict[str, int] = msgspec.field(default_factory=dict)
    deciding: bool = False
    why: str = ""
    fence: int = 0
    books_at_us: int = 0
    asked_at_us: int = 0
    tally: Tally = Tally()
    remote_at_us: int = 0


class GateFact(Noun, frozen=True):
    """Something that the gate did, for the journal and the ledger.

    Attributes:
        seq: Grows; also where the gate's database is lost.
        kind: An event's kind (``hold.placed``), or ``refusal``.
        at_us: When it was done.
        cluster: On which cluster; "" for what is no job's.
        hold: What became of a hold.
        refusal: What was refused, or would have been.
    """

    seq: int
    kind: str
    at_us: int
    cluster: str = ""
    hold: HoldFact | None = None
    refusal: Refusal | None = None


class Looked(Noun, frozen=True):
    """A cluster's queue was seen whole."""

    cluster: str
    began: datetime


class Asked(Noun, frozen=True):
    """A question about a job that is not there yet.

    Attributes:
        cluster: The cluster's name.
        description: What it would ask for.
        user: Its user's name, where who asks knows it; else it is looked up.
        cost: What it costs, micro-SU, where who asks has reckoned that; the verdict is then
            that of mode ``gate``, whatever the mode.
    """

    cluster: str
    description: Description
    user: str = ""
    cost: int | None = None


class Wanted(Noun, frozen=True):
    """Which holds are to be listed; "" and 0 for any.

    Attributes:
        changed: Only those of jobs with a change that no poll has shown.
    """

    account: str = ""
    cluster: str = ""
    user: str = ""
    job_id: int = 0
    changed: bool = False
    after: str = ""
    limit: int = 1000


class Stood(Noun, frozen=True):
    """An account, and a user in it, of which the means are asked."""

    account: str
    user: str = ""


class Settled(Noun, frozen=True):
    """Charges that are in the ledger, and the books that show them."""

    settlements: tuple[Settlement, ...] = ()
    books: Books | None = None


class Released(Noun, frozen=True):
    """A hold that is to be given back, and the books that show why."""

    hold: str
    why: str = ""
    books: Books | None = None


class Reserved(Noun, frozen=True):
    """Money that is to leave an account."""

    account: str
    amount: int
    why: str = ""
    allocation: int = 0


class Leased(Noun, frozen=True):
    """The right to decide, for so many seconds."""

    fence: int
    valid_s: float
    secret: str = ""
