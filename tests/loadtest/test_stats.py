"""Percentiles and what is made of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_loadtest.stats import cumulative, percentile, rate, ratio_to_best, spread

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_between_two_measurements_a_percentile_interpolates() -> None:
    assert percentile([10.0, 20.0], 50) == 15.0
    assert percentile([3.0], 99) == 3.0
    assert percentile([1, 2, 3, 4, 5], 100) == 5


@given(NUMBERS, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_a_spread_without_values_says_so_instead_of_zero() -> None:
    assert spread([]) == {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None, "max": None}
    assert spread([1.0, 3.0])["mean"] == 2.0


def test_ours_is_compared_with_the_best_peer() -> None:
    assert ratio_to_best(120.0, {"a": 60.0, "b": 100.0}) == pytest.approx(1.2)
    assert ratio_to_best(120.0, {}) is None
    assert rate(10, 0) == 0.0


@given(NUMBERS)
def test_a_distribution_ends_at_its_largest_value(values: list[float]) -> None:
    points = cumulative(values, 10)
    assert points[-1] == (max(values), 1.0)
    assert points == sorted(points)
