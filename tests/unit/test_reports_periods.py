"""Periods: runs and hourly amounts are divided among them, without losses or doubles."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON, at, us
from steward.core.errors import UsageError
from steward.reports.capacity import HOUR_S, BucketSums, add_full_hours
from steward.reports.requests import PeriodLength, divide_interval, resolve_interval
from steward.reports.runs import Periods, RunPiece

BERLIN = ZoneInfo("Europe/Berlin")
MOMENTS = st.datetimes(
    datetime(2024, 1, 1),  # noqa: DTZ001 - Hypothesis wants it so
    datetime(2027, 1, 1),  # noqa: DTZ001 - likewise
    timezones=st.just(UTC),
).map(lambda moment: moment.replace(microsecond=0))


def piece(start: float, end: float | None, **fields: object) -> RunPiece:
    values: dict[str, object] = dict.fromkeys(RunPiece._fields, "")
    values |= {"start_us": us(start), "end_us": 0 if end is None else us(end), "suspended_s": 0}
    return RunPiece(**{**values, **fields})  # type: ignore[arg-type]


@given(MOMENTS, st.integers(1, 400 * 86_400), st.sampled_from(["month", "week", "day", ""]))
def test_periods_touch_and_fill_the_time(begin: datetime, length: int, by: PeriodLength) -> None:
    end = begin + timedelta(seconds=length)
    periods = divide_interval(begin, end, by, BERLIN)
    assert (periods[0].since, periods[-1].until) == (begin, end)
    for one, following in pairwise(periods):
        assert one.since < one.until == following.since
        local = following.since.astimezone(BERLIN)
        assert (local.hour, local.minute) == (0, 0)
        assert by != "month" or local.day == 1
        assert by != "week" or local.weekday() == 0
    assert len({one.label for one in periods}) == len(periods)


def test_a_day_of_summer_time_is_an_hour_shorter() -> None:
    days = divide_interval(
        datetime(2026, 3, 27, 23, tzinfo=UTC), datetime(2026, 3, 29, 22, tzinfo=UTC), "day", BERLIN
    )
    assert [(one.label, one.until - one.since) for one in days] == [
        ("2026-03-28", timedelta(hours=24)),
        ("2026-03-29", timedelta(hours=23)),
    ]


def test_weeks_are_iso() -> None:
    (week,) = divide_interval(
        datetime(2027, 1, 1, tzinfo=UTC), datetime(2027, 1, 2, tzinfo=UTC), "week", UTC
    )
    assert week.label == "2026-W53"


def test_yesterday_is_meant_where_nothing_is_said() -> None:
    midnight = NOON.replace(hour=0)
    assert resolve_interval("", "", NOON, UTC) == (midnight - timedelta(days=1), midnight)
    # Since this morning, until now; what is still to come is left out.
    assert resolve_interval("08:00", "", NOON, UTC) == (midnight + timedelta(hours=8), NOON)
    assert resolve_interval("08:00", "2026-12-24", NOON, UTC)[1] == NOON
    for since, until in (("2026-02-20", "2026-02-19"), ("2026-12-24", "2026-12-25")):
        with pytest.raises(UsageError):
            resolve_interval(since, until, NOON, UTC)


def test_less_than_a_second_is_refused() -> None:
    since, until = "2026-02-19T08:00:00Z", "2026-02-19T08:00:00.093Z"
    with pytest.raises(UsageError, match="shorter than a second"):
        resolve_interval(since, until, NOON, UTC)
    begin, end = resolve_interval(since, "2026-02-19T08:00:01Z", NOON, UTC)
    assert len(divide_interval(begin, end, "month", UTC)) == 1


def test_there_may_be_only_so_many_periods() -> None:
    with pytest.raises(UsageError, match="choose weeks or months"):
        divide_interval(NOON - timedelta(days=5000), NOON, "day", UTC)


BOUNDS = st.lists(st.integers(0, 1000), min_size=2, max_size=8, unique=True).map(sorted)


@given(BOUNDS, st.integers(-200, 1200), st.integers(1, 500))
def test_what_ran_is_shared_out_without_a_rest(bounds: list[int], start: int, length: int) -> None:
    periods = Periods([us(bound) for bound in bounds])
    shares = dict(periods.split_seconds(piece(start, start + length)))
    inside = max(0, min(start + length, bounds[-1]) - max(start, bounds[0]))
    assert sum(shares.values()) == inside
    for number, seconds in shares.items():
        assert 0 < seconds <= bounds[number + 1] - bounds[number]


@given(BOUNDS, st.integers(-200, 1200), st.integers(0, 600))
def test_what_was_over_within_a_second_ran_in_one_period(
    bounds: list[int], start: int, suspended: int
) -> None:
    periods = Periods([us(bound) for bound in bounds])
    shares = list(periods.split_seconds(piece(start, start, suspended_s=suspended)))
    number = periods.find_period(us(start))
    assert shares == ([] if number is None else [(number, 0)])
    assert (number is None) == (not bounds[0] <= start < bounds[-1])


@given(BOUNDS, st.integers(-200, 1200), st.integers(0, 500))
def test_a_run_ends_in_a_period_that_it_ran_in(bounds: list[int], start: int, length: int) -> None:
    periods = Periods([us(bound) for bound in bounds])
    one = piece(start, start + length)
    ended = periods.find_end_period([one])
    every = [number for number, _ in periods.split_seconds(one)]
    is_within = start + length <= bounds[-1]
    assert ended == (every[-1] if every and is_within else None)


@given(BOUNDS, st.integers(-200, 1200), st.integers(1, 500), st.integers(0, 600))
def test_a_suspension_is_taken_off_once(
    bounds: list[int], start: int, length: int, suspended: int
) -> None:
    one = piece(start, start + length, suspended_s=suspended)
    every = Periods([us(-300), *(us(bound) for bound in bounds), us(2000)])
    total = sum(seconds for _, seconds in every.split_seconds(one))
    exact = max(0, length - suspended)
    assert exact - every.count <= total <= exact
    assert sum(seconds for _, seconds in Periods([us(-300), us(2000)]).split_seconds(one)) == exact


def test_what_goes_on_is_counted_to_the_end() -> None:
    periods = Periods([us(0), us(100), us(200)])
    assert list(periods.split_seconds(piece(50, None))) == [(0, 50), (1, 100)]
    assert list(periods.split_seconds(piece(300, None))) == []
    assert list(periods.split_seconds(piece(300, 400))) == []
    assert [periods.find_period(us(second)) for second in (-1, 0, 99, 100, 199, 200)] == [
        *(None, 0, 0, 1, 1, None)
    ]


@given(
    st.lists(st.integers(0, 20 * HOUR_S), min_size=2, max_size=5, unique=True),
    st.lists(
        st.tuples(
            st.integers(-HOUR_S, 21 * HOUR_S), st.integers(0, 9 * HOUR_S), st.integers(-5, 5)
        ),
        max_size=12,
    ),
)
def test_hours_are_what_adding_second_by_second_gives(
    marks: list[int], added: list[tuple[int, int, int]]
) -> None:
    bounds = add_full_hours(marks, min(marks))
    assert all(0 < until - begin <= HOUR_S for begin, until in pairwise(bounds))
    found = BucketSums(bounds)
    for begin, length, amount in added:
        found.add(begin, begin + length, amount)
    for total, (begin, until) in zip(found.compute_sums(), pairwise(bounds), strict=True):
        assert total == sum(
            amount * max(0, min(until, start + length) - max(begin, start))
            for start, length, amount in added
        )


def test_full_hours_are_slurms() -> None:
    noon = int(NOON.timestamp())
    marks = [noon + 60, noon + 2 * HOUR_S + 5]
    assert add_full_hours(marks, 0) == [marks[0], noon + HOUR_S, noon + 2 * HOUR_S, marks[1]]
    assert add_full_hours(marks, noon + HOUR_S + 1) == [marks[0], noon + 2 * HOUR_S, marks[1]]
    assert at(0) == NOON
