"""Curves: equal parts of a period with minimum, mean and maximum; gaps are None."""

from steward.telemetry.chunks import merge_samples
from steward.telemetry.curves import draw_curve
from steward.telemetry.store import thin_columns


def test_a_gauge_has_minimum_mean_and_maximum_in_each_part() -> None:
    columns = merge_samples((1000 * second, {"a": second}) for second in range(0, 61, 15))
    curve = draw_curve(columns, "a", is_counter=False, start_ms=0, end_ms=60_000, count=2)
    assert (*curve.minimum, curve.mean[1], curve.maximum[1]) == (0, 45, 52.5, 60)


def test_a_gap_is_none_and_never_0() -> None:
    columns = merge_samples([(0, {"a": 5}), (15_000, {"a": 5}), (900_000, {"a": 5})])
    curve = draw_curve(columns, "a", is_counter=False, start_ms=0, end_ms=960_000, count=16)
    assert curve.mean == (5, *[None] * 14, 5)
    missing = draw_curve(columns, "b", is_counter=False, start_ms=0, end_ms=960_000, count=2)
    assert missing.mean == (None, None)


def test_a_counter_is_drawn_as_growth_per_second() -> None:
    columns = merge_samples((15_000 * n, {"a": 30 * n}) for n in range(5))
    curve = draw_curve(columns, "a", is_counter=True, start_ms=0, end_ms=60_000, count=4)
    assert (curve.minimum, curve.mean, curve.maximum) == ((2,) * 4, (2,) * 4, (2,) * 4)


def test_a_counter_that_starts_again_is_uncovered_there() -> None:
    points = [(0, 90), (15_000, 100), (30_000, 3), (45_000, 33)]
    columns = merge_samples((at_ms, {"a": value}) for at_ms, value in points)
    curve = draw_curve(columns, "a", is_counter=True, start_ms=0, end_ms=45_000, count=3)
    assert curve.mean[1] is None
    assert curve.mean[2] == 2


def test_thinned_curves_keep_their_maximum_and_have_no_false_gaps() -> None:
    samples = [(15_000 * n, {"processes": 9 if n == 30 else 1}) for n in range(80)]
    columns = thin_columns(merge_samples(samples), 300)
    curve = draw_curve(
        columns, "processes", is_counter=False, start_ms=0, end_ms=1_200_000, count=4
    )
    assert None not in curve.mean
    assert max(value or 0 for value in curve.maximum) == 9
