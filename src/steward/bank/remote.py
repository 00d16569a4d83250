"""Banks elsewhere: what an extension does that tells one of holds and charges."""

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
"""The group of entry points; the name of one is the kind of its messages in the outbox."""


class RemoteBank(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of banks elsewhere.

    Attributes:
        relay: Puts into the outbox what events mean for the bank elsewhere: of the transaction that
            charges them, the events with their jobs' open holds, and when this bank began.
        describe: Says in a few words what a message in the outbox tells.
    """

    relay: "Callable[[Transaction, Iterable[tuple[Event, Hold | None]], datetime], None]"
    describe: Callable[[bytes], str]


def remote_banks() -> tuple[RemoteBank, ...]:
    """Load what tells banks elsewhere.

    Raises:
        StewardError: No installed package offers any: what they are to be told would be lost.
    """
    found = tuple(load_offer(GROUP, name) for name in offers_of(GROUP))
    if not found:
        raise StewardError(f"[bank.remote] url: no installed package offers a {GROUP}", GROUP)
    return found
