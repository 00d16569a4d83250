"""The action behind burn-downs: how an account's money went, day by day."""

from datetime import datetime, timedelta
from typing import Final

from steward.bank.errors import BankUsage
from steward.bank.ledger import CourseDay
from steward.bank.room import BankAnswer, BankRoom
from steward.core.access import Asker
from steward.core.actions import Action, Request
from steward.slurm.times import zone_called

_MOST_DAYS: Final = 3700
_USUAL: Final = timedelta(days=90)


class CourseRequest(Request, frozen=True, kw_only=True):
    """bank.course: what an account had at the end of each day, and what it spent.

    Attributes:
        account: The account; of one that draws on another's money, that one's.
        since: As people type times; "" for 90 days ago.
        until: Likewise; "" for now.
        zone: IANA name of the zone that times are meant in, and days are cut in; "" for the
            cluster's.
    """

    account: str
    since: str = ""
    until: str = ""
    zone: str = ""


class CourseAnswer(BankAnswer, frozen=True, kw_only=True):
    """How it went.

    Attributes:
        payer: Whose money it is.
        days: Each day, the first first; the last may not be over.
        since: Beginning of the time looked at.
        until: Its end.
    """

    payer: str
    days: tuple[CourseDay, ...]
    since: datetime
    until: datetime


def course(room: BankRoom, asker: Asker, request: CourseRequest) -> CourseAnswer:
    """What the allocations that an account draws on now had at the end of each day.

    Raises:
        BankRefused: The asker may not see the account.
        BankUsage: There is none, or the time cannot be read or is too long.
    """
    zone = request.zone or room.zone()
    now = room.now()
    until = min(now, room.moment(request.until, zone) or now)
    since = room.moment(request.since, zone) or until - _USUAL
    if not timedelta() < until - since <= timedelta(days=_MOST_DAYS):
        raise BankUsage(f"a course has from one to {_MOST_DAYS} days", request.since)
    account = request.account.lower()
    with room.ledger.reading() as t:
        room.rights(asker, t).need_sight(account)
        payer = t.accounts.payer(account)
        pots = [one.number for one in t.allocations.of(payer, ended=True) if one.begin <= now]
        days = t.course.days(pots, since, until, zone_called(zone))
    return CourseAnswer(payer=payer, days=tuple(days), since=since, until=until, **room.heading())


ACTIONS: Final = (
    Action(
        name="bank.course",
        help="Show how an account's money went, day by day.",
        request=CourseRequest,
        answer=CourseAnswer,
        run=course,
        only_reads=True,
    ),
)
