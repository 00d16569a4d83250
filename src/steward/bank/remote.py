"""Remote banks: interface of the extensions that report SU holds and charges to one."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.records import Hold
from steward.core.errors import StewardError
from steward.core.events import Event
from steward.core.extensions import load_offer, offers_of

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Transaction

GROUP: Final = "steward.remote_bank"
"""Group of entry points. The name of each is the kind of its messages in the outbox."""


class RemoteBank(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of remote bank.

    Attributes:
        relay: Writes messages about events to the outbox. Its arguments are the transaction that
            charges the events, the events with the open SU hold of each one's job, and the time
            when this bank began.
        describe: Describes a message in the outbox in a few words.
    """

    relay: "Callable[[Transaction, Iterable[tuple[Event, Hold | None]], datetime], None]"
    describe: Callable[[bytes], str]


def remote_banks() -> tuple[RemoteBank, ...]:
    """Load every kind of remote bank that installed packages offer.

    Raises:
        StewardError: No installed package offers one, so reports would be lost.
    """
    banks = tuple(load_offer(GROUP, name) for name in offers_of(GROUP))
    if not banks:
        raise StewardError(f"[bank.remote] url: no installed package offers a {GROUP}", GROUP)
    return banks
