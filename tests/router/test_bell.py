"""A bell wakes its reader once for whatever came, and survives a reader that is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.router.bell import Bell
from tests.support.virtual_time import run_virtual


def test_rings_before_the_reader_runs_wake_it_once() -> None:
    async def story() -> None:
        bell, queue, batches = Bell(), list[int](), list[list[int]]()

        async def read() -> None:
            while sum(len(batch) for batch in batches) < 5:
                while not queue:
                    await bell.wait()
                batches.append(queue[:])
                queue.clear()

        reader = asyncio.create_task(read())
        await asyncio.sleep(1)
        for number in range(3):
            queue.append(number)
            bell.ring()
        await asyncio.sleep(1)
        for number in range(3, 5):
            queue.append(number)
            bell.ring()
        await reader
        assert batches == [[0, 1, 2], [3, 4]]

    run_virtual(story())


def test_a_reader_that_is_cancelled_leaves_a_bell_that_works() -> None:
    async def story() -> None:
        bell = Bell()
        bell.ring()
        first = asyncio.create_task(bell.wait())
        await asyncio.sleep(1)
        assert not first.done(), "a ring that nobody heard must not wake a later reader"
        bell.ring()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(bell.wait())
        await asyncio.sleep(1)
        bell.ring()
        await second

    run_virtual(story())
