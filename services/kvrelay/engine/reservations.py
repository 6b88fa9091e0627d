"""Blocks that wait for KV from elsewhere. The whole life of a receiving transfer is in this file.

    open ──▶ RESERVED ──land──▶ LANDED ────────────────┐
                 │                                     ├──ended──▶ (gone, blocks unpinned)
                 └──abandon──▶ DRAINING ───────────────┘

From `open` until `ended` the blocks that can be written are pinned: whatever happens to the sequence, nobody else
gets them before the transfer side has said that it will never touch them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.errors import Broken
from kvrelay.core.ids import BlockId, TransferId
from kvrelay.core.ports import Expected, TransferPort
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.kvcache.cache import KvCache


class Stage(Enum):
    RESERVED = "reserved"
    LANDED = "landed"
    DRAINING = "draining"


_MOVES = {(Stage.RESERVED, Stage.LANDED), (Stage.RESERVED, Stage.DRAINING)}


@dataclass(slots=True, eq=False)
class Reservation:
    seq: Sequence
    blocks: tuple[BlockId, ...]
    """Those that the transfer may write."""
    stage: Stage = Stage.RESERVED

    def move(self, stage: Stage) -> None:
        if (self.stage, stage) not in _MOVES:
            raise Broken(f"a reservation cannot go from {self.stage.value} to {stage.value}")
        self.stage = stage


class Reservations:
    """Open receiving transfers by their id. Engine thread only."""

    def __init__(self, cache: KvCache, transfer: TransferPort, max_open: int) -> None:
        self._cache = cache
        self._transfer = transfer
        self._max_open = max_open
        self._open: dict[TransferId, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._open

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self._max_open

    @property
    def num_reserved(self) -> int:
        return sum(1 for reservation in self._open.values() if reservation.stage is Stage.RESERVED)

    @property
    def num_reserved_choices(self) -> int:
        """Rows that these reservations will become."""
        return sum(len(entry.seq.choices) for entry in self._open.values() if entry.stage is Stage.RESERVED)

    def open(self, seq: Sequence) -> None:
        """The sequence has its blocks: pin those that must arrive and tell the transfer side."""
        first_block = seq.num_cached // self._cache.block_size
        blocks = tuple(seq.table.blocks[first_block:])
        self._cache.pool.pin(blocks)
        self._open[seq.transfer_id] = Reservation(seq, blocks)
        seq.move(SeqState.RESERVED)
        self._transfer.expect(
            Expected(seq.transfer_id, seq.start.request_id, seq.start.attempt, first_block, blocks)
        )

    def find_reserved(self, transfer_id: TransferId) -> Sequence | None:
        """The sequence that still waits for this transfer."""
        reservation = self._open.get(transfer_id)
        return reservation.seq if reservation is not None and reservation.stage is Stage.RESERVED else None

    def land(self, transfer_id: TransferId) -> None:
        """The KV is here and verified; the sequence takes over."""
        self._open[transfer_id].move(Stage.LANDED)

    def abandon(self, seq: Sequence) -> None:
        """Nobody wants this KV any more. Nothing to do if the transfer has ended already."""
        reservation = self._open.get(seq.transfer_id)
        if reservation is not None and reservation.stage is Stage.RESERVED:
            reservation.move(Stage.DRAINING)
            self._transfer.close(seq.transfer_id)

    def ended(self, transfer_id: TransferId) -> Sequence | None:
        """The transfer side is done with the blocks. Returns the sequence if it still waited for them."""
        reservation = self._open.pop(transfer_id, None)
        if reservation is None:
            return None
        self._cache.pool.unpin(reservation.blocks)
        return reservation.seq if reservation.stage is Stage.RESERVED else None
