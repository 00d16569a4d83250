"""One decision: what it is about, and what came of it."""

import msgspec

from steward.bank.gate.purses import Open
from steward.bank.records import Description, Mode, Quote

Shares = tuple[tuple[int, int], ...]


class Case(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job that somebody is to pay for.

    Attributes:
        cluster: Where it is.
        job: What it asks for, all of it.
        user: Its user's name; "" where that is not known.
        account: Who is to pay; "" where nothing says so.
        mode: What holds for it.
        now_us: The time, µs since the epoch.
        free_pass: Whether it is let in whatever the account has.
        first_submit_us: By which rates it is priced.
        is_started: Whether it runs already, so that nothing is put off.
        is_change: Whether its user wants to change it.
        is_again: Whether that is to begin another run of it.
        is_seen: Whether Slurm shows that it asks for all this.
        hold: What holds for it already; None for nothing.
    """

    cluster: str
    job: Description
    user: str
    account: str
    mode: Mode
    now_us: int
    free_pass: bool
    first_submit_us: int
    is_started: bool = False
    is_change: bool = False
    is_again: bool = False
    is_seen: bool = False
    hold: Open | None = None


class Short(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is missing.

    Attributes:
        needed: What the job needs, beyond what is held for it already, micro-SU.
        free: What it could have, micro-SU.
        what: Whose means are short: of the ``account``, of the ``user`` in it, the
            ``share`` of it that one user's jobs may take, what of it may be held for those
            that are ``unseen`` yet; or ``unknown`` where a myBRC server elsewhere should say.
        wait_s: After how many seconds it can be tried again; 0 where that is not known.
    """

    needed: int
    free: int
    what: str = "account"
    wait_s: int = 0


class Placing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A hold that is to be placed, or what one is to become.

    Attributes:
        account: Who pays.
        payer: Whose allocations are drawn on.
        needed: What the job needs altogether, micro-SU.
        amount: What is held, beyond what it has already; of one that is moved all of it.
        shares: Which allocations pay ``amount``.
        quote: What it covers.
        job: What was priced.
        is_moved: Whether all of it is held anew, in this account.
    """

    account: str
    payer: str
    needed: int
    amount: int
    shares: Shares
    quote: Quote
    job: Description
    is_moved: bool = False


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is to be answered and done.

    Attributes:
        ok: Whether the job may be.
        mode: What holds for it.
        user: Whose job it is, by name.
        account: Who is to pay; "" where nothing says so.
        say: What its user is told.
        qos: The QOS it is given instead.
        partition: The partition it is given instead.
        placing: The hold; None for none.
        sibling: The hold that covers it already.
        short: Why it is refused, or would be; "" if nothing speaks against it.
        quote: What it may cost; None where that was not asked, or nobody can tell.
        is_bound: Whether it must not take the account below its means.
        is_alarming: Whether operators should know, since a rate is missing.
    """

    ok: bool
    mode: Mode
    user: str = ""
    account: str = ""
    say: str = ""
    qos: str = ""
    partition: str = ""
    placing: Placing | None = None
    sibling: Open | None = None
    short: str = ""
    quote: Quote | None = None
    is_bound: bool = False
    is_alarming: bool = False


def refused(
    case: Case, why: str, *, quote: Quote | None = None, is_alarming: bool = False
) -> Decision:
    """It cannot be paid: said to the user, or only noted where it is let in all the same."""
    return Decision(
        ok=case.free_pass,
        mode=case.mode,
        user=case.user,
        account=case.account,
        say="" if case.free_pass else why,
        short=why,
        quote=quote,
        is_alarming=is_alarming,
    )
