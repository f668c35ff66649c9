"""What is done to numbers before they are drawn."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintain.report.plots import Line, line_chart, smooth, stacked_chart, thin
from quintain.report.render import format_duration, format_number

finite = st.floats(-1e6, 1e6)


def test_smoothing_averages_over_the_neighbours_that_exist() -> None:
    assert smooth([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]


def test_smoothing_leaves_a_gap_open_and_does_not_spread_it() -> None:
    assert smooth([1.0, math.nan, 3.0], 3)[::2] == [1.0, 3.0]
    assert math.isnan(smooth([1.0, math.nan, 3.0], 3)[1])


@given(st.lists(finite, min_size=1, max_size=50), st.integers(1, 20))
def test_a_smoothed_curve_stays_within_the_range_of_its_values(values: list[float], window: int) -> None:
    smoothed = smooth(values, window)
    slack = 1e-9 * max(map(abs, values))
    assert len(smoothed) == len(values)
    assert min(values) - slack <= min(smoothed) and max(smoothed) <= max(values) + slack


def test_thinning_averages_neighbours_and_keeps_short_series_as_they_are() -> None:
    assert thin([1.0, 3.0, 5.0, 7.0, 9.0], most=3) == [2.0, 6.0, 9.0]
    assert thin([1.0, 2.0], most=3) == [1.0, 2.0]
    assert thin([]) == []


def test_a_long_run_makes_no_larger_drawing_than_a_short_one() -> None:
    def size(steps: int) -> int:
        values = [float(step % 7) for step in range(steps)]
        return len(line_chart([Line("a", range(steps), values, 0)]))

    assert size(20_000) < 1.5 * size(600)


def test_the_same_curve_is_drawn_the_same_every_time() -> None:
    lines = [Line("a", [0.0, 1.0], [1.0, 2.0], 0)]
    assert line_chart(lines) == line_chart(lines)
    assert stacked_chart([0.0, 1.0], lines) == stacked_chart([0.0, 1.0], lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (12345.6, "12,346"), (3, "3"), (None, "–"), (math.nan, "–"), (True, "–"), (-2e-7, "-2e-07")],
)
def test_numbers_are_written_to_four_digits(value: object, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (4.26, "4.26 s"), (80, "1 min 20 s"), (3599.9, "1 h 0 min"), (7300, "2 h 1 min")]
)
def test_durations_name_their_two_largest_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
