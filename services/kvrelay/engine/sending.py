"""Sequences whose KV goes elsewhere. The engine's half of a sending transfer is in this file.

    open ──▶ STREAMING ──finish──▶ COMMITTING ──ended("")──▶ handed off
             │ progress* │             │   └──ended(error)──▶ failed: the router replays
             │           └──abandon────┴──▶ LEAVING ──ended──▶ (gone)
             └──ended(error)──▶ failed

    A migrating sequence does not fail with its Push: it runs on here (see `moving`).

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
from kvrelay.core.kv import blocks_for
from kvrelay.core.ports import Outgoing, TransferPort
from kvrelay.core.request import Migrate
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
        self._begin(seq, seq.transfer_id, blocks)
        first_block = start.handoff.num_cached_tokens // size
        self._transfer.send(
            Outgoing(
                start.request_id, start.attempt, start.handoff, blocks, first_block, size, tenant=start.cache_salt
            )
        )
        if seq.num_computed:
            self._transfer.progress(seq.transfer_id, seq.num_computed)
        if seq.num_computed > start.handoff.num_cached_tokens:
            seq.leaves_since = seq.scheduled_at

    def migrate(self, seq: Sequence, migrate: Migrate) -> None:
        """The KV of what the receiver has reserved for is computed: push it while the sequence runs on."""
        handoff, size = migrate.handoff, self._cache.block_size
        blocks = tuple(seq.table.blocks[: blocks_for(migrate.num_tokens, size)])
        self._begin(seq, handoff.transfer_id, blocks)
        first_block = handoff.num_cached_tokens // size
        self._transfer.send(
            Outgoing(
                migrate.key.request_id, migrate.to_attempt, handoff, blocks, first_block, size, tells_level=True,
                tenant=seq.start.cache_salt,
            )
        )
        self._transfer.progress(handoff.transfer_id, migrate.num_tokens)

    def progress(self, seq: Sequence) -> None:
        self._transfer.progress(seq.transfer_id, seq.num_computed)

    def finish(self, seq: Sequence, drawn: Iterable[tuple[Choice, Token]]) -> None:
        """The prompt is computed and `drawn` are the choices that go on: send the rest and commit."""
        choices = tuple(ChoiceTokens(choice, (token,)) for choice, token in drawn)
        self.commit(seq, len(seq.tokens), choices)

    def commit(self, seq: Sequence, num_tokens: int, choices: tuple[ChoiceTokens, ...]) -> None:
        """The sequence has stopped: KV of `num_tokens` tokens is complete there when all has left."""
        assert seq.outgoing_id is not None, "only what has been opened can be committed"
        self._open[seq.outgoing_id].move(Stage.COMMITTING)
        seq.move(SeqState.SENDING)
        # The sender counts its slabs itself: it alone knows how it has cut them.
        self._transfer.finish(seq.outgoing_id, Commit(num_tokens, 0, choices))

    def find_streaming(self, transfer_id: TransferId) -> Sequence | None:
        """The sequence whose Push is open and has not been told to commit."""
        sending = self._open.get(transfer_id)
        return sending.seq if sending is not None and sending.stage is Stage.STREAMING else None

    @property
    def num_frozen(self) -> int:
        """Migrating sequences that have stopped: they may have to run on, and need their row then."""
        return sum(1 for seq in self if seq.state is SeqState.SENDING and seq.migrate is not None)

    def abandon(self, seq: Sequence) -> None:
        """Nobody wants this KV any more. Nothing to do if no Push is open, or it has been told already."""
        if seq.outgoing_id is not None and self._open[seq.outgoing_id].stage is not Stage.LEAVING:
            self._open[seq.outgoing_id].move(Stage.LEAVING)
            self._transfer.abort_send(seq.outgoing_id)

    def ended(self, transfer_id: TransferId) -> tuple[Sequence, bool] | None:
        """The transfer side has stopped reading. Returns the sequence and whether it had been told to commit."""
        sending = self._open.pop(transfer_id, None)
        if sending is None:
            return None
        self._cache.pool.unpin(sending.blocks)
        sending.seq.outgoing_id = None
        return sending.seq, sending.stage is Stage.COMMITTING

    def _begin(self, seq: Sequence, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self._cache.pool.pin(blocks)
        self._open[transfer_id] = Sending(seq, blocks)
        seq.outgoing_id = transfer_id
