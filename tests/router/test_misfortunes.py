"""What goes wrong, row by row of the design, and what the client sees: a pause, or an error that says why."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.core.errors import BadRequest, Broken, DeadlineExceeded, NoRoom, Unavailable
from kvrelay.core.events import FailReason, RefuseReason
from kvrelay.core.ids import Choice, TokenId
from kvrelay.core.output import Delta
from kvrelay.core.placement import Role
from kvrelay.core.request import Leg, SamplingParams
from tests.router.table import GREEDY, PROMPT, Table, assert_undisturbed
from tests.support.virtual_time import run_virtual

SEEDED = SamplingParams(max_tokens=8, seed=1234, frequency_penalty=0.5, logprobs=1)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("when", [0.5, 1.5, 2.5, 3.5, 6.5])
def test_decode_dies_and_the_stream_goes_on(sampling: SamplingParams, n: int, when: float) -> None:
    async def story() -> None:
        table = Table(decode=2)
        guest = table.seat(sampling, n=n)
        await asyncio.sleep(when)
        table.worker("decode-0").die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.decode_worker == "decode-1"
        await table.assert_empty()

    run_virtual(story())


def test_a_replay_is_one_start_per_unfinished_choice() -> None:
    async def story() -> None:
        table = Table(decode=2)
        guest = table.seat(SEEDED, n=2)
        await asyncio.sleep(5.5)
        table.worker("decode-0").die()
        await table.finish(guest)
        replays = table.worker("decode-1").starts
        assert [start.choices for start in replays] == [(0,), (1,)]
        assert [start.attempt for start in replays] == [1, 2]
        for start in replays:
            assert start.replay
            assert start.num_prompt == len(PROMPT)
            assert tuple(start.token_ids) == (*PROMPT, *guest.expected(start.choices[0])[: start.next_index])

    run_virtual(story())


def test_two_kills_in_one_stream() -> None:
    async def story() -> None:
        table = Table(decode=3)
        guest = table.seat(replace(GREEDY, max_tokens=20))
        await asyncio.sleep(5.5)
        table.worker("decode-0").die()
        await asyncio.sleep(5.0)
        table.worker("decode-1").die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.num_attempts == 3

    run_virtual(story())


@pytest.mark.parametrize("when", [1.5, 2.5], ids=["before its first token", "after its first token"])
def test_prefill_dies_before_the_commit(when: float) -> None:
    async def story() -> None:
        table = Table(prefill=2)
        guest = table.seat(SEEDED)
        await asyncio.sleep(when)
        table.worker("prefill-0").die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert [cancel.attempt for cancel in table.worker("decode-0").cancels] == [0]
        assert guest.summary.prefill_worker == "prefill-1"
        await table.assert_empty()

    run_virtual(story())


def test_the_last_prefill_worker_dies_and_decode_does_it_alone() -> None:
    async def story() -> None:
        table = Table()
        guest = table.seat()
        await asyncio.sleep(1.5)
        table.worker("prefill-0").die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert table.worker("decode-0").starts[-1].leg is Leg.LOCAL

    run_virtual(story())


def test_prefill_may_die_after_the_commit() -> None:
    async def story() -> None:
        table = Table(prefill=2)
        guest = table.seat()
        await asyncio.sleep(3.5)
        table.worker("prefill-0").die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.num_attempts == 1

    run_virtual(story())


def test_a_broken_transfer_is_replayed_after_the_token_that_was_shown() -> None:
    async def story() -> None:
        table = Table(prefill=2, decode=2)
        table.worker("prefill-0").break_pushes = 1
        guest = await table.serve(SEEDED)
        assert_undisturbed(guest)
        assert table.worker("decode-1").starts[0].next_index == 1
        assert (guest.summary.prefill_worker, guest.summary.decode_worker) == ("prefill-1", "decode-1")
        assert guest.summary.num_attempts == 2
        await table.assert_empty()

    run_virtual(story())


def test_a_pair_that_cannot_transfer_is_replaced_by_decode_alone() -> None:
    async def story() -> None:
        table = Table()
        table.worker("prefill-0").break_pushes = 9
        guest = await table.serve(SEEDED)
        assert_undisturbed(guest)
        assert table.worker("decode-0").starts[-1].leg is Leg.LOCAL
        await table.assert_empty()

    run_virtual(story())


def test_attempts_are_spent() -> None:
    async def story() -> None:
        table = Table(max_attempts=3)
        table.worker("decode-0").failures = dict.fromkeys(range(1, 9), FailReason.ENGINE)
        guest = await table.serve(SEEDED)
        assert isinstance(guest.error, Unavailable)
        assert "3 attempts" in guest.error.message
        assert guest.ids() == guest.expected()[: len(guest.ids())]
        await table.assert_empty()

    run_virtual(story())


def test_a_preempted_choice_is_replayed_while_the_other_runs_on() -> None:
    async def story() -> None:
        table = Table()
        table.worker("decode-0").failures = {3: FailReason.PREEMPTED}
        guest = await table.serve(SEEDED, n=2)
        assert_undisturbed(guest)
        assert [start.choices for start in table.worker("decode-0").starts] == [(0, 1), (0,)]
        await table.assert_empty()

    run_virtual(story())


@pytest.mark.parametrize("loses_prefill", [False, True])
def test_prefills_words_come_after_decodes(loses_prefill: bool) -> None:
    """The two streams race: what was cached is known all the same, and the commit holds whatever comes of prefill."""

    async def story() -> None:
        table = Table()
        prefill = table.worker("prefill-0")
        prefill.num_cached, prefill.line_s = 5, 100.0
        guest = table.seat(SEEDED, n=2)
        await asyncio.sleep(50)
        if loses_prefill:
            prefill.die()
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.num_attempts == 1
        assert guest.summary.num_cached_tokens == (0 if loses_prefill else 5)
        await table.assert_empty()

    run_virtual(story())


def test_nan_logits_are_an_error_and_no_replay() -> None:
    async def story() -> None:
        table = Table()
        table.worker("decode-0").failures = {3: FailReason.NAN_LOGITS}
        sick, well = table.seat(), table.seat(SEEDED)
        await table.finish(sick)
        await table.finish(well)
        assert isinstance(sick.error, Broken)
        assert_undisturbed(well)
        await table.assert_empty()

    run_virtual(story())


def test_a_worker_that_draws_something_else_is_not_believed() -> None:
    async def story() -> None:
        table = Table(decode=2)
        table.worker("decode-0").next_token = lambda *_: TokenId(33)
        table.worker("prefill-0").transfer_s = 1.0
        guest = table.seat(SEEDED)
        await asyncio.sleep(2.5)
        [leg] = table.worker("prefill-0").legs.values()
        leg._history[Choice(0)][-1] = TokenId(33)
        await table.finish(guest)
        assert_undisturbed(guest)
        assert guest.summary.decode_worker == "decode-1"
        await table.assert_empty()

    run_virtual(story())


def test_no_room_waits_for_its_turn() -> None:
    async def story() -> None:
        table = Table()
        table.worker("decode-0").refusals = [(RefuseReason.NO_ROOM, 2_000)]
        guest = await table.serve()
        assert_undisturbed(guest)
        assert guest.summary.timing.queue >= 2_000
        await table.assert_empty()

    run_virtual(story())


def test_no_room_here_is_room_there() -> None:
    async def story() -> None:
        table = Table(decode=2)
        table.worker("decode-0").refusals = [(RefuseReason.NO_ROOM, 60_000)]
        guest = await table.serve()
        assert_undisturbed(guest)
        assert guest.summary.decode_worker == "decode-1"
        assert guest.summary.timing.queue == 0

    run_virtual(story())


def test_prefill_queue_full_frees_the_reservation() -> None:
    async def story() -> None:
        table = Table(prefill=2)
        table.worker("prefill-0").refusals = [(RefuseReason.QUEUE_FULL, 60_000)]
        guest = await table.serve()
        assert_undisturbed(guest)
        assert guest.summary.prefill_worker == "prefill-1"
        assert len(table.worker("decode-0").cancels) == 1
        await table.assert_empty()

    run_virtual(story())


def test_new_work_is_refused_after_a_bounded_wait() -> None:
    async def story() -> None:
        table = Table(max_waiting_s=5.0)
        table.worker("decode-0").refusals = [(RefuseReason.NO_ROOM, 2_000)] * 100
        guest = await table.serve()
        assert isinstance(guest.error, NoRoom)
        assert guest.error.retry_after_s == 2.0
        assert guest.outputs == []
        await table.assert_empty()

    run_virtual(story())


def test_no_worker_at_all_is_unavailable_after_a_bounded_wait() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=0)
        began = asyncio.get_running_loop().time()
        guest = await table.serve()
        assert isinstance(guest.error, Unavailable)
        assert asyncio.get_running_loop().time() - began == 30.0

    run_virtual(story())


def test_a_request_is_held_until_a_worker_comes() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=0)
        guest = table.seat()
        await asyncio.sleep(10)
        table.fleet.add("decode-0", Role.DECODE)
        await table.finish(guest)
        assert_undisturbed(guest)

    run_virtual(story())


def test_a_replay_waits_for_room_and_goes_ahead_of_new_work() -> None:
    async def story() -> None:
        table = Table(decode=1, max_waiting_s=500.0)
        running = table.seat()
        await asyncio.sleep(4.5)
        table.worker("decode-0").die()
        newcomer = table.seat()
        await asyncio.sleep(100)
        table.worker("decode-0").revive()
        await table.finish(running)
        await table.finish(newcomer)
        assert_undisturbed(running)
        assert_undisturbed(newcomer)
        again = [start.request_id for start in table.worker("decode-0").starts]
        assert again == [running.request.request_id, running.request.request_id, newcomer.request.request_id]

    run_virtual(story())


def test_what_can_never_fit_is_not_dispatched() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve(replace(GREEDY, max_tokens=512))
        assert isinstance(guest.error, BadRequest)
        for number in ("512", str(len(PROMPT)), str(512 + len(PROMPT))):
            assert number in guest.error.message
        assert guest.outputs == []
        assert not table.worker("decode-0").starts
        assert not table.worker("prefill-0").starts

    run_virtual(story())


def test_exactly_the_limit_fits() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve(replace(GREEDY, max_tokens=512 - len(PROMPT)))
        assert_undisturbed(guest)

    run_virtual(story())


def test_a_worker_that_says_never_is_believed() -> None:
    async def story() -> None:
        table = Table()
        table.worker("decode-0").refusals = [(RefuseReason.NEVER_FITS, 0)]
        guest = await table.serve()
        assert isinstance(guest.error, BadRequest)
        assert not table.worker("prefill-0").starts
        await table.assert_empty()

    run_virtual(story())


def test_a_draining_worker_gets_nothing_new() -> None:
    async def story() -> None:
        table = Table(decode=2)
        table.worker("decode-0").refusals = [(RefuseReason.DRAINING, 0)]
        guest = await table.serve()
        assert_undisturbed(guest)
        assert guest.summary.decode_worker == "decode-1"
        await table.assert_empty()

    run_virtual(story())


@pytest.mark.parametrize("timeout_s", [0.5, 1.5, 2.5, 3.5, 5.5])
def test_the_deadline_cancels_every_leg(timeout_s: float) -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve(timeout_s=timeout_s)
        assert isinstance(guest.error, DeadlineExceeded)
        assert all(start.timeout_ms <= timeout_s * 1e3 for start in table.worker("decode-0").starts)
        await table.assert_empty()

    run_virtual(story())


def test_a_slow_reader_loses_its_own_request_only() -> None:
    async def story() -> None:
        table = Table(max_delta_queue=8)
        slow = table.seat(replace(GREEDY, max_tokens=100), reads=False)
        quick = await table.serve(replace(GREEDY, max_tokens=100))
        await table.finish(slow)
        assert_undisturbed(quick)
        await table.read(slow)
        assert isinstance(slow.error, Unavailable)
        assert "behind" in slow.error.message
        [cancel] = table.worker("decode-0").cancels
        assert cancel.request_id == slow.request.request_id
        await table.assert_empty()

    run_virtual(story())


def test_a_half_matched_stop_string_survives_a_replay() -> None:
    async def story() -> None:
        table = Table(decode=2)
        full = "".join(map(chr, (await table.serve()).expected()))
        guest = table.seat(stop=(full[3:6],))
        await asyncio.sleep(6.5)
        assert guest.text() == full[:3]
        table.worker("decode-0").die()
        await table.finish(guest)
        assert guest.text() == full[:3]
        assert guest.finish().stop_reason == full[3:6]
        assert all(isinstance(each, Delta) for each in guest.outputs[1:-2])
        await table.assert_empty()

    run_virtual(story())
