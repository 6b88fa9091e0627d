"""Any order of calls from both engines, over a pipe that loses, repeats, swaps and delays: the promises hold.

    nothing is written after `push_ended`, nothing is read after `send_ended`
    a transfer lands at most once, and then every block is there
    every reservation and every send ends exactly once, and in the end nothing is left
"""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.core.ids import TransferId
from kvrelay.transfer.fakes import POISON
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.weather import StormyPipe, Weather
from tests.transfer.world import IDENTITY, World, block_ids, commit

SLOTS = 3
BLOCKS_EACH = 3


slots = st.integers(0, SLOTS - 1)
chances = st.sampled_from([0.0, 0.0, 0.3])


class Interleavings(RuleBasedStateMachine):
    """Slot i: blocks [3i, 3i+3) on both workers, always under a fresh transfer id."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        asyncio.set_event_loop(self.loop)
        self.weather = Weather()
        self.world = self.loop.run_until_complete(self._build())
        self.world.d.inbox.answer = None
        self.ids: list[TransferId | None] = [None] * SLOTS
        self.num_minted = 0

    async def _build(self) -> World:
        return World(wrap=lambda pipe: StormyPipe(pipe, self.weather))

    def run_for(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def at_once(self, call: object, *args: object) -> None:
        """On the loop, as a posted call would be."""
        self.loop.call_soon(call, *args)  # type: ignore[arg-type]
        self.run_for(0)

    @staticmethod
    def blocks(slot: int) -> list[int]:
        return list(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH))

    def is_free(self, slot: int) -> bool:
        transfer_id = self.ids[slot]
        return transfer_id is None or (
            transfer_id in self.world.d.inbox.push_errors and transfer_id in self.world.p.inbox.send_errors
        )

    @rule(slot=slots)
    def hand_off(self, slot: int) -> None:
        """A slot is used again as soon as both engines have their blocks back."""
        if not self.is_free(slot):
            return
        transfer_id = TransferId(f"t{self.num_minted}")
        self.num_minted += 1
        self.ids[slot] = transfer_id
        self.world.p.kv.unlock(block_ids(self.blocks(slot)))
        self.world.d.kv.unlock(block_ids(self.blocks(slot)))
        for block in block_ids(self.blocks(slot)):
            self.world.d.kv.fill(block, bytes([POISON]))
        self.at_once(lambda: self.world.reserve(self.blocks(slot), transfer_id=transfer_id))
        self.at_once(lambda: self.world.send(self.blocks(slot), transfer_id=transfer_id))

    @rule(slot=slots, num_computed=st.integers(0, BLOCKS_EACH * IDENTITY.block_size))
    def progress(self, slot: int, num_computed: int) -> None:
        self.at_once(self.world.p_desk.progress, self.ids[slot], num_computed)

    @rule(slot=slots)
    def finish(self, slot: int) -> None:
        self.at_once(self.world.p_desk.finish, self.ids[slot], commit(BLOCKS_EACH * IDENTITY.block_size))

    @rule(slot=slots)
    def abort(self, slot: int) -> None:
        self.at_once(self.world.p_desk.abort_send, self.ids[slot])

    @rule(slot=slots)
    def close(self, slot: int) -> None:
        self.at_once(self.world.d_desk.close, self.ids[slot])

    @rule(runs=st.booleans())
    def engine_replies(self, runs: bool) -> None:
        for transfer_id in list(self.world.d.inbox.held):
            self.world.d.inbox.reply(transfer_id, runs)
        self.run_for(0)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 2.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.run_for(seconds)

    @rule(loss=chances, repeat=chances, swap=chances, delay=chances, seed=st.integers(0, 999))
    def weather_changes(self, loss: float, repeat: float, swap: float, delay: float, seed: int) -> None:
        self.weather.change(seed, loss=loss, repeat=repeat, swap=swap, delay=delay)

    @invariant()
    def nobody_touches_what_is_not_lent(self) -> None:
        assert self.world.p.kv.violations == []
        assert self.world.d.kv.violations == []

    @invariant()
    def what_landed_is_complete(self) -> None:
        for slot, transfer_id in enumerate(self.ids):
            landings = self.world.d.inbox.commits.get(transfer_id, []) if transfer_id else []
            assert len(landings) <= 1
            if landings:
                self.world.assert_copied(self.blocks(slot), self.blocks(slot))

    @invariant()
    def everything_ends_once(self) -> None:
        for errors in (self.world.d.inbox.push_errors, self.world.p.inbox.send_errors):
            assert all(len(ended) == 1 for ended in errors.values())
        for transfer_id, (error,) in self.world.p.inbox.send_errors.items():
            if not error:
                assert self.world.d.inbox.push_errors[transfer_id] == [""]

    def teardown(self) -> None:
        try:
            for transfer_id in self.ids:
                self.at_once(self.world.p_desk.abort_send, transfer_id)
                self.at_once(self.world.d_desk.close, transfer_id)
            self.run_for(60)
            self.world.assert_empty()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
