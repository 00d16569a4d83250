from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.slurm.values import (
    decode_text,
    parse_exit_status,
    parse_moment,
    parse_number,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("5:00", 300),
        ("1:00:00", 3600),
        ("2-12:00:00", 216_000),
        ("00:00:10", 10),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("Partition_Limit", None),
        ("1-", None),
        ("x-1:00", None),
    ],
)
def test_time_limits_are_seconds(raw: str, expected: int | None) -> None:
    assert parse_seconds(raw) == expected


def test_times_are_aware_and_in_utc() -> None:
    assert parse_moment("2026-11-21T09:54:21") == datetime(2026, 11, 21, 9, 54, 21, tzinfo=UTC)
    for nothing in ("N/A", "Unknown", "None", "(null)", "", "yesterday"):
        assert parse_moment(nothing) is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("768", (3, 0)),
        ("9", (0, 9)),
        ("0", (0, 0)),
        ("3:0", (3, 0)),
        ("0:9", (0, 9)),
        ("", None),
        ("1:", None),
        ("x", None),
    ],
)
def test_exit_status_of_every_version(raw: str, expected: tuple[int, int] | None) -> None:
    assert parse_exit_status(raw) == expected


def test_counts() -> None:
    assert parse_number("4") == 4
    assert parse_number("1-4") == 1
    for none in ("", "N/A", "-1", "²", "٣", "1" * 19):
        assert parse_number(none) is None


@given(st.binary())
def test_every_text_can_be_written_as_utf_8(raw: bytes) -> None:
    decode_text(raw).encode()


def test_bytes_that_are_not_utf_8_stay_visible() -> None:
    assert decode_text(b"caf\xe9") == "caf\\xe9"
    assert decode_text(b"(null)") == ""
