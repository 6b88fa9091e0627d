"""Clients that leave: what they asked for stops at once, and nothing of it is left.

`SOAK_ABORTS` says how many leave (`make soak`: ten thousand); a few hundred without it.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from kvrelay.core.placement import Role
from kvrelay.core.request import SamplingParams
from tests.support.town import STEP_S, Town, TownGuest
from tests.support.virtual_time import run_virtual

NUM_ABORTS = int(os.environ.get("SOAK_ABORTS", "300"))
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
LONG_PROMPT = [(3 * i) % 200 for i in range(220)]
CROWD = 40
"""Guests who are in at one time."""


@pytest.mark.parametrize("chunks", [0, 1, 2, 5])
def test_prefill_stops_within_one_chunk_and_the_next_starts_at_once(chunks: int) -> None:
    async def story() -> None:
        town = Town(worker={"max_batch_tokens": 16})
        [prefill] = [worker for worker in town.workers.values() if worker.record.role is Role.PREFILL]
        plans = prefill.plant.runner.plans
        leaver = town.seat(GREEDY, LONG_PROMPT)
        await town.until(lambda: len(plans) > chunks)
        follower = town.seat(GREEDY, [7, *LONG_PROMPT[:10]])
        await asyncio.sleep(0)
        await town.leaves(leaver)
        num_before = len(plans)
        await town.finish(follower)
        follower.assert_undisturbed()
        rows = [row.key.request_id for plan in plans[num_before:] for row in plan.rows]
        assert rows == [follower.request.request_id], "not one more chunk for nobody"
        await town.assert_empty()

    run_virtual(story())


def test_a_queue_of_those_who_have_left_holds_nobody_up() -> None:
    async def story() -> None:
        town = Town(worker={"max_batch_tokens": 16})
        leavers = [town.seat(GREEDY, [i, *LONG_PROMPT]) for i in range(20)]
        await asyncio.sleep(4 * STEP_S)
        for leaver in leavers:
            await town.leaves(leaver)
        began = town.loop.time()
        follower = town.seat(GREEDY, [7, *LONG_PROMPT[:10]])
        await town.until(lambda: follower.ids())
        assert town.loop.time() - began <= 8 * STEP_S, "a prompt of one chunk, behind nobody"
        await town.finish(follower)
        await town.assert_empty()

    run_virtual(story())


def test_leaving_at_any_moment_leaves_nothing() -> None:
    async def story(seed: int, count: int) -> None:
        chance = random.Random(seed)
        town = Town(prefill=2, decode=2, frame_s=0.02, worker={"max_batch_tokens": 32, "num_blocks": 96})
        stayers: list[TownGuest] = []
        under_way: set[asyncio.Task[None]] = set()

        async def leave(guest: TownGuest) -> None:
            await asyncio.sleep(chance.choice([0.0, STEP_S, 1.0, 3.0]) * chance.random())
            await town.leaves(guest)

        for number in range(count):
            sampling = SamplingParams(chance.randint(1, 60), temperature=chance.choice([0.0, 1.0]), seed=number)
            prompt = [chance.randrange(200) for _ in range(chance.randint(1, 120))]
            guest = town.seat(sampling, prompt, n=chance.choice([1, 1, 2, 3]))
            if chance.random() < 0.1:
                stayers.append(guest)
            else:
                under_way.add(asyncio.ensure_future(leave(guest)))
            if chance.random() < 0.01:
                await replace_one(town, chance, number)
            while len(under_way) >= CROWD:
                _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(chance.choice([0.0, 0.0, STEP_S / 2, STEP_S]))
        if under_way:
            await asyncio.wait(under_way)
        for guest in stayers:
            await town.finish(guest)
            guest.assert_undisturbed()
        await town.assert_empty()
        for worker in town.everybody:
            worker.plant.check()

    for part in range(0, NUM_ABORTS, 500):
        run_virtual(story(part, min(500, NUM_ABORTS - part)))


async def replace_one(town: Town, chance: random.Random, number: int) -> None:
    worker = chance.choice(list(town.workers.values()))
    town.add(f"{worker.record.role.value}-new-{number}", worker.record.role)
    assert await worker.drain()
    worker.plant.assert_empty()
    worker.end()
