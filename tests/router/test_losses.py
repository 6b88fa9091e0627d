"""What a lost attempt costs: an attempt where somebody failed, none where the pool was full, and how long it waits."""

from __future__ import annotations

import asyncio

from kvrelay.core.errors import Unavailable
from kvrelay.core.events import FailReason
from kvrelay.core.request import SamplingParams
from tests.router.table import Table, assert_undisturbed
from tests.support.virtual_time import run_virtual

SEEDED = SamplingParams(max_tokens=8, seed=1234, frequency_penalty=0.5, logprobs=1)


def test_preemption_costs_no_attempt_however_often_it_comes() -> None:
    async def story() -> None:
        table = Table(max_attempts=2)
        table.worker("decode-0").failures = dict.fromkeys(range(1, 8), FailReason.PREEMPTED)
        guest = await table.serve(SEEDED)
        assert_undisturbed(guest)
        assert guest.summary.num_attempts == 8
        await table.assert_empty()

    run_virtual(story())


def test_work_that_is_lost_while_a_worker_has_it_in_its_queue_waits_anew() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=1, max_waiting_s=30.0)
        worker = table.worker("decode-0")
        worker.prefill_s = 100.0
        guest = table.seat()
        await asyncio.sleep(60)
        worker.die()
        await asyncio.sleep(10)
        worker.prefill_s = 1.0
        worker.revive()
        await table.finish(guest)
        assert_undisturbed(guest)
        await table.assert_empty()

    run_virtual(story())


def test_work_that_is_lost_before_its_first_token_does_not_wait_for_ever() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=1, max_waiting_s=30.0)
        table.worker("decode-0").prefill_s = 100.0
        guest = table.seat()
        await asyncio.sleep(60)
        table.worker("decode-0").die()
        await table.finish(guest)
        assert isinstance(guest.error, Unavailable)
        assert guest.outputs == []

    run_virtual(story())
