"""The seams of a worker process: what `engine` and `transfer` need of each other, without importing each other.

`worker` wires real parts together; tests use the fakes that ship beside each seam. Three threads meet here:

    engine thread     owns sequences, blocks, reservations; reads its mailbox (`EngineInbox`) once per step
    transfer loop     owns open Pushes in both directions (`TransferPort` is called by the engine, must not block)
    attach loop       owns the streams to routers; gets all events of a step in one call (`EngineOutbox`)

A receiving transfer and its reservation:

    engine.expect ─▶ [Push opens] ─▶ slabs ─▶ inbox.landed ─▶ (engine applies: RUNNING)  ─┐
        └─ engine.close (cancel, deadline) ─────────────────────────────────────────────┴▶ inbox.push_ended ─▶ free

`push_ended` comes exactly once for every `expect`, after the Push call has returned and its copies have joined, or
at once if no Push was ever opened. Only then may the engine free what the transfer could have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.events import Event, RefuseReason
from kvrelay.core.handoff import Commit, Handoff
from kvrelay.core.ids import Attempt, BlockId, RequestId, SeqKey, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.request import Migrate, Start


@dataclass(frozen=True, slots=True)
class Expected:
    """A reservation as the transfer side sees it: the blocks that must arrive, and nothing else."""

    transfer_id: TransferId
    request_id: RequestId
    attempt: Attempt
    first_block: int
    """Position in the sequence of the first block that must travel; the ones before are cached here."""
    blocks: tuple[BlockId, ...]
    """Where they go, in order. Lent until `push_ended`."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A sequence about to be pushed."""

    request_id: RequestId
    attempt: Attempt
    handoff: Handoff
    blocks: tuple[BlockId, ...]
    """The whole sequence's blocks in order. Lent until `send_ended`. Blocks before `first_block` do not travel."""
    first_block: int
    block_size: int
    tells_level: bool = False
    """Have `send_level` called."""
    tenant: bytes = b""
    """Its cache salt."""


class TransferPort(Protocol):
    """What the engine asks of the transfer side. Called on the engine thread; returns at once, never raises."""

    def expect(self, expected: Expected) -> None: ...

    def close(self, transfer_id: TransferId) -> None:
        """Give up a reservation: end its Push if one is open, refuse one that comes later. `push_ended` follows."""
        ...

    def send(self, outgoing: Outgoing) -> None:
        """Open the Push. Slabs leave as `progress` tells that they are computed."""
        ...

    def progress(self, transfer_id: TransferId, num_computed: int) -> None:
        """KV of the first `num_computed` tokens is complete. Full blocks below it may leave."""
        ...

    def finish(self, transfer_id: TransferId, commit: Commit) -> None:
        """All KV is computed: send the rest, the partial last block included, and commit. `send_ended` follows."""
        ...

    def abort_send(self, transfer_id: TransferId) -> None:
        """Leave at the next slab, without a commit. `send_ended` follows."""
        ...


class EngineInbox(Protocol):
    """The engine's mailbox. Thread-safe, never blocks; drained once per step and on a timed wait when idle."""

    def submit(self, start: Start) -> None: ...

    def cancel(self, key: SeqKey) -> None:
        """Drop one choice of one attempt. Its terminal event is `Failed(cancelled)`; unknown keys are ignored."""
        ...

    def landed(self, transfer_id: TransferId, commit: Commit, reply: Callable[[bool], None]) -> None:
        """A Push arrived complete and verified. `reply(True)` once the sequence runs; False if it is gone."""
        ...

    def push_ended(self, transfer_id: TransferId, error: str) -> None:
        """The transfer side will never touch these blocks again. `error` is empty after a commit."""
        ...

    def migrate(self, migrate: Migrate) -> None:
        """Hand a running choice over to another worker. Unknown keys are ignored: their end has been told."""
        ...

    def send_level(self, transfer_id: TransferId) -> None:
        """All that `progress` has released is on its way; asked for by `tells_level`, told at most once."""
        ...

    def send_ended(self, transfer_id: TransferId, error: str) -> None:
        """The transfer side has stopped reading these blocks. `error` is empty if the receiver committed."""
        ...

    def drain(self) -> None:
        """Admit nothing new from now on."""
        ...


class EngineOutbox(Protocol):
    def on_step(self, events: Sequence[Event], load: Load) -> None:
        """All events of one step. Called on the engine thread; must not block. Also called without events to beat."""
        ...

    def on_death(self, error: BaseException) -> None:
        """The engine thread is ending because of `error`: every sequence is lost."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RefuseReason
    message: str
    retry_after_ms: int = 0
