"""What becomes of the money that is left in an allocation when it ends."""

from collections.abc import Mapping, Sequence

from sqlalchemy import select

from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.moving import Moves
from steward.bank.ledger.records import Allocation, By, Transfer
from steward.bank.ledger.session import Session
from steward.bank.ledger.tables import EXPIRED, pot
from steward.core.timestamps import micros


def expire(
    session: Session,
    allocations: Allocations,
    moves: Moves,
    by: By,
    kept: Mapping[int, int],
) -> list[Transfer]:
    """Empty the allocations that have ended: what is left expires, or moves on.

    Args:
        session: The transaction.
        allocations: The allocations in it.
        moves: The transfers in it.
        by: Who does it; ``by.at`` is the present.
        kept: By allocation, what jobs that started on it may still need: that stays, to be
            emptied when they have ended.
    """
    now_us = micros(session.now(by))
    ended = select(pot.c.number).where(pot.c.end_us <= now_us, pot.c.balance > 0)
    made: list[Transfer] = []
    # What moves on into an allocation that has ended as well moves on with what is in that.
    waiting = {row.number for row in session.rows(ended)}
    while waiting:
        each = allocations.needed(list(waiting))[0]
        waiting.remove(each.number)
        amount = each.balance - max(0, kept.get(each.number, 0))
        if amount <= 0:
            continue
        target = _next(each, allocations.of(each.account, ended=True))
        made.append(_emptied(moves, by, each, amount, target))
        if target is not None and target.end is not None and micros(target.end) <= now_us:
            waiting.add(target.number)
    return made


def _emptied(
    moves: Moves, by: By, ended: Allocation, amount: int, target: Allocation | None
) -> Transfer:
    why, where = f"allocation {ended.number} has ended", EXPIRED
    if target is not None:
        why, where = f"{why}: on to {target.number}", target.number
    return moves.move(
        "expire" if target is None else "rollover",
        By(who=by.who, at=by.at),
        {ended.number: -amount, where: amount},
        why=f"{by.why}: {why}" if by.why else why,
        about=ended.account,
    )


def _next(ended: Allocation, others: Sequence[Allocation]) -> Allocation | None:
    """Where what is left moves on to: the next that begins, of those that end later."""
    if ended.rollover != "next" or ended.end is None:
        return None
    later = [each for each in others if each.end is not None and each.end > ended.end]
    if later:
        return min(later, key=lambda each: (each.begin, each.number))
    # Nothing follows yet: what is to move on must not be lost meanwhile.
    return next((each for each in others if each.end is None), None)
