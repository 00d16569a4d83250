"""Times as Slurm's commands print them."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from steward.cli.output import find_requested_zone, format_time, to_local_time

NOON = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SLURM_TIME_FORMAT", raising=False)
    monkeypatch.delenv("TZ", raising=False)
    yield
    monkeypatch.undo()
    time.tzset()


def set_zone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TZ", name)
    time.tzset()


def test_the_clusters_zone_is_used() -> None:
    assert format_time(NOON, "Europe/Paris") == "2026-11-21T13:00:00"
    assert format_time(NOON, "Asia/Kolkata") == "2026-11-21T17:30:00"


def test_no_time_is_no_text() -> None:
    assert format_time(None) == ""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("America/New_York", "2026-11-21T07:00:00"),
        (":Asia/Tokyo", "2026-11-21T21:00:00"),
        ("XYZ-3", "2026-11-21T15:00:00"),
    ],
)
def test_tz_comes_before_the_clusters_zone(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    set_zone(monkeypatch, name)
    assert format_time(NOON, "Europe/Paris") == shown


def test_a_zone_that_this_host_does_not_know_is_no_error() -> None:
    assert format_time(NOON, "Mars/Olympus")


@pytest.mark.parametrize(
    ("form", "shown"),
    [("standard", "2026-11-21T12:00:00"), ("%s", None), ("%d.%m.%y %H:%M", "21.11.26 12:00")],
)
def test_slurm_time_format_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, form: str, shown: str | None
) -> None:
    set_zone(monkeypatch, "UTC")
    monkeypatch.setenv("SLURM_TIME_FORMAT", form)
    assert format_time(NOON) == (shown or str(int(NOON.timestamp())))


@pytest.mark.parametrize(
    ("days", "shown"),
    [
        (0, "12:00:00"),
        (-1, "Ystday 12:00"),
        (1, "Tomorr 12:00"),
        (3, "Tue 12:00"),
        (-3, "18 Nov 12:00"),
        (30, "21 Dec 12:00"),
        (-400, "17 Oct 2025"),
    ],
)
def test_relative_times(monkeypatch: pytest.MonkeyPatch, days: int, shown: str) -> None:
    set_zone(monkeypatch, "UTC")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert format_time(NOON + timedelta(days=days), now=NOON) == shown


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("Europe/Paris", "Europe/Paris"),
        (":Asia/Tokyo", "Asia/Tokyo"),
        ("XYZ-3", ""),
        ("../x", ""),
        ("", ""),
    ],
)
def test_typed_times_are_meant_in_tz(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: str
) -> None:
    monkeypatch.setenv("TZ", name)
    assert find_requested_zone() == asked


def test_local_is_aware() -> None:
    assert to_local_time(NOON, "Europe/Paris").utcoffset() == timedelta(hours=1)


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles", ""])
@pytest.mark.parametrize("end", [(1, 1, 1, 0), (9999, 12, 31, 23)])
def test_the_ends_of_the_calendar_can_be_shown(zone: str, end: tuple[int, int, int, int]) -> None:
    assert format_time(datetime(*end, tzinfo=UTC), zone)
