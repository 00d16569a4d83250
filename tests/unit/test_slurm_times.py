"""Times in Slurm's syntax; expected values were compared with Slurm's own parser (22.05)."""

import ctypes
import glob
import os
import time as clock
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.slurm.times import TimeError, parse_time

NOW = datetime(2026, 11, 21, 15, 0, 31, tzinfo=UTC)
LIBRARIES = glob.glob("/usr/lib/*/slurm*/libslurmfull.so")

KNOWN = {
    "now": "2026-11-21T15:00:31",
    "NOW": "2026-11-21T15:00:31",
    "now-1day": "2026-11-20T15:00:31",
    "now - 1 day": "2026-11-20T15:00:31",
    "now+2hours": "2026-11-21T17:00:31",
    "now-3weeks": "2026-10-31T15:00:31",
    "now-90": "2026-11-21T14:59:01",
    "today": "2026-11-21T00:00:00",
    "tomorrow": "2026-11-22T00:00:00",
    "midnight": "2026-11-21T00:00:00",
    "noon": "2026-11-21T12:00:00",
    "fika": "2026-11-21T15:00:00",
    "teatime": "2026-11-21T16:00:00",
    "1121": "2026-11-21T00:00:00",
    "1122": "2026-11-22T00:00:00",
    "112125": "2025-11-21T00:00:00",
    "11/20": "2026-11-20T00:00:00",
    "12/01": "2025-12-01T00:00:00",
    "11/20/25": "2025-11-20T00:00:00",
    "11.20.26": "2026-11-20T00:00:00",
    "2026-11-20": "2026-11-20T00:00:00",
    "2026-11-20T10:11": "2026-11-20T10:11:00",
    "2026-11-20T10:11:12": "2026-11-20T10:11:12",
    "2026-11-20 10:11": "2026-11-20T10:11:00",
    "10:00": "2026-11-21T10:00:00",
    "23:00": "2026-11-21T23:00:00",
    "10:00:05": "2026-11-21T10:00:05",
    "10:00PM": "2026-11-21T22:00:00",
    "10:00 PM": "2026-11-21T22:00:00",
    "3:00pm": "2026-11-21T15:00:00",
    "12:00AM": "2026-11-21T00:00:00",
    "12:00PM": "2026-11-21T12:00:00",
    "1121-10:00": "2026-11-21T10:00:00",
    "11/20/26-10:00:05": "2026-11-20T10:00:05",
    "uts1700000000": "2023-11-14T22:13:20",
}

WRONG = (
    "",
    "garbage",
    "now-5min",
    "now-1h",
    "now-1month",
    "today-1day",
    "2026-2-3",
    "2026-11-20T10",
    "24:00",
    "13:00PM",
    "1",
    "2026-02-30",
    "1332",
    "now-999999999weeks",
    "2026-11-20T",
    "1121-",
)


@pytest.mark.parametrize(("text", "meant"), KNOWN.items())
def test_every_form_that_slurm_lists_is_understood(text: str, meant: str) -> None:
    assert parse_time(text, NOW, UTC) == datetime.fromisoformat(meant).replace(tzinfo=UTC)


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(TimeError) as caught:
        parse_time(text, NOW, UTC)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "zone"),
    [("0001-01-01", "Asia/Tokyo"), ("9999-12-31T23:59:59", "America/New_York")],
)
def test_a_time_that_utc_cannot_say_is_none(text: str, zone: str) -> None:
    with pytest.raises(TimeError, match="invalid time"):
        parse_time(text, datetime(2026, 11, 21, tzinfo=UTC), ZoneInfo(zone))


@pytest.mark.parametrize("text", ["0001-01-01", "1066-10-14T12:00Z", "now-99999weeks"])
def test_a_time_before_all_of_slurms_is_their_begin(text: str) -> None:
    # So that a default period before it, such as that of a report, is a time as well.
    begin = parse_time(text, NOW, UTC)
    assert begin == datetime(1970, 1, 1, tzinfo=UTC)
    assert begin - timedelta(days=36500) < begin


def test_a_time_without_a_zone_is_one_of_the_given_zone() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    assert parse_time("2026-11-21T08:00", NOW, berlin) == datetime(2026, 11, 21, 7, tzinfo=UTC)
    # 15:00 UTC is the next day already on Kiritimati, which is 14 hours ahead.
    kiritimati = ZoneInfo("Pacific/Kiritimati")
    assert parse_time("today", NOW, kiritimati) == datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert parse_time("2026-11-21T08:00:00Z", NOW, berlin) == datetime(2026, 11, 21, 8, tzinfo=UTC)


@given(st.text(max_size=40))
def test_hostile_text_is_a_time_or_a_time_error(text: str) -> None:
    try:
        moment = parse_time(text, NOW, UTC)
    except TimeError:
        return
    assert moment.utcoffset() == timedelta(0)


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        clock.tzset()
        yield
    clock.tzset()


@pytest.mark.usefixtures("in_utc")
@pytest.mark.skipif(not LIBRARIES, reason="Slurm is not installed here")
@pytest.mark.parametrize("text", [*KNOWN, *(text for text in WRONG if text)])
def test_slurm_itself_understands_the_same(text: str) -> None:
    theirs = ctypes.CDLL(LIBRARIES[0]).slurm_parse_time
    theirs.restype = ctypes.c_long
    before = datetime.now(UTC).replace(microsecond=0)
    seconds = theirs(os.fsencode(text), 1)
    try:
        ours = parse_time(text, before, UTC)
    except TimeError:
        # Slurm takes days that do not exist for the days after; we would rather ask again.
        assert seconds == 0 or text in ("2026-02-30", "now-999999999weeks", "2026-11-20T", "1121-")
        return
    assert abs(ours.timestamp() - seconds) <= 2
