"""Sequences whose KV goes elsewhere. The engine's half of a sending transfer is in this file.

    open ──▶ STREAMING ──finish──▶ COMMITTING ──ended("")──▶ handed off
             │ progress* │             │   └──ended(error)──▶ failed: the router replays
             │           └──abandon────┴──▶ LEAVING ──ended──▶ (gone)
             └──ended(error)──▶ failed

From `open` until `ended` the sequence's blocks are pinned: they may still be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from kvrelay.core.errors import Broken
from kvrelay.core.events import Token
from kvrelay.core.handoff import ChoiceTokens, Commit
from kvrelay.core.ids import BlockId, Choice, TransferId
from kvrelay.core.ports import Outgoing, TransferPort
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.kvcache.cache import KvCache


class Stage(Enum):
    STREAMING = "streaming"
    COMMITTING = "committing"
    LEAVING = "leaving"


_MOVES = {
    (Stage.STREAMING, Stage.COMMITTING),
    (Stage.STREAMING, Stage.LEAVING),
    (Stage.COMMITTING, Stage.LEAVING),
}


@dataclass(slots=True, eq=False)
class Sending:
    seq: Sequence
    blocks: tuple[BlockId, ...]
    """All of the sequence's: those that the receiver has are not read, but a pin costs nothing."""
    stage: Stage = Stage.STREAMING

    def move(self, stage: Stage) -> None:
        if (self.stage, stage) not in _MOVES:
            raise Broken(f"a send cannot go from {self.stage.value} to {stage.value}")
        self.stage = stage


class Sendings:
    """Open sending transfers by their id. Engine thread only."""

    def __init__(self, cache: KvCache, transfer: TransferPort) -> None:
        self._cache = cache
        self._transfer = transfer
        self._open: dict[TransferId, Sending] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._open

    def __iter__(self) -> Iterator[Sequence]:
        return (sending.seq for sending in self._open.values())

    def open(self, seq: Sequence) -> None:
        """The first chunk is about to be computed: let the Push be opened meanwhile."""
        start, size = seq.start, self._cache.block_size
        assert start.handoff is not None, "checked at intake"
        blocks = tuple(seq.table.blocks)
        self._cache.pool.pin(blocks)
        self._open[seq.transfer_id] = Sending(seq, blocks)
        first_block = start.handoff.num_cached_tokens // size
        self._transfer.send(Outgoing(start.request_id, start.attempt, start.handoff, blocks, first_block, size))
        if seq.num_computed:
            self._transfer.progress(seq.transfer_id, seq.num_computed)
        if seq.num_computed > start.handoff.num_cached_tokens:
            seq.leaves_since = seq.scheduled_at

    def progress(self, seq: Sequence) -> None:
        self._transfer.progress(seq.transfer_id, seq.num_computed)

    def finish(self, seq: Sequence, drawn: Iterable[tuple[Choice, Token]]) -> None:
        """The prompt is computed and `drawn` are the choices that go on: send the rest and commit."""
        self._open[seq.transfer_id].move(Stage.COMMITTING)
        seq.move(SeqState.SENDING)
        # The sender counts its slabs itself: it alone knows how it has cut them.
        choices = tuple(ChoiceTokens(choice, (token,)) for choice, token in drawn)
        self._transfer.finish(seq.transfer_id, Commit(len(seq.tokens), 0, choices))

    def abandon(self, seq: Sequence) -> None:
        """Nobody wants this KV any more. Nothing to do if no Push is open, or it has been told already."""
        sending = self._open.get(seq.transfer_id)
        if sending is not None and sending.stage is not Stage.LEAVING:
            sending.move(Stage.LEAVING)
            self._transfer.abort_send(seq.transfer_id)

    def ended(self, transfer_id: TransferId) -> tuple[Sequence, bool] | None:
        """The transfer side has stopped reading. Returns the sequence and whether it had been told to commit."""
        sending = self._open.pop(transfer_id, None)
        if sending is None:
            return None
        self._cache.pool.unpin(sending.blocks)
        return sending.seq, sending.stage is Stage.COMMITTING
