"""One sequence while its KV leaves.

    STREAMING ──finish──▶ COMMITTING ──every receiver has committed──▶ ENDED
        │ full blocks as         │                                      ▲
        │ they are computed,     ├── refused │ pipe broke ──────────────┤
        │ a heartbeat each       └── abort ─▶ LEAVING ──task over───────┤
        │ second in between                      ▲                      │
        ├── abort ───────────────────────────────┘                      │
        └── refused │ pipe broke ───────────────────────────────────────┘

Slabs are copied out of the pool one by one, on the transfer loop, as the blocks become complete; the partial last
block goes after `finish`. Entering ENDED is the end of the task that reads the blocks: nothing is read afterwards.
With several receivers the sequence has left when all have committed; one failure ends all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from kvrelay.core.config import TransferSettings
from kvrelay.core.errors import Broken
from kvrelay.core.handoff import Commit, PushOpen, Receiver
from kvrelay.core.ids import TransferId
from kvrelay.core.ports import Outgoing
from kvrelay.transfer.frames import contains, cut, read_slab, tile_bytes
from kvrelay.transfer.pipes import Pipe
from kvrelay.transfer.push_leg import PushLeg
from kvrelay.transfer.words import Home, PushFailed

log = logging.getLogger(__name__)


class State(Enum):
    STREAMING = "streaming"
    COMMITTING = "committing"
    LEAVING = "leaving"
    ENDED = "ended"


_MOVES = {
    State.STREAMING: {State.COMMITTING, State.LEAVING, State.ENDED},
    State.COMMITTING: {State.LEAVING, State.ENDED},
    State.LEAVING: {State.ENDED},
    State.ENDED: set[State](),
}


class Departure:
    """One sequence on its way. Owns the task that reads its blocks."""

    def __init__(
        self,
        outgoing: Outgoing,
        settings: TransferSettings,
        home: Home,
        pipe: Pipe,
        on_end: Callable[[Departure, str], None],
        on_level: Callable[[TransferId], None],
    ) -> None:
        self.outgoing = outgoing
        self._settings = settings
        self._home = home
        self._pipe = pipe
        self._on_end = on_end
        self._on_level = on_level
        self._state = State.STREAMING
        self._ready_blocks = outgoing.first_block
        """Blocks of the sequence below this may leave."""
        self.num_bytes = 0
        self.opened_at = asyncio.get_running_loop().time()
        self._has_begun = False
        """`progress` has been told once."""
        self._level: set[PushLeg] = set()
        """Legs that have sent all that was ready."""
        self._commit: Commit | None = None
        self._abort_reason = "the send was cancelled"
        self._legs: list[PushLeg] = []
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)

    @property
    def state(self) -> State:
        return self._state

    # --- what the engine says; late words are ignored, the engine will hear of the end ------------------------------

    def progress(self, num_computed: int) -> None:
        if self._state is not State.STREAMING:
            return
        full = min(num_computed // self.outgoing.block_size, len(self.outgoing.blocks))
        self._ready_blocks = max(self._ready_blocks, full)
        self._has_begun = True
        self._wake()

    def finish(self, commit: Commit) -> None:
        if self._state is not State.STREAMING:
            return
        self._move(State.COMMITTING)
        self._commit = commit
        self._ready_blocks = len(self.outgoing.blocks)
        self._wake()

    def abort(self, reason: str) -> None:
        if self._state in (State.STREAMING, State.COMMITTING):
            self._move(State.LEAVING)
            self._abort_reason = reason
            self._task.cancel()

    async def wait(self) -> None:
        await asyncio.wait({self._task})

    # --- inside ---------------------------------------------------------------------------------------------------

    def _move(self, state: State) -> None:
        if state not in _MOVES[self._state]:
            raise Broken(f"a departure cannot go from {self._state.value} to {state.value}")
        self._state = state

    def _wake(self) -> None:
        for leg in self._legs:
            leg.wake.set()

    async def _run(self) -> str:
        """Returns why it failed; empty when every receiver has committed."""
        receivers = self.outgoing.handoff.receivers
        if not receivers:
            return "the handoff names no receiver"
        error = ""
        try:
            async with asyncio.TaskGroup() as group:
                for receiver in receivers:
                    group.create_task(self._push(receiver))
        except* PushFailed as failures:
            error = str(failures.exceptions[0])
        return error

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._move(State.ENDED)
        if task.cancelled():
            self._on_end(self, self._abort_reason)
            return
        bug = task.exception()
        if bug is not None:
            log.error("sending %s failed", self.outgoing.handoff.transfer_id, exc_info=bug)
            self._on_end(self, f"the send failed: {bug}")
        else:
            self._on_end(self, task.result())

    async def _push(self, receiver: Receiver) -> None:
        """Raises PushFailed unless this receiver commits."""
        if not contains(self._home.kv.shard, receiver.shard):
            raise PushFailed(f"shard: {self._home.kv.shard} does not contain the receiver's {receiver.shard}")
        async with PushLeg(self._pipe, receiver, self._settings) as leg:
            self._legs.append(leg)
            await leg.write(self._opening(receiver))
            num_slabs, next_block = 0, self.outgoing.first_block
            while True:
                leg.check()
                ready = self._ready_blocks
                if next_block < ready:
                    num_slabs = await self._push_blocks(leg, next_block, ready, num_slabs)
                    next_block = ready
                elif self._commit is not None:
                    await leg.commit(replace(self._commit, num_slabs=num_slabs))
                    return
                else:
                    self._now_level(leg)
                    await leg.wait_or_beat()

    def _now_level(self, leg: PushLeg) -> None:
        if self.outgoing.tells_level and self._has_begun and leg not in self._level:
            self._level.add(leg)
            if len(self._level) == len(self.outgoing.handoff.receivers):
                self._on_level(self.outgoing.handoff.transfer_id)

    async def _push_blocks(self, leg: PushLeg, begin: int, end: int, seq_no: int) -> int:
        """Send blocks [begin, end), the first slab numbered `seq_no`. Returns the number of the next one."""
        size = tile_bytes(self._home.identity, self._home.kv.shard.dtype)
        for rectangle in cut(begin, end - begin, leg.receiver.shard, size):
            await leg.write(read_slab(self._home.kv, self.outgoing.blocks, rectangle, seq_no, size))
            self.num_bytes += rectangle.num_bytes(size)
            seq_no += 1
            await asyncio.sleep(0)  # let arriving Pushes and the engine's calls in between two slabs
        return seq_no

    def _opening(self, receiver: Receiver) -> PushOpen:
        outgoing = self.outgoing
        return PushOpen(
            transfer_id=outgoing.handoff.transfer_id,
            request_id=outgoing.request_id,
            attempt=outgoing.attempt,
            identity=self._home.identity,
            shard=replace(self._home.kv.shard, order="plain"),
            sender=self._home.worker_id,
            sender_incarnation=self._home.incarnation,
            receiver_incarnation=receiver.incarnation,
            first_block=outgoing.first_block,
            num_blocks=len(outgoing.blocks) - outgoing.first_block,
            tenant=outgoing.tenant,
            handle=receiver.handle,
        )
