"""The client leaves, at each moment of a request: every leg that still works is told, once, and nothing is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.core.events import RefuseReason
from tests.router.table import GREEDY, Table
from tests.support.virtual_time import run_virtual

MOMENTS = {
    "issued": (0.5, 1, 0),
    "reserved": (1.5, 1, 1),
    "first token": (2.5, 1, 1),
    "committed": (3.5, 1, 0),
    "decoding": (5.5, 1, 0),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_leaving_a_relay(moment: str, n: int) -> None:
    async def story() -> None:
        when, at_decode, at_prefill = MOMENTS[moment]
        table = Table()
        guest = table.seat(replace(GREEDY, max_tokens=50), n=n)
        await asyncio.sleep(when)
        await table.leaves(guest)
        assert [cancel.choices for cancel in table.worker("decode-0").cancels] == [()] * at_decode
        assert [cancel.choices for cancel in table.worker("prefill-0").cancels] == [()] * at_prefill
        await table.assert_empty()

    run_virtual(story())


def test_leaving_before_a_worker_was_asked() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=0)
        guest = table.seat()
        await asyncio.sleep(0.5)
        await table.leaves(guest)
        await table.assert_empty()

    run_virtual(story())


def test_leaving_after_the_end_tells_nobody() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve()
        await table.leaves(guest)
        assert not table.worker("decode-0").cancels
        assert not table.worker("prefill-0").cancels

    run_virtual(story())


def test_leaving_while_waiting_for_room_hands_the_turn_on() -> None:
    async def story() -> None:
        table = Table()
        table.worker("decode-0").refusals = [(RefuseReason.NO_ROOM, 5_000)]
        first = table.seat()
        await asyncio.sleep(0.5)
        second = table.seat()
        await asyncio.sleep(0.5)
        await table.leaves(first)
        await table.finish(second)
        assert second.ids() == second.expected()
        await table.assert_empty()

    run_virtual(story())


def test_leaving_during_a_replay() -> None:
    async def story() -> None:
        table = Table(decode=2)
        guest = table.seat(replace(GREEDY, max_tokens=50), n=2)
        await asyncio.sleep(5.5)
        table.worker("decode-0").die()
        await asyncio.sleep(1.5)
        await table.leaves(guest)
        assert not table.worker("decode-0").cancels
        assert sorted(cancel.attempt for cancel in table.worker("decode-1").cancels) == [1, 2]
        await table.assert_empty()

    run_virtual(story())


def test_a_hundred_leave_at_every_fiftieth_of_a_second() -> None:
    async def story() -> None:
        table = Table(prefill=2, decode=2)
        for worker in table.fleet.workers.values():
            worker.num_blocks = 1_000
        guests = [table.seat(replace(GREEDY, max_tokens=40)) for _ in range(100)]
        for guest in guests:
            await asyncio.sleep(0.05)
            await table.leaves(guest)
        await table.assert_empty()
        cancels = [(each.request_id, worker.record.worker_id) for worker in table.fleet.workers.values()
                   for each in worker.cancels]
        assert len(cancels) == len(set(cancels))

    run_virtual(story())
