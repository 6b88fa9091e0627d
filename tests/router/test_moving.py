"""Choices whose worker goes down while they run: they move, and the guest does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.core.events import FailReason, RefuseReason
from kvrelay.core.request import Leg, SamplingParams
from kvrelay.router.scripted import ScriptedWorker
from tests.router.table import GREEDY, Guest, Table, assert_undisturbed
from tests.support.virtual_time import run_virtual

LONG = replace(GREEDY, max_tokens=30)
SEEDED = SamplingParams(max_tokens=30, temperature=1.0, seed=11, logprobs=2)


def serving(table: Table, guest: Guest) -> ScriptedWorker:
    """The decode worker that runs it now."""
    [worker] = [
        each for each in table.fleet.workers.values()
        if each.record.role.can_decode
        and any(leg.start.request_id == guest.request.request_id and not leg.forgotten for leg in each.legs.values())
    ]
    return worker


def other(table: Table, worker: ScriptedWorker) -> ScriptedWorker:
    return next(each for each in table.fleet.workers.values() if each.record.role.can_decode and each is not worker)


async def seated(table: Table, sampling: SamplingParams = LONG, seconds: float = 6.0, **fields: object) -> Guest:
    guest = table.seat(sampling, **fields)
    await asyncio.sleep(seconds)
    assert guest.ids(), "it runs"
    return guest


@pytest.mark.parametrize("sampling", [LONG, SEEDED])
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
def test_a_running_answer_moves_and_nobody_notices(sampling: SamplingParams, prefill: int, n: int) -> None:
    async def story() -> None:
        table = Table(prefill=prefill, decode=2)
        guest = await seated(table, sampling, 8.0, n=n)
        source = serving(table, guest)
        source.leave()
        await asyncio.sleep(5.0)
        assert source.is_empty, "it may go"
        source.die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.num_attempts == 1, "a move is no attempt"
        assert guest.summary.decode_worker == other(table, source).record.worker_id
        moves = [start for start in other(table, source).starts if start.replay]
        assert [start.leg for start in moves] == [Leg.RECEIVE] * n
        await table.assert_empty()

    run_virtual(story())


def test_an_answer_moves_on_and_on() -> None:
    async def story() -> None:
        table = Table(decode=2)
        guest = await seated(table)
        for _ in range(4):
            source = serving(table, guest)
            source.leave()
            await asyncio.sleep(4.0)
            assert source.is_empty
            source.draining = False
        await table.finish(guest)
        assert_undisturbed(guest)
        await table.assert_empty()

    run_virtual(story())


def test_no_place_elsewhere_it_goes_on_and_moves_when_one_comes() -> None:
    async def story() -> None:
        table = Table(decode=1)
        guest = await seated(table)
        source = serving(table, guest)
        source.leave()
        await asyncio.sleep(5.0)
        assert serving(table, guest) is source
        table.fleet.add("decode-new", source.record.role)
        await asyncio.sleep(4.0)
        assert source.is_empty
        await table.finish(guest)
        assert_undisturbed(guest)
        await table.assert_empty()

    run_virtual(story())


def target_dies(source: ScriptedWorker, target: ScriptedWorker) -> None:
    target.die()


def source_dies(source: ScriptedWorker, target: ScriptedWorker) -> None:
    source.die()


def push_breaks(source: ScriptedWorker, target: ScriptedWorker) -> None:
    source.break_pushes = 1


def both_die(source: ScriptedWorker, target: ScriptedWorker) -> None:
    source.die()
    target.die()
    source.revive()


def target_fails(source: ScriptedWorker, target: ScriptedWorker) -> None:
    for leg in list(target.legs.values()):
        leg.push_broke()


def target_is_slow_to_say(source: ScriptedWorker, target: ScriptedWorker) -> None:
    """The source has said that it is over, and gone, long before the target's word is here."""
    target.line_s = 4.0


def source_is_slow_to_say(source: ScriptedWorker, target: ScriptedWorker) -> None:
    source.line_s = 4.0


