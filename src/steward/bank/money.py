"""Amounts of money: parse, round and format; integer micro-SU inside Steward.

Calculations use fractions and round once, half up, at the end (:func:`round_half_up`).
:func:`parse_money` reads an amount typed by a person, :func:`format_money` formats one for people,
with the site's :class:`Unit`. Programs get amounts by ``core.layouts.format_exact_money``.
"""

import re
from fractions import Fraction
from typing import Final

import msgspec

from steward.bank.errors import BankUsage

MICRO: Final = 1_000_000
"""Micro-SU in one SU."""

MAX_AMOUNT: Final = 2**62
"""Largest amount: databases store 63 bits."""

_MAX_DIGITS: Final = 100
"""Maximum length of an amount as text."""
_AMOUNT: Final = re.compile(r"([+-]?)([0-9][0-9_, ]*)(?:\.([0-9]{1,6})0*)?")
"""Amount as text: sign, digits with separators, up to six decimals."""


class Unit(msgspec.Struct, frozen=True):
    """Name of the site's unit, and the number of decimals that amounts are shown with."""

    name: str = "SU"
    decimals: int = 2


def round_half_up(amount: Fraction) -> int:
    """Round to whole micro-SU, half up (half away from zero for negative amounts)."""
    sign = -1 if amount < 0 else 1
    return sign * int(abs(amount) + Fraction(1, 2))


def parse_money(text: str) -> int:
    """Parse an amount in SU, such as ``1,250.5`` or ``-3``, into micro-SU.

    Raises:
        BankUsage: It is not an amount, has more than six decimals, or is too large.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if not match:
        excerpt = text[:_MAX_DIGITS]
        raise BankUsage(f"invalid amount {excerpt!r}: write 1250 or 1250.5", excerpt)
    sign, whole, fraction = match.groups()
    if len(whole) > _MAX_DIGITS:
        raise BankUsage(f"amount {whole[:_MAX_DIGITS]}... is too large", text[:_MAX_DIGITS])
    amount = int(re.sub("[_, ]", "", whole)) * MICRO + int((fraction or "").ljust(6, "0"))
    if amount > MAX_AMOUNT:
        raise BankUsage(f"amount {text!r} is too large", text)
    return -amount if sign == "-" else amount


def format_money(amount: int, unit: Unit | None = None) -> str:
    """Format an amount for people, such as ``-1,250.50``; with the unit's name if given.

    Amounts below the last decimal are rounded half up, but never to zero: ``0.000001``.
    """
    decimals = 2 if unit is None else unit.decimals
    step = 10 ** (6 - decimals)
    rounded = round_half_up(Fraction(amount, step)) * step
    if amount and not rounded:
        rounded, decimals = amount, 6
    whole, fraction = divmod(abs(rounded), MICRO)
    text = f"{'-' if rounded < 0 else ''}{whole:,}"
    if decimals:
        text += f".{fraction:06}"[: decimals + 1]
    return f"{text} {unit.name}" if unit else text
