"""Amounts as the API writes them: decimals with at most 11 digits, 2 of them after the point.

Both ways are exact but for the last: what is told is rounded to hundredths, half up.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

from steward.bank.errors import BankUsage
from steward.bank.money import MICRO, rounded

DIGITS: Final = 11
"""How many digits an amount may have altogether."""

PLACES: Final = 2
"""How many of them may stand behind the point."""

PATTERN: Final = r"^([0-9]{1,9}(\.[0-9]{1,2})?|\.[0-9]{1,2})(?!\n)$"
"""What an amount in a job looks like, for the API's description."""

_TEXT: Final = re.compile(r"[0-9]{0,40}(\.[0-9]{0,40})?", re.ASCII)
_HUNDREDTH: Final = MICRO // 10**PLACES


def cost(text: str) -> int:
    """The micro-SU of a cost that somebody asks about.

    Raises:
        BankUsage: It is no decimal that is not negative, or has too many digits or places.
    """
    text = text.strip()
    if not _TEXT.fullmatch(text) or not any("0" <= sign <= "9" for sign in text):
        raise BankUsage(f"job_cost {text[:60]!r} is no decimal number that is not negative", text)
    number = Decimal(text)
    _measure(number, "job_cost", most_whole=DIGITS)
    return _micros(number)


def amount(number: Decimal) -> int:
    """The micro-SU of a job's amount, of which 2 digits are always those behind the point.

    Raises:
        BankUsage: It is negative or no number, or has too many digits or places.
    """
    if not number.is_finite() or number.is_signed():
        raise BankUsage(f"amount {str(number)[:60]} is no number that is not negative", number)
    _measure(number, "amount", most_whole=DIGITS - PLACES)
    return _micros(number)


def show(micros: int) -> str:
    """An amount as the API writes it: ``12.50``; rounded half up."""
    hundredths = rounded(Fraction(micros, _HUNDREDTH))
    whole, part = divmod(abs(hundredths), 10**PLACES)
    return f"{'-' if hundredths < 0 else ''}{whole}.{part:02}"


def fits(micros: int) -> bool:
    """Whether an amount can be told at all."""
    return 0 <= rounded(Fraction(micros, _HUNDREDTH)) < 10**DIGITS


def _measure(number: Decimal, what: str, most_whole: int) -> None:
    """Refuse what has more digits than the API allows.

    Raises:
        BankUsage: It has.
    """
    _, digits, exponent = number.as_tuple()
    places = max(0, -int(exponent))
    whole = max(0, len(digits) + int(exponent)) if any(digits) else 0
    if whole > most_whole or len(digits) > DIGITS:
        raise BankUsage(f"{what} {str(number)[:60]} has more than {DIGITS} digits", number)
    if places > PLACES:
        raise BankUsage(f"{what} {str(number)[:60]} has more than {PLACES} decimals", number)


def _micros(number: Decimal) -> int:
    _, digits, exponent = number.as_tuple()
    # An integer's way: the context's precision would round what is longer.
    whole = int("".join(map(str, digits)))
    return whole * 10 ** (6 + int(exponent)) if whole else 0