MISFORTUNES = [
    target_dies, source_dies, push_breaks, both_die, target_fails, target_is_slow_to_say, source_is_slow_to_say,
]


@pytest.mark.parametrize("misfortune", MISFORTUNES)
@pytest.mark.parametrize("moment_s", [0.0, 0.5, 1.5, 2.5, 3.5])
@pytest.mark.parametrize("sampling", [LONG, SEEDED])
def test_whatever_happens_on_the_way(
    misfortune: Callable[[ScriptedWorker, ScriptedWorker], None], moment_s: float, sampling: SamplingParams
) -> None:
    async def story() -> None:
        table = Table(decode=3)
        guest = await seated(table, sampling)
        source = serving(table, guest)
        source.transfer_s = 2.0
        source.leave()
        await asyncio.sleep(moment_s)
        target = next(
            (each for each in table.fleet.workers.values() if each is not source and each.record.role.can_decode
             and each.legs), other(table, source),
        )
        misfortune(source, target)
        await table.finish(guest)
        assert_undisturbed(guest)
        await asyncio.sleep(20.0)
        await table.assert_empty()

    run_virtual(story())


def test_a_target_that_refuses_is_not_the_only_one() -> None:
    async def story() -> None:
        table = Table(decode=3)
        guest = await seated(table)
        source = serving(table, guest)
        targets = [each for each in table.fleet.workers.values() if each.record.role.can_decode and each is not source]
        targets[0].refusals = targets[1].refusals = []
        targets[0].refusals = [(RefuseReason.NO_ROOM, 500)]
        source.leave()
        await asyncio.sleep(6.0)
        assert source.is_empty
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.decode_worker == targets[1].record.worker_id
        await table.assert_empty()

    run_virtual(story())


def test_targets_that_always_refuse_are_asked_a_few_times_only() -> None:
    async def story() -> None:
        table = Table(decode=2)
        guest = await seated(table)
        source = serving(table, guest)
        target = other(table, source)
        target.refusals = [(RefuseReason.NO_ROOM, 500)] * 100
        source.leave()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert len(target.starts) == 5
        await table.assert_empty()

    run_virtual(story())


@pytest.mark.parametrize("moment_s", [0.0, 0.5, 1.5, 2.5, 3.5])
def test_a_client_that_leaves_on_the_way(moment_s: float) -> None:
    async def story() -> None:
        table = Table(decode=2)
        guest = await seated(table)
        source = serving(table, guest)
        source.transfer_s = 2.0
        source.leave()
        await asyncio.sleep(moment_s)
        await table.leaves(guest)
        await asyncio.sleep(10.0)
        await table.assert_empty()

    run_virtual(story())


@pytest.mark.parametrize("moment_s", [0.5, 1.5, 2.5])
def test_a_stop_string_on_the_way_ends_it_everywhere(moment_s: float) -> None:
    async def story() -> None:
        table = Table(decode=2)
        plain = await table.serve(LONG)
        table = Table(decode=2)
        stop = plain.text()[8:10]
        guest = await seated(table, stop=(stop,), seconds=5.0)
        source = serving(table, guest)
        source.transfer_s = 3.0
        await asyncio.sleep(moment_s)
        source.leave()
        await table.finish(guest)
        assert guest.text() == plain.text()[: plain.text().index(stop)]
        assert guest.finish().stop_reason == stop
        await asyncio.sleep(10.0)
        await table.assert_empty()

    run_virtual(story())


def test_what_a_draining_worker_has_not_begun_with_costs_no_attempt() -> None:
    async def story() -> None:
        table = Table(prefill=2, decode=1, max_attempts=1)
        table.worker("prefill-0").failures = table.worker("prefill-1").failures = {}
        table.worker("prefill-0").failures = {0: FailReason.DRAINING}
        guest = await table.serve(LONG)
        assert_undisturbed(guest)
        await table.assert_empty()

    run_virtual(story())
