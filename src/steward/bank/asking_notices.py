"""The actions about what waits to be told: mails, webhooks, and a myBRC server elsewhere."""

from datetime import datetime
from typing import Final

import msgspec

from steward.bank.errors import BankUsage
from steward.bank.ledger import OutboxItem
from steward.bank.notices import Notice
from steward.bank.remote import GROUP, RemoteBank
from steward.bank.room import BankAnswer, BankRoom
from steward.bank.statements import OUTBOX as NOTICE
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape
from steward.core.extensions import load_offer, offers_of

_OPERATORS: Final = "look after what waits to be told"
_MOST: Final = 1000


class NoticesRequest(Request, frozen=True, kw_only=True):
    """bank.notices: what was not told yet."""


class NoticesRetryRequest(Request, frozen=True, kw_only=True):
    """bank.notices_retry: have things told again at once.

    Attributes:
        numbers: These; all that were set aside if empty.
    """

    numbers: tuple[int, ...] = ()


class NoticeLine(Shape, frozen=True, kw_only=True):
    """Something that was not told yet.

    Attributes:
        number: Its number.
        way: ``mail``, ``webhook`` or ``mybrc``; "" where it is for all that are set up.
        what: What it says, in a line.
        to: Users and addresses, of a mail.
        tries: How often it failed.
        next_at: When it is tried next; None where it was set aside.
        error: Why it failed last.
        aside: Whether it is not tried any more until somebody asks for it.
    """

    number: int
    way: str = ""
    what: str = ""
    to: tuple[str, ...] = ()
    tries: int = 0
    next_at: datetime | None = None
    error: str = ""
    aside: bool = False


class NoticesAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was not told yet.

    Attributes:
        notices: The first that came first.
        more: Whether there are more.
    """

    notices: tuple[NoticeLine, ...]
    more: bool = False


class NoticesRetryAnswer(BankAnswer, frozen=True, kw_only=True):
    """What is tried again.

    Attributes:
        retried: How many.
    """

    retried: int


def outbox_kinds() -> tuple[str, ...]:
    """Return the kinds of what waits in the outbox: notices, and what banks elsewhere are told."""
    return (NOTICE, *offers_of(GROUP))


def notices(room: BankRoom, asker: Asker, request: NoticesRequest) -> NoticesAnswer:
    """List what waits to be told, and what was set aside.

    Raises:
        BankRefused: The asker is no operator.
    """
    del request
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        found = t.outbox.untold(outbox_kinds(), _MOST + 1)
    return NoticesAnswer(
        notices=tuple(_line(item) for item in found[:_MOST]),
        more=len(found) > _MOST,
        **room.heading(),
    )


def retry(room: BankRoom, asker: Asker, request: NoticesRetryRequest) -> NoticesRetryAnswer:
    """Have things told again at once, as if nobody had tried before.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: Nothing of these numbers waits.
    """
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        count = t.outbox.again(outbox_kinds(), request.numbers)
    if request.numbers and not count:
        named = ", ".join(map(str, request.numbers))
        raise BankUsage(f"nothing of number {named} waits to be told", request.numbers)
    return NoticesRetryAnswer(retried=count, **room.heading())


def _line(item: OutboxItem) -> NoticeLine:
    common = NoticeLine(
        number=item.id,
        tries=item.tries,
        next_at=None if item.aside else item.next_at,
        error=item.error,
        aside=item.aside,
    )
    if item.kind != NOTICE:
        remote: RemoteBank = load_offer(GROUP, item.kind)
        return msgspec.structs.replace(common, way=item.kind, what=remote.describe(item.payload))
    notice = msgspec.json.decode(item.payload, type=Notice)
    return msgspec.structs.replace(common, way=notice.by, what=notice.subject, to=notice.to)


ACTIONS: Final = (
    Action(
        name="bank.notices",
        help="List what waits to be told to people and servers.",
        request=NoticesRequest,
        answer=NoticesAnswer,
        run=notices,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="bank.notices_retry",
        help="Have what was set aside told again.",
        request=NoticesRetryRequest,
        answer=NoticesRetryAnswer,
        run=retry,
        role="operator",
    ),
)
