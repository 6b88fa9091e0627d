"""Whatever happens to the workers, in any order: a stream that ends well is undisturbed, and nothing is left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import KvrelayError, Unavailable
from kvrelay.core.events import FailReason, RefuseReason
from kvrelay.core.request import SamplingParams
from kvrelay.router.scripted import ScriptedWorker
from tests.router.table import GREEDY, Guest, Table
from tests.support.virtual_time import run_virtual

SEEDED = SamplingParams(max_tokens=10, seed=42)


@dataclass(frozen=True)
class Blow:
    """After `pause_s`, `kind` happens to worker number `worker`."""

    pause_s: float
    kind: str
    worker: int


KINDS = ("die", "revive", "no_room", "queue_full", "break_push", "preempt", "engine", "leave", "slow", "quick",
         "drain", "drain", "new")
BLOWS = st.builds(Blow, st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7]), st.sampled_from(KINDS), st.integers(0, 3))


def strike(blow: Blow, worker: ScriptedWorker) -> None:
    match blow.kind:
        case "die":
            worker.die()
        case "revive":
            worker.revive()
        case "drain":
            worker.leave()
        case "new":
            worker.draining = False
        case "no_room":
            worker.refusals.append((RefuseReason.NO_ROOM, 400))
        case "queue_full":
            worker.refusals.append((RefuseReason.QUEUE_FULL, 0))
        case "break_push":
            worker.break_pushes += 1
        case "preempt":
            worker.failures[4] = FailReason.PREEMPTED
        case "engine":
            worker.failures[2] = FailReason.ENGINE
        case "slow" | "quick":
            worker.prefill_s = worker.transfer_s = worker.reserve_s = 2.0 if blow.kind == "slow" else 0.1


@settings(max_examples=150, deadline=None)
@given(st.lists(BLOWS, max_size=14))
def test_any_order_of_blows(blows: list[Blow]) -> None:
    async def story() -> None:
        table = Table(prefill=2, decode=2)
        workers = list(table.fleet.workers.values())
        leaver = table.seat(replace(GREEDY, max_tokens=60))
        guests = [table.seat(), table.seat(SEEDED, n=2), table.seat(replace(SEEDED, max_tokens=1))]
        for blow in blows:
            await asyncio.sleep(blow.pause_s)
            if blow.kind == "leave":
                await table.leaves(leaver)
            else:
                strike(blow, workers[blow.worker])
        for worker in workers:
            worker.refusals.clear()
            worker.draining = False
            worker.revive()
        for guest in guests:
            await table.finish(guest)
            check(guest)
        await table.leaves(leaver)
        await table.assert_empty()
        told = [(each.request_id, each.attempt, each.choices, worker.record.worker_id)
                for worker in workers for each in worker.cancels]
        assert len(told) == len(set(told)), "a leg was cancelled twice"

    run_virtual(story())


def check(guest: Guest) -> None:
    """Ended well: everything, once. Ended badly: because attempts were spent, after a true beginning."""
    error: KvrelayError | None = guest.error
    if error is not None:
        assert isinstance(error, Unavailable)
        assert "attempts" in error.message
    for choice in range(guest.request.n):
        ids = guest.ids(choice)
        assert ids == guest.expected(choice)[: len(ids)]
        if error is None:
            assert len(ids) == guest.request.sampling.max_tokens
    if error is None:
        assert guest.summary.num_output_tokens == guest.request.n * guest.request.sampling.max_tokens
