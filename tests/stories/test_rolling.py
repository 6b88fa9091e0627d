"""Workers are replaced while they serve, and fail while they are being replaced: nobody's answer changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.core.placement import Role
from kvrelay.core.request import SamplingParams
from tests.support.town import Town, TownGuest, TownWorker
from tests.support.virtual_time import run_virtual

GREEDY = SamplingParams(max_tokens=180, temperature=0.0)
KINDS = [
    GREEDY,
    replace(GREEDY, logprobs=2),
    replace(GREEDY, temperature=1.0, seed=3),
    replace(GREEDY, temperature=1.0, seed=4, logprobs=1, frequency_penalty=0.5),
]
ROOMY = {"num_blocks": 512}


def crowd(town: Town, count: int) -> list[TownGuest]:
    """Prompts of all lengths around the edges of blocks; every fourth asks for two answers."""
    return [
        town.seat(KINDS[i % len(KINDS)], [(7 * i + j) % 200 for j in range(1 + 3 * i)], n=2 if i % 4 == 1 else 1)
        for i in range(count)
    ]


def all_speak(guests: list[TownGuest]) -> bool:
    return all(guest.ids(choice) for guest in guests for choice in range(guest.request.n))


async def replace_by_new(town: Town, worker: TownWorker, number: int) -> None:
    town.add(f"{worker.record.role.value}-new-{number}", worker.record.role)
    assert await worker.drain(), "it gave everything away within its grace"
    worker.plant.assert_empty()
    worker.end()


def test_twenty_streams_over_the_replacement_of_every_worker() -> None:
    async def story() -> None:
        town = Town(prefill=2, decode=2, worker=ROOMY)
        guests = crowd(town, 20)
        await town.until(lambda: all_speak(guests))
        for number, worker in enumerate(list(town.workers.values())):
            newcomer = town.seat(GREEDY, range(60 + number))
            await replace_by_new(town, worker, number)
            guests.append(newcomer)
        assert not any(guest.task.done() for guest in guests if guest.task), "all of them lived through it"
        for guest in guests:
            await town.finish(guest)
            guest.assert_undisturbed()
            assert guest.summary.num_attempts == 1 or guest in guests[20:], "moved, not replayed"
        await town.assert_empty()

    run_virtual(story())


def test_a_worker_that_is_the_only_one_waits_for_its_successor() -> None:
    async def story() -> None:
        town = Town(decode=1, worker=ROOMY)
        guests = crowd(town, 6)
        await town.until(lambda: all_speak(guests))
        [old] = [worker for worker in town.workers.values() if worker.record.role is Role.DECODE]
        draining = asyncio.ensure_future(old.drain())
        await asyncio.sleep(2.0)
        assert not draining.done()
        town.add("decode-new", Role.DECODE)
        assert await draining
        old.end()
        for guest in guests:
            await town.finish(guest)
            guest.assert_undisturbed()
        await town.assert_empty()

    run_virtual(story())


def test_what_does_not_leave_within_the_grace_is_replayed() -> None:
    async def story() -> None:
        town = Town(decode=1, worker=ROOMY)
        guests = crowd(town, 6)
        await town.until(lambda: all_speak(guests))
        [old] = [worker for worker in town.workers.values() if worker.record.role is Role.DECODE]
        assert not await old.drain(grace_s=1.0)
        old.end()
        town.add("decode-new", Role.DECODE)
        for guest in guests:
            await town.finish(guest)
            guest.assert_undisturbed()
            assert guest.summary.num_attempts > 1
        await town.assert_empty()

    run_virtual(story())


def nothing(town: Town, source: TownWorker, target: TownWorker) -> None:
    pass


def source_dies(town: Town, source: TownWorker, target: TownWorker) -> None:
    source.end()


def target_dies(town: Town, source: TownWorker, target: TownWorker) -> None:
    target.end()


def target_drains(town: Town, source: TownWorker, target: TownWorker) -> None:
    """It refuses what comes, and wants to be rid of what it has."""
    target.plant.engine.drain()
    town.add("decode-third", Role.DECODE)


def target_leaves_the_network(town: Town, source: TownWorker, target: TownWorker) -> None:
    """Nothing can be pushed to it; the router still talks to it."""
    town.door.leave(target.plant.receiver.address)
    town.add("decode-third", Role.DECODE)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    "misfortune", [nothing, source_dies, target_dies, target_drains, target_leaves_the_network]
)
def test_a_misfortune_in_the_middle_of_a_move(
    misfortune: Callable[[Town, TownWorker, TownWorker], None], after_s: float
) -> None:
    async def story() -> None:
        town = Town(prefill=1, decode=1, frame_s=0.04, worker=ROOMY)
        [source] = [worker for worker in town.workers.values() if worker.record.role is Role.DECODE]
        guests = crowd(town, 6)
        await town.until(lambda: all_speak(guests))
        target = town.add("decode-target", Role.DECODE)
        await asyncio.sleep(0.1)
        source.plant.engine.drain()
        await asyncio.sleep(after_s)
        misfortune(town, source, target)
        if misfortune is target_dies:
            town.add("decode-third", Role.DECODE)
        for guest in guests:
            await town.finish(guest)
            guest.assert_undisturbed()
        await town.assert_empty()

    run_virtual(story())


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_clients_that_leave_in_the_middle_of_a_move(after_s: float) -> None:
    async def story() -> None:
        town = Town(prefill=1, decode=2, frame_s=0.04, worker=ROOMY)
        guests = crowd(town, 8)
        await town.until(lambda: all_speak(guests))
        source = max(town.workers.values(), key=lambda worker: worker.view().load.num_running)
        source.plant.engine.drain()
        await asyncio.sleep(after_s)
        for guest in guests[::2]:
            await town.leaves(guest)
        for guest in guests[1::2]:
            await town.finish(guest)
            guest.assert_undisturbed()
        await town.assert_empty()

    run_virtual(story())
