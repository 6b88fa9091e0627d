"""The time limit of a stream: it strikes when `asyncio.timeout` would, and takes no cancellation for its own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.patience import Patience
from tests.support.virtual_time import run_virtual


async def _outlasts(patience: Patience, wait_s: float, limit_s: float | None) -> tuple[bool, float]:
    """(whether the wait came to its end, when)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        with patience.for_s(limit_s):
            await asyncio.sleep(wait_s)
    except TimeoutError:
        return False, loop.time() - began
    return True, loop.time() - began


WAITS = st.tuples(st.integers(0, 20), st.none() | st.integers(1, 20), st.integers(0, 9))
"""Seconds: how long it takes, its limit, the pause after it."""


@settings(max_examples=100, deadline=None)
@given(st.lists(WAITS, max_size=12))
def test_every_wait_of_a_row_has_its_own_limit(waits: list[tuple[int, int | None, int]]) -> None:
    """Halves keep the end of a wait and its limit apart."""

    async def story() -> None:
        patience = Patience()
        for wait_s, limit, pause_s in waits:
            limit_s = None if limit is None else limit + 0.5
            came, took_s = await _outlasts(patience, wait_s, limit_s)
            assert came == (limit_s is None or wait_s < limit_s)
            assert took_s == pytest.approx(wait_s if came else limit_s)
            await asyncio.sleep(pause_s)
        patience.close()
        await asyncio.sleep(100)

    run_virtual(story())


def test_a_cancellation_from_outside_stays_one() -> None:
    async def story() -> None:
        patience = Patience()
        waiting = asyncio.create_task(_outlasts(patience, 10, 5))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_virtual(story())


def test_a_cancellation_in_the_moment_of_the_limit_is_not_swallowed() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        patience = Patience()
        waiting = asyncio.create_task(_outlasts(patience, 10, 5))
        loop.call_at(loop.time() + 5, waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_virtual(story())
