from datetime import UTC, datetime, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.bank.errors import NoRate
from steward.bank.money import round_half_up
from steward.bank.prices import (
    compute_highest_price,
    compute_price,
    find_rate,
    get_highest_permille,
    get_permille,
    split_by_factor,
)
from steward.bank.records import Rate, ResourceUse, TimeFactor
from steward.core.timestamps import to_micros

SU = 1_000_000
PARIS = ZoneInfo("Europe/Paris")
NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
WEEK = tuple(range(7))
NIGHT = (
    TimeFactor(days=WEEK, begin_min=0, end_min=360, permille=500),
    TimeFactor(days=WEEK, begin_min=1320, end_min=1440, permille=500),
)


def cost(rate: Rate, seconds: int = 3600, state: str = "COMPLETED", **tres: int) -> int:
    use = ResourceUse(tres=tres, start=NOW, seconds=seconds, state=state)
    return compute_price(use, rate, UTC).amount


def test_the_weighted_tres_are_added() -> None:
    rate = Rate(weights={"cpu": SU, "mem": SU // 4, "node": 3 * SU})
    assert cost(rate, cpu=4, mem=8192, node=1) == 4 * SU + 2 * SU + 3 * SU


def test_or_the_dearest_counts() -> None:
    rate = Rate(weights={"cpu": SU, "mem": SU // 4}, combine="max")
    assert cost(rate, cpu=4, mem=8192) == 4 * SU
    assert cost(rate, cpu=1, mem=8192) == 2 * SU


def test_a_fraction_of_an_hour_is_rounded_once_and_half_up() -> None:
    assert cost(Rate(weights={"cpu": 1}), seconds=1800, cpu=1) == 1
    assert cost(Rate(weights={"cpu": 1}), seconds=1799, cpu=1) == 0
    # Each alone would be rounded up; their sum is 1.5.
    rate = Rate(weights={"cpu": 1, "node": 1, "mem": 1024})
    assert cost(rate, seconds=1800, cpu=1, node=1, mem=1) == 2


def test_a_typed_gpu_is_not_counted_twice() -> None:
    rate = Rate(weights={"gres/gpu": SU, "gres/gpu:a100": 5 * SU})
    use = ResourceUse(tres={"gres/gpu": 3, "gres/gpu:a100": 2}, start=NOW, seconds=3600)
    assert compute_price(use, rate, UTC).amount == 2 * 5 * SU + SU


def test_a_gpu_of_a_type_without_a_weight_has_the_weight_of_all() -> None:
    rate = Rate(weights={"gres/gpu": SU, "gres/gpu:a100": 5 * SU})
    for tres in ({"gres/gpu": 2, "gres/gpu:v100": 2}, {"gres/gpu:v100": 2}):
        assert (
            compute_price(ResourceUse(tres=tres, start=NOW, seconds=3600), rate, UTC).amount
            == 2 * SU
        )


def test_licenses_and_slurms_own_billing() -> None:
    rate = Rate(weights={"license/matlab": 2 * SU, "billing": SU})
    use = ResourceUse(tres={"license/matlab": 3, "billing": 7, "cpu": 99}, start=NOW, seconds=3600)
    assert compute_price(use, rate, UTC).amount == 13 * SU


def test_the_minimum_and_what_it_is_changed_by() -> None:
    rate = Rate(weights={"cpu": SU}, minimum=SU, ends_permille={"NODE_FAIL": 0, "PREEMPTED": 500})
    assert cost(rate, seconds=1, cpu=1) == SU
    assert cost(rate, seconds=0, cpu=1) == SU
    assert cost(rate, seconds=7200, cpu=1) == 2 * SU
    assert cost(rate, seconds=7200, state="NODE_FAIL", cpu=1) == 0
    assert cost(rate, seconds=7200, state="PREEMPTED", cpu=1) == SU


def test_the_factor_of_a_qos() -> None:
    rate = Rate(weights={"cpu": SU}, qos_permille={"urgent": 2500})
    use = ResourceUse(tres={"cpu": 2}, start=NOW, seconds=3600, qos="urgent")
    assert compute_price(use, rate, UTC).amount == 5 * SU


def test_free_is_what_is_written_to_be_free_and_nothing_else() -> None:
    free = Rate(partition="debug", free=True, number=7, note="short tests")
    found = compute_price(ResourceUse(tres={"cpu": 9}, start=NOW, seconds=3600), free, UTC)
    assert found.amount == 0
    assert found.lines[0].description == "free by rate 7 (short tests)"
    for rates in ([], [Rate(partition="other", weights={"cpu": 1})], [Rate(partition="main")]):
        with pytest.raises(NoRate, match="main") as error:
            find_rate(rates, "c", "main", "", NOW)
        assert error.value.offender == "main"


def test_the_rate_that_names_most_goes_first() -> None:
    def of(number: int, partition: str, **more: str) -> Rate:
        return Rate(number=number, partition=partition, weights={"cpu": 1}, **more)  # type: ignore[arg-type] # texts alone

    every = [of(1, "*"), of(2, "*", cluster="c"), of(3, "main"), of(4, "main", qos="high")]
    every += [of(5, "main", cluster="other"), of(6, "Main")]
    assert find_rate(every, "c", "main", "high", NOW).number == 4
    assert find_rate(every, "c", "main", "low", NOW).number == 3
    assert find_rate(every, "c", "gpu", "high", NOW).number == 2
    assert find_rate(every, "d", "gpu", "", NOW).number == 1
    assert find_rate(every, "c", "Main", "", NOW).number == 6


def test_a_rate_holds_for_jobs_first_submitted_from_its_date_on() -> None:
    rates = [
        Rate(number=1, weights={"cpu": 1}),
        Rate(number=2, weights={"cpu": 2}, valid_from=NOW),
        Rate(number=3, weights={"cpu": 3}, valid_from=NOW + timedelta(days=1)),
    ]
    assert find_rate(rates, "c", "p", "", NOW - timedelta(seconds=1)).number == 1
    assert find_rate(rates, "c", "p", "", NOW).number == 2
    assert find_rate(rates, "c", "p", "", NOW + timedelta(days=2)).number == 3


def test_a_rate_that_came_later_reprices_nothing() -> None:
    created = to_micros(NOW)
    old = Rate(number=1, weights={"cpu": 1}, created_us=created - 9 * SU)
    late = Rate(
        number=2,
        partition="p",
        weights={"cpu": 9},
        valid_from=NOW - timedelta(days=9),
        created_us=created + 400_000,
    )
    before = NOW - timedelta(seconds=1)
    assert find_rate([old, late], "c", "p", "", before).number == 1
    assert find_rate([old, late], "c", "p", "", NOW).number == 2
    # Without an earlier rate, the first one applies to jobs shortly before its start.
    assert find_rate([late], "c", "p", "", before).number == 2
    assert find_rate([old, late], "c", "p", "", NOW - timedelta(seconds=10)).number == 2
    with pytest.raises(NoRate):
        find_rate([late], "c", "p", "", NOW - timedelta(days=10))


def test_the_lines_can_be_added_up_by_a_person() -> None:
    rate = Rate(
        weights={"cpu": SU, "mem": SU // 4},
        factors=NIGHT,
        qos_permille={"low": 500},
        ends_permille={"PREEMPTED": 500},
    )
    use = ResourceUse(
        tres={"cpu": 4, "mem": 8192},
        start=datetime(2026, 3, 2, 21, tzinfo=UTC),
        seconds=7200,
        qos="low",
        state="PREEMPTED",
    )
    found = compute_price(use, rate, UTC)
    assert [(line.description, line.amount) for line in found.lines] == [
        ("4 cpu x 1.00 an hour", 4 * SU),
        ("8 GiB mem x 0.25 an hour", 2 * SU),
        ("sum per hour", 6 * SU),
        ("01:00:00", None),
        ("01:00:00 at x 0.5", None),
        ("QOS low: x 0.5", None),
        ("price for this time", 4_500_000),
        ("ended PREEMPTED: x 0.5", None),
        ("sum", 2_250_000),
    ]


def test_the_clock_is_that_of_the_clusters_wall() -> None:
    start = datetime(2026, 1, 5, 20, 30, tzinfo=UTC)  # 21:30 in Paris
    assert split_by_factor(NIGHT, start, 3600, PARIS) == {1000: 1800, 500: 1800}
    assert split_by_factor(NIGHT, start, 3600, UTC) == {1000: 3600}


def test_days_of_the_week() -> None:
    weekend = (TimeFactor(days=(5, 6), begin_min=0, end_min=1440, permille=200),)
    friday = datetime(2026, 3, 6, 23, tzinfo=UTC)
    assert split_by_factor(weekend, friday, 3 * 86400, UTC) == {1000: 86400, 200: 2 * 86400}


def test_a_night_when_clocks_go_forward_is_an_hour_shorter() -> None:
    start = datetime(2026, 3, 28, 22, tzinfo=PARIS)
    assert split_by_factor(NIGHT, start, 12 * 3600, PARIS) == {500: 7 * 3600, 1000: 5 * 3600}


def test_a_night_when_clocks_go_back_is_an_hour_longer() -> None:
    start = datetime(2026, 10, 24, 22, tzinfo=PARIS)
    assert split_by_factor(NIGHT, start, 12 * 3600, PARIS) == {500: 9 * 3600, 1000: 3 * 3600}


def test_an_hour_that_comes_twice_has_its_factor_twice() -> None:
    twice = (TimeFactor(days=(6,), begin_min=120, end_min=180, permille=3000),)
    start = datetime(2026, 10, 24, 22, tzinfo=UTC)  # midnight in Paris
    assert split_by_factor(twice, start, 6 * 3600, PARIS) == {1000: 4 * 3600, 3000: 2 * 3600}


def test_the_first_factor_that_names_a_moment_holds() -> None:
    both = (
        TimeFactor(days=(0,), begin_min=0, end_min=60, permille=100),
        TimeFactor(days=WEEK, begin_min=0, end_min=1440, permille=3000),
    )
    assert get_permille(both, 0, 59) == 100
    assert get_permille(both, 0, 60) == 3000
    assert get_highest_permille(both) == 3000


def test_cheap_all_week_is_cheap_at_its_dearest() -> None:
    assert (
        get_highest_permille((TimeFactor(days=WEEK, begin_min=0, end_min=1440, permille=200),))
        == 200
    )
    assert get_highest_permille(NIGHT) == 1000
    assert get_highest_permille(()) == 1000


factors = st.lists(
    st.builds(
        lambda days, begin, length, permille: TimeFactor(
            days=tuple(days), begin_min=begin, end_min=min(1440, begin + length), permille=permille
        ),
        st.sets(st.integers(0, 6), min_size=1),
        st.integers(0, 1439),
        st.integers(1, 1440),
        st.integers(0, 4000),
    ),
    max_size=4,
).map(tuple)
first, last = datetime(2026, 1, 1), datetime(2026, 12, 1)  # noqa: DTZ001 # a zone comes with them
starts = st.datetimes(first, last, timezones=st.just(UTC))
zones = st.sampled_from([UTC, PARIS, ZoneInfo("America/New_York"), ZoneInfo("Asia/Kathmandu")])


@given(factors, starts, st.integers(0, 200_000), zones)
def test_the_parts_of_a_time_are_what_its_minutes_say(
    of: tuple[TimeFactor, ...], start: datetime, seconds: int, zone: ZoneInfo
) -> None:
    start = start.replace(second=0, microsecond=0)
    minutes, rest = divmod(seconds, 60)
    expected: dict[int, int] = {}
    for minute in range(minutes + 1):
        clock = (start + timedelta(minutes=minute)).astimezone(zone)
        permille = get_permille(of, clock.weekday(), clock.hour * 60 + clock.minute)
        part = 60 if minute < minutes else rest
        expected[permille] = expected.get(permille, 0) + part
    found = split_by_factor(of, start, seconds, zone)
    assert found == {permille: part for permille, part in expected.items() if part}
    assert sum(found.values()) == seconds


rates = st.builds(
    Rate,
    weights=st.dictionaries(
        st.sampled_from(["cpu", "mem", "node", "gres/gpu", "gres/gpu:a", "billing"]),
        st.integers(0, 10**9),
        min_size=1,
    ),
    combine=st.sampled_from(["sum", "max"]),
    minimum=st.integers(0, 10**7),
    factors=factors,
    qos_permille=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3000)),
    ends_permille=st.dictionaries(st.sampled_from(["COMPLETED", "FAILED"]), st.integers(0, 2000)),
)
uses = st.builds(
    ResourceUse,
    tres=st.dictionaries(st.sampled_from(["cpu", "mem", "node", "billing"]), st.integers(0, 10**6)),
    start=starts,
    seconds=st.integers(0, 10**6),
    qos=st.sampled_from(["", "a", "b"]),
    state=st.sampled_from(["COMPLETED", "FAILED", "TIMEOUT"]),
)


@given(rates, uses, zones)
def test_no_price_is_above_the_dearest_nor_below_zero(
    rate: Rate, use: ResourceUse, zone: ZoneInfo
) -> None:
    found = compute_price(use, rate, zone)
    assert 0 <= found.amount <= compute_highest_price(use, rate).amount
    assert found.lines[-1].amount == found.amount


@given(uses, st.integers(0, 10**9), st.integers(1, 10**6))
def test_a_price_is_the_exact_product(use: ResourceUse, weight: int, cpus: int) -> None:
    use = ResourceUse(tres={"cpu": cpus}, start=use.start, seconds=use.seconds)
    exact = Fraction(weight * cpus * use.seconds, 3600)
    assert compute_price(use, Rate(weights={"cpu": weight}), UTC).amount == round_half_up(exact)
