"""Values in sacct's format, compared with Slurm's own output."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from steward.accounting.errors import AccountingUsage
from steward.accounting.sacct import values
from steward.accounting.sacct.values import DateFormatter
from steward.core.layouts import format_span
from steward.slurm.times import parse_time

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "00:00:00"),
        (59, "00:00:59"),
        (3600, "01:00:00"),
        (86399, "23:59:59"),
        (86400, "1-00:00:00"),
        (10 * 86400 + 3661, "10-01:01:01"),
    ],
)
def test_spans(seconds: int | None, text: str) -> None:
    assert format_span(seconds) == text


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (None, ""),
        (0, "00:00:00"),
        (999, "00:00:00"),
        (1_250_000, "00:01.250"),
        (65_001_000, "01:05.001"),
        (3_600_500_000, "01:00:00"),
        (90_000_000_000, "1-01:00:00"),
    ],
)
def test_cpu_times(microseconds: int | None, text: str) -> None:
    assert values.format_cpu_time(microseconds) == text


@pytest.mark.parametrize(
    ("number", "units", "unit", "text"),
    [
        (None, "", 0, ""),
        (0, "", 0, "0"),
        (5365760, "", 0, "5240K"),
        (123457, "", 0, "123457"),
        (1 << 30, "", 0, "1G"),
        (1536 << 20, "", 0, "1.50G"),
        (4096, "", 2, "4G"),
        (2000, "", 2, "2000M"),
        (4096, "=", 2, "4096M"),
        (4096, "G", 2, "4G"),
        (4000, "G", 2, "3.91G"),
        (2048, "K", 2, "2097152K"),
        (5365760, "M", 0, "5.12M"),
    ],
)
def test_sizes(number: int | None, units: str, unit: int, text: str) -> None:
    assert values.format_unit_size(number, units, unit) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, ""), (0, "0"), (2012, "0.00M"), (524288, "0.50M"), (3 << 20, "3M"), (1 << 30, "1G")],
)
def test_bytes_in_megabytes(count: int | None, text: str) -> None:
    assert values.format_megabytes(count, "") == text


def test_trackable_resources_in_slurms_order() -> None:
    text = "cpu=4,mem=4G,node=1,billing=4,gres/gpu=2"
    assert values.format_tres_units(text, "") == "billing=4,cpu=4,gres/gpu=2,mem=4G,node=1"
    assert values.format_tres_units(text, "M") == "billing=4,cpu=4,gres/gpu=2,mem=4096M,node=1"
    assert values.format_tres_units(text, "=") == "billing=4,cpu=4,gres/gpu=2,mem=4096M,node=1"
    assert values.format_tres_units(None, "") == ""
    assert values.format_memory(text, "") == "4G"
    assert values.format_memory("cpu=1", "") == ""
    assert values.format_memory("mem=1500M", "") == "1500M"
    assert values.format_memory("mem=nonsense", "") == ""


def test_states_and_codes() -> None:
    assert values.format_state("CANCELLED", 0) == "CANCELLED by 0"
    assert values.format_state("CANCELLED", None) == "CANCELLED"
    assert values.format_state(None, None) == ""
    assert values.format_exit_status(None, None) == "0:0"
    assert values.format_exit_status(0, 9) == "0:9"
    assert values.format_time_limit(None, started=True) == "UNLIMITED"
    assert values.format_time_limit(None, started=False) == "Partition_Limit"
    assert values.format_time_limit(5400, started=False) == "01:30:00"


def micros(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000


@pytest.mark.parametrize(
    ("zone", "form", "at", "text"),
    [
        ("UTC", "", "2026-11-21T08:09:10+00:00", "2026-11-21T08:09:10"),
        ("Europe/Paris", "standard", "2026-07-01T00:00:59+00:00", "2026-07-01T02:00:59"),
        ("Africa/Monrovia", "", "1970-06-01T00:00:00+00:00", "1970-05-31T23:15:30"),
        ("UTC", "%s|%H", "2026-11-21T08:09:10+00:00", None),
        ("UTC", "%a %d", "2026-11-21T08:09:10+00:00", "Sat 21"),
        ("UTC", "relative", "2026-11-21T08:09:10+00:00", "08:09:10"),
        ("UTC", "relative", "2026-11-20T08:09:10+00:00", "Ystday 08:09"),
        ("UTC", "relative", "2024-01-20T08:09:10+00:00", "20 Jan 2024"),
    ],
)
def test_times(zone: str, form: str, at: str, text: str | None) -> None:
    written = DateFormatter(ZoneInfo(zone), form, NOW)(micros(at))
    assert written == text if text is not None else written.endswith("|08")


def test_times_that_are_none() -> None:
    dates = DateFormatter(ZoneInfo("UTC"), "", NOW)
    assert [dates(0), dates(None), dates(2**62)] == ["Unknown"] * 3


@pytest.mark.parametrize("form", ["%9999999d", "%10Y", "%", "%1"])
def test_a_form_of_times_that_would_cost_too_much_is_refused(form: str) -> None:
    with pytest.raises(AccountingUsage):
        DateFormatter(ZoneInfo("UTC"), form, NOW)


def test_dates_are_written_as_they_are_read() -> None:
    zone = ZoneInfo("America/New_York")
    dates = DateFormatter(zone, "", NOW)
    for hour in range(0, 24 * 366, 7):
        at = micros("2026-01-01T00:30:00+00:00") + hour * 3_600_000_000
        moment = parse_time(dates(at), NOW, zone)
        # An hour that comes twice can be meant either way.
        assert int(moment.timestamp()) * 1_000_000 - at in (0, -3_600_000_000, 3_600_000_000)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("EXPEDITING", "PENDING"),
        ("REQUEUE_HOLD", "PENDING"),
        ("SPECIAL_EXIT", "PENDING"),
        ("PENDING", "PENDING"),
        ("REQUEUED", "REQUEUED"),
        ("FAILED", "FAILED"),
        (None, ""),
    ],
)
def test_states_have_no_flags_of_pending_runs(state: str | None, text: str) -> None:
    assert values.format_state(state, None) == text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", ""),
        ("/home/ada/%x-%j.out", "/home/ada/fit-77.out"),
        ("%A_%a.%b", "70_12.2"),
        ("%6j-%3t-%N-%u-%s-%n", "000077-000-n3-ada-0-0"),
        ("100%%-%J", "100%-77.0"),
        ("a\\%j", "a%j"),
        ("%q%", "%q%"),
        ("%999999999j", "%999999999j"),
        ("%99j", "0000000077"),
    ],
)
def test_patterns_of_paths_are_expanded(path: str, text: str) -> None:
    assert values.expand_path(path, 77, 70, "12", "fit", "ada", "n[3-5]") == text


def test_a_job_without_nodes_or_an_array_has_neither_in_its_paths() -> None:
    assert values.expand_path("%A-%a-%N.", 7, None, None, None, None, None) == "7-0-."


@pytest.mark.parametrize(
    ("oversubscribe", "shares", "exclusive"),
    [
        # As sacct 26.05 has it of a plain job, with --exclusive, --oversubscribe, --exclusive=user.
        ("OK", "NO", "NO"),
        ("NO", "NO", "NODE"),
        ("YES", "YES", "NO"),
        ("USER", "NO", "USER"),
        (None, "", ""),
    ],
)
def test_who_shares_nodes(oversubscribe: str | None, shares: str, exclusive: str) -> None:
    assert values.format_oversubscribe(oversubscribe) == shares
    assert values.format_exclusive(oversubscribe) == exclusive
