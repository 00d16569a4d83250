"""What the bank tells of: holds that are placed and given back, allocations that run out."""

from datetime import datetime
from typing import Literal

import msgspec


class HoldFact(msgspec.Struct, frozen=True, kw_only=True):
    """hold.placed, hold.confirmed, hold.settled, hold.released: what became of a hold.

    Attributes:
        hold: Its id.
        account: Who pays.
        amount: Micro-SU that this is about: placed, charged, or given back.
        remaining: Micro-SU that are still held.
        job_id: The raw job id; 0 while it is not known.
        user: Whose job it is.
        why: What brought it about, for people.
    """

    hold: str
    account: str
    amount: int
    remaining: int = 0
    job_id: int = 0
    user: str = ""
    why: str = ""


class BankThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """bank.threshold: an allocation is used so far, or ends so soon.

    Attributes:
        account: Whose it is.
        allocation: Its number in the ledger.
        kind: ``used`` or ``ends``.
        value: Percent that are used, or days until its end.
        balance: What is left, micro-SU.
        total: What it was given, micro-SU.
        end: When it ends; None for never.
    """

    account: str
    allocation: int
    kind: Literal["used", "ends"]
    value: int
    balance: int
    total: int
    end: datetime | None = None
