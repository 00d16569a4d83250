"""How an account's money went, day by day: so people can see how long it lasts."""

from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta, tzinfo

from sqlalchemy import case, func, select

from steward.bank.ledger.quarters import quarter_of
from steward.bank.ledger.records import CourseDay
from steward.bank.ledger.session import SPENDING, Session
from steward.bank.ledger.tables import act, entry, pot
from steward.core.timestamps import micros


class Course:
    """Questions about the past of an account's money.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def days(
        self, allocations: Sequence[int], begin: datetime, end: datetime, zone: tzinfo
    ) -> list[CourseDay]:
        """What was in allocations at the end of each day, and what was spent of it that day.

        Args:
            allocations: Their numbers.
            begin: In the first day.
            end: In the last day, whose end it stands for.
            zone: The zone that days are cut in.
        """
        first = begin.astimezone(zone).date()
        midnight = datetime.combine(first, time(), zone).astimezone(UTC)
        moved = self._moved(allocations, midnight, end)
        balance = self._before(allocations, midnight)
        found, day, place = [], first, 0
        while day <= end.astimezone(zone).date():
            morrow = day + timedelta(days=1)
            until = quarter_of(micros(datetime.combine(morrow, time(), zone)))
            spent = 0
            while place < len(moved) and moved[place][0] < until:
                balance += moved[place][1]
                spent += moved[place][2]
                place += 1
            found.append(CourseDay(day=day.isoformat(), balance=balance, spent=-spent))
            day = morrow
        return found

    def _before(self, allocations: Sequence[int], at: datetime) -> int:
        chosen = (
            select(func.sum(entry.c.amount))
            .join(act, act.c.number == entry.c.act)
            .where(entry.c.pot.in_(allocations), act.c.at_us < micros(at))
        )
        return int(self._session.value(chosen) or 0)

    def _moved(
        self, allocations: Sequence[int], begin: datetime, end: datetime
    ) -> list[tuple[int, int, int]]:
        """What moved in each quarter of an hour, and what of it was spent on jobs."""
        quarter = quarter_of(act.c.at_us).label("quarter")
        spent = case((act.c.kind.in_(SPENDING), entry.c.amount), else_=0)
        chosen = (
            select(
                quarter, func.sum(entry.c.amount).label("amount"), func.sum(spent).label("spent")
            )
            .select_from(act)
            .join(entry, entry.c.act == act.c.number)
            .join(pot, pot.c.number == entry.c.pot)
            .where(pot.c.number.in_(allocations))
            .where(act.c.at_us >= micros(begin), act.c.at_us < micros(end))
            .group_by(quarter)
            .order_by(quarter)
        )
        return [
            (int(row.quarter), int(row.amount), int(row.spent))
            for row in self._session.rows(chosen)
        ]
