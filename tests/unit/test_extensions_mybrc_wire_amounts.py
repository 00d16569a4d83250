"""Amounts of the myBRC API: parsed exactly, or rejected."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.bank.errors import BankUsage
from steward.extensions.mybrc import wire


@given(st.integers(0, 10**11 - 1))
def test_what_is_told_in_hundredths_comes_back_as_it_was(hundredths: int) -> None:
    micros = hundredths * 10_000
    text = wire.format_su(micros)
    assert wire.parse_cost(text) == micros
    assert wire.parse_amount(Decimal(text)) == micros
    assert Fraction(text) * 1_000_000 == micros


@given(st.text(max_size=30))
def test_a_cost_is_read_exactly_or_refused(text: str) -> None:
    try:
        micros = wire.parse_cost(text)
    except BankUsage:
        return
    assert Fraction(text.strip()) * 1_000_000 == micros >= 0


@given(st.decimals())
def test_an_amount_is_read_exactly_or_refused(number: Decimal) -> None:
    try:
        micros = wire.parse_amount(number)
    except BankUsage:
        return
    assert Fraction(number) * 1_000_000 == micros >= 0
    assert micros < 10**9 * 1_000_000


@pytest.mark.parametrize(
    ("text", "micros"),
    [("0", 0), ("0.00", 0), ("12.5", 12_500_000), ("99999999999", 99_999_999_999_000_000)],
)
def test_costs(text: str, micros: int) -> None:
    assert wire.parse_cost(text) == micros


@pytest.mark.parametrize(
    "text",
    ["", ".", "-1", "+1", "1e3", "nan", "inf", "1_000", "1,5", "1.005", "100000000000", "1 2", "٣"],
)
def test_what_is_no_cost(text: str) -> None:
    with pytest.raises(BankUsage):
        wire.parse_cost(text)


@pytest.mark.parametrize(
    "text", ["NaN", "sNaN", "Infinity", "-0.01", "1E+999999999", "1E-999999999", "1000000000"]
)
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(BankUsage):
        wire.parse_amount(Decimal(text))


def test_what_is_finer_than_hundredths_is_rounded_half_up() -> None:
    assert [wire.format_su(micros) for micros in (4_999, 5_000, 14_999, 1_234_567)] == [
        *("0.00", "0.01", "0.01", "1.23")
    ]
