"""The search for a goodput rate, on systems that hold out up to a known rate."""

from __future__ import annotations

import pytest

from kvrelay_loadtest.relay_search import CLOSE, HIGHEST, LOWEST, STEP, goodput_rate, next_rate


def search(limit: float, start: float, tries: int) -> dict[float, bool]:
    tried: dict[float, bool] = {}
    while (rate := next_rate(tried, start, tries)) is not None:
        assert rate not in tried
        tried[rate] = rate <= limit
    return tried


@pytest.mark.parametrize("limit", [0.07, 0.49, 0.5, 0.9, 7.0])
def test_with_enough_tries_the_limit_is_found_to_within_a_quarter(limit: float) -> None:
    found = goodput_rate(search(limit, start=0.5, tries=20))
    assert found <= limit < found * STEP
    assert limit / found <= CLOSE * 1.001 or limit < found * CLOSE


def test_the_first_run_is_at_the_start_and_the_next_one_a_step_away() -> None:
    assert list(search(9.0, start=0.5, tries=2)) == [0.5, 0.5 * STEP]
    assert list(search(0.1, start=0.5, tries=2)) == [0.5, 0.5 / STEP]


def test_between_met_and_missed_comes_their_mean() -> None:
    assert next_rate({1.0: True, 1.6: False}, 1.0, 9) == pytest.approx(1.6**0.5)
    assert next_rate({1.0: True, 1.2: False}, 1.0, 9) is None


def test_no_search_is_longer_than_its_tries_nor_leaves_sensible_rates() -> None:
    assert len(search(1e9, start=0.5, tries=3)) == 3
    assert max(search(1e9, start=0.5, tries=99)) <= HIGHEST
    assert min(search(0.0, start=0.5, tries=99)) >= LOWEST
    assert goodput_rate(search(0.0, start=0.5, tries=99)) == 0.0


def test_a_missed_rate_below_a_met_one_ends_the_search() -> None:
    """Noise: nothing between them can be told apart by another run."""
    assert next_rate({0.5: False, 0.3: True, 0.4: True, 0.45: True}, 0.5, 9) is None
    assert next_rate({0.5: True, 0.4: False}, 0.5, 9) is None
