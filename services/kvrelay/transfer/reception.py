"""One reservation while its KV arrives.

    EXPECTED ──open──▶ OPEN ──commit, all there──▶ LANDED ──the engine's reply──▶ ENDED
        │                │                            │ close, no reply in time    ▲
        │                └─close │ bad frame │ stall ─▶ CLOSED ──Push returned─────┤
        └─close────────────────────────────────────────────────────────────────────┘

Everything happens on the transfer loop. Scattering a slab is one synchronous call made in OPEN only, so from CLOSED
on nothing can be written; entering ENDED posts `push_ended`, once, and the blocks are the engine's again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from kvrelay.core.errors import Broken
from kvrelay.core.handoff import MAX_SLAB_BYTES, Commit, PushOpen, Slab
from kvrelay.core.ports import EngineInbox, Expected
from kvrelay.rpc.frames import Frame, Heartbeat
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.frames import CHECKSUM, checksum, contains, rectangle_of, tile_bytes
from kvrelay.transfer.words import Home, PushAnswer, PushFailed

LANDED_TIMEOUT_S = 30.0
"""How long the engine may take to answer: it does so between two steps, and a step on a slow CPU takes seconds."""


class State(Enum):
    EXPECTED = "expected"
    OPEN = "open"
    LANDED = "landed"
    CLOSED = "closed"
    ENDED = "ended"


_MOVES = {
    State.EXPECTED: {State.OPEN, State.ENDED},
    State.OPEN: {State.LANDED, State.CLOSED},
    State.LANDED: {State.ENDED},
    State.CLOSED: {State.ENDED},
    State.ENDED: set[State](),
}


class Reception:
    """See the drawing above. Methods that take what the sender says raise PushFailed; the others never raise."""

    def __init__(self, expected: Expected, home: Home, inbox: EngineInbox, on_end: Callable[[Reception], None]) -> None:
        self.expected = expected
        self._state = State.EXPECTED
        self.error = ""
        """Why it was closed."""
        self.num_bytes = 0
        self.opened_at: float | None = None
        """Loop time; None while no Push has come."""
        self.reading: asyncio.Timeout | None = None
        """The wait for the next frame, while there is one: closing ends it."""
        self._home = home
        self._inbox = inbox
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[PushAnswer] = self._loop.create_future()
        self._reply_timer: asyncio.TimerHandle | None = None
        self._coverage = Coverage(expected.first_block, len(expected.blocks), home.kv.shard)
        self._num_slabs = 0
        self._tile_bytes = 0
        self._sender_dtype = ""

    @property
    def state(self) -> State:
        return self._state

    # --- what the sender says -------------------------------------------------------------------------------------

    def open(self, frame: PushOpen) -> None:
        """The one Push of this reservation begins. If the sender does not fit, the caller closes."""
        self._move(State.OPEN)
        self.opened_at = self._loop.time()
        self._check_identity(frame)
        self._check_shard(frame)
        expected = self.expected
        ours, theirs = (expected.first_block, len(expected.blocks)), (frame.first_block, frame.num_blocks)
        if ours != theirs:
            raise PushFailed(f"(first block, blocks): expected {ours} != pushed {theirs}", retryable=False)
        if frame.checksum != CHECKSUM:
            raise PushFailed(f"checksum: {CHECKSUM} != {frame.checksum}", retryable=False)
        self._tile_bytes = tile_bytes(frame.identity, frame.shard.dtype)
        self._sender_dtype = frame.shard.dtype

    def accept(self, frame: Frame) -> None:
        if self.state is not State.OPEN:
            raise PushFailed(self.error)
        match frame:
            case Slab():
                self._accept_slab(frame)
            case Commit():
                self._accept_commit(frame)
            case Heartbeat():
                pass
            case PushOpen():
                raise PushFailed("opened twice in one Push")

    async def answer(self) -> PushAnswer:
        """Of a landed Push, once the engine has replied."""
        return await asyncio.shield(self._answer)

    # --- what ends it ---------------------------------------------------------------------------------------------

    def close(self, error: str) -> None:
        """By the engine, or for what the sender did. A Push that is open ends soon; it writes nothing from now on."""
        match self.state:
            case State.EXPECTED:
                self.error = error
                self._end()
            case State.OPEN:
                self.error = error
                self._move(State.CLOSED)
                if self.reading is not None and not self.reading.expired():
                    self.reading.reschedule(self._loop.time())
            case State.LANDED:
                self._replied(False, error)
            case State.CLOSED | State.ENDED:
                pass

    def push_returned(self) -> None:
        """The Push call that carried it is over, however it ended."""
        self.close_if_open("the Push broke off before its commit")
        if self.state is State.CLOSED:
            self._end()

    def close_if_open(self, error: str) -> None:
        if self.state is State.OPEN:
            self.close(error)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _move(self, state: State) -> None:
        if state not in _MOVES[self._state]:
            raise Broken(f"a reception cannot go from {self._state.value} to {state.value}")
        self._state = state

    def _check_identity(self, frame: PushOpen) -> None:
        differences = self._home.identity.differences(frame.identity)
        if differences:
            raise PushFailed(f"kv identity differs (receiver != sender): {'; '.join(differences)}", retryable=False)

    def _check_shard(self, frame: PushOpen) -> None:
        ours = replace(self._home.kv.shard, order="plain")
        if not contains(frame.shard, ours):
            raise PushFailed(f"shard: the receiver's {ours} is not within the sender's {frame.shard}", retryable=False)
        if frame.shard.order != ours.order:
            raise PushFailed(f"order on the wire: {ours.order} != {frame.shard.order}", retryable=False)

    def _accept_slab(self, slab: Slab) -> None:
        if slab.seq_no != self._num_slabs:
            raise PushFailed(f"slab out of order: expected {self._num_slabs}, got {slab.seq_no}")
        rectangle = rectangle_of(slab)
        self._coverage.check(rectangle)
        size = rectangle.num_bytes(self._tile_bytes)
        found_size = memoryview(slab.payload).nbytes
        if found_size != size or size > MAX_SLAB_BYTES:
            raise PushFailed(f"slab {slab.seq_no} has {found_size} bytes, expected {size}, at most {MAX_SLAB_BYTES}")
        found = checksum(slab.payload)
        if found != slab.checksum:
            raise PushFailed(f"slab {slab.seq_no} is corrupt: checksum {slab.checksum:016x} != {found:016x}")
        begin = slab.first_block - self.expected.first_block
        self._home.kv.scatter(
            self.expected.blocks[begin : begin + slab.num_blocks],
            slab.layer_begin,
            slab.layer_end,
            slab.head_begin,
            slab.head_end,
            slab.payload,
            self._sender_dtype,
        )
        self._coverage.add(rectangle)
        self.num_bytes += size
        self._num_slabs += 1

    def _accept_commit(self, commit: Commit) -> None:
        expected = self.expected
        if commit.num_slabs != self._num_slabs:
            raise PushFailed(f"slabs: received {self._num_slabs} != sent {commit.num_slabs}")
        missing = self._coverage.num_incomplete
        if missing:
            raise PushFailed(f"{missing} of {len(expected.blocks)} blocks are incomplete at commit")
        room = (expected.first_block + len(expected.blocks)) * self._home.identity.block_size
        if commit.num_tokens > room:
            raise PushFailed(f"commit of {commit.num_tokens} tokens into blocks for {room}")
        self._move(State.LANDED)
        self._reply_timer = self._loop.call_later(
            LANDED_TIMEOUT_S, self._replied, False, f"the engine did not answer within {LANDED_TIMEOUT_S:g} s"
        )
        self._inbox.landed(expected.transfer_id, commit, self._reply_from_engine)

    def _reply_from_engine(self, runs: bool) -> None:
        """Called on the engine thread."""
        error = "" if runs else "the receiving engine has given this request up"
        try:
            self._loop.call_soon_threadsafe(self._replied, runs, error)
        except RuntimeError:  # the loop is closed: stopping has ended this reception already
            pass

    def _replied(self, runs: bool, error: str) -> None:
        if self.state is not State.LANDED:
            return
        if self._reply_timer is not None:
            self._reply_timer.cancel()
        self.error = error
        self._answer.set_result(PushAnswer(runs, error))
        self._end()

    def _end(self) -> None:
        self._move(State.ENDED)
        self._on_end(self)
        self._inbox.push_ended(self.expected.transfer_id, self.error)
