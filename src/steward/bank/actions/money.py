"""The actions that move money: deposit, withdraw, transfer, refund, adjust.

Each has a reason, and a key that makes a repeat harmless. Money that leaves an
account is taken off what the gate gives out before it is taken off the ledger,
so that no job is let in for money that is on its way out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.context import BankAnswer, BankRoom
from steward.bank.errors import BankUsage, GateUnavailable
from steward.bank.ledger import By, Transfer
from steward.core.access import Asker
from steward.core.actions import Action, Request

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


_OPERATORS: Final = "move money"


class DepositRequest(Request, frozen=True, kw_only=True):
    """bank.deposit: new money for an account.

    Attributes:
        account: Who gets it.
        amount: Micro-SU, above zero.
        reason: Why, for the books.
        key: The caller's name for it; "" for none.
        allocation: Number of the allocation; 0 for the account's open-ended one.
    """

    account: str
    amount: int
    reason: str
    key: str = ""
    allocation: int = 0


class WithdrawRequest(DepositRequest, frozen=True, kw_only=True):
    """bank.withdraw: money that an account has no more; the attributes are a deposit's."""


class TransferRequest(Request, frozen=True, kw_only=True):
    """bank.transfer: money from one account to another.

    Attributes:
        source: Who gives it.
        target: Who gets it.
        amount: Micro-SU, above zero.
        reason: Why, for the books.
        key: The caller's name for it; "" for none.
        source_allocation: The allocation that gives it; 0 to leave that to the ledger.
        target_allocation: The allocation that gets it; 0 for the open-ended one.
    """

    source: str
    target: str
    amount: int
    reason: str
    key: str = ""
    source_allocation: int = 0
    target_allocation: int = 0


class RefundRequest(Request, frozen=True, kw_only=True):
    """bank.refund: what was used is given back, of a job or at large.

    Attributes:
        account: Who gets it; "" where a job is named.
        job: A job as Slurm names it; all charges of it are meant. "" for none.
        cluster: The job's cluster; "" for the first.
        amount: Micro-SU; None for all that the job was charged.
        user: Whose use it takes off; "" for nobody's.
        reason: Why, for the books.
        key: The caller's name for it; "" for none.
    """

    account: str = ""
    job: str = ""
    cluster: str = ""
    amount: int | None = None
    user: str = ""
    reason: str = ""
    key: str = ""


class AdjustRequest(DepositRequest, frozen=True, kw_only=True):
    """bank.adjust: a correction by hand; a deposit's attributes, with an amount below zero, too."""


class MovedAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was moved.

    Attributes:
        transfers: What was entered.
        key: The caller's name for it.
        repeated: Whether it had been done before under that key, and nothing was done now.
        balances: What the accounts have now, in their active allocations.
        gate_knows: Whether the gate reckons with it already; it is told soon otherwise.
    """

    transfers: tuple[Transfer, ...]
    key: str = ""
    repeated: bool = False
    balances: dict[str, int] = msgspec.field(default_factory=dict)
    gate_knows: bool = False


Move = Callable[["Transaction", By], tuple[Transfer, ...]]
"""Moves the money."""


def deposit(room: BankRoom, asker: Asker, request: DepositRequest) -> MovedAnswer:
    """Give an account new money.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no such account, no reason, or it is no amount.
    """
    _positive(request.amount)

    def move(t: "Transaction", by: By) -> tuple[Transfer, ...]:
        return (
            t.transfers.deposit(request.account, request.amount, by, allocation=request.allocation),
        )

    return _moved(room, asker, request, (request.account,), move)


def withdraw(room: BankRoom, asker: Asker, request: WithdrawRequest) -> MovedAnswer:
    """Take money away from an account, as far as it is not spoken for.

    Raises:
        BankRefused: The asker is no operator, or the account has not so much that is free.
        BankUsage: There is no such account, no reason, or it is no amount.
        GateUnavailable: The gate is away, so nobody knows what is free.
    """
    _positive(request.amount)

    def move(t: "Transaction", by: By) -> tuple[Transfer, ...]:
        return (
            t.transfers.withdraw(
                request.account, request.amount, by, allocation=request.allocation
            ),
        )

    with _reserved(room, asker, request.account, request.amount, request, request.allocation):
        return _moved(room, asker, request, (request.account,), move)


def transfer(room: BankRoom, asker: Asker, request: TransferRequest) -> MovedAnswer:
    """Give money of one account to another; raises as :func:`withdraw`."""
    _positive(request.amount)

    def move(t: "Transaction", by: By) -> tuple[Transfer, ...]:
        return (
            t.transfers.transfer(
                request.source,
                request.target,
                request.amount,
                by,
                source_allocation=request.source_allocation,
                target_allocation=request.target_allocation,
            ),
        )

    both = (request.source, request.target)
    with _reserved(room, asker, request.source, request.amount, request, request.source_allocation):
        return _moved(room, asker, request, both, move)


def refund(room: BankRoom, asker: Asker, request: RefundRequest) -> MovedAnswer:
    """Give back what was charged.

    Raises:
        BankRefused: The asker is no operator, or more is to be given back than was charged.
        BankUsage: Neither account nor job is named, or there is no such charge.
    """
    if bool(request.account) == bool(request.job):
        raise BankUsage("name either an account and an amount, or a job: 'refund --job 123'")
    if request.amount is not None:
        _positive(request.amount)
    if request.job:
        return _moved(room, asker, request, (), lambda t, by: _of_job(room, t, by, request))
    if request.amount is None:
        raise BankUsage("say how much: 'refund physics 12.5'")
    amount = request.amount

    def move(t: "Transaction", by: By) -> tuple[Transfer, ...]:
        return (t.transfers.refund(request.account, amount, by, user=request.user),)

    return _moved(room, asker, request, (request.account,), move)


def adjust(room: BankRoom, asker: Asker, request: AdjustRequest) -> MovedAnswer:
    """Correct what an account has, by hand.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no such account, no reason, or nothing to be changed.
    """
    if not request.amount:
        raise BankUsage("an adjustment of nothing changes nothing")

    def move(t: "Transaction", by: By) -> tuple[Transfer, ...]:
        return (
            t.transfers.adjust(request.account, request.amount, by, allocation=request.allocation),
        )

    if request.amount >= 0:
        return _moved(room, asker, request, (request.account,), move)
    with _reserved(room, asker, request.account, -request.amount, request, request.allocation):
        return _moved(room, asker, request, (request.account,), move)


_Moving = DepositRequest | TransferRequest | RefundRequest | AdjustRequest


def _moved(
    room: BankRoom, asker: Asker, request: _Moving, accounts: tuple[str, ...], move: Move
) -> MovedAnswer:
    _reasoned(request.reason)
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        # Each of the accounts is there, or the name is said that is none.
        named = [t.accounts.need(name.lower()).name for name in accounts]
        transfers = move(t, room.by(asker, request.reason, request.key))
        repeated = t.seq == before
        named = named or list(dict.fromkeys(one.account for one in transfers))
        balances = {name: t.reading.balance(name) for name in named}
    return MovedAnswer(
        transfers=transfers,
        key=request.key,
        repeated=repeated,
        balances=balances,
        gate_knows=room.tell_gate(before),
        **room.heading(),
    )


@contextmanager
def _reserved(
    room: BankRoom, asker: Asker, account: str, amount: int, request: _Moving, allocation: int
) -> Iterator[None]:
    """Have the gate set money aside that is to leave, until the ledger has it no more.

    Raises:
        BankRefused: It is not free, or the asker may not.
        GateUnavailable: There is a gate, but it does not answer.
    """
    _reasoned(request.reason)
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        t.accounts.need(account.lower())
        done = bool(request.key) and t.transfers.by_key(request.key) is not None
    if done or not room.has_gate:
        yield
        return
    gate = room.gate
    try:
        hold = gate.reserve(account.lower(), amount, request.reason, allocation)
    except GateUnavailable as error:
        raise GateUnavailable(
            f"the gate is away, which knows what of {account} is free: start 'steward serve' "
            f"({error})",
            account,
        ) from error
    try:
        yield
    finally:
        try:
            known = gate.state().position
            # With the books, for the gate must not forget the one before it has the other.
            with room.ledger.reading() as t:
                books = t.books(known)
                gate.release(hold.id, "the money has left, or was not let go", books=books)
        except GateUnavailable:
            # It lapses by itself; until then there seems to be too little, never too much.
            pass


def _of_job(
    room: BankRoom, t: "Transaction", by: By, request: RefundRequest
) -> tuple[Transfer, ...]:
    """What refunds the charges of a job, oldest first."""
    from steward.bank.charged_jobs import charges_of

    rows = charges_of(room, t, request.job, request.cluster)
    left = request.amount
    done: list[Transfer] = []
    for row in rows:
        charge = row.charge
        rest = charge.amount - row.refunded
        key = f"{by.key}/{charge.key}" if by.key else ""
        earlier = t.transfers.by_key(key) if key else None
        if earlier is not None:
            done.append(earlier)
            left = None if left is None else left - earlier.amount
            continue
        amount = rest if left is None else min(left, rest)
        if amount > 0:
            own = By(who=by.who, why=by.why, key=key, at=by.at)
            done.append(t.transfers.refund_charge(charge.key, own, amount=amount))
            left = None if left is None else left - amount
    if not done:
        raise BankUsage(f"nothing that job {request.job} was charged is left to give back")
    if left:
        raise BankUsage(f"job {request.job} was not charged so much: nothing was given back")
    return tuple(done)


def _positive(amount: int) -> None:
    if amount <= 0:
        raise BankUsage("an amount that moves is above zero: 'adjust' takes others", amount)


def _reasoned(reason: str) -> None:
    if not reason.strip():
        raise BankUsage("say why with --reason: it stands in the books for good")


ACTIONS: Final = tuple(
    Action(
        name=f"bank.{name}", help=words, request=request, answer=MovedAnswer, run=run,
        role="operator",
    )
    for name, words, request, run in (
        ("deposit", "Give an account new money.", DepositRequest, deposit),
        ("withdraw", "Take money away from an account.", WithdrawRequest, withdraw),
        ("transfer", "Give money of one account to another.", TransferRequest, transfer),
        ("refund", "Give back what was charged.", RefundRequest, refund),
        ("adjust", "Correct what an account has, by hand.", AdjustRequest, adjust),
    )
)  # fmt: skip
