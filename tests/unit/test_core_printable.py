"""Escaping of hostile text before it is printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.cli.output import decode_bytes, format_size
from steward.core.printable import escape_line, escape_lines

hostile = st.text(st.characters()) | st.text("\x1b\x07\x9b\u202e\u2028\ud800\r\n\t|\\a")


@given(hostile)
def test_safe_text_is_one_printable_line(text: str) -> None:
    made = escape_line(text)
    assert made.isprintable()
    made.encode()  # no lone surrogate is left


@given(hostile)
def test_safe_lines_keep_lines_and_nothing_else_that_moves(text: str) -> None:
    made = escape_lines(text)
    assert made.count("\n") == text.count("\n")
    assert made.replace("\n", "").replace("\t", "").isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_ordinary_text_stays(text: str) -> None:
    assert escape_line(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("two\nlines", r"two\nlines"),
        ("evil\u202egpj.exe", r"evil\u202egpj.exe"),
        ("é ∑ 漢", "é ∑ 漢"),
        ("\udcff", r"\udcff"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert escape_line(text) == shown


@given(st.binary())
def test_all_bytes_can_be_shown(data: bytes) -> None:
    assert escape_lines(decode_bytes(data)).encode().decode().count("\n") == data.count(b"\n")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, ""), (0, "0"), (999, "999"), (1024, "1.0K"), (1048576, "1.0M"), (5 << 40, "5.0T")],
)
def test_sizes(count: int | None, shown: str) -> None:
    assert format_size(count) == shown


@given(st.integers(0, 2**60))
def test_sizes_are_short(count: int) -> None:
    assert len(format_size(count)) <= 10
