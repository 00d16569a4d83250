"""Where holds go when an allocation ends: to the next one, as far as their jobs have not started.

Of an array each task counts for itself: those that run are paid by the allocation that
they started on, the others by the next.
"""

import logging
from collections.abc import Sequence

from steward.bank.gate.keeper import Keeper
from steward.bank.gate.purses import Open
from steward.bank.records import AllocationBooks, Hold, Quote

log = logging.getLogger(__name__)


class Moving:
    """Puts holds down to other allocations, within one transaction of the store.

    Args:
        keeper: The gate's state.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._left: dict[str, set[int]] = {}

    def move(self, allocations: set[int], now_us: int) -> None:
        """Holds of jobs that have not started go to the allocations that there are now."""
        purses = self._keeper.purses
        for number in allocations:
            for hold in list(purses.on_allocation.get(number, {}).values()):
                if hold.origin == "transfer":
                    continue  # it is over in a moment, or lapses
                if not hold.started:
                    self._draw_anew(hold, now_us)
                elif self._quoted(hold).tasks > 1:
                    self._left.setdefault(hold.id, set()).add(number)
        purses.lapsed &= purses.on_allocation.keys()

    def fund(self, now_us: int) -> None:
        """Jobs whose allocation ended get money that has come since, the oldest first."""
        for hold in list(self._keeper.purses.stranded.values()):
            if self._keeper.is_enforced(hold):
                self._draw_anew(hold, now_us)

    def _draw_anew(self, hold: Open, now_us: int) -> None:
        purses = self._keeper.purses
        before = hold.shares
        purses.resize(hold, hold.remaining, ())
        can_pay = purses.available(hold.payer, now_us) >= hold.remaining
        if can_pay or self._keeper.ground.is_exempt(hold.cluster, hold.uid, hold.user):
            purses.resize(hold, hold.remaining, purses.draw(hold.payer, hold.remaining, now_us))
        if hold.shares != before:
            self._keeper.store.update(hold)
            if not hold.shares:
                log.warning(
                    "job %d of cluster %s: no allocation of account %s can pay it any more",
                    hold.job_id,
                    hold.cluster,
                    hold.payer,
                )

    def stranded(self) -> list[Hold]:
        """Holds that no allocation can pay, of jobs on which the bank is to act."""
        keeper = self._keeper
        stranded = keeper.purses.stranded.values()
        return [keeper.store.whole(hold) for hold in stranded if keeper.is_enforced(hold)]

    def _quoted(self, hold: Open) -> Quote:
        return self._keeper.store.covered(hold)[0] or Quote(amount=hold.amount)

    def on_allocation(self, number: int) -> int:
        """What jobs that have started still hold on an allocation."""
        holds = self._keeper.purses.on_allocation.get(number, {}).values()
        return sum(dict(hold.shares)[number] for hold in holds if hold.started)

    def lingering(self) -> list[Hold]:
        """Holds of arrays of which tasks have started, that are still on an ended allocation."""
        purses = self._keeper.purses
        found = []
        for name, ended in list(self._left.items()):
            hold = purses.holds.get(name)
            # A task that began later may take the share of one that still runs: see part().
            has = hold and {one.number for one in purses.allocations(hold.payer) if one.balance > 0}
            if hold is None or not (ended & dict(hold.shares).keys() or ended & (has or set())):
                del self._left[name]
            else:
                found.append(self._keeper.store.whole(hold))
        return found

    def part(self, hold: Open, starts: Sequence[int], now_us: int) -> bool:
        """Leave on ended allocations only what an array's tasks need that started on them.

        What the others need is held anew; where that cannot be paid, it is given back.

        Args:
            hold: The array's.
            starts: When its tasks that run have started, µs since the epoch.
            now_us: The time, µs since the epoch.

        Returns:
            Whether all that was held still is.
        """
        ended = self._left.get(hold.id)
        if not ended:
            return True
        purses, before = self._keeper.purses, hold.remaining
        shares = self._kept(hold, ended, starts, now_us)
        left = before - sum(part for _, part in shares)
        for number, part in hold.shares:
            if number not in ended and left:
                shares.append((number, min(part, left)))
                left -= min(part, left)
        if tuple(shares) == hold.shares:
            return True
        purses.resize(hold, before - left, tuple(shares))
        can_pay = purses.available(hold.payer, now_us) >= left
        is_exempt = self._keeper.ground.is_exempt(hold.cluster, hold.uid, hold.user)
        if left and (can_pay or is_exempt):
            drawn = purses.draw(hold.payer, left, now_us)
            purses.resize(hold, before, purses.more(hold, drawn))
        self._keeper.store.update(hold)
        return hold.remaining == before or not self._keeper.is_enforced(hold)

    def _kept(
        self, hold: Open, ended: set[int], starts: Sequence[int], now_us: int
    ) -> list[tuple[int, int]]:
        """What stays on ended allocations, each task on the first that it fits."""
        purses = self._keeper.purses
        books = {one.number: one for one in purses.allocations(hold.payer)}
        per_task, had = self._quoted(hold).per_task, dict(hold.shares)
        shares: list[tuple[int, int]] = []
        kept = 0
        for number in sorted(ended, key=lambda one: (one not in books, _end(books.get(one)))):
            end_us = _end(books.get(number)) or now_us
            wanted = per_task * sum(1 for start_us in starts if start_us < end_us)
            # A task that began later may have ended first: what that took off comes back.
            there = had.get(number, 0)
            there += max(0, purses.free(books[number])) if number in books else 0
            part = max(0, min(wanted - kept, hold.remaining - kept, there))
            kept += part
            shares += [(number, part)] * bool(part)
        return shares


def _end(one: AllocationBooks | None) -> int:
    return one.end_us if one else 0
