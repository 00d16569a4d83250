"""Tickets for one request of somebody whom MUNGE names: a minute long, and kept nowhere.

A ticket says whose it is, signed with a key that the daemon's processes have from the one
that forked them, and that ends with it.
"""

import hashlib
import hmac
import secrets
from datetime import datetime, timedelta
from typing import Final

from steward.admin.credentials.errors import NotKnown
from steward.core.moments import micros

PREFIX: Final = "stm_"
LIFE: Final = timedelta(minutes=1)
_KEY: Final = secrets.token_bytes(32)


def ticket(uid: int, user: str, now: datetime) -> str:
    """A ticket for somebody, from now on."""
    text = f"{uid}:{micros(now + LIFE)}:{user}"
    return f"{PREFIX}{_signature(text)}:{text}"


def whose(shown: str, now: datetime) -> tuple[int, str]:
    """The uid and name of whoever has a ticket.

    Raises:
        NotKnown: It is none of ours, or its minute is over.
    """
    signature, _, text = shown.removeprefix(PREFIX).partition(":")
    if not hmac.compare_digest(signature.encode(), _signature(text).encode()):
        raise NotKnown("this is no ticket of the daemon that runs now: ask again")
    uid, until_us, user = text.split(":", 2)
    if micros(now) >= int(until_us):
        raise NotKnown("what MUNGE vouches for is one request, and its minute is over: ask again")
    return int(uid), user


def _signature(text: str) -> str:
    return hmac.new(_KEY, text.encode(), hashlib.sha256).hexdigest()
